"""A real gateway in a process of its own, to be killed, stopped and started again on one data directory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_CONF = """\
[receive]
grpc = ["127.0.0.1:0"]
http = ["127.0.0.1:0"]
api = ["127.0.0.1:0"]

[dataway]
timeout_s = "5s"
"""


class GatewayProcess:
    """``start`` waits for the ready line; ``grpc``, ``http`` and ``api`` are HOST:PORT then. As a context manager it
    leaves no process behind, however the test ends. ``conf`` goes on in the section ``[dataway]``."""

    def __init__(
        self, place: Path, dataway: str | None, conf: str = "", environment: dict[str, str] | None = None
    ) -> None:
        self.conf_dir, self.data_dir = place / "conf", place / "data"
        self.conf_dir.mkdir(exist_ok=True)
        soon = "" if "flush_interval_s" in conf else 'flush_interval_s = "100ms"\n'
        (self.conf_dir / "locum.toml").write_text(_CONF + soon + conf)
        self.environment = dict(os.environ) | (environment or {})
        if dataway:
            self.environment["ENV_DATAWAY"] = dataway
        self.grpc = self.http = self.api = ""
        self.log: list[str] = []
        self._logged = threading.Condition()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> GatewayProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, timeout_s: float = 30.0) -> float:
        """Seconds from the start of the process to its ready line. Raises ``RuntimeError`` with its log."""
        began = time.monotonic()
        process = self.launch()
        assert process.stdout is not None
        guard = threading.Timer(timeout_s, process.kill)
        guard.start()
        line = process.stdout.readline()
        guard.cancel()
        if not line.startswith("locum ready"):
            process.wait(5)
            raise RuntimeError("the gateway did not start:\n" + "\n".join(self.log[-20:]))
        found = dict(re.findall(r"(\w+)=([^ ,\n]+)", line))
        self.grpc, self.http, self.api = found["grpc"], found["http"], found["api"]
        return time.monotonic() - began

    def launch(self) -> subprocess.Popen[str]:
        """Start the process and wait for nothing."""
        command = [sys.executable, "-m", "gateway.cli", "run"]
        command += ["--conf", str(self.conf_dir), "--data", str(self.data_dir)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment, cwd=ROOT
        )
        threading.Thread(target=self._read_log, args=(self._process,), daemon=True).start()
        return self._process

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            with self._logged:
                self.log.append(line.rstrip())
                self._logged.notify_all()

    def wait_for_log(self, text: str, timeout_s: float = 20.0) -> bool:
        """Wait until a line of the log has ``text``; whether one has."""
        with self._logged:
            return self._logged.wait_for(lambda: any(text in line for line in self.log), timeout_s)

    def kill(self) -> None:
        """As the power cut does it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def terminate(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; the exit code. Raises ``subprocess.TimeoutExpired``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout_s)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid
