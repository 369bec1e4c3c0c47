"""The rows of sealed segments in the order in which they lie there, a row group at a time: the quick way to read a lot.

A portion is what a row group has of what is wanted. The same buffer and the same wish give the same portions, however
often; ``place`` says where one lies, so that a reader can go on behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gateway.buffer import segment
from gateway.buffer.imported import imported_segments
from gateway.buffer.record import pack_columns, pack_events
from gateway.buffer.seal import SERIES_GROUP
from gateway.buffer.sealed import (
    CATEGORIES,
    COLUMNS,
    distribution_rows,
    distributions_of,
    fill_numbers,
    numbers_of,
    read_definitions,
)
from gateway.buffer.segment import Manifest, Segment, State
from gateway.buffer.tables import NUMBER, pick
from gateway.model import Category, Series, StorageError

log = logging.getLogger("locum.buffer")

_TABLES = ("numbers", "distributions", "events")
_DEFINED_GROUPS = 64
"""Row groups of series whose definitions a reader has to remember at once: 131,072 series."""

_BODY_NUMBERS, _BODY_DISTRIBUTIONS = 32_768, 2048
"""Rows a body: what is made of one has to fit in memory, and a distribution may become a hundred points."""

Array = npt.NDArray[Any]
Place = tuple[int, str, int, int]
"""When the first of the segment was received, its name, the number of the table within it and of the row group within
that: the oldest first, whichever gateway has sealed it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows of times ``first_ns`` to ``last_ns`` (both included). ``takes_series``, ``takes_event`` (category, encoded
    point): which of them; None: all."""

    first_ns: int = -(2**63)
    last_ns: int = 2**63 - 1
    takes_series: Callable[[Series], bool] | None = None
    takes_event: Callable[[Category, bytes], bool] | None = None
    categories: frozenset[Category] = frozenset(Category)

    def overlaps(self, manifest: Manifest) -> bool:
        """Whether a segment may have rows of these times. One without times has whatever is asked for at all."""
        if manifest.first_time_ns is None or manifest.last_time_ns is None:
            return (self.first_ns, self.last_ns) == (-(2**63), 2**63 - 1)
        return manifest.first_time_ns <= self.last_ns and self.first_ns <= manifest.last_time_ns


@dataclass(frozen=True, slots=True)
class Portion:
    """``bodies`` (``buffer.record``) are of one category each and have ``rows`` rows in all; ``skipped`` were not
    wanted, ``damaged`` could not be read. ``name`` is the same for the same rows in every copy of the segment.

    ``fresh``: ids of series mean something else from here on. ``definitions`` are those that were not said since.
    """

    place: Place
    name: str
    fresh: bool
    definitions: tuple[tuple[int, bytes], ...]
    bodies: tuple[tuple[Category, bytes], ...]
    rows: int
    skipped: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class Chosen:
    """A sealed segment to read from. ``arrived_ns``: when it was sealed here, or imported."""

    segment: Segment
    manifest: Manifest
    arrived_ns: int

    @property
    def name(self) -> str:
        """The same for every copy of the segment."""
        return f"{self.manifest.gateway_id}/{self.manifest.first_batch}"

    @property
    def place(self) -> tuple[int, str]:
        return self.manifest.first_received_ns, self.name


def sealed_segments(data_dir: Path, wanted: Wanted) -> tuple[list[Chosen], list[str]]:
    """Sealed segments that may have wanted rows, one's own and imported ones, the oldest first; then what is wrong with
    those whose manifest cannot be read."""
    found: dict[str, Chosen] = {}
    damaged = []
    own = {each for each in segment.segments(data_dir) if each.state is State.SEALED}
    for each in (*own, *imported_segments(data_dir)):
        try:
            manifest = Manifest.read(each.path)
            arrived_ns = manifest.sealed_ns if each in own else each.path.stat().st_mtime_ns
        except (StorageError, FileNotFoundError) as error:
            if each.path.exists():  # else retention was quicker
                damaged.append(str(error))
            continue
        if wanted.overlaps(manifest):
            chosen = Chosen(each, manifest, arrived_ns)
            found.setdefault(chosen.name, chosen)
    return sorted(found.values(), key=lambda chosen: chosen.place), damaged


def all_rows(manifest: Manifest) -> int:
    """Rows that ``portions`` looks at in a segment."""
    return sum(manifest.rows.get(table, 0) for table in _TABLES)


def portions(chosen: list[Chosen], wanted: Wanted, after: Place | None = None) -> Iterator[Portion]:
    """What is wanted of these segments, behind the place ``after``. A segment that is gone, and a row group that cannot
    be read, come as a portion without bodies whose rows are ``damaged``."""
    for each in chosen:
        if after is not None and each.place < after[:2]:
            continue
        try:
            with ExitStack() as stack:
                reader = _Reader(each, wanted, stack)
                yield from reader.portions(after)
        except (pa.ArrowException, OSError) as error:
            log.error("event=segment_unreadable path=%s error=%r", each.segment.path, str(error))
            yield Portion((*each.place, len(_TABLES), 0), "", True, (), (), 0, damaged=all_rows(each.manifest))


class _Reader:
    """Reads one segment."""

    def __init__(self, chosen: Chosen, wanted: Wanted, stack: ExitStack) -> None:
        self._chosen = chosen
        self._wanted = wanted
        self._files = {
            name: stack.enter_context(pq.ParquetFile(chosen.segment.table(name), page_checksum_verification=True))
            for name in (*_TABLES, "series")
            if chosen.manifest.has(name)
        }
        self._taken = np.zeros(chosen.manifest.series, bool)
        self._said: set[int] = set()
        self._fresh = True

    def portions(self, after: Place | None) -> Iterator[Portion]:
        for at, name in enumerate(_TABLES):
            file = self._files.get(name)
            if file is None:
                continue
            for group in range(file.metadata.num_row_groups):
                place = (*self._chosen.place, at, group)
                if after is None or place > after:
                    yield self._portion(place, name, file, group)

    def _portion(self, place: Place, name: str, file: pq.ParquetFile, group: int) -> Portion:
        rows = file.metadata.row_group(group).num_rows
        title = f"{self._chosen.name}/{name}/{group}"
        if name != "events" and Category.METRIC not in self._wanted.categories:
            return Portion(place, title, self._is_fresh(), (), (), 0, rows)
        columns = [column for column in file.schema_arrow.names if column in COLUMNS[name]]
        try:
            table = file.read_row_group(group, columns)
            if name == "events":
                bodies, taken = self._events(table)
                definitions: tuple[tuple[int, bytes], ...] = ()
            else:
                metrics, taken, definitions = self._metrics(name, table)
                bodies = tuple((Category.METRIC, body) for body in metrics)
        except (pa.ArrowException, OSError, ValueError, LookupError) as error:  # a stranger may have written it
            log.error("event=rows_damaged segment=%s table=%s row_group=%d error=%r", place[1], name, group, str(error))
            return Portion(place, title, self._is_fresh(), (), (), 0, damaged=rows)
        return Portion(place, title, self._is_fresh(), definitions, bodies, taken, rows - taken)

    def _is_fresh(self) -> bool:
        fresh, self._fresh = self._fresh, False
        return fresh

    def _metrics(self, name: str, table: pa.Table) -> tuple[list[bytes], int, tuple[tuple[int, bytes], ...]]:
        """Bodies, rows in them and new definitions of a row group of numbers or distributions."""
        if name == "numbers":
            rows = np.empty(table.num_rows, NUMBER)
            fill_numbers(rows, table)
            definitions = self._definitions(rows["series"])
            keep = self._keep(rows)
            if not keep.all():
                rows = rows[keep]
            parts = [rows[at : at + _BODY_NUMBERS] for at in range(0, len(rows), _BODY_NUMBERS)]
            return [pack_columns(numbers_of(part)) for part in parts], len(rows), definitions
        found = distribution_rows(table)
        definitions = self._definitions(found.rows["series"])
        kept = np.flatnonzero(self._keep(found.rows))
        chosen = [kept[at : at + _BODY_DISTRIBUTIONS] for at in range(0, len(kept), _BODY_DISTRIBUTIONS)]
        return [pack_columns(None, distributions_of(pick(found, rows))) for rows in chosen], len(kept), definitions

    def _keep(self, rows: Array) -> Array:
        keep: Array = (rows["time"] >= self._wanted.first_ns) & (rows["time"] <= self._wanted.last_ns)
        if self._wanted.takes_series is not None:
            keep &= self._taken[rows["series"]]
        return keep

    def _definitions(self, series: Array) -> tuple[tuple[int, bytes], ...]:
        """Definitions, not said so far, of the row groups of series that are used."""
        used: set[int] = set(np.unique(series // SERIES_GROUP).tolist())
        if len(self._said | used) > _DEFINED_GROUPS:
            self._said, self._fresh = set(), True
        said: list[tuple[int, bytes]] = []
        for group in sorted(used - self._said):
            for number, definition in read_definitions(self._files["series"].read_row_group(group)):
                takes = self._wanted.takes_series
                if takes is None or takes(Series.unpack(definition)):
                    self._taken[number] = True
                    said.append((number, definition))
        self._said |= used  # only now: what could not be read to the end is read again
        return tuple(said)

    def _events(self, table: pa.Table) -> tuple[tuple[tuple[Category, bytes], ...], int]:
        """Bodies by category, and how many events are in them."""
        times = table.column("time").cast(pa.int64()).to_numpy()
        inside = np.flatnonzero((times >= self._wanted.first_ns) & (times <= self._wanted.last_ns))
        some = table.take(pa.array(inside))
        found: dict[Category, list[tuple[int, int, bytes]]] = {}
        takes = self._wanted.takes_event
        names, points = some.column("category").to_pylist(), some.column("point").to_pylist()
        for name, time_ns, point in zip(names, times[inside].tolist(), points, strict=True):
            category = Category(CATEGORIES[name])
            if category in self._wanted.categories and (takes is None or takes(category, point)):
                found.setdefault(category, []).append((category, time_ns, point))
        bodies = tuple((category, pack_events(events)) for category, events in sorted(found.items()))
        return bodies, sum(map(len, found.values()))
