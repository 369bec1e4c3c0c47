"""Fuzz the reader of metrics against upb: ``python -m fuzz.fuzz_wire [libFuzzer options] [CORPUS]``.

Every input is either refused by both readers or means the same rows to both. A crash is libFuzzer's to notice, and so
are a hang and memory that grows: see ``LIMITS``. Half of the mutations are libFuzzer's own, on bytes; the others take
an input that is a request and write it anew in an unusual way, so that the way into the deep parts stays open.
Needs ``pip install locum[fuzz]``. Without a corpus it starts from the golden requests.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["gateway.otlp"]):
    from gateway.config import PointSettings
    from gateway.otlp.registry import Registry
    from tests.otlp.agreement import agree

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from tests.data import golden_cases
from tests.otlp.strategies import oddly_encoded

LIMITS = ("-timeout=10", "-rss_limit_mb=512", "-malloc_limit_mb=256", "-max_len=4096", "-len_control=0")
TAGS = (("host", "gateway"),)


class Target:
    """Both parities in turn, each with a registry that is soon full, so that both ways past it are taken."""

    def __init__(self) -> None:
        self.registries = [
            Registry(PointSettings(parity=parity, global_tags=TAGS), 1000) for parity in ("datakit", "strict")
        ]

    def __call__(self, body: bytes) -> None:
        for registry in self.registries:
            agree(registry, body)


def mutate(body: bytes, max_size: int, seed: int) -> bytes:
    """Another input out of ``body``."""
    random = Random(seed)
    if random.random() < 0.5:
        try:
            body = oddly_encoded(ExportMetricsServiceRequest.FromString(body), random)[:max_size]
        except DecodeError:
            pass
        if random.random() < 0.5:
            return body
    return bytes(atheris.Mutate(body, len(body) if random.random() < 0.5 and body else max_size))


def golden_corpus() -> str:
    """A folder of the golden requests that are metrics."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-wire-"))
    for case in golden_cases("m_", "p_lineproto", "pp_metric"):
        if case["request"]["signal"] == "metrics":
            (folder / case["name"]).write_bytes(bytes.fromhex(case["request"]["body_hex"]))
    return str(folder)


def main() -> None:
    arguments = sys.argv[1:]
    if all(argument.startswith("-") for argument in arguments):
        arguments.append(golden_corpus())
    atheris.Setup([sys.argv[0], *LIMITS, *arguments], Target(), custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
