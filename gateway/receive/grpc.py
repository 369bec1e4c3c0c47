"""OTLP over gRPC: raw bytes in, raw bytes out, no generated service in between."""

from __future__ import annotations

import hmac
import logging
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import grpc

from gateway.config import Address, ReceiveSettings
from gateway.metrics import Meters
from gateway.model import ConfigError, Reason, Refusal, Sender, Signal, Wire
from gateway.receive import answer
from gateway.receive.intake import Accept
from gateway.receive.limits import Budget

log = logging.getLogger("locum.receive")

METHODS = {
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": Signal.METRICS,
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": Signal.TRACES,
    "/opentelemetry.proto.collector.logs.v1.LogsService/Export": Signal.LOGS,
}

COMMIT_TIMEOUT_S = 60.0
_WAITING_REQUESTS = 64


class GrpcServer:
    """Serves the three Export methods; every other method is UNIMPLEMENTED."""

    def __init__(self, settings: ReceiveSettings, accept: Accept, budget: Budget, meters: Meters) -> None:
        self._settings = settings
        self._accept = accept
        self._budget = budget
        self._meters = meters
        self._server: Any = None
        self._requests = {signal: meters.requests.labels(signal.name.lower(), "grpc") for signal in Signal}
        self._answer_s = meters.answer_s.labels("grpc")

    def start(self) -> list[Address]:
        """Listen; the addresses with their real ports. Raises ``ConfigError`` for one that cannot be had."""
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(self._export(signal)) for method, signal in METHODS.items()
        }
        self._server = grpc.server(
            ThreadPoolExecutor(_WAITING_REQUESTS, thread_name_prefix="grpc"),
            handlers=[_Methods(handlers)],
            options=list(self._options()),
        )
        bound = [address for wanted in self._settings.grpc if (address := self._bind(wanted)) is not None]
        self._server.start()
        return bound

    def stop(self, deadline_s: float) -> None:
        """Take no new requests; end those that run, within the deadline."""
        if self._server is not None:
            self._server.stop(deadline_s).wait()

    def _options(self) -> Iterable[tuple[str, int]]:
        yield "grpc.so_reuseport", 0  # else two servers share a port without a word
        yield "grpc.max_receive_message_length", self._settings.max_grpc_request_bytes
        yield "grpc.http2.min_recv_ping_interval_without_data_ms", 5_000
        yield "grpc.keepalive_permit_without_calls", 1
        yield "grpc.http2.max_ping_strikes", 0

    def _bind(self, address: Address) -> Address | None:
        target = f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"
        try:
            if self._settings.tls_cert and self._settings.tls_key:
                pair = (self._settings.tls_key.read_bytes(), self._settings.tls_cert.read_bytes())
                port = self._server.add_secure_port(target, grpc.ssl_server_credentials([pair]))
            else:
                port = self._server.add_insecure_port(target)
        except (RuntimeError, OSError) as error:
            if address.host == "::1" and not _has_ipv6_loopback():
                log.info("event=no_ipv6 address=%s action=only IPv4 is served", target)
                return None
            raise ConfigError(
                f"receive.grpc: {target} cannot be listened on ({_cause(error)}); "
                "is another gateway or DataKit running? choose another port or stop it"
            ) from None
        return Address(address.host, port)

    def _export(self, signal: Signal) -> Callable[[bytes, Any], bytes]:
        def export(body: bytes, context: Any) -> bytes:
            began = time.perf_counter()
            try:
                self._authenticate(context)
                with self._budget.admit() as admission:
                    admission.take(len(body))
                    sender = Sender(peer_address(context.peer()), "grpc")
                    ticket = self._accept(signal, Wire.PROTOBUF, body, sender)
                    ticket.done.result(COMMIT_TIMEOUT_S)
            except Refusal as refusal:
                self._refuse(context, refusal)
            except TimeoutError:
                self._refuse(context, Refusal(Reason.OVERLOADED, "the disk did not take it in time", 1.0))
            self._requests[signal].inc()
            self._answer_s.observe(time.perf_counter() - began)
            return answer.success(ticket, signal, Wire.PROTOBUF)

        return export

    def _authenticate(self, context: Any) -> None:
        token = self._settings.token
        if token is None:
            return
        told = dict(context.invocation_metadata()).get("authorization", "")
        if not hmac.compare_digest(str(told).encode(), f"Bearer {token}".encode()):
            raise Refusal(Reason.UNAUTHENTICATED, "the metadata 'authorization: Bearer TOKEN' is missing or wrong")

    def _refuse(self, context: Any, refusal: Refusal) -> None:
        """End the call with a status; never returns (``abort`` raises)."""
        self._meters.refused.labels(refusal.reason, "grpc").inc()
        status = answer.status(refusal)
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(answer.grpc_code(refusal), status.message)


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


def _has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _cause(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
