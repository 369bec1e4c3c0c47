"""Records and lanes for tests of the ways out: real records, a follower over a list, an outlet that remembers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.buffer.record import Record, read_definitions
from gateway.forward.sink import Package, Stopped
from gateway.model import Category, Event, Signal, Unsigned
from gateway.otlp.point import decode_points, encode_point
from gateway.otlp.registry import Registry
from gateway.otlp.wire import decode
from tests.buffer import made

SENDER = "192.0.2.7"
RECEIVED_NS = 1_800_000_000_000_000_001


def record_of(registry: Registry, body: bytes, batch: int = 1, segment: int = 1) -> Record:
    """A request of metrics as a lane gets it."""
    found = decode(registry, body, SENDER, RECEIVED_NS)
    told = read_definitions(registry.table.undefined(found.body)) + read_definitions(found.definitions)
    return Record(segment, batch, RECEIVED_NS, Signal.METRICS, found.points, told, found.body)


def spans(batch: int, count: int = 1, segment: int = 1, **fields: Any) -> Record:
    """A record of ``count`` spans that are like no others."""
    found = [made.span(batch * 1000 + at, **fields) for at in range(count)]
    body = made.events(found).body
    return Record(segment, batch, made.T0 + batch, Signal.TRACES, count, (), body)


def numbers(batch: int, count: int = 3, segment: int = 1) -> Record:
    """A record of numbers of one series, which the record defines."""
    rows = [made.Number(7, made.T0 + batch * 1000 + at, float(batch)) for at in range(count)]
    defined = ((7, made.series(7).pack()),)
    return Record(segment, batch, made.T0 + batch, Signal.METRICS, count, defined, made.metrics(rows).body)


def point(name: str = "m", value: Any = 1.5, **tags: str) -> Event:
    return Event(Category.METRIC, "otel_service", tags or {"host": "h"}, {name: value}, made.T0)


def unwritable() -> Event:
    """A point that line protocol has no way to write."""
    return Event(Category.METRIC, "otel_service", {"host": "h"}, {}, made.T0)


def body_of(*events: Event) -> bytes:
    """``PBPoints``."""
    return b"".join(framed(encode_point(event)) for event in events)


def framed(encoded: bytes) -> bytes:
    size, head = len(encoded), bytearray(b"\x0a")
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*head, size)) + encoded


def package(name: str, *events: Event) -> Package:
    return Package(name, body_of(*events), len(events))


def spelled(raw: bytes, category: Category = Category.METRIC) -> list[str]:
    """The points of a body in a form that tells -0.0 from 0.0 and unsigned from signed."""
    return [repr((event, _types(event))) for event in decode_points(raw, category)]


def _types(event: Event) -> list[str]:
    return ["u" if isinstance(value, Unsigned) else type(value).__name__ for value in event.fields.values()]


def spelled_events(events: Sequence[Event]) -> list[str]:
    return [repr((event, _types(event))) for event in events]


@dataclass
class Buffer:
    """Records that can grow, and followers of them. ``opened``: after which batch each follower began."""

    records: list[Record] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    seen: int = 0
    """The last batch of any category: an idle lane's position goes up to here."""
    errors: list[Exception] = field(default_factory=list)
    """Raised one by one by ``follow``."""

    def follow(self, after: int) -> ListFollower:
        self.opened.append(after)
        if self.errors:
            raise self.errors.pop(0)
        return ListFollower(self, after)


class ListFollower:
    def __init__(self, buffer: Buffer, after: int) -> None:
        self._buffer = buffer
        self.position = after
        self.closed = False

    def next(self, timeout_s: float) -> Record | None:
        for record in self._buffer.records:
            if record.batch > self.position:
                self.position = record.batch
                return record
        self.position = max(self.position, self._buffer.seen)
        return None

    def close(self) -> None:
        self.closed = True


@dataclass
class Memory:
    """An outlet that remembers. ``plan``: what happens instead, delivery by delivery (an exception is raised; None
    delivers)."""

    delivered: list[Package] = field(default_factory=list)
    tried: list[Package] = field(default_factory=list)
    oversized: list[Package] = field(default_factory=list)
    plan: list[Exception | None] = field(default_factory=list)
    resumed: list[dict[str, Any]] = field(default_factory=list)
    opened: int = 0
    hold: threading.Event | None = None
    arrived: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False

    def pack(self, raw: bytes) -> bytes:
        return raw

    def open(self) -> dict[str, Any]:
        self.opened += 1
        return {"opened": self.opened}

    def resume(self, note: dict[str, Any]) -> None:
        self.resumed.append(note)

    def deliver(self, packages: list[Package], oversized: list[Package], stop: threading.Event) -> None:
        with self.arrived:
            self.tried += packages + oversized
            self.arrived.notify_all()
        if self.hold is not None:
            while not self.hold.wait(0.005):
                if stop.is_set():
                    raise Stopped
        error = self.plan.pop(0) if self.plan else None
        if error is not None:
            raise error
        with self.arrived:
            self.delivered += packages
            self.oversized += oversized
            self.arrived.notify_all()

    def wait(self, points: int, timeout_s: float = 10.0) -> None:
        """Until so many points are delivered."""
        with self.arrived:
            enough = self.arrived.wait_for(lambda: self.points >= points, timeout_s)
            assert enough, f"{self.points} of {points} points are delivered"

    def wait_tried(self, packages: int, timeout_s: float = 10.0) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.tried) >= packages, timeout_s)

    @property
    def points(self) -> int:
        return sum(package.points for package in self.delivered + self.oversized)

    def health(self) -> str | None:
        return None

    def close(self) -> None:
        self.closed = True
