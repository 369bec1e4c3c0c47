"""Rows of the segment's tables: from journal records to columns of Arrow, for the index and for Parquet alike.

Numbers and distributions are gathered as NumPy records (``NUMBER``, ``DISTRIBUTION``): no Python object a row.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gateway.buffer.numbering import UNDEFINED, Numbering
from gateway.buffer.record import HAS_MAX, HAS_MIN, HAS_SUM, Record, read_body
from gateway.model import Category, Event, Kind, Series
from gateway.otlp.point import decode_point

NUMBER = np.dtype([("series", "<u4"), ("batch", "<u8"), ("time", "<i8"), ("start", "<i8"), ("bits", "<u8")])
DISTRIBUTION = np.dtype(
    [
        ("series", "<u4"),
        ("batch", "<u8"),
        ("time", "<i8"),
        ("start", "<i8"),
        ("count", "<u8"),
        ("sum", "<f8"),
        ("min", "<f8"),
        ("max", "<f8"),
        ("n_buckets", "<u4"),
        ("n_bounds", "<u4"),
        ("flags", "u1"),
    ]
)

_NS = pa.timestamp("ns")
_TAGS = pa.map_(pa.string(), pa.string())
_BOUNDS = pa.list_(pa.float64())

BATCHES = pa.schema(
    [
        ("batch", pa.uint64()),
        ("received", _NS),
        ("signal", pa.string()),
        ("points", pa.uint32()),
        ("bytes", pa.uint64()),
    ]
)
SERIES = pa.schema(
    [
        ("id", pa.uint32()),
        ("key", pa.uint64()),
        ("measurement", pa.string()),
        ("field", pa.string()),
        ("tags", _TAGS),
        ("kind", pa.string()),
        ("unit", pa.string()),
        ("temporality", pa.string()),
        ("monotonic", pa.bool_()),
        ("bounds", _BOUNDS),
        ("first_seen", _NS),
    ]
)
NUMBERS = pa.schema(
    [
        ("series", pa.uint32()),
        ("time", _NS),
        ("value", pa.float64()),
        ("int_value", pa.int64()),
        ("start_time", _NS),
        ("batch", pa.uint64()),
    ]
)
DISTRIBUTIONS = pa.schema(
    [
        ("series", pa.uint32()),
        ("time", _NS),
        ("start_time", _NS),
        ("batch", pa.uint64()),
        ("count", pa.uint64()),
        ("sum", pa.float64()),
        ("min", pa.float64()),
        ("max", pa.float64()),
        ("flags", pa.uint8()),
        ("buckets", pa.list_(pa.uint64())),
        ("bounds", _BOUNDS),
    ]
)
EVENTS = pa.schema(
    [
        ("batch", pa.uint64()),
        ("category", pa.string()),
        ("time", _NS),
        ("source", pa.string()),
        ("service", pa.string()),
        ("status", pa.string()),
        ("trace_id", pa.string()),
        ("tags", _TAGS),
        ("fields", pa.string()),
        ("point", pa.binary()),
    ]
)
SCHEMAS = {
    "batches": BATCHES,
    "series": SERIES,
    "numbers": NUMBERS,
    "distributions": DISTRIBUTIONS,
    "events": EVENTS,
}
"""Every table, with its columns as ``schema.sql`` has them."""

ROWS_A_SERIES = 64
"""A new series weighs as much as so many rows: it is unpacked into Python objects on its way."""
BUCKETS_A_ROW = 8
"""So many buckets of a distribution weigh as much as a row of the numbers, where the size of a load is reckoned."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Distributions:
    """Rows (``DISTRIBUTION``) and their lists, one after the other, in the rows' order."""

    rows: Array
    buckets: Array
    bounds: Array


@dataclass(frozen=True, slots=True)
class RawEvent:
    batch: int
    category: int
    time_ns: int
    point: bytes


class Gathering:
    """Collects records until somebody takes their rows. ``undefined`` counts rows whose series nobody has defined: they
    are left out."""

    def __init__(self, numbering: Numbering) -> None:
        self.numbering = numbering
        self.undefined = 0
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self._batches: list[tuple[int, int, str, int, int]] = []
        self._series: list[tuple[int, bytes, int]] = []
        self._numbers: list[Array] = []
        self._distributions: list[Distributions] = []
        self._events: list[RawEvent] = []

    def define(self, definitions: Sequence[tuple[int, bytes]], seen_ns: int) -> None:
        """Take in definitions; those of new series become rows of the series."""
        for series, definition in definitions:
            number = self.numbering.define(series, definition)
            if number is not None:
                self._series.append((number, definition, seen_ns))
                self.rows += ROWS_A_SERIES

    def add(self, record: Record) -> None:
        self.define(record.definitions, record.received_ns)
        self._batches.append(
            (record.batch, record.received_ns, record.signal.name.lower(), record.points, len(record.body))
        )
        numbers, distributions, events = read_body(record.body)
        if len(numbers.series):
            self._numbers.append(self._number_rows(record.batch, numbers))
        if len(distributions.series):
            self._distributions.append(self._distribution_rows(record.batch, distributions))
        self._events += [
            RawEvent(record.batch, *row)
            for row in zip(events.category.tolist(), events.time.tolist(), events.points, strict=True)
        ]
        self.rows += len(events.points)
        self.numbering.end_record()

    def _number_rows(self, batch: int, numbers: Any) -> Array:
        rows = np.empty(len(numbers.series), NUMBER)
        rows["series"] = series = self.numbering.translate(numbers.series)
        rows["batch"] = batch
        rows["time"] = numbers.time
        rows["start"] = numbers.start
        rows["bits"] = numbers.bits
        defined = series != UNDEFINED
        if not defined.all():
            rows = rows[defined]
            self.undefined += len(series) - len(rows)
        self.rows += len(rows)
        return rows

    def _distribution_rows(self, batch: int, found: Any) -> Distributions:
        rows = np.empty(len(found.series), DISTRIBUTION)
        rows["series"] = series = self.numbering.translate(found.series)
        rows["batch"] = batch
        for name in ("time", "start", "count", "sum", "min", "max", "n_buckets", "n_bounds", "flags"):
            rows[name] = getattr(found, name)
        self.rows += len(rows) + len(found.buckets) // BUCKETS_A_ROW
        distributions = Distributions(rows, found.buckets, found.bounds)
        defined = series != UNDEFINED
        if defined.all():
            return distributions
        kept = np.flatnonzero(defined)
        self.undefined += len(series) - len(kept)
        self.rows -= len(series) - len(kept)
        return pick(distributions, kept)

    def take_batches(self) -> pa.Table:
        columns = list(zip(*self._batches, strict=True)) or [()] * 5
        self._batches = []
        return pa.Table.from_arrays(
            [
                pa.array(columns[0], pa.uint64()),
                _times(np.array(columns[1], "<i8")),
                pa.array(columns[2], pa.string()),
                pa.array(columns[3], pa.uint32()),
                pa.array(columns[4], pa.uint64()),
            ],
            schema=BATCHES,
        )

    def take_series(self) -> list[tuple[int, bytes, int]]:
        """Number, definition and time of first sight of the series that are new."""
        series, self._series = self._series, []
        return series

    def take_numbers(self) -> Array:
        numbers, self._numbers = self._numbers, []
        return joined(numbers, NUMBER)

    def take_distributions(self) -> Distributions:
        parts, self._distributions = self._distributions, []
        return join(parts)

    def take_events(self) -> list[RawEvent]:
        events, self._events = self._events, []
        self.rows = 0
        return events


def join(parts: Sequence[Distributions]) -> Distributions:
    return Distributions(
        joined([part.rows for part in parts], DISTRIBUTION),
        np.concatenate([*(part.buckets for part in parts), np.empty(0, "<u8")]),
        np.concatenate([*(part.bounds for part in parts), np.empty(0, "<f8")]),
    )


def joined(parts: Sequence[Array], kind: np.dtype[Any]) -> Array:
    """One array of records. As plain bytes: NumPy joins those ten times as fast."""
    plain = f"V{kind.itemsize}"
    return np.concatenate([*(part.view(plain) for part in parts), np.empty(0, plain)]).view(kind)


def pick(distributions: Distributions, order: Array) -> Distributions:
    """The rows ``order`` names, in that order, with their lists."""
    rows = distributions.rows
    return Distributions(
        rows.take(order),
        _pick_lists(distributions.buckets, rows["n_buckets"], order),
        _pick_lists(distributions.bounds, rows["n_bounds"], order),
    )


def _pick_lists(values: Array, sizes: Array, order: Array) -> Array:
    if not len(values):
        return values
    sizes = sizes.astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    picked = sizes[order]
    ends = np.cumsum(picked)
    total = int(ends[-1]) if len(ends) else 0
    return values.take(np.repeat(begins[order] - (ends - picked), picked) + np.arange(total))


def series_table(series: Sequence[tuple[int, bytes, int]]) -> pa.Table:
    """Rows of the series, of number, definition and time of first sight."""
    unpacked = [Series.unpack(definition) for _, definition, _ in series]
    return pa.Table.from_arrays(
        [
            pa.array([number for number, _, _ in series], pa.uint32()),
            pa.array([int.from_bytes(definition[:8], "little") for _, definition, _ in series], pa.uint64()),
            pa.array([each.measurement for each in unpacked], pa.string()),
            pa.array([each.field for each in unpacked], pa.string()),
            _maps([each.tags for each in unpacked]),
            pa.array([each.kind.name.lower() for each in unpacked], pa.string()),
            pa.array([each.unit for each in unpacked], pa.string()),
            pa.array([each.temporality.name.lower() for each in unpacked], pa.string()),
            pa.array([each.monotonic for each in unpacked], pa.bool_()),
            pa.array([each.bounds if each.kind is Kind.HISTOGRAM else None for each in unpacked], _BOUNDS),
            _times(np.array([seen for _, _, seen in series], "<i8")),
        ],
        schema=SERIES,
    )


def numbers_table(rows: Array, kinds: npt.NDArray[np.uint8]) -> pa.Table:
    """Columns of ``NUMBER`` rows; ``kinds`` by number of the series."""
    is_int = kinds[rows["series"]] == Kind.INT
    bits = _aligned(rows["bits"])
    return pa.Table.from_arrays(
        [
            pa.array(_aligned(rows["series"])),
            _times(rows["time"]),
            _column(pa.float64(), bits, ~is_int),
            _column(pa.int64(), bits, is_int),
            _times(rows["start"], rows["start"] != 0),
            pa.array(_aligned(rows["batch"])),
        ],
        schema=NUMBERS,
    )


def distributions_table(distributions: Distributions, kinds: npt.NDArray[np.uint8]) -> pa.Table:
    """Columns of ``DISTRIBUTION`` rows; ``kinds`` by number of the series."""
    rows, flags = distributions.rows, distributions.rows["flags"]
    exponential = kinds[rows["series"]] == Kind.EXPONENTIAL
    return pa.Table.from_arrays(
        [
            pa.array(_aligned(rows["series"])),
            _times(rows["time"]),
            _times(rows["start"], rows["start"] != 0),
            pa.array(_aligned(rows["batch"])),
            pa.array(_aligned(rows["count"])),
            _column(pa.float64(), rows["sum"], flags & HAS_SUM != 0),
            _column(pa.float64(), rows["min"], flags & HAS_MIN != 0),
            _column(pa.float64(), rows["max"], flags & HAS_MAX != 0),
            pa.array(_aligned(flags)),
            _lists(DISTRIBUTIONS.field("buckets").type, distributions.buckets, rows["n_buckets"]),
            _lists(_BOUNDS, distributions.bounds, rows["n_bounds"], exponential),
        ],
        schema=DISTRIBUTIONS,
    )


def events_table(raw: Sequence[RawEvent]) -> pa.Table:
    """Rows of the events. A point that cannot be read keeps its bytes; its other columns are empty."""
    categories = [Category(each.category) for each in raw]
    events = [_decoded(each, category) for each, category in zip(raw, categories, strict=True)]
    return pa.Table.from_arrays(
        [
            pa.array([each.batch for each in raw], pa.uint64()),
            pa.array([category.path for category in categories], pa.string()),
            _times(np.array([each.time_ns for each in raw], "<i8")),
            pa.array([event.measurement for event in events], pa.string()),
            *(
                pa.array([_word(event, key) for event in events], pa.string())
                for key in ("service", "status", "trace_id")
            ),
            _maps([list(event.tags.items()) for event in events]),
            pa.array([_json(event) for event in events], pa.string()),
            pa.array([each.point for each in raw], pa.binary()),
        ],
        schema=EVENTS,
    )


def _decoded(raw: RawEvent, category: Category) -> Event:
    try:
        return decode_point(raw.point, category)
    except ValueError:
        return Event(category, "", {}, {}, raw.time_ns)


def _word(event: Event, key: str) -> str | None:
    value = event.tags.get(key, event.fields.get(key))
    return None if value is None else str(value)


def _json(event: Event) -> str:
    fields = {
        key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for key, value in event.fields.items()
    }
    return json.dumps(fields, ensure_ascii=False)


def _aligned(values: Array) -> Array:
    """A field of records, or a view of a journal, as a column of its own."""
    column: Array = np.require(values, requirements=("C", "ALIGNED"))
    return column


def _column(kind: pa.DataType, values: Array, valid: Array | None = None) -> pa.Array:
    """Eight-byte ``values`` as they are, NULL where not ``valid``."""
    mask = None
    if valid is not None and not valid.all():
        mask = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [mask, pa.py_buffer(_aligned(values))])


def _times(values: Array, valid: Array | None = None) -> pa.Array:
    return _column(_NS, values, valid)


def _lists(kind: pa.DataType, values: Array, sizes: Array, valid: Array | None = None) -> pa.Array:
    offsets = np.zeros(len(sizes) + 1, "<i4")
    np.cumsum(sizes, out=offsets[1:])
    mask = None
    if valid is not None and not valid.all():
        mask = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, len(sizes), [mask, pa.py_buffer(offsets)], children=[pa.array(_aligned(values))])


def _maps(maps: Sequence[Sequence[tuple[str, str]]]) -> pa.Array:
    offsets = np.zeros(len(maps) + 1, "<i4")
    np.cumsum([len(each) for each in maps], out=offsets[1:])
    keys = [key for each in maps for key, _ in each]
    values = [value for each in maps for _, value in each]
    return pa.MapArray.from_arrays(pa.array(offsets), pa.array(keys, pa.string()), pa.array(values, pa.string()))
