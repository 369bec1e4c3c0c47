"""kill -9 at random moments under load, again and again; then: is everything there that was acknowledged, once?

``python -m tests.promises.kill --rounds 100`` prints a table; the exit code is 1 when a promise was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.forward.stand_in import StandIn, Taken
from gateway.model import Event
from tests.promises import oracle
from tests.promises.gateway import GatewayProcess
from tests.promises.oracle import Arrival, Number, Promised

_EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
FAULTS = {"lost": 0.05, "503": 0.05, "reset": 0.05}


@dataclass(slots=True)
class Result:
    """A campaign's outcome."""

    rounds: int = 0
    acknowledged: int = 0
    uncertain: int = 0
    arrived: int = 0
    lost: int = 0
    doubled: int = 0
    changed: int = 0
    invented: int = 0
    ready_s: list[float] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.doubled or self.changed or self.invented)


class Senders:
    """Send numbered points over HTTP and gRPC until stopped; note what was acknowledged."""

    def __init__(self, promised: Promised, numbers: Iterator[int], seed: int) -> None:
        self._promised = promised
        self._numbers = numbers
        self._lock = threading.Lock()
        self._seed = seed
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, http_at: str, grpc_at: str) -> None:
        self._stop.clear()
        ways = [("metric", http_at), ("tracing", http_at), ("logging", http_at), ("metric", f"grpc:{grpc_at}")]
        self._threads = [threading.Thread(target=self._send, args=way, daemon=True) for way in ways]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)

    def _take(self, count: int) -> list[int]:
        with self._lock:
            return list(itertools.islice(self._numbers, count))

    def _send(self, category: str, at: str) -> None:
        self._seed += 1
        chance = random.Random(self._seed)
        with contextlib.ExitStack() as stack:
            post = _grpc(at[5:], stack) if at.startswith("grpc:") else _http(at, category, stack)
            while not self._stop.is_set():
                numbers = self._take(chance.choice((1, 3, 40, 400)))
                points = {(category, number) for number in numbers}
                try:
                    taken = post(request(category, numbers))
                except (OSError, http.client.HTTPException, grpc.RpcError):
                    taken = False
                with self._lock:
                    (self._promised.acknowledged if taken else self._promised.uncertain).update(points)
                if not taken:
                    self._stop.wait(0.05)


def _http(at: str, category: str, stack: contextlib.ExitStack):  # type: ignore[no-untyped-def]
    connection = http.client.HTTPConnection(at, timeout=10)
    stack.callback(connection.close)
    path = {"metric": "/v1/metrics", "tracing": "/v1/traces", "logging": "/v1/logs"}[category]

    def post(body: bytes) -> bool:
        try:
            connection.request("POST", path, body, {"Content-Type": "application/x-protobuf"})
            answer = connection.getresponse()
            answer.read()
        except BaseException:
            connection.close()
            raise
        return answer.status == 200

    return post


def _grpc(at: str, stack: contextlib.ExitStack):  # type: ignore[no-untyped-def]
    channel = grpc.insecure_channel(at, options=[("grpc.use_local_subchannel_pool", 1)])
    stack.callback(channel.close)
    call = channel.unary_unary(_EXPORT)

    def post(body: bytes) -> bool:
        call(body, timeout=10)
        return True

    return post


def request(category: str, numbers: list[int]) -> bytes:
    """A request whose points carry these numbers."""
    now = time.time_ns()
    if category == "metric":
        metrics = ExportMetricsServiceRequest()
        metric = metrics.resource_metrics.add().scope_metrics.add().metrics.add(name="promise.number")
        for number in numbers:
            metric.gauge.data_points.add(time_unix_nano=now, as_int=number)
        return metrics.SerializeToString()
    if category == "tracing":
        traces = ExportTraceServiceRequest()
        spans = traces.resource_spans.add()
        spans.resource.attributes.add(key="service.name").value.string_value = "promise"
        scope = spans.scope_spans.add()
        for number in numbers:
            scope.spans.add(
                name=f"promise-{number}", trace_id=number.to_bytes(16, "big"), span_id=(number + 1).to_bytes(8, "big"),
                start_time_unix_nano=now, end_time_unix_nano=now + 1000,
            )  # fmt: skip
        return traces.SerializeToString()
    logs = ExportLogsServiceRequest()
    records = logs.resource_logs.add().scope_logs.add()
    for number in numbers:
        records.log_records.add(time_unix_nano=now).body.string_value = f"promise-{number}"
    return logs.SerializeToString()


def _number(event: Event) -> int | None:
    """The number of a point, as it came out at the other end."""
    if "promise.number" in event.fields:
        return int(event.fields["promise.number"])
    text = str(event.fields.get("resource") or event.fields.get("message"))
    return int(text.removeprefix("promise-")) if text.startswith("promise-") else None


def arrival(taken: Taken) -> Arrival:
    """A request that the Dataway took, as the oracle wants it."""
    numbers = [(taken.category, number) for event in taken.events() if (number := _number(event)) is not None]
    return Arrival(taken.package_id, tuple(numbers))


def campaign(rounds: int, place: Path, seed: int, longest_s: float = 1.5, faults: bool = True) -> Result:
    """Kill the gateway ``rounds`` times; what became of the promises."""
    chance = random.Random(seed)
    promised, numbers, arrivals = Promised(), itertools.count(1), []
    lock = threading.Lock()
    result = Result()

    def on_request(taken: Taken) -> None:
        with lock:
            if taken.taken:
                arrivals.append(arrival(taken))
        guance.requests.clear()

    with StandIn(faults=dict(FAULTS) if faults else {}, on_request=on_request) as guance:
        gateway = GatewayProcess(place, guance.url)
        senders = Senders(promised, numbers, seed)
        for _ in range(rounds):
            result.ready_s.append(gateway.start())
            senders.start(gateway.http, gateway.grpc)
            time.sleep(chance.uniform(0.05, longest_s))
            gateway.kill()
            senders.stop()
            result.rounds += 1
        guance.heal()
        result.ready_s.append(gateway.start())
        until = time.monotonic() + 60
        while oracle.lost(promised, list(arrivals)) and time.monotonic() < until:
            time.sleep(0.2)
        gateway.terminate()
    return judged(result, promised, arrivals)


def judged(result: Result, promised: Promised, arrivals: list[Arrival]) -> Result:
    result.acknowledged, result.uncertain = len(promised.acknowledged), len(promised.uncertain)
    came: set[Number] = {number for each in arrivals for number in each.numbers}
    result.arrived = len(came)
    result.lost = len(oracle.lost(promised, arrivals))
    result.doubled = len(oracle.doubled(arrivals))
    result.changed = len(oracle.changed(arrivals))
    result.invented = len(oracle.invented(promised, arrivals))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-faults", action="store_true", help="a Dataway that does nothing wrong")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="locum-kill-") as place:
        result = campaign(told.rounds, Path(place), told.seed, faults=not told.no_faults)
    ready = sorted(result.ready_s)
    print(f"kills {result.rounds}, acknowledged points {result.acknowledged:,}, unanswered {result.uncertain:,}")
    print(f"arrived {result.arrived:,}, lost {result.lost}, under two ids {result.doubled}, changed {result.changed}, "
          f"invented {result.invented}")  # fmt: skip
    print(f"ready again after {ready[len(ready) // 2]:.1f} s (median), {ready[-1]:.1f} s (longest)")
    sys.exit(0 if result.kept else 1)


if __name__ == "__main__":
    main()
