"""The writer: one thread that puts batches into the journal, and says when they are safe.

What waits is written together and synced once (group commit): the longer the disk takes, the more requests share it.
A future is resolved only after the sync. When a write or a sync fails, none of its batches is acknowledged; after a
failed sync the file is never written to again, since the kernel may have dropped what it could not write.

Followers read the file themselves, up to ``committed()``.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from gateway.buffer import journal
from gateway.config import BufferSettings
from gateway.metrics import Meters
from gateway.model import Batch, Reason, Refusal, StorageError
from gateway.series import SeriesTable

log = logging.getLogger("locum.buffer")

RETRY_AFTER_S = 1.0
RETRY_AFTER_FULL_S = 10.0
_GROUP_BYTES = 32 << 20


Item = tuple[Batch, SeriesTable, "Future[int]"]


@dataclass(frozen=True, slots=True)
class Committed:
    """How far the buffer is safe: the first ``offset`` bytes of the journal of ``segment``, up to batch ``batch``."""

    segment: int
    offset: int
    batch: int


class Writer:
    """Owns the open segment's journal. ``table`` holds the definitions of the series that batches refer to.

    ``on_roll(closed, opened)`` is called in the writer's thread whenever a new segment has begun; ``full()`` says
    why nothing may be written now, or None; ``swap(table)`` gives the writer another registry's definitions.
    """

    def __init__(
        self,
        data_dir: Path,
        settings: BufferSettings,
        meters: Meters,
        table: SeriesTable,
        *,
        segment: int,
        first_batch: int,
        gateway_id: bytes,
        on_roll: Callable[[int, int], None] = lambda closed, opened: None,
        full: Callable[[], str | None] = lambda: None,
        max_pending_bytes: int = 128 << 20,
    ) -> None:
        self._data_dir = data_dir
        self._settings = settings
        self._meters = meters
        self._table = table
        self._gateway_id = gateway_id
        self._on_roll = on_roll
        self._full = full
        self._max_pending_bytes = max_pending_bytes
        self._pending: deque[Item] = deque()
        self._pending_bytes = 0
        self._work = threading.Condition()
        self._safe = threading.Condition()
        self._stopping = False
        self._roll_wanted: list[Future[int]] = []
        self._next_batch = first_batch
        self._descriptor = -1
        self._opened_at = 0.0
        self._broken = False
        self._committed = Committed(segment, 0, first_batch - 1)
        self._open(segment)
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, batch: Batch, table: SeriesTable) -> Future[int]:
        """Queue a batch whose series are in ``table``; the future gives its number once it is synced, or raises
        ``Refusal``. Raises ``Refusal`` at once when too much waits already or the buffer is full."""
        reason = self._full()
        if reason is not None:
            raise Refusal(Reason.DISK_FULL, f"the buffer is full: {reason}", RETRY_AFTER_FULL_S)
        future: Future[int] = Future()
        with self._work:
            if self._stopping:
                raise Refusal(Reason.STOPPING, "the gateway is stopping", RETRY_AFTER_S)
            if self._pending_bytes + len(batch.body) > self._max_pending_bytes and self._pending:
                raise Refusal(
                    Reason.OVERLOADED,
                    f"{self._pending_bytes} bytes wait to be written, {self._max_pending_bytes} are allowed",
                    RETRY_AFTER_S,
                )
            self._pending.append((batch, table, future))
            self._pending_bytes += len(batch.body)
            self._work.notify()
        return future

    def committed(self) -> Committed:
        return self._committed

    def wait(self, after_batch: int, timeout_s: float) -> Committed:
        """Wait until a batch beyond ``after_batch`` is safe, or until the time is over or the writer stops."""
        with self._safe:
            self._safe.wait_for(lambda: self._committed.batch > after_batch or self._stopping, timeout_s)
            return self._committed

    def roll(self) -> Future[int]:
        """Ask for a new segment now; the future gives its number (the present one's if that is still empty)."""
        future: Future[int] = Future()
        with self._work:
            self._roll_wanted.append(future)
            self._work.notify()
        return future

    def stop(self) -> None:
        """Write what waits, then end. Later batches are refused."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        with self._safe:
            self._safe.notify_all()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def pending_bytes(self) -> int:
        return self._pending_bytes

    def _run(self) -> None:
        while True:
            group = self._take()
            if group is None:
                return
            try:
                self._commit(group)
            except (OSError, StorageError) as error:
                self._fail(group, error)
            except Exception as error:
                log.exception("event=writer_fault batches=%d", len(group))
                self._fail(group, error)
            try:
                self._roll_if_due()
            except OSError as error:
                log.error("event=roll_failed error=%r action=the present segment goes on", str(error))

    def _take(self) -> list[Item] | None:
        """What to write next; an empty list when only the clock or a wish to roll calls; None at the end."""
        with self._work:
            self._work.wait_for(lambda: self._pending or self._stopping or self._roll_wanted, 1.0)
            if self._stopping and not self._pending:
                return None
            group: list[Item] = []
            size = 0
            while self._pending and (not group or self._fits(group[0], size)):
                item = self._pending.popleft()
                group.append(item)
                size += len(item[0].body)
            self._pending_bytes -= size
            return group

    def _fits(self, first: Item, size: int) -> bool:
        """Whether the next waiting batch may be written with ``first``, behind ``size`` bytes. Ids of one segment come
        from one table."""
        batch, table, _ = self._pending[0]
        return table is first[1] and size + len(batch.body) <= _GROUP_BYTES

    def _commit(self, group: list[Item]) -> None:
        if not group:
            return
        table = group[0][1]
        if table is not self._table and self._committed.offset > journal.FILE_HEADER.size:
            self._table = table
            self._new_segment()
        elif self._broken:
            self._new_segment()
        self._table = table
        began = time.perf_counter()
        parts: list[journal.Buffer] = []
        offset, number = self._committed.offset, self._next_batch
        for batch, _, _ in group:
            definitions = batch.definitions + table.undefined(batch.body)
            pieces, size = journal.record_parts(
                number, batch.received_ns, batch.signal, batch.points, definitions, batch.body
            )
            parts += pieces
            offset += size
            number += 1
        journal.write_all(self._descriptor, parts)
        try:
            os.fdatasync(self._descriptor)
        except OSError:
            self._broken = True
            self._next_batch = number  # what may have reached the disk keeps its numbers
            raise
        self._next_batch = number
        with self._safe:
            self._committed = Committed(self._committed.segment, offset, number - 1)
            self._safe.notify_all()
        self._meters.commit_s.observe(time.perf_counter() - began)
        for batch_number, (batch, _, future) in enumerate(group, number - len(group)):
            self._meters.accepted.labels(batch.signal.name.lower()).inc(batch.points)
            future.set_result(batch_number)

    def _fail(self, group: list[Item], error: Exception) -> None:
        """Acknowledge nothing of ``group``, and leave the file as it was before."""
        self._table.next_epoch()
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = Reason.DISK_FULL if full else Reason.STORAGE
        try:
            os.ftruncate(self._descriptor, self._committed.offset)
            os.lseek(self._descriptor, self._committed.offset, os.SEEK_SET)
        except OSError as again:
            self._broken = True
            log.error("event=truncate_failed error=%r action=a new segment is begun", str(again))
        log.error(
            "event=write_failed segment=%d batches=%d error=%r action=%s",
            self._committed.segment,
            len(group),
            str(error),
            "free disk space, or lower buffer.max_bytes" if full else "check the disk",
        )
        refusal = Refusal(reason, f"not written: {error}", RETRY_AFTER_FULL_S if full else RETRY_AFTER_S)
        for _, _, future in group:
            future.set_exception(refusal)

    def _roll_if_due(self) -> None:
        with self._work:
            wanted, self._roll_wanted = self._roll_wanted, []
        empty = self._committed.offset <= journal.FILE_HEADER.size
        age_s = time.monotonic() - self._opened_at
        due = self._committed.offset >= self._settings.segment_bytes or age_s >= self._settings.segment_age_s
        try:
            if (wanted or due) and not empty:
                self._new_segment()
        except OSError as error:
            for future in wanted:
                future.set_exception(StorageError(f"no new segment could be begun: {error}"))
            raise
        for future in wanted:
            future.set_result(self._committed.segment)

    def _new_segment(self) -> None:
        closed = self._committed.segment
        self._open(closed + 1)
        self._table.next_epoch()
        self._on_roll(closed, closed + 1)

    def _open(self, segment: int) -> None:
        """Begin a segment: its directory, its journal with a header, both synced."""
        directory = journal.open_directory(self._data_dir, segment)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "journal"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o640)
        header = journal.Header(segment, self._next_batch, time.time_ns(), self._gateway_id)
        try:
            journal.write_all(descriptor, [journal.file_header(header)])
            os.fdatasync(descriptor)
            for folder in (directory, directory.parent):
                sync_directory(folder)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._opened_at = time.monotonic()
        self._broken = False
        with self._safe:
            self._committed = Committed(segment, journal.FILE_HEADER.size, self._next_batch - 1)
            self._safe.notify_all()


def sync_directory(path: Path) -> None:
    """Make the names in a directory safe. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
