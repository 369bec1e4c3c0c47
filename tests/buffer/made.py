"""Batches for tests of the buffer, and a running buffer made of its real parts."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gateway.buffer.catalog import Catalog
from gateway.buffer.indexer import Indexer
from gateway.buffer.record import (
    HAS_MAX,
    HAS_MIN,
    HAS_SUM,
    Distributions,
    Numbers,
    Record,
    pack_columns,
    pack_events,
    read_body,
)
from gateway.buffer.segment import Segment, State, segments
from gateway.buffer.writer import Writer
from gateway.config import BufferSettings
from gateway.metrics import Meters
from gateway.model import Batch, Category, Event, Kind, Losses, Series, Signal, Temporality
from gateway.otlp.point import encode_point
from gateway.series import SeriesTable

T0 = 1_760_000_000_000_000_000


def series(number: int = 0, kind: Kind = Kind.DOUBLE, **changes: Any) -> Series:
    """A series that differs from that of every other ``number``."""
    bounds = (0.25, 5.0, 1e21) if kind is Kind.HISTOGRAM else ()
    tags = (("host", f"node-{number}"), ("gpu", str(number % 8)), ("unit", "1"))
    facts: dict[str, Any] = {"unit": "1", "temporality": Temporality.CUMULATIVE, "bounds": bounds} | changes
    return Series("otel_service", f"{kind.name.lower()}.metric", facts.pop("tags", tags), kind, **facts)


@dataclass(frozen=True)
class Number:
    """A row of the numbers."""

    series: int
    time: int
    value: float | int
    start: int = 0

    @property
    def bits(self) -> int:
        packed = struct.pack("<d", self.value) if isinstance(self.value, float) else struct.pack("<q", self.value)
        return int.from_bytes(packed, "little")


@dataclass(frozen=True)
class Distribution:
    """A row of the distributions. None: not sent."""

    series: int
    time: int
    count: int
    buckets: tuple[int, ...] = ()
    bounds: tuple[float, ...] = ()
    sum: float | None = None
    min: float | None = None
    max: float | None = None
    start: int = 0


Rows = Sequence[Number | Distribution]


def metrics(rows: Rows, received_ns: int = T0) -> Batch:
    """A batch of metrics."""
    numbers = [row for row in rows if isinstance(row, Number)]
    found = [row for row in rows if isinstance(row, Distribution)]
    body = pack_columns(
        Numbers(
            np.array([row.series for row in numbers], "<u4"),
            np.array([row.time for row in numbers], "<i8"),
            np.array([row.start for row in numbers], "<i8"),
            np.array([row.bits for row in numbers], "<u8"),
        ),
        Distributions(
            np.array([row.series for row in found], "<u4"),
            np.array([_flags(row) for row in found], "<u1"),
            np.array([len(row.buckets) for row in found], "<u4"),
            np.array([len(row.bounds) for row in found], "<u4"),
            np.array([row.time for row in found], "<i8"),
            np.array([row.start for row in found], "<i8"),
            np.array([row.count for row in found], "<u8"),
            *(np.array([getattr(row, name) or 0.0 for row in found], "<f8") for name in ("sum", "min", "max")),
            np.array([count for row in found for count in row.buckets], "<u8"),
            np.array([bound for row in found for bound in row.bounds], "<f8"),
        ),
    )
    return Batch(Signal.METRICS, received_ns, body, len(rows), Losses())


def _flags(row: Distribution) -> int:
    sent = ((row.sum, HAS_SUM), (row.min, HAS_MIN), (row.max, HAS_MAX))
    return sum(flag for value, flag in sent if value is not None)


def events(found: Sequence[Event], signal: Signal = Signal.TRACES, received_ns: int = T0) -> Batch:
    body = pack_events([(int(each.category), each.time_ns, encode_point(each)) for each in found])
    return Batch(signal, received_ns, body, len(found), Losses())


def span(number: int = 0, **fields: Any) -> Event:
    tags = {"service": "shop", "status": "ok", "host": "h"}
    own = {"trace_id": f"{number:032x}", "duration": number, "message": "héllo"} | fields
    return Event(Category.TRACING, "opentelemetry", tags, own, T0 + number)


@dataclass
class Reading:
    """What a follower has been told, as rows that name their series in full."""

    table: dict[int, bytes] = field(default_factory=dict)
    segment: int = -1

    def rows(self, record: Record) -> list[tuple[object, ...]]:
        """The rows of a record, sorted; every id must have been defined by now."""
        if record.segment != self.segment:
            self.segment, self.table = record.segment, {}
        self.table.update(record.definitions)
        numbers, distributions, events = read_body(record.body)
        found: list[tuple[object, ...]] = []
        for row in zip(*(getattr(numbers, name).tolist() for name in Numbers.__slots__), strict=True):
            found.append(("number", self.table[row[0]], *row[1:]))
        bucket = bound = 0
        for row in zip(*(getattr(distributions, name).tolist() for name in Distributions.__slots__[:10]), strict=True):
            series, flags, n_buckets, n_bounds, at, start, count, *sent = row
            values = [value for value, flag in zip(sent, (HAS_SUM, HAS_MIN, HAS_MAX), strict=True) if flags & flag]
            lists = (
                distributions.buckets[bucket : bucket + n_buckets].tolist(),
                distributions.bounds[bound : bound + n_bounds].tolist(),
            )
            bucket, bound = bucket + n_buckets, bound + n_bounds
            found.append(("distribution", self.table[series], flags, at, start, count, *values, *map(tuple, lists)))
        return sorted(found) + [
            ("event", *row) for row in zip(events.category.tolist(), events.time.tolist(), events.points, strict=True)
        ]


def heads(record: Record) -> tuple[object, ...]:
    return (record.batch, record.received_ns, record.signal, record.points)


@dataclass
class Running:
    """A buffer that runs: ``table`` has the definitions of the series by id."""

    data_dir: Path
    table: SeriesTable
    meters: Meters
    writer: Writer
    catalog: Catalog
    indexer: Indexer

    def put(self, *batches: Batch) -> int:
        """Write batches; the number of the last once all are synced."""
        return [self.writer.submit(batch, self.table) for batch in batches][-1].result(10)

    def roll(self) -> None:
        self.writer.roll().result(10)

    def sealed(self, number: int) -> Segment:
        """Wait until a segment is sealed."""
        wait_for(lambda: State.SEALED in [each.state for each in segments(self.data_dir) if each.number == number])
        return next(each for each in segments(self.data_dir) if each.number == number)


def wait_for(condition: Any, timeout_s: float = 10.0) -> None:
    """Wait until ``condition()``; the buffer's threads have no event for what they have done to the files."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


@contextmanager
def running(
    data_dir: Path, known: Sequence[Series] = (), settings: BufferSettings | None = None, **options: Any
) -> Iterator[Running]:
    """A buffer on ``data_dir``, whose series 0, 1, ... are ``known``. ``options`` go to the ``Indexer``."""
    settings = settings or BufferSettings()
    meters, table = Meters(), SeriesTable()
    for number, each in enumerate(known):
        table.define(number, each.pack())
    catalog = Catalog(data_dir, settings, meters)
    recovered = catalog.recover()
    writer = Writer(
        data_dir,
        settings,
        meters,
        table,
        segment=recovered.next_segment,
        first_batch=recovered.next_batch,
        gateway_id=b"test",
        full=lambda: indexer.full(),  # noqa: PLW0108 (there is no indexer yet)
    )
    indexer = Indexer(catalog, writer, settings, meters, recovered.closed, **options)
    writer.start()
    indexer.start()
    try:
        yield Running(data_dir, table, meters, writer, catalog, indexer)
    finally:
        writer.stop()
        indexer.stop()
        catalog.close()
