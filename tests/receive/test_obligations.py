"""What OTLP asks of a receiver, on each of our doors: OTLP's port, the API's port, gRPC."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from gateway.model import REFUSALS, Reason, Refusal, Signal, Wire
from gateway.receive.intake import Ticket
from tests.receive.conftest import KINDS, Backend, Receivers, Start, detail_kinds, held, resolved, rpc_status

DOORS = ["http", "api"]
PROTOBUF, JSON = "application/x-protobuf", "application/json"


def door(receivers: Receivers, name: str, signal: Signal) -> tuple[int, str]:
    """Port and path of a door."""
    path = f"/v1/{signal.name.lower()}"
    return (receivers.http_port, path) if name == "http" else (receivers.api_port, f"/otel{path}")


def request_of(signal: Signal, wire: str = PROTOBUF) -> bytes:
    first = {Signal.METRICS: "resourceMetrics", Signal.TRACES: "resourceSpans", Signal.LOGS: "resourceLogs"}[signal]
    message = json_format.ParseDict({first: [{"schemaUrl": "x"}]}, KINDS[signal]())
    return message.SerializeToString() if wire == PROTOBUF else json_format.MessageToJson(message).encode()


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("where", DOORS)
@pytest.mark.parametrize("media", [PROTOBUF, JSON, "application/json; charset=utf-8", "Application/X-Protobuf"])
@pytest.mark.parametrize("coding", ["", "identity", "gzip"])
def test_full_success_has_no_partial_success_and_the_requests_encoding(
    receivers: Receivers, signal: Signal, where: str, media: str, coding: str
) -> None:
    wire = JSON if "json" in media else PROTOBUF
    body = request_of(signal, wire)
    headers = {"Content-Type": media}
    if coding:
        headers["Content-Encoding"] = coding
    port, path = door(receivers, where, signal)
    answer = receivers.post(path, gzip.compress(body) if coding == "gzip" else body, headers, port)
    assert (answer.status, answer.headers["content-type"]) == (200, wire)
    assert answer.body == (b"" if wire == PROTOBUF else b"{}")
    (accepted,) = receivers.backend.accepted
    assert (accepted.signal, accepted.message) == (signal, KINDS[signal].FromString(request_of(signal)))
    assert accepted.wire is Wire(wire)


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_grpc_answers_full_success_with_an_empty_message(
    receivers: Receivers, signal: Signal, compression: Any
) -> None:
    assert receivers.call(signal, request_of(signal), compression=compression) == b""
    (accepted,) = receivers.backend.accepted
    assert (accepted.signal, accepted.message) == (signal, KINDS[signal].FromString(request_of(signal)))
    assert (accepted.sender.address, accepted.sender.transport) == ("127.0.0.1", "grpc")


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("where", DOORS)
@pytest.mark.parametrize("media", [PROTOBUF, JSON])
@pytest.mark.parametrize("body", [b"", b"{}"])
def test_an_empty_request_succeeds(receivers: Receivers, signal: Signal, where: str, media: str, body: bytes) -> None:
    port, path = door(receivers, where, signal)
    if media == PROTOBUF:
        body = b""
    assert receivers.post(path, body, {"Content-Type": media}, port).status == 200


RESPONSES = {
    Signal.METRICS: (ExportMetricsServiceResponse, "rejected_data_points"),
    Signal.TRACES: (ExportTraceServiceResponse, "rejected_spans"),
    Signal.LOGS: (ExportLogsServiceResponse, "rejected_log_records"),
}


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize(("rejected", "message"), [(3, "3 no_value: a.b"), (0, "just so you know"), (1, "x" * 100_000)])
def test_what_was_left_out_is_told(start: Start, signal: Signal, rejected: int, message: str) -> None:
    receivers = start(Backend(ticket=lambda: Ticket(resolved(), rejected, message)))
    kind, count = RESPONSES[signal]
    port, path = door(receivers, "http", signal)
    answers = [
        kind.FromString(receivers.post(path, b"", port=port).body),
        json_format.Parse(receivers.post(path, b"{}", {"Content-Type": JSON}, port).body, kind()),
        kind.FromString(receivers.call(signal, b"")),
    ]
    for answer in answers:
        assert getattr(answer.partial_success, count) == rejected
        assert message.startswith(answer.partial_success.error_message)
        assert 0 < len(answer.partial_success.error_message) <= 4096


@pytest.mark.parametrize("reason", REFUSALS)
def test_each_refusal_is_told_alike_on_every_door(start: Start, reason: Reason) -> None:
    def refuse() -> Ticket:
        raise Refusal(reason, "because", 7.0 if REFUSALS[reason].retryable else None)

    receivers = start(Backend(ticket=refuse))
    rule = REFUSALS[reason]
    details = {"RetryInfo"} if rule.retryable else {"BadRequest"} if reason is Reason.BAD_DATA else set()
    for where in DOORS:
        port, path = door(receivers, where, Signal.METRICS)
        for media in (PROTOBUF, JSON):
            body = b"" if media == PROTOBUF else b"{}"
            answer = receivers.post(path, body, {"Content-Type": media, "Origin": "https://a.example"}, port)
            assert (answer.status, answer.headers["content-type"]) == (rule.http, media)
            assert answer.headers.get("retry-after") == ("7" if rule.retryable else None)
            assert answer.headers["access-control-allow-origin"] == "*"
            status = answer.error if media == PROTOBUF else json_format.Parse(answer.body, Status())
            assert (status.message, detail_kinds(status)) == ("because", details)
    with pytest.raises(grpc.RpcError) as refused:
        receivers.call(Signal.METRICS, b"")
    assert (refused.value.code().name, refused.value.details()) == (rule.grpc, "because")
    told = rpc_status(refused.value)
    assert told is not None
    assert (told.code, told.message, detail_kinds(told)) == (refused.value.code().value[0], "because", details)
    if rule.retryable:
        info = RetryInfo()
        told.details[0].Unpack(info)
        assert info.retry_delay.seconds == 7
    assert (receivers.refused(reason, "http"), receivers.refused(reason, "grpc")) == (4, 1)


def test_only_what_may_be_sent_again_is_called_retryable() -> None:
    for rule in REFUSALS.values():
        assert rule.retryable == (rule.http in (429, 502, 503, 504))
        assert rule.retryable == (rule.grpc == "UNAVAILABLE")


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("media", [PROTOBUF, JSON])
def test_bytes_that_are_no_request_are_a_bad_request_with_its_details(
    receivers: Receivers, signal: Signal, media: str
) -> None:
    port, path = door(receivers, "http", signal)
    answer = receivers.post(path, b"\xff\xff\xff\xff", {"Content-Type": media}, port)
    assert answer.status == 400
    status = answer.error if media == PROTOBUF else json_format.Parse(answer.body, Status())
    violation = BadRequest()
    status.details[0].Unpack(violation)
    assert violation.field_violations[0].description == status.message


@pytest.mark.parametrize("error", [Refusal(Reason.DISK_FULL, "full", 5.0), Refusal(Reason.STORAGE, "lost", 5.0)])
def test_a_commit_that_fails_is_no_success(start: Start, error: Refusal) -> None:
    receivers = start(Backend(ticket=lambda: Ticket(resolved(error))))
    assert receivers.post("/v1/metrics", b"").status == 503
    with pytest.raises(grpc.RpcError) as refused:
        receivers.call(Signal.METRICS, b"")
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("media", ["", "text/plain", "application/protobuf", "multipart/form-data; boundary=x"])
def test_another_media_type_is_415(receivers: Receivers, media: str) -> None:
    answer = receivers.post("/v1/metrics", b"", {"Content-Type": media})
    assert (answer.status, answer.headers["content-type"]) == (415, JSON)
    assert "application/x-protobuf" in json.loads(answer.body)["message"]


def test_no_success_before_the_commit(start: Start) -> None:
    go, waiting, ticket = held()
    receivers = start(Backend(ticket=ticket))
    with ThreadPoolExecutor(2) as pool:
        answers: list[Future[Any]] = [
            pool.submit(receivers.post, "/v1/metrics", b""),
            pool.submit(receivers.call, Signal.METRICS, b""),
        ]
        assert waiting.acquire(timeout=10)
        assert waiting.acquire(timeout=10)
        assert not any(answer.done() for answer in answers)
        go.set()
        assert answers[0].result(10).status == 200
        assert answers[1].result(10) == b""


def test_sixty_four_senders_at_once_share_one_commit(start: Start) -> None:
    go, waiting, ticket = held()
    receivers = start(Backend(ticket=ticket))
    with ThreadPoolExecutor(128) as pool:
        over_http = [pool.submit(receivers.post, "/v1/metrics", b"") for _ in range(64)]
        over_grpc = [pool.submit(receivers.call, Signal.METRICS, b"") for _ in range(64)]
        for _ in range(128):
            assert waiting.acquire(timeout=30)
        go.set()
        assert {future.result(30).status for future in over_http} == {200}
        assert {future.result(30) for future in over_grpc} == {b""}


def test_more_than_fits_is_told_to_come_again(start: Start) -> None:
    go, waiting, ticket = held()
    receivers = start(Backend(ticket=ticket), max_inflight_requests=4)
    with ThreadPoolExecutor(4) as pool:
        inside = [pool.submit(receivers.post, "/v1/metrics", b"") for _ in range(2)]
        calls = [pool.submit(receivers.call, Signal.METRICS, b"") for _ in range(2)]
        for _ in range(4):
            assert waiting.acquire(timeout=10)
        answer = receivers.post("/v1/metrics", b"")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        with pytest.raises(grpc.RpcError) as refused:
            receivers.call(Signal.METRICS, b"")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (told := rpc_status(refused.value)) is not None
        assert detail_kinds(told) == {"RetryInfo"}
        go.set()
        assert {future.result(10).status for future in inside} == {200}
        assert {future.result(10) for future in calls} == {b""}
    assert receivers.post("/v1/metrics", b"").status == 200


@pytest.mark.parametrize("path", ["/v1development/profiles", "/otel/v1/profiles"])
def test_profiles_are_not_implemented(receivers: Receivers, path: str) -> None:
    answer = receivers.post(path, b"", port=receivers.api_port)
    assert (answer.status, answer.error.code) == (404, grpc.StatusCode.UNIMPLEMENTED.value[0])
    with pytest.raises(grpc.RpcError) as refused:
        receivers.call("/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export", b"")
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "PATCH"])
def test_only_post_is_served(receivers: Receivers, method: str) -> None:
    answer = receivers.post("/v1/metrics", None, method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "POST, OPTIONS")


def test_another_path_is_not_found(receivers: Receivers) -> None:
    answer = receivers.post("/v1/metric", b"")
    assert answer.status == 404
    assert "/v1/metrics" in json.loads(answer.body)["message"]


@pytest.mark.parametrize("where", DOORS)
def test_a_browser_may_ask_and_then_send(receivers: Receivers, where: str) -> None:
    port, path = door(receivers, where, Signal.TRACES)
    asks = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,content-encoding,traceparent,x-token",
    }
    preflight = receivers.post(path, None, asks, port, "OPTIONS")
    assert (preflight.status, preflight.body) == (204, b"")
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert "traceparent" in preflight.headers["access-control-allow-headers"]
    for body, status in ((b"{}", 200), (b"{", 400)):
        answer = receivers.post(path, body, {"Content-Type": JSON, "Origin": "https://app.example"}, port)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, "*")


@pytest.mark.parametrize("where", DOORS)
def test_a_token_is_asked_for_on_every_door(start: Start, where: str) -> None:
    receivers = start(token="s3cret")
    port, path = door(receivers, where, Signal.METRICS)
    for headers, query, status in (
        ({}, "", 401),
        ({"Authorization": "Bearer wrong"}, "", 401),
        ({"Authorization": "Bearer s3cret"}, "", 200),
        ({}, "?token=s3cret", 200),
        ({}, "?token=wrong", 401),
    ):
        answer = receivers.post(path + query, b"", headers, port)
        assert answer.status == status
        assert b"s3cret" not in answer.body
    with pytest.raises(grpc.RpcError) as refused:
        receivers.call(Signal.METRICS, b"")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert receivers.call(Signal.METRICS, b"", metadata=[("authorization", "Bearer s3cret")]) == b""
    assert receivers.refused(Reason.UNAUTHENTICATED, "http") == 3


def test_a_client_that_pings_every_ten_seconds_and_more_is_not_sent_away(start: Start) -> None:
    receivers = start()
    eager = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_permit_without_calls", 1)]
    lost = threading.Event()
    with grpc.insecure_channel(f"127.0.0.1:{receivers.grpc_port}", options=eager) as channel:
        channel.subscribe(lambda state: lost.set() if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE else None)
        call = channel.unary_unary("/opentelemetry.proto.collector.metrics.v1.MetricsService/Export")
        assert call(b"") == b""
        assert call(b"") == b""
    assert not lost.is_set()


def test_the_connection_is_kept_for_the_next_request(receivers: Receivers) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", receivers.http_port, timeout=10)
    connection.connect()
    local = connection.sock.getsockname()
    for media, body, status in ((PROTOBUF, b"", 200), (JSON, b"{", 400), ("text/plain", b"abc", 415), (JSON, b"", 200)):
        connection.request("POST", "/v1/logs", body, {"Content-Type": media})
        response = connection.getresponse()
        response.read()
        assert response.status == status
    assert connection.sock is not None
    assert connection.sock.getsockname() == local
    connection.close()


@pytest.mark.parametrize("cut", [0, 1, 100, 10_000])
def test_a_sender_that_offers_http2_is_answered_in_http1_with_nothing_lost(receivers: Receivers, cut: int) -> None:
    body = request_of(Signal.METRICS)
    head = (
        "POST /v1/metrics HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", receivers.http_port), timeout=10) as connection:
        for count in (1, 2):
            sent = head + body
            at = cut if cut < len(sent) else len(head)
            connection.sendall(sent[:at])
            connection.sendall(sent[at:])
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, answer.read()) == (200, b"")
            assert len(receivers.backend.accepted) == count
    expected = KINDS[Signal.METRICS].FromString(body)
    assert [accepted.message for accepted in receivers.backend.accepted] == [expected, expected]
