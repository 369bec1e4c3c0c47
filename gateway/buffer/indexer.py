"""The thread behind the journal: it fills the index, seals what is closed, and keeps the buffer within its budgets.

Nothing that it does is waited for by a sender. All of it can be done again: after a crash, segments that were left open
are sealed from their journals.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import duckdb

from gateway.buffer import damage, segment
from gateway.buffer.catalog import Catalog
from gateway.buffer.index import Index
from gateway.buffer.journal import Damage, Entry, Tail, scan
from gateway.buffer.retention import Held, Plan, Usage, plan
from gateway.buffer.seal import Needed, seal
from gateway.buffer.segment import Segment, State
from gateway.buffer.writer import Writer
from gateway.config import BufferSettings
from gateway.metrics import Meters
from gateway.model import StorageError

log = logging.getLogger("locum.buffer")

LOAD_ROWS = 131_072
LOAD_AFTER_S = 2.0
ASKED_FOR_S = 600.0
"""So long after a question the index is kept up to date. Before, and after, nothing is spent on it: the next question
waits while the open segment is loaded, about a second for three million rows."""
_POLL_S = 0.2
_IDLE_S = 1.0
_TICK_S = 1.0
_RETRY_S = 10.0


class Indexer:
    """Owns ``catalog`` from ``start`` to ``stop``.

    ``needed(first, last)``: whether a sink may have to read these batches again byte by byte. ``delivered_through()``:
    the last batch that every sink has delivered, None where there is no sink. ``closed``: segments that
    ``Catalog.recover`` found; they are sealed first.
    """

    def __init__(
        self,
        catalog: Catalog,
        writer: Writer,
        settings: BufferSettings,
        meters: Meters,
        closed: list[Segment],
        *,
        needed: Needed = lambda first, last: False,
        delivered_through: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._catalog = catalog
        self._writer = writer
        self._settings = settings
        self._meters = meters
        self._needed = needed
        self._delivered_through = delivered_through
        self._to_seal = deque(closed)
        self._unindexed = {each.number for each in closed}
        self._reading: _Reading | None = None
        self._loaded_through = 0
        self._asked_through = 0
        self._asked_at = float("-inf")
        self._first_pending = 0.0
        self._next_tick = 0.0
        self._retry_at = 0.0
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._stopping = False
        self._full: str | None = None
        self._thread = threading.Thread(target=self._run, name="index", daemon=True)

    def start(self) -> None:
        self._tick()  # so that ``full`` tells the truth from the beginning
        self._thread.start()

    def stop(self) -> None:
        """End after the step that is being done. The open segment is sealed at the next start."""
        self._stopping = True
        self._wake.set()
        with self._progress:
            self._progress.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def full(self) -> str | None:
        """Why the writer must not write now, or None. Costs nothing: it is found out once a second."""
        return self._full

    def catch_up(self, timeout_s: float) -> bool:
        """Wait until all that is committed by now can be asked for; whether it can."""
        target = self._writer.committed().batch
        with self._progress:
            self._asked_through = max(self._asked_through, target)
            self._asked_at = time.monotonic()
            self._wake.set()
            return self._progress.wait_for(
                lambda: self._stopping or (self._loaded_through >= target and not self._unindexed), timeout_s
            )

    def _run(self) -> None:
        while not self._stopping:
            try:
                busy = self._step()
            except duckdb.OutOfMemoryException as error:
                log.warning("event=index_waits reason=memory error=%r", str(error))
                busy = False
            except duckdb.Error as error:
                log.error("event=index_lost error=%r action=it is made anew from the journal", str(error))
                busy = self._begin_anew()
            except Exception:
                log.exception("event=index_fault action=it goes on in a second")
                self._meters.quarantined.labels("index_fault").inc()
                busy = False
                self._wake.wait(1.0)
            if not busy:
                self._rest()
        if self._reading is not None:
            self._reading.close()

    def _rest(self) -> None:
        if not self._is_asked:
            self._wake.wait(_POLL_S)  # a closed segment does not wait long to be sealed
        elif self._reading is None or self._reading.index.pending or self._to_seal:
            self._wake.wait(_POLL_S)
        elif self._writer.committed().batch <= self._loaded_through:
            self._writer.wait(self._loaded_through, _IDLE_S)
        self._wake.clear()

    def _step(self) -> bool:
        """One round; whether there is more to do at once."""
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + _TICK_S
            self._tick()
        if self._reading is None:
            self._reading = self._next_reading()
        more = self._read()
        if self._to_seal and time.monotonic() >= self._retry_at:
            self._seal(self._to_seal[0])
            return True
        return more

    def _next_reading(self) -> _Reading | None:
        """The oldest segment that the writer has begun and this thread has not read."""
        newest = self._writer.committed().segment
        known = {each.number for each in self._to_seal}
        for found in segment.segments(self._catalog.data_dir):
            if found.state is State.OPEN and found.number not in known and found.number <= newest:
                return _Reading(self._catalog.index(found), self._writer)
        return None

    def _read(self) -> bool:
        """Read on in the present journal, load what is due; whether there is more to do at once."""
        reading = self._reading
        if reading is None:
            return False
        if not self._is_asked:
            return self._leave(reading)
        state = reading.gather(LOAD_ROWS)
        index = reading.index
        now = time.monotonic()
        asked = self._asked_through > self._loaded_through
        if not index.pending:
            self._first_pending = now
        elif state is not _More.LATER or asked or now - self._first_pending >= LOAD_AFTER_S:
            index.load()
            self._first_pending = now
        if state is _More.NOW:
            return True
        if not index.pending:
            self._advance(reading.through)
        if state is _More.NEVER:
            reading.close()
            self._reading = None
            self._to_seal.append(index.segment)
            return True
        return False

    @property
    def _is_asked(self) -> bool:
        """Whether somebody asks questions. The index is for them alone: sealing reads the journal."""
        return time.monotonic() - self._asked_at < ASKED_FOR_S

    def _leave(self, reading: _Reading) -> bool:
        """Nobody asks: load what is gathered, and read no further until somebody does or the segment is closed.
        Whether there is more to do at once."""
        if reading.index.pending:
            reading.index.load()
        if self._writer.committed().segment == reading.index.segment.number:
            return False
        self._unindexed.add(reading.index.segment.number)
        reading.close()
        self._reading = None
        self._to_seal.append(reading.index.segment)
        return True

    def _advance(self, batch: int) -> None:
        with self._progress:
            self._loaded_through = max(self._loaded_through, batch)
            self._progress.notify_all()

    def _seal(self, closed: Segment) -> None:
        began = time.monotonic()
        try:
            manifest = seal(self._catalog.data_dir, closed)
        except OSError as error:
            self._retry_at = time.monotonic() + _RETRY_S
            log.error(
                "event=seal_failed segment=%d error=%r action=the journal stays, sealing is tried again in %d s",
                closed.number,
                str(error),
                _RETRY_S,
            )
            return
        except StorageError as error:
            self._catalog.quarantine(closed, str(error))
            manifest = None
        self._to_seal.popleft()
        self._catalog.sealed_instead(closed.number, manifest)
        self._next_tick = 0.0  # its journal may go, and the budgets have news
        self._unindexed.discard(closed.number)
        self._advance(0)
        if manifest is None:
            return
        if manifest.damaged_bytes:
            self._meters.quarantined.labels("record").inc()
        log.info(
            "event=sealed segment=%d batches=%d points=%d bytes=%d damaged_bytes=%d undefined_rows=%d seconds=%.2f",
            closed.number,
            sum(manifest.batches.values()),
            manifest.all_points,
            manifest.bytes,
            manifest.damaged_bytes,
            manifest.undefined_rows,
            time.monotonic() - began,
        )

    def _begin_anew(self) -> bool:
        """Another DuckDB. The open segment is read again from its beginning; closed ones come back when sealed."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None
        self._unindexed |= {each.number for each in self._to_seal}
        self._meters.quarantined.labels("index").inc()
        try:
            self._catalog.begin_anew()
        except (duckdb.Error, OSError) as error:
            log.error("event=index_unavailable error=%r action=tried again in a second", str(error))
            self._wake.wait(1.0)
        self._loaded_through = 0
        return True

    def _tick(self) -> None:
        """Journals that are not needed, budgets, gauges."""
        try:
            self._catalog.tidy(self._needed)
            found = self._plan()
            for doomed in found.doomed:
                self._catalog.delete(doomed.held.segment)
                delivered = "yes" if doomed.delivered else "no"
                self._meters.pruned_points.labels(delivered, doomed.reason).inc(doomed.held.points)
                log.warning(
                    "event=pruned segment=%s points=%d bytes=%d delivered=%s reason=%s",
                    doomed.held.segment.path.relative_to(self._catalog.data_dir),
                    doomed.held.points,
                    doomed.held.bytes,
                    delivered,
                    doomed.reason,
                )
        except OSError as error:
            log.error("event=housekeeping_failed error=%r action=tried again in a second", str(error))
            return
        if found.full != self._full and bool(found.full) != bool(self._full):
            log.warning("event=%s reason=%r", "full" if found.full else "room_again", found.full or "")
        self._full = found.full
        if found.roll and not self._to_seal:
            self._writer.roll()

    def _plan(self) -> Plan:
        held = [
            Held(
                each,
                segment.directory_bytes(each.path) if each.journal.exists() else manifest.bytes,
                manifest.all_points,
                manifest.last_batch,
                manifest.last_received_ns,
            )
            for each, manifest in self._catalog.sealed()
        ]
        brought = [
            Held(each, manifest.bytes, manifest.all_points, None, each.path.stat().st_mtime_ns)
            for each, manifest in self._catalog.imported.sealed()
        ]
        others = [each for each in segment.segments(self._catalog.data_dir) if each.state is State.OPEN]
        open_bytes = sum(segment.directory_bytes(each.path) for each in others)
        sealed_bytes = sum(each.bytes for each in held)
        imported_bytes = sum(each.bytes for each in brought)
        self._meters.buffered_bytes.labels("sealed").set(sealed_bytes)
        self._meters.buffered_bytes.labels("open").set(open_bytes)
        self._meters.buffered_bytes.labels("imported").set(imported_bytes)
        self._meters.segments.labels("sealed").set(len(held))
        self._meters.segments.labels("open").set(len(others))
        self._meters.segments.labels("imported").set(len(brought))
        disk = os.statvfs(self._catalog.data_dir)
        usage = Usage(
            sealed_bytes + open_bytes + imported_bytes,
            disk.f_bavail * disk.f_frsize,
            self._delivered_through(),
            time.time_ns(),
        )
        return plan((*held, *brought), usage, self._settings)


class _More(Enum):
    """Whether a journal has more records: already, perhaps later, or never."""

    NOW = 1
    LATER = 2
    NEVER = 3


class _Reading:
    """A segment's journal on its way into its index. ``through``: the last batch that was committed when the journal
    was last read to its end."""

    def __init__(self, index: Index, writer: Writer) -> None:
        self.index = index
        self.through = 0
        self._writer = writer
        self._path = index.segment.journal
        self._tail = Tail(self._path)

    def gather(self, rows: int) -> _More:
        """Gather what is committed, about ``rows`` rows at most."""
        while self.index.pending < rows:
            committed = self._writer.committed()
            if committed.segment != self.index.segment.number:
                return self._gather_rest(rows)
            try:
                entries = self._tail.read(committed.offset)
            except StorageError as error:
                log.error("event=journal_damaged segment=%d error=%r", self.index.segment.number, str(error))
                self._skip_damage(committed.offset)
                continue
            if not entries:
                self.through = committed.batch
                return _More.LATER
            for entry in entries:
                self.index.gather(entry)
        return _More.NOW

    def _gather_rest(self, rows: int) -> _More:
        """The rest of a closed segment: to the end of the file, whatever is there."""
        for found in scan(self._path, self._tail.offset):
            take(self.index, self._path, found)
            self._tail.offset = found.end
            if self.index.pending >= rows:
                return _More.NOW
        return _More.NEVER

    def _skip_damage(self, committed: int) -> None:
        for found in scan(self._path, self._tail.offset, committed):
            take(self.index, self._path, found)
            self._tail.offset = found.end

    def close(self) -> None:
        self._tail.close()


def take(index: Index, journal: Path, found: Entry | Damage) -> None:
    """Gather a record; of damaged bytes, the definitions that are whole."""
    if isinstance(found, Entry):
        index.gather(found)
    elif not found.harmless:
        index.define(damage.salvage(damage.read(journal, found)), 0)
