"""Followers: every record from a position on, in batch order, wherever it lies by now.

A follower goes from segment to segment. Of each it reads the journal while there is one, and the Parquet files when
there is none; it may change from one to the other in the middle, when a segment is sealed and its journal deleted under
it. Ids of series differ between the two forms, so a follower that changes says the definitions again.

Nothing blocks anything: a follower holds no lock, retention asks no follower. What was deleted before it was read is
counted in ``lost_batches``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gateway.buffer import damage, segment
from gateway.buffer.journal import Damage, Entry, Tail, scan
from gateway.buffer.record import Distributions, Numbers, Record, pack_columns, read_body
from gateway.buffer.sealed import SealedRecords
from gateway.buffer.segment import Manifest, Segment, State
from gateway.buffer.writer import Committed, Writer
from gateway.model import Signal, StorageError
from gateway.series import TRANSIENT

log = logging.getLogger("locum.buffer")

Mask = npt.NDArray[np.bool_]

_SLICE_S = 0.25
_ATTEMPTS = 10


def follow(data_dir: Path, writer: Writer | None, after_batch: int, signal: Signal | None = None) -> Follower:
    """Records after ``after_batch``, of one signal or of all. Without a ``writer`` (nobody writes) it ends where the
    files end."""
    return Follower(data_dir, writer, after_batch, signal)


class Follower:
    """See the module. One thread calls ``next``; any may call ``close``.

    ``position``: the last batch that is done with, given out or skipped because of its signal. ``lost_batches``:
    numbers that were missed because their segment was deleted or is damaged.
    """

    def __init__(self, data_dir: Path, writer: Writer | None, after_batch: int, signal: Signal | None) -> None:
        self.position = after_batch
        self.lost_batches = 0
        self._data_dir = data_dir
        self._writer = writer
        self._signal = signal
        self._segment = -1
        self._records: Iterator[Record | None] | None = None
        self._last_opened = -1
        self._again = 0
        self._closed = threading.Event()

    def next(self, timeout_s: float) -> Record | None:
        """The next record; None when there is none within ``timeout_s``, or when the follower was closed. Raises
        ``OSError`` when the disk cannot be read."""
        deadline = time.monotonic() + timeout_s
        while not self._closed.is_set():
            if self._records is None and not self._open():
                record = None
            else:
                record = self._advance()
                if record is not None:
                    return record
                if self._records is None:
                    continue  # at the end of a segment
            left = deadline - time.monotonic()
            if left <= 0 or self._writer is None:
                return None
            self._writer.wait(self.position, min(left, _SLICE_S))
            if self._writer.committed().batch <= self.position:
                self._closed.wait(min(left, 0.01))  # the writer has ended, or time is up
        return None

    def close(self) -> None:
        self._closed.set()

    def _advance(self) -> Record | None:
        """The next record of the present segment; None when there is none yet, or none any more (then the segment is
        left)."""
        assert self._records is not None
        try:
            for record in self._records:
                if record is not None:
                    self.position = max(self.position, record.batch)
                return record
        except FileNotFoundError:
            # Sealed, or deleted, a moment ago: look for the segment again, in its present form.
            self._again += 1
            if self._again <= _ATTEMPTS:
                self._segment -= 1
        except (pa.ArrowException, OSError, StorageError) as error:
            log.error(
                "event=segment_unreadable segment=%d position=%d error=%r",
                self._segment,
                self.position,
                str(error),
            )
        self._records = None
        return None

    def _open(self) -> bool:
        """Go to the next segment; whether there is one."""
        newest = self._writer.committed().segment if self._writer is not None else None
        found = [
            each
            for each in segment.segments(self._data_dir)
            if each.number > self._segment
            and each.state is not State.DELETED
            and (newest is None or each.number <= newest)
        ]
        if not found:
            return False
        if found[0].number != self._last_opened:
            self._last_opened, self._again = found[0].number, 0
        self._segment = found[0].number
        self._records = self._read(found[0])
        return True

    def _read(self, found: Segment) -> Iterator[Record | None]:
        if found.state is State.OPEN:
            return self._journal(found)
        try:
            manifest = Manifest.read(found.path)
        except StorageError as error:
            if found.path.exists():
                log.error("event=segment_skipped segment=%d error=%r", found.number, str(error))
            return iter(())
        if manifest.last_batch <= self.position or not self._wanted(manifest):
            self.position = max(self.position, manifest.last_batch)
            return iter(())
        self._miss(manifest.first_batch)
        if found.journal.exists():
            return self._kept_journal(found, manifest)
        return self._sealed(found, manifest)

    def _wanted(self, manifest: Manifest) -> bool:
        return self._signal is None or self._signal.name.lower() in manifest.batches

    def _miss(self, first_batch: int) -> None:
        if 0 < self.position < first_batch - 1:
            self.lost_batches += first_batch - 1 - self.position
            self.position = first_batch - 1

    def _sealed(self, found: Segment, manifest: Manifest) -> Iterator[Record]:
        yield from SealedRecords(found, manifest, self.position, self._signal)
        self.position = max(self.position, manifest.last_batch)

    def _kept_journal(self, found: Segment, manifest: Manifest) -> Iterator[Record | None]:
        """Records of a sealed segment whose journal is still there; where that is damaged, of its Parquet files."""
        try:
            yield from self._journal(found, whole=True)
        except _DamagedError as error:
            log.error(
                "event=kept_journal_damaged segment=%d position=%d error=%r action=the sealed files are read instead",
                found.number,
                self.position,
                str(error),
            )
            yield from self._sealed(found, manifest)

    def _journal(self, found: Segment, whole: bool = False) -> Iterator[Record | None]:
        """Records of a journal, open or closed. None: there is no more for the moment. Raises ``_DamagedError`` at
        damage if it has to be ``whole``."""
        known = _Known()
        first = True
        for entry in self._entries(found):
            if entry is None:
                yield None
                continue
            if isinstance(entry, Damage):
                if whole:
                    raise _DamagedError(f"{found.journal}: bytes {entry.offset} to {entry.end} are no record")
                if not entry.harmless:
                    known.salvage(found.journal, entry)
                continue
            record = entry.record
            if first and record.batch > self.position:
                self._miss(record.batch)
            first = False
            if self._signal in (None, Signal.METRICS):  # nothing else speaks of series
                known.define(record)
            if record.batch <= self.position:
                continue
            if self._signal is not None and record.signal is not self._signal:
                self.position = record.batch
                continue
            yield known.complete(record)

    def _entries(self, found: Segment) -> Iterator[Entry | Damage | None]:
        if self._writer is None or self._writer.committed().segment != found.number:
            yield from scan(found.journal)
            return
        with Tail(found.journal) as tail:
            while (committed := self._writer.committed()).segment == found.number:
                if self._wants_none_of(committed):
                    self.position = max(self.position, committed.batch)
                    tail.offset = committed.offset
                try:
                    entries = tail.read(committed.offset)
                except StorageError as error:
                    log.error("event=journal_damaged segment=%d error=%r", found.number, str(error))
                    for each in scan(found.journal, tail.offset, committed.offset):
                        yield each
                        tail.offset = each.end
                    continue
                if entries:
                    yield from entries
                else:
                    yield None
            journal = found.journal if found.journal.exists() else segment.sealed(found).journal
            yield from scan(journal, tail.offset)

    def _wants_none_of(self, committed: Committed) -> bool:
        """Whether nothing behind the position is this follower's, so that it need not be read. One of metrics reads
        all: what it skipped might define a series."""
        return self._signal not in (None, Signal.METRICS) and committed.newest[self._signal] <= self.position


class _DamagedError(Exception):
    """A journal is damaged, and there is something better to read."""


class _Known:
    """Definitions of a journal on their way to the follower, and which ids have one: after damage, rows may refer to
    series that nobody has defined."""

    def __init__(self) -> None:
        self._unsaid: dict[int, bytes] = {}
        self._defined = bytearray()
        self._damaged = False

    def define(self, record: Record) -> None:
        self._take(record.definitions)

    def salvage(self, journal: Path, found: Damage) -> None:
        self._damaged = True
        try:
            self._take(damage.salvage(damage.read(journal, found)))
        except FileNotFoundError:
            return

    def _take(self, definitions: tuple[tuple[int, bytes], ...]) -> None:
        for series, definition in definitions:
            self._unsaid[series] = definition
            if series < TRANSIENT:
                if series >= len(self._defined):
                    self._defined.extend(bytes(series + 1024 - len(self._defined)))
                self._defined[series] = 1

    def complete(self, record: Record) -> Record:
        """``record`` with every definition that was not said yet, without rows that have none."""
        definitions, self._unsaid = tuple(self._unsaid.items()), {}
        if definitions != record.definitions:
            record = replace(record, definitions=definitions)
        return self._only_defined(record) if self._damaged and record.signal is Signal.METRICS else record

    def _only_defined(self, record: Record) -> Record:
        numbers, distributions = read_body(record.body)[:2]
        transient = {series for series, _ in record.definitions if series >= TRANSIENT}
        defined = np.frombuffer(self._defined, np.uint8)

        def kept(series: npt.NDArray[np.uint32]) -> Mask:
            inside = series < len(defined)
            keep: Mask = np.isin(series, list(transient)) if transient else np.zeros(len(series), bool)
            keep[inside] = defined[series[inside]] == 1
            return keep

        keep_numbers, keep_distributions = kept(numbers.series), kept(distributions.series)
        if keep_numbers.all() and keep_distributions.all():
            return record
        lost = int((~keep_numbers).sum() + (~keep_distributions).sum())
        log.error("event=rows_without_series segment=%d batch=%d rows=%d", record.segment, record.batch, lost)
        body = pack_columns(
            _some_numbers(numbers, keep_numbers), _some_distributions(distributions, keep_distributions)
        )
        return replace(record, body=body, points=record.points - lost)


def _some_numbers(numbers: Numbers, keep: Mask) -> Numbers:
    return Numbers(numbers.series[keep], numbers.time[keep], numbers.start[keep], numbers.bits[keep])


def _some_distributions(found: Distributions, keep: Mask) -> Distributions:
    return Distributions(
        found.series[keep],
        found.flags[keep],
        found.n_buckets[keep],
        found.n_bounds[keep],
        found.time[keep],
        found.start[keep],
        found.count[keep],
        found.sum[keep],
        found.min[keep],
        found.max[keep],
        found.buckets[np.repeat(keep, found.n_buckets)],
        found.bounds[np.repeat(keep, found.n_bounds)],
    )
