"""kill -9 loses nothing that was acknowledged, and sends nothing under two ids; and the checkers can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises import oracle
from tests.promises.kill import campaign
from tests.promises.oracle import Arrival, Promised

A, B, C = ("metric", 1), ("metric", 2), ("logging", 1)


@pytest.mark.slow
def test_six_kills_under_load_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    result = campaign(6, tmp_path, seed=7, longest_s=1.0)
    assert result.acknowledged > 100
    assert result.kept, result


def test_a_point_that_never_came_is_lost() -> None:
    assert oracle.lost(Promised({A, B, C}), [Arrival("dk_1", (A, C))]) == {B}


def test_a_point_that_was_not_acknowledged_is_not_lost() -> None:
    assert not oracle.lost(Promised({A}, {B}), [Arrival("dk_1", (A,))])


def test_a_point_under_two_package_ids_is_doubled() -> None:
    assert oracle.doubled([Arrival("dk_1", (A,)), Arrival("dk_2", (A, B))]) == {A: {"dk_1", "dk_2"}}


def test_a_point_twice_in_one_package_is_doubled() -> None:
    assert oracle.doubled([Arrival("dk_1", (A, B, A))]) == {A: {"dk_1"}}


def test_the_same_package_again_is_not_doubled() -> None:
    assert not oracle.doubled([Arrival("dk_1", (A, B)), Arrival("dk_1", (A, B))])


def test_a_package_that_comes_with_other_points_is_changed() -> None:
    found = oracle.changed([Arrival("dk_1", (A,)), Arrival("dk_1", (A, B))])
    assert found == {"dk_1": "metric: 1 points, then 2; 1 new, 0 missing"}


def test_a_package_that_comes_in_another_order_is_changed() -> None:
    found = oracle.changed([Arrival("dk_1", (A, B)), Arrival("dk_1", (B, A))])
    assert found == {"dk_1": "metric: the same 2 points in another order"}


def test_a_point_that_nobody_sent_is_invented() -> None:
    assert oracle.invented(Promised({A}, {B}), [Arrival("dk_1", (A, B, C))]) == {C}
