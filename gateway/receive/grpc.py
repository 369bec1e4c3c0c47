"""OTLP over gRPC: raw bytes in, raw bytes out, no generated service in between.

The methods are declared as streams of requests, though OTLP sends one: gRPC then hands over a call before its body is
read, so that the token, the budget and the clock come first. And gRPC does not decompress: it would inflate a bomb up
to the limit for each call, outside of any budget, with zlib.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import grpc

from gateway.config import Address, ReceiveSettings
from gateway.metrics import Meters
from gateway.model import ConfigError, Reason, Refusal, Sender, Signal, Wire
from gateway.receive import answer
from gateway.receive.inflate import MAGIC, inflate
from gateway.receive.intake import Accept, Ticket
from gateway.receive.limits import COMMIT_TIMEOUT_S, Admission, Budget
from gateway.receive.listen import bind

log = logging.getLogger("locum.receive")

METHODS = {
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": Signal.METRICS,
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": Signal.TRACES,
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": Signal.LOGS,
}

_SPARE_THREADS = 8
"""Threads beyond those of admitted calls: they tell the others that there is no room."""
_IDENTITY_AND_GZIP = 0b101


class GrpcServer:
    """Serves the three Export methods; every other method is UNIMPLEMENTED."""

    def __init__(self, settings: ReceiveSettings, accept: Accept, budget: Budget, meters: Meters) -> None:
        self._settings = settings
        self._accept = accept
        self._budget = budget
        self._meters = meters
        self._server: Any = None
        self._pool = ThreadPoolExecutor(settings.max_inflight_requests + _SPARE_THREADS, thread_name_prefix="grpc")
        self._patience = _Patience(settings.read_timeout_s)
        self._requests = {signal: meters.requests.labels(signal.name.lower(), "grpc") for signal in Signal}
        self._answer_s = meters.answer_s.labels("grpc")

    def start(self) -> list[Address]:
        """Listen; the addresses with their real ports. Raises ``ConfigError`` for one that cannot be had."""
        handlers = {
            method: grpc.stream_unary_rpc_method_handler(self._export(signal)) for method, signal in METHODS.items()
        }
        self._server = grpc.server(self._pool, handlers=[_Methods(handlers)], options=list(self._options()))
        credentials = _credentials(self._settings)
        bound = [address for wanted in self._settings.grpc if (address := self._bind(wanted, credentials)) is not None]
        self._server.start()
        self._patience.start()
        return bound

    def stop(self, deadline_s: float) -> None:
        """Take no new requests; end those that run, within the deadline."""
        if self._server is not None:
            self._server.stop(deadline_s).wait()
        self._patience.stop()
        self._pool.shutdown(wait=False)

    def _options(self) -> Iterable[tuple[str, int]]:
        yield "grpc.so_reuseport", 0  # else two servers share a port without a word
        yield "grpc.max_receive_message_length", self._settings.max_grpc_request_bytes
        yield "grpc.per_message_decompression", 0
        yield "grpc.compression_enabled_algorithms_bitset", _IDENTITY_AND_GZIP
        yield "grpc.http2.max_frame_size", 1 << 20  # a body of 500 kB in one frame, not in 31
        # clients ping every 10 s, some without a call; a client that is gone is noticed within 80 s
        yield "grpc.http2.min_recv_ping_interval_without_data_ms", 5_000
        yield "grpc.http2.max_ping_strikes", 0
        yield "grpc.keepalive_permit_without_calls", 1
        yield "grpc.keepalive_time_ms", 60_000
        yield "grpc.keepalive_timeout_ms", 20_000

    def _bind(self, address: Address, credentials: Any) -> Address | None:
        if address.port:
            # gRPC tells of a port in use in ten lines; a socket of our own tells in one
            probe = bind("grpc", address)
            if probe is None:
                return None
            probe.close()
        try:
            if credentials is None:
                port = self._server.add_insecure_port(str(address))
            else:
                port = self._server.add_secure_port(str(address), credentials)
        except RuntimeError as error:
            raise ConfigError(f"receive.grpc: cannot listen on {address} ({_cause(error)})") from None
        return Address(address.host, port)

    def _export(self, signal: Signal) -> Callable[[Iterator[bytes], Any], bytes]:
        def export(messages: Iterator[bytes], context: Any) -> bytes:
            try:
                with self._budget.admit() as admission:
                    self._authenticate(context)
                    body = self._read(messages, context, admission)
                    began = time.perf_counter()
                    ticket = self._accept(signal, Wire.PROTOBUF, body, Sender(peer_address(context.peer()), "grpc"))
                    _wait(ticket)
            except Refusal as refusal:
                self._refuse(context, refusal)
            self._requests[signal].inc()
            self._answer_s.observe(time.perf_counter() - began)
            return answer.success(ticket, signal, Wire.PROTOBUF)

        return export

    def _authenticate(self, context: Any) -> None:
        token = self._settings.token
        if token is None:
            return
        told = str(dict(context.invocation_metadata()).get("authorization", ""))
        scheme, _, secret = told.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(secret.strip().encode(), token.encode()):
            raise Refusal(Reason.UNAUTHENTICATED, "the metadata 'authorization: Bearer TOKEN' is missing or wrong")

    def _read(self, messages: Iterator[bytes], context: Any, admission: Admission) -> bytes:
        """The one message of a call, inflated. Raises ``Refusal``."""
        with self._patience.over(context):
            body = next(messages, None)
        if body is None:
            raise Refusal(Reason.BAD_DATA, "the call carries no message")
        admission.take(len(body))
        if body.startswith(MAGIC):
            body = inflate(body, self._settings.max_grpc_request_bytes, admission.take)
        return body

    def _refuse(self, context: Any, refusal: Refusal) -> None:
        """End the call with a status; never returns (``abort`` raises)."""
        self._meters.refused.labels(refusal.reason, "grpc").inc()
        status = answer.status(refusal)
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(answer.grpc_code(refusal), status.message)


def _wait(ticket: Ticket) -> None:
    """Until the batch is on disk. Raises ``Refusal``."""
    try:
        ticket.done.result(COMMIT_TIMEOUT_S)
    except TimeoutError:
        raise Refusal(Reason.OVERLOADED, "the disk did not take it in time", 1.0) from None


class _Patience:
    """Cancels calls whose message does not come: a thread waits in each, and gRPC would wait for ever."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reading: dict[Any, float] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="grpc-patience", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def over(self, context: Any) -> _Reading:
        """A ``with`` block in which ``context`` is waited for."""
        return _Reading(self._reading, context)

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._timeout_s)):
            before = time.monotonic() - self._timeout_s
            for context, since in list(self._reading.items()):
                if since < before:
                    context.cancel()


class _Reading:
    def __init__(self, reading: dict[Any, float], context: Any) -> None:
        self._reading = reading
        self._context = context

    def __enter__(self) -> None:
        self._reading[self._context] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._reading.pop(self._context, None)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)


def peer_address(peer: str) -> str:
    """The address in gRPC's name for a peer: ``ipv4:127.0.0.1:4711``, ``ipv6:%5B::1%5D:4711``."""
    family, _, rest = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return ""
    return unquote(rest).rpartition(":")[0].strip("[]")


def _credentials(settings: ReceiveSettings) -> Any:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        pair = (settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())
    except OSError as error:
        raise ConfigError(f"receive.tls_cert, receive.tls_key: cannot be read ({error})") from None
    return grpc.ssl_server_credentials([pair])


def _cause(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
