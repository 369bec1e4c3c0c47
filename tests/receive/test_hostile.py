"""Bodies that mean harm, or look like it: every step of ``cases/23``, over real sockets."""

from __future__ import annotations

import gzip
import http.client
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gateway.model import Reason, Signal
from tests.data import case
from tests.receive.conftest import Answer, Receivers, Start, detail_kinds, rpc_status

MIB = 1 << 20
GZIP = {"Content-Encoding": "gzip"}
SMALL = ExportMetricsServiceRequest(resource_metrics=[{"schema_url": "x" * 1000}]).SerializeToString()
MAGIC_OF_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

Step = Callable[[Receivers], None]
STEPS: dict[str, Step] = {}


def step(name: str) -> Callable[[Step], Step]:
    def remember(function: Step) -> Step:
        STEPS[name] = function
        return function

    return remember


def bomb() -> bytes:
    """gzip -9 of 256 MiB of '0', made in pieces."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = b"0" * MIB
    return b"".join([*(deflate.compress(piece) for _ in range(256)), deflate.flush()])


BOMB = bomb()


class PeakMemory:
    """How far the resident memory grew inside the block."""

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._read("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.growth = self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10


def raw_exchange(port: int, pieces: Iterator[bytes], timeout_s: float = 20.0) -> tuple[bytes, int, bool]:
    """Send pieces until the peer hangs up or they end: (what it said, bytes sent, whether it hung up)."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        said = bytearray()
        sent = 0
        try:
            for piece in pieces:
                connection.sendall(piece)
                sent += len(piece)
                connection.setblocking(False)
                try:
                    said += connection.recv(65536)
                except BlockingIOError:
                    pass
                connection.settimeout(timeout_s)
                if said:
                    break
            while part := connection.recv(65536):
                said += part
        except TimeoutError:
            return bytes(said), sent, False
        except ConnectionError:
            pass
        return bytes(said), sent, True


def head(*lines: str, path: str = "/v1/metrics") -> bytes:
    told = ["Host: x", "Content-Type: application/x-protobuf", *lines]
    return "\r\n".join([f"POST {path} HTTP/1.1", *told, "", ""]).encode()


def assert_refused_over_grpc(receivers: Receivers, body: bytes) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        receivers.call(Signal.METRICS, body)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status(refused.value)
    assert status is None or "RetryInfo" not in detail_kinds(status)


@step("bomb")
def a_bomb_is_refused_in_time_and_within_twice_the_limit(receivers: Receivers) -> None:
    assert 200_000 < len(BOMB) < 300_000
    with PeakMemory() as memory:
        began = time.monotonic()
        answer = receivers.post("/v1/metrics", BOMB, GZIP)
        assert time.monotonic() - began < 2
    assert (answer.status, answer.error.code) == (413, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert memory.growth < 128 * MIB
    with PeakMemory() as memory:
        began = time.monotonic()
        assert_refused_over_grpc(receivers, BOMB)
        assert time.monotonic() - began < 2
    assert memory.growth < 128 * MIB
    assert receivers.refused(Reason.TOO_LARGE, "http") == 1
    assert receivers.refused(Reason.TOO_LARGE, "grpc") == 1


@step("bomb-x8")
def eight_bombs_share_one_budget(receivers: Receivers) -> None:
    def over_grpc() -> str:
        try:
            receivers.call(Signal.METRICS, BOMB)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    with PeakMemory() as memory, ThreadPoolExecutor(8) as pool:
        over_http = [pool.submit(receivers.post, "/v1/metrics", BOMB, GZIP) for _ in range(4)]
        calls = [pool.submit(over_grpc) for _ in range(4)]
        answers: list[Answer] = [future.result(30) for future in over_http]
        codes = {future.result(30) for future in calls}
    assert {answer.status for answer in answers} <= {413, 503}
    assert all(answer.headers["retry-after"] for answer in answers if answer.status == 503)
    assert codes <= {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
    assert memory.growth < (256 + 64) * MIB


@step("nested")
def gzip_in_gzip_is_no_request(receivers: Receivers) -> None:
    twice = gzip.compress(gzip.compress(SMALL))
    assert receivers.post("/v1/metrics", twice, GZIP).status == 400
    answer = receivers.post("/v1/metrics", twice, {"Content-Encoding": "gzip, gzip"})
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "gzip")


@step("chunked")
def a_chunked_body_is_cut_at_the_limit(receivers: Receivers) -> None:
    chunk = b"%x\r\n%s\r\n" % (MIB, bytes(MIB))

    def pieces() -> Iterator[bytes]:
        yield head("Transfer-Encoding: chunked")
        yield from (chunk for _ in range(100))

    said, sent, hung_up = raw_exchange(receivers.http_port, pieces())
    assert said.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in said
    assert hung_up
    assert sent < 80 * MIB


@step("isize-lie")
def a_wrong_length_in_the_trailer_is_refused(receivers: Receivers) -> None:
    body = gzip.compress(SMALL)[:-4] + struct.pack("<I", 10)
    assert receivers.post("/v1/metrics", body, GZIP).status == 400


@step("truncated")
def a_cut_body_is_refused(receivers: Receivers) -> None:
    body = gzip.compress(os.urandom(5000))[:2500]
    assert receivers.post("/v1/metrics", body, GZIP).status == 400
    with pytest.raises(grpc.RpcError) as refused:
        receivers.call(Signal.METRICS, body)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@step("multi-member")
def members_are_read_as_one_and_counted_as_one(receivers: Receivers) -> None:
    halves = gzip.compress(SMALL[:500]) + gzip.compress(SMALL[500:])
    assert receivers.post("/v1/metrics", halves, GZIP).status == 200
    assert receivers.backend.accepted[-1].message.SerializeToString() == SMALL
    # the last member tells of a small size: what is before it counts all the same
    large = gzip.compress(SMALL) + gzip.compress(bytes(65 * MIB), 1) + gzip.compress(b"")
    assert receivers.post("/v1/metrics", large, GZIP).status == 413


@step("trailing-garbage")
def bytes_behind_the_gzip_are_refused(receivers: Receivers) -> None:
    assert receivers.post("/v1/metrics", gzip.compress(SMALL) + b"abc", GZIP).status == 400


@step("wrong-length")
def a_body_that_never_ends_is_hung_up_on(receivers: Receivers) -> None:
    for path, port in (("/v1/metrics", receivers.http_port), ("/otel/v1/metrics", receivers.api_port)):
        began = time.monotonic()
        said, _, hung_up = raw_exchange(port, iter([head("Content-Length: 1000", path=path) + b"only this"]))
        assert said.startswith(b"HTTP/1.1 408 ")
        assert hung_up
        assert time.monotonic() - began < 6
    assert receivers.refused(Reason.READ_TIMEOUT, "http") == 2


@step("one-byte-chunks")
def one_byte_chunks_are_served_or_given_up(receivers: Receivers) -> None:
    body = ExportMetricsServiceRequest(resource_metrics=[{"schema_url": "x" * MIB}]).SerializeToString()

    def pieces() -> Iterator[bytes]:
        yield head("Transfer-Encoding: chunked", "Connection: close")
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        yield from (chunks[at : at + 65536] for at in range(0, len(chunks), 65536))

    began = time.process_time()
    said, _, _ = raw_exchange(receivers.http_port, pieces())
    assert said[9:12] in (b"200", b"408")
    assert time.process_time() - began < 10


@step("empty-gzip-header")
def nothing_with_a_gzip_header_is_an_empty_request(receivers: Receivers) -> None:
    for media in ("application/x-protobuf", "application/json"):
        assert receivers.post("/v1/metrics", b"", GZIP | {"Content-Type": media}).status == 200


@step("grpc-empty-compressed")
def an_empty_compressed_message_gets_a_clean_status_and_keeps_the_connection(receivers: Receivers) -> None:
    with socket.create_connection(("127.0.0.1", receivers.grpc_port), timeout=10) as connection:
        connection.sendall(MAGIC_OF_HTTP2 + _frame(4, 0, 0, b""))
        frames = _frames(connection)
        for stream, flag, message in ((1, 1, b""), (3, 0, b""), (5, 1, gzip.compress(SMALL))):
            connection.sendall(_grpc_request(stream, flag, message))
            ends = next(
                flags for kind, flags, of, _ in frames if of == stream and kind in (1, 3) and (flags & 1 or kind == 3)
            )
            assert ends & 1
    assert receivers.backend.accepted[-1].message.SerializeToString() == SMALL


@step("identity")
def identity_is_a_coding(receivers: Receivers) -> None:
    assert receivers.post("/v1/metrics", SMALL, {"Content-Encoding": "identity"}).status == 200


@step("unknown-coding")
def an_unknown_coding_is_told_which_is_known(receivers: Receivers) -> None:
    for coding in ("br", "zstd", "deflate", "x" * 1000):
        answer = receivers.post("/v1/metrics", SMALL, {"Content-Encoding": coding})
        assert (answer.status, answer.headers["accept-encoding"]) == (415, "gzip")
        assert len(answer.body) < 500
    with pytest.raises(grpc.RpcError) as refused:
        receivers.call(Signal.METRICS, SMALL, compression=grpc.Compression.Deflate)
    assert refused.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT)


@step("accept-gzip")
def a_short_answer_is_not_compressed(receivers: Receivers) -> None:
    for media, body in (("application/x-protobuf", SMALL), ("application/json", b"{}"), ("application/json", b"{")):
        answer = receivers.post("/v1/metrics", body, {"Content-Type": media, "Accept-Encoding": "gzip"})
        assert "content-encoding" not in answer.headers


@step("big-but-legal")
def thirty_mebibytes_are_taken(receivers: Receivers) -> None:
    body = ExportMetricsServiceRequest(resource_metrics=[{"schema_url": "x" * (30 * MIB)}]).SerializeToString()
    assert receivers.call(Signal.METRICS, body) == b""
    assert receivers.post("/v1/metrics", body).status == 200
    assert receivers.post("/v1/metrics", gzip.compress(body, 1), GZIP).status == 200
    assert len(receivers.backend.accepted) == 3


@pytest.mark.parametrize("name", STEPS)
def test_a_hostile_body(start: Start, name: str) -> None:
    receivers = start(read_timeout_s=1.0) if name == "wrong-length" else start()
    STEPS[name](receivers)
    receivers.backend.accepted.clear()
    assert receivers.post("/v1/metrics", SMALL).status == 200
    assert receivers.call(Signal.METRICS, SMALL) == b""
    assert len(receivers.backend.accepted) == 2


def test_every_step_of_the_case_is_taken() -> None:
    assert [described["id"] for described in case("23-")["steps"]] == list(STEPS)


def test_a_bomb_that_grpc_compressed_is_counted_while_it_is_inflated(start: Start) -> None:
    receivers = start(max_grpc_request_bytes=MIB)
    with pytest.raises(grpc.RpcError) as refused:
        receivers.call(Signal.METRICS, bytes(2 * MIB), compression=grpc.Compression.Gzip)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert receivers.refused(Reason.TOO_LARGE, "grpc") == 1


@pytest.mark.parametrize("size", [65 * MIB, 1 << 40])
def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(start: Start, size: int) -> None:
    said, _, hung_up = raw_exchange(start().http_port, iter([head(f"Content-Length: {size}")]))
    assert said.startswith(b"HTTP/1.1 413 ")
    assert hung_up


def test_a_sender_who_is_still_sending_can_read_why_it_was_refused(start: Start) -> None:
    receivers = start(max_request_bytes=MIB)
    connection = http.client.HTTPConnection("127.0.0.1", receivers.http_port, timeout=10)
    connection.request("POST", "/v1/metrics", bytes(20 * MIB), {"Content-Type": "application/x-protobuf"})
    assert connection.getresponse().status == 413
    connection.close()


def test_a_sender_who_asks_first_is_spared_the_body(start: Start) -> None:
    receivers = start(max_request_bytes=MIB)
    asks = (f"Content-Length: {2 * MIB}", "Expect: 100-continue")
    said, _, _ = raw_exchange(receivers.http_port, iter([head(*asks)]))
    assert said.startswith(b"HTTP/1.1 413 ")


def test_a_head_that_never_ends_is_hung_up_on(start: Start) -> None:
    port = start(read_timeout_s=0.5).http_port
    for beginning in (b"", b"POST /v1/metrics HTTP/1.1\r\nHost: x\r\nX-A: "):
        _, _, hung_up = raw_exchange(port, iter([beginning]), timeout_s=5)
        assert hung_up


def test_a_head_without_measure_is_refused(start: Start) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"POST /v1/metrics HTTP/1.1\r\nHost: x\r\nX-A: "
        while True:
            yield b"a" * 65536

    said, sent, hung_up = raw_exchange(start().http_port, pieces())
    assert said.startswith(b"HTTP/1.1 400 ") or hung_up
    assert sent < 8 * MIB


def test_a_slow_but_steady_body_is_served(start: Start) -> None:
    receivers = start(read_timeout_s=5.0)
    gate = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield head(f"Content-Length: {len(SMALL)}", "Connection: close") + SMALL[:10]
        gate.wait(0.3)
        yield SMALL[10:]

    said, _, _ = raw_exchange(receivers.http_port, pieces())
    assert said.startswith(b"HTTP/1.1 200 ")


def test_calls_whose_message_never_comes_are_given_up(start: Start) -> None:
    receivers = start(read_timeout_s=0.5, max_inflight_requests=4)
    with socket.create_connection(("127.0.0.1", receivers.grpc_port), timeout=10) as connection:
        connection.sendall(MAGIC_OF_HTTP2 + _frame(4, 0, 0, b""))
        frames = _frames(connection)
        for stream in (1, 3, 5, 7):
            connection.sendall(_frame(1, 4, stream, _grpc_head()))
        given_up = set()
        while len(given_up) < 4:
            kind, flags, stream, _ = next(frames)
            if stream and (kind == 3 or flags & 1):
                given_up.add(stream)
    assert receivers.call(Signal.METRICS, SMALL) == b""


def test_bytes_in_flight_have_one_budget_over_both_transports(start: Start) -> None:
    receivers = start(max_inflight_bytes=2 * MIB)
    with socket.create_connection(("127.0.0.1", receivers.http_port), timeout=10) as slow:
        slow.sendall(head(f"Content-Length: {2 * MIB}") + bytes(MIB))
        _until(lambda: receivers.budget.bytes_in_flight >= MIB)
        answer = receivers.post("/v1/metrics", bytes(3 * MIB // 2))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        with pytest.raises(grpc.RpcError) as refused:
            receivers.call(Signal.METRICS, bytes(3 * MIB // 2))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert receivers.post("/v1/metrics", SMALL).status == 200
    _until(lambda: receivers.budget.bytes_in_flight == 0)


def _until(true: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _grpc_head() -> bytes:
    """The header block of a call: literals without an index, without Huffman (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
        "grpc-encoding": "gzip",
    }
    return b"".join(
        b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields.items()
    )


def _grpc_request(stream: int, compressed: int, message: bytes) -> bytes:
    framed = struct.pack(">BI", compressed, len(message)) + message
    return _frame(1, 4, stream, _grpc_head()) + _frame(0, 1, stream, framed)


def _frames(connection: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
    """What the server says: (kind, flags, stream, payload)."""
    stream = connection.makefile("rb")
    while start := stream.read(9):
        payload = stream.read(int.from_bytes(start[:3], "big"))
        yield start[3], start[4], int.from_bytes(start[5:9], "big"), payload
