"""The yardstick: what a plain parse by protobuf's own C library (upb) costs here and now, for the same requests."""

from __future__ import annotations

import time

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from benchmarks.workloads import START_NS, Workload


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
