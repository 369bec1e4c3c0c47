"""The finer rules of delivery: waits, several bodies at once, what line protocol cannot write, large points."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import DatawaySettings
from gateway.forward import dataway as dataway_module
from gateway.forward.dataway import Answer, Dataway, Reply, delay_s, judge
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.sink import Package, Stopped
from gateway.forward.stand_in import StandIn
from gateway.metrics import Meters
from gateway.model import Category, Event
from tests.forward.lanes import until
from tests.forward.made import body_of, point, spelled, unwritable

TOKEN = "tkn_0123456789abcdef0123456789abcdef"


@pytest.fixture
def guance() -> Iterator[StandIn]:
    with StandIn(token=TOKEN) as running:
        yield running


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataway_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(dataway_module, "MAX_DELAY_S", 0.02)
    monkeypatch.setattr(dataway_module, "MAX_QUOTA_DELAY_S", 0.02)


class Delivery:
    """A Dataway of its own, with its figures and dead letters."""

    def __init__(self, guance: StandIn, place: Path, **settings: Any) -> None:
        self.meters = Meters()
        self.letters = DeadLetters(place)
        self.stop = threading.Event()
        chosen = DatawaySettings(url=guance.url, **settings)
        self.way = Dataway("dataway", Category.METRIC, chosen, self.letters, self.meters, "1.2.3", "gw")

    def packed(self, name: str, *events: Event) -> Package:
        return Package(name, self.way.pack(body_of(*events)), len(events))

    def send(self, *packages: Package, oversized: tuple[Package, ...] = ()) -> None:
        try:
            self.way.deliver(list(packages), list(oversized), self.stop)
        finally:
            self.way.close()

    def sample(self, name: str, **labels: str) -> float:
        told = {"sink": "dataway", "category": "metric"} | labels
        return self.meters.registry.get_sample_value(name, told) or 0.0


@pytest.mark.parametrize("attempt", [1, 2, 3, 6, 7, 50, 10_000])
def test_waits_double_up_to_a_minute_with_jitter(attempt: int) -> None:
    longest = min(2.0 ** min(attempt - 1, 10), 60.0)
    waits = [delay_s(judge(503, "", None), attempt) for _ in range(200)]
    assert all(longest / 2 <= wait <= longest for wait in waits)
    assert max(waits) - min(waits) > longest / 8
    quota = [delay_s(judge(403, "beyondDataUsage", None), attempt) for _ in range(200)]
    assert max(quota) <= 300
    assert attempt < 9 or min(quota) >= 128


@pytest.mark.parametrize("told", ["3", "3.0", " 3 "])
def test_what_a_receiver_asks_for_is_waited_in_seconds(told: str) -> None:
    assert 3 <= delay_s(judge(429, "", told), 1) <= 3.1
    assert 3 <= delay_s(judge(503, "", told), 40) <= 3.1


@pytest.mark.parametrize("told", ["0", "-7", "Thu, 01 Jan 1970 00:00:00 GMT", "1e-9"])
def test_a_wait_that_is_none_does_not_become_a_storm(told: str) -> None:
    """The clocks of two hosts differ; DataKit sends a body that fails dozens of times within a tenth of a second."""
    assert min(delay_s(judge(503, "", told), attempt) for attempt in (1, 2, 9) for _ in range(50)) >= 0.5


@pytest.mark.parametrize("told", ["inf", "1e999", "99999999", "Fri, 01 Jan 2399 00:00:00 GMT"])
def test_a_wait_without_end_is_fifteen_minutes(told: str) -> None:
    assert 900 <= delay_s(judge(429, "", told), 1) <= 901


@pytest.mark.parametrize("told", ["", "soon", "nan", "Fri, 99 Foo 2399 99:00:00 GMT", "٣٣٣x", "1,2", "\0"])
def test_a_wait_that_cannot_be_read_is_ours(told: str) -> None:
    assert delay_s(judge(429, "", told), 1) <= 1.0


def test_whatever_the_status_there_is_an_answer() -> None:
    for status in range(100, 1000):
        reply = judge(status, "text", "3")
        assert isinstance(reply, Reply)
        assert (reply.answer is Answer.DELIVERED) == (200 <= status < 300)
        if reply.answer is Answer.SPLIT:
            assert 400 <= status < 500
        assert math.isfinite(delay_s(reply, 1))


@pytest.mark.usefixtures("quick")
def test_the_head_of_a_request_is_datakits(guance: StandIn, tmp_path: Path) -> None:
    delivery = Delivery(guance, tmp_path)
    delivery.send(delivery.packed("dk_0123456789abcdefghij", point("a"), point("b")))
    headers = guance.requests[0].headers
    assert {
        name: headers[name] for name in ("referer", "content-type", "content-encoding", "x-points", "x-pkg-id")
    } == {
        "referer": "DataKit",
        "content-type": "application/protobuf; proto=com.guance.Point",
        "content-encoding": "gzip",
        "x-points": "2",
        "x-pkg-id": "dk_0123456789abcdefghij",
    }
    assert re.fullmatch(r"datakit-linux-amd64/\S+/gw", headers["user-agent"])
    assert int(headers["content-length"]) == delivery.sample("locum_delivered_bytes_total")
    assert "transfer-encoding" not in headers
    assert headers["host"] == f"127.0.0.1:{guance.port}"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("gzip", [False, True])
@pytest.mark.parametrize("encoding", ["protobuf", "line_protocol"])
def test_the_body_is_coded_as_it_says(guance: StandIn, tmp_path: Path, encoding: str, gzip: bool) -> None:
    delivery = Delivery(guance, tmp_path, encoding=encoding, gzip=gzip)
    delivery.send(delivery.packed("dk_1", point("a")))
    (request,) = guance.requests
    assert ("content-encoding" in request.headers) == gzip
    wanted = body_of(point("a")) if encoding == "protobuf" else b"otel_service,host=h a=1.5 1760000000000000000\n"
    assert request.body == wanted


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("fault", "cause"),
    [("429", "429"), ("500", "500"), ("403-quota", "quota"), ("403-token", "token"), ("302", "302")],
)
def test_each_attempt_is_counted_by_its_cause(
    guance: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, cause: str
) -> None:
    monkeypatch.setattr(dataway_module, "MAX_RETRY_AFTER_S", 0.01)
    guance.fail(fault, 3)
    delivery = Delivery(guance, tmp_path)
    delivery.send(delivery.packed("dk_1", point()))
    assert delivery.sample("locum_retries_total", cause=cause) == 3
    assert len(guance.points()) == 1
    assert len({(request.package_id, request.body) for request in guance.requests}) == 1


@pytest.mark.usefixtures("quick")
def test_an_outage_has_no_end_at_which_points_are_given_up(
    guance: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataway_module, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(dataway_module, "MAX_DELAY_S", 0.001)
    guance.fail("503", 300)
    delivery = Delivery(guance, tmp_path)
    delivery.send(delivery.packed("dk_1", point()))
    assert len(guance.requests) == 301
    assert len(guance.points()) == 1
    assert not list(delivery.letters)


@pytest.mark.usefixtures("quick")
def test_several_bodies_go_at_once_where_the_way_is_long(
    guance: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(4, timeout=10)
    seen = [0]

    def meet(_: object) -> None:
        seen[0] += 1

    choose = StandIn.choose_fault

    def together(self: StandIn) -> str | None:
        if seen[0] >= 1:  # after the first reply, which was slow
            meeting.wait()
        else:
            time.sleep(0.02)
        return choose(self)

    monkeypatch.setattr(StandIn, "choose_fault", together)
    guance.on_request = meet
    delivery = Delivery(guance, tmp_path, connections=4)
    delivery.way.deliver([delivery.packed("dk_0", point("m0"))], [], delivery.stop)
    delivery.send(*(delivery.packed(f"dk_{at}", point(f"m{at}")) for at in range(1, 5)))
    assert sorted(name for event in guance.points() for name in event.fields) == ["m0", "m1", "m2", "m3", "m4"]


@pytest.mark.usefixtures("quick")
def test_one_bad_body_of_several_holds_up_none(guance: StandIn, tmp_path: Path) -> None:
    guance.faults["400-poison"] = 1.0
    delivery = Delivery(guance, tmp_path)
    delivery.way._is_far = True
    bad = [point(f"m{at}", **({"poison": "yes"} if at in (3, 4) else {"host": "h"})) for at in range(7)]
    delivery.send(
        delivery.packed("dk_1", *bad), delivery.packed("dk_2", point("good")), delivery.packed("dk_3", bad[3])
    )
    arrived = sorted(name for event in guance.points() for name in event.fields)
    assert arrived == ["good", "m0", "m1", "m2", "m5", "m6"]
    letters = list(delivery.letters)
    assert sorted(spelled(each.raw())[0].partition("fields={'")[2][:2] for each in letters) == ["m3", "m3", "m4"]
    assert {each.status for each in letters} == {400}
    assert delivery.sample("locum_dead_letter_points_total") == 3
    assert delivery.way.health() is None


@pytest.mark.usefixtures("quick")
def test_halves_keep_their_ids_when_they_come_again(guance: StandIn, tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        guance.requests.clear()
        guance.faults["400-poison"] = 1.0
        delivery = Delivery(guance, tmp_path)
        events = [point(f"m{at}", **({"poison": "yes"} if at == 2 else {"host": "h"})) for at in range(6)]
        delivery.send(delivery.packed("dk_1", *events))
        seen.append([(request.package_id, request.body) for request in guance.requests])
    assert seen[0] == seen[1]
    assert len({name for name, _ in seen[0]}) == len(seen[0])
    assert len(list(delivery.letters)) == 1


@pytest.mark.usefixtures("quick")
def test_a_trouble_in_the_middle_of_halving_is_waited_out(guance: StandIn, tmp_path: Path) -> None:
    guance.fail("400", 1)
    guance.fail("503", 2)
    guance.fail("lost", 1)
    delivery = Delivery(guance, tmp_path)
    delivery.send(delivery.packed("dk_1", *(point(f"m{at}") for at in range(5))))
    assert sorted(name for event in guance.points() for name in event.fields) == [f"m{at}" for at in range(5)]
    assert not list(delivery.letters)


@pytest.mark.usefixtures("quick")
def test_a_point_larger_than_a_body_is_laid_aside_and_never_sent(guance: StandIn, tmp_path: Path) -> None:
    delivery = Delivery(guance, tmp_path, max_body_bytes=100)
    large = delivery.packed("dk_large", point("m", 1.0, host="x" * 500))
    delivery.send(delivery.packed("dk_1", point()), oversized=(large,))
    (letter,) = delivery.letters
    assert (letter.id, letter.status, letter.points) == ("dk_large", 0, 1)
    assert "100 are allowed" in letter.reason
    assert [request.package_id for request in guance.requests] == ["dk_1"]


@pytest.mark.usefixtures("quick")
def test_what_lines_cannot_write_is_laid_aside_once_and_the_rest_is_sent(guance: StandIn, tmp_path: Path) -> None:
    guance.fail("400", 1)  # so that what is left is halved
    delivery = Delivery(guance, tmp_path, encoding="line_protocol")
    events = [point("a"), unwritable(), point("b"), unwritable(), point("c")]
    delivery.send(delivery.packed("dk_1", *events), delivery.packed("dk_2", unwritable()))
    taken = [request for request in guance.requests if request.taken]
    assert [line.split()[1] for each in taken for line in each.body.decode().splitlines()] == [
        "a=1.5",
        "b=1.5",
        "c=1.5",
    ]
    assert [request.n_points for request in guance.requests] == [3, 1, 2]
    letters = list(delivery.letters)
    assert len(letters) == 3
    assert all(spelled(each.raw()) == spelled(body_of(unwritable())) for each in letters)
    assert all("line protocol" in each.reason for each in letters)


def test_a_stop_ends_a_wait_at_once(guance: StandIn, tmp_path: Path) -> None:
    guance.faults["403-quota"] = 1.0
    delivery = Delivery(guance, tmp_path)
    ended = threading.Event()

    def send() -> None:
        with pytest.raises(Stopped):
            delivery.send(delivery.packed("dk_1", point()))
        ended.set()

    threading.Thread(target=send, daemon=True).start()
    assert until(lambda: delivery.way.health() is not None)
    assert "quota" in str(delivery.way.health())
    began = time.monotonic()
    delivery.stop.set()
    assert ended.wait(5)
    assert time.monotonic() - began < 0.5
    assert not list(delivery.letters)
