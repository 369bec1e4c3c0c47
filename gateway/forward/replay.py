"""Replay: what lies in sealed segments goes out again, under today's policy, with its own times.

A body's id is made of the segment's name and the body itself: the same data under the same policy has the same id,
today and next year, here and on another machine that imported it. So a replay that was broken off, or is made twice,
sends nothing under a second id.

Bodies are made in one thread and sent in others; ``done`` is the place up to which everything is delivered or laid
aside, and never runs ahead of that.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from gateway.buffer.portions import Place, Portion
from gateway.buffer.segment import write_file
from gateway.forward.encode import Encoder
from gateway.forward.sink import Outlet, Package, Stopped, package_id
from gateway.model import Category, StorageError

_AHEAD = 8
"""Bodies that wait to be sent, at most."""
_LOOK_S = 1.0


@dataclass(slots=True)
class Report:
    """What has become of it so far. ``rows`` (data points, spans, records) were ``read``, of these ``skipped`` as not
    wanted and ``damaged`` as not readable; ``points`` by category and ``bodies`` went out (a histogram's row is many
    points). ``done``: everything up to here is settled."""

    done: Place | None = None
    rows: int = 0
    skipped: int = 0
    damaged: int = 0
    bodies: int = 0
    points: Counter[str] = field(default_factory=Counter)


class Pace:
    """Holds a replay back: at most ``points_s`` points a second (0: as fast as it goes), and none at all while
    ``is_behind()`` says that live data waits, asked once a second."""

    def __init__(self, points_s: float, is_behind: Callable[[], bool], stop: threading.Event) -> None:
        self._points_s = points_s
        self._is_behind = is_behind
        self._stop = stop
        self._began = time.monotonic()
        self._points = 0
        self._looked_at = 0.0
        self.waits_for_live = False

    def wait(self, points: int) -> None:
        """Return when so many points may go. Raises ``Stopped``."""
        while time.monotonic() - self._looked_at >= _LOOK_S or self.waits_for_live:
            self._looked_at, self.waits_for_live = time.monotonic(), self._is_behind()
            if self.waits_for_live:
                self._began += _LOOK_S
                self._sleep(_LOOK_S)
        if self._points_s:
            self._sleep(self._began + self._points / self._points_s - time.monotonic())
            self._points += points

    def _sleep(self, wait_s: float) -> None:
        if self._stop.wait(max(0.0, wait_s)):
            raise Stopped


class Replay:
    """One replay through ``outlets`` (by category; none: nothing is sent, only counted)."""

    def __init__(
        self,
        sink: str,
        encoder: Encoder,
        outlets: dict[Category, Outlet],
        pace: Pace,
        stop: threading.Event,
        senders: int,
        report: Report,
    ) -> None:
        self.report = report
        self._sink = sink
        self._encoder = encoder
        self._outlets = outlets
        self._pace = pace
        self._stop = stop
        self._pool = ThreadPoolExecutor(senders, thread_name_prefix="replay")
        self._under_way: deque[Future[Counter[str]] | Portion] = deque()

    def run(self, found: Iterable[Portion]) -> Iterator[Report]:
        """Send portions; the report after each. Raises ``Stopped`` when asked to stop, ``OSError`` when a dead letter
        cannot be written."""
        try:
            for portion in found:
                if self._stop.is_set():
                    raise Stopped
                self._take(portion)
                self._under_way.append(portion)
                self._settle(_AHEAD)
                yield self.report
            self._settle(0)
            yield self.report
        finally:
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)

    def _take(self, portion: Portion) -> None:
        if portion.fresh:
            self._encoder.forget()
        self._encoder.define(portion.definitions)
        at = 0
        for category, bodies in groupby(portion.bodies, key=itemgetter(0)):
            for _, body in bodies:
                self._encoder.add(body)
                at = self._start_all(category, portion.name, at, self._encoder.full())
            at = self._start_all(category, portion.name, at, self._encoder.finish())

    def _start_all(self, category: Category, name: str, at: int, full: list[tuple[bytes, int]]) -> int:
        """Let bodies go, the first of them as number ``at`` of the portion; the number of the next."""
        large, self._encoder.oversized = self._encoder.oversized, []
        for raw, points, oversized in [*((*each, False) for each in full), *((raw, 1, True) for raw in large)]:
            self._pace.wait(points)
            self._start(category, name, at, raw, points, oversized)
            at += 1
        return at

    def _start(self, category: Category, name: str, at: int, raw: bytes, points: int, oversized: bool) -> None:
        self._under_way.append(self._pool.submit(self._send, category, name, at, raw, points, oversized))
        self._settle(_AHEAD)

    def _send(self, category: Category, name: str, at: int, raw: bytes, points: int, oversized: bool) -> Counter[str]:
        outlet = self._outlets.get(category)
        if outlet is not None:
            own = blake2b(raw, digest_size=16).hexdigest()
            package = Package(package_id(f"replay/{self._sink}/{name}/{own}", at), outlet.pack(raw), points)
            outlet.deliver([] if oversized else [package], [package] if oversized else [], self._stop)
        return Counter({category.path: points})

    def _settle(self, allowed: int) -> None:
        """Take in what has come to its end, in order; wait while more than ``allowed`` bodies are under way."""
        while self._under_way:
            first = self._under_way[0]
            if isinstance(first, Portion):
                self.report.done = first.place
                self.report.rows += first.rows + first.skipped + first.damaged
                self.report.skipped += first.skipped
                self.report.damaged += first.damaged
            elif first.done() or sum(isinstance(each, Future) for each in self._under_way) > allowed:
                self.report.points += first.result()
                self.report.bodies += 1
            else:
                return
            self._under_way.popleft()


@dataclass(frozen=True, slots=True)
class Progress:
    """A replay as its file keeps it, ``DATA/replays/ORDER.json``: how far it came, and what had become of it. Segments
    that came here later than ``arrived_ns`` are not part of it."""

    order: str
    first_ns: int
    last_ns: int
    arrived_ns: int
    done: Place | None
    finished: bool
    rows: int
    skipped: int
    damaged: int
    bodies: int
    points: dict[str, int]
    refused: int

    def report(self) -> Report:
        """The report to go on with."""
        return Report(self.done, self.rows, self.skipped, self.damaged, self.bodies, Counter(self.points))


def progress_path(data_dir: Path, order: str) -> Path:
    """Where the progress of an order is kept. An order is the text of all that shapes a replay."""
    return data_dir / "replays" / f"{blake2b(order.encode(), digest_size=8).hexdigest()}.json"


def write_progress(path: Path, progress: Progress) -> None:
    """Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(asdict(progress)).encode() + b"\n")


def read_progress(path: Path) -> Progress | None:
    """None where there is none. Raises ``StorageError`` for a file that is damaged."""
    try:
        told = json.loads(path.read_bytes())
        first = told["done"]
        done = (int(first[0]), str(first[1]), int(first[2]), int(first[3])) if first else None
        return Progress(**(told | {"done": done}))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise StorageError(f"{path}: cannot be read ({error}); delete it, and replay from the beginning") from None
