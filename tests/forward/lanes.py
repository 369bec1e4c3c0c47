"""Records, followers and lanes for the tests of the ways out: everything real but the buffer behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.buffer.record import Record, pack_events
from gateway.forward.encode import Encoder
from gateway.forward.sink import Lane, Outlet
from gateway.metrics import Meters
from gateway.model import Category, Event, Signal
from gateway.otlp.point import encode_point

NOW_NS = 1_796_000_000_000_000_000


def event(number: int, **tags: str) -> Event:
    return Event(Category.LOGGING, "app", {"service": "app"} | tags, {"message": f"m{number}"}, NOW_NS + number)


def record(batch: int, events: Sequence[Event]) -> Record:
    """A record of log records, as the journal would give it."""
    body = pack_events([(Category.LOGGING, each.time_ns, encode_point(each)) for each in events])
    return Record(1, batch, time.time_ns(), Signal.LOGS, len(events), (), body)


class Shelf:
    """A buffer in memory: records by batch number; ``follow`` as the buffer's."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = list(records)

    def follow(self, after_batch: int) -> Reader:
        return Reader(self, after_batch)


class Reader:
    """A follower of a shelf."""

    def __init__(self, shelf: Shelf, position: int) -> None:
        self._shelf = shelf
        self.position = position

    def next(self, timeout_s: float) -> Record | None:
        for each in self._shelf.records:
            if each.batch > self.position:
                self.position = each.batch
                return each
        return None

    def close(self) -> None:
        """Nothing to close."""


def lane(outlet: Outlet, shelf: Shelf, place: Path, look: str = "as it is", max_body_bytes: int = 1 << 20) -> Lane:
    encoder = Encoder(None, "datakit", None, max_body_bytes)
    path = place / "cursors" / "test-logging.json"
    return Lane("test", Category.LOGGING, shelf.follow, outlet, encoder, path, look, Meters(), "gateway-1", 0.01)


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Wait until ``condition`` holds; whether it did."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
