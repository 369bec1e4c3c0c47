"""Records out of a sealed segment, as they were in its journal but for the numbers of the series.

Rows lie ordered by series, records are wanted by batch: the files are read once for every window of batches, whose rows
fit in memory, and a window's rows are sorted by batch. Order within a batch is by series, then time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gateway.buffer.record import Distributions, Numbers, Record, pack_columns, pack_events
from gateway.buffer.seal import SERIES_GROUP
from gateway.buffer.segment import Manifest, Segment
from gateway.model import Category, Kind, Series, Signal, Temporality

log = logging.getLogger("locum.buffer")

WINDOW_BYTES = 24 << 20
_READ_ROWS = 65_536

Array = npt.NDArray[Any]
_CATEGORIES = {category.path: int(category) for category in Category}


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    received_ns: int
    signal: Signal
    points: int
    bytes: int


class SealedRecords:
    """The records of a sealed segment after ``after_batch``, of one signal or of all. Iterate over it once.

    All files are opened at the first step, so the segment may be deleted meanwhile. Raises ``FileNotFoundError`` when
    it was deleted before, ``pa.ArrowException`` or ``OSError`` when its batches or series are damaged. A damaged row
    group of the other tables costs its rows, and is logged.
    """

    def __init__(self, sealed: Segment, manifest: Manifest, after_batch: int, signal: Signal | None) -> None:
        self._sealed = sealed
        self._manifest = manifest
        self._after_batch = after_batch
        self._signal = signal
        self._files: dict[str, pq.ParquetFile] = {}
        self._said = np.zeros(manifest.series // SERIES_GROUP + 1, bool)

    def __iter__(self) -> Iterator[Record]:
        with ExitStack() as stack:
            for name in self._manifest.rows:
                self._files[name] = stack.enter_context(self._open(name))
            for window in self._windows():
                yield from self._window(window)

    def _open(self, name: str) -> pq.ParquetFile:
        return pq.ParquetFile(self._sealed.table(name), page_checksum_verification=True)

    def _windows(self) -> Iterator[list[_Batch]]:
        window: list[_Batch] = []
        size = 0
        for batch in self._batches():
            if window and size + batch.bytes > WINDOW_BYTES:
                yield window
                window, size = [], 0
            window.append(batch)
            size += batch.bytes
        if window:
            yield window

    def _batches(self) -> Iterator[_Batch]:
        for table in self._files["batches"].iter_batches(_READ_ROWS):
            columns = [table.column(name) for name in ("batch", "received", "signal", "points", "bytes")]
            columns[1] = columns[1].cast(pa.int64())
            for number, received_ns, name, points, size in zip(
                *(each.to_pylist() for each in columns), strict=True
            ):
                signal = Signal[name.upper()]
                if number > self._after_batch and self._signal in (None, signal):
                    yield _Batch(number, received_ns, signal, points, size)

    def _window(self, window: list[_Batch]) -> Iterator[Record]:
        first, last = window[0].number, window[-1].number
        signals = {batch.signal for batch in window}
        numbers, distributions, events = _Rows(), _Rows(), _Rows()
        if Signal.METRICS in signals:
            numbers = self._rows("numbers", first, last)
            distributions = self._rows("distributions", first, last)
        if signals - {Signal.METRICS}:
            events = self._rows("events", first, last)
        for batch in window:
            if batch.signal is not Signal.METRICS:
                yield self._record(batch, (), _events_body(events.of(batch.number)))
                continue
            own_numbers = _numbers(numbers.of(batch.number))
            own_distributions = _distributions(distributions.of(batch.number))
            used = [part.series for part in (own_numbers, own_distributions) if part is not None]
            yield self._record(batch, self._definitions(used), pack_columns(own_numbers, own_distributions))

    def _record(self, batch: _Batch, definitions: tuple[tuple[int, bytes], ...], body: bytes) -> Record:
        return Record(
            self._sealed.number,
            batch.number,
            batch.received_ns,
            batch.signal,
            batch.points,
            definitions,
            body,
        )

    def _rows(self, name: str, first: int, last: int) -> _Rows:
        """The rows of batches ``first`` to ``last``, ordered by batch."""
        file = self._files.get(name)
        if file is None:
            return _Rows()
        columns = [column for column in file.schema_arrow.names if column in _WANTED[name]]
        found = []
        for group in range(file.metadata.num_row_groups):
            if not _overlaps(file, group, first, last):
                continue
            try:
                table = file.read_row_group(group, columns)
            except (pa.ArrowException, OSError) as error:
                path = self._sealed.table(name)
                log.error("event=rows_damaged file=%s row_group=%d error=%r", path, group, str(error))
                continue
            batch = table.column("batch").to_numpy()
            inside = (batch >= first) & (batch <= last)
            found.append(table if inside.all() else table.filter(pa.array(inside)))
        if not found:
            return _Rows()
        table = pa.concat_tables(found)
        batch = table.column("batch").to_numpy()
        order = np.argsort(batch, kind="stable")
        return _Rows(table.take(pa.array(order)).combine_chunks(), batch[order])

    def _definitions(self, used: list[Array]) -> tuple[tuple[int, bytes], ...]:
        """Definitions that have not been said, a row group of the series at a time, of all the groups in ``used``."""
        said: list[tuple[int, bytes]] = []
        for series in used:
            groups = np.unique(series // SERIES_GROUP)
            for group in groups[~self._said[groups]].tolist():
                self._said[group] = True
                said += _read_definitions(self._files["series"].read_row_group(group))
        return tuple(said)


_WANTED = {
    "numbers": ("series", "time", "value", "int_value", "start_time", "batch"),
    "distributions": (
        "series",
        "time",
        "start_time",
        "batch",
        "count",
        "sum",
        "min",
        "max",
        "flags",
        "buckets",
        "bounds",
    ),
    "events": ("batch", "category", "time", "point"),
}


class _Rows:
    """Rows ordered by batch, to be taken by batch."""

    def __init__(self, table: pa.Table | None = None, batch: Array | None = None) -> None:
        self._table = table
        self._batch = batch

    def of(self, batch: int) -> pa.Table | None:
        if self._table is None or self._batch is None:
            return None
        begin, end = np.searchsorted(self._batch, [np.uint64(batch), np.uint64(batch + 1)])
        return self._table.slice(begin, end - begin) if end > begin else None


def _overlaps(file: pq.ParquetFile, group: int, first: int, last: int) -> bool:
    """Whether a row group may have rows of batches ``first`` to ``last``."""
    column = file.schema_arrow.get_field_index("batch")
    statistics = file.metadata.row_group(group).column(column).statistics
    return (
        statistics is None
        or not statistics.has_min_max
        or (statistics.min <= last and statistics.max >= first)
    )


def _numbers(table: pa.Table | None) -> Numbers | None:
    if table is None:
        return None
    bits = _zeroed(table, "value", pa.float64()).view("<u8") | _zeroed(table, "int_value", pa.int64()).view(
        "<u8"
    )
    return Numbers(table.column("series").to_numpy(), _time(table, "time"), _time(table, "start_time"), bits)


def _distributions(table: pa.Table | None) -> Distributions | None:
    if table is None:
        return None
    buckets = table.column("buckets").combine_chunks()
    bounds = table.column("bounds").combine_chunks()
    return Distributions(
        table.column("series").to_numpy(),
        table.column("flags").to_numpy(),
        buckets.value_lengths().fill_null(0).to_numpy(False).astype("<u4"),
        bounds.value_lengths().fill_null(0).to_numpy(False).astype("<u4"),
        _time(table, "time"),
        _time(table, "start_time"),
        table.column("count").to_numpy(),
        _zeroed(table, "sum", pa.float64()),
        _zeroed(table, "min", pa.float64()),
        _zeroed(table, "max", pa.float64()),
        buckets.flatten().to_numpy(False),
        bounds.flatten().to_numpy(False),
    )


def _zeroed(table: pa.Table, name: str, kind: pa.DataType) -> Array:
    """A column whose NULLs are 0."""
    column: Array = pc.fill_null(table.column(name), pa.scalar(0, kind)).to_numpy()
    return column


def _time(table: pa.Table, name: str) -> Array:
    column: Array = pc.fill_null(table.column(name).cast(pa.int64()), 0).to_numpy()
    return column


def _events_body(table: pa.Table | None) -> bytes:
    if table is None:
        return pack_events(())
    columns = (table.column("category"), table.column("time").cast(pa.int64()), table.column("point"))
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    return pack_events([(_CATEGORIES[category], time_ns, point) for category, time_ns, point in rows])


def _read_definitions(table: pa.Table) -> Iterator[tuple[int, bytes]]:
    """Number and definition of each series of ``table``."""
    names = ("id", "measurement", "field", "tags", "kind", "unit", "temporality", "monotonic", "bounds")
    columns = (table.column(name).to_pylist() for name in names)
    for number, measurement, field, tags, kind, unit, temporality, monotonic, bounds in zip(
        *columns, strict=True
    ):
        series = Series(
            measurement,
            field,
            tuple(tags),
            Kind[kind.upper()],
            unit,
            Temporality[temporality.upper()],
            monotonic,
            tuple(bounds or ()),
        )
        yield number, series.pack()
