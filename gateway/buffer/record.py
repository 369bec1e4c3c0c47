"""How a batch lies in memory and in the journal: one layout, written once, read by every follower.

The body of a batch of metrics is made by ``otlp.wire`` (or ``pack_rows``), that of traces and logs by
``pack_events``. The writer puts a header and the definitions of the series that are new to the segment in front
and appends it to the journal as it is; the index, the sinks and the tap read columns straight out of it.

Body (little-endian; every column begins at a multiple of 8 bytes, the gaps are zero)::

    n_numbers u32, n_distributions u32, n_buckets u32, n_bounds u32, n_events u32, events_size u32
    numbers        series u32[n] | time i64[n] | start i64[n] | bits u64[n]
    distributions  series u32[d] | flags u8[d] | n_buckets u32[d] | n_bounds u32[d] | time i64[d] | start i64[d]
                   count u64[d] | sum f64[d] | min f64[d] | max f64[d] | buckets u64[n_buckets] | bounds f64[n_bounds]
    events         category u8[e] | time i64[e] | size u32[e] | points, one after the other

``bits`` is a float64 or an int64, as the series' kind says. ``start`` is 0 where none was sent. ``flags`` says which
of sum, min, max were sent. ``buckets`` are the counts as sent (not accumulated), all rows one after the other.
``bounds`` are those of exponential rows; explicit bounds are in the series.

Definitions: for each series ``id u32, size u32, definition`` padded to 8 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.model import Signal

HAS_SUM, HAS_MIN, HAS_MAX = 1, 2, 4
BAD_SUM, BAD_MIN, BAD_MAX = 8, 16, 32
"""Flags of a distribution row. ``BAD``: one was sent, but it was not finite; it is never sent on, not even as 0."""

COUNTS = struct.Struct("<6I")
NUMBER_BYTES = 28
"""Of a row of the numbers in a body."""
_ENTRY = struct.Struct("<II")

Array = npt.NDArray[Any]


def padded(size: int) -> int:
    """``size`` rounded up to a multiple of 8."""
    return (size + 7) & ~7


@dataclass(frozen=True, slots=True)
class Numbers:
    """Rows of DOUBLE and INT series; columns of one length."""

    series: npt.NDArray[np.uint32]
    time: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    bits: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Distributions:
    """Rows of HISTOGRAM, EXPONENTIAL and SUMMARY series. ``buckets`` and ``bounds`` are flat; ``n_buckets`` and
    ``n_bounds`` say how many belong to each row."""

    series: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint8]
    n_buckets: npt.NDArray[np.uint32]
    n_bounds: npt.NDArray[np.uint32]
    time: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    count: npt.NDArray[np.uint64]
    sum: npt.NDArray[np.float64]
    min: npt.NDArray[np.float64]
    max: npt.NDArray[np.float64]
    buckets: npt.NDArray[np.uint64]
    bounds: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Events:
    """Encoded points (``com.guance.Point``), one an entry."""

    category: npt.NDArray[np.uint8]
    time: npt.NDArray[np.int64]
    points: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One committed batch as a follower sees it. ``batch`` numbers rise by one and are never used twice.

    ``definitions`` are those of the series which this segment sees for the first time, in the order of their use:
    a follower knows every id before it needs it. The first record that a follower gets from a segment carries the
    definitions of the records before it, too. Ids mean something only within ``segment``.
    """

    segment: int
    batch: int
    received_ns: int
    signal: Signal
    points: int
    definitions: tuple[tuple[int, bytes], ...]
    body: bytes | memoryview

    def numbers(self) -> Numbers:
        return read_body(self.body)[0]

    def distributions(self) -> Distributions:
        return read_body(self.body)[1]

    def events(self) -> Events:
        return read_body(self.body)[2]


class _Cursor:
    """Takes columns off a buffer, one after the other. Raises ``ValueError`` past its end."""

    def __init__(self, raw: bytes | memoryview, at: int) -> None:
        self.raw = raw
        self.at = at

    def take(self, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
        column = np.frombuffer(self.raw, dtype, count, self.at) if count else np.empty(0, dtype)
        self.at += padded(column.nbytes)
        return column


_NO_DISTRIBUTIONS = Distributions(
    *(np.empty(0, kind) for kind in "<u4 <u1 <u4 <u4 <i8 <i8 <u8 <f8 <f8 <f8 <u8 <f8".split())  # noqa: SIM905
)
_NO_EVENTS = Events(np.empty(0, "<u1"), np.empty(0, "<i8"), ())


def read_body(body: bytes | memoryview) -> tuple[Numbers, Distributions, Events]:
    """The columns of a body, as views of it (nothing is copied but the events' points)."""
    n, d, n_buckets, n_bounds, e, events_size = COUNTS.unpack_from(body)
    cursor = _Cursor(body, COUNTS.size)
    take = cursor.take
    numbers = Numbers(take("<u4", n), take("<i8", n), take("<i8", n), take("<u8", n))
    distributions = _NO_DISTRIBUTIONS
    if d or n_buckets or n_bounds:
        distributions = Distributions(
            take("<u4", d),
            take("<u1", d),
            take("<u4", d),
            take("<u4", d),
            take("<i8", d),
            take("<i8", d),
            take("<u8", d),
            take("<f8", d),
            take("<f8", d),
            take("<f8", d),
            take("<u8", n_buckets),
            take("<f8", n_bounds),
        )
    if not e:
        return numbers, distributions, _NO_EVENTS
    category, time, sizes = take("<u1", e), take("<i8", e), take("<u4", e)
    raw = bytes(body[cursor.at : cursor.at + events_size])
    ends = np.cumsum(sizes, dtype=np.int64)
    points = tuple(raw[end - size : end] for size, end in zip(sizes.tolist(), ends.tolist(), strict=True))
    return numbers, distributions, Events(category, time, points)


def _column(array: Array) -> bytes:
    raw = array.tobytes()
    return raw + bytes(padded(len(raw)) - len(raw))


def pack_columns(numbers: Numbers | None = None, distributions: Distributions | None = None) -> bytes:
    """A body of metrics, from columns. (The receiving path does not come here: ``otlp.wire`` writes bodies itself.)"""
    n = len(numbers.series) if numbers else 0
    d = len(distributions.series) if distributions else 0
    counts = COUNTS.pack(
        n,
        d,
        len(distributions.buckets) if distributions else 0,
        len(distributions.bounds) if distributions else 0,
        0,
        0,
    )
    columns: list[Array] = []
    if numbers:
        columns += [numbers.series, numbers.time, numbers.start, numbers.bits]
    if distributions:
        columns += [
            distributions.series,
            distributions.flags,
            distributions.n_buckets,
            distributions.n_bounds,
            distributions.time,
            distributions.start,
            distributions.count,
            distributions.sum,
            distributions.min,
            distributions.max,
            distributions.buckets,
            distributions.bounds,
        ]
    return counts + b"".join(_column(column) for column in columns)


def pack_events(events: Sequence[tuple[int, int, bytes]]) -> bytes:
    """A body of events, each given as category, time in ns, encoded point."""
    sizes = [len(point) for _, _, point in events]
    return b"".join(
        (
            COUNTS.pack(0, 0, 0, 0, len(events), sum(sizes)),
            _column(np.array([category for category, _, _ in events], "<u1")),
            _column(np.array([time for _, time, _ in events], "<i8")),
            _column(np.array(sizes, "<u4")),
            *(point for _, _, point in events),
        )
    )


def pack_definitions(definitions: Iterable[tuple[int, bytes]]) -> bytes:
    """Definitions as they lie in a journal record."""
    parts = []
    for series, definition in definitions:
        size = len(definition)
        parts.append(_ENTRY.pack(series, size) + definition + bytes(padded(size) - size))
    return b"".join(parts)


def read_definitions(raw: bytes | memoryview) -> tuple[tuple[int, bytes], ...]:
    """What ``pack_definitions`` wrote: id and definition of each series. Raises ``ValueError`` where it ends early."""
    found = []
    at = 0
    while at < len(raw):
        if at + _ENTRY.size > len(raw):
            raise ValueError(f"definitions end within an entry, at byte {at}")
        series, size = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        if at + size > len(raw):
            raise ValueError(f"the definition of series {series} ends behind the record")
        found.append((series, bytes(raw[at : at + size])))
        at += padded(size)
    return tuple(found)
