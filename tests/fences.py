"""Marks in the stream that a gateway sends: what comes out between two of them belongs to one request.

Guance gets the points of one category in the order of their requests, so a test can send many requests and wait once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.model import CATEGORY_OF, Event, Signal
from tests.running import Running

_FENCE = re.compile("fence_([0-9]+)")


def fence(signal: Signal, number: int) -> bytes:
    """A request that comes out behind those before it, and ends what belongs to them."""
    name = f"fence_{number}"
    if signal is Signal.METRICS:
        metrics = ExportMetricsServiceRequest()
        metric = metrics.resource_metrics.add().scope_metrics.add().metrics.add(name=name)
        metric.gauge.data_points.add(as_int=1, time_unix_nano=1_700_000_000_000_000_000)
        return metrics.SerializeToString()
    if signal is Signal.TRACES:
        traces = ExportTraceServiceRequest()
        traces.resource_spans.add().scope_spans.add().spans.add(name=name, trace_id=b"t" * 16, span_id=b"s" * 8)
        return traces.SerializeToString()
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.add().body.string_value = name
    return logs.SerializeToString()


def await_fence(gateway: Running, signal: Signal, number: int) -> None:
    """Wait until the fence of this number has come out."""
    name, category = f"fence_{number}".encode(), CATEGORY_OF[signal].path

    def is_there() -> bool:
        return any(
            request.category == category and re.search(name + b"[^0-9]", request.body + b" ")
            for request in gateway.guance.requests
        )

    assert gateway.guance.wait_for(is_there, 30), f"{name!r} did not come"


def between_fences(gateway: Running, signal: Signal) -> Iterator[tuple[int, list[Event], list[str]]]:
    """What came, up to each fence, with the fence's number. A package that came again counts once."""
    seen: set[str] = set()
    events: list[Event] = []
    lines: list[str] = []
    for request in list(gateway.guance.requests):
        if request.category != CATEGORY_OF[signal].path or request.package_id in seen:
            continue
        seen.add(request.package_id)
        found = request.events()
        for event in found:
            texts = [*event.fields, event.fields.get("resource"), event.fields.get("message")]
            number = next((match[1] for text in texts if (match := _FENCE.match(str(text)))), None)
            if number is None:
                events.append(event)
            else:
                yield int(number), events, lines
                events, lines = [], []
        for text in [] if found else request.body.decode().removesuffix("\n").split("\n"):
            if match := _FENCE.search(text):
                yield int(match[1]), events, lines
                events, lines = [], []
            else:
                lines.append(text)
