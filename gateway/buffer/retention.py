"""How much the buffer may hold: which sealed segments go, and when new data has to be refused.

Whole segments go, the oldest first, and those first that every sink has delivered. What is not delivered goes only
where the operator says so (``when_full = "drop_oldest"``); otherwise new data is refused until there is room. By age,
too, nothing goes that a sink still has to deliver, unless the operator says so. What was imported counts as not
delivered: nobody knows whether it was replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.buffer.segment import Segment
from gateway.config import BufferSettings


@dataclass(frozen=True, slots=True)
class Held:
    """A sealed segment as retention sees it. ``last_batch``: None for one that was imported, which no sink waits for;
    its ``last_received_ns`` is when it came here."""

    segment: Segment
    bytes: int
    points: int
    last_batch: int | None
    last_received_ns: int


@dataclass(frozen=True, slots=True)
class Usage:
    """``used_bytes``: of all segments, the open one too. ``delivered_through``: the last batch that every sink has
    delivered; None where there is no sink."""

    used_bytes: int
    free_disk_bytes: int
    delivered_through: int | None
    now_ns: int


@dataclass(frozen=True, slots=True)
class Doomed:
    held: Held
    delivered: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to delete; then why new data is refused, or None; and whether the open segment should be closed, since only
    closed ones can be deleted."""

    doomed: tuple[Doomed, ...]
    full: str | None
    roll: bool


def plan(sealed: Sequence[Held], usage: Usage, settings: BufferSettings) -> Plan:
    """What the budgets ask for. ``sealed``: the oldest first."""
    drop = settings.when_full == "drop_oldest"
    doomed = _expired(sealed, usage, settings, drop)
    gone = {each.held.segment.path for each in doomed}
    over, reason = _over(usage, settings)
    freed = sum(each.held.bytes for each in doomed)
    kept = [held for held in sealed if held.segment.path not in gone]
    delivered = [held for held in kept if _is_delivered(held, usage)]
    undelivered = [held for held in kept if not _is_delivered(held, usage)] if drop else []
    for held in (*delivered, *undelivered):
        if freed >= over:
            break
        doomed.append(Doomed(held, _is_delivered(held, usage), reason))
        freed += held.bytes
    short = freed < over
    return Plan(tuple(doomed), _full(usage, settings, over - freed) if short else None, short)


def _is_delivered(held: Held, usage: Usage) -> bool:
    if held.last_batch is None or usage.delivered_through is None:
        return False
    return held.last_batch <= usage.delivered_through


def _is_awaited(held: Held, usage: Usage) -> bool:
    """Whether a sink still has to deliver it."""
    return usage.delivered_through is not None and held.last_batch is not None and not _is_delivered(held, usage)


def _expired(sealed: Sequence[Held], usage: Usage, settings: BufferSettings, drop: bool) -> list[Doomed]:
    if not settings.max_age_s:
        return []
    limit_ns = usage.now_ns - int(settings.max_age_s * 1e9)
    return [
        Doomed(held, _is_delivered(held, usage), "max_age")
        for held in sealed
        if held.last_received_ns < limit_ns and (drop or not _is_awaited(held, usage))
    ]


def _over(usage: Usage, settings: BufferSettings) -> tuple[int, str]:
    """Bytes that have to go, and which budget asks for it."""
    by_size = usage.used_bytes - settings.max_bytes + 1 if settings.max_bytes else 0
    by_disk = settings.min_free_disk_bytes - usage.free_disk_bytes
    if by_disk > by_size:
        return max(by_disk, 0), "min_free_disk"
    return max(by_size, 0), "max_bytes"


def _full(usage: Usage, settings: BufferSettings, missing: int) -> str:
    if settings.max_bytes and usage.used_bytes >= settings.max_bytes:
        return (
            f"{usage.used_bytes} bytes are held and buffer.max_bytes is {settings.max_bytes}; it goes on when the "
            'sinks have delivered, with a larger max_bytes, or with buffer.when_full = "drop_oldest"'
        )
    return (
        f"{usage.free_disk_bytes} bytes are free on the disk and buffer.min_free_disk_bytes is "
        f"{settings.min_free_disk_bytes}; free {missing} bytes"
    )
