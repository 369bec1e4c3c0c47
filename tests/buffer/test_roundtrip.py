"""What goes in comes out: through the journal, the index, the sealed files and the follower, and in SQL."""

from __future__ import annotations

import struct
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.buffer import question
from gateway.buffer.reader import follow
from gateway.buffer.record import Record
from gateway.buffer.tables import SCHEMAS
from gateway.buffer.writer import Writer
from gateway.model import MAX_TIME_NS, Batch, Category, Event, Kind, Signal, Unsigned
from tests.buffer.made import (
    Distribution,
    Number,
    Reading,
    Running,
    events,
    heads,
    metrics,
    running,
    series,
    span,
    wait_for,
)

KNOWN = [
    series(0, Kind.DOUBLE),
    series(1, Kind.INT),
    series(2, Kind.HISTOGRAM),
    series(3, Kind.EXPONENTIAL),
    series(4, Kind.SUMMARY),
    series(5, Kind.DOUBLE, tags=(("b", "ü" * 300), ("a", ""), ("host", "x'y"))),
    series(6, Kind.HISTOGRAM, bounds=()),
]

times = st.integers(0, MAX_TIME_NS)
starts = st.one_of(st.just(0), times)
doubles = st.floats(allow_nan=False, allow_infinity=False)
optional = st.none() | doubles
uint64 = st.integers(0, 2**64 - 1)
numbers = st.one_of(
    st.builds(Number, st.sampled_from([0, 5]), times, doubles, starts),
    st.builds(Number, st.just(1), times, st.integers(-(2**63), 2**63 - 1), starts),
)
distributions = st.one_of(
    st.builds(
        Distribution,
        st.just(2),
        times,
        uint64,
        st.one_of(st.just(()), st.tuples(*[uint64] * 4)),
        st.just(()),
        optional,
        optional,
        optional,
        starts,
    ),
    st.lists(doubles, max_size=5, unique=True).flatmap(
        lambda bounds: st.builds(
            Distribution,
            st.just(3),
            times,
            uint64,
            st.tuples(*[uint64] * (len(bounds) + 1)),
            st.just(tuple(sorted(bounds))),
            optional,
            optional,
            optional,
            starts,
        )
    ),
    st.builds(Distribution, st.sampled_from([4, 6]), times, uint64, sum=optional, start=starts),
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    uint64.map(Unsigned),
    doubles,
    texts,
    st.binary(max_size=10),
)
spans = st.builds(
    Event,
    st.just(Category.TRACING),
    texts,
    st.dictionaries(texts.map("t".__add__), texts, max_size=3),
    st.dictionaries(texts.map("f".__add__), values, max_size=3),
    times,
)
batches = st.one_of(
    st.lists(st.one_of(numbers, distributions), max_size=6).map(metrics),
    st.lists(spans, max_size=3).map(events),
    st.lists(spans.map(lambda each: replace(each, category=Category.METRIC)), max_size=3).map(
        lambda found: events(found, Signal.METRICS)
    ),
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(batches, min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_written_is_followed_and_asked_for_the_same_while_open_and_when_sealed(
    segments: list[list[Batch]],
) -> None:
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), KNOWN) as buffer:
        for number, written in enumerate(segments, 1):
            last = buffer.put(*written)
            if number < len(segments):
                buffer.roll()
        live = read(buffer.data_dir, buffer.writer, last)
        asked_open = ask_everything(buffer)
        assert [rows for _, rows in live] == [rows_of(batch) for written in segments for batch in written]
        buffer.roll()
        for number in range(1, len(segments) + 1):
            wait_without(buffer.sealed(number).journal)
        sealed = read(buffer.data_dir, buffer.writer, last)
        assert [head for head, _ in sealed] == [head for head, _ in live]
        assert [rows for _, rows in sealed] == [rows for _, rows in live]
        assert ask_everything(buffer) == asked_open


def wait_without(journal: Path) -> None:
    wait_for(lambda: not journal.exists())


def rows_of(batch: Batch) -> list[tuple[object, ...]]:
    """The rows of a batch as ``Reading.rows`` gives them."""
    definitions = tuple((number, each.pack()) for number, each in enumerate(KNOWN))
    return Reading().rows(Record(1, 1, 0, batch.signal, batch.points, definitions, batch.body))


def read(data_dir: Path, writer: Writer, last: int) -> list[tuple[object, list[tuple[object, ...]]]]:
    follower = follow(data_dir, writer, 0)
    reading = Reading()
    found: list[tuple[object, list[tuple[object, ...]]]] = []
    while follower.position < last:
        record = follower.next(5)
        assert record is not None
        found.append((heads(record), reading.rows(record)))
    assert follower.next(0) is None
    assert follower.lost_batches == 0
    return found


QUESTIONS = (
    "SELECT batch, received, signal, points, bytes FROM batches",
    "SELECT batch, time, value, int_value, uint_value, start_time, measurement, field, tags, key FROM samples",
    "SELECT batch, category, time, source, service, status, trace_id, tags, fields, point FROM events",
    "SELECT segment, key, measurement, field, tags, kind, unit, temporality, monotonic, bounds, first_seen FROM series",
    "SELECT d.batch, s.key, d.count, d.buckets, d.bounds, d.flags FROM distributions d JOIN series s "
    "ON d.segment = s.segment AND d.series = s.id",
)


def ask_everything(buffer: Running) -> list[list[str]]:
    return [
        sorted(map(repr, question.ask(buffer.catalog, each, catch_up=buffer.indexer.catch_up).rows()))
        for each in QUESTIONS
    ]


@settings(max_examples=15, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=60))
def test_sql_sees_every_bit_and_every_nanosecond(rows: list[Number]) -> None:
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), KNOWN) as buffer:
        buffer.put(metrics(rows))
        answer = question.ask(
            buffer.catalog,
            "SELECT s.key, epoch_ns(time), value, int_value, epoch_ns(start_time) FROM samples s",
            catch_up=buffer.indexer.catch_up,
        )
        expected = [
            (
                KNOWN[row.series].key,
                row.time,
                struct.pack("<d", row.value) if isinstance(row.value, float) else None,
                row.value if isinstance(row.value, int) else None,
                row.start or None,
            )
            for row in rows
        ]
        found = [
            (key, time, None if value is None else struct.pack("<d", value), int_value, start)
            for key, time, value, int_value, start in answer.rows()
        ]
        assert sorted(found, key=repr) == sorted(expected, key=repr)


def test_the_schema_in_sql_and_the_columns_in_arrow_are_the_same(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Number(0, 1, 1.0)]))
        for name, schema in SCHEMAS.items():
            answer = question.ask(buffer.catalog, f"SELECT * FROM {name} LIMIT 0", catch_up=buffer.indexer.catch_up)
            assert answer.table.column_names == ["segment", *schema.names]
            for column in schema:
                found = answer.table.schema.field(column.name).type
                assert str(found).replace("child", "element") == str(column.type) or pa.types.is_nested(found)


def test_a_signal_is_followed_alone_through_open_and_sealed_segments(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        for _ in range(2):
            buffer.put(metrics([Number(0, 1, 1.0)]), events([span(1)]), metrics([Number(1, 1, 1)]))
            buffer.roll()
        buffer.sealed(1)
        last = buffer.put(events([span(2)]), events([span(3)], Signal.LOGS))
        follower = follow(tmp_path, buffer.writer, 0, Signal.TRACES)
        found = [follower.next(5) for _ in range(3)]
        assert [record.batch for record in found if record is not None] == [2, 5, 7]
        assert follower.next(0) is None
        assert follower.position == last
