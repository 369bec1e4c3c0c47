"""Records out of a sealed segment, as they were in its journal but for the numbers of the series.

Rows lie ordered by series, records are wanted by batch: the files are read once for every window of batches, whose rows
fit in memory, and a window's rows are sorted by batch. Order within a batch is by series, then time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gateway.buffer import tables
from gateway.buffer.record import NUMBER_BYTES, Distributions, Numbers, Record, pack_columns, pack_events
from gateway.buffer.seal import SERIES_GROUP
from gateway.buffer.segment import Manifest, Segment
from gateway.buffer.tables import DISTRIBUTION, NUMBER, join, pick
from gateway.model import Category, Kind, Series, Signal, Temporality

log = logging.getLogger("locum.buffer")

WINDOW_BYTES = 16 << 20
_READ_ROWS = 65_536

Array = npt.NDArray[Any]
CATEGORIES = {category.path: int(category) for category in Category}


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
            for number, received_ns, name, points, size in zip(*(each.to_pylist() for each in columns), strict=True):
                signal = Signal[name.upper()]
                if number > self._after_batch and self._signal in (None, signal):
                    yield _Batch(number, received_ns, signal, points, size)

    def _window(self, window: list[_Batch]) -> Iterator[Record]:
        first, last = window[0].number, window[-1].number
        signals = {batch.signal for batch in window}
        numbers = distributions = None
        if Signal.METRICS in signals:
            at_most = sum(batch.bytes for batch in window) // NUMBER_BYTES
            numbers = _NumberRows(self._tables("numbers", first, last), at_most)
            distributions = _DistributionRows(self._tables("distributions", first, last))
        events: _EventRows | None = None
        for batch in window:
            if numbers is not None and distributions is not None and batch.signal is Signal.METRICS:
                own, found = numbers.of(batch.number), distributions.of(batch.number)
                if len(own.series) or len(found.series):
                    definitions = self._definitions([own.series, found.series])
                    yield self._record(batch, definitions, pack_columns(own, found))
                    continue
            # traces, logs, and metrics that were made of spans
            if events is None:
                events = _EventRows(self._tables("events", first, last))
            yield self._record(batch, (), pack_events(events.of(batch.number)))

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

    def _tables(self, name: str, first: int, last: int) -> Iterator[pa.Table]:
        """The rows of batches ``first`` to ``last``, one row group after the other."""
        file = self._files.get(name)
        if file is None:
            return
        columns = [column for column in file.schema_arrow.names if column in COLUMNS[name]]
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
            yield table if inside.all() else table.filter(pa.array(inside))

    def _definitions(self, used: list[Array]) -> tuple[tuple[int, bytes], ...]:
        """Definitions that have not been said, a row group of the series at a time, of all the groups in ``used``."""
        said: list[tuple[int, bytes]] = []
        for series in used:
            groups = np.unique(series // SERIES_GROUP)
            for group in groups[~self._said[groups]].tolist():
                self._said[group] = True
                said += read_definitions(self._files["series"].read_row_group(group))
        return tuple(said)


COLUMNS = {
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


class _NumberRows:
    """Numbers by batch."""

    def __init__(self, found: Iterator[pa.Table], at_most: int) -> None:
        room, count = np.empty(at_most, NUMBER), 0
        for table in found:
            fill_numbers(room[count : count + table.num_rows], table)
            count += table.num_rows
        rows = room[:count]
        self._rows = rows.take(np.argsort(rows["batch"], kind="stable"))
        self._batch = np.array(self._rows["batch"])

    def of(self, batch: int) -> Numbers:
        begin, end = _range(self._batch, batch)
        return numbers_of(self._rows[begin:end])


class _DistributionRows:
    """Distributions by batch."""

    def __init__(self, found: Iterator[pa.Table]) -> None:
        gathered = join([distribution_rows(table) for table in found])
        self._all = pick(gathered, np.argsort(gathered.rows["batch"], kind="stable"))
        self._batch = np.array(self._all.rows["batch"])
        self._buckets_end = _ends(self._all.rows["n_buckets"])
        self._bounds_end = _ends(self._all.rows["n_bounds"])

    def of(self, batch: int) -> Distributions:
        begin, end = _range(self._batch, batch)
        buckets = self._all.buckets[self._buckets_end[begin] : self._buckets_end[end]]
        bounds = self._all.bounds[self._bounds_end[begin] : self._bounds_end[end]]
        return distributions_of(tables.Distributions(self._all.rows[begin:end], buckets, bounds))


class _EventRows:
    """Events by batch. They lie in their order already."""

    def __init__(self, found: Iterator[pa.Table]) -> None:
        parts = list(found)
        self._table = pa.concat_tables(parts) if parts else None
        self._batch: Array = np.empty(0, "<u8") if self._table is None else self._table.column("batch").to_numpy()

    def of(self, batch: int) -> list[tuple[int, int, bytes]]:
        """Category, time and encoded point of each."""
        begin, end = _range(self._batch, batch)
        if self._table is None or begin == end:
            return []
        table = self._table.slice(begin, end - begin)
        columns = (table.column("category"), table.column("time").cast(pa.int64()), table.column("point"))
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        return [(CATEGORIES[category], time_ns, point) for category, time_ns, point in rows]


def _range(ordered: Array, batch: int) -> tuple[int, int]:
    begin, end = np.searchsorted(ordered, np.array([batch, batch + 1], ordered.dtype)).tolist()
    return begin, end


def _ends(sizes: Array) -> Array:
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    return ends


def _overlaps(file: pq.ParquetFile, group: int, first: int, last: int) -> bool:
    """Whether a row group may have rows of batches ``first`` to ``last``."""
    column = file.schema_arrow.get_field_index("batch")
    statistics = file.metadata.row_group(group).column(column).statistics
    return statistics is None or not statistics.has_min_max or (statistics.min <= last and statistics.max >= first)


def fill_numbers(rows: Array, table: pa.Table) -> None:
    """Put a row group of the numbers into ``rows`` (``tables.NUMBER``)."""
    rows["series"] = table.column("series").to_numpy()
    rows["batch"] = table.column("batch").to_numpy()
    rows["time"] = _time(table, "time")
    rows["start"] = _time(table, "start_time")
    bits = _zeroed(table, "value", pa.float64()).view("<u8")
    rows["bits"] = bits | _zeroed(table, "int_value", pa.int64()).view("<u8")


def distribution_rows(table: pa.Table) -> tables.Distributions:
    """A row group of the distributions."""
    buckets = table.column("buckets").combine_chunks()
    bounds = table.column("bounds").combine_chunks()
    rows = np.empty(table.num_rows, DISTRIBUTION)
    for name in ("series", "batch", "count", "flags"):
        rows[name] = table.column(name).to_numpy()
    for name in ("sum", "min", "max"):
        rows[name] = _zeroed(table, name, pa.float64())
    rows["time"] = _time(table, "time")
    rows["start"] = _time(table, "start_time")
    rows["n_buckets"] = buckets.value_lengths().fill_null(0).to_numpy(False)
    rows["n_bounds"] = bounds.value_lengths().fill_null(0).to_numpy(False)
    return tables.Distributions(rows, buckets.flatten().to_numpy(False), bounds.flatten().to_numpy(False))


def _zeroed(table: pa.Table, name: str, kind: pa.DataType) -> Array:
    """A column whose NULLs are 0."""
    column: Array = pc.fill_null(table.column(name), pa.scalar(0, kind)).to_numpy()
    return column


def numbers_of(rows: Array) -> Numbers:
    """Rows (``tables.NUMBER``) as columns."""
    return Numbers(rows["series"], rows["time"], rows["start"], rows["bits"])


def distributions_of(found: tables.Distributions) -> Distributions:
    """Rows (``tables.DISTRIBUTION``) as columns."""
    rows = found.rows
    return Distributions(
        rows["series"],
        rows["flags"],
        rows["n_buckets"],
        rows["n_bounds"],
        rows["time"],
        rows["start"],
        rows["count"],
        rows["sum"],
        rows["min"],
        rows["max"],
        found.buckets,
        found.bounds,
    )


def _time(table: pa.Table, name: str) -> Array:
    column: Array = pc.fill_null(table.column(name).cast(pa.int64()), 0).to_numpy()
    return column


def read_definitions(table: pa.Table) -> Iterator[tuple[int, bytes]]:
    """Number and definition of each series of ``table``."""
    names = (
        "id",
        "key",
        "measurement",
        "field",
        "tags",
        "kind",
        "unit",
        "temporality",
        "monotonic",
        "bounds",
    )
    columns = (table.column(name).to_pylist() for name in names)
    for number, key, measurement, field, tags, kind, unit, temporality, monotonic, bounds in zip(*columns, strict=True):
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
        yield number, series.pack(key)


_MAX_GROUP_ROWS = 1 << 20


def form_faults(directory: Path, manifest: Manifest) -> Iterator[str]:
    """What keeps a segment that came from elsewhere from being read as one's own are, as sentences: other tables,
    columns or numbers of rows than the manifest and this version say."""
    files = {file.name: file for file in manifest.files}
    for table, rows in manifest.rows.items():
        if table not in tables.SCHEMAS or (rows and f"{table}.parquet" not in files):
            yield f"{directory}: {rows} rows of {table[:80]!r}, and no such file"
    if manifest.series != manifest.rows.get("series", 0) or not 0 <= manifest.series < 2**32:
        yield f"{directory}: {manifest.series} series, and {manifest.rows.get('series', 0)} rows of them"
    for name, file in files.items():
        table = name.removesuffix(".parquet")
        wanted = tables.SCHEMAS[table].insert(0, pa.field("segment", pa.uint32()))
        try:
            with pq.ParquetFile(directory / name) as found:
                told = found.metadata
                groups = [told.row_group(at).num_rows for at in range(told.num_row_groups)]
                if not found.schema_arrow.equals(wanted):
                    yield f"{directory / name}: other columns than those of the table {table}"
                elif {told.num_rows, sum(groups)} != {file.rows} or manifest.rows.get(table) != file.rows:
                    yield f"{directory / name}: {told.num_rows} rows, the manifest says {file.rows}"
                elif max(groups, default=0) > _MAX_GROUP_ROWS:
                    yield f"{directory / name}: a row group of {max(groups)} rows; {_MAX_GROUP_ROWS} are allowed"
        except (pa.ArrowException, OSError, ValueError) as error:
            yield f"{directory / name}: not Parquet that can be read ({error})"
