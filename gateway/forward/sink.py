"""A lane: one category on its way to one receiver, in batch order, from its own cursor.

The contract of every way out. The lane reads records, makes bodies and keeps the cursor; the *outlet* behind it gets
bodies delivered, and returns only when each of them is delivered or laid aside as a dead letter. There is no other
way out of ``deliver`` but being stopped, so nothing is ever skipped in silence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn, Protocol

from gateway.buffer.record import Record
from gateway.forward import cursor
from gateway.forward.cursor import Cursor, Window
from gateway.forward.encode import Encoder
from gateway.metrics import Meters
from gateway.model import Category, LocumError

log = logging.getLogger("locum.forward")

WINDOW_BYTES = 16 << 20
NEXT_BATCHES = 64
_POLL_S = 0.1
"""How often a lane looks for records: it is woken by no one, so that commits need not wake every lane."""
_RETRY_S = 5.0


class Stopped(Exception):
    """The lane is to stop; what is not delivered stays where it is."""


class Follower(Protocol):
    """Records in batch order (``buffer.reader``). ``position``: the last batch that is done with."""

    position: int

    def next(self, timeout_s: float) -> Record | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Package:
    """One body on its way, as the outlet packed it, with ``points`` points. ``id`` stays the same however often it is
    sent."""

    id: str
    body: bytes
    points: int


class Outlet(Protocol):
    """What delivers packages."""

    def pack(self, raw: bytes) -> bytes:
        """A body (``PBPoints``) as it is to be kept until it is delivered: compressed, say, while it is at hand."""

    def open(self) -> dict[str, Any]:
        """A note to be written down with the window that is about to be sent."""

    def resume(self, note: dict[str, Any]) -> None:
        """A window with this note is sent again: undo what a crash left half done."""

    def deliver(self, packages: list[Package], oversized: list[Package], stop: threading.Event) -> None:
        """Deliver all of it, or lay it aside for good. Raises ``Stopped``."""

    def health(self) -> str | None:
        """Why nothing is delivered at the moment, or None."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """What ``locum buffer status`` says of a lane."""

    sink: str
    category: str
    delivered: int
    window: tuple[int, int] | None
    oldest_ns: int
    health: str | None


class Lane:
    """A thread that brings one category to one outlet."""

    def __init__(
        self,
        sink: str,
        category: Category,
        follow: Callable[[int], Follower],
        outlet: Outlet,
        encoder: Encoder,
        cursor_path: Path,
        look: str,
        meters: Meters,
        gateway_id: str,
        flush_interval_s: float,
    ) -> None:
        self.sink = sink
        self.category = category
        self._follow = follow
        self._outlet = outlet
        self._encoder = encoder
        self._path = cursor_path
        self._look = look
        self._delivered = meters.delivered.labels(sink, category.path)
        self._gateway_id = gateway_id
        self._flush_interval_s = flush_interval_s
        self._cursor = cursor.read(cursor_path)
        self._oldest_ns = 0
        self._follower: Follower | None = None
        self._segment = -1
        self._packed: list[tuple[bytes, int]] = []
        self._oversized: list[bytes] = []
        self._taken_bytes = 0
        self._trouble: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{sink}-{category.path}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        self._stop.set()

    def stop(self, deadline_s: float) -> None:
        """Stop, at the latest after ``deadline_s``; what was not confirmed is sent again, under the same ids."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        self._outlet.close()

    @property
    def cursor_path(self) -> Path:
        return self._path

    @property
    def delivered(self) -> int:
        """The last batch that is done with."""
        return self._cursor.delivered

    @property
    def reach(self) -> tuple[int, int]:
        """The batches that must stay readable as they are: those of the window that is on its way or being gathered,
        and those that come next. (Numbers have gaps, so "next" reaches a little further.)"""
        follower = self._follower
        now = self._cursor
        ends = now.delivered, follower.position if follower else 0, now.window.last if now.window else 0
        return now.delivered + 1, max(ends) + NEXT_BATCHES

    @property
    def open_window(self) -> tuple[int, int] | None:
        """The batches that must stay as they are, since they are on their way."""
        window = self._cursor.window
        return (window.first, window.last) if window else None

    def progress(self) -> Progress:
        return Progress(self.sink, self.category.path, self.delivered, self.open_window, self._oldest_ns, self.health())

    def health(self) -> str | None:
        return self._trouble or self._outlet.health()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._bring_on()
            except Stopped:
                return
            except (OSError, LocumError, KeyError, ValueError) as error:
                self._trouble = str(error)
                log.error("event=lane_stumbled sink=%s category=%s error=%r", self.sink, self.category.path, str(error))
            except Exception as error:
                self._trouble = repr(error)
                log.exception("event=lane_fault sink=%s category=%s", self.sink, self.category.path)
            self._give_up_taken()
            self._stop.wait(_RETRY_S)

    def _bring_on(self) -> NoReturn:
        """Send window after window. Raises ``Stopped``, and whatever keeps it from going on."""
        with closing(self._follow(self._cursor.delivered)) as follower:
            self._follower = follower
            self._segment = -1
            if self._cursor.window is not None:
                self._resume(follower, self._cursor.window)
            while True:
                self._next_window(follower)

    def _resume(self, follower: Follower, window: Window) -> None:
        """Make a window again that was written down before a stop or a crash, and send it."""
        if window.look != self._look:
            log.warning(
                "event=window_changed sink=%s category=%s batches=%d-%d what=%s",
                self.sink,
                self.category.path,
                window.first,
                window.last,
                "the policy or the encoding changed; points of it that had arrived may arrive again",
            )
        self._outlet.resume(window.note)
        while True:
            record = self._next(follower, _POLL_S)
            if record is None:
                continue
            if record.batch > window.last:  # the rest of the window is no longer in the buffer
                self._send(window)
                self._take(record)
                self._gather(follower, record.batch)
                return
            self._take(record)
            if record.batch == window.last:
                self._send(window)
                return

    def _next_window(self, follower: Follower) -> None:
        """Wait for records, take what belongs together, send it."""
        while (record := self._next(follower, _POLL_S)) is None:
            self._oldest_ns, self._trouble = 0, None
            # batches of other categories are none of this lane's, and done with
            self._cursor = Cursor(max(self._cursor.delivered, follower.position))
        self._take(record)
        self._gather(follower, record.batch)

    def _gather(self, follower: Follower, first: int) -> None:
        """The window that begins with batch ``first``, which is taken already: what comes within the flush interval,
        up to the size of a window."""
        last = first
        due = time.monotonic() + self._flush_interval_s
        while self._taken_bytes + sum(map(len, self._encoder.oversized)) < WINDOW_BYTES:
            left_s = due - time.monotonic()
            record = self._next(follower, max(0.0, min(_POLL_S, left_s)))
            if record is not None:
                self._take(record)
                last = record.batch
            elif left_s <= 0:
                break
        window = Window(first, last, self._look, self._outlet.open())
        opened = Cursor(self._cursor.delivered, window)
        cursor.write(self._path, opened)  # first: a window that no file knows would be another one after a crash
        self._cursor = opened
        self._send(window)

    def _next(self, follower: Follower, wait_s: float) -> Record | None:
        """The next record, or None after a wait of ``wait_s``. Raises ``Stopped``."""
        record = follower.next(0.0)
        if record is None and self._stop.wait(wait_s):
            raise Stopped
        return record

    def _take(self, record: Record) -> None:
        if record.segment != self._segment:
            self._encoder.forget()
            self._segment = record.segment
        if not self._oldest_ns:
            self._oldest_ns = record.received_ns
        self._encoder.define(record.definitions)
        self._encoder.add(record.body)
        self._pack(self._encoder.full())

    def _pack(self, bodies: list[tuple[bytes, int]]) -> None:
        """Have bodies packed as soon as they are full, while they are still in the processor's cache."""
        for raw, points in bodies:
            self._packed.append((self._outlet.pack(raw), points))
            self._taken_bytes += len(raw)
        large, self._encoder.oversized = self._encoder.oversized, []
        for raw in large:
            self._oversized.append(self._outlet.pack(raw))
            self._taken_bytes += len(raw)

    def _give_up_taken(self) -> None:
        """Forget what was taken for a window that did not come about; it is read again."""
        self._encoder.finish()
        self._encoder.oversized = []
        self._packed, self._oversized, self._taken_bytes = [], [], 0

    def _send(self, window: Window) -> None:
        name = f"{self._gateway_id}/{self.sink}/{self.category.path}/{window.first}-{window.last}"
        self._pack(self._encoder.finish())
        packages = [Package(package_id(name, at), body, points) for at, (body, points) in enumerate(self._packed)]
        oversized = [Package(package_id(f"{name}/oversized", at), body, 1) for at, body in enumerate(self._oversized)]
        self._packed, self._oversized, self._taken_bytes = [], [], 0
        if packages or oversized:
            self._outlet.deliver(packages, oversized, self._stop)
        done = Cursor(window.last)
        cursor.write(self._path, done)  # first: until a file knows, a crash would make the window again
        self._cursor = done
        self._oldest_ns, self._trouble = 0, None
        self._delivered.inc(sum(package.points for package in packages))


def package_id(name: str, at: int | str) -> str:
    """The X-Pkg-Id of package ``at`` of the window ``name``: as DataKit's look, but the same each time."""
    digest = int.from_bytes(blake2b(f"{name}/{at}".encode(), digest_size=13).digest(), "big")
    letters = "0123456789abcdefghijklmnopqrstuv"
    return "dk_" + "".join(letters[digest >> 5 * place & 31] for place in range(20))
