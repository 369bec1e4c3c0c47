"""What the receivers know of the gateway behind them: a function that takes a request, and a ticket for its answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from gateway.model import Sender, Signal, Wire


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that was understood. ``done`` resolves when it is on disk and synced, or raises ``Refusal``.

    ``rejected`` and ``message`` become ``partial_success``; a message without rejections is a warning.
    """

    done: Future[int]
    rejected: int = 0
    message: str = ""


Accept = Callable[[Signal, Wire, bytes, Sender], Ticket]
"""Understand a request (its inflated body) and queue it. Quick, no IO. Raises ``Refusal`` for the whole of it."""
