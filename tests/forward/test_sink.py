"""A lane brings every point, in order, under one package id for ever; whatever dies between its steps."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.buffer.record import Record
from gateway.forward import cursor, sink
from gateway.forward.cursor import Cursor, Window
from gateway.forward.encode import Encoder
from gateway.forward.sink import Lane, Outlet, Package, Stopped, package_id
from gateway.metrics import Meters
from gateway.model import Category
from gateway.otlp.point import decode_points
from tests.buffer import made
from tests.forward.lanes import until
from tests.forward.made import Buffer, Memory, numbers, spans


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "_POLL_S", 0.002)
    monkeypatch.setattr(sink, "_RETRY_S", 0.01)


class Lanes:
    """Starts lanes of one cursor, as restarts of a gateway do; ends them all."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / "cursors" / "test-tracing.json"
        self.meters = Meters()
        self.running: list[Lane] = []

    def start(
        self,
        buffer: Buffer,
        outlet: Outlet,
        look: str = "",
        max_body_bytes: int = 1 << 20,
        category: Category = Category.TRACING,
        flush_s: float = 0.01,
    ) -> Lane:
        encoder = Encoder(None, "datakit", None, max_body_bytes)
        lane = Lane(
            "test", category, buffer.follow, outlet, encoder, self.path, look, self.meters, "gateway-1", flush_s
        )
        self.running.append(lane)
        lane.start()
        return lane

    def on_disk(self) -> Cursor:
        return cursor.read(self.path)

    def stop(self) -> None:
        for lane in self.running:
            lane.ask_to_stop()
        for lane in self.running:
            lane.stop(5.0)


@pytest.fixture
def lanes(tmp_path: Path) -> Iterator[Lanes]:
    lanes = Lanes(tmp_path)
    yield lanes
    lanes.stop()


def durations(packages: list[Package]) -> list[object]:
    """Which spans are in packages (each has its number as its duration), in order."""
    return [event.fields["duration"] for package in packages for event in decode_points(package.body, Category.TRACING)]


def contents(packages: list[Package]) -> dict[str, bytes]:
    return {package.id: package.body for package in packages}


def test_everything_arrives_in_order(lanes: Lanes) -> None:
    buffer, outlet = Buffer([spans(batch, 3) for batch in (1, 2, 5, 9)]), Memory()
    lane = lanes.start(buffer, outlet, max_body_bytes=300)
    outlet.wait(12)
    assert durations(outlet.delivered) == [batch * 1000 + at for batch in (1, 2, 5, 9) for at in range(3)]
    assert until(lambda: lanes.on_disk() == Cursor(9))
    assert until(lambda: lane.progress().delivered == 9)
    assert lane.progress().window is None
    labels = {"sink": "test", "category": "tracing"}
    assert until(lambda: lanes.meters.registry.get_sample_value("locum_delivered_points_total", labels) == 12)


def test_a_window_is_written_down_before_it_is_sent(lanes: Lanes) -> None:
    buffer, outlet = Buffer([spans(1), spans(2)]), Memory(hold=threading.Event())
    lane = lanes.start(buffer, outlet, look="as it is")
    outlet.wait_tried(1)
    assert lanes.on_disk() == Cursor(0, Window(1, 2, "as it is", {"opened": 1}))
    assert lane.open_window == (1, 2)
    assert lane.progress().oldest_ns == made.T0 + 1


@pytest.mark.parametrize("arrived", [False, True], ids=["before it arrived", "after it arrived"])
def test_after_a_crash_the_same_window_is_sent_under_the_same_ids(lanes: Lanes, arrived: bool) -> None:
    buffer = Buffer([spans(1, 4), spans(2, 4)])
    dying = Memory(hold=threading.Event())
    lanes.start(buffer, dying, max_body_bytes=400)
    dying.wait_tried(2)
    buffer.records += [spans(3), spans(4)]  # came meanwhile: these must not get into the old window
    after = Memory()
    lanes.start(buffer, after, max_body_bytes=400)
    after.wait(10)
    assert contents(after.delivered).items() >= contents(dying.tried).items()
    assert durations(after.delivered[: len(dying.tried)]) == durations(dying.tried)
    assert after.resumed == [{"opened": 1}]
    assert len(contents(after.delivered)) == len(after.delivered)


def test_a_lane_that_is_stopped_in_the_middle_goes_on_later(lanes: Lanes) -> None:
    buffer, outlet = Buffer([spans(1)]), Memory(hold=threading.Event())
    lane = lanes.start(buffer, outlet)
    outlet.wait_tried(1)
    began = time.monotonic()
    lane.stop(5.0)
    assert time.monotonic() - began < 2
    assert outlet.closed
    assert not outlet.delivered
    assert lanes.on_disk().window == Window(1, 1, "", {"opened": 1})
    again = Memory()
    lanes.start(buffer, again)
    again.wait(1)
    assert contents(again.delivered) == contents(outlet.tried)


def test_a_restart_after_everything_arrived_sends_nothing_again(lanes: Lanes) -> None:
    buffer, outlet = Buffer([spans(1), spans(2)]), Memory()
    first = lanes.start(buffer, outlet)
    outlet.wait(2)
    assert until(lambda: lanes.on_disk() == Cursor(2))
    first.stop(5)
    again = Memory()
    lane = lanes.start(buffer, again)
    buffer.records.append(spans(3))
    again.wait(1)
    assert durations(again.tried) == [3000]
    assert until(lambda: lane.delivered == 3)
    assert buffer.opened == [0, 2]


def test_batches_of_other_categories_are_done_with_as_they_pass(lanes: Lanes) -> None:
    buffer, outlet = Buffer(seen=50), Memory()
    lane = lanes.start(buffer, outlet)
    assert until(lambda: lane.delivered == 50)
    assert not outlet.opened
    buffer.records.append(spans(51))
    outlet.wait(1)
    assert until(lambda: lanes.on_disk() == Cursor(51))


def test_a_window_ends_where_it_is_large_enough(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "WINDOW_BYTES", 300)
    buffer, outlet = Buffer([spans(batch, 2) for batch in range(1, 7)]), Memory()
    lanes.start(buffer, outlet, max_body_bytes=150, flush_s=60.0)
    assert until(lambda: lanes.on_disk().delivered >= 4), "it waits for the flush"
    assert outlet.opened >= 2


def test_ids_of_series_mean_something_within_a_segment_only(lanes: Lanes) -> None:
    first, second = numbers(1), numbers(2, segment=2)
    other = ((7, made.series(8).pack()),)
    second = Record(2, 2, second.received_ns, second.signal, 3, other, second.body)
    outlet = Memory()
    lanes.start(Buffer([first, second]), outlet, category=Category.METRIC)
    outlet.wait(6)
    found = [event.tags["host"] for each in outlet.delivered for event in decode_points(each.body, Category.METRIC)]
    assert found == ["node-7"] * 3 + ["node-8"] * 3


def test_a_series_of_another_segment_is_not_taken_for_that_of_this(lanes: Lanes) -> None:
    second = numbers(2, segment=2)
    undefined = Record(2, 2, second.received_ns, second.signal, 3, (), second.body)
    outlet = Memory()
    lane = lanes.start(Buffer([numbers(1), undefined]), outlet, category=Category.METRIC)
    assert until(lambda: "series 7" in str(lane.health()))
    assert outlet.points <= 3


def test_another_window_from_the_same_batch_on_has_other_ids(lanes: Lanes) -> None:
    """As after the loss of a cursor: a receiver that keeps ids must not take what is new for what it has."""
    buffer, outlet = Buffer([spans(1)]), Memory()
    first = lanes.start(buffer, outlet)
    outlet.wait(1)
    first.stop(5)
    lanes.path.unlink()
    buffer.records.append(spans(2))
    again = Memory()
    lanes.start(buffer, again)
    again.wait(2)
    assert not contents(outlet.delivered).keys() & contents(again.delivered).keys()


def test_a_lane_outlives_a_buffer_that_cannot_be_read(lanes: Lanes) -> None:
    buffer = Buffer([spans(1)], errors=[OSError("the disk is gone"), KeyError("series 3"), RuntimeError("what?")])
    outlet = Memory()
    lane = lanes.start(buffer, outlet)
    outlet.wait(1)
    assert len(buffer.opened) == 4
    assert until(lambda: lane.health() is None)


@pytest.mark.parametrize("error", [OSError("no space left"), RuntimeError("a fault")])
def test_what_an_outlet_could_not_do_is_done_again_under_the_same_ids(lanes: Lanes, error: Exception) -> None:
    """Large points too: those of the failed attempt must not be there a second time."""
    outlet = Memory(plan=[error, error])
    lane = lanes.start(Buffer([spans(1, 3), spans(2, 2, text="x" * 500)]), outlet, max_body_bytes=300)
    outlet.wait(5)
    assert outlet.resumed == [{"opened": 1}, {"opened": 1}]
    assert len(outlet.oversized) == 2
    assert contents(outlet.tried) == contents(outlet.delivered + outlet.oversized)
    assert until(lambda: lane.health() is None)


def test_trouble_is_told_while_it_lasts(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "_RETRY_S", 30.0)
    lane = lanes.start(Buffer([spans(1)]), Memory(plan=[OSError("no space left")]))
    assert until(lambda: lane.health() == "no space left")
    assert lane.progress().health == "no space left"


def test_nothing_is_sent_that_could_not_be_written_down(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that only the memory knew would be another one after a crash: the same points under other ids."""
    attempts = []
    real = cursor.write

    def write(path: Path, told: Cursor) -> None:
        attempts.append(told)
        if len(attempts) <= 3:
            raise OSError("no space left")
        real(path, told)

    on_disk = []
    monkeypatch.setattr(cursor, "write", write)
    outlet = Memory()
    deliver = outlet.deliver

    def look_and_deliver(packages: list[Package], oversized: list[Package], stop: threading.Event) -> None:
        on_disk.append(lanes.on_disk().window)
        deliver(packages, oversized, stop)

    outlet.deliver = look_and_deliver  # type: ignore[method-assign]
    lanes.start(Buffer([spans(1), spans(2)]), outlet)
    outlet.wait(2)
    assert len(attempts) >= 4
    assert None not in on_disk
    assert durations(outlet.delivered) == [1000, 2000]


def test_a_window_whose_looks_changed_is_sent_and_said(lanes: Lanes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    buffer = Buffer([spans(1)])
    cursor.write(lanes.path, Cursor(0, Window(1, 1, "before", {})))
    outlet = Memory()
    lanes.start(buffer, outlet, look="after")
    outlet.wait(1)
    assert "event=window_changed" in caplog.text


@pytest.mark.parametrize("left", [[2, 3], [3], [4]])
def test_a_window_whose_batches_were_deleted_ends_with_what_is_left(lanes: Lanes, left: list[int]) -> None:
    cursor.write(lanes.path, Cursor(0, Window(1, 3)))
    outlet = Memory()
    lane = lanes.start(Buffer([*(spans(batch) for batch in left if batch < 4), spans(4)]), outlet)
    outlet.wait(len({*left, 4}))
    assert sorted(durations(outlet.delivered), key=str) == [1000 * batch for batch in sorted({*left, 4})]
    assert until(lambda: lane.delivered == 4)


def test_package_ids_look_as_datakits_and_depend_on_all_that_names_them() -> None:
    names = ["a/test/metric/1-2", "b/test/metric/1-2", "a/test/tracing/1-2", "a/test/metric/1-3"]
    ids = [package_id(name, at) for name in names for at in (0, 1, "0/1")]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("dk_[0-9a-v]{20}", each) for each in ids)
    assert package_id("a/test/metric/1-2", 0) == package_id("a/test/metric/1-2", 0)


class Dying(Memory):
    """An outlet whose process dies as planned: "before" or "after" the points arrived; ``None`` delivers."""

    def __init__(self, deaths: list[str | None]) -> None:
        super().__init__()
        self.deaths = deaths

    def deliver(self, packages: list[Package], oversized: list[Package], stop: threading.Event) -> None:
        death = self.deaths.pop(0) if self.deaths else None
        if death != "before":
            super().deliver(packages, oversized, stop)
        if death is not None:
            raise Stopped


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 0, 400])), min_size=1, max_size=8),
    st.lists(st.sampled_from([None, "before", "after"]), max_size=6),
    st.integers(100, 1000),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_wherever_it_dies_no_point_goes_out_under_two_ids(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]], deaths: list[str | None], window: int
) -> None:
    lanes = Lanes(tmp_path_factory.mktemp("lane"))
    records = [spans(batch, count, text="x" * size) for batch, (count, size) in enumerate(sizes, 1)]
    outlet = Dying(list(deaths))
    buffer = Buffer(records[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "WINDOW_BYTES", window)
        try:
            for number in range(len(deaths) + 2):
                buffer.records = records[: number + 1] if number < len(deaths) else records
                lane = lanes.start(buffer, outlet, max_body_bytes=300, flush_s=0.001)
                until(lambda lane=lane: not lane._thread.is_alive() or lane.delivered == len(buffer.records))  # type: ignore[misc]
                if lane.delivered == len(records):
                    break
                lane.stop(5)
        finally:
            lanes.stop()
    arrived = outlet.delivered + outlet.oversized
    owner: dict[object, str] = {}
    for package in arrived:
        for duration in durations([package]):
            assert owner.setdefault(duration, package.id) == package.id, "one point under two ids"
    bodies: dict[str, bytes] = {}
    for package in arrived:
        assert bodies.setdefault(package.id, package.body) == package.body, "one id for two bodies"
    assert len(owner) == sum(count for count, _ in sizes), "points are missing"
