"""How a gateway ends, and how it does not begin: signals, a second process, a port in use, a disk that is full."""

from __future__ import annotations

import http.client
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.forward.stand_in import StandIn, Taken
from tests.promises import oracle
from tests.promises.gateway import ROOT, GatewayProcess
from tests.promises.kill import Senders, arrival, promises, request
from tests.promises.oracle import Arrival, Promised


def _locum(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=dict(os.environ) | (environment or {}),
    )


def _post(at: str, body: bytes, path: str = "/v1/metrics") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(at, timeout=20)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/x-protobuf"})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def _get(at: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(at, timeout=20)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_sigterm_under_load_ends_within_ten_seconds_and_loses_nothing(tmp_path: Path) -> None:
    promised, arrivals = Promised(), list[Arrival]()
    lock = threading.Lock()

    def on_request(taken: Taken) -> None:
        with lock:
            arrivals.append(arrival(taken))

    with StandIn(on_request=on_request) as guance, GatewayProcess(tmp_path, guance.url) as gateway:
        gateway.start()
        senders = Senders(promised, itertools.count(1), 5)
        senders.start(gateway.http, gateway.grpc)
        time.sleep(1.0)
        began = time.monotonic()
        assert gateway.terminate() == 0
        assert time.monotonic() - began < 10
        senders.stop()
        gateway.start()
        assert guance.wait_for(lambda: not oracle.lost(promised, list(arrivals)), 30)
        gateway.terminate()
    assert promised.acknowledged
    assert not oracle.doubled(arrivals)


def test_a_second_gateway_on_one_data_directory_is_told_which_process_has_it(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, None) as gateway:
        gateway.start()
        second = _locum("run", "--conf", str(gateway.conf_dir), "--data", str(gateway.data_dir))
        assert second.returncode == 2
        assert str(gateway.pid) in second.stderr
        assert "Traceback" not in second.stderr
        assert _post(gateway.http, request("metric", [1]))[0] == 200


def test_questions_are_answered_by_the_running_gateway_and_from_its_files_when_it_is_gone(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, None) as gateway:
        gateway.start()
        assert _post(gateway.http, request("metric", [41, 42]))[0] == 200
        places = ("--conf", str(gateway.conf_dir), "--data", str(gateway.data_dir))
        sql = "SELECT sum(int_value)::BIGINT AS total FROM samples"
        running = _locum("query", sql, "--json", *places)
        tapped = _locum("tap", "--last", "2", "--no-follow", "--metric", "promise.*", *places)
        status = _locum("buffer", "status", *places)
        gateway.terminate()
    assert '"rows": [[83]]' in running.stdout, running.stderr
    assert tapped.stdout.count("promise.number=4") == 2, tapped.stderr
    assert "no sinks" in status.stdout, status.stderr
    assert '"rows": [[83]]' in _locum("query", sql, "--json", *places).stdout


def test_a_port_in_use_is_one_clear_line_and_exit_code_two(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "locum.toml").write_text(
            f'[receive]\nhttp = ["127.0.0.1:{port}"]\ngrpc = ["127.0.0.1:0"]\napi = ["127.0.0.1:0"]\n'
        )
        told = _locum("run", "--conf", str(tmp_path), "--data", str(tmp_path / "data"))
    assert told.returncode == 2
    assert f"127.0.0.1:{port}" in told.stderr.splitlines()[-1]
    assert "Traceback" not in told.stderr


def test_a_bad_configuration_names_file_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "locum.toml").write_text('[buffer]\nsegment_byte = "1GB"\n')
    told = _locum("run", "--conf", str(tmp_path), "--data", str(tmp_path / "data"))
    assert told.returncode == 2
    assert f"{tmp_path}/locum.toml:2:1" in told.stderr
    assert "segment_bytes" in told.stderr


def test_a_data_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    told = _locum("run", "--conf", str(tmp_path), "--data", str(blocked / "data"))
    assert told.returncode == 2
    assert str(blocked) in told.stderr
    assert "Traceback" not in told.stderr


def test_sighup_reloads_without_dropping_a_request(tmp_path: Path) -> None:
    promised, arrivals = Promised(), list[Arrival]()
    with (
        StandIn(on_request=lambda taken: arrivals.append(arrival(taken))) as guance,
        GatewayProcess(tmp_path, guance.url) as gateway,
    ):
        gateway.start()
        senders = Senders(promised, itertools.count(1), 9)
        senders.start(gateway.http, gateway.grpc)
        for tags in ('["team"]', '["team", "hw.id"]'):
            time.sleep(0.4)
            conf = (gateway.conf_dir / "locum.toml").read_text().partition("[policy]")[0]
            (gateway.conf_dir / "locum.toml").write_text(f"{conf}[policy]\ncustomer_tags = {tags}\n")
            os.kill(gateway.pid, signal.SIGHUP)
        time.sleep(0.8)
        senders.stop()
        assert guance.wait_for(lambda: not oracle.lost(promised, list(arrivals)), 30)
        assert gateway.terminate() == 0
    assert sum("event=reloaded" in line for line in gateway.log) == 2
    assert not promised.uncertain
    assert not oracle.doubled(arrivals)


@contextmanager
def _small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_refuses_with_a_hint_loses_nothing_and_recovers(tmp_path: Path) -> None:
    promised, arrivals = Promised(), list[Arrival]()
    with _small_disk(tmp_path / "disk", "16m") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(12 << 20))
        settings = '\n[buffer]\nmin_free_disk_bytes = "1MB"\n'
        with (
            StandIn(on_request=lambda taken: arrivals.append(arrival(taken))) as guance,
            GatewayProcess(disk, guance.url, settings) as gateway,
        ):
            gateway.start()
            number = itertools.count(1)
            status = 200
            until = time.monotonic() + 30
            while status == 200 and time.monotonic() < until:
                numbers = list(itertools.islice(number, 2000))
                status, headers, body = _post(gateway.http, request("metric", numbers))
                points = promises("metric", numbers)
                (promised.acknowledged if status == 200 else promised.uncertain).update(points)
            assert status == 503, body
            assert int(headers["retry-after"]) >= 1
            ready, why = _get(gateway.api, "/readyz")
            assert ready == 503
            assert "buffer" in why
            ballast.unlink()
            until = time.monotonic() + 15
            while _post(gateway.http, request("metric", [next(number)]))[0] != 200:
                assert time.monotonic() < until, "it did not recover"
                time.sleep(0.2)
            assert guance.wait_for(lambda: not oracle.lost(promised, list(arrivals)), 20)
            assert gateway.terminate() == 0
    assert not oracle.doubled(arrivals)
