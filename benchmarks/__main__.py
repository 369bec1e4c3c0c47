"""``make bench``: each workload against a fresh gateway, a Dataway that swallows, and the yardstick in the same run.

CPU is the gateway's own (user and system, from the kernel's accounting), from the first request until everything is
delivered. The yardstick is measured before and after; the ratio uses the mean of the two, so that a machine whose speed
drifts is compared with itself. ``--url`` and ``--pid`` measure any other OTLP/HTTP receiver the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.workloads import WORKLOADS
from benchmarks.yardstick import measure

_TICK = os.sysconf("SC_CLK_TCK")
_CONF = '[receive]\ngrpc = ["127.0.0.1:0"]\nhttp = ["127.0.0.1:0"]\napi = ["127.0.0.1:0"]\n'


@dataclass(frozen=True, slots=True)
class Result:
    """One workload, measured. Costs are CPU microseconds a point sent on."""

    workload: str
    transport: str
    accepted_points_s: float
    cpu_us: float
    yardstick_us: float
    yardsticks: float
    p50_ms: float
    p99_ms: float
    peak_mb: float
    delivered: int
    accepted: int
    disk_bytes_a_point: float
    refused: int
    target: str


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured: where to send, whose CPU to read, and, for our own gateway, where its files are."""

    url: str
    pid: int
    swallow_port: int = 0
    data_dir: Path | None = None


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / _TICK


def peak_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


@contextlib.contextmanager
def gateway(transport: str) -> Iterator[Target]:
    """A fresh gateway in a directory of its own, and its Dataway."""
    with tempfile.TemporaryDirectory(prefix="locum-bench-") as place, contextlib.ExitStack() as stack:
        conf, data = Path(place, "conf"), Path(place, "data")
        conf.mkdir()
        (conf / "locum.toml").write_text(_CONF)
        swallow = stack.enter_context(_process([sys.executable, "-m", "benchmarks.swallow"], {}))
        assert swallow.stdout is not None
        port = int(swallow.stdout.readline())
        environment = {"ENV_DATAWAY": f"http://127.0.0.1:{port}?token=tkn_{'0' * 32}"}
        command = [sys.executable, "-m", "gateway.cli", "run", "--conf", str(conf), "--data", str(data)]
        process = stack.enter_context(_process([*command, "--log-level", "warning"], environment))
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if ready[:2] != ["locum", "ready"]:
            raise SystemExit("the gateway did not start")
        addresses = dict(part.split("=") for part in ready[2:])
        url = f"grpc://{addresses['grpc']}" if transport == "grpc" else f"http://{addresses['http']}/v1/metrics"
        yield Target(url, process.pid, port, data)


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def counts(port: int) -> dict[str, int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/counts")
    told: dict[str, int] = json.loads(connection.getresponse().read())
    connection.close()
    return told


def run(target: Target, workload: str, transport: str, connections: int, seconds: float) -> Result:
    chosen = WORKLOADS[workload]
    before = measure(chosen)
    began = cpu_s(target.pid)
    command = [sys.executable, "-m", "benchmarks.load", "--url", target.url, "--workload", workload]
    command += ["--connections", str(connections), "--seconds", str(seconds)]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    delivered = told["points_out"]
    if target.swallow_port:
        until = time.monotonic() + 120
        while (delivered := counts(target.swallow_port)["points"]) < told["points_out"] and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(2.5)  # what is left to index
    spent = cpu_s(target.pid) - began
    after = measure(chosen)
    cost, yardstick = spent / max(1, told["points_out"]) * 1e6, (before + after) / 2
    files = target.data_dir.rglob("*") if target.data_dir else ()
    size = sum(path.stat().st_size for path in files if path.is_file())
    return Result(
        workload, transport, told["points_out"] / told["seconds"], cost, yardstick, cost / yardstick,
        told["p50_ms"], told["p99_ms"], peak_mb(target.pid), delivered, told["points_out"],
        size / max(1, told["points_out"]), sum(told["statuses"].values()) - told["requests"], chosen.target,
    )  # fmt: skip


def print_table(results: list[Result]) -> None:
    from gateway.console import table

    columns = ("workload", "way", "points/s", "CPU us/point", "yardstick us", "yardsticks", "p50 ms", "p99 ms",
               "peak MB", "accepted", "delivered", "refused", "target")  # fmt: skip
    table(
        columns,
        [
            (r.workload, r.transport, f"{r.accepted_points_s:,.0f}", f"{r.cpu_us:.3f}", f"{r.yardstick_us:.4f}",
             f"{r.yardsticks:.2f}", f"{r.p50_ms:.1f}", f"{r.p99_ms:.1f}", f"{r.peak_mb:.0f}", f"{r.accepted:,}",
             f"{r.delivered:,}", r.refused, r.target)
            for r in results
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="all of them unless named")
    parser.add_argument("--transport", choices=("http", "grpc"), default="http")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--url", help="measure another receiver of OTLP/HTTP, as http://HOST:PORT/v1/metrics")
    parser.add_argument("--pid", type=int, help="the process whose CPU is read, with --url")
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args()
    if bool(told.url) != bool(told.pid):
        parser.error("--url and --pid go together")
    results = []
    for workload in told.workload or WORKLOADS:
        with contextlib.nullcontext(Target(told.url, told.pid)) if told.url else gateway(told.transport) as target:
            results.append(run(target, workload, told.transport, told.connections, told.seconds))
        if not told.json:
            print(f"{workload}: {results[-1].yardsticks:.2f} yardsticks", file=sys.stderr)
    if told.json:
        print(json.dumps([asdict(result) for result in results]))
    else:
        print_table(results)
    if any(result.delivered != result.accepted or result.refused for result in results):
        raise SystemExit("not everything that was accepted was delivered, or requests were refused")


if __name__ == "__main__":
    main()
