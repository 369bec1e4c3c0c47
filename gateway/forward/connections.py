"""Kept-alive connections to one receiver: opened by ``http.client`` (proxies, tunnels, TLS), used without it, since
its ways of sending and reading cost more than a body does.

The whole of a reply has a deadline, however it trickles in. Redirects are not followed: a token goes nowhere else.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import re
import socket
import ssl
import threading
import time
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from gateway.config import DatawaySettings
from gateway.forward.reply import MAX_TEXT_BYTES, Reply

_CONNECT_S = 10.0
_READ_BYTES = 64 << 10
_NOT_IN_A_HEAD = re.compile(r"[\x00-\x1f\x7f]")


class ConnectionPool:
    """Any thread may post; a connection is used by one at a time."""

    def __init__(self, settings: DatawaySettings) -> None:
        self._target = urlsplit(settings.url)
        self._host = _host_header(self._target)
        self._proxy = _proxy(settings)
        self._timeout_s = settings.timeout_s
        self._tls = _tls(settings) if self._target.scheme == "https" else None
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: dict[http.client.HTTPConnection, float] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._guard = threading.Thread(target=self._watch, name="reply-deadlines", daemon=True)
        self._guard.start()

    def post(self, url: str, body: bytes, headers: dict[str, str]) -> tuple[int, str | None, str]:
        """Status, ``Retry-After`` and the beginning of the text of a reply. Raises ``OSError`` (``TimeoutError``
        among them) and ``http.client.HTTPException``."""
        connection, is_fresh = self._take()
        parts = urlsplit(url)
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        if self._proxy and self._tls is None:  # a plain proxy wants the whole address
            path = url
            headers = headers | _login(self._proxy)
        try:
            return self._exchange(connection, path, body, headers)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            connection.close()
            if is_fresh:
                raise
        except BaseException:
            connection.close()
            raise
        # a kept connection may have been closed at the other end meanwhile; that is no fault of the receiver
        connection = self._connect()
        try:
            return self._exchange(connection, path, body, headers)
        except BaseException:
            connection.close()
            raise

    def _exchange(
        self, connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, str | None, str]:
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            self._busy[connection] = deadline
        try:
            if connection.sock is None:
                connection.connect()
            # no time-out of its own, or every call would poll first: `_watch` keeps the deadline
            connection.sock.settimeout(None)
            connection.sock.sendall(self._head(path, headers, len(body)) + body)
            reply = Reply()
            while not reply.complete and len(reply.text) < MAX_TEXT_BYTES:
                data = connection.sock.recv(_READ_BYTES)
                if not data:
                    if reply.status:
                        break  # a reply may end with its connection, and what counts is there
                    raise http.client.RemoteDisconnected("the connection was closed without a reply")
                reply.feed(data)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() < deadline:
                raise
            raise self._too_late() from error
        finally:
            with self._lock:
                del self._busy[connection]
        if time.monotonic() >= deadline:
            raise self._too_late()
        if reply.keeps:
            with self._lock:
                self._idle.append(connection)
        else:
            connection.close()
        return reply.status, reply.retry_after, reply.text.decode("utf-8", "replace")

    def _head(self, path: str, headers: dict[str, str], size_bytes: int) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {self._host}",
            "Accept-Encoding: identity",
            f"Content-Length: {size_bytes}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        for line in lines:
            if _NOT_IN_A_HEAD.search(line):
                raise http.client.HTTPException("a header or the address has a control character in it")
        return "\r\n".join([*lines, "", ""]).encode()

    def _too_late(self) -> TimeoutError:
        return TimeoutError(f"no whole reply within {self._timeout_s:.0f} s")

    def _watch(self) -> None:
        """Cut off replies that trickle in past their deadline: a socket's own time-out begins anew with each byte."""
        while not self._closed.wait(1.0):
            now = time.monotonic()
            with self._lock:
                overdue = [connection for connection, deadline in self._busy.items() if deadline < now]
            for connection in overdue:
                _cut_off(connection)

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        return self._connect(), True

    def _connect(self) -> http.client.HTTPConnection:
        """A connection by the proxy, if there is one. It is opened by its first request."""
        at = self._proxy or self._target
        host, port = at.hostname or "", at.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port or 80, timeout=_CONNECT_S)
        if self._proxy:
            tunnel = http.client.HTTPSConnection(host, port or 80, timeout=_CONNECT_S, context=self._tls)
            tunnel.set_tunnel(self._target.hostname or "", self._target.port or 443, _login(self._proxy))
            return tunnel
        return http.client.HTTPSConnection(host, port or 443, timeout=_CONNECT_S, context=self._tls)

    def close(self) -> None:
        """End every connection, those in use too: whoever waits for a reply gets an error."""
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            _cut_off(connection)


def _host_header(target: SplitResult) -> str:
    """Whom a request is for, without login and without a port that goes without saying."""
    host = target.hostname or ""
    host = f"[{host}]" if ":" in host else host if host.isascii() else host.encode("idna").decode()
    default = 443 if target.scheme == "https" else 80
    return host if target.port in (None, default) else f"{host}:{target.port}"


def _cut_off(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _tls(settings: DatawaySettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or None)
    if settings.tls_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _proxy(settings: DatawaySettings) -> SplitResult | None:
    """The proxy of the settings, else that of the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY)."""
    target = urlsplit(settings.url)
    told = settings.proxy
    if not told and not proxy_bypass(target.netloc):
        told = getproxies().get(target.scheme)
    if not told:
        return None
    return urlsplit(told if "://" in told else f"http://{told}")


def _login(proxy: SplitResult) -> dict[str, str]:
    """The header that a proxy with a user wants."""
    if not proxy.username:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
