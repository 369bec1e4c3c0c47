"""The table of definitions: what it holds, what has still to be said, and that sharing never loses a copy."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.buffer.record import Distributions, Numbers, pack_columns, pack_events, read_definitions
from gateway.model import Kind, Series
from gateway.series import TRANSIENT, SeriesTable


def definition(name: str, kind: Kind = Kind.DOUBLE) -> bytes:
    return Series("m", name, (("host", "h"),), kind).pack()


def body(numbers: list[int], distributions: list[int] | None = None) -> bytes:
    """A batch with one row for each series id."""
    n, d = len(numbers), len(distributions or ())
    zeros = np.zeros(n, "<i8")
    rows = Numbers(np.array(numbers, "<u4"), zeros, zeros, np.zeros(n, "<u8"))
    if not distributions:
        return pack_columns(rows)
    counts, times, floats = np.zeros(d, "<u4"), np.zeros(d, "<i8"), np.zeros(d, "<f8")
    return pack_columns(
        rows,
        Distributions(
            np.array(distributions, "<u4"),
            np.zeros(d, "<u1"),
            counts,
            counts,
            times,
            times,
            np.zeros(d, "<u8"),
            floats,
            floats,
            floats,
            np.empty(0, "<u8"),
            np.empty(0, "<f8"),
        ),
    )


def said(table: SeriesTable, rows: bytes) -> dict[int, bytes]:
    return dict(read_definitions(table.undefined(rows)))


def test_a_definition_is_held_and_given_back() -> None:
    table = SeriesTable()
    table.define(0, definition("a"))
    table.define(5_000, definition("b"))
    assert (table.definition(0), table.definition(5_000)) == (definition("a"), definition("b"))
    assert (table.count, table.size_bytes) == (2, len(definition("a")) + len(definition("b")))


@pytest.mark.parametrize("series", [0, 1, 1_023, 1_024, 2**31, 2**32 - 1])
def test_an_id_without_a_definition_is_a_key_error(series: int) -> None:
    table = SeriesTable()
    table.define(7, definition("a"))
    with pytest.raises(KeyError, match=str(series)):
        table.definition(series)


@pytest.mark.parametrize("series", [TRANSIENT, TRANSIENT + 1, 2**32 - 1])
def test_a_transient_series_has_no_place(series: int) -> None:
    table = SeriesTable()
    with pytest.raises(ValueError, match="transient"):
        table.define(series, definition("a"))
    assert (table.count, table.size_bytes) == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        definition("a")[:23],
        definition("a")[:-1],
        definition("a") + b"\0",
        definition("a")[:12] + struct.pack("<I", 2**32 - 1) + definition("a")[16:],
        definition("a")[:20] + struct.pack("<I", 2**29) + definition("a")[24:],
    ],
    ids=["empty", "cut header", "cut", "too long", "head of 4 GiB", "4 GiB of bounds"],
)
def test_a_definition_whose_sizes_do_not_add_up_is_refused(wrong: bytes) -> None:
    table, other = SeriesTable(), SeriesTable()
    with pytest.raises(ValueError, match="definition of"):
        table.define(1, wrong)
    with pytest.raises(ValueError, match="definition of"):
        table.share(1, wrong, other)
    assert table.count == 0


def test_a_later_definition_takes_the_place_of_the_earlier_one() -> None:
    table = SeriesTable()
    table.define(3, definition("short"))
    assert said(table, body([3])) == {3: definition("short")}
    table.define(3, definition("a much longer name"))
    assert table.definition(3) == definition("a much longer name")
    assert (table.count, table.size_bytes) == (1, len(definition("a much longer name")))
    assert said(table, body([3])) == {3: definition("a much longer name")}, "it has not been said yet"


def test_a_series_is_said_once_an_epoch() -> None:
    table = SeriesTable()
    for series in range(3):
        table.define(series, definition(f"m{series}"))
    assert said(table, body([0, 1, 0, 0])) == {0: definition("m0"), 1: definition("m1")}
    assert said(table, body([0, 1, 2])) == {2: definition("m2")}
    assert table.undefined(body([2, 1, 0])) == b""
    table.next_epoch()
    assert said(table, body([2])) == {2: definition("m2")}
    assert said(table, body([0, 1, 2])) == {0: definition("m0"), 1: definition("m1")}


def test_what_did_not_reach_the_journal_is_said_again_in_the_same_epoch() -> None:
    table = SeriesTable()
    table.unsay()
    table.define(0, definition("a"))
    epoch = table.epoch
    assert said(table, body([0])) == {0: definition("a")}
    table.unsay()
    assert said(table, body([0])) == {0: definition("a")}
    assert table.undefined(body([0])) == b""
    assert table.epoch == epoch


def test_series_are_said_in_the_order_of_their_use_numbers_first() -> None:
    table = SeriesTable()
    for series in range(6):
        table.define(series, definition(f"m{series}"))
    assert list(said(table, body([4, 1, 4], [5, 0, 1]))) == [4, 1, 5, 0]


def test_transient_series_and_events_have_nothing_to_say() -> None:
    table = SeriesTable()
    assert table.undefined(body([TRANSIENT, TRANSIENT + 7], [TRANSIENT + 9])) == b""
    assert table.undefined(pack_events([(2, 5, b"point")])) == b""
    assert table.undefined(pack_columns()) == b""


@pytest.mark.parametrize("series", [1, 1_500, TRANSIENT - 1])
def test_a_row_of_an_unknown_series_is_a_key_error(series: int) -> None:
    table = SeriesTable()
    table.define(0, definition("a"))
    for rows in (body([0, series]), body([0], [series])):
        with pytest.raises(KeyError, match=str(series)):
            table.undefined(rows)


@pytest.mark.parametrize("size", [0, 1, 23, 24, 25, 60])
def test_a_body_shorter_than_its_counts_is_a_value_error(size: int) -> None:
    table = SeriesTable()
    table.define(0, definition("a"))
    with pytest.raises(ValueError, match="body"):
        table.undefined(body([0] * 10, [0] * 10)[:size])


def test_counts_that_lie_read_nothing_beyond_the_body() -> None:
    table = SeriesTable()
    for counts in ((2**32 - 1, 0), (0, 2**32 - 1), (2**32 - 1, 2**32 - 1)):
        with pytest.raises(ValueError, match="body"):
            table.undefined(struct.pack("<6I", *counts, 0, 0, 0, 0) + bytes(64))


def test_a_shared_definition_outlives_the_table_that_had_it_first() -> None:
    first, second = SeriesTable(), SeriesTable()
    first.define(1, definition("a"))
    second.share(1, definition("a"), first)
    first.forget()
    assert (first.count, first.size_bytes) == (0, 0)
    with pytest.raises(KeyError):
        first.definition(1)
    assert second.definition(1) == definition("a")
    del first
    assert (second.definition(1), second.count) == (definition("a"), 1)
    second.share(1, definition("a"), second)
    assert second.definition(1) == definition("a")


def test_what_the_other_table_has_otherwise_is_not_taken_from_it() -> None:
    first, second = SeriesTable(), SeriesTable()
    first.define(1, definition("new"))
    second.share(1, definition("old"), first)
    second.share(2, definition("more"), first)
    assert (second.definition(1), second.definition(2)) == (definition("old"), definition("more"))
    assert first.definition(1) == definition("new")


NAMES = st.sampled_from(["a", "b", "a longer one", "c" * 200])
IDS = st.sampled_from([0, 1, 2, 1_023, 1_024, 4_000])
STEPS = st.one_of(
    st.tuples(st.just("define"), st.booleans(), IDS, NAMES),
    st.tuples(st.just("share"), st.booleans(), IDS, NAMES),
    st.tuples(st.just("forget"), st.booleans()),
    st.tuples(st.just("epoch"), st.booleans()),
    st.tuples(st.just("unsay"), st.booleans()),
    st.tuples(st.just("say"), st.booleans(), st.lists(IDS, max_size=6), st.lists(IDS, max_size=6)),
)


class Plain:
    """What a table should be: two dictionaries and no sharing."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}
        self.unsaid: set[int] = set()

    def define(self, series: int, what: bytes) -> None:
        self.held[series] = what
        self.unsaid.add(series)


@settings(max_examples=200)
@given(st.lists(STEPS, max_size=40))
def test_two_tables_that_share_behave_like_dictionaries_that_do_not(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    tables, plain = (SeriesTable(), SeriesTable()), (Plain(), Plain())
    for verb, which, *rest in steps:
        table, expected, other = tables[which], plain[which], tables[not which]
        if verb == "define":
            table.define(rest[0], definition(rest[1]))
            expected.define(rest[0], definition(rest[1]))
        elif verb == "share":
            what = definition(rest[1])
            same = expected.held.get(rest[0]) == what == plain[not which].held.get(rest[0])
            table.share(rest[0], what, other)
            expected.held[rest[0]] = what
            if not same:
                expected.unsaid.add(rest[0])
            elif rest[0] not in expected.unsaid:
                table.undefined(body([rest[0]]))  # the same again: whether it is said again is the table's affair
        elif verb == "forget":
            table.forget()
            expected.__init__()  # type: ignore[misc]
        elif verb in ("epoch", "unsay"):
            table.next_epoch() if verb == "epoch" else table.unsay()
            expected.unsaid = set(expected.held)
        else:
            used = dict.fromkeys([*rest[0], *rest[1]])
            if used.keys() <= expected.held.keys():
                assert said(table, body(*rest)) == {
                    series: expected.held[series] for series in used if series in expected.unsaid
                }
                expected.unsaid -= used.keys()
        for each, wanted in zip(tables, plain, strict=True):
            assert (each.count, each.size_bytes) == (len(wanted.held), sum(map(len, wanted.held.values())))
            assert {series: each.definition(series) for series in wanted.held} == wanted.held
