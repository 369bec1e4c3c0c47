"""The vocabulary: a series survives its definition, whatever its texts; losses add up."""

from __future__ import annotations

import struct
from collections import Counter

import pytest
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]
from hypothesis import given
from hypothesis import strategies as st

from gateway.model import (
    CATEGORY_OF,
    MAX_TIME_NS,
    REFUSALS,
    Category,
    ConfigError,
    Kind,
    LocumError,
    Losses,
    Reason,
    Refusal,
    Series,
    Signal,
    SinkError,
    StorageError,
    Temporality,
    point_head,
    read_point_head,
    varint,
)
from gateway.otlp.point import decode_point

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=300)
TAGS = st.lists(st.tuples(TEXTS, TEXTS), max_size=12, unique_by=lambda tag: tag[0]).map(tuple)
BOUNDS = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20, unique=True).map(
    lambda bounds: tuple(sorted(bounds))
)


@st.composite
def all_series(draw: st.DrawFn) -> Series:
    kind = draw(st.sampled_from(Kind))
    return Series(
        measurement=draw(TEXTS),
        field=draw(TEXTS),
        tags=draw(TAGS),
        kind=kind,
        unit=draw(TEXTS),
        temporality=draw(st.sampled_from(Temporality)),
        monotonic=draw(st.booleans()),
        bounds=draw(BOUNDS) if kind is Kind.HISTOGRAM else (),
    )


@given(all_series())
def test_a_series_comes_back_from_its_definition(series: Series) -> None:
    definition = series.pack()
    assert Series.unpack(definition) == series
    assert struct.unpack_from("<Q", definition)[0] == series.key


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 129, 255, 256, 16_383, 16_384, 65_535])
def test_texts_at_every_border_of_the_length_encoding_come_back(size: int) -> None:
    text = "v" * size
    series = Series("m", text, ((text or "k", text), ("other", "x"), ("é" * (size // 2), text)), Kind.INT, text)
    assert Series.unpack(series.pack()) == series


@given(TEXTS, TAGS)
def test_a_head_is_the_beginning_of_a_guance_point(measurement: str, tags: tuple[tuple[str, str], ...]) -> None:
    head = point_head(measurement, tags)
    assert read_point_head(head) == (measurement, tags)
    event = decode_point(head, Category.METRIC)
    assert (event.measurement, tuple(event.tags.items()), dict(event.fields)) == (measurement, tags, {})


def test_the_definition_begins_with_the_24_bytes_that_the_extensions_read() -> None:
    series = Series("m", "f.x", (("host", "h"),), Kind.HISTOGRAM, "ms", Temporality.DELTA, True, (1.0, 2.5))
    definition = series.pack()
    key, kind, temporality, monotonic, reserved, head, field, unit, bounds = struct.unpack_from(
        "<QBBBBIHHI", definition
    )
    assert (key, kind, temporality, monotonic, reserved) == (series.key, 3, 1, 1, 0)
    assert (head, field, unit, bounds) == (len(point_head("m", series.tags)), 3, 2, 2)
    assert len(definition) == 24 + head + field + unit + 8 * bounds
    assert definition[-16:] == struct.pack("<2d", 1.0, 2.5)


KEY_OF_BASE = 5372796039052644920
BASE = Series("m", "f", (("a", "1"), ("b", "2")), Kind.HISTOGRAM, "s", Temporality.DELTA, False, (1.0, 2.0))


def changed(**members: object) -> Series:
    values = {name: getattr(BASE, name) for name in Series.__slots__}
    return Series(**(values | members))


@pytest.mark.parametrize(
    "members",
    [
        {"measurement": "n"},
        {"field": "g"},
        {"kind": Kind.EXPONENTIAL},
        {"temporality": Temporality.CUMULATIVE},
        {"monotonic": True},
        {"bounds": (1.0, 3.0)},
        {"bounds": (1.0,)},
        {"tags": (("a", "1"),)},
        {"tags": (("a", "2"), ("b", "1"))},
        {"tags": (("a", "1b"), ("", "2"))},
        {"measurement": "mf", "field": ""},
    ],
    ids=str,
)
def test_series_that_differ_have_different_keys(members: dict[str, object]) -> None:
    assert changed(**members).key != BASE.key


@given(st.permutations([("a", "1"), ("b", "2"), ("c", "3"), ("d", "")]))
def test_the_order_of_the_tags_does_not_change_the_key(tags: list[tuple[str, str]]) -> None:
    assert changed(tags=tuple(tags)).key == changed(tags=tuple(sorted(tags))).key


def test_the_unit_does_not_change_the_key() -> None:
    assert changed(unit="ms").key == BASE.key


def test_the_key_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert BASE.key == KEY_OF_BASE, "segments on disk hold this number: a new way to count it needs a new version"


@given(st.integers(0, 2**64 - 1))
def test_a_varint_is_protobufs(number: int) -> None:
    assert varint(number) == _VarintBytes(number)


def test_losses_count_by_reason_and_keep_the_first_example() -> None:
    losses = Losses()
    losses.leave_out(Reason.NO_VALUE, "cpu.load")
    losses.leave_out(Reason.NO_VALUE, "cpu.idle", 2)
    losses.leave_out(Reason.STALE, "gone")
    losses.change(Reason.KEY_CUT, "long.key", 4)
    assert losses.left_out == {Reason.NO_VALUE: 3, Reason.STALE: 1}
    assert losses.changed == {Reason.KEY_CUT: 4}
    assert losses.message() == "3 no_value: cpu.load; 1 stale: gone; 4 key_cut: long.key"


def test_a_stale_marker_and_a_changed_text_are_no_rejection() -> None:
    losses = Losses()
    losses.leave_out(Reason.STALE, "gone", 5)
    losses.change(Reason.VALUE_CUT, "text", 3)
    assert losses.rejected == 0
    losses.leave_out(Reason.TIME_RANGE, "early")
    assert losses.rejected == 1


def test_nothing_lost_says_nothing() -> None:
    assert (Losses().message(), Losses().rejected) == ("", 0)


COUNTS = st.dictionaries(st.sampled_from(Reason), st.integers(1, 9), max_size=4)


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_added_losses_are_the_sum_and_leave_the_other_as_it_was(
    ours_out: dict[Reason, int],
    ours_changed: dict[Reason, int],
    theirs_out: dict[Reason, int],
    theirs_changed: dict[Reason, int],
) -> None:
    ours, theirs = losses_of(ours_out, ours_changed, "ours"), losses_of(theirs_out, theirs_changed, "theirs")
    ours.add(theirs)
    assert ours.left_out == Counter(ours_out) + Counter(theirs_out)
    assert ours.changed == Counter(ours_changed) + Counter(theirs_changed)
    assert theirs == losses_of(theirs_out, theirs_changed, "theirs")
    for ours_had, examples in ((ours_out, ours.left_out_examples), (ours_changed, ours.changed_examples)):
        assert all(example == ("ours" if reason in ours_had else "theirs") for reason, example in examples.items())


def losses_of(left_out: dict[Reason, int], changes: dict[Reason, int], example: str) -> Losses:
    losses = Losses()
    for reason, count in left_out.items():
        losses.leave_out(reason, example, count)
    for reason, count in changes.items():
        losses.change(reason, example, count)
    return losses


@pytest.mark.parametrize("reason", REFUSALS, ids=str)
def test_a_refusal_may_be_sent_again_exactly_when_its_status_says_so(reason: Reason) -> None:
    rule = REFUSALS[reason]
    assert rule.retryable == (rule.http == 503) == (rule.grpc == "UNAVAILABLE")
    assert 400 <= rule.http < 600


def test_errors_say_who_can_act_and_are_caught_as_one() -> None:
    refusal = Refusal(Reason.OVERLOADED, "too much waits", 1.5)
    assert (refusal.reason, str(refusal), refusal.retry_after_s) == (Reason.OVERLOADED, "too much waits", 1.5)
    for kind in (ConfigError, Refusal, SinkError, StorageError):
        assert issubclass(kind, LocumError)


def test_every_signal_has_its_category_and_dataways_path() -> None:
    assert {signal.name: CATEGORY_OF[signal].path for signal in Signal} == {
        "METRICS": "metric",
        "TRACES": "tracing",
        "LOGS": "logging",
    }
    assert [int(signal) for signal in Signal] == [1, 2, 3], "the journal holds these numbers"


def test_the_last_time_is_before_duckdbs_infinity() -> None:
    assert MAX_TIME_NS == 2**63 - 2
