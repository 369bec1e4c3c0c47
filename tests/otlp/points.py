"""Points in a form that can be compared: ours, and those of the golden files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gateway.config import PointSettings
from gateway.model import Event, FieldValue, Losses, Signal, Unsigned
from gateway.otlp import json as otlp_json
from gateway.otlp.plain import points, read

RECEIVED_NS = 1_800_000_000_000_000_001
GOLDEN = PointSettings(global_tags=(("host", "<gateway-host>"),))
STRICT = PointSettings(parity="strict", global_tags=(("host", "<gateway-host>"),))


def golden_settings(case: Mapping[str, Any]) -> PointSettings:
    """The settings under which a case of ``golden/cases`` was made."""
    text = case["config"]["datakit_conf"]["global_host_tags"]
    tags = dict(part.strip().split("=") for part in text.split(",")) if text else {}
    tags = {key.strip(): value.strip('"') for key, value in tags.items()}
    return PointSettings(global_tags=tuple({"host": "oracle-host", **tags}.items()))


def golden_request(case: Mapping[str, Any]) -> ExportMetricsServiceRequest:
    """The request of a case of ``golden/cases`` as it was sent."""
    body = bytes.fromhex(case["request"]["body_hex"])
    if body.startswith(b"{"):
        return parse(body)
    return ExportMetricsServiceRequest.FromString(body)


def parse(body: bytes, lenient: bool = True) -> ExportMetricsServiceRequest:
    """A request of metrics in OTLP/JSON."""
    request = otlp_json.parse(Signal.METRICS, body, lenient, Losses())
    assert isinstance(request, ExportMetricsServiceRequest)
    return request


def events(request: Message, settings: PointSettings) -> tuple[list[Event], Losses]:
    """What the plain reading makes of a request of metrics."""
    rows, losses = read(request, "127.0.0.1", settings, RECEIVED_NS)
    return [event for row in rows for event in points(row, settings.parity)], losses


def field(value: FieldValue) -> tuple[str, str]:
    """Type and value of a field. Floats by ``repr``: -0.0 is not 0.0, and NaN is NaN."""
    kind = "u" if isinstance(value, Unsigned) else {bool: "b", int: "i", float: "f", str: "s"}[type(value)]
    return kind, repr(int(value) if isinstance(value, Unsigned) else value)


def ours(found: Iterable[Event]) -> list[tuple[object, ...]]:
    """Our points, in no order."""
    return sorted(
        (
            event.category.path,
            event.measurement,
            tuple(sorted(event.tags.items())),
            tuple(sorted((key, *field(value)) for key, value in event.fields.items())),
            event.time_ns,
        )
        for event in found
    )


def theirs(found: Iterable[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    """The points of a golden file, in no order."""
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
    return kind, repr(float(value) if kind == "f" else value)


def golden_form(found: Iterable[Event]) -> list[dict[str, Any]]:
    """Our points as the golden files write them."""
    return [
        {
            "category": event.category.path,
            "measurement": event.measurement,
            "tags": dict(event.tags),
            "fields": {key: list(_written(value)) for key, value in event.fields.items()},
            "time": event.time_ns,
        }
        for event in found
    ]


def _written(value: FieldValue) -> tuple[str, object]:
    kind, text = field(value)
    return kind, text if kind == "f" else int(value) if kind in "iu" else value


def line(event: Event) -> str:
    """A metric point in line protocol, as DataKit writes it (details, 8.2)."""
    tags = "".join(f",{_escaped(key)}={_escaped(value)}" for key, value in sorted(event.tags.items()) if value)
    fields = ",".join(f"{_escaped(key)}={_line_value(value)}" for key, value in sorted(event.fields.items()))
    return f"{event.measurement}{tags} {fields} {event.time_ns}"


def _escaped(text: str) -> str:
    return text.replace(",", "\\,").replace("=", "\\=").replace(" ", "\\ ")


def _line_value(value: FieldValue) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else repr(value)
    return f"{int(value)}{'u' if isinstance(value, Unsigned) else 'i'}"


def by_le(found: Sequence[Event], name: str) -> dict[str, int]:
    """The buckets of one histogram: count by ``le``; fails where two have the same."""
    buckets = [
        (event.tags["le"], event.fields[f"{name}_bucket"]) for event in found if f"{name}_bucket" in event.fields
    ]
    assert len(dict(buckets)) == len(buckets), buckets
    return {le: int(value) for le, value in buckets if isinstance(value, int)}


def only(found: Sequence[Event], name: str) -> Event:
    """The one point with the field ``name``."""
    (event,) = [event for event in found if name in event.fields]
    return event
