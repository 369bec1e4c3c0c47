"""Delivery to a Dataway that goes wrong in every way of ``locum dataway``: kept, sent again, halved, never lost."""

from __future__ import annotations

import email.utils
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import DatawaySettings
from gateway.forward import dataway as dataway_module
from gateway.forward.dataway import Answer, Dataway, judge, retry_after_s, write_url
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.sink import Lane
from gateway.forward.stand_in import StandIn
from gateway.metrics import Meters
from gateway.model import Category
from tests.forward.lanes import Shelf, event, lane, record, until

TOKEN = "tkn_0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataway_module, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(dataway_module, "MAX_DELAY_S", 0.1)
    monkeypatch.setattr(dataway_module, "MAX_QUOTA_DELAY_S", 0.1)


@pytest.fixture
def guance() -> Iterator[StandIn]:
    with StandIn(token=TOKEN) as stand_in:
        yield stand_in


def outlet(url: str, place: Path, **settings: object) -> Dataway:
    chosen = DatawaySettings(url=url, timeout_s=2.0, **settings)  # type: ignore[arg-type]
    return Dataway("test", Category.LOGGING, chosen, DeadLetters(place), Meters(), "0.1.0", "gateway-1")


def sent_through(guance: StandIn, place: Path, numbers: int = 5, **settings: object) -> Lane:
    """A lane that is under way with one batch of ``numbers`` records."""
    running = lane(outlet(guance.url, place, **settings), Shelf([record(1, [event(n) for n in range(numbers)])]), place)
    running.start()
    return running


def messages(guance: StandIn) -> list[str]:
    return sorted(str(each.fields["message"]) for each in guance.points())


@pytest.mark.parametrize("fault", ["429", "429-date", "500", "503", "403-quota", "302", "reset", "lost"])
def test_what_is_nobodys_points_fault_is_sent_again_under_the_same_id(
    fault: str, guance: StandIn, tmp_path: Path
) -> None:
    guance.fail(fault, 2)
    running = sent_through(guance, tmp_path)
    assert until(lambda: running.delivered == 1, 15), running.health()
    running.stop(2)
    assert messages(guance) == [f"m{n}" for n in range(5)]
    assert len({request.package_id for request in guance.requests}) == 1
    assert len(guance.requests) >= 3
    assert not list(DeadLetters(tmp_path))


def test_a_retry_after_is_waited_for(guance: StandIn, tmp_path: Path) -> None:
    guance.fail("429", 1)
    began = time.monotonic()
    running = sent_through(guance, tmp_path)
    assert until(lambda: running.delivered == 1)
    running.stop(2)
    assert time.monotonic() - began >= 1.0


def test_a_token_that_is_not_taken_keeps_everything_and_is_never_printed(
    guance: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    guance.token = "tkn_another"
    url = f"http://127.0.0.1:{guance.port}?token={TOKEN}"
    way = outlet(url, tmp_path)
    running = lane(way, Shelf([record(1, [event(1)])]), tmp_path)
    running.start()
    assert until(lambda: running.health() is not None)
    assert "403" in str(running.health())
    guance.token = TOKEN
    assert until(lambda: running.delivered == 1)
    running.stop(2)
    assert running.health() is None
    assert TOKEN not in caplog.text + repr(way) + repr(DatawaySettings(url=url))
    assert TOKEN not in DatawaySettings(url=url).masked_url


def test_a_poisoned_body_is_halved_until_the_point_is_alone(guance: StandIn, tmp_path: Path) -> None:
    guance.faults["400-poison"] = 1.0
    events = [event(n) for n in range(9)]
    events[4] = event(4, poison="yes")
    running = lane(outlet(guance.url, tmp_path), Shelf([record(1, events)]), tmp_path)
    running.start()
    assert until(lambda: running.delivered == 1)
    running.stop(2)
    assert messages(guance) == sorted(f"m{n}" for n in range(9) if n != 4)
    (letter,) = DeadLetters(tmp_path)
    assert (letter.status, letter.points) == (400, 1)
    assert "as planned" in letter.reply
    assert b"poison" in letter.raw()
    ids = [request.package_id for request in guance.requests]
    assert len(ids) == len(set(ids))


def test_a_body_that_is_too_large_is_sent_in_parts(guance: StandIn, tmp_path: Path) -> None:
    guance.faults["413"] = 1.0
    running = sent_through(guance, tmp_path, numbers=600)
    assert until(lambda: running.delivered == 1)
    running.stop(2)
    assert len(guance.points()) == 600
    assert not list(DeadLetters(tmp_path))


def test_a_reply_that_trickles_is_given_up_at_its_deadline(guance: StandIn, tmp_path: Path) -> None:
    guance.fail("slow", 1)
    began = time.monotonic()
    running = sent_through(guance, tmp_path)
    assert until(lambda: running.delivered == 1, 15), running.health()
    assert 1.5 < time.monotonic() - began < 8
    running.stop(2)


def test_a_receiver_that_is_away_is_waited_for(tmp_path: Path) -> None:
    with StandIn(token=TOKEN) as gone:
        port = gone.port
    running = lane(outlet(f"http://127.0.0.1:{port}?token={TOKEN}", tmp_path), Shelf([record(1, [event(1)])]), tmp_path)
    running.start()
    assert until(lambda: running.health() is not None)
    assert "cannot be reached" in str(running.health())
    with StandIn(port=port, token=TOKEN) as back:
        assert until(lambda: running.delivered == 1)
        assert messages(back) == ["m1"]
    running.stop(2)


def test_a_lane_that_was_stopped_in_the_middle_sends_the_same_packages_again(guance: StandIn, tmp_path: Path) -> None:
    guance.faults["503"] = 1.0
    shelf = Shelf([record(n, [event(10 * n + each) for each in range(5)]) for n in (1, 2, 3)])
    first = lane(outlet(guance.url, tmp_path), shelf, tmp_path, max_body_bytes=200)
    first.start()
    assert until(lambda: len(guance.requests) >= 1)
    first.stop(2)
    assert first.open_window == (1, 3)
    tried = {request.package_id for request in guance.requests}
    guance.heal()
    shelf.records.append(record(4, [event(99)]))  # came meanwhile: it must not get into the old window
    second = lane(outlet(guance.url, tmp_path), shelf, tmp_path, max_body_bytes=200)
    second.start()
    assert until(lambda: second.delivered == 4)
    second.stop(2)
    assert len(messages(guance)) == 16
    assert tried <= {request.package_id for request in guance.requests if request.taken}


def test_the_request_is_as_datakits(guance: StandIn, tmp_path: Path) -> None:
    running = sent_through(guance, tmp_path)
    assert until(lambda: running.delivered == 1)
    running.stop(2)
    (request,) = guance.requests
    headers = request.headers
    assert headers["content-type"] == "application/protobuf; proto=com.guance.Point"
    assert headers["content-encoding"] == "gzip"
    assert headers["x-points"] == "5"
    assert headers["referer"] == "DataKit"
    assert headers["user-agent"].startswith("datakit-linux-amd64/")
    assert len(headers["x-pkg-id"]) == 23
    assert request.query == {"token": [TOKEN]}


def test_line_protocol_is_sent_when_it_is_asked_for(guance: StandIn, tmp_path: Path) -> None:
    running = sent_through(guance, tmp_path, encoding="line_protocol")
    assert until(lambda: running.delivered == 1)
    running.stop(2)
    (request,) = guance.requests
    assert request.headers["content-type"] == "application/line-protocol"
    assert request.body.decode().splitlines()[0] == 'app,service=app message="m0" 1796000000000000000'


def test_a_cursor_survives_and_a_garbled_one_begins_anew(guance: StandIn, tmp_path: Path) -> None:
    shelf = Shelf([record(1, [event(1)])])
    running = lane(outlet(guance.url, tmp_path), shelf, tmp_path)
    running.start()
    assert until(lambda: running.delivered == 1)
    running.stop(2)
    assert lane(outlet(guance.url, tmp_path), shelf, tmp_path).delivered == 1
    path = tmp_path / "cursors" / "test-logging.json"
    whole = path.read_bytes()
    for garbled in (b"", b"{", whole.replace(b'"delivered": 1', b'"delivered": 2'), whole[20:]):
        path.write_bytes(garbled)
        assert lane(outlet(guance.url, tmp_path), shelf, tmp_path).delivered == 0


@pytest.mark.parametrize(
    ("status", "text", "answer"),
    [
        (200, "", Answer.DELIVERED),
        (204, "", Answer.DELIVERED),
        (301, "", Answer.LATER),
        (400, "", Answer.SPLIT),
        (401, "", Answer.LATER),
        (403, '{"error_code":"beyondDataUsage"}', Answer.QUOTA),
        (403, "token", Answer.LATER),
        (404, "", Answer.LATER),
        (405, "", Answer.LATER),
        (408, "", Answer.LATER),
        (413, "", Answer.SPLIT),
        (422, "", Answer.SPLIT),
        (429, "", Answer.LATER),
        (500, "", Answer.LATER),
        (503, "", Answer.LATER),
    ],
)
def test_a_status_means(status: int, text: str, answer: Answer) -> None:
    assert judge(status, text, None).answer is answer


def test_retry_after_is_seconds_or_a_date_and_never_absurd() -> None:
    assert retry_after_s("3") == 3.0
    assert retry_after_s("999999999") == 900.0
    assert retry_after_s("-5") == 0.0
    assert retry_after_s("nan") is None
    assert retry_after_s("soon") is None
    assert retry_after_s(None) is None
    in_a_minute = retry_after_s(email.utils.formatdate(time.time() + 60))
    assert in_a_minute is not None
    assert 55 < in_a_minute <= 60


def test_every_parameter_of_the_address_is_kept() -> None:
    url = write_url("https://dw.example/base/?token=tkn_1&to=x%20y#here", Category.TRACING)
    assert url == "https://dw.example/base/v1/write/tracing?token=tkn_1&to=x+y"
