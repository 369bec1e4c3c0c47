"""A window that was on its way when the gateway died is made again the same, whatever became of its segment meanwhile.

A receiver that keeps package ids drops a package that it knows. So an id that comes again with other points would lose
points, or bring them twice. Batches hold several series in turn: Parquet, sorted by series, has another order.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.buffer.reader import follow
from gateway.config import FileSettings
from gateway.forward import cursor
from gateway.forward.cursor import Cursor, Window
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.encode import Encoder
from gateway.forward.file import LineFile
from gateway.forward.sink import Lane
from gateway.forward.stand_in import StandIn, Taken
from gateway.metrics import Meters
from gateway.model import Category
from tests.promises import oracle
from tests.promises.gateway import GatewayProcess
from tests.promises.kill import arrival, promises, request
from tests.promises.oracle import Arrival, Promised

BATCHES, NUMBERS = 20, 50


@dataclass(slots=True)
class Guance:
    """A stand-in that loses each answer until it is healed, and what came to it."""

    stand_in: StandIn
    arrivals: list[Arrival] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, taken: Taken) -> None:
        with self.lock:
            self.arrivals.append(arrival(taken))


@pytest.fixture
def guance() -> Iterator[Guance]:
    with StandIn(faults={"lost": 1.0}) as stand_in:
        guance = Guance(stand_in)
        stand_in.on_request = guance.note
        yield guance


def _send(at: str) -> Promised:
    promised = Promised()
    connection = http.client.HTTPConnection(at, timeout=20)
    for batch in range(BATCHES):
        numbers = list(range(batch * NUMBERS + 1, (batch + 1) * NUMBERS + 1))
        body, headers = request("metric", numbers), {"Content-Type": "application/x-protobuf"}
        connection.request("POST", "/v1/metrics", body, headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
        promised.acknowledged |= promises("metric", numbers)
    connection.close()
    return promised


def _assert_the_same_again(guance: Guance, promised: Promised) -> None:
    """Each package that had come comes again, with the points it had."""
    before = {each.package_id for each in guance.arrivals}
    assert before

    def came_again() -> bool:
        ids = [each.package_id for each in guance.arrivals]
        return all(ids.count(package_id) > 1 for package_id in before)

    guance.stand_in.heal()
    assert guance.stand_in.wait_for(came_again, 20)
    assert guance.stand_in.wait_for(lambda: not oracle.lost(promised, guance.arrivals), 20)
    assert not oracle.changed(guance.arrivals)
    assert not oracle.doubled(guance.arrivals)


@pytest.mark.parametrize("sink_meanwhile", ["", '[[sinks.file]]\npath = "elsewhere"\n'], ids=["none", "a file"])
def test_it_is_the_same_after_a_gateway_without_a_dataway_has_sealed_its_segment(
    guance: Guance, tmp_path: Path, sink_meanwhile: str
) -> None:
    with GatewayProcess(tmp_path, guance.stand_in.url, sink_meanwhile) as gateway:
        gateway.start()
        promised = _send(gateway.http)
        assert guance.stand_in.wait_for(lambda: bool(guance.arrivals), 20)
        gateway.kill()
        del gateway.environment["ENV_DATAWAY"]
        gateway.start()
        assert gateway.wait_for_log("event=sealed segment=1")
        if sink_meanwhile:
            time.sleep(3.0)  # it goes past the segment, whose journal nobody needs then but the one that is away
        assert gateway.terminate() == 0
        gateway.environment["ENV_DATAWAY"] = guance.stand_in.url
        gateway.start()
        _assert_the_same_again(guance, promised)


def test_it_is_the_same_when_its_segment_was_sealed_while_it_was_gathered(guance: Guance, tmp_path: Path) -> None:
    conf = 'flush_interval_s = "4s"\n[buffer]\nsegment_age_s = "1s"\n'
    with GatewayProcess(tmp_path, guance.stand_in.url, conf) as gateway:
        gateway.start()
        promised = _send(gateway.http)
        assert gateway.wait_for_log("event=sealed segment=1")
        assert guance.stand_in.wait_for(lambda: bool(guance.arrivals), 20)
        gateway.kill()
        gateway.start()
        _assert_the_same_again(guance, promised)


def test_all_of_it_is_kept_from_the_moment_its_lane_is_made(tmp_path: Path) -> None:
    path = tmp_path / "dataway-metric.json"
    cursor.write(path, Cursor(10, Window(11, 5000)))
    settings, letters, meters = FileSettings(tmp_path / "lines"), DeadLetters(tmp_path), Meters()
    with contextlib.closing(LineFile("file", Category.METRIC, settings, letters, meters)) as outlet:
        read = functools.partial(follow, tmp_path, None)
        lane = Lane("file", Category.METRIC, read, outlet, Encoder(None, "datakit"), path, "", meters, "id", 0.1)
        begin, end = lane.reach
    assert begin <= 11
    assert end >= 5000
