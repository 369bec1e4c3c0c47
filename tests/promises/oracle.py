"""What was promised and what came: every point has a number, and both ends keep a list.

The checkers are pure functions over the two lists, so that each can be shown to fail on a list that is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

Number = tuple[str, int]
"""Category (metric, tracing, logging) and the number of the point."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request that the Dataway took: its package id and the numbers of its points."""

    package_id: str
    numbers: tuple[Number, ...]


@dataclass(slots=True)
class Promised:
    """Numbers by what their senders were told: acknowledged, or neither (killed, refused, no answer)."""

    acknowledged: set[Number] = field(default_factory=set)
    uncertain: set[Number] = field(default_factory=set)


def lost(promised: Promised, arrivals: Iterable[Arrival]) -> set[Number]:
    """Acknowledged numbers that never came."""
    return promised.acknowledged - {number for arrival in arrivals for number in arrival.numbers}


def doubled(arrivals: Iterable[Arrival]) -> dict[Number, set[str]]:
    """Numbers that came under more than one package id, or twice within one package."""
    packages: dict[Number, set[str]] = defaultdict(set)
    for arrival in arrivals:
        for number in arrival.numbers:
            packages[number].add(arrival.package_id)
    found = {number: ids for number, ids in packages.items() if len(ids) > 1}
    for arrival in arrivals:
        if len(set(arrival.numbers)) < len(arrival.numbers):
            seen: set[Number] = set()
            for number in arrival.numbers:
                if number in seen:
                    found[number] = {arrival.package_id}
                seen.add(number)
    return found


def changed(arrivals: Iterable[Arrival]) -> dict[str, str]:
    """Package ids that came with different points, or with the same in another order; and what was different."""
    contents: dict[str, tuple[Number, ...]] = {}
    found: dict[str, str] = {}
    for arrival in arrivals:
        before = contents.setdefault(arrival.package_id, arrival.numbers)
        if before != arrival.numbers:
            found[arrival.package_id] = _difference(before, arrival.numbers)
    return found


def _difference(before: tuple[Number, ...], now: tuple[Number, ...]) -> str:
    more, less = set(now) - set(before), set(before) - set(now)
    category = (before or now)[0][0]
    if not more and not less:
        return f"{category}: the same {len(now)} points in another order"
    return f"{category}: {len(before)} points, then {len(now)}; {len(more)} new, {len(less)} missing"


def invented(promised: Promised, arrivals: Iterable[Arrival]) -> set[Number]:
    """Numbers that came and that nobody sent."""
    sent = promised.acknowledged | promised.uncertain
    return {number for arrival in arrivals for number in arrival.numbers} - sent
