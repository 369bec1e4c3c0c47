"""Which segments go, and when new data is refused: rules as tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.buffer.reader import follow
from gateway.buffer.retention import Held, Usage, plan
from gateway.buffer.segment import Segment, State
from gateway.config import BufferSettings
from gateway.model import Refusal
from tests.buffer.made import Number, metrics, running, series, wait_for

HOUR_NS = 3600 * 10**9
HELD = [
    Held(Segment(number, State.SEALED, Path(str(number))), 100, 1000, number * 10, number * HOUR_NS)
    for number in (1, 2, 3)
]
NOW = Usage(used_bytes=350, free_disk_bytes=10_000, delivered_through=None, now_ns=4 * HOUR_NS)
QUIET = BufferSettings(min_free_disk_bytes=0)

RULES = [
    # settings, usage, deleted (number, delivered, reason), full
    ({}, {}, [], False),
    ({"max_bytes": 351}, {}, [], False),
    ({"max_bytes": 350}, {}, [], True),
    ({"max_bytes": 350}, {"delivered_through": 5}, [], True),
    ({"max_bytes": 350}, {"delivered_through": 10}, [(1, True, "max_bytes")], False),
    ({"max_bytes": 200}, {"delivered_through": 30}, [(1, True, "max_bytes"), (2, True, "max_bytes")], False),
    ({"max_bytes": 200}, {"delivered_through": 10}, [(1, True, "max_bytes")], True),
    ({"max_bytes": 350, "when_full": "drop_oldest"}, {}, [(1, False, "max_bytes")], False),
    (
        {"max_bytes": 200, "when_full": "drop_oldest"},
        {"delivered_through": 10},
        [(1, True, "max_bytes"), (2, False, "max_bytes")],
        False,
    ),
    ({"max_bytes": 10, "when_full": "drop_oldest"}, {}, [(n, False, "max_bytes") for n in (1, 2, 3)], True),
    ({"min_free_disk_bytes": 10_001}, {"delivered_through": 30}, [(1, True, "min_free_disk")], False),
    ({"min_free_disk_bytes": 10_001}, {}, [], True),
    ({"max_age_s": 7200.0}, {}, [(1, False, "max_age")], False),
    ({"max_age_s": 7200.0}, {"delivered_through": 0}, [], False),
    ({"max_age_s": 7200.0}, {"delivered_through": 10}, [(1, True, "max_age")], False),
    (
        {"max_age_s": 7200.0, "when_full": "drop_oldest"},
        {"delivered_through": 0},
        [(1, False, "max_age")],
        False,
    ),
    ({"max_age_s": 7200.0, "max_bytes": 350}, {}, [(1, False, "max_age")], False),
]


@pytest.mark.parametrize(("settings", "usage", "deleted", "full"), RULES)
def test_delivered_segments_go_first_and_others_only_when_that_is_wanted(
    settings: dict[str, object], usage: dict[str, object], deleted: list[tuple[int, bool, str]], full: bool
) -> None:
    found = plan(HELD, replace(NOW, **usage), replace(QUIET, **settings))  # type: ignore[arg-type]
    assert [(each.held.segment.number, each.delivered, each.reason) for each in found.doomed] == deleted
    assert (found.full is not None) == full
    assert found.roll == full


def test_the_reason_for_a_full_buffer_names_the_setting() -> None:
    assert "buffer.max_bytes is 350" in str(plan(HELD, NOW, replace(QUIET, max_bytes=350)).full)
    full = plan(HELD, NOW, replace(QUIET, min_free_disk_bytes=10_500)).full
    assert full is not None
    assert "free 500 bytes" in full


def test_a_full_buffer_refuses_until_its_sinks_have_delivered(tmp_path: Path) -> None:
    delivered = 0
    settings = BufferSettings(max_bytes=20_000, min_free_disk_bytes=0)
    with running(tmp_path, [series()], settings, delivered_through=lambda: delivered) as buffer:
        row = metrics([Number(0, at, 1.0) for at in range(100)])

        def refuses() -> bool:
            try:
                buffer.put(row)
            except Refusal as refusal:
                return "buffer.max_bytes" in str(refusal)
            return False

        pruned = buffer.meters.pruned_points.labels("yes", "max_bytes")._value
        wait_for(refuses)
        assert pruned.get() == 0

        def goes_on() -> bool:
            nonlocal delivered
            delivered = buffer.writer.committed().batch
            return not refuses() and pruned.get() > 0

        wait_for(goes_on, 20)
        assert pruned.get() % 100 == 0


def test_a_follower_goes_on_behind_what_was_dropped_and_counts_it(tmp_path: Path) -> None:
    with running(tmp_path, [series()]) as buffer:
        for at in range(3):
            buffer.put(metrics([Number(0, at, 1.0)]), metrics([Number(0, at, 2.0)]))
            buffer.roll()
        for number in (1, 2, 3):
            wait_for(lambda at=number: not buffer.sealed(at).journal.exists())  # type: ignore[misc]
        follower = follow(tmp_path, buffer.writer, 0)
        first = follower.next(1)
        assert first is not None
        assert first.batch == 1
        for number in (1, 2):
            buffer.catalog.delete(buffer.sealed(number))
        second, third = follower.next(1), follower.next(1)
        assert (second and second.batch, third and third.batch) == (2, 5)
        assert follower.lost_batches == 2
