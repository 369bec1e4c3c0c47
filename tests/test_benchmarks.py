"""The load is what it says it is: so many points, at the time asked for; values move, and processes change."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from benchmarks.workloads import START_NS, WORKLOADS, Template
from gateway.forward.stand_in import StandIn
from tests.promises.gateway import ROOT, GatewayProcess


def _points(body: bytes) -> Iterator[tuple[str, object]]:
    for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in (*metric.gauge.data_points, *metric.histogram.data_points):
                    yield metric.name, point


def _first(workload: str) -> Template:
    return Template(next(WORKLOADS[workload].build()))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_request_holds_the_points_it_counts_for_at_the_time_asked_for(workload: str) -> None:
    chosen, template = WORKLOADS[workload], _first(workload)
    for lap in (0, 3):
        points = list(_points(template.at(START_NS + lap, lap)))
        assert len(points) == chosen.points_in
        assert {point.time_unix_nano for _, point in points} == {START_NS + lap}  # type: ignore[attr-defined]
        buckets = sum(len(getattr(point, "bucket_counts", ())) + (name.startswith("gpu.")) for name, point in points)
        assert chosen.points_out == (buckets or chosen.points_in)


def test_values_walk_and_a_template_made_anew_walks_the_same_way() -> None:
    one, other = _first("gauges"), _first("gauges")
    bodies = [one.at(START_NS, lap) for lap in range(3)]
    assert bodies == [other.at(START_NS, lap) for lap in range(3)]
    assert len(set(bodies)) == 3


def test_processes_come_and_go() -> None:
    template = _first("fleet")

    def pids(lap: int) -> set[str]:
        found = _points(template.at(START_NS, lap))
        return {
            attribute.value.string_value
            for _, point in found
            for attribute in point.attributes  # type: ignore[attr-defined]
            if attribute.key == "process.pid"
        }

    assert len(pids(0)) == 16
    assert not pids(0) & pids(20)
    assert all(len(pids(lap) - pids(lap - 1)) <= 1 for lap in range(1, 20))


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_what_the_load_generator_says_was_taken_arrives(way: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with StandIn(swallow=True) as guance, GatewayProcess(tmp_path_factory.mktemp("load"), guance.url) as gateway:
        gateway.start()
        url = f"http://{gateway.http}/v1/metrics" if way == "http" else f"grpc://{gateway.grpc}"
        command = [sys.executable, "-m", "benchmarks.load", "--workload", "histograms", "--url", url, "--count", "5"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
        told = json.loads(ran.stdout)
        assert (told["requests"], told["points_out"]) == (5, 17_000)
        assert guance.wait_for(lambda: guance.counts.get("metric") == 17_000)


def test_a_receiver_that_is_not_there_is_counted_not_survived_in_silence() -> None:
    command = [sys.executable, "-m", "benchmarks.load", "--url", "http://127.0.0.1:9/v1/metrics", "--count", "3"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT).stdout)
    assert told["requests"] == 0
    assert told["statuses"] == {"ConnectionRefusedError": 3}
