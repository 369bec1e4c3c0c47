"""``make bench``: each workload against a fresh gateway, a Dataway that swallows, and the yardstick in the same run.

CPU is the gateway's own (user and system, from the kernel's accounting), from the first request until everything is
delivered and the gateway has come to rest. Sealing is counted apart (the thread ``index``): segments that become full
during the run, and what is left open, which a second start on the same data seals. The yardstick is measured before
and after; the ratio uses the mean of the two, so that a machine whose speed drifts is compared with itself. ``--url``
and ``--pid`` measure any other OTLP/HTTP receiver the same way, until it has come to rest.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.workloads import WORKLOADS
from benchmarks.yardstick import measure, measure_in_company

_TICK = os.sysconf("SC_CLK_TCK")
_CONF = '[receive]\ngrpc = ["127.0.0.1:0"]\nhttp = ["127.0.0.1:0"]\napi = ["127.0.0.1:0"]\n'


@dataclass(frozen=True, slots=True)
class Result:
    """One workload, measured. Costs are CPU microseconds a point sent on; sizes are bytes a point sent on. ``seal_us``
    (all sealing, in the run and after it; none of it is in ``cpu_us``) and ``sealed_bytes`` are 0 for a receiver that
    is not ours."""

    workload: str
    transport: str
    accepted: int
    delivered: int
    refused: int
    accepted_points_s: float
    delivered_points_s: float
    delivered_cpu_us: float
    cpu_us: float
    yardstick_us: float
    yardsticks: float
    busy_yardstick_us: float
    busy_yardsticks: float
    p50_ms: float
    p99_ms: float
    peak_mb: float
    load_cpu_us: float
    open_bytes: float
    target: str
    met: bool
    new_series_us: float = 0.0
    seal_us: float = 0.0
    sealed_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured: where to send, whose CPU to read, and, for our own gateway, its Dataway and its files."""

    url: str
    pid: int
    swallow_port: int = 0
    data_dir: Path | None = None


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far, without those of sealing."""
    return _used_s(Path(f"/proc/{pid}")) - sealing_s(pid)


def sealing_s(pid: int) -> float:
    """User and system seconds of the thread that seals."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(_used_s(task) for task in tasks if (task / "comm").read_text() == "index\n")


def _used_s(task: Path) -> float:
    parts = (task / "stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / _TICK


def peak_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


@contextlib.contextmanager
def swallow() -> Iterator[int]:
    """The port of a Dataway that swallows."""
    with _process([sys.executable, "-m", "benchmarks.swallow"], {}) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())


@contextlib.contextmanager
def gateway(place: Path, transport: str, swallow_port: int) -> Iterator[Target]:
    """A gateway on ``place``: fresh at first, then on what lies there."""
    conf, data = place / "conf", place / "data"
    conf.mkdir(exist_ok=True)
    (conf / "locum.toml").write_text(_CONF)
    environment = {"ENV_DATAWAY": f"http://127.0.0.1:{swallow_port}?token=tkn_{'0' * 32}"}
    command = [sys.executable, "-m", "gateway.cli", "run", "--conf", str(conf), "--data", str(data)]
    with _process([*command, "--log-level", "warning"], environment) as process:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if ready[:2] != ["locum", "ready"]:
            raise SystemExit("the gateway did not start")
        addresses = dict(part.split("=") for part in ready[2:])
        url = f"grpc://{addresses['grpc']}" if transport == "grpc" else f"http://{addresses['http']}/v1/metrics"
        yield Target(url, process.pid, swallow_port, data)


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


def wait_for_rest(pid: int, longest_s: float = 60.0) -> float:
    """Wait until a process has used less than a twentieth of a core for two seconds; its CPU seconds by then."""
    before = cpu_s(pid)
    for _ in range(int(longest_s / 2)):
        sealed = sealing_s(pid)
        time.sleep(2.0)
        now = cpu_s(pid)
        if now - before + sealing_s(pid) - sealed < 0.1:
            return now
        before = now
    return before


def run(target: Target, workload: str, transport: str, connections: int, seconds: float) -> Result:
    """Send a workload to ``target``; what it cost, once its series are known."""
    chosen = WORKLOADS[workload]
    before = measure(chosen)
    load = [sys.executable, "-m", "benchmarks.load", "--url", target.url, "--workload", workload]
    load += ["--connections", str(connections)]
    made = delivered = 0
    new_series_us = 0.0
    if chosen.together:  # every series for the first time, measured apart
        began_cpu_s = cpu_s(target.pid)
        made = _told([*load, "--count", str(chosen.together)])["points_out"]
        _wait_for_delivery(target, made)
        new_series_us = (wait_for_rest(target.pid) - began_cpu_s) / max(1, made) * 1e6
    began_cpu_s = cpu_s(target.pid)
    load += ["--first", str(chosen.together)]
    load += ["--count", str(chosen.together)] if chosen.once else ["--seconds", str(seconds)]
    told = _told(load)
    accepted = told["points_out"]
    ended = time.monotonic()
    delivered = _wait_for_delivery(target, made + accepted) - made
    took_s = told["seconds"] + time.monotonic() - ended
    delivered_cpu_s = cpu_s(target.pid) - began_cpu_s
    spent_s = wait_for_rest(target.pid) - began_cpu_s
    yardstick, busy = (before + measure(chosen)) / 2, measure_in_company(chosen)
    a_point, kept = 1 / max(1, accepted), max(1, made + accepted)
    yardsticks, peak = spent_s * a_point * 1e6 / yardstick, peak_mb(target.pid)
    return Result(
        workload, transport, accepted, delivered, sum(told["statuses"].values()) - told["requests"],
        accepted / told["seconds"], delivered / took_s, delivered_cpu_s * a_point * 1e6, spent_s * a_point * 1e6,
        yardstick, yardsticks, busy, spent_s * a_point * 1e6 / busy, told["p50_ms"], told["p99_ms"], peak,
        told["own_cpu_s"] * a_point * 1e6,
        directory_bytes(target.data_dir) / kept if target.data_dir else 0.0, chosen.target,
        yardsticks <= (chosen.max_yardsticks or yardsticks) and peak <= (chosen.max_peak_mb or peak), new_series_us,
        sealing_s(target.pid) / kept * 1e6,
    )  # fmt: skip


def _told(load: list[str]) -> dict[str, Any]:
    """What the load generator says at its end."""
    told: dict[str, Any] = json.loads(subprocess.run(load, stdout=subprocess.PIPE, check=True, text=True).stdout)
    return told


def _wait_for_delivery(target: Target, points: int, longest_s: float = 120.0) -> int:
    """Points that arrived, when all have or none comes any more in time; of a receiver that is not ours, ``points``."""
    if not target.swallow_port:
        return points
    until = time.monotonic() + longest_s
    while (delivered := counts(target.swallow_port)["points"]) < points and time.monotonic() < until:
        time.sleep(0.1)
    return delivered


def seal(place: Path, port: int, points: int) -> tuple[float, float]:
    """Have a second gateway seal what the first left open: CPU microseconds and bytes on disk a point. What a start on
    nothing costs is taken off."""
    segments = place / "data" / "segments"
    with tempfile.TemporaryDirectory(prefix="locum-bench-") as empty, gateway(Path(empty), "http", port) as idle:
        start_s = wait_for_rest(idle.pid)
    with gateway(place, "http", port) as again:
        until = time.monotonic() + 180
        while _unsealed(segments) and time.monotonic() < until:
            time.sleep(0.2)
        spent_s = wait_for_rest(again.pid) - start_s + sealing_s(again.pid)
        size = sum(directory_bytes(path) for path in segments.iterdir() if path.suffix != ".open")
    return spent_s / max(1, points) * 1e6, size / max(1, points)


def _unsealed(segments: Path) -> bool:
    """Whether there is a segment to be sealed, or a journal that is to go: the newest is always open."""
    older = sorted(segments.iterdir())[:-1]
    return any(path.suffix == ".open" or (path / "journal").exists() for path in older)


def directory_bytes(place: Path) -> int:
    size = 0
    for path in place.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size if path.is_file() else 0
    return size


def print_table(results: list[Result]) -> None:
    from gateway.console import table

    columns = (
        "workload", "way", "points/s in", "points/s out", "CPU us/point", "of it to deliver", "new series us",
        "sealing us", "yardstick us", "yardsticks", "busy yardstick us", "busy yardsticks",
        "p50 ms", "p99 ms", "peak MB", "open B/point", "sealed B/point",
        "accepted", "delivered", "refused", "target", "met",
    )  # fmt: skip
    table(columns, map(_row, results))


def _row(r: Result) -> tuple[str, ...]:
    return (
        r.workload, r.transport, f"{r.accepted_points_s:,.0f}", f"{r.delivered_points_s:,.0f}", f"{r.cpu_us:.3f}",
        f"{r.delivered_cpu_us:.3f}", f"{r.new_series_us:.0f}" if r.new_series_us else "", f"{r.seal_us:.3f}",
        f"{r.yardstick_us:.4f}", f"{r.yardsticks:.2f}",
        f"{r.busy_yardstick_us:.4f}", f"{r.busy_yardsticks:.2f}", f"{r.p50_ms:.1f}", f"{r.p99_ms:.1f}",
        f"{r.peak_mb:.0f}",
        f"{r.open_bytes:.1f}", f"{r.sealed_bytes:.2f}", f"{r.accepted:,}", f"{r.delivered:,}", str(r.refused),
        r.target, ("yes" if r.met else "NO") if r.target else "",
    )  # fmt: skip


def run_own(workload: str, transport: str, connections: int, seconds: float) -> Result:
    """``run`` against a gateway started for it, and sealing after that."""
    with tempfile.TemporaryDirectory(prefix="locum-bench-") as place, swallow() as port:
        with gateway(Path(place), transport, port) as target:
            result = run(target, workload, transport, connections, seconds)
        points = result.accepted + WORKLOADS[workload].together * WORKLOADS[workload].points_out
        seal_us, sealed_bytes = seal(Path(place), port, points)
    return replace(result, seal_us=result.seal_us + seal_us, sealed_bytes=sealed_bytes)


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
        load = (workload, told.transport, told.connections, told.seconds)
        results.append(run(Target(told.url, told.pid), *load) if told.url else run_own(*load))
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
