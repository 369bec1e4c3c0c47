"""The fake Guance goes wrong as it was asked to, and only so: the other tests stand on it."""

from __future__ import annotations

import contextlib
import email.utils
import gzip
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.forward import stand_in
from gateway.forward.stand_in import FAULTS, StandIn, parse_faults
from gateway.model import ConfigError
from tests.forward.made import body_of, point, spelled_events

PROTOBUF = "application/protobuf; proto=com.guance.Point"


@pytest.fixture
def guance() -> Iterator[StandIn]:
    with StandIn() as running:
        yield running


def post(
    guance: StandIn, body: bytes, path: str = "/v1/write/metric?token=tkn_x", timeout_s: float = 5.0, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", guance.port, timeout=timeout_s)
    told = {"Content-Type": PROTOBUF, "X-Points": "1", "X-Pkg-Id": "dk_1"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    with contextlib.closing(connection):
        connection.request("POST", path, body, told)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def test_points_are_taken_and_remembered(guance: StandIn) -> None:
    body = body_of(point("a"), point("b", 2))
    assert post(guance, gzip.compress(body), Content_Encoding="gzip", X_Points="2")[0] == 200
    assert post(guance, body, X_Pkg_Id="dk_2")[0] == 200
    assert spelled_events(guance.points("metric")) == spelled_events([point("a"), point("b", 2)] * 2)
    assert guance.points("tracing") == []
    assert guance.counts == {"metric": 3}
    assert guance.requests[0].query == {"token": ["tkn_x"]}


def test_a_package_that_comes_again_counts_once(guance: StandIn) -> None:
    for _ in range(3):
        post(guance, body_of(point()))
    assert len(guance.requests) == 3
    assert len(guance.points()) == 1


STATUS = {
    "429": 429,
    "429-date": 429,
    "403-quota": 403,
    "403-token": 403,
    "400": 400,
    "500": 500,
    "503": 503,
    "302": 302,
}


@pytest.mark.parametrize("fault", STATUS)
def test_a_fault_is_a_status_and_nothing_is_taken(guance: StandIn, fault: str) -> None:
    guance.fail(fault)
    status, headers, body = post(guance, body_of(point()))
    assert status == STATUS[fault]
    assert not guance.points()
    if fault == "429":
        assert headers["retry-after"] == "1"
    if fault == "429-date":
        until = email.utils.parsedate_to_datetime(headers["retry-after"]).timestamp()
        assert 0 < until - time.time() <= 3
    if fault == "403-quota":
        assert "beyondDataUsage" in json.loads(body)["error_code"]
    if fault == "302":
        assert headers["location"].startswith("http://")
    assert post(guance, body_of(point()))[0] == 200


def test_a_poisoned_body_is_known_by_its_tag_or_field(guance: StandIn) -> None:
    guance.fail("400-poison", 3)
    assert post(guance, body_of(point(), point(poison="1")))[0] == 400
    assert post(guance, body_of(point("poison")))[0] == 400
    assert post(guance, body_of(point()))[0] == 200


def test_a_body_over_ten_thousand_bytes_is_too_large(guance: StandIn) -> None:
    guance.fail("413", 2)
    assert post(guance, body_of(*[point(text="x" * 100)] * 100))[0] == 413
    assert post(guance, body_of(point()))[0] == 200


def test_a_reset_takes_nothing_and_a_lost_answer_takes_everything(guance: StandIn) -> None:
    for fault, taken in (("reset", 0), ("lost", 1)):
        guance.fail(fault)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            post(guance, body_of(point()) + bytes(0))
        assert len(guance.points()) == taken
    assert [request.status for request in guance.requests if request.taken] == [0]


def test_a_slow_reply_trickles(guance: StandIn) -> None:
    guance.fail("slow")
    with pytest.raises(TimeoutError):
        connection = http.client.HTTPConnection("127.0.0.1", guance.port, timeout=0.4)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/write/metric", body_of(point()), {"X-Points": "1"})
            answer = connection.getresponse()
            assert answer.status == 200
            answer.read()


def test_only_the_right_token_is_known() -> None:
    with StandIn(token="tkn_right") as guance:
        assert post(guance, body_of(point()), "/v1/write/metric?token=tkn_wrong")[0] == 403
        assert post(guance, body_of(point()), "/v1/write/metric")[0] == 403
        assert post(guance, body_of(point()), "/v1/write/metric?token=tkn_right")[0] == 200
        assert "tkn_right" in guance.url


@pytest.mark.parametrize("content", [b"\x1f\x8bnot really", b"plain", gzip.compress(b"x" * 1000)[:-9]])
def test_a_body_that_cannot_be_inflated_is_400(guance: StandIn, content: bytes) -> None:
    assert post(guance, content, Content_Encoding="gzip")[0] == 400


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/write/object", 404), ("/elsewhere", 404), ("/v1/write/logging?to=x", 200)]
)
def test_other_paths_are_not_found(guance: StandIn, path: str, status: int) -> None:
    assert post(guance, body_of(point()), path)[0] == status


def test_what_is_asked_beside_points_is_answered(guance: StandIn) -> None:
    post(guance, body_of(point()))
    found = {}
    for path in ("/v1/ntp", "/v1/datakit/pull", "/counts", "/nothing"):
        connection = http.client.HTTPConnection("127.0.0.1", guance.port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            found[path] = (answer.status, json.loads(answer.read()))
    assert abs(found["/v1/ntp"][1]["content"]["timestamp_sec"] - time.time()) < 5
    assert found["/v1/datakit/pull"][0] == 200
    assert found["/counts"][1] == {"metric": 1}
    assert found["/nothing"][0] == 404


def test_shares_are_met_about_as_often_as_they_say() -> None:
    guance = StandIn(faults={"500": 0.3, "429": 0.2})
    drawn = [guance.choose_fault() for _ in range(4000)]
    assert 1000 < drawn.count("500") < 1400
    assert 640 < drawn.count("429") < 960
    guance.heal()
    assert guance.choose_fault() is None


def test_faults_are_written_as_kind_and_share() -> None:
    assert parse_faults(["429:0.1", "403-quota:1"]) == {"429": 0.1, "403-quota": 1.0}
    for text in ("429", "429:", "429:x", "429:0", "429:1.5", "429:nan", "418:0.5", ":0.5", "429:-1"):
        with pytest.raises(ConfigError, match="--fault"):
            parse_faults([text])
    with pytest.raises(ConfigError, match="lost"):
        StandIn().fail("teapot")
    assert all(FAULTS.values())


def test_a_port_in_use_is_told_in_one_line(guance: StandIn) -> None:
    with pytest.raises(ConfigError, match=str(guance.port)), StandIn(port=guance.port):
        pass


def test_one_that_swallows_only_counts() -> None:
    with StandIn(swallow=True) as guance:
        assert post(guance, b"whatever", X_Points="7")[0] == 200
        assert guance.counts == {"metric": 7}
        assert not guance.requests


def test_a_bomb_is_not_inflated(guance: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "MAX_BODY_BYTES", 100_000)
    assert post(guance, gzip.compress(bytes(100_001)), Content_Encoding="gzip")[0] == 400
    assert post(guance, bytes(100_001))[0] == 413


def test_a_hostile_sender_is_answered_and_does_not_end_it(guance: StandIn, capfd: pytest.CaptureFixture[str]) -> None:
    for raw in (
        b"\0\1\2\r\n\r\n",
        b"POST /v1/write/metric HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/write/metric HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"POST /v1/write/metric HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET http://[::1/ HTTP/1.1\r\n\r\n",
    ):
        with (
            socket.create_connection(("127.0.0.1", guance.port), timeout=5) as connection,
            contextlib.suppress(OSError),
        ):
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
    assert post(guance, body_of(point()), timeout_s=5)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_the_command_prints_and_records_what_comes(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    command = [sys.executable, "-c", _SERVE, str(record)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        ready = running.stdout.readline()
        guance = StandIn(port=int(ready.rstrip().rpartition(":")[2]))
        assert post(guance, body_of(point("a"), point("b")), X_Points="2")[0] == 200
        lines = [running.stdout.readline() for _ in range(2)]
        running.terminate()
        rest = running.stdout.read()
    assert [line.split(" ")[1] for line in lines] == ["a=1.5", "b=1.5"]
    assert json.loads(rest) == {"metric": 2}
    (entry,) = [json.loads(line) for line in record.read_text().splitlines()]
    assert (entry["category"], entry["package"], entry["status"], len(entry["points"])) == ("metric", "dk_1", 200, 2)
    assert running.returncode == 0


_SERVE = """
import sys
from pathlib import Path
from gateway.forward.stand_in import serve
serve("127.0.0.1", 0, record=Path(sys.argv[1]))
"""
