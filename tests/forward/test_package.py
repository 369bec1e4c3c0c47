"""Bodies of points taken apart: halved without loss, and written as DataKit's line protocol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.forward.package import as_lines, halves, point_ends
from gateway.model import CATEGORY_OF, Category, Signal
from tests.data import golden_cases
from tests.forward.made import body_of, framed, point, spelled, unwritable
from tests.otlp.deviations import DEVIATIONS
from tests.otlp.events import case_request, case_settings, flatten
from tests.otlp.points import events, golden_request, golden_settings

SIZES = st.lists(st.sampled_from([0, 1, 100, 127, 128, 20_000]), min_size=2, max_size=30)


@given(SIZES)
def test_two_halves_are_the_whole(sizes: list[int]) -> None:
    parts = [framed(bytes(size)) for size in sizes]
    body = b"".join(parts)
    assert point_ends(body) == [sum(map(len, parts[: at + 1])) for at in range(len(parts))]
    (first, n_first), (second, n_second) = halves(body)
    assert first + second == body
    assert (len(point_ends(first)), len(point_ends(second))) == (n_first, n_second)
    assert n_first + n_second == len(sizes)
    assert n_first > 0
    assert abs(n_first - n_second) <= 1


def test_nothing_has_no_points() -> None:
    assert point_ends(b"") == []
    assert as_lines(b"", Category.METRIC) == (b"", b"", [])


def test_points_that_lines_cannot_write_are_left() -> None:
    mixed = body_of(point("a"), unwritable(), point("b"), unwritable())
    lines, writable, left = as_lines(mixed, Category.METRIC)
    assert [text.split(b" ")[1] for text in lines.splitlines()] == [b"a=1.5", b"b=1.5"]
    assert writable == body_of(point("a"), point("b"))
    assert left == [body_of(unwritable())] * 2
    assert all(len(spelled(raw)) == 1 for raw in left)


LINES = {case["name"]: case for case in golden_cases("p_lineproto_") if case["name"] not in DEVIATIONS}


@pytest.mark.parametrize("name", LINES)
def test_lines_are_datakits_lines(name: str) -> None:
    """A text that holds a raw newline counts as two lines in the golden files, and here."""
    case = LINES[name]
    signal = case["request"]["signal"]
    category = CATEGORY_OF[Signal[signal.upper()]]
    if signal == "metrics":
        found, _ = events(golden_request(case), golden_settings(case))
    else:
        found, _ = flatten(case_request(case), *case_settings(case))
    lines, _, left = as_lines(body_of(*found), category)
    assert not left
    assert sorted(lines.decode().splitlines()) == sorted(each["line"] for each in case["points"])
