"""OTLP over HTTP: one small ASGI application in front of whatever else a port serves.

The way of a request: token, media type, coding, then the body (counted as it comes, inflated as it is counted), then
``accept``, then the wait for the disk. Each step may refuse, and every answer, a refusal too, has the request's
encoding and the CORS headers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import uvicorn
import uvloop

from gateway.config import Address, ReceiveSettings
from gateway.metrics import Meters
from gateway.model import REFUSALS, ConfigError, Reason, Refusal, Signal, StorageError, Wire
from gateway.receive import answer
from gateway.receive.connection import Connection
from gateway.receive.inflate import MAGIC, inflate, inflated_size
from gateway.receive.intake import Accept
from gateway.receive.limits import COMMIT_TIMEOUT_S, Admission, Budget
from gateway.receive.listen import bind
from gateway.receive.request import (
    Headers,
    Request,
    announced_bytes,
    cors_headers,
    first_headers,
    preflight_headers,
    read_head,
    wire_of,
)

log = logging.getLogger("locum.receive")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_T = TypeVar("_T")

OTLP_PATHS = {"/v1/metrics": Signal.METRICS, "/v1/traces": Signal.TRACES, "/v1/logs": Signal.LOGS}
PROFILES_PATHS = ("/v1development/profiles", "/v1/profiles", "/otel/v1/profiles")

_IN_LOOP_BYTES = 1 << 20
"""Metrics up to this size are understood in the event loop: a thread would cost more than it gains."""
_SLOWEST_BYTES_A_S = 64 << 10
"""A body has ``read_timeout_s`` and what it needs at this rate."""
_LINGER_S = 2.0
"""How long a refused sender may go on sending before it is hung up on: it reads the answer only when it has sent."""


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
        if signal is None and scope["path"] not in PROFILES_PATHS:
            await self._otherwise(scope, receive, send)
            return
        headers = first_headers(scope["headers"])
        if scope["method"] == "OPTIONS":
            await _preflight(send, preflight_headers(self._settings.cors_origins, headers))
        elif scope["method"] != "POST":
            await self._say_no(send, 405, f"{scope['method']}: only POST is served here", headers)
        elif signal is None:
            await self._say_no(send, 404, "profiles are not implemented", headers)
        else:
            await self._serve(signal, scope, headers, _Body(receive, announced_bytes(headers)), send)

    async def _serve(
        self, signal: Signal, scope: Scope, headers: Mapping[bytes, bytes], body: _Body, send: Send
    ) -> None:
        try:
            with self._budget.admit() as admission:
                request = read_head(signal, scope, headers, self._settings.token)
                raw = await body.read(self._settings, admission)
                began = time.perf_counter()
                answered = await self._understand(request, raw, admission)
        except Refusal as refusal:
            await self._refuse(send, refusal, headers, body)
            return
        except asyncio.CancelledError:
            await self._refuse(send, Refusal(Reason.STOPPING, "the gateway is stopping", 1.0), headers, body)
            return
        self._requests[signal].inc()
        self._answer_s.observe(time.perf_counter() - began)
        await self._answer(send, 200, request.wire, answered, headers)

    async def _understand(self, request: Request, raw: bytes, admission: Admission) -> bytes:
        """The body of the answer, once everything is on disk."""
        body = await self._inflated(request.coding, raw, admission) if request.coding else raw
        if request.signal is Signal.METRICS and request.wire is Wire.PROTOBUF and len(body) <= _IN_LOOP_BYTES:
            ticket = self._accept(request.signal, request.wire, body, request.sender)
        else:
            ticket = await self._in_thread(lambda: self._accept(request.signal, request.wire, body, request.sender))
        if not ticket.done.done():
            await _resolved(ticket.done)
        ticket.done.result()
        return answer.success(ticket, request.signal, request.wire)

    async def _inflated(self, coding: bytes, raw: bytes, admission: Admission) -> bytes:
        if coding != b"gzip" and not raw.startswith(MAGIC):
            return raw  # DataKit knows only the lower-case name, and reads the body as it is: golden h_gzip_upper
        limit = self._settings.max_request_bytes
        if inflated_size(raw) <= _IN_LOOP_BYTES < limit:
            try:
                return inflate(raw, _IN_LOOP_BYTES, admission.take)
            except Refusal as refusal:
                # more than it says: several members, or a lie
                if refusal.reason is not Reason.TOO_LARGE:
                    raise
        return await self._in_thread(lambda: inflate(raw, limit, admission.take))

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _refuse(self, send: Send, refusal: Refusal, headers: Mapping[bytes, bytes], body: _Body) -> None:
        self._meters.refused.labels(refusal.reason, "http").inc()
        rule = REFUSALS[refusal.reason]
        if body.is_short and refusal.reason is not Reason.READ_TIMEOUT and b"expect" not in headers:
            await body.discard()  # so that the connection can be kept
        extra: Headers = []
        if rule.retryable:
            extra.append((b"retry-after", str(max(1, round(refusal.retry_after_s or 1.0))).encode()))
        if refusal.reason is Reason.UNSUPPORTED_ENCODING:
            extra.append((b"accept-encoding", b"gzip"))
        if refusal.reason is Reason.UNAUTHENTICATED:
            extra.append((b"www-authenticate", b"Bearer"))
        if not body.complete:
            extra.append((b"connection", b"close"))
        if refusal.reason is Reason.READ_TIMEOUT:
            body.complete = True  # nothing more is waited for
        wire = wire_of(headers) or Wire.JSON
        await self._answer(send, rule.http, wire, answer.status_body(refusal, wire), headers, extra, body)

    async def _say_no(self, send: Send, status: int, message: str, headers: Mapping[bytes, bytes]) -> None:
        """For what is no OTLP request at all."""
        wire = wire_of(headers) or Wire.JSON
        body = answer.status_body(Refusal(Reason.UNSUPPORTED_ENCODING, message), wire)
        await self._answer(send, status, wire, body, headers, [(b"allow", b"POST, OPTIONS")] if status == 405 else [])

    async def _answer(
        self,
        send: Send,
        status: int,
        wire: Wire,
        content: bytes,
        headers: Mapping[bytes, bytes],
        extra: Headers | None = None,
        body: _Body | None = None,
    ) -> None:
        answered: Headers = [
            (b"content-type", wire.value.encode()),
            (b"content-length", str(len(content)).encode()),
            *(extra or ()),
            *cors_headers(self._settings.cors_origins, headers),
        ]
        await send({"type": "http.response.start", "status": status, "headers": answered})
        if body is not None and not body.complete:
            await send({"type": "http.response.body", "body": content, "more_body": True})
            await body.discard()
            content = b""
        await send({"type": "http.response.body", "body": content})


class _Body:
    """The body of one request, as it comes: ``announced`` bytes if it was said; ``complete`` with the last one."""

    def __init__(self, receive: Receive, announced: int | None) -> None:
        self._receive = receive
        self.announced = announced
        self.complete = announced == 0

    async def read(self, settings: ReceiveSettings, admission: Admission) -> bytes:
        """All of it, as it was sent. Raises ``Refusal`` as soon as it is too large, too slow, or given up."""
        limit, announced = settings.max_request_bytes, self.announced
        if announced is not None and announced > limit:
            raise Refusal(Reason.TOO_LARGE, f"{announced} bytes announced, {limit} are taken; send less a request")
        parts: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        until = loop.time() + settings.read_timeout_s
        try:
            async with asyncio.timeout_at(until) as patience:
                while not self.complete:
                    part = await self._next()
                    size += len(part)
                    if size > limit:
                        raise Refusal(Reason.TOO_LARGE, f"more than {limit} bytes; send less a request")
                    admission.take(len(part))
                    parts.append(part)
                    if not self.complete:
                        patience.reschedule(until + size / _SLOWEST_BYTES_A_S)
        except TimeoutError:
            raise Refusal(Reason.READ_TIMEOUT, f"the body stopped after {size} bytes, or comes too slowly") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def is_short(self) -> bool:
        return self.announced is not None and self.announced <= _IN_LOOP_BYTES

    async def discard(self) -> None:
        """Let a refused sender finish, for a while: with bytes of his on the way, hanging up takes the answer from
        him."""
        try:
            async with asyncio.timeout(_LINGER_S):
                while not self.complete:
                    await self._next()
        except (TimeoutError, Refusal):
            pass

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.complete = True
            raise Refusal(Reason.BAD_DATA, "the sender went away in the middle of the body")
        self.complete = not message.get("more_body")
        return bytes(message.get("body", b""))


async def _resolved(done: Future[int]) -> None:
    """Wait for a batch's commit without taking it back when the wait ends early. Raises ``Refusal`` (OVERLOADED)."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def give_up() -> None:
        if not waiter.done():
            waiter.set_exception(Refusal(Reason.OVERLOADED, "the disk did not take it in time", 1.0))

    def resolved(_: Future[int]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake)

    patience = loop.call_later(COMMIT_TIMEOUT_S, give_up)
    done.add_done_callback(resolved)
    try:
        await waiter
    finally:
        patience.cancel()


async def _preflight(send: Send, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    body = b'{"code":5,"message":"nothing is served here; OTLP is at /v1/metrics, /v1/traces and /v1/logs"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class HttpServers:
    """The HTTP ports: uvicorn servers on one event loop in one thread. ``headers`` go into every answer."""

    def __init__(self, settings: ReceiveSettings, headers: tuple[tuple[str, str], ...] = ()) -> None:
        self._settings = settings
        self._headers = list(headers)
        self._servers: list[uvicorn.Server] = []
        self._sockets: list[list[socket.socket]] = []
        self._thread: threading.Thread | None = None

    def listen(self, name: str, addresses: tuple[Address, ...], app: App) -> list[Address]:
        """Bind the addresses for ``app``; the addresses with their real ports. Raises ``ConfigError``."""
        config = self._config(app)
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"receive.tls_cert, receive.tls_key: cannot be used ({error})") from None
        sockets: list[socket.socket] = []
        self._sockets.append(sockets)
        self._servers.append(uvicorn.Server(config))
        for address in addresses:
            bound = bind(name, address)
            if bound is not None:
                bound.listen(config.backlog)
                sockets.append(bound)
        return [Address(*bound.getsockname()[:2]) for bound in sockets]

    def start(self) -> None:
        """Serve. Returns when every server takes requests. Raises ``StorageError`` when one does not start."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="http", daemon=True)
        self._thread.start()
        ready.wait(30.0)
        if not all(server.started for server in self._servers):
            raise StorageError("the HTTP ports could not be served; the log has the cause")

    def stop(self, deadline_s: float) -> None:
        """Take no new connections, end what runs, within the deadline. Without ``start``, let the addresses go."""
        if self._thread is None:
            for bound in (bound for sockets in self._sockets for bound in sockets):
                bound.close()
            return
        for server in self._servers:
            server.config.timeout_graceful_shutdown = max(1, int(deadline_s))
            server.should_exit = True
        self._thread.join(deadline_s + 1.0)
        for server in self._servers:
            server.force_exit = True
        self._thread.join(1.0)

    def _config(self, app: App) -> uvicorn.Config:
        tls = self._settings
        return uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            server_header=False,
            headers=self._headers,
            proxy_headers=False,
            timeout_keep_alive=75,
            backlog=2048,
            ssl_certfile=str(tls.tls_cert) if tls.tls_cert else None,
            ssl_keyfile=str(tls.tls_key) if tls.tls_key else None,
        )

    def _run(self, ready: threading.Event) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(ready))
        except Exception:
            log.exception("event=http_servers_ended action=restart the gateway")
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        tasks = [
            asyncio.create_task(server.serve(sockets))
            for server, sockets in zip(self._servers, self._sockets, strict=True)
        ]
        while not all(server.started for server in self._servers) and not any(task.done() for task in tasks):
            await asyncio.sleep(0.005)
        ready.set()
        silence = asyncio.create_task(self._hang_up_on_the_silent())
        await asyncio.gather(*tasks)
        silence.cancel()

    async def _hang_up_on_the_silent(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._settings.read_timeout_s))
            for server in self._servers:
                for connection in list(server.server_state.connections):
                    if isinstance(connection, Connection):
                        connection.close_if_silent(loop.time() - self._settings.read_timeout_s)
