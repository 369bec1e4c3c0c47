"""Minute by minute, turns the metrics that were made of spans into batches."""

from __future__ import annotations

import threading

from gateway.intake import Intake

INTERVAL_S = 60.0
"""DataKit's (details, 6)."""


class Minutes:
    """A thread that has the intake submit its tracing metrics every ``interval_s``, and once more at the stop."""

    def __init__(self, intake: Intake, interval_s: float = INTERVAL_S) -> None:
        self._intake = intake
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="minutes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Submit what was counted since the last minute, and end. The writer has to run still."""
        self._stop.set()
        self._thread.join()
        self._submit()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._submit()

    def _submit(self) -> None:
        self._intake.submit_tracing_metrics(self._intake.generation)
