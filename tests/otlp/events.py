"""Spans and log records in a form that can be compared: ours, and those of the golden files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.config import PointSettings, PolicySettings, TraceSettings
from gateway.model import Event, Losses, Signal
from gateway.otlp import json as otlp_json
from gateway.otlp.logs import flatten_logs
from gateway.otlp.traces import flatten_spans
from gateway.policy.rules import Rules
from tests.otlp.points import RECEIVED_NS, field

Request = ExportTraceServiceRequest | ExportLogsServiceRequest

FIRST_POINTS = PointSettings(hostname="<fingerprint>", version="", global_tags=(("host", "<gateway-host>"),))
"""The settings of ``golden/datakit-*.json``."""
TRACES, NO_POLICY = TraceSettings(), PolicySettings()


def parse(signal: str, request: Mapping[str, Any] | bytes, lenient: bool = True) -> Request:
    """A request in OTLP/JSON."""
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    parsed: Request = otlp_json.parse(Signal[signal.upper()], body, lenient, Losses())
    return parsed


def first_policy(customer_tags: str | list[str]) -> PolicySettings:
    """The policy of a case of ``golden/datakit-*.json``."""
    if customer_tags == "all":
        return PolicySettings(customer_tags_all=True)
    return PolicySettings(customer_tags=tuple(customer_tags))


def flatten(
    request: Request,
    points: PointSettings = FIRST_POINTS,
    traces: TraceSettings = TRACES,
    policy: PolicySettings = NO_POLICY,
    address: str | None = "127.0.0.1",
) -> tuple[list[Event], Losses]:
    """The events of a request of either signal."""
    if isinstance(request, ExportTraceServiceRequest):
        return flatten_spans(request, address, points, traces, Rules.compile(policy), RECEIVED_NS)
    return flatten_logs(request, address, points, traces, RECEIVED_NS)


def case_request(case: Mapping[str, Any]) -> Request:
    """The request of a case of ``golden/cases`` as it was sent. JSON is read by its signal's rules."""
    signal, body = case["request"]["signal"], bytes.fromhex(case["request"]["body_hex"])
    if body.startswith(b"{"):
        return parse(signal, body)
    kind = ExportTraceServiceRequest if signal == "traces" else ExportLogsServiceRequest
    return kind.FromString(body)


def case_settings(case: Mapping[str, Any]) -> tuple[PointSettings, TraceSettings, PolicySettings]:
    """The settings under which a case of ``golden/cases`` was made."""
    text = case["config"]["datakit_conf"]["global_host_tags"]
    tags = tomllib.loads(text.replace(",", "\n"))
    conf = tomllib.loads(case["config"]["input_conf"])["inputs"]["opentelemetry"][0]
    points = PointSettings(
        hostname="oracle-host", version="1.84.1", global_tags=tuple({"host": "oracle-host", **tags}.items())
    )
    traces = TraceSettings(
        split_service_name=conf.get("spilt_service_name", True),
        clean_message=conf["clean_message"],
        del_message=conf.get("del_message", False),
        json_marshaler=conf["jmarshaler"],
        compatible_ddtrace=conf.get("compatible_ddtrace", False),
        compatible_zhaoshang=conf.get("compatible_zhaoshang", False),
        sampling_rate=conf.get("sampler", {}).get("sampling_rate"),
        close_resource=tuple((name, tuple(patterns)) for name, patterns in conf.get("close_resource", {}).items()),
        tags=tuple(conf.get("tags", {}).items()),
        tracing_metrics=conf.get("tracing_metric_enable", False),
        log_max_kib=conf["log_max"],
    )
    policy = PolicySettings(tuple(conf.get("customer_tags", ())), conf.get("customer_tags_all", False))
    return points, traces, policy


def comparable(text: str) -> str:
    """``text``; of a JSON object the spacing does not count."""
    if not text.startswith("{"):
        return text
    return json.dumps(json.loads(text))


def ours(found: Iterable[Event]) -> list[tuple[object, ...]]:
    """Our events, in no order."""
    return sorted(
        (
            event.category.path,
            event.measurement,
            tuple(sorted(event.tags.items())),
            tuple(
                sorted(
                    (key, *field(comparable(value) if isinstance(value, str) else value))
                    for key, value in event.fields.items()
                )
            ),
            event.time_ns,
        )
        for event in found
    )


def theirs(found: Iterable[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    """The points of a golden file, in no order. A message given by its length is one character repeated."""
    return sorted(
        (
            point["category"],
            point["measurement"],
            tuple(sorted(point["tags"].items())),
            tuple(sorted((key, *_golden_field(*value)) for key, value in point["fields"].items())),
            point["time"],
        )
        for point in found
    )


def _golden_field(kind: str, value: Any) -> tuple[str, str]:
    if kind == "f":
        return kind, repr(float(value))
    if isinstance(value, dict) and "len" in value:
        value = value["head"][0] * value["len"]
    return kind, repr(comparable(value) if isinstance(value, str) else value)


def golden_points(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The points of a golden case, without those of ``tracing_metrics``. The fingerprint is HOST_VERSION."""
    text = json.dumps([point for point in case.get("points", []) if point["category"] != "metric"])
    points: list[dict[str, Any]] = json.loads(text.replace('"<fingerprint>"', '"<fingerprint>_"'))
    return points
