"""What the encoder writes is what the plain spelling says, whatever the rows; and no body is larger than it may be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gateway.buffer.record import Record
from gateway.config import PointSettings, PolicySettings
from gateway.forward.encode import Encoder
from gateway.forward.package import point_ends
from gateway.model import Category, Event, Kind, Unsigned
from gateway.otlp.plain import points, read
from gateway.otlp.point import decode_points, encode_point
from gateway.otlp.registry import Registry
from gateway.policy.rules import Rules
from gateway.series import TRANSIENT, SeriesTable
from tests.buffer import made
from tests.forward.made import RECEIVED_NS, SENDER, framed, record_of, spans, spelled, spelled_events
from tests.otlp.strategies import requests

TAGS = (("host", "gateway"), ("dc", "lab1"))
PARITIES = {
    "datakit": PointSettings(global_tags=TAGS),
    "strict": PointSettings(parity="strict", host_tag="resource", global_tags=TAGS),
}
WHITELIST = Rules.compile(PolicySettings(customer_tags=("hw.id", "reg:^x")))
EVERY = Rules.compile(PolicySettings())

many = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
parities = pytest.mark.parametrize("parity", PARITIES)


def wanted(request: ExportMetricsServiceRequest, parity: str, rules: Rules = EVERY) -> list[str]:
    """What leaves for a request, by the plain reading: numbers first, then distributions, as they lie in a record."""
    rows, _ = read(request, SENDER, PARITIES[parity], RECEIVED_NS)
    rows = [replace(row, series=rules.apply(row.series)) if rules.touches_metrics else row for row in rows]
    rows.sort(key=lambda row: row.value is None)
    return spelled_events([event for row in rows for event in points(row, parity)])


def encoded(encoder: Encoder, record: Record) -> list[tuple[bytes, int]]:
    encoder.define(record.definitions)
    encoder.add(record.body)
    return encoder.finish()


def spelled_bodies(bodies: list[tuple[bytes, int]]) -> list[str]:
    for body, count in bodies:
        assert len(point_ends(body)) == count
    return [text for body, _ in bodies for text in spelled(body)]


@parities
@pytest.mark.parametrize("rules", [EVERY, WHITELIST], ids=["every tag", "whitelist"])
@many
@given(st.lists(requests(), min_size=1, max_size=3))
def test_it_writes_what_the_plain_spelling_says(
    parity: str, rules: Rules, found: list[ExportMetricsServiceRequest]
) -> None:
    registry = Registry(PARITIES[parity], 1000)
    encoder = Encoder(rules.apply if rules.touches_metrics else None, parity, registry.table)
    for at, request in enumerate([*found, *found]):
        record = record_of(registry, request.SerializeToString(), at + 1)
        assert spelled_bodies(encoded(encoder, record)) == wanted(request, parity, rules)
    assert not encoder.oversized


@parities
@many
@given(st.lists(requests(), min_size=1, max_size=3))
def test_series_of_one_record_only_are_as_good_as_others(parity: str, found: list[ExportMetricsServiceRequest]) -> None:
    registry = Registry(PARITIES[parity], 1)
    encoder = Encoder(None, parity, registry.table)
    for request in [*found, *found]:
        record = record_of(registry, request.SerializeToString())
        assert spelled_bodies(encoded(encoder, record)) == wanted(request, parity)


@many
@given(requests(), st.integers(1, 2000))
def test_no_body_is_larger_than_it_may_be_and_nothing_is_lost(
    request: ExportMetricsServiceRequest, max_body_bytes: int
) -> None:
    registry = Registry(PARITIES["datakit"], 1000)
    encoder = Encoder(None, "datakit", registry.table, max_body_bytes)
    bodies = encoded(encoder, record_of(registry, request.SerializeToString()))
    assert all(0 < len(body) <= max_body_bytes for body, _ in bodies)
    assert all(len(raw) > max_body_bytes and len(point_ends(raw)) == 1 for raw in encoder.oversized)
    found = spelled_bodies(bodies) + [text for raw in encoder.oversized for text in spelled(raw)]
    assert sorted(found) == sorted(wanted(request, "datakit"))
    # as full as can be: no body's first point would have gone into the one before
    if not encoder.oversized:
        for (before, _), (after, _) in pairwise(bodies):
            assert len(before) + point_ends(after)[0] > max_body_bytes


@many
@given(st.lists(requests(), min_size=1, max_size=3))
def test_a_record_that_came_again_is_written_in_the_same_bytes(found: list[ExportMetricsServiceRequest]) -> None:
    """Package ids stay over a crash only because bodies do."""
    registry = Registry(PARITIES["datakit"], 2)
    records = [record_of(registry, request.SerializeToString(), at) for at, request in enumerate(found)]
    once, again = Encoder(None, "datakit", registry.table, 700), Encoder(None, "datakit", None, 700)
    for encoder in (once, again):
        for record in records:
            encoder.define(record.definitions)
            encoder.add(record.body)
    assert once.finish() == again.finish()
    assert once.oversized == again.oversized


DIGITS = {
    1e300: "1" + "0" * 300,
    1e126: "1" + "0" * 126,
    1e127: "1" + "0" * 127,
    -1e300: "-1" + "0" * 300,
    5e-324: "0." + "0" * 323 + "5",
    1.7976931348623157e308: "17976931348623157" + "0" * 292,
}


@pytest.mark.parametrize("bound", DIGITS)
def test_a_bound_of_many_digits_is_written_in_full(bound: float) -> None:
    """``le`` has no exponent, and the length of a text of 128 bytes takes two bytes."""
    series = made.series(0, Kind.HISTOGRAM, bounds=(bound,))
    encoder = Encoder(None, "datakit")
    encoder.define([(0, series.pack())])
    encoder.add(made.metrics([made.Distribution(0, made.T0, 3, (1, 2), sum=1.0)]).body)
    ((body, count),) = encoder.finish()
    assert count == 3
    assert [event.tags.get("le") for event in decode_points(body, Category.METRIC)] == [None, DIGITS[bound], "+Inf"]


def test_a_copy_of_a_definition_is_shared_with_the_table_that_has_it() -> None:
    table = SeriesTable()
    definitions = [(number, made.series(number).pack()) for number in range(1000)]
    for number, definition in definitions:
        table.define(number, definition)
    before = table.size_bytes
    sharing = Encoder(None, "datakit", table)
    sharing.define(definitions)
    sharing.add(made.metrics([made.Number(5, made.T0, 2.0)]).body)
    table.forget()
    sharing.add(made.metrics([made.Number(6, made.T0, 2.0)]).body)
    ((body, _),) = sharing.finish()
    assert before > 0
    assert ["node-5" in text for text in spelled(body)] == [True, False]
    assert "node-6" in spelled(body)[1]


def test_after_a_new_segment_ids_mean_something_else() -> None:
    encoder = Encoder(None, "datakit")
    row = made.metrics([made.Number(0, made.T0, 1.0)]).body
    encoder.define([(0, made.series(1).pack())])
    encoder.add(row)
    encoder.forget()
    with pytest.raises(KeyError):
        encoder.add(row)
    encoder.define([(0, made.series(2).pack())])
    encoder.add(row)
    ((body, _),) = encoder.finish()
    assert ["node-1" in text for text in spelled(body)] == [True, False]


def test_a_series_of_one_record_is_not_known_to_the_next() -> None:
    encoder = Encoder(None, "datakit")
    row = made.metrics([made.Number(TRANSIENT, made.T0, 1.0)]).body
    encoder.define([(TRANSIENT, made.series(1).pack())])
    encoder.add(row)
    encoder.define([])
    with pytest.raises(KeyError):
        encoder.add(row)


@pytest.mark.parametrize("size", [0, 1, 23, 24, 30, -1, -8])
def test_a_body_shorter_than_it_says_is_an_error(size: int) -> None:
    """The journal's checksums keep this from happening; if it does, no byte behind the body is read."""
    series = made.series(0, Kind.HISTOGRAM)
    encoder = Encoder(None, "datakit")
    encoder.define([(0, series.pack()), (1, made.series(1).pack())])
    rows = [made.Number(1, made.T0, 1.0), made.Distribution(0, made.T0, 3, (1, 0, 1, 1), sum=1.0)]
    body = made.metrics(rows).body
    encoder.add(body)
    encoder.finish()
    with pytest.raises((ValueError, IndexError)):
        encoder.add(body[:size])
    events = spans(1, 3).body
    encoder.add(events)
    with pytest.raises((ValueError, IndexError)):
        encoder.add(events[:size])


def test_more_buckets_than_bounds_are_an_error() -> None:
    encoder = Encoder(None, "datakit")
    encoder.define([(0, made.series(0, Kind.HISTOGRAM).pack())])
    with pytest.raises(ValueError, match="buckets"):
        encoder.add(made.metrics([made.Distribution(0, made.T0, 3, (1, 0), sum=1.0)]).body)


def test_events_leave_as_they_were_encoded() -> None:
    encoder = Encoder(WHITELIST.apply, "strict")
    record = spans(3, 5, note="käse\n", large="x" * 300)
    ((body, count),) = encoded(encoder, record)
    assert count == 5
    assert spelled(body, Category.TRACING) == spelled_events(
        [made.span(3000 + at, note="käse\n", large="x" * 300) for at in range(5)]
    )


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(50, 3000))
@settings(max_examples=60, deadline=None)
@example([0], 50)
def test_events_of_any_size_are_cut_into_bodies(sizes: list[int], max_body_bytes: int) -> None:
    found = [made.span(at, text="x" * size) for at, size in enumerate(sizes)]
    encoder = Encoder(None, "datakit", None, max_body_bytes)
    encoder.add(made.events(found).body)
    bodies = encoder.finish()
    assert all(len(body) <= max_body_bytes for body, _ in bodies)
    arrived = b"".join([*(body for body, _ in bodies), *encoder.oversized])
    assert sorted(spelled(arrived, Category.TRACING)) == sorted(spelled_events(found))
    large = [
        text for event, text in zip(found, spelled_events(found), strict=True) if framed_size(event) > max_body_bytes
    ]
    assert [text for raw in encoder.oversized for text in spelled(raw, Category.TRACING)] == large


def framed_size(event: Event) -> int:
    return len(framed(encode_point(event)))


def test_bodies_that_are_full_can_be_had_before_the_end() -> None:
    encoder = Encoder(None, "datakit", None, 1000)
    encoder.define([(0, made.series(0).pack())])
    encoder.add(made.metrics([made.Number(0, made.T0 + at, float(at)) for at in range(100)]).body)
    full = encoder.full()
    assert full
    assert not encoder.full()
    rest = encoder.finish()
    assert len(rest) == 1
    assert sum(count for _, count in full + rest) == 100
    assert not encoder.finish()


def test_large_counts_stay_unsigned() -> None:
    encoder = Encoder(None, "datakit")
    encoder.define([(0, made.series(0, Kind.HISTOGRAM, bounds=(1.0,)).pack())])
    encoder.add(made.metrics([made.Distribution(0, made.T0, 2**64 - 1, (2**64 - 1, 7), sum=1.0)]).body)
    ((body, _),) = encoder.finish()
    name = "histogram.metric"
    wanted_points = [
        {f"{name}_min": 0.0, f"{name}_max": 0.0, f"{name}_count": Unsigned(2**64 - 1), f"{name}_sum": 1.0},
        {f"{name}_bucket": Unsigned(2**64 - 1)},
        {f"{name}_bucket": Unsigned(6)},
    ]
    tags = dict(made.series(0).tags)
    les = [{}, {"le": "1"}, {"le": "+Inf"}]
    assert spelled(body) == spelled_events(
        [
            Event(Category.METRIC, "otel_service", tags | le, fields, made.T0)
            for le, fields in zip(les, wanted_points, strict=True)
        ]
    )
