"""Starting and stopping: addresses, TLS, and what happens to requests that are on their way."""

from __future__ import annotations

import http.client
import socket
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from gateway.config import Address
from gateway.model import ConfigError, Signal
from gateway.receive.grpc import peer_address
from gateway.receive.listen import bind
from tests.receive.conftest import METHOD_OF, Backend, Start, held


@pytest.fixture
def taken() -> Address:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield Address("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize("where", ["grpc", "http", "api"])
def test_a_port_in_use_is_told_in_one_line(start: Start, taken: Address, where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        start(**{where: (taken,)})
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"receive.{where}: cannot listen on {taken} (Address already in use)")
    assert "another port" in str(refused.value)


def test_two_gateways_never_share_a_grpc_port(start: Start) -> None:
    first = start()
    with pytest.raises(ConfigError):
        start(grpc=(Address("127.0.0.1", first.grpc_port),))
    with socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            sharing.bind(("127.0.0.1", first.grpc_port))


def test_an_address_of_another_host_is_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"receive\.http: cannot listen on 192\.0\.2\.1:4318 .*of this host"):
        bind("http", Address("192.0.2.1", 4318))


def test_a_name_that_is_none_is_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"receive\.http: cannot listen on no\.such\.invalid:4318"):
        bind("http", Address("no.such.invalid", 4318))


def test_ipv6_is_served_beside_ipv4_where_the_host_has_it(start: Start) -> None:
    probe = bind("http", Address("::1", 0))
    if probe is None:
        pytest.skip("this host has no IPv6")
    probe.close()
    receivers = start(http=(Address("::1", 0),), grpc=(Address("::1", 0),))
    connection = http.client.HTTPConnection("::1", receivers.http_port, timeout=10)
    connection.request("POST", "/v1/metrics", b"", {"Content-Type": "application/x-protobuf"})
    assert connection.getresponse().status == 200
    connection.close()
    with grpc.insecure_channel(f"[::1]:{receivers.grpc_port}") as channel:
        assert channel.unary_unary(METHOD_OF[Signal.METRICS])(b"", timeout=10) == b""
    assert [accepted.sender.address for accepted in receivers.backend.accepted] == ["::1", "::1"]


@pytest.mark.parametrize(
    ("error", "served"), [(socket.EAI_ADDRFAMILY, True), (97, True), (99, True), (98, False), (13, False)]
)
def test_a_host_without_ipv6_is_served_on_ipv4_alone(monkeypatch: pytest.MonkeyPatch, error: int, served: bool) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(error, "as a host without IPv6 says it")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    if served:
        assert bind("http", Address("::1", 4318)) is None
    with pytest.raises(ConfigError):
        bind("http", Address("127.0.0.1", 4318))


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[fe80::1%25eth0]:4711", "fe80::1%eth0"),
        ("unix:/tmp/socket", ""),
        ("", ""),
    ],
)
def test_grpcs_name_for_a_peer_holds_its_address(peer: str, address: str) -> None:
    assert peer_address(peer) == address


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_tls_covers_both_transports(start: Start, pair: tuple[Path, Path]) -> None:
    cert, key = pair
    receivers = start(tls_cert=cert, tls_key=key)
    context = ssl.create_default_context(cafile=str(cert))
    connection = http.client.HTTPSConnection("127.0.0.1", receivers.http_port, timeout=10, context=context)
    connection.request("POST", "/v1/metrics", b"", {"Content-Type": "application/x-protobuf"})
    assert connection.getresponse().status == 200
    connection.close()
    trust = grpc.ssl_channel_credentials(cert.read_bytes())
    with grpc.secure_channel(f"localhost:{receivers.grpc_port}", trust) as channel:
        assert channel.unary_unary(METHOD_OF[Signal.METRICS])(b"", timeout=10) == b""


@pytest.mark.parametrize("broken", ["missing", "garbage"])
def test_a_certificate_that_is_none_is_told_in_one_line(
    start: Start, pair: tuple[Path, Path], tmp_path: Path, broken: str
) -> None:
    cert = tmp_path / "cert.pem"
    if broken == "garbage":
        cert.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"^receive\.tls_cert, receive\.tls_key: [^\n]*$"):
        start(tls_cert=cert, tls_key=pair[1])


def test_a_stop_lets_requests_end_and_takes_no_new_ones(start: Start) -> None:
    go, waiting, ticket = held()
    receivers = start(Backend(ticket=ticket))
    with ThreadPoolExecutor(10) as pool:
        posted = [pool.submit(receivers.post, "/v1/metrics", b"") for _ in range(4)]
        called = [pool.submit(receivers.call, Signal.METRICS, b"") for _ in range(4)]
        for _ in range(8):
            assert waiting.acquire(timeout=10)
        stops = [pool.submit(receivers.http_servers.stop, 10.0), pool.submit(receivers.grpc_server.stop, 10.0)]
        _refused_from_now_on(receivers.http_port)
        go.set()
        assert {future.result(10).status for future in posted} == {200}
        assert {future.result(10) for future in called} == {b""}
        for stop in stops:
            stop.result(12)


def test_a_stop_does_not_wait_for_ever(start: Start) -> None:
    _, waiting, ticket = held()
    receivers = start(Backend(ticket=ticket))
    with ThreadPoolExecutor(2) as pool:
        posted = pool.submit(receivers.post, "/v1/metrics", b"")
        called = pool.submit(receivers.call, Signal.METRICS, b"")
        assert waiting.acquire(timeout=10)
        assert waiting.acquire(timeout=10)
        receivers.grpc_server.stop(0.2)
        receivers.http_servers.stop(1.0)
        answer = posted.result(10)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        with pytest.raises(grpc.RpcError) as refused:
            called.result(10)
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def test_addresses_are_let_go_when_nothing_was_started(start: Start) -> None:
    from gateway.config import ReceiveSettings
    from gateway.receive.http import HttpServers, _not_found

    servers = HttpServers(ReceiveSettings())
    (address,) = servers.listen("http", (Address("127.0.0.1", 0),), _not_found)
    servers.stop(1.0)
    again = bind("http", address)
    assert again is not None
    again.close()


def _refused_from_now_on(port: int) -> None:
    """Wait until nobody listens on the port."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            return
        except ConnectionError:
            continue  # it was waiting to be accepted when the port was closed
