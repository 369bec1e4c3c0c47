"""The way to a Dataway: proxies, redirects, kept connections, deadlines; and the token that no one else may see."""

from __future__ import annotations

import base64
import logging
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.config import DatawaySettings
from gateway.forward import connections
from gateway.forward import dataway as dataway_module
from gateway.forward.connections import ConnectionPool
from gateway.forward.dataway import Dataway
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.sink import Package, Stopped
from gateway.forward.stand_in import StandIn
from gateway.metrics import Meters
from gateway.model import Category
from tests.forward.lanes import until
from tests.forward.made import body_of, point

TOKEN = "tkn_0123456789abcdef0123456789abcdef"
PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of this host, and no long waits."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dataway_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(dataway_module, "MAX_DELAY_S", 0.02)


@dataclass
class Script:
    """A server that answers each connection's requests with ``replies``, one after the other, and then hangs up."""

    replies: list[bytes]
    keep: bool = True
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    def serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as lines:
            while self.replies:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    line = lines.readline()
                    if not line:
                        return
                    head += line
                size = next((int(each[15:]) for each in head.split(b"\r\n") if each[:15] == b"Content-Length:"), 0)
                self.requests.append(head + lines.read(size))
                connection.sendall(self.replies.pop(0))
                if not self.keep:
                    return


@contextmanager
def script(*replies: bytes, keep: bool = True) -> Iterator[Script]:
    listening = socket.create_server(("127.0.0.1", 0))
    found = Script(list(replies), keep, port=listening.getsockname()[1])
    threading.Thread(target=found.serve, args=(listening,), daemon=True).start()
    try:
        yield found
    finally:
        listening.close()


def reply(status: int, body: bytes = b"", *headers: bytes) -> bytes:
    head = [b"HTTP/1.1 %d X" % status, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*head, b"", body])


def settings(port: int, host: str = "127.0.0.1", timeout_s: float = 2.0, proxy: str | None = None) -> DatawaySettings:
    return DatawaySettings(url=f"http://{host}:{port}?token={TOKEN}", timeout_s=timeout_s, proxy=proxy)


def post(chosen: DatawaySettings, times: int = 1) -> list[tuple[int, str | None, str]]:
    with closing(ConnectionPool(chosen)) as pool:
        url = dataway_module.write_url(chosen.url, Category.METRIC)
        return [pool.post(url, b"body", {"X-Points": "1"}) for _ in range(times)]


def test_a_connection_is_kept() -> None:
    with script(reply(200), reply(204), reply(200)) as server:
        assert [status for status, _, _ in post(settings(server.port), 3)] == [200, 204, 200]
        assert server.connections == 1
        assert server.requests[0].startswith(f"POST /v1/write/metric?token={TOKEN} HTTP/1.1\r\n".encode())
        assert server.requests[0].endswith(b"\r\n\r\nbody")


def test_a_kept_connection_that_was_closed_meanwhile_is_made_anew() -> None:
    with script(reply(200), reply(200), keep=False) as server:
        assert [status for status, _, _ in post(settings(server.port), 2)] == [200, 200]
        assert server.connections == 2


def test_a_fresh_connection_that_is_hung_up_on_is_an_error() -> None:
    with script() as server, pytest.raises(OSError):
        post(settings(server.port))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    with script(reply(200)) as elsewhere:
        location = b"Location: http://127.0.0.1:%d/v1/write/metric" % elsewhere.port
        with script(reply(status, b"", location)) as server:
            assert post(settings(server.port))[0][0] == status
        assert not elsewhere.connections


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000 + b"\r\n\r\n",
    ],
    ids=["no status", "no HTTP", "no chunks", "a thousand headers", "an endless header"],
)
def test_a_reply_that_is_none_is_waited_out_as_if_there_were_none(tmp_path: Path, answer: bytes) -> None:
    with script(answer, reply(200), keep=False) as server:
        way, letters = dataway(settings(server.port), tmp_path)
        way.deliver([packed(way, "dk_1")], [], threading.Event())
        assert server.connections == 2
        assert not list(letters)
        way.close()


def test_no_more_of_a_reply_is_read_than_its_beginning() -> None:
    with script(reply(400, b"x" * 5_000_000), reply(200)) as server:
        (first, second) = post(settings(server.port), 2)
        assert (first[0], len(first[2]), second[0]) == (400, 64 << 10, 200)
        assert server.connections == 2


@pytest.mark.parametrize("trickle", [b"HTTP/1.1 200 OK\r\nContent-Length: 3600\r\n\r\n", b"HTTP/1.1 200 "])
def test_a_reply_has_a_deadline_however_it_trickles(trickle: bytes) -> None:
    ended = threading.Event()

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(trickle)
            try:
                while not ended.wait(0.05):
                    connection.sendall(b"2")
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        began = time.monotonic()
        with pytest.raises(OSError):
            post(settings(listening.getsockname()[1], timeout_s=0.3))
        assert 0.25 < time.monotonic() - began < 3
        ended.set()


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            post(settings(listening.getsockname()[1], timeout_s=0.3))
        assert time.monotonic() - began < 3


def test_a_reply_may_take_longer_than_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                time.sleep(0.3)
                connection.recv(65536)
                connection.sendall(reply(200))

        threading.Thread(target=serve, daemon=True).start()
        assert post(settings(listening.getsockname()[1]))[0][0] == 200


def test_a_kept_connection_that_is_silent_is_not_tried_a_second_time_at_once() -> None:
    with script(reply(200), b"", reply(200)) as server, pytest.raises(TimeoutError):
        post(settings(server.port, timeout_s=0.3), 2)
    assert server.connections == 1


def test_close_ends_the_requests_that_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pool = ConnectionPool(settings(listening.getsockname()[1], timeout_s=60))
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                pool.post("http://x/", b"", {})
            except (OSError, dataway_module.http.client.HTTPException) as error:
                ended.append(error)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        assert until(lambda: bool(pool._busy) and all(each.sock for each in pool._busy))
        time.sleep(0.05)
        pool.close()
        waiting.join(5)
        assert ended


def set_variable(name: str) -> Callable[[pytest.MonkeyPatch, str], str | None]:
    def choose(patch: pytest.MonkeyPatch, proxy: str) -> str | None:
        patch.setenv(name, proxy)
        return None

    return choose


CHOICES: dict[str, Callable[[pytest.MonkeyPatch, str], str | None]] = {
    "a setting": lambda _, proxy: proxy,
    "a setting without a scheme": lambda _, proxy: proxy.removeprefix("http://"),
    "HTTP_PROXY": set_variable("HTTP_PROXY"),
    "http_proxy": set_variable("http_proxy"),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_proxy_gets_the_whole_address(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    with script(reply(200)) as proxy:
        chosen = CHOICES[choice](monkeypatch, f"http://127.0.0.1:{proxy.port}")
        assert post(settings(80, "dataway.example", proxy=chosen))[0][0] == 200
    (request,) = proxy.requests
    assert request.startswith(f"POST http://dataway.example:80/v1/write/metric?token={TOKEN} HTTP/1.1\r\n".encode())
    assert b"\r\nHost: dataway.example" in request
    assert b"Proxy-Authorization" not in request


def test_a_proxy_with_a_login_is_told_who_asks() -> None:
    with script(reply(200)) as proxy:
        post(settings(80, "dataway.example", proxy=f"http://me:p%40ss@127.0.0.1:{proxy.port}"))
    assert b"\r\nProxy-Authorization: Basic " + base64.b64encode(b"me:p@ss") + b"\r\n" in proxy.requests[0]
    assert b"p%40ss" not in proxy.requests[0]


def test_no_proxy_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    with script(reply(200)) as server:
        assert post(settings(server.port))[0][0] == 200


def test_https_goes_through_a_tunnel_that_sees_no_token(tmp_path: Path) -> None:
    with script(reply(200)) as proxy:
        url = f"https://dataway.example?token={TOKEN}"
        chosen = DatawaySettings(url=url, timeout_s=2.0, proxy=f"http://me:secret@127.0.0.1:{proxy.port}")
        with pytest.raises(OSError):  # what answers there is no TLS
            post(chosen)
    (request,) = proxy.requests
    assert request.startswith(b"CONNECT dataway.example:443 HTTP/1.")
    assert b"\r\nProxy-Authorization: Basic " in request
    assert TOKEN.encode() not in request


def test_through_a_tunnel_points_arrive_and_the_connection_is_kept(tls: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls)
    listening = socket.create_server(("127.0.0.1", 0))
    guance = Script([reply(200), reply(204)], port=listening.getsockname()[1])
    asked: list[bytes] = []

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def tunnel(proxy: socket.socket) -> None:
        client, _ = proxy.accept()
        with client, socket.create_connection(("127.0.0.1", guance.port)) as onward:
            asked.append(client.recv(65536))
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=pass_on, args=(onward, client), daemon=True)
            back.start()
            pass_on(client, onward)
            back.join(2)

    with context.wrap_socket(listening, server_side=True) as secured, socket.create_server(("127.0.0.1", 0)) as proxy:
        threading.Thread(target=guance.serve, args=(secured,), daemon=True).start()
        threading.Thread(target=tunnel, args=(proxy,), daemon=True).start()
        url = f"https://dataway.example?token={TOKEN}"
        way = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        chosen = DatawaySettings(url=url, timeout_s=2.0, proxy=way, tls_insecure=True)
        assert [status for status, _, _ in post(chosen, 2)] == [200, 204]
    assert asked[0].startswith(b"CONNECT dataway.example:443 HTTP/1.")
    assert all(request.startswith(b"POST /v1/write/metric?token=") for request in guance.requests)
    assert all(b"\r\nHost: dataway.example\r\n" in request for request in guance.requests)
    assert guance.connections == 1


def test_a_reply_of_several_parts_is_one() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"
    first = b"HTTP/1.1 100 Continue\r\n\r\n" + chunked
    until_closed = b"HTTP/1.0 503 Busy\r\nRetry-After: 7\r\n\r\nlater"
    with script(first, reply(200), keep=True) as server:
        assert post(settings(server.port), 2) == [(200, None, "abcde"), (200, None, "")]
        assert server.connections == 1
    with script(until_closed, keep=False) as server:
        assert post(settings(server.port)) == [(503, "7", "later")]


@pytest.mark.parametrize("behind", [reply(500), b"nonsense", b"HTTP/1.1 "])
def test_what_comes_behind_a_reply_is_not_taken_for_the_next(behind: bytes) -> None:
    with script(reply(200) + behind, reply(204)) as server:
        assert [status for status, _, _ in post(settings(server.port), 2)] == [200, 204]
        assert server.connections == 2


@pytest.mark.parametrize("header", [{"X-Points": "1\r\nX-Evil: 2"}, {"X-Po\nints": "1"}])
def test_no_header_can_smuggle_in_another(header: dict[str, str]) -> None:
    with script(reply(200)) as server, closing(ConnectionPool(settings(server.port))) as pool:
        with pytest.raises(connections.http.client.HTTPException, match="control character"):
            pool.post(f"http://127.0.0.1:{server.port}/v1/write/metric", b"", header)
        assert not server.requests


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://dataway.example", "dataway.example"),
        ("http://dataway.example:80", "dataway.example"),
        ("https://dataway.example:443", "dataway.example"),
        ("https://me:pass@dataway.example:9528", "dataway.example:9528"),
        ("http://[::1]:9528", "[::1]:9528"),
        ("http://\u6570\u636e.example", "xn--vxup8b.example"),
    ],
)
def test_the_host_header_is_the_host(url: str, host: str) -> None:
    assert connections._host_header(connections.urlsplit(url)) == host


def test_a_certificate_that_nobody_vouches_for_is_an_error_unless_it_is_allowed(tls: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls)
    listening = socket.create_server(("127.0.0.1", 0))
    found = Script([reply(200)], port=listening.getsockname()[1])
    with context.wrap_socket(listening, server_side=True) as secured:
        threading.Thread(target=found.serve, args=(secured,), daemon=True).start()
        url = f"https://127.0.0.1:{found.port}?token={TOKEN}"
        with pytest.raises(ssl.SSLError):
            post(DatawaySettings(url=url, timeout_s=2.0))
    listening = socket.create_server(("127.0.0.1", 0))
    found = Script([reply(200)], port=listening.getsockname()[1])
    with context.wrap_socket(listening, server_side=True) as secured:
        threading.Thread(target=found.serve, args=(secured,), daemon=True).start()
        url = f"https://127.0.0.1:{found.port}?token={TOKEN}"
        assert post(DatawaySettings(url=url, timeout_s=2.0, tls_insecure=True))[0][0] == 200


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that only its own key vouches for."""
    place = tmp_path_factory.mktemp("tls")
    certificate, key = place / "cert.pem", place / "key.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(certificate), *subject],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def dataway(chosen: DatawaySettings, place: Path, category: Category = Category.METRIC) -> tuple[Dataway, DeadLetters]:
    letters = DeadLetters(place)
    return Dataway("dataway", category, chosen, letters, Meters(), "1.2.3", "gw"), letters


@pytest.mark.parametrize("status", [400, 401, 403, 407, 413, 500])
def test_a_token_that_a_reply_repeats_is_masked_wherever_it_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """In the log, in what readiness says, in dead letters."""
    caplog.set_level(logging.DEBUG)
    answers = [reply(status, f"the token {TOKEN} is not for you".encode())] * 2
    with script(*answers, reply(200)) as server:
        chosen = settings(server.port)
        way, letters = dataway(chosen, tmp_path)
        told: list[str | None] = []
        stop = threading.Event()
        delivering = threading.Thread(target=way.deliver, args=([packed(way, "dk_1")], [], stop), daemon=True)
        delivering.start()
        while delivering.is_alive():
            told.append(way.health())
            delivering.join(0.001)
        way.close()
    shown = caplog.text + repr(told) + repr(way) + repr(chosen) + repr([vars(way._connections).keys()])
    assert TOKEN not in shown
    assert TOKEN[8:-8] not in shown
    found = list(letters)
    assert len(found) == (status in (400, 413))
    assert all(TOKEN not in each.reply and "tkn_0****bcdef" in each.reply for each in found)
    if not found:
        assert any(each and str(status) in each and "tkn_0****bcdef" in each for each in told)


def test_a_body_that_is_stuck_holds_up_no_other_category(tmp_path: Path) -> None:
    with StandIn(token=TOKEN) as guance:
        guance.fail("slow", 1)
        stop = threading.Event()
        stuck, _ = dataway(DatawaySettings(url=guance.url, timeout_s=60.0), tmp_path)
        waiting = threading.Thread(target=_until_stopped, args=(stuck, packed(stuck, "dk_1"), stop), daemon=True)
        waiting.start()
        assert guance.wait_for(lambda: len(guance.requests) == 1)
        free, _ = dataway(DatawaySettings(url=guance.url), tmp_path, Category.LOGGING)
        free.deliver([packed(free, "dk_2")], [], threading.Event())
        assert [each.category for each in guance.requests] == ["metric", "logging"]
        assert waiting.is_alive()
        stop.set()
        stuck.close()
        waiting.join(5)
        assert not waiting.is_alive()
        free.close()


def packed(way: Dataway, name: str) -> Package:
    """A package of one point."""
    return Package(name, way.pack(body_of(point())), 1)


def _until_stopped(way: Dataway, body: Package, stop: threading.Event) -> None:
    try:
        way.deliver([body], [], stop)
    except Stopped:
        pass
