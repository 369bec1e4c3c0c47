"""The segments there are: sealed ones with their manifests, the open one with its index. What questions are asked of.

One DuckDB in memory, to which the index of each segment that is not sealed yet is attached. Only the indexing thread
changes the catalog; any thread may take a ``snapshot``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import duckdb

from gateway.buffer import segment, sql
from gateway.buffer.index import Index
from gateway.buffer.seal import Needed, seal, tidy
from gateway.buffer.segment import Manifest, Segment, State
from gateway.config import BufferSettings
from gateway.metrics import Meters
from gateway.model import StorageError

log = logging.getLogger("locum.buffer")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which segments a question is about: all that are sealed, and the indexes of the others."""

    sealed: tuple[tuple[Segment, Manifest], ...]
    attached: tuple[tuple[int, str], ...]
    cursor: duckdb.DuckDBPyConnection


class Catalog:
    """See the module. ``recover`` comes first."""

    def __init__(self, data_dir: Path, settings: BufferSettings, meters: Meters) -> None:
        self.data_dir = data_dir
        self._settings = settings
        self._meters = meters
        self._lock = threading.Lock()
        self._sealed: dict[int, tuple[Segment, Manifest]] = {}
        self._indexes: dict[int, Index] = {}
        self._with_journal: set[int] = set()
        self._connection = sql.connect(data_dir, settings)

    def recover(self) -> list[Segment]:
        """Look at what lies in the data directory: finish deletions, move damaged segments to quarantine. The segments
        that are closed and not sealed yet. Raises ``OSError``."""
        closed = []
        for found in segment.segments(self.data_dir):
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
        return closed

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

    def delete(self, number: int) -> None:
        """Delete a sealed segment. Raises ``OSError``."""
        with self._lock:
            found, _ = self._sealed.pop(number)
            self._with_journal.discard(number)
        segment.delete(found)

    def sealed(self) -> list[tuple[Segment, Manifest]]:
        """Sealed segments, the oldest first."""
        with self._lock:
            return [self._sealed[number] for number in sorted(self._sealed)]

    def snapshot(self) -> Snapshot:
        with self._lock:
            attached = tuple((number, self._indexes[number].name) for number in sorted(self._indexes))
            sealed = tuple(self._sealed[number] for number in sorted(self._sealed))
            return Snapshot(sealed, attached, self._connection.cursor())

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


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except duckdb.Error as error:
        log.warning("event=index_close_failed error=%r", str(error))
