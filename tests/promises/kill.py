"""kill -9 at random moments under load, again and again; then: is everything there that was acknowledged, once?

Segments are sealed every second, bodies are small and one kill in five comes while the gateway is still starting, so
that kills hit recovery, sealing and windows of several bodies, too; the Dataway loses answers and requests meanwhile.
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
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, NumberDataPoint

from gateway.console import table
from gateway.forward.stand_in import StandIn, Taken
from gateway.model import Event
from tests.promises import oracle
from tests.promises.gateway import GatewayProcess
from tests.promises.oracle import Arrival, Number, Promised

_EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
FAULTS = {"lost": 0.05, "503": 0.05, "reset": 0.05}
CONF = """max_body_bytes = "100KiB"

[buffer]
segment_age_s = "1s"
"""
_SIZES = (1, 3, 40, 400, 2000)
_WEIGHTS = (4, 4, 4, 2, 1)
_SETTLE_S = 120.0


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
    caught_up_s: float = 0.0
    log: list[str] = field(default_factory=list, repr=False)
    differences: list[str] = field(default_factory=list)

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
            post = _grpc(at[5:], stack) if at.startswith("grpc:") else http_sender(at, category, stack)
            while not self._stop.is_set():
                numbers = self._take(chance.choices(_SIZES, _WEIGHTS)[0])
                points = promises(category, numbers)
                try:
                    taken = post(request(category, numbers))
                except (OSError, http.client.HTTPException, grpc.RpcError):
                    taken = False
                with self._lock:
                    (self._promised.acknowledged if taken else self._promised.uncertain).update(points)
                if not taken:
                    self._stop.wait(0.05)


def http_sender(at: str, category: str, stack: contextlib.ExitStack):  # type: ignore[no-untyped-def]
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


def promises(category: str, numbers: list[int]) -> set[Number]:
    """What has to come of a request with these numbers: of a histogram its buckets, too."""
    buckets = {("bucket", number) for number in numbers if _is_histogram(number)} if category == "metric" else set()
    return {(category, number) for number in numbers} | buckets


def _is_histogram(number: int) -> bool:
    return number % 5 == 0


def _metrics(numbers: list[int], now: int) -> ExportMetricsServiceRequest:
    """Gauges and histograms of seven series each, so that sorting them by series would put them into another order."""
    metrics = ExportMetricsServiceRequest()
    scope = metrics.resource_metrics.add().scope_metrics.add()
    gauge = scope.metrics.add(name="promise.number").gauge
    histogram = scope.metrics.add(name="promise.number").histogram
    histogram.aggregation_temporality = 2
    for number in numbers:
        point: NumberDataPoint | HistogramDataPoint
        if _is_histogram(number):
            point = histogram.data_points.add(
                time_unix_nano=now, count=number, sum=1.0, bucket_counts=[1, number - 1], explicit_bounds=[1.0]
            )
        else:
            point = gauge.data_points.add(time_unix_nano=now, as_int=number)
        point.attributes.add(key="way").value.int_value = number % 7
    return metrics


def request(category: str, numbers: list[int]) -> bytes:
    """A request whose points carry these numbers."""
    now = time.time_ns()
    if category == "metric":
        return _metrics(numbers, now).SerializeToString()
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


def _number(category: str, event: Event) -> Number | None:
    """The number of a point, as it came out at the other end; None for a bucket that says nothing of its own."""
    for field_name in ("promise.number", "promise.number_count"):
        if field_name in event.fields:
            return category, int(event.fields[field_name])
    if "promise.number_bucket" in event.fields:
        return ("bucket", int(event.fields["promise.number_bucket"])) if event.tags["le"] == "+Inf" else None
    text = str(event.fields.get("resource") or event.fields.get("message"))
    return (category, int(text.removeprefix("promise-"))) if text.startswith("promise-") else None


def arrival(taken: Taken) -> Arrival:
    """A request that the Dataway took, as the oracle wants it."""
    numbers = [number for event in taken.events() if (number := _number(taken.category, event)) is not None]
    return Arrival(taken.package_id, tuple(numbers))


class Scene:
    """A gateway process, a fake Guance, senders, and the books of both ends."""

    def __init__(
        self,
        place: Path,
        seed: int,
        conf: str = CONF,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.promised, self.arrivals = Promised(), list[Arrival]()
        self._lock = threading.Lock()
        self.guance = StandIn(on_request=self._on_request)
        self.numbers = itertools.count(1)
        self.senders = Senders(self.promised, self.numbers, seed)
        self._place, self._conf, self._environment = place, conf, environment
        self.chance = random.Random(seed)

    def _on_request(self, taken: Taken) -> None:
        with self._lock:
            if taken.taken and taken.body:  # killed between head and body, a sender leaves an empty body behind
                self.arrivals.append(arrival(taken))
        self.guance.requests.clear()

    def __enter__(self) -> Scene:
        self._place.mkdir(parents=True, exist_ok=True)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.guance)
        gateway = GatewayProcess(self._place, self.guance.url, self._conf, self._environment)
        self.gateway = self._stack.enter_context(gateway)
        return self

    def __exit__(self, *_: object) -> None:
        self.senders.stop()
        self._stack.close()

    @property
    def data_dir(self) -> Path:
        return self.gateway.data_dir

    def load(self, for_s: float) -> None:
        """Send for so long, and stop."""
        self.senders.start(self.gateway.http, self.gateway.grpc)
        time.sleep(for_s)
        self.senders.stop()

    def came(self) -> list[Arrival]:
        """What the Dataway has taken so far."""
        with self._lock:
            return list(self.arrivals)

    def missing(self) -> set[Number]:
        return oracle.lost(self.promised, self.came())

    def settle(self) -> float:
        """Wait until all has come; the seconds that it took."""
        began = time.monotonic()
        while self.missing() and time.monotonic() < began + _SETTLE_S:
            time.sleep(0.1)
        return time.monotonic() - began


def campaign(
    rounds: int, place: Path, seed: int, longest_s: float = 1.5, faults: bool = True, conf: str = CONF
) -> Result:
    """Kill the gateway ``rounds`` times; what became of the promises."""
    result = Result()
    with Scene(place, seed, conf) as scene:
        scene.guance.faults.update(FAULTS if faults else {})
        gateway, chance = scene.gateway, scene.chance
        while result.rounds < rounds:
            result.rounds += 1
            if chance.random() < 0.2:
                gateway.launch()
                time.sleep(chance.uniform(0.3, 1.5))
                gateway.kill()
                continue
            result.ready_s.append(gateway.start())
            scene.senders.start(gateway.http, gateway.grpc)
            time.sleep(chance.uniform(0.05, longest_s))
            gateway.kill()
            scene.senders.stop()
        scene.guance.heal()
        result.ready_s.append(gateway.start())
        result.caught_up_s = scene.settle()
        gateway.terminate()
        result.log = gateway.log
    return judged(result, scene.promised, scene.came())


def judged(result: Result, promised: Promised, arrivals: list[Arrival]) -> Result:
    result.acknowledged, result.uncertain = len(promised.acknowledged), len(promised.uncertain)
    came: set[Number] = {number for each in arrivals for number in each.numbers}
    result.arrived = len(came)
    result.lost = len(oracle.lost(promised, arrivals))
    result.doubled = len(oracle.doubled(arrivals))
    result.differences = [f"{package_id} {what}" for package_id, what in oracle.changed(arrivals).items()]
    result.changed = len(result.differences)
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
    table(
        ("kills", "acknowledged", "unanswered", "arrived", "lost", "under two ids", "changed", "invented",
         "ready after s (median, longest)", "delivered after s"),
        [(result.rounds, f"{result.acknowledged:,}", f"{result.uncertain:,}", f"{result.arrived:,}", result.lost,
          result.doubled, result.changed, result.invented, f"{ready[len(ready) // 2]:.1f}, {ready[-1]:.1f}",
          f"{result.caught_up_s:.1f}")],
    )  # fmt: skip
    if not result.kept:
        print("\n".join(result.differences + result.log), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
