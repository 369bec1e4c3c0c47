"""The writer: one thread that puts batches into the journal, and says when they are safe.

What waits is written together and synced once (group commit): the longer the disk takes, the more requests share it.
While several senders are at it, the writer waits a millisecond for the others before it syncs.
A future is resolved only after the sync. When a write or a sync fails, none of its batches is acknowledged; after a
failed sync the file is never written to again, since the kernel may have dropped what it could not write.

Followers read the file themselves, up to ``committed()``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from gateway.buffer import journal
from gateway.config import BufferSettings
from gateway.metrics import Meters
from gateway.model import Batch, Reason, Refusal, Signal, StorageError
from gateway.series import SeriesTable

log = logging.getLogger("locum.buffer")

RETRY_AFTER_S = 1.0
RETRY_AFTER_FULL_S = 10.0
_GROUP_BYTES = 32 << 20
_LINGER_S = 0.001
"""How long to wait for company before a sync, when there was some the last time."""


Item = tuple[Batch, SeriesTable, "Future[int]"]


@dataclass(frozen=True, slots=True)
class Committed:
    """How far the buffer is safe: the first ``offset`` bytes of the journal of ``segment``, up to batch ``batch``.
    ``newest``: the last batch of each signal among them, 0 for one that had none since the start."""

    segment: int
    offset: int
    batch: int
    newest: Mapping[Signal, int]


class Writer:
    """Owns the open segment's journal. ``table`` holds the definitions of the series that batches refer to.

    ``trouble``: why the last batch was not written, or None.

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
        self._commit_s = meters.commit_s
        self._accepted = {signal: meters.accepted.labels(signal.name.lower()) for signal in Signal}
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
        self._definitions_bytes = 0
        self._broken = False
        self._has_company = False
        self.trouble: str | None = None
        self._committed = Committed(segment, 0, first_batch - 1, dict.fromkeys(Signal, 0))
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
        future = _promise()
        with self._work:
            if self._stopping:
                raise _stopping()
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
        """Ask for a new segment now; the future gives its number (the present one's if that is still empty), or raises
        ``StorageError`` if it could not be begun, ``Refusal`` if the writer stops before."""
        future = _promise()
        with self._work:
            if self._stopping:
                future.set_exception(_stopping())
            else:
                self._roll_wanted.append(future)
                self._work.notify()
        return future

    def stop(self) -> None:
        """Write what waits, then end. Later batches are refused, and all if the writer was never started."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        with self._work:
            left = [future for _, _, future in self._pending] + self._roll_wanted
            self._pending.clear()
            self._roll_wanted.clear()
            self._pending_bytes = 0
        for future in left:
            future.set_exception(_stopping())
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
                self._fail(group, StorageError(f"a fault of Locum: {error!r}"))
            self._grant_wishes()

    def _take(self) -> list[Item] | None:
        """What to write next; an empty list when only the clock or a wish to roll calls; None at the end."""
        with self._work:
            self._work.wait_for(lambda: self._pending or self._stopping or self._roll_wanted, 1.0)
            if self._stopping and not self._pending:
                return None
        if self._has_company:
            time.sleep(_LINGER_S)
        with self._work:
            group: list[Item] = []
            size = 0
            while self._pending and (not group or self._fits(group[0], size)):
                item = self._pending.popleft()
                group.append(item)
                size += len(item[0].body)
            self._pending_bytes -= size
            self._has_company = len(group) > 1
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
        if self._broken or (table is not self._table and not self._is_empty()):
            self._new_segment(table)
        elif table is not self._table:
            self._table = table
            table.next_epoch()
        began = time.perf_counter()
        parts: list[journal.Buffer] = []
        offset, number = self._committed.offset, self._next_batch
        definitions_bytes = self._definitions_bytes
        newest = dict(self._committed.newest)
        for batch, _, _ in group:
            definitions = batch.definitions + table.undefined(batch.body)
            pieces, size = journal.record_parts(
                number, batch.received_ns, batch.signal, batch.points, definitions, batch.body
            )
            parts += pieces
            offset += size
            definitions_bytes += len(definitions)
            newest[batch.signal] = number
            number += 1
        self._next_batch = number  # used up even if this fails: the records may have reached the disk
        journal.write_all(self._descriptor, parts)
        try:
            os.fdatasync(self._descriptor)
        except OSError:
            self._broken = True
            raise
        with self._safe:
            self._committed = Committed(self._committed.segment, offset, number - 1, newest)
            self._safe.notify_all()
        self._definitions_bytes = definitions_bytes
        self.trouble = None
        self._commit_s.observe(time.perf_counter() - began)
        for batch_number, (batch, _, future) in enumerate(group, number - len(group)):
            self._accepted[batch.signal].inc(batch.points)
            future.set_result(batch_number)

    def _fail(self, group: list[Item], error: Exception) -> None:
        """Acknowledge nothing of ``group``, and leave the file as it was before."""
        self._table.unsay()
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = Reason.DISK_FULL if full else Reason.STORAGE
        action = "check the disk" if isinstance(error, OSError) else "report this with its traceback"
        if full:
            action = "free disk space, or lower buffer.max_bytes"
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
            action,
        )
        self.trouble = f"the last batch could not be written: {error}"
        refusal = Refusal(reason, f"not written: {error}", RETRY_AFTER_FULL_S if full else RETRY_AFTER_S)
        for _, _, future in group:
            future.set_exception(refusal)

    def _grant_wishes(self) -> None:
        """Begin a new segment where one is due or wished for, and answer the wishes."""
        with self._work:
            wishes, self._roll_wanted = self._roll_wanted, []
        failure = ""
        try:
            if (wishes or self._is_due()) and not self._is_empty():
                self._new_segment(self._table)
        except OSError as error:
            failure = str(error)
            log.error("event=roll_failed error=%r action=the present segment goes on", failure)
        except Exception as error:
            failure = f"a fault of Locum: {error!r}"
            log.exception("event=roll_fault")
        for wish in wishes:
            if failure:
                wish.set_exception(StorageError(f"no new segment could be begun: {failure}"))
            else:
                wish.set_result(self._committed.segment)

    def _is_empty(self) -> bool:
        return self._committed.offset <= journal.FILE_HEADER.size

    def _is_due(self) -> bool:
        """Whether the segment is old or large enough. Definitions do not count: each new segment has to say them all
        again, so with very many series a size with them would roll ever sooner."""
        age_s = time.monotonic() - self._opened_at
        size_bytes = self._committed.offset - self._definitions_bytes
        return size_bytes >= self._settings.segment_bytes or age_s >= self._settings.segment_age_s

    def _new_segment(self, table: SeriesTable) -> None:
        """Begin a segment whose ids are those of ``table``. Raises ``OSError``; then all is as it was."""
        closed = self._committed.segment
        self._open(closed + 1)
        self._table = table
        table.next_epoch()
        self._on_roll(closed, closed + 1)

    def _open(self, segment: int) -> None:
        """Begin a segment: its directory, its journal with a header, both synced."""
        directory = journal.open_directory(self._data_dir, segment)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "journal"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o640)
        except OSError:
            _remove_empty(directory)
            raise
        header = journal.Header(segment, self._next_batch, time.time_ns(), self._gateway_id)
        try:
            journal.write_all(descriptor, [journal.file_header(header)])
            os.fdatasync(descriptor)
            for folder in (directory, directory.parent):
                sync_directory(folder)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            _remove_empty(directory)
            raise
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._opened_at = time.monotonic()
        self._definitions_bytes = 0
        self._broken = False
        with self._safe:
            self._committed = Committed(segment, journal.FILE_HEADER.size, self._next_batch - 1, self._committed.newest)
            self._safe.notify_all()


def _promise() -> Future[int]:
    """A future that nobody can cancel: a sender that gives up waiting must not take back what is being written."""
    future: Future[int] = Future()
    future.set_running_or_notify_cancel()
    return future


def _stopping() -> Refusal:
    return Refusal(Reason.STOPPING, "the gateway is stopping", RETRY_AFTER_S)


def _remove_empty(directory: Path) -> None:
    """Leave no segment without a journal behind; what is not empty stays."""
    with contextlib.suppress(OSError):
        directory.rmdir()


def sync_directory(path: Path) -> None:
    """Make the names in a directory safe. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
