"""The yardstick: what a plain parse by protobuf's own C library (upb) costs here and now, for the same requests.

Measured twice: alone, and with every other core at the same work. During a run the load and the receiver keep the
other cores busy, and where two cores are two threads of one, everything costs half as much again then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from benchmarks.workloads import START_NS, WORKLOADS, Workload


def measure(workload: Workload, seconds: float = 1.0) -> float:
    """CPU microseconds a point sent on: the best of several goes of about ``seconds`` in all."""
    bodies = [template.at(START_NS) for template in workload.templates()[:8]]
    best = float("inf")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.process_time()
        for body in bodies * 3:
            ExportMetricsServiceRequest.FromString(body)
        took_s = time.process_time() - began
        best = min(best, took_s / (3 * len(bodies) * workload.points_out) * 1e6)
    return best


def measure_in_company(workload: Workload, seconds: float = 1.0) -> float:
    """As ``measure``, with all other cores parsing, too."""
    command = [sys.executable, "-m", "benchmarks.yardstick", workload.name]
    others = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(max(1, (os.cpu_count() or 1) - 1))
    ]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        return measure(workload, seconds)
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    """Parse for a minute at most, as company."""
    workload = WORKLOADS[sys.argv[1]]
    print("parsing", flush=True)
    measure(workload, 60.0)


if __name__ == "__main__":
    main()
