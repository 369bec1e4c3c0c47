"""What every way out owes to the lane in front of it: one suite, for outlets of any kind.

A test module makes an ``Arrival`` for its outlet and subclasses ``Outlets`` with a fixture ``way``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from gateway.forward import sink
from gateway.forward.cursor import Cursor, Window, read, write
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.encode import Encoder
from gateway.forward.sink import Lane, Outlet
from gateway.metrics import Meters
from gateway.model import Category
from tests.forward.lanes import until
from tests.forward.made import Buffer, spans


class Way(ABC):
    """A kind of outlet with a receiver behind it that can be read."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.meters = Meters()
        self.letters = DeadLetters(data_dir)

    @abstractmethod
    def outlet(self) -> Outlet:
        """A new one, as after a restart."""

    @abstractmethod
    def arrived(self) -> list[str]:
        """The ``message`` of each point that arrived, without what came again under its id; in order."""

    @abstractmethod
    def break_down(self) -> None:
        """Nothing can be delivered from now on."""

    @abstractmethod
    def recover(self) -> None: ...

    @property
    def path(self) -> Path:
        return self.data_dir / "cursors" / "way-tracing.json"

    def lane(self, buffer: Buffer, max_body_bytes: int = 400) -> Lane:
        encoder = Encoder(None, "datakit", None, max_body_bytes)
        return Lane(
            "way", Category.TRACING, buffer.follow, self.outlet(), encoder, self.path, "", self.meters, "gw", 0.01
        )

    def sample(self, name: str) -> float:
        return self.meters.registry.get_sample_value(name, {"sink": "way", "category": "tracing"}) or 0.0


def texts(*batches: int, count: int = 4) -> list[str]:
    return [f"m{batch}" for batch in batches for _ in range(count)]


class Outlets:
    """The suite."""

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sink, "_POLL_S", 0.002)
        monkeypatch.setattr(sink, "_RETRY_S", 0.02)

    def records(self, *batches: int) -> Buffer:
        return Buffer([spans(batch, 4, message=f"m{batch}") for batch in batches])

    def test_everything_arrives_in_order(self, way: Way) -> None:
        lane = way.lane(self.records(1, 2, 3))
        lane.start()
        assert until(lambda: read(way.path) == Cursor(3))
        lane.stop(5)
        assert way.arrived() == texts(1, 2, 3)
        assert lane.health() is None
        assert way.sample("locum_delivered_points_total") == 12
        assert way.sample("locum_delivered_bytes_total") > 0
        assert not list(way.letters)

    def test_a_window_that_comes_again_arrives_once(self, way: Way) -> None:
        """A crash after the last byte arrived, before the cursor moved on."""
        buffer = self.records(1, 2)
        first = way.lane(buffer)
        first.start()
        assert until(lambda: read(way.path) == Cursor(2))
        first.stop(5)
        size = self.note_of_the_first_window(way)
        write(way.path, Cursor(0, Window(1, 2, "", size)))
        buffer.records.append(spans(3, 4, message="m3"))
        again = way.lane(buffer)
        again.start()
        assert until(lambda: read(way.path) == Cursor(3))
        again.stop(5)
        assert way.arrived() == texts(1, 2, 3)

    def note_of_the_first_window(self, way: Way) -> dict[str, object]:
        raise NotImplementedError

    def test_what_cannot_be_delivered_is_kept_and_told_until_it_can(self, way: Way) -> None:
        way.break_down()
        lane = way.lane(self.records(1, 2))
        lane.start()
        assert until(lambda: lane.health() is not None)
        assert lane.delivered == 0
        way.recover()
        assert until(lambda: read(way.path) == Cursor(2))
        assert until(lambda: lane.health() is None)
        lane.stop(5)
        assert way.arrived() == texts(1, 2)

    def test_a_stop_in_the_middle_loses_and_doubles_nothing(self, way: Way) -> None:
        way.break_down()
        buffer = self.records(1)
        lane = way.lane(buffer)
        lane.start()
        assert until(lambda: lane.health() is not None)
        lane.stop(5)
        assert not lane._thread.is_alive()
        way.recover()
        buffer.records += self.records(2).records
        again = way.lane(buffer)
        again.start()
        assert until(lambda: read(way.path) == Cursor(2))
        again.stop(5)
        assert way.arrived() == texts(1, 2)

    def test_an_outlet_that_is_not_needed_any_more_ends_its_threads(self, way: Way) -> None:
        before = set(threading.enumerate())
        lane = way.lane(self.records(1))
        lane.start()
        assert until(lambda: lane.delivered == 1)
        lane.stop(5)
        mine = ("way-", "reply-deadlines")
        assert until(lambda: not [each for each in set(threading.enumerate()) - before if each.name.startswith(mine)])
