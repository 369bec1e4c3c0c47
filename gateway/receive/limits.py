"""How much may be on its way at once, over all receivers together."""

from __future__ import annotations

import threading

from gateway.model import Reason, Refusal

RETRY_AFTER_S = 1.0
COMMIT_TIMEOUT_S = 60.0
"""How long a request waits for the disk before its sender is told to try again."""


class Budget:
    """Bytes and requests in flight: being read, inflated, understood, or waiting for the disk. Thread-safe."""

    def __init__(self, max_bytes: int, max_requests: int) -> None:
        self._max_bytes = max_bytes
        self._max_requests = max_requests
        self._bytes = 0
        self._requests = 0
        self._lock = threading.Lock()

    @property
    def bytes_in_flight(self) -> int:
        return self._bytes

    def admit(self) -> Admission:
        """A place for one request. Raises ``Refusal`` (OVERLOADED) when there is none."""
        with self._lock:
            if self._requests >= self._max_requests:
                raise Refusal(
                    Reason.OVERLOADED, f"{self._requests} requests are in flight, no more are taken", RETRY_AFTER_S
                )
            self._requests += 1
        return Admission(self)

    def _take(self, size: int) -> None:
        with self._lock:
            # one request alone may always go on: its own limit bounds it
            if self._bytes + size > self._max_bytes and self._bytes:
                raise Refusal(
                    Reason.OVERLOADED,
                    f"{self._bytes} bytes of requests are in flight, {self._max_bytes} are allowed",
                    RETRY_AFTER_S,
                )
            self._bytes += size

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._bytes -= size
            self._requests -= 1


class Admission:
    """One request's share of the budget, given back when the ``with`` block ends."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bytes = 0

    def take(self, size: int) -> None:
        """Count ``size`` more bytes. Raises ``Refusal`` (OVERLOADED)."""
        self._budget._take(size)
        self._bytes += size

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget._give_back(self._bytes)
        self._bytes = 0
