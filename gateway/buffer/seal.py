"""Sealing: a closed journal becomes Parquet files and a manifest, for good.

The journal is read twice: once to count rows by series, once to deal them out, so that memory stays bounded while rows
come out ordered by series and time. Series are numbered anew, in the order of their fields and tags: rows of one metric
lie together, which packs well (20,000 GPU series at 15 s: under 2 bytes a point) and lets a question skip the others.

Crash-safe: until the directory loses its ``.open`` it is still the journal that counts, and sealing begins anew; from
then on the manifest counts, and what else lies there is deleted. ``steps`` is called with a name after each step (tests
stop there).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gateway.buffer import damage as damages
from gateway.buffer import index, segment
from gateway.buffer.journal import Entry, read_header, scan
from gateway.buffer.numbering import UNDEFINED, Numbering
from gateway.buffer.record import Record, read_body
from gateway.buffer.segment import SCHEMA_VERSION, File, Manifest, Segment
from gateway.buffer.spill import DistributionSpill, NumberSpill, Slots
from gateway.buffer.tables import (
    BATCHES,
    DISTRIBUTIONS,
    EVENTS,
    NUMBERS,
    SERIES,
    Gathering,
    distributions_table,
    events_table,
    numbers_table,
    series_table,
)
from gateway.model import CATEGORY_OF

SLOT_ROWS = 1 << 17
SLOT_BYTES = 8 << 20
_DEAL_ROWS = 1 << 17
SERIES_GROUP = 2048
"""Series a row group: number n of a sealed segment is in row group n // ``SERIES_GROUP``."""
_BATCHES_AT_ONCE = 32_768
_EVENTS_AT_ONCE = 8192
_SAMPLE_ROWS = 10_000

Steps = Callable[[str], None]
Needed = Callable[[int, int], bool]
Array = npt.NDArray[Any]


@dataclass(slots=True)
class _Survey:
    """What the first reading finds. ``counts`` of rows are by number of the series."""

    numbering: Numbering = field(default_factory=Numbering)
    series: list[tuple[int, bytes, int]] = field(default_factory=list)
    number_counts: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    distribution_counts: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    list_values: int = 0
    first_batch: int = 0
    last_batch: int = 0
    first_received_ns: int = 0
    last_received_ns: int = 0
    first_time_ns: int | None = None
    last_time_ns: int | None = None
    batches: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    damaged_bytes: int = 0
    undefined: int = 0

    def count_record(self, entry: Entry) -> None:
        record = entry.record
        if not self.batches:
            self.first_batch, self.first_received_ns = record.batch, record.received_ns
            self.last_received_ns = record.received_ns
        self.last_batch = record.batch
        self.first_received_ns = min(self.first_received_ns, record.received_ns)
        self.last_received_ns = max(self.last_received_ns, record.received_ns)
        self.batches[record.signal.name.lower()] += 1
        self.points[CATEGORY_OF[record.signal].path] += record.points
        self.define(record.definitions, record.received_ns)
        self._count_rows(record)
        self.numbering.end_record()

    def define(self, definitions: Iterable[tuple[int, bytes]], seen_ns: int) -> None:
        for series, definition in definitions:
            number = self.numbering.define(series, definition)
            if number is not None:
                self.series.append((number, definition, seen_ns))

    def _count_rows(self, record: Record) -> None:
        numbers, distributions, events = read_body(record.body)
        self.list_values += len(distributions.buckets) + len(distributions.bounds)
        for times in (numbers.time, distributions.time, events.time):
            self._widen(times)
        self.number_counts = self._counted(self.number_counts, numbers.series)
        self.distribution_counts = self._counted(self.distribution_counts, distributions.series)

    def _counted(self, counts: Array, series: Array) -> Array:
        if len(series):
            numbers = self.numbering.translate(series)
            defined = numbers[numbers != UNDEFINED]
            self.undefined += len(numbers) - len(defined)
            counts = _padded(counts, self.numbering.count)
            np.add.at(counts, defined, 1)
        return counts

    def _widen(self, times: Array) -> None:
        if len(times):
            first, last = int(times.min()), int(times.max())
            self.first_time_ns = first if self.first_time_ns is None else min(first, self.first_time_ns)
            self.last_time_ns = last if self.last_time_ns is None else max(last, self.last_time_ns)


def _padded(counts: Array, size: int) -> Array:
    if len(counts) >= size:
        return counts
    return np.concatenate([counts, np.zeros(max(size, len(counts) * 2) - len(counts), np.int64)])


def seal(data_dir: Path, closed: Segment, steps: Steps = lambda step: None) -> Manifest | None:
    """Seal a segment that nobody writes to any more; its manifest, or None when no record was in it (then it is gone).
    ``tidy`` is to be called afterwards.

    Raises ``OSError`` when the disk does not take it, ``StorageError`` when its journal is none; the segment is then as
    it was.
    """
    for leftover in (
        *closed.path.glob("*.parquet"),
        *closed.path.glob("*.new"),
        closed.path / segment.MANIFEST,
    ):
        leftover.unlink(missing_ok=True)
    steps("cleared")
    survey = _survey(data_dir, closed)
    if not survey.batches:
        segment.delete(closed)
        return None
    files = [file for file in _write_tables(closed, survey, steps) if file is not None]
    manifest = _manifest(closed, survey, files)
    manifest.write(closed.path)
    steps("manifest")
    segment.rename(closed.path, segment.sealed(closed).path)
    steps("renamed")
    return manifest


def tidy(sealed: Segment, manifest: Manifest, needed: Needed, steps: Steps = lambda step: None) -> bool:
    """Delete what a sealed segment does not need: the index, and the journal unless ``needed(first, last)`` batch says
    that a sink may have to read it again byte by byte. Whether the journal is gone. Raises ``OSError``."""
    index.discard(sealed)
    steps("index deleted")
    if not sealed.journal.exists():
        return True
    if needed(manifest.first_batch, manifest.last_batch):
        return False
    sealed.journal.unlink(missing_ok=True)
    steps("journal deleted")
    return True


def _records(data_dir: Path, closed: Segment, survey: _Survey | None = None) -> Iterator[Entry | damages.Definitions]:
    """Records of the journal; for damaged bytes, the definitions that are whole in them. With ``survey``, what is
    damaged is counted and kept in quarantine."""
    for found in scan(closed.journal):
        if isinstance(found, Entry):
            yield found
        elif not found.harmless:
            raw = damages.read(closed.journal, found)
            if survey is not None:
                survey.damaged_bytes += found.end - found.offset
                damages.keep(data_dir, closed.number, found, raw)
            yield damages.salvage(raw)


def _survey(data_dir: Path, closed: Segment) -> _Survey:
    damages.repair_header(data_dir, closed.number, closed.journal)
    survey = _Survey()
    seen_ns = 0
    for found in _records(data_dir, closed, survey):
        if isinstance(found, Entry):
            seen_ns = found.record.received_ns
            survey.count_record(found)
        else:
            survey.define(found, seen_ns)
    return survey


def _write_tables(closed: Segment, survey: _Survey, steps: Steps) -> Iterator[File | None]:
    order = sorted(survey.series, key=lambda each: _sort_key(each[1]))
    ranks = np.empty(survey.numbering.count, "<u4")
    ranks[[number for number, _, _ in order]] = np.arange(len(order), dtype="<u4")
    series = [(rank, definition, seen) for rank, (_, definition, seen) in enumerate(order)]
    yield _write(
        closed,
        "series",
        SERIES,
        (series_table(series[at : at + SERIES_GROUP]) for at in range(0, len(series), SERIES_GROUP)),
    )
    steps("series")
    kinds = np.empty_like(survey.numbering.kinds)
    kinds[ranks] = survey.numbering.kinds
    yield from _write_rows(closed, survey, ranks, kinds, steps)


def _sort_key(definition: bytes) -> tuple[bytes, bytes]:
    """Field, then measurement and tags, of a definition (``model.Series.pack``)."""
    head_size = int.from_bytes(definition[12:16], "little")
    name_size = int.from_bytes(definition[16:18], "little")
    head_end = 24 + head_size
    return definition[head_end : head_end + name_size], definition[24:head_end]


def _write_rows(closed: Segment, survey: _Survey, ranks: Array, kinds: Array, steps: Steps) -> Iterator[File | None]:
    """Deal out numbers and distributions, write batches and events on the way, then the sorted rows."""
    count = survey.numbering.count
    by_rank = [np.zeros(count, np.int64) for _ in range(2)]
    for target, counts in zip(by_rank, (survey.number_counts, survey.distribution_counts), strict=True):
        target[ranks] = _padded(counts, count)[:count]
    numbers = NumberSpill(Slots(by_rank[0], SLOT_ROWS), closed.path)
    rows = max(int(by_rank[1].sum()), 1)
    row_bytes = 80 + 8 * survey.list_values // rows
    distributions = DistributionSpill(Slots(by_rank[1], max(4096, SLOT_BYTES // row_bytes)), closed.path)
    try:
        batches = _Table(closed, "batches", BATCHES, _BATCHES_AT_ONCE)
        events = _Table(closed, "events", EVENTS, _EVENTS_AT_ONCE)
        for gathered in _gather(closed):
            number_rows = gathered.take_numbers()
            number_rows["series"] = ranks[number_rows["series"]]
            numbers.add(number_rows)
            found = gathered.take_distributions()
            found.rows["series"] = ranks[found.rows["series"]]
            distributions.add(found)
            batches.add(gathered.take_batches())
            raw = gathered.take_events()
            for at in range(0, len(raw), _EVENTS_AT_ONCE):
                events.add(events_table(raw[at : at + _EVENTS_AT_ONCE]))
        for table in (batches, events):
            yield table.close()
            steps(table.name)
        yield _write(closed, "numbers", NUMBERS, (numbers_table(each, kinds) for each in numbers.sorted()))
        steps("numbers")
        tables = (distributions_table(each, kinds) for each in distributions.sorted())
        yield _write(closed, "distributions", DISTRIBUTIONS, tables)
        steps("distributions")
    finally:
        numbers.close()
        distributions.close()


def _gather(closed: Segment) -> Iterator[Gathering]:
    """The second reading: the same numbers for the series as in the first, rows in portions."""
    gathering = Gathering(Numbering())
    for found in _records(closed.path.parent.parent, closed):
        if not isinstance(found, Entry):
            gathering.define(found, 0)
            continue
        gathering.add(found.record)
        if gathering.rows >= _DEAL_ROWS:
            gathering.take_series()
            yield gathering
    yield gathering


class _Table:
    """A Parquet file while it is being written, under its final name; the manifest makes it count."""

    def __init__(self, closed: Segment, name: str, schema: pa.Schema, group_rows: int = 1) -> None:
        self.name = name
        self._group_rows = group_rows
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._path = closed.table(name)
        self._number = pa.scalar(closed.number, pa.uint32())
        self._schema = schema.insert(0, pa.field("segment", pa.uint32()))
        self._writer: pq.ParquetWriter | None = None
        self._rows = 0

    def add(self, table: pa.Table) -> None:
        """Rows to be written, a group of at least ``group_rows`` at a time."""
        if table.num_rows:
            self._pending.append(table)
            self._pending_rows += table.num_rows
        if self._pending_rows >= self._group_rows:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        table = pa.concat_tables(self._pending)
        self._pending, self._pending_rows = [], 0
        if self._writer is None:
            self._writer = _writer(self._path, self._schema, table)
        numbers = pa.repeat(self._number, table.num_rows)
        self._writer.write_table(table.add_column(0, "segment", numbers), row_group_size=table.num_rows)
        self._rows += table.num_rows

    def close(self) -> File | None:
        self._flush()
        if self._writer is None:
            return None
        self._writer.close()
        segment.sync_file(self._path)
        return File(self._path.name, self._path.stat().st_size, self._rows, segment.sha256(self._path))


def _write(closed: Segment, name: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> File | None:
    """A whole table; None where it has no rows (then there is no file)."""
    file = _Table(closed, name, schema)
    for table in tables:
        file.add(table)
    return file.close()


def _writer(target: Any, schema: pa.Schema, sample: pa.Table) -> pq.ParquetWriter:
    """A writer whose encodings fit the columns. Integers and times differ little from row to row: DELTA_BINARY_PACKED.
    Times that jitter, but the same for many series, pack better plain or as a dictionary: the sample decides."""
    encodings, dictionary = {}, []
    for column in schema:
        if column.name in ("time", "start_time", "received"):
            encoding = _time_encoding(sample.column(column.name))
            if encoding is None:
                dictionary.append(column.name)
            else:
                encodings[column.name] = encoding
        elif column.name in ("series", "batch", "int_value", "id"):
            encodings[column.name] = "DELTA_BINARY_PACKED"
        elif column.name in ("value", "point", "key", "fields", "sum", "min", "max", "trace_id"):
            encodings[column.name] = "PLAIN"
        elif not pa.types.is_nested(column.type):
            dictionary.append(column.name)
        else:
            dictionary += _leaves(column)
    return pq.ParquetWriter(
        target,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=dictionary,
        column_encoding=encodings,
        write_statistics=True,
        write_page_checksum=True,
    )


def _leaves(column: pa.Field) -> list[str]:
    if pa.types.is_map(column.type):
        return [f"{column.name}.key_value.key", f"{column.name}.key_value.value"]
    return [f"{column.name}.list.element"]


def _time_encoding(times: pa.ChunkedArray) -> str | None:
    """The encoding that packs ``times`` best; None: a dictionary."""
    if len(times) < _SAMPLE_ROWS:
        return "DELTA_BINARY_PACKED"
    sizes: dict[str | None, int] = {}
    column = pa.table({"t": times})
    for encoding in ("DELTA_BINARY_PACKED", "PLAIN", None):
        sink = pa.BufferOutputStream()
        options: dict[str, Any] = {"use_dictionary": True}
        if encoding is not None:
            options = {"use_dictionary": False, "column_encoding": {"t": encoding}}
        pq.write_table(column, sink, compression="zstd", compression_level=1, **options)
        sizes[encoding] = sink.getvalue().size
    return min(sizes, key=lambda encoding: sizes[encoding])


def _manifest(closed: Segment, survey: _Survey, files: list[File]) -> Manifest:
    return Manifest(
        segment=closed.number,
        schema_version=SCHEMA_VERSION,
        locum_version=_version(),
        gateway_id=read_header(closed.journal).gateway_id.decode("ascii", "backslashreplace"),
        sealed_ns=time.time_ns(),
        first_batch=survey.first_batch,
        last_batch=survey.last_batch,
        first_received_ns=survey.first_received_ns,
        last_received_ns=survey.last_received_ns,
        first_time_ns=survey.first_time_ns,
        last_time_ns=survey.last_time_ns,
        series=survey.numbering.count,
        batches=dict(survey.batches),
        points=dict(survey.points),
        rows={file.name.removesuffix(".parquet"): file.rows for file in files},
        bytes=sum(file.bytes for file in files),
        damaged_bytes=survey.damaged_bytes,
        undefined_rows=survey.undefined,
        files=tuple(files),
    )


def _version() -> str:
    try:
        return version("locum")
    except PackageNotFoundError:
        return "0"
