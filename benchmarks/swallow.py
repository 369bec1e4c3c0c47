"""A Dataway that takes everything and only counts: as little work as a receiver can do.

``GET /counts`` tells the requests, points (by ``X-Points``) and bytes so far. Prints its port when it listens.
"""

from __future__ import annotations

import json
import socket
import threading

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Counts:
    """Totals over all connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = self.points = self.bytes = 0

    def add(self, points: int, size: int) -> None:
        with self._lock:
            self.requests += 1
            self.points += points
            self.bytes += size

    def text(self) -> bytes:
        body = json.dumps({"requests": self.requests, "points": self.points, "bytes": self.bytes}).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def _number(head: bytes, name: bytes) -> int:
    """The number after ``name``, 0 where there is none."""
    _, found, rest = head.partition(name)
    return int(rest.partition(b"\r")[0]) if found else 0


def _serve(connection: socket.socket, counts: Counts) -> None:
    room = memoryview(bytearray(1 << 20))
    pending = b""
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            while b"\r\n\r\n" not in pending:
                part = connection.recv(65536)
                if not part:
                    return
                pending += part
            head, _, pending = pending.partition(b"\r\n\r\n")
            if head.startswith(b"GET"):
                connection.sendall(counts.text())
                continue
            lower = head.lower()
            size = _number(lower, b"content-length:")
            missing = size - len(pending)
            pending = pending[size:] if missing <= 0 else b""
            while missing > 0:
                got = connection.recv_into(room, min(missing, len(room)))
                if not got:
                    return
                missing -= got
            counts.add(_number(lower, b"x-points:"), size)
            connection.sendall(_ANSWER)


def main() -> None:
    counts = Counts()
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=_serve, args=(connection, counts), daemon=True).start()


if __name__ == "__main__":
    main()
