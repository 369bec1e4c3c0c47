"""The point checker, the protobuf of a point, and its line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.model import Category, Event, FieldValue, Losses, Reason, Unsigned, point_head, read_point_head
from gateway.otlp.point import (
    MAX_FIELDS,
    Entry,
    build_event,
    decode_point,
    decode_points,
    encode_point,
    line,
    number_text,
)


def event(
    tags: dict[str, str] | None = None, fields: dict[str, FieldValue] | None = None, measurement: str = "m"
) -> Event:
    return Event(Category.LOGGING, measurement, tags or {}, fields or {}, 17)


def build(*entries: Entry, category: Category = Category.TRACING, **more: Any) -> tuple[Event, Losses]:
    losses = Losses()
    return build_event(category, "m", entries, 17, losses, **more), losses


TEXTS = st.text(max_size=12)
FIELDS = st.dictionaries(
    TEXTS,
    st.one_of(
        TEXTS,
        st.binary(max_size=8),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.builds(Unsigned, st.integers(0, 2**64 - 1)),
        st.floats(allow_nan=False),
    ),
)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.dictionaries(TEXTS, TEXTS), FIELDS, st.integers(0, 2**63 - 1))
def test_a_point_reads_back_as_it_was(name: str, tags: dict[str, str], fields: Any, time_ns: int) -> None:
    found = Event(Category.TRACING, name, tags, {key: fields[key] for key in fields if key not in tags}, time_ns)
    read = decode_point(encode_point(found), Category.TRACING)
    assert read == found
    assert {key: type(value) for key, value in read.fields.items()} == {
        key: type(value) for key, value in found.fields.items()
    }


def test_zeros_are_spelled_out() -> None:
    zeros: dict[str, FieldValue] = {"i": 0, "u": Unsigned(0), "f": 0.0, "b": False, "d": b"", "s": ""}
    raw = encode_point(event(fields=zeros))
    assert raw.hex() == (
        "0a016d"  # name
        "12050a01691000"
        "12050a01751800"
        "120c0a0166210000000000000000"
        "12050a01622800"
        "12050a01643200"
        "12050a01735a00"
        "1811"
    )
    assert decode_point(raw, Category.LOGGING).fields == zeros


def test_the_head_is_that_of_a_series() -> None:
    """Series and events share one encoding of measurement and tags."""
    raw = encode_point(event(tags={"a": "b", "long": "x" * 300}))
    head = point_head("m", (("a", "b"), ("long", "x" * 300)))
    assert raw == head + b"\x18\x11"
    assert read_point_head(head) == ("m", (("a", "b"), ("long", "x" * 300)))


def test_a_body_holds_many_points() -> None:
    found = [event(fields={"n": number}) for number in range(3)]
    body = b"".join(b"\x0a" + bytes((len(raw),)) + raw for raw in map(encode_point, found))
    assert decode_points(body, Category.LOGGING) == found


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_foreign_bytes_are_a_point_or_a_value_error(raw: bytes) -> None:
    for read in (decode_point, decode_points):
        try:
            read(raw, Category.LOGGING)
        except ValueError as error:
            assert "not a" in str(error)


def test_a_cut_point_is_a_value_error() -> None:
    raw = encode_point(event(tags={"a": "b"}, fields={"message": "text" * 50}))
    with pytest.raises(ValueError, match="not a point"):
        decode_point(raw[:-20], Category.LOGGING)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1.0, "1"),
        (-0.0, "-0"),
        (0.1, "0.1"),
        (1e22, "10000000000000000000000"),
        (1.5e-7, "0.00000015"),
        (1.8446744073709552e19, "18446744073709552000"),
        (123456.789, "123456.789"),
    ],
)
def test_numbers_have_no_exponent(number: float, text: str) -> None:
    assert number_text(number) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_reads_back_as_it_was(number: float) -> None:
    assert float(number_text(number)) == number
    assert "e" not in number_text(number)


def test_a_line_sorts_escapes_and_leaves_out_empty_tags() -> None:
    found = event(
        tags={"z": "a b,c=d", "a,b": "x", "empty": "", "q": '"'},
        fields={
            "s": 'say "hi" \\ \n there',
            "i": -1,
            "u": Unsigned(2**64 - 1),
            "f": 2.5,
            "b": True,
            "a b": "",
            'q"': b"\x00",
        },
        measurement="my app,1=2",
    )
    assert line(found) == (
        'my\\ app\\,1=2,a\\,b=x,q=",z=a\\ b\\,c\\=d '
        'a\\ b="",b=true,f=2.5,i=-1i,q\\"="AA==",s="say \\"hi\\" \\\\ \n there",u=18446744073709551615u 17'
    )


def test_a_line_cannot_say_nan_and_without_fields_there_is_none() -> None:
    assert line(event(fields={"nan": float("nan"), "one": 1})) == "m one=1i 17"
    assert line(event(fields={"inf": float("inf")})) is None
    assert line(event(tags={"a": "b"})) is None


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("a.b", "x", ("a_b", "x")),
        ("a\\\\", "x\\\\", ("a", "x")),
        ("a\nb", "x\ny", ("a b", "x y")),
        ("k", "x\\\n", ("k", "x\\ ")),
        ("k" * 300, "x", ("k" * 256, "x")),
        ("é" * 200, "x", ("é" * 128, "x")),
        ("k", "é" * 600, ("k", "é" * 512)),
        ("k", "a" + "测" * 400, ("k", "a" + "测" * 341)),
    ],
)
def test_tags_are_cleaned_as_in_datakit_but_never_within_a_character(
    key: str, value: str, wanted: tuple[str, str]
) -> None:
    found, _ = build((key, value, True))
    assert dict(found.tags) == dict([wanted])


def test_texts_of_fields_keep_newlines_and_backslashes() -> None:
    found, losses = build(("a.b\\", "x\ny\\", False))
    assert found.fields == {"a_b": "x\ny\\"}
    assert losses.changed == {Reason.KEY_CUT: 1}


def test_the_first_of_a_key_counts() -> None:
    found, losses = build(("a.b", "1", True), ("a_b", 2, False), ("c", 3, False), ("c", "4", True))
    assert (found.tags, found.fields) == ({"a_b": "1"}, {"c": 3})
    assert losses.changed == {Reason.TAG_COLLISION: 2}


def test_keys_that_are_none_are_dropped_and_counted() -> None:
    found, losses = build(("", 1, False), ("\\", 1, False), ("k", 1, False))
    assert found.fields == {"k": 1}
    assert sum(losses.changed.values()) == 2


def test_logs_have_no_source_and_no_date_and_always_a_status() -> None:
    found, losses = build(("source", "a", True), ("date", "b", False), ("m", 1, False), category=Category.LOGGING)
    assert (found.tags, found.fields) == ({}, {"m": 1, "status": "info"})
    assert losses.changed == {Reason.TAG_COLLISION: 2}


def test_metrics_keep_dots_and_take_no_texts() -> None:
    found, losses = build(("a.b", 1, False), ("t", "text", False), ("c.d", "x", True), category=Category.METRIC)
    assert (found.tags, found.fields) == ({"c_d": "x"}, {"a.b": 1})
    assert losses.changed == {Reason.FIELD_CLASH: 1}


def test_what_is_not_finite_is_dropped_and_counted() -> None:
    found, losses = build(("a", float("nan"), False), ("b", float("-inf"), False), ("c", 0.0, False))
    assert found.fields == {"c": 0.0}
    assert losses.changed == {Reason.NOT_FINITE: 2}


def test_the_limits_leave_out_what_comes_last_and_global_tags_stay_beyond_them() -> None:
    entries: list[Entry] = [(f"t{number}", "v", True) for number in range(300)]
    entries += [(f"f{number}", number, False) for number in range(1100)]
    found, losses = build(*entries, global_tags=(("host", "h"), ("t0", "never"), ("f0", "never")))
    assert len(found.tags) == 256 + 1
    assert found.tags["host"] == "h"
    assert found.tags["t0"] == "v"
    assert list(found.fields) == [f"f{number}" for number in range(MAX_FIELDS)]
    assert losses.changed == {Reason.TAG_LIMIT: 44 + 76}


def test_a_measurement_is_cut_between_characters() -> None:
    found = build_event(Category.LOGGING, "é" * 600, (), 0, Losses())
    assert found.measurement == "é" * 512


def test_a_text_beyond_32_mib_is_cut() -> None:
    found, losses = build(("message", "é" * (17 << 20), False))
    assert found.fields["message"] == "é" * (16 << 20)
    assert losses.changed == {Reason.VALUE_CUT: 1}
