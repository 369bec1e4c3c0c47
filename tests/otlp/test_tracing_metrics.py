"""The metrics made of spans, against those of a real DataKit."""

from __future__ import annotations

from typing import Any

from gateway.config import PointSettings
from gateway.model import Category, Event, FieldValue, Unsigned
from gateway.otlp.tracing_metrics import MAX_LABEL_SETS, TracingMetrics
from tests.data import golden_cases
from tests.otlp.events import case_request, case_settings, flatten, ours, theirs

NOW = 1_800_000_000_000_000_000


def span(duration: int, tags: dict[str, str] | None = None, **fields: FieldValue) -> Event:
    own = {"service": "svc", "source": "opentelemetry", "status": "ok", **(tags or {})}
    return Event(Category.TRACING, "opentelemetry", own, {"resource": "r", "duration": duration, **fields}, 1)


def values(events: list[Event], name: str) -> list[Any]:
    return [event.fields[name] for event in events if name in event.fields]


def test_the_points_of_a_golden_minute_are_datakits_points() -> None:
    (found,) = golden_cases("tm_tracing_metrics")
    points, traces, policy = case_settings(found)
    spans, _ = flatten(case_request(found), points, traces, policy)
    metrics = TracingMetrics(points)
    metrics.observe(spans)
    wanted = [{**point, "time": NOW} for point in found["points"] if point["category"] == "metric"]
    assert ours(metrics.drain(NOW)) == theirs(wanted)
    assert metrics.drain(NOW) == []


def test_buckets_hold_their_bound_and_infinity_only_where_something_is_beyond() -> None:
    metrics = TracingMetrics(PointSettings())
    metrics.observe([span(100), span(101), span(-5)])
    events = metrics.drain(NOW)
    assert values(events, "latency_bucket")[:2] == [Unsigned(2), Unsigned(3)]
    assert "+Inf" not in [event.tags.get("le") for event in events]
    metrics.observe([span(300_000_001)])
    events = metrics.drain(NOW)
    assert [(event.tags["le"], event.fields["latency_bucket"]) for event in events if "le" in event.tags][-1] == (
        "+Inf",
        1,
    )


def test_apdex_counts_http_spans_by_their_time() -> None:
    metrics = TracingMetrics(PointSettings())
    http = {"http_status_code": "200"}
    metrics.observe(
        [span(2_000_000, http), span(8_000_000, http), span(8_000_000, http), span(8_000_001, http), span(1)]
    )
    assert values(metrics.drain(NOW), "apdex") == [0.5]


def test_labels_are_changed_by_the_two_lists() -> None:
    metrics = TracingMetrics(PointSettings(), whitelist=("model.name",), blacklist=("status", "host"))
    metrics.observe([span(1, model_name="llama")])
    tags = metrics.drain(NOW)[0].tags
    assert tags["model_name"] == "llama"
    assert tags["resource"] == "r"
    assert not {"status", "host"} & tags.keys()


def test_label_sets_without_end_are_counted_and_not_kept() -> None:
    metrics = TracingMetrics(PointSettings())
    metrics.observe(span(1, {"service": str(number)}) for number in range(MAX_LABEL_SETS + 3))
    assert metrics.overflowed == 3
    assert len(values(metrics.drain(NOW), "hits")) == MAX_LABEL_SETS
