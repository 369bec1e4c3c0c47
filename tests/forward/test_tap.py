"""A tap shows what leaves: the same points as the encoder's, no more than its filter takes, and never in the way."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gateway.buffer.record import Record
from gateway.config import PointSettings, PolicySettings
from gateway.forward import tap
from gateway.forward.encode import Encoder
from gateway.forward.tap import Filter, Spelling, last_events, live_lines, show
from gateway.model import Category, Event, Series, Signal, Unsigned
from gateway.otlp.registry import Registry
from gateway.policy.rules import Rules
from gateway.series import TRANSIENT
from tests.buffer import made
from tests.forward.made import numbers, record_of, spans, spelled, spelled_events
from tests.otlp.strategies import requests

WHITELIST = Rules.compile(PolicySettings(customer_tags=("hw.id", "reg:^x")))


def everything(series: Series) -> Series:
    return series


@pytest.mark.parametrize("parity", ["datakit", "strict"])
@pytest.mark.parametrize("max_series", [1, 1000])
@given(st.lists(requests(), min_size=1, max_size=2))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_it_shows_what_the_encoder_sends(
    parity: str, max_series: int, found: list[ExportMetricsServiceRequest]
) -> None:
    registry = Registry(PointSettings(), max_series)
    encoder = Encoder(WHITELIST.apply, parity, registry.table)
    spelling = Spelling(WHITELIST.apply, parity, Filter())
    for batch, request in enumerate([*found, *found], 1):
        record = record_of(registry, request.SerializeToString(), batch)
        encoder.define(record.definitions)
        encoder.add(record.body)
        sent = [text for body, _ in encoder.finish() for text in spelled(body)]
        assert spelled_events(list(spelling.events(record))) == sent


def test_spans_are_shown_too() -> None:
    found = list(Spelling(everything, "datakit", Filter()).events(spans(1, 2)))
    assert spelled_events(found) == spelled_events([made.span(1000), made.span(1001)])


FILTERS = [
    (Filter(), ["double.metric", "trace_id"]),
    (Filter(metric="double.*"), ["double.metric"]),
    (Filter(metric="DOUBLE.*"), []),
    (Filter(metric="int.*"), []),
    (Filter(category=Category.TRACING), ["trace_id"]),
    (Filter(category=Category.LOGGING), []),
    (Filter(tags=(("host", "node-*"),)), ["double.metric"]),
    (Filter(tags=(("host", "node-7"), ("gpu", "7"))), ["double.metric"]),
    (Filter(tags=(("host", "node-7"), ("gpu", "8"))), []),
    (Filter(tags=(("service", "shop"),)), ["trace_id"]),
    (Filter(tags=(("duration", "1000"),)), ["trace_id"]),
    (Filter(tags=(("nothing", "*"),)), []),
]


@pytest.mark.parametrize(("wanted", "names"), FILTERS, ids=[str(wanted) for wanted, _ in FILTERS])
def test_a_filter_takes_by_name_tag_and_category(wanted: Filter, names: list[str]) -> None:
    spelling = Spelling(everything, "datakit", wanted)
    found = [event for record in (numbers(1, 1), spans(1)) for event in spelling.events(record)]
    assert [next(iter(event.fields)) for event in found] == names


def transient(batch: int, number: int) -> Record:
    defined = ((TRANSIENT, made.series(number).pack()),)
    body = made.metrics([made.Number(TRANSIENT, made.T0, float(batch))]).body
    return Record(1, batch, made.T0, Signal.METRICS, 1, defined, body)


def test_a_series_of_one_record_is_not_taken_for_that_of_another() -> None:
    spelling = Spelling(everything, "datakit", Filter(tags=(("host", "node-1"),)))
    assert len(list(spelling.events(transient(1, 1)))) == 1
    assert not list(spelling.events(transient(2, 2)))


def test_ids_mean_something_within_a_segment_only() -> None:
    spelling = Spelling(everything, "datakit", Filter())
    assert len(list(spelling.events(numbers(1)))) == 3
    unknown = numbers(2, segment=2)
    record = Record(2, 2, unknown.received_ns, unknown.signal, 3, (), unknown.body)
    assert not list(spelling.events(record))


def test_the_last_points_are_the_last() -> None:
    spelling = Spelling(everything, "datakit", Filter())
    found = last_events([spans(1, 5), spans(2, 5)], spelling, 7)
    assert [event.fields["duration"] for event in found] == [1003, 1004, 2000, 2001, 2002, 2003, 2004]
    assert last_events([], spelling, 7) == []


def test_what_comes_too_fast_is_skipped_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "MAX_POINTS_S", 10)
    clock = [0.0]
    monkeypatch.setattr(tap.time, "monotonic", lambda: clock[0])
    batches = iter([*(spans(batch, 5) for batch in range(1, 9)), None, spans(9, 5)])

    def following() -> Record | None:
        record = next(batches)
        if record is None:
            clock[0] += 1.5
        return record

    lines = live_lines(following, Spelling(everything, "datakit", Filter()), False)
    found = list(islice(lines, 17))
    assert [line.startswith("opentelemetry,") for line in found[:10]] == [True] * 10
    assert found[10].startswith("# 6 batches skipped, over 10 points/s")
    assert found[11] == ""
    assert [line.startswith("opentelemetry,") for line in found[12:]] == [True] * 5


def test_a_record_that_defines_series_is_never_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later points of these series could not be shown otherwise."""
    monkeypatch.setattr(tap, "MAX_POINTS_S", 1)
    batches = iter([spans(1, 5), numbers(2, 1), None])
    lines = live_lines(lambda: next(batches), Spelling(everything, "datakit", Filter()), False)
    assert [line.partition(",")[0] for line in islice(lines, 7)] == ["opentelemetry"] * 5 + ["otel_service", ""]


def test_a_point_is_a_line_or_one_object() -> None:
    event = Event(Category.METRIC, "otel_service", {"host": "h"}, {"n": Unsigned(2**64 - 1), "x": 1.5, "b": b"\xff"}, 5)
    assert show(event, False) == 'otel_service,host=h b="/w==",n=18446744073709551615u,x=1.5 5'
    assert json.loads(show(event, True)) == {
        "category": "metric",
        "measurement": "otel_service",
        "tags": {"host": "h"},
        "fields": {"n": 2**64 - 1, "x": 1.5, "b": "\ufffd"},
        "time": 5,
    }
    empty = Event(Category.METRIC, "otel_service", {}, {}, 5)
    assert json.loads(show(empty, False))["fields"] == {}
