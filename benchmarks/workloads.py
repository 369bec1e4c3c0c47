"""The requests of each workload, built once, with the times patched in as they are sent.

Everything is deterministic. A workload is a list of serialized ``ExportMetricsServiceRequest`` and what they hold.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

_MARK_NS = 0x1122334455667788
"""Stands where a time will be; no other eight bytes of a request look like this."""
_VALUE_MARK = -1.2345678901234567e-89
"""Stands where a value will be."""
_FIRST_PID = 10_000_000
_PID_MARK = "@PROCESS"
"""Stands where a process id will be: eight digits."""
INTERVAL_NS = 15_000_000_000
START_NS = 1_796_000_000_000_000_000

GAUGES = (
    ("hw.gpu.utilization", "1"), ("hw.gpu.memory.usage", "By"), ("hw.gpu.memory.utilization", "1"),
    ("hw.gpu.power", "W"), ("hw.gpu.temperature", "Cel"), ("hw.gpu.clock.sm", "MHz"), ("hw.gpu.clock.memory", "MHz"),
    ("hw.gpu.fan.speed", "1"), ("hw.gpu.pcie.rx", "By/s"), ("hw.gpu.pcie.tx", "By/s"),
    ("hw.gpu.nvlink.rx", "By/s"), ("hw.gpu.nvlink.tx", "By/s"), ("hw.gpu.encoder.utilization", "1"),
    ("hw.gpu.decoder.utilization", "1"), ("hw.gpu.energy", "J"), ("hw.gpu.throttle", "1"), ("hw.errors", "{error}"),
    ("hw.gpu.sm_active", "1"), ("hw.gpu.tensor_active", "1"), ("hw.gpu.up", "1"),
)  # fmt: skip


class Template:
    """A serialized request whose times, values and process ids can be set. Values walk: each time that the request is
    sent, some are a tenth or two up or down, as readings of a sensor are."""

    def __init__(self, request: ExportMetricsServiceRequest, seed: int = 0) -> None:
        raw = request.SerializeToString()
        random = np.random.default_rng(seed)
        self._bytes = np.frombuffer(raw, np.uint8).copy()
        self._times = _places(raw, _MARK_NS.to_bytes(8, "little"))
        self._pids = _places(raw, _PID_MARK.encode())
        self._values = _places(raw, struct.pack("<d", _VALUE_MARK))
        self._tenths = random.integers(100, 900, len(self._values))
        self._steps = random.choice((-2, -1, 0, 0, 0, 0, 0, 1, 2), len(self._values) + 1013)

    def at(self, time_ns: int, lap: int = 0) -> bytes:
        """The request with every time ``time_ns``. With every ``lap`` a twentieth of its processes are others."""
        self._bytes[self._times] = np.frombuffer(time_ns.to_bytes(8, "little"), np.uint8)
        if count := len(self._values):
            begin = lap * 997 % 1013
            self._tenths += self._steps[begin : begin + count]
            self._bytes[self._values] = (self._tenths / 10).view(np.uint8).reshape(-1, 8)
        if len(self._pids):
            born = [(lap + at) // 20 for at in range(len(self._pids))]
            pids = [_FIRST_PID + len(self._pids) * life + at for at, life in enumerate(born)]
            digits = "".join(map(str, pids)).encode()
            self._bytes[self._pids] = np.frombuffer(digits, np.uint8).reshape(-1, 8)
        return self._bytes.tobytes()


def _places(raw: bytes, mark: bytes) -> npt.NDArray[np.int64]:
    """Where ``mark`` (eight bytes) stands: a row of eight positions for each."""
    found = []
    at = raw.find(mark)
    while at >= 0:
        found.append(at)
        at = raw.find(mark, at + 8)
    return np.array(found, np.int64)[:, None] + np.arange(8)


@dataclass(frozen=True, slots=True)
class Workload:
    """``templates`` are sent round and round. Each is 15 s later than the one before, or, where they are of one moment
    (``together``: so many templates), each round is. ``points_in`` and ``points_out`` are what one request makes: data
    points in, points for Guance out. ``once``: a second round ends it, however long it takes."""

    name: str
    build: Callable[[], Iterator[ExportMetricsServiceRequest]]
    points_in: int
    points_out: int
    target: str = ""
    max_yardsticks: float = 0.0
    max_peak_mb: float = 0.0
    together: int = 0
    once: bool = False

    def templates(self) -> list[Template]:
        return [Template(request, seed) for seed, request in enumerate(self.build())]

    def time_ns(self, lap: int, at: int, templates: int) -> int:
        """The time of the points of template ``at`` of ``templates`` in round ``lap``."""
        return START_NS + (lap if self.together else lap * templates + at) * INTERVAL_NS


def _attribute(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))


def _gpu_attributes(gpu: int) -> list[KeyValue]:
    """Fourteen attributes as a collector on a GPU host sends them."""
    return [
        _attribute("hw.id", f"GPU-{gpu:08x}-5f1c-4c2a-9b7e-{gpu * 7919:012x}"),
        _attribute("hw.name", "NVIDIA H100 80GB HBM3"),
        _attribute("hw.vendor", "NVIDIA"),
        _attribute("hw.type", "gpu"),
        _attribute("gpu.index", str(gpu % 8)),
        _attribute("pci.bus.id", f"0000:{gpu % 256:02x}:00.0"),
        _attribute("driver.version", "570.86.15"),
        _attribute("cuda.version", "12.8"),
        _attribute("k8s.pod.name", f"trainer-{gpu // 8:05d}"),
        _attribute("k8s.namespace.name", "research"),
        _attribute("team", f"team-{gpu % 40:02d}"),
        _attribute("deployment.environment", "production"),
        _attribute("rack", f"r{gpu // 32:03d}"),
        _attribute("zone", "cn-east-1a"),
    ]


def _request(host: int) -> ExportMetricsServiceRequest:
    request = ExportMetricsServiceRequest()
    resource = request.resource_metrics.add().resource
    resource.attributes.extend(
        [_attribute("service.name", "gpu-collector"), _attribute("host.name", f"node-{host:05d}")]
    )
    request.resource_metrics[0].scope_metrics.add().scope.name = "locum.collector"
    return request


def _gpu_request(host: int, gpus: range, metrics: int) -> ExportMetricsServiceRequest:
    """``metrics`` gauges for each of ``gpus``."""
    request = _request(host)
    for name, unit in GAUGES[:metrics]:
        metric = request.resource_metrics[0].scope_metrics[0].metrics.add(name=name, unit=unit)
        for gpu in gpus:
            point = metric.gauge.data_points.add(time_unix_nano=_MARK_NS, as_double=_VALUE_MARK)
            point.attributes.extend(_gpu_attributes(gpu))
    return request


def _gauges() -> Iterator[ExportMetricsServiceRequest]:
    yield _gpu_request(0, range(100), 10)


def _histograms() -> Iterator[ExportMetricsServiceRequest]:
    bounds = [0.001 * 2**step for step in range(15)]
    for drift in range(16):
        request = _request(0)
        random = np.random.default_rng(drift)
        for name in ("gpu.kernel.duration", "gpu.memory.copies"):
            metric = request.resource_metrics[0].scope_metrics[0].metrics.add(name=name, unit="s")
            metric.histogram.aggregation_temporality = 2
            for each in range(100):
                counts = random.integers(0, 1000, 16).tolist()
                point = metric.histogram.data_points.add(
                    time_unix_nano=_MARK_NS, count=sum(counts), sum=float(sum(counts)) * 0.01, min=0.0004, max=19.5,
                    bucket_counts=counts, explicit_bounds=bounds,
                )  # fmt: skip
                point.attributes.extend(
                    [
                        _attribute("hw.id", f"GPU-{each // 4:08x}"),
                        _attribute("cuda.kernel.name", f"void flash_fwd_kernel<{each}>"),
                        _attribute("process.pid", str(4000 + each)),
                    ]
                )
        yield request


def _fleet() -> Iterator[ExportMetricsServiceRequest]:
    """10,000 GPUs on 1,250 hosts, 20 metrics each, and two processes a GPU, of which a twentieth are others
    every time."""
    for host in range(1250):
        request = _gpu_request(host, range(host * 8, host * 8 + 8), 20)
        metric = request.resource_metrics[0].scope_metrics[0].metrics.add(name="process.gpu.memory.usage", unit="By")
        for gpu in range(host * 8, host * 8 + 8):
            for process in range(2):
                point = metric.gauge.data_points.add(time_unix_nano=_MARK_NS, as_int=gpu * 4096 + process)
                point.attributes.extend([*_gpu_attributes(gpu), _attribute("process.pid", _PID_MARK)])
        yield request


def _series() -> Iterator[ExportMetricsServiceRequest]:
    """1,000,000 distinct series: 20 metrics of 50,000 GPUs."""
    for host in range(200):
        yield _gpu_request(host, range(host * 250, host * 250 + 250), 20)


WORKLOADS = {
    "gauges": Workload("gauges", _gauges, 1000, 1000, "CPU <= 3 yardsticks", max_yardsticks=3.0),
    "histograms": Workload("histograms", _histograms, 200, 3400, "CPU <= 30 yardsticks", max_yardsticks=30.0),
    "fleet": Workload("fleet", _fleet, 176, 176, together=1250),
    "series": Workload(
        "series", _series, 5000, 5000, "peak memory <= 1 GB", max_peak_mb=1000.0, together=200, once=True
    ),
}
