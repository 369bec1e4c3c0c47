"""A fake Guance: takes what a gateway sends, remembers or prints it, and goes wrong when asked to.

For tests and for people without a workspace. It answers as Dataway does: ``POST /v1/write/CATEGORY``, ``GET /v1/ntp``,
``GET /v1/datakit/pull``. ``FAULTS`` lists what can go wrong.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import random
import re
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import SplitResult, parse_qs, urlsplit

from gateway.forward.tap import show
from gateway.model import Category, ConfigError, Event
from gateway.otlp.point import decode_points

MAX_BODY_BYTES = 64 << 20

FAULTS = {
    "429": "429 with Retry-After: 1",
    "429-date": "429 with Retry-After as a date",
    "403-quota": "403 beyondDataUsage: the workspace's quota is used up",
    "403-token": "403: the token is not known",
    "400": "400 for the whole body",
    "400-poison": "400 for a body with a point whose tag or field `poison` is there",
    "413": "413 for a body of more than 10,000 bytes uncompressed",
    "500": "500",
    "503": "503",
    "302": "302 to another address",
    "slow": "the reply comes a byte a second",
    "reset": "the connection is reset in the middle of the body",
    "lost": "the points are taken, and the connection is reset before the answer",
}
"""The kinds of ``--fault KIND:SHARE``."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A request that came, and how it was answered (status 0: not at all). ``taken``: its points count."""

    category: str
    headers: dict[str, str]
    query: dict[str, list[str]]
    package_id: str
    n_points: int
    body: bytes
    status: int
    taken: bool
    at: float

    def events(self) -> list[Event]:
        """The points of a protobuf body; none of line protocol (``body`` is the text)."""
        if self.headers.get("content-type", "").startswith("application/protobuf"):
            return decode_points(self.body, Category[self.category.upper()])
        return []


@dataclass(slots=True)
class _Plan:
    """A fault that is to happen ``times`` more times."""

    kind: str
    times: int


@dataclass(slots=True)
class StandIn:
    """The server. ``with StandIn() as guance:`` starts it on a free port of loopback; ``guance.url`` is for
    ``ENV_DATAWAY``. ``faults`` are shares of the requests by kind; ``fail`` plans a fault for the next ones."""

    host: str = "127.0.0.1"
    port: int = 0
    faults: dict[str, float] = field(default_factory=dict)
    token: str | None = None
    swallow: bool = False
    on_request: Callable[[Taken], None] | None = None
    requests: list[Taken] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    _plans: list[_Plan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _arrived: threading.Condition = field(default_factory=threading.Condition)
    _server: ThreadingHTTPServer | None = None

    def __enter__(self) -> StandIn:
        handler = type("Handler", (_Handler,), {"owner": self})
        try:
            self._server = _Server((self.host, self.port), handler)
        except OSError as error:
            raise ConfigError(f"{self.host}:{self.port} cannot be listened on ({error.strerror})") from None
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="stand-in", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def url(self) -> str:
        """The address, with a token as Dataway wants one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}?token={self.token or 'tkn_0123456789abcdef0123456789abcdef'}"

    def fail(self, kind: str, times: int = 1) -> None:
        """Let the next ``times`` requests go wrong this way."""
        if kind not in FAULTS:
            raise ConfigError(f"fault {kind!r}: choose one of {', '.join(FAULTS)}")
        with self._lock:
            self._plans.append(_Plan(kind, times))

    def heal(self) -> None:
        """Forget every planned fault and every share."""
        with self._lock:
            self._plans.clear()
            self.faults.clear()

    def points(self, category: str | None = None) -> list[Event]:
        """The points that were taken; those of a package that came again count once."""
        seen: set[str] = set()
        found: list[Event] = []
        for request in list(self.requests):
            if request.taken and request.package_id not in seen and category in (None, request.category):
                seen.add(request.package_id)
                found += request.events()
        return found

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Wait until ``condition``, looked at after each request, holds."""
        with self._arrived:
            return self._arrived.wait_for(condition, timeout_s)

    def choose_fault(self) -> str | None:
        """What is to go wrong with the request that came now."""
        with self._lock:
            while self._plans:
                plan = self._plans[0]
                if plan.times > 0:
                    plan.times -= 1
                    return plan.kind
                self._plans.pop(0)
            at = random.random()
            for kind, share in self.faults.items():
                at -= share
                if at < 0:
                    return kind
        return None

    def note(self, request: Taken) -> None:
        with self._arrived:
            name = request.category if request.taken else f"{request.category} refused"
            self.counts[name] = self.counts.get(name, 0) + request.n_points
            if not self.swallow:
                self.requests.append(request)
                if self.on_request is not None:
                    self.on_request(request)
            self._arrived.notify_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Senders that go away are part of the game."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    owner: StandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 120

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        path = self._target().path
        if path == "/v1/ntp":
            self._reply(200, json.dumps({"content": {"timestamp_sec": int(time.time())}}))
        elif path in ("/v1/datakit/pull", "/v2/list/dataway", "/v1/ping"):
            self._reply(200, json.dumps({"content": {}}))
        elif path == "/counts":
            self._reply(200, json.dumps(self.owner.counts))
        else:
            self._reply(404, _error("notFound", path))

    def do_POST(self) -> None:
        parts = self._target()
        query = parse_qs(parts.query)
        found = re.fullmatch(r"/v1/write/(metric|tracing|logging)", parts.path)
        fault = self.owner.choose_fault()
        told = self.headers.get("Content-Length") or "0"
        size = int(told) if told.isdecimal() and len(told) < 19 else MAX_BODY_BYTES + 1
        if size > MAX_BODY_BYTES:
            self.close_connection = True
            self._reply(413, _error("bodyTooLarge", f"Content-Length {told[:40]!r}"))
            return
        if fault == "reset":
            self.rfile.read(size // 2)
            self._note(found, query, b"", 0, False)
            self._reset()
            return
        raw = self.rfile.read(size)
        if not found:
            self._reply(404, _error("notFound", parts.path))
            return
        if self.owner.token and query.get("token") != [self.owner.token]:
            fault = "403-token"
        try:
            body = self._body(raw)
        except (zlib.error, ValueError) as error:
            self._note(found, query, b"", 400, False)
            self._reply(400, _error("decodeBodyFailed", str(error)))
            return
        status = self._status(fault, body)
        taken = status == 200 or fault in ("slow", "lost")
        self._note(found, query, body, 0 if fault == "lost" else status, taken)
        if fault == "lost":
            self._reset()
        elif fault == "slow":
            self._trickle()
        else:
            self._answer(fault, status)

    def _target(self) -> SplitResult:
        try:
            return urlsplit(self.path)
        except ValueError:  # no address at all
            return SplitResult("", "", "", "", "")

    def _body(self, raw: bytes) -> bytes:
        if self.owner.swallow:
            return b""
        if self.headers.get("Content-Encoding") != "gzip":
            return raw
        inflating = zlib.decompressobj(zlib.MAX_WBITS | 16)
        body = inflating.decompress(raw, MAX_BODY_BYTES)
        if not inflating.eof:
            raise ValueError(f"cut short, or more than {MAX_BODY_BYTES} bytes")
        return body

    def _status(self, fault: str | None, body: bytes) -> int:
        if fault == "413":
            return 413 if len(body) > 10_000 else 200
        if fault == "400-poison":
            return 400 if b"poison" in body else 200
        if fault is None or fault in ("slow", "lost"):
            return 200
        return int(fault[:3])

    def _note(
        self, found: re.Match[str] | None, query: dict[str, list[str]], body: bytes, status: int, taken: bool
    ) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        points = headers.get("x-points", "0")
        self.owner.note(
            Taken(
                found[1] if found else "",
                headers,
                query,
                headers.get("x-pkg-id", ""),
                int(points) if points.isdigit() else 0,
                body,
                status,
                taken,
                time.time(),
            )
        )

    def _answer(self, fault: str | None, status: int) -> None:
        if status == 200:
            self._reply(200, "")
        elif fault == "429":
            self._reply(429, _error("reachLimit", "too many requests"), {"Retry-After": "1"})
        elif fault == "429-date":
            self._reply(
                429, _error("reachLimit", "slow down"), {"Retry-After": email.utils.formatdate(time.time() + 2)}
            )
        elif fault == "403-quota":
            self._reply(403, _error("beyondDataUsage", "the quota is used up"))
        elif fault == "403-token":
            self._reply(403, _error("tokenNotFound", "the token is not known"))
        elif fault == "302":
            self._reply(302, "", {"Location": "http://127.0.0.1:9/elsewhere"})
        else:
            self._reply(status, _error("fault", f"as planned: {fault}"))

    def _reply(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _trickle(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Length", "3600")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(3600):
                self.wfile.write(b".")
                self.wfile.flush()
                time.sleep(1.0)

    def _reset(self) -> None:
        """End the connection with a reset rather than an orderly end."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.close()


def _error(code: str, message: str) -> str:
    return json.dumps({"error_code": f"dataway.{code}", "message": message})


def parse_faults(texts: Iterable[str]) -> dict[str, float]:
    """``KIND:SHARE`` texts as shares by kind. Raises ``ConfigError``."""
    shares: dict[str, float] = {}
    for text in texts:
        kind, _, share = text.rpartition(":")
        try:
            shares[kind] = float(share)
        except ValueError:
            raise ConfigError(f"--fault {text!r}: write KIND:SHARE, for example 429:0.1") from None
        if kind not in FAULTS or not 0 < shares[kind] <= 1:
            raise ConfigError(f"--fault {text!r}: KIND is one of {', '.join(FAULTS)}; SHARE is above 0 and at most 1")
    return shares


def serve(
    host: str,
    port: int,
    *,
    faults: Iterable[str] = (),
    token: str | None = None,
    swallow: bool = False,
    record: Path | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Run until SIGTERM or Ctrl-C; print what comes, and the counts at the end. Raises ``ConfigError``."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(record.open("a", encoding="utf-8")) if record else None
        printing = None if quiet else sys.stdout

        def on_request(request: Taken) -> None:
            _report(request, printing, file, as_json)
            guance.requests.clear()

        guance = stack.enter_context(
            StandIn(host, port, parse_faults(faults), token, swallow, on_request if not swallow else None)
        )
        print(f"dataway ready http://{host}:{guance.port}", flush=True)
        stop.wait()
    print(json.dumps(guance.counts), flush=True)


def _report(request: Taken, printing: TextIO | None, file: TextIO | None, as_json: bool) -> None:
    """Print a request's points, and add it to the record."""
    shown = [show(event, as_json) for event in request.events()] or request.body.decode("utf-8", "replace").splitlines()
    if printing is not None:
        for line in shown if request.taken else [f"# {request.category}: answered {request.status}"]:
            print(line, file=printing, flush=True)
    if file is not None:
        entry = {
            "category": request.category,
            "package": request.package_id,
            "status": request.status,
            "taken": request.taken,
            "points": [json.loads(show(event, True)) for event in request.events()] or shown,
        }
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        file.flush()
