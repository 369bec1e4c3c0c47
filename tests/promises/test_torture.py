"""A little of the fault campaign (`make torture` runs all of it), and that its books can tell what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises.kill import Scene
from tests.promises.oracle import Arrival
from tests.promises.torture import HARMS, Outcome, books, markdown, run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torn_tail", "flip_journal", "harm_cursor", "second_gateway"])
def test_once_each(tmp_path: Path, name: str) -> None:
    found = run(name, tmp_path, 3, scale=0.01)
    assert found.acknowledged > 1000
    assert not found.broken


def test_the_books_tell_what_was_lost_doubled_changed_and_invented(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1)
    scene.promised.acknowledged |= {("metric", 1), ("metric", 2)}
    scene.arrivals += [Arrival("a", (("metric", 2),)), Arrival("b", (("metric", 2),)), Arrival("b", (("metric", 9),))]
    found = Outcome("")
    books(scene, found)
    assert (found.acknowledged, found.lost, found.doubled) == (2, 1, 1)
    assert ["two ids" in found.broken[0], found.broken[1][:2], "nobody sent" in found.broken[2]] == [True, "b:", True]


def test_the_table_sums_up() -> None:
    text = markdown([Outcome("one", 2, 2, 10), Outcome("two", 3, 1, 5, broken=["why"])])
    assert "| two | 3 | 1 | 5 | 0 | 0 | 0 |  | why |" in text
    assert "| **all** | 5 | 3 | 15 | 0 | 0 | 0 |" in text
    assert len({harm for harm, _, _ in HARMS}) == len(HARMS)
