"""The load generator, a process of its own: N connections, each sending the next request when the last is answered.

Run as ``python -m benchmarks.load --workload gauges --url http://127.0.0.1:4318/v1/metrics --seconds 10``; it prints
one JSON object. Any OTLP/HTTP endpoint will do; ``grpc://HOST:PORT`` sends over gRPC.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import grpc

from benchmarks.workloads import WORKLOADS, Template, Workload

_EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"


@dataclass(slots=True)
class Outcome:
    """What came of it: answers by status, latencies in seconds."""

    statuses: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)


class Requests:
    """Hands out requests, each once, in order, for ``seconds`` or, if not 0, ``count`` of them, from
    number ``first`` on."""

    def __init__(self, workload: Workload, templates: list[Template], seconds: float, count: int, first: int) -> None:
        self._workload = workload
        self._templates = templates
        self._last = first + count if count else 0
        self._until = time.monotonic() + seconds
        self._next = first
        self._lock = threading.Lock()

    def take(self) -> bytes | None:
        with self._lock:
            number = self._next
            if number >= self._last if self._last else time.monotonic() >= self._until:
                return None
            self._next += 1
            lap, at = divmod(number, len(self._templates))
            return self._templates[at].at(self._workload.time_ns(lap, at, len(self._templates)), lap)


def _http(url: str) -> Callable[[bytes], str]:
    """A kept connection that posts a body and gives the status."""
    parts = urlsplit(url)
    path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/x-protobuf\r\nContent-Length: "
    connection = socket.create_connection((parts.hostname, parts.port or 80), timeout=120)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(body: bytes) -> str:
        connection.sendall(f"{head}{len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            part = connection.recv(65536)
            if not part:
                raise ConnectionError("the connection was closed in the middle of an answer")
            answer += part
        headers, _, rest = answer.partition(b"\r\n\r\n")
        for line in headers.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                missing = int(line[15:]) - len(rest)
                while missing > 0:
                    part = connection.recv(65536)
                    if not part:
                        raise ConnectionError("the connection was closed in the middle of an answer")
                    missing -= len(part)
        return headers[9:12].decode()

    return post


def _grpc(url: str) -> Callable[[bytes], str]:
    """A channel of its own; the status is the name of the code."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    call = grpc.insecure_channel(urlsplit(url).netloc, options=options).unary_unary(_EXPORT)

    def post(body: bytes) -> str:
        try:
            call(body, timeout=120)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    return post


def run(url: str, workload: str, connections: int, seconds: float, count: int = 0, first: int = 0) -> dict[str, object]:
    """Send for ``seconds`` or, if not 0, ``count`` requests, from number ``first`` on; what came of it."""
    chosen = WORKLOADS[workload]
    requests = Requests(chosen, chosen.templates(), seconds, count, first)
    outcomes = [Outcome() for _ in range(connections)]

    def send(outcome: Outcome) -> None:
        post: Callable[[bytes], str] | None = None
        while (body := requests.take()) is not None:
            began = time.perf_counter()
            try:
                post = post or (_grpc(url) if url.startswith("grpc://") else _http(url))
                status = post(body)
            except OSError as error:
                status, post = type(error).__name__, None
                time.sleep(0.1)
            outcome.statuses[status] += 1
            outcome.latencies.append(time.perf_counter() - began)

    began, cpu_began = time.monotonic(), time.process_time()
    threads = [threading.Thread(target=send, args=(outcome,)) for outcome in outcomes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - began
    latencies = sorted(latency for outcome in outcomes for latency in outcome.latencies) or [0.0]
    statuses: Counter[str] = Counter()
    for outcome in outcomes:
        statuses += outcome.statuses
    taken = statuses["200"] + statuses["OK"]
    return {
        "seconds": took_s,
        "requests": taken,
        "points_in": taken * chosen.points_in,
        "points_out": taken * chosen.points_out,
        "statuses": dict(statuses),
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
        "own_cpu_s": time.process_time() - cpu_began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--workload", choices=WORKLOADS, default="gauges")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--count", type=int, default=0, help="send this many requests, however long it takes")
    parser.add_argument("--first", type=int, default=0, help="begin with this request, counted from 0")
    told = parser.parse_args()
    print(json.dumps(run(told.url, told.workload, told.connections, told.seconds, told.count, told.first)))


if __name__ == "__main__":
    main()
