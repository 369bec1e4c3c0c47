"""OTLP over HTTP: one small ASGI application in front of whatever else a port serves.

The way of a request: token, method, media type, coding, then the body (counted as it comes, inflated as it is
counted), then ``accept``, then the wait for the disk. Each step may refuse, and every answer, a refusal too, has the
request's encoding and the CORS headers.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import uvicorn
import uvloop

from gateway.config import Address, ReceiveSettings
from gateway.metrics import Meters
from gateway.model import REFUSALS, ConfigError, Reason, Refusal, Sender, Signal, Wire
from gateway.receive import answer
from gateway.receive.inflate import inflate
from gateway.receive.intake import Accept
from gateway.receive.limits import Admission, Budget

log = logging.getLogger("locum.receive")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

OTLP_PATHS = {"/v1/metrics": Signal.METRICS, "/v1/traces": Signal.TRACES, "/v1/logs": Signal.LOGS}
PROFILES_PATHS = ("/v1development/profiles", "/otel/v1/profiles")

_WIRES = {b"application/x-protobuf": Wire.PROTOBUF, b"application/json": Wire.JSON}
_FORWARDED = (b"x-forwarded-for", b"x-real-ip", b"proxy-client-ip")
_IN_LOOP_BYTES = 1 << 20
"""A request of metrics up to this size is understood in the event loop: a thread would cost more than it gains."""
COMMIT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is known of a request before its body."""

    signal: Signal
    wire: Wire
    gzip: bool
    sender: Sender


class OtlpApp:
    """Serves the OTLP paths and hands everything else to ``otherwise``."""

    def __init__(
        self, settings: ReceiveSettings, accept: Accept, budget: Budget, meters: Meters, otherwise: App | None = None
    ) -> None:
        self._settings = settings
        self._accept = accept
        self._budget = budget
        self._meters = meters
        self._otherwise = otherwise or _not_found
        self._paths = OTLP_PATHS | {
            settings.metric_path: Signal.METRICS,
            settings.trace_path: Signal.TRACES,
            settings.log_path: Signal.LOGS,
        }
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="understand")
        self._requests = {signal: meters.requests.labels(signal.name.lower(), "http") for signal in Signal}
        self._answer_s = meters.answer_s.labels("http")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._otherwise(scope, receive, send)
            return
        signal = self._paths.get(scope["path"])
        if signal is not None:
            await self._serve(signal, scope, receive, send)
        elif scope["path"] in PROFILES_PATHS:
            wire = _wire(dict(scope["headers"])) or Wire.PROTOBUF
            refusal = Refusal(Reason.UNSUPPORTED_ENCODING, "profiles are not implemented")
            await self._answer(send, 404, wire, answer.status_body(refusal, wire), dict(scope["headers"]))
        else:
            await self._otherwise(scope, receive, send)

    async def _serve(self, signal: Signal, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if scope["method"] == "OPTIONS":
            await self._preflight(send, headers)
            return
        wire = _wire(headers) or Wire.JSON
        if scope["method"] != "POST":
            body = answer.status_body(Refusal(Reason.BAD_DATA, f"{scope['method']}: only POST is served here"), wire)
            await self._answer(send, 405, wire, body, headers, [(b"allow", b"POST, OPTIONS")])
            return
        try:
            with self._budget.admit() as admission:
                request = self._head(signal, scope, headers)
                raw = await self._body(receive, headers, admission)
                began = time.perf_counter()
                body = await self._understand(request, raw, admission)
        except Refusal as refusal:
            await self._refuse(send, wire, refusal, headers)
            return
        self._requests[signal].inc()
        self._answer_s.observe(time.perf_counter() - began)
        await self._answer(send, 200, request.wire, body, headers)

    def _head(self, signal: Signal, scope: Scope, headers: Mapping[bytes, bytes]) -> Request:
        """Check everything that can be checked before the body."""
        self._authenticate(scope, headers)
        wire = _wire(headers)
        if wire is None:
            told = headers.get(b"content-type", b"").decode("latin-1")[:100]
            raise Refusal(
                Reason.UNSUPPORTED_MEDIA,
                f"Content-Type {told!r}: send application/x-protobuf or application/json",
            )
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding not in (b"gzip", b"identity", b""):
            told = coding.decode("latin-1")[:100]
            raise Refusal(Reason.UNSUPPORTED_ENCODING, f"Content-Encoding {told!r}: send gzip or none")
        return Request(signal, wire, coding == b"gzip", Sender(remote_address(scope, headers), "http"))

    def _authenticate(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        token = self._settings.token
        if token is not None and not token_matches(token, headers, scope["query_string"]):
            raise Refusal(Reason.UNAUTHENTICATED, "the header 'Authorization: Bearer TOKEN' is missing or wrong")

    async def _body(self, receive: Receive, headers: Mapping[bytes, bytes], admission: Admission) -> bytes:
        """The body as it was sent. Raises ``Refusal`` as soon as it is too large, too slow, or given up."""
        limit = self._settings.max_request_bytes
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limit:
            raise Refusal(Reason.TOO_LARGE, f"{int(announced)} bytes announced, {limit} are taken; send less a request")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.read_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(Reason.BAD_DATA, "the sender went away in the middle of the body")
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise Refusal(Reason.TOO_LARGE, f"more than {limit} bytes; send less a request")
                    admission.take(len(part))
                    parts.append(part)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise Refusal(
                Reason.READ_TIMEOUT, f"the body did not arrive within {self._settings.read_timeout_s:.0f} s"
            ) from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _understand(self, request: Request, raw: bytes, admission: Admission) -> bytes:
        """The body of the answer, once everything is on disk."""

        def understand() -> Any:
            body = raw
            if request.gzip:
                body = inflate(raw, self._settings.max_request_bytes, admission.take)
            return self._accept(request.signal, request.wire, body, request.sender)

        if request.signal is Signal.METRICS and request.wire is Wire.PROTOBUF and len(raw) <= _IN_LOOP_BYTES:
            ticket = understand()
        else:
            ticket = await asyncio.get_running_loop().run_in_executor(self._pool, understand)
        if not ticket.done.done():
            try:
                async with asyncio.timeout(COMMIT_TIMEOUT_S):
                    await asyncio.wrap_future(ticket.done)
            except TimeoutError:
                raise Refusal(Reason.OVERLOADED, "the disk did not take it in time", 1.0) from None
        ticket.done.result()
        return answer.success(ticket, request.signal, request.wire)

    async def _refuse(self, send: Send, wire: Wire, refusal: Refusal, headers: Mapping[bytes, bytes]) -> None:
        self._meters.refused.labels(refusal.reason, "http").inc()
        extra: Headers = []
        if REFUSALS[refusal.reason].retryable:
            extra.append((b"retry-after", str(max(1, round(refusal.retry_after_s or 1.0))).encode()))
        if refusal.reason is Reason.UNSUPPORTED_ENCODING:
            extra.append((b"accept-encoding", b"gzip"))
        if refusal.reason is Reason.UNAUTHENTICATED:
            extra.append((b"www-authenticate", b"Bearer"))
        if refusal.reason in (Reason.TOO_LARGE, Reason.READ_TIMEOUT, Reason.UNAUTHENTICATED, Reason.OVERLOADED):
            extra.append((b"connection", b"close"))  # the rest of the body may still be on its way
        status = REFUSALS[refusal.reason].http
        await self._answer(send, status, wire, answer.status_body(refusal, wire), headers, extra)

    async def _answer(
        self,
        send: Send,
        status: int,
        wire: Wire,
        body: bytes,
        headers: Mapping[bytes, bytes],
        extra: Headers | None = None,
    ) -> None:
        answered: Headers = [
            (b"content-type", wire.value.encode()),
            (b"content-length", str(len(body)).encode()),
            *(extra or ()),
            *self._cors(headers),
        ]
        await send({"type": "http.response.start", "status": status, "headers": answered})
        await send({"type": "http.response.body", "body": body})

    def _cors(self, headers: Mapping[bytes, bytes]) -> Headers:
        """For senders in a browser; others do not say where they come from."""
        origin = headers.get(b"origin")
        allowed = self._settings.cors_origins
        if origin is None:
            return []
        if "*" in allowed:
            return [(b"access-control-allow-origin", b"*")]
        if origin.decode("latin-1") in allowed:
            return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        return []

    async def _preflight(self, send: Send, headers: Mapping[bytes, bytes]) -> None:
        wanted = headers.get(b"access-control-request-headers", b"content-type, content-encoding, authorization")
        answered = [
            *self._cors(headers),
            (b"access-control-allow-methods", b"POST, OPTIONS"),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", b"7200"),
        ]
        if headers.get(b"access-control-request-private-network") == b"true":
            answered.append((b"access-control-allow-private-network", b"true"))
        await send({"type": "http.response.start", "status": 204, "headers": answered})
        await send({"type": "http.response.body", "body": b""})


def _wire(headers: Mapping[bytes, bytes]) -> Wire | None:
    media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return _WIRES.get(media)


def token_matches(token: str, headers: Mapping[bytes, bytes], query: bytes) -> bool:
    """Whether a request carries the token: ``Authorization: Bearer`` or, as Dataway has it, ``?token=``."""
    told = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
    if not told and b"token=" in query:
        told = parse_qs(query).get(b"token", [b""])[0]
    return hmac.compare_digest(told, token.encode())


def remote_address(scope: Scope, headers: Mapping[bytes, bytes]) -> str:
    """Who sent it, as DataKit finds it: the first forwarded entry that is ``host:port`` (a bare address is passed
    over: golden h_xff, h_xff_port), else the peer."""
    for name in _FORWARDED:
        told = headers.get(name)
        if told is None:
            continue
        for entry in told.decode("latin-1").split(","):
            host, colon, port = entry.strip().rpartition(":")
            bare = host.startswith("[") or ":" not in host
            if colon and host and bare and port.isdigit():
                return host.strip("[]")
    peer = scope.get("client")
    return str(peer[0]) if peer else ""


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    body = b'{"code":5,"message":"nothing is served here; OTLP is at /v1/metrics, /v1/traces and /v1/logs"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class HttpServers:
    """The HTTP ports: uvicorn servers on one event loop in one thread."""

    def __init__(self, settings: ReceiveSettings) -> None:
        self._settings = settings
        self._servers: list[uvicorn.Server] = []
        self._sockets: list[list[socket.socket]] = []
        self._thread: threading.Thread | None = None

    def listen(self, name: str, addresses: tuple[Address, ...], app: App) -> list[Address]:
        """Bind the addresses for ``app``; the addresses with their real ports. Raises ``ConfigError``."""
        sockets = [bound for address in addresses if (bound := _bind(name, address)) is not None]
        if sockets:
            self._servers.append(uvicorn.Server(self._config(app)))
            self._sockets.append(sockets)
        return [Address(*bound.getsockname()[:2]) for bound in sockets]

    def start(self) -> None:
        """Serve. Returns when every server takes requests."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="http", daemon=True)
        self._thread.start()
        ready.wait(30.0)

    def stop(self, deadline_s: float) -> None:
        """Take no new connections, end what runs, within the deadline."""
        for server in self._servers:
            server.should_exit = True
        if self._thread is not None:
            self._thread.join(deadline_s)
            for server in self._servers:
                server.force_exit = True
            self._thread.join(1.0)

    def _config(self, app: App) -> uvicorn.Config:
        tls = self._settings
        return uvicorn.Config(
            app,
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            backlog=2048,
            ssl_certfile=str(tls.tls_cert) if tls.tls_cert else None,
            ssl_keyfile=str(tls.tls_key) if tls.tls_key else None,
        )

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            tasks = [
                asyncio.create_task(server.serve(sockets))
                for server, sockets in zip(self._servers, self._sockets, strict=True)
            ]
            while not all(server.started for server in self._servers) and not any(task.done() for task in tasks):
                await asyncio.sleep(0.005)
            ready.set()
            await asyncio.gather(*tasks)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except Exception:
            log.exception("event=http_servers_ended action=restart the gateway")
        finally:
            ready.set()


def _bind(name: str, address: Address) -> socket.socket | None:
    """A listening socket, or None for ``::1`` where the host has no IPv6."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        bound.bind((address.host, address.port))
    except OSError as error:
        bound.close()
        if address.host == "::1" and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            log.info("event=no_ipv6 address=%s action=only IPv4 is served", address)
            return None
        raise ConfigError(
            f"receive.{name}: {address} cannot be listened on ({error.strerror}); "
            "is another gateway or DataKit running? choose another port or stop it"
        ) from None
    bound.setblocking(False)
    return bound
