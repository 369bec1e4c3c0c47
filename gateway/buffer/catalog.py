"""The segments there are: sealed ones with their manifests, the open one with its index. What questions are asked of.

One DuckDB in memory, to which the index of each segment that is not sealed yet is attached. Only the indexing thread
changes the catalog; any thread may take a ``snapshot``.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import duckdb

from gateway.buffer import damage, segment, sql
from gateway.buffer.imported import Imported
from gateway.buffer.index import Index
from gateway.buffer.journal import RECORD_HEADER, Entry, read_header, scan
from gateway.buffer.seal import Needed, seal, tidy
from gateway.buffer.segment import Manifest, Segment, State
from gateway.config import BufferSettings
from gateway.metrics import Meters
from gateway.model import StorageError

log = logging.getLogger("locum.buffer")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which segments a question is about: all that are sealed or imported, and the indexes of the others."""

    sealed: tuple[tuple[Segment, Manifest], ...]
    imported: tuple[tuple[Segment, Manifest], ...]
    attached: tuple[tuple[int, str], ...]
    cursor: duckdb.DuckDBPyConnection


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a start finds: segments that are closed and not sealed, and the numbers to go on with. Neither number was
    ever used, as far as the files tell; a sink's cursor may know of a later batch, whose segment is gone."""

    closed: list[Segment]
    next_segment: int
    next_batch: int


class Catalog:
    """See the module. ``data_dir`` is locked by this process. ``recover`` comes first."""

    def __init__(self, data_dir: Path, settings: BufferSettings, meters: Meters) -> None:
        self.data_dir = data_dir
        self._settings = settings
        self._meters = meters
        self._lock = threading.Lock()
        self._sealed: dict[int, tuple[Segment, Manifest]] = {}
        self._indexes: dict[int, Index] = {}
        self._with_journal: set[int] = set()
        self.imported = Imported(data_dir)
        shutil.rmtree(data_dir / "tmp", ignore_errors=True)  # what a question had put on disk when the process ended
        self._connection = sql.connect(data_dir, settings)

    def recover(self) -> Recovered:
        """Look at what lies in the data directory: finish deletions, move damaged segments to quarantine. Raises
        ``OSError``."""
        there = segment.segments(self.data_dir)
        numbers = [each.number for each in there] + segment.quarantined_numbers(self.data_dir)
        closed = []
        for found in there:
            if found.state is State.DELETED:
                segment.delete(found)
            elif found.state is State.OPEN:
                if found.journal.exists():
                    closed.append(found)
                else:
                    self.quarantine(found, "a segment without a journal")
            else:
                try:
                    self._sealed[found.number] = (found, Manifest.read(found.path))
                except StorageError as error:
                    self.quarantine(found, str(error))
                    continue
                self._with_journal.add(found.number)
        last_batch = max((manifest.last_batch for _, manifest in self._sealed.values()), default=0)
        for each in closed:
            last_batch = max(last_batch, _last_batch(self.data_dir, each))
        return Recovered(closed, max(numbers, default=0) + 1, last_batch + 1)

    def seal_all(self, closed: list[Segment]) -> None:
        """Seal segments that ``recover`` found; one whose journal is none goes to quarantine. Raises ``OSError``."""
        for each in closed:
            try:
                manifest = seal(self.data_dir, each)
            except StorageError as error:
                self.quarantine(each, str(error))
                continue
            self.sealed_instead(each.number, manifest)

    def quarantine(self, bad: Segment, why: str) -> None:
        """Move a whole segment aside. Raises ``OSError``."""
        target = segment.quarantine(self.data_dir, bad.path, why)
        self._meters.quarantined.labels("segment").inc()
        log.error("event=segment_quarantined segment=%d why=%r moved_to=%s", bad.number, why, target)

    def index(self, open_segment: Segment) -> Index:
        """A new, empty index of a segment. Raises ``duckdb.Error``, ``OSError``."""
        index = Index(self._connection, open_segment)
        with self._lock:
            self._indexes[open_segment.number] = index
        return index

    def sealed_instead(self, number: int, manifest: Manifest | None) -> None:
        """A segment is sealed (None: it was empty): its Parquet files take the place of its index."""
        with self._lock:
            index = self._indexes.pop(number, None)
            if manifest is not None:
                path = self.data_dir / "segments" / f"{number:08d}"
                self._sealed[number] = (Segment(number, State.SEALED, path), manifest)
                self._with_journal.add(number)
        if index is not None:
            index.detach()

    def tidy(self, needed: Needed) -> None:
        """Delete the journals of sealed segments that no sink needs. Raises ``OSError``."""
        for number in sorted(self._with_journal):
            if tidy(*self._sealed[number], needed):
                self._with_journal.discard(number)

    def delete(self, doomed: Segment) -> None:
        """Delete a sealed segment, or an imported one. Raises ``OSError``."""
        with self._lock:
            if self._sealed.get(doomed.number, (None, None))[0] == doomed:
                del self._sealed[doomed.number]
                self._with_journal.discard(doomed.number)
        segment.delete(doomed)

    def sealed(self) -> list[tuple[Segment, Manifest]]:
        """Sealed segments, the oldest first."""
        with self._lock:
            return [self._sealed[number] for number in sorted(self._sealed)]

    def snapshot(self) -> Snapshot:
        imported = tuple(self.imported.sealed())
        with self._lock:
            attached = tuple((number, self._indexes[number].name) for number in sorted(self._indexes))
            sealed = tuple(self._sealed[number] for number in sorted(self._sealed))
            return Snapshot(sealed, imported, attached, self._connection.cursor())

    def begin_anew(self) -> None:
        """Leave DuckDB and all indexes, which are of no use any more, and start another. Raises ``duckdb.Error``."""
        with self._lock:
            self._indexes.clear()
            broken, self._connection = self._connection, sql.connect(self.data_dir, self._settings)
        _quietly(broken.close)

    def close(self) -> None:
        with self._lock:
            indexes = list(self._indexes.values())
            self._indexes.clear()
        for index in indexes:
            _quietly(index.detach)
        _quietly(self._connection.close)


def _last_batch(data_dir: Path, closed: Segment) -> int:
    """The last batch number that a journal may have used: each damaged stretch may have been as many records as fit."""
    if not damage.repair_header(data_dir, closed.number, closed.journal):
        return 0
    last = read_header(closed.journal).first_batch - 1
    for found in scan(closed.journal):
        if isinstance(found, Entry):
            last = max(last, found.record.batch)
        elif not found.harmless:
            last += (found.end - found.offset) // RECORD_HEADER.size + 1
    return last


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except duckdb.Error as error:
        log.warning("event=index_close_failed error=%r", str(error))
