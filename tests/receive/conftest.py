"""Receivers on free ports, in front of an ``accept`` that reads requests as the gateway does and remembers them."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.config import Address, ReceiveSettings
from gateway.metrics import Meters
from gateway.model import Losses, Reason, Refusal, Sender, Signal, Wire
from gateway.otlp import json as otlp_json
from gateway.receive.grpc import METHODS, GrpcServer
from gateway.receive.http import HttpServers, OtlpApp
from gateway.receive.intake import Ticket
from gateway.receive.limits import Budget

LOOPBACK = (Address("127.0.0.1", 0),)
METHOD_OF = {signal: method for method, signal in METHODS.items()}
KINDS = {
    Signal.METRICS: ExportMetricsServiceRequest,
    Signal.TRACES: ExportTraceServiceRequest,
    Signal.LOGS: ExportLogsServiceRequest,
}


@dataclass(slots=True)
class Accepted:
    signal: Signal
    wire: Wire
    message: Message
    sender: Sender


@dataclass(slots=True)
class Backend:
    """Stands where the gateway's intake stands. ``ticket`` makes what a request that can be read gets."""

    accepted: list[Accepted] = field(default_factory=list)
    ticket: Callable[[], Ticket] = field(default_factory=lambda: lambda: Ticket(resolved()))

    def accept(self, signal: Signal, wire: Wire, body: bytes, sender: Sender) -> Ticket:
        if wire is Wire.JSON:
            message = otlp_json.parse(signal, body, True, Losses())
        else:
            try:
                message = KINDS[signal].FromString(body)
            except DecodeError as error:
                raise Refusal(Reason.BAD_DATA, f"not well-formed ({error})") from None
        self.accepted.append(Accepted(signal, wire, message, sender))
        return self.ticket()


def resolved(error: Exception | None = None) -> Future[int]:
    future: Future[int] = Future()
    if error is None:
        future.set_result(1)
    else:
        future.set_exception(error)
    return future


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> Status:
        return Status.FromString(self.body)


class Receivers:
    """Running receivers: gRPC, the OTLP port and the API's port, sharing one budget."""

    def __init__(self, settings: ReceiveSettings, backend: Backend, otherwise: Any = None) -> None:
        self.backend = backend
        self.meters = Meters()
        self.budget = Budget(settings.max_inflight_bytes, settings.max_inflight_requests)
        shared = (settings, backend.accept, self.budget, self.meters)
        self.http_servers = HttpServers(settings, (("X-Datakit", "1/test"),))
        self.grpc_server = GrpcServer(*shared)
        (http_address,) = self.http_servers.listen("http", settings.http, OtlpApp(*shared))
        (api_address,) = self.http_servers.listen("api", settings.api, OtlpApp(*shared, otherwise))
        (grpc_address,) = self.grpc_server.start()
        self.http_servers.start()
        self.http_port, self.api_port, self.grpc_port = http_address.port, api_address.port, grpc_address.port
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{self.grpc_port}",
            options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
        )

    def stop(self, deadline_s: float = 2.0) -> None:
        self.channel.close()
        self.grpc_server.stop(deadline_s)
        self.http_servers.stop(deadline_s)

    def post(
        self,
        path: str,
        body: Any,
        headers: dict[str, str] | None = None,
        port: int | None = None,
        method: str = "POST",
        **options: Any,
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http_port, timeout=30)
        try:
            connection.request(
                method, path, body, {"Content-Type": "application/x-protobuf"} | (headers or {}), **options
            )
            response = connection.getresponse()
            told = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, told, response.read())
        finally:
            connection.close()

    def call(self, signal: Signal | str, body: bytes, **options: Any) -> bytes:
        """Raises ``grpc.RpcError``."""
        method = METHOD_OF[signal] if isinstance(signal, Signal) else signal
        return bytes(self.channel.unary_unary(method)(body, timeout=30, **options))

    def refused(self, reason: Reason, transport: str) -> float:
        value = self.meters.registry.get_sample_value(
            "locum_refused_requests_total", {"reason": reason, "transport": transport}
        )
        return value or 0.0


def rpc_status(error: grpc.RpcError) -> Status | None:
    """The google.rpc.Status that came with an error."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return Status.FromString(value)
    return None


def detail_kinds(status: Status) -> set[str]:
    """The names of a status' details: RetryInfo, BadRequest."""
    return {detail.type_url.rpartition(".")[2] for detail in status.details}


Start = Callable[..., Receivers]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts receivers with settings that differ from the defaults as named; stops them in the end."""
    running: list[Receivers] = []

    def starter(backend: Backend | None = None, otherwise: Any = None, **settings: Any) -> Receivers:
        base = ReceiveSettings(grpc=LOOPBACK, http=LOOPBACK, api=LOOPBACK)
        running.append(Receivers(replace(base, **settings), backend or Backend(), otherwise))
        return running[-1]

    yield starter
    for receivers in running:
        receivers.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Receivers]:
    """Receivers with the default limits, for tests that leave them as they were."""
    receivers = Receivers(ReceiveSettings(grpc=LOOPBACK, http=LOOPBACK, api=LOOPBACK), Backend())
    yield receivers
    receivers.stop()


@pytest.fixture
def receivers(shared: Receivers) -> Receivers:
    """The shared receivers, with nothing accepted yet."""
    shared.backend.accepted.clear()
    return shared


def held() -> tuple[threading.Event, threading.Semaphore, Callable[[], Ticket]]:
    """Tickets that stay open until the event: (event, one permit a waiting request, what makes them)."""
    go, waiting = threading.Event(), threading.Semaphore(0)

    def ticket() -> Ticket:
        future: Future[int] = Future()
        waiting.release()

        def finish() -> None:
            go.wait(30)
            future.set_result(1)

        threading.Thread(target=finish, daemon=True).start()
        return Ticket(future)

    return go, waiting, ticket
