"""Attributes become tags: tables of the rules, and what is true of any attributes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from gateway.model import Losses, Reason, Tags
from gateway.otlp.flatten import DELETED_KEYS, MAX_TAGS, attribute_tags, cut_text, merge_levels, merge_tags, value_text
from tests.otlp.strategies import ATTRIBUTES, any_values

GLOBAL = (("host", "gateway"), ("dc", "lab1"))


def attributes(texts: Mapping[str, str]) -> list[KeyValue]:
    return [KeyValue(key=key, value=AnyValue(string_value=text)) for key, text in texts.items()]


def merged(
    resource: Mapping[str, str] | None = None,
    scope: tuple[str, Mapping[str, str]] | None = None,
    point: Mapping[str, str] | None = None,
    unit: str = "",
    field: str = "m",
) -> tuple[dict[str, str], Losses]:
    losses = Losses()
    tags = merge_tags(
        attributes(resource or {}),
        None if scope is None else (scope[0], attributes(scope[1])),
        attributes(point or {}),
        "192.0.2.7",
        unit,
        GLOBAL,
        "gateway",
        field,
        losses,
    )
    assert len(dict(tags)) == len(tags)
    return dict(tags), losses


def array(*values: AnyValue) -> AnyValue:
    value = AnyValue()
    value.array_value.SetInParent()
    value.array_value.values.extend(values)
    return value


def kvlist(*items: tuple[str, AnyValue]) -> AnyValue:
    value = AnyValue()
    value.kvlist_value.SetInParent()
    value.kvlist_value.values.extend(KeyValue(key=key, value=item) for key, item in items)
    return value


S, I, D, B = (  # noqa: E741
    lambda text: AnyValue(string_value=text),
    lambda number: AnyValue(int_value=number),
    lambda number: AnyValue(double_value=number),
    lambda raw: AnyValue(bytes_value=raw),
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (S("x y"), "x y"),
        (S(""), ""),
        (I(-7), "-7"),
        (I(-(2**63)), "-9223372036854775808"),
        (D(3.14159), "3.142"),
        (D(2.0), "2.000"),
        (D(-0.0), "-0.000"),
        (D(1e21), "1000000000000000000000.000"),
        (D(float("nan")), "NaN"),
        (D(float("inf")), "+Inf"),
        (D(float("-inf")), "-Inf"),
        (AnyValue(bool_value=False), "false"),
        (AnyValue(bool_value=True), "true"),
        (B(b"\0\1\2\xff"), "AAEC/w=="),
        (B(b""), ""),
        (array(), "[]"),
        (array(S("p"), I(2), D(2.5), B(b"\xff"), AnyValue()), '["p",2,2.5,"/w==",null]'),
        (array(D(float("nan"))), '["NaN"]'),
        (array(S("训练")), '["训练"]'),
        (kvlist(), "{}"),
        (kvlist(("k", I(1)), ("a", array(S("x"))), ("k", I(2))), '{"k":2,"a":["x"]}'),
        (AnyValue(), None),
    ],
)
def test_a_value_has_one_text(value: AnyValue, text: str | None) -> None:
    assert value_text(value) == text


@given(any_values(3))
def test_arrays_and_kvlists_are_json(value: AnyValue) -> None:
    text = value_text(value)
    if value.WhichOneof("value") in ("array_value", "kvlist_value"):
        assert text is not None
        assert isinstance(json.loads(text), list | dict)


@pytest.mark.parametrize(
    ("text", "size", "cut"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "abc"),
        ("值值", 6, "值值"),
        ("值值", 5, "值"),
        ("a🚀", 4, "a"),
        ("🚀", 3, ""),
        ("", 0, ""),
    ],
)
def test_a_text_is_cut_between_characters(text: str, size: int, cut: str) -> None:
    assert cut_text(text, size) == cut


@given(st.text(), st.integers(0, 50))
def test_a_cut_text_is_the_longest_beginning_that_fits(text: str, size: int) -> None:
    cut = cut_text(text, size)
    assert text.startswith(cut)
    assert len(cut.encode()) <= size
    assert cut == text or len(text[: len(cut) + 1].encode()) > size


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("hw.id", "hw_id"),
        (".lead", "_lead"),
        ("a..b", "a__b"),
        ("测.试", "测_试"),
        ("k e=y,1", "k e=y,1"),
        ("k\nnl", "k nl"),
        ("kbs\\", "kbs"),
        ("nul\0k", "nul\0k"),
        ("k" * 300, "k" * 256),
        ("键" * 100, "键" * 85),
        ("", None),
        ("\\\\", None),
    ],
)
def test_a_key_is_written_as_datakit_writes_it(key: str, tag: str | None) -> None:
    level = attribute_tags(attributes({key: "v"}))
    assert level.tags == ({} if tag is None else {tag: "v"})
    assert (Reason.KEY_CUT in level.losses.changed) == (len(key.encode()) > 256)


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("a\nb\r\nc", "a b\r c"),
        ("tail\\\\", "tail"),
        ("x\\\n", "x\\ "),
        ("\\", ""),
        ("a\tb", "a\tb"),
        ("v" * 1024, "v" * 1024),
        ("v" * 1025, "v" * 1024),
        ("值" * 342, "值" * 341),
    ],
)
def test_a_value_is_written_as_datakit_writes_it(text: str, tag: str) -> None:
    level = attribute_tags(attributes({"k": text}))
    assert level.tags == {"k": tag}
    assert (Reason.VALUE_CUT in level.losses.changed) == (len(text.encode()) > 1024)


def test_deleted_keys_are_gone_on_every_level() -> None:
    gone = dict.fromkeys(DELETED_KEYS, "x")
    tags, losses = merged(gone, ("", gone), gone)
    assert tags.keys() == {"remote_ip", "scope_name", "unit", "host", "dc"}
    assert not losses.changed


def test_the_first_level_wins_and_a_difference_is_counted() -> None:
    tags, losses = merged({"k.x": "r", "same": "1"}, ("s", {"k.x": "s", "only": "s"}), {"k_x": "p", "same": "1"})
    assert (tags["k_x"], tags["only"], tags["same"]) == ("r", "s", "1")
    assert losses.changed == {Reason.TAG_COLLISION: 2}


def test_within_a_level_the_key_that_needed_no_rewriting_wins() -> None:
    for texts in ({"hw.id": "dotted", "hw_id": "plain"}, {"hw_id": "plain", "hw.id": "dotted"}):
        tags, losses = merged(point=texts)
        assert tags["hw_id"] == "plain"
        assert losses.changed == {Reason.TAG_COLLISION: 1}
    tags, _ = merged(point={"a_b.c": "second", "a.b_c": "first"})
    assert tags["a_b_c"] == "first"


def test_the_address_wins_against_every_attribute_of_its_name() -> None:
    tags, losses = merged({"remote_ip": "r"}, ("s", {"remote.ip": "s"}), {"remote_ip": "p"})
    assert tags["remote_ip"] == "192.0.2.7"
    assert losses.changed == {Reason.TAG_COLLISION: 3}


def test_a_scope_has_a_name_even_an_empty_one_and_none_has_none() -> None:
    assert "scope_name" not in merged()[0]
    assert merged(scope=("", {}))[0]["scope_name"] == ""
    assert merged(scope=("own", {"scope_name": "attribute"}))[0]["scope_name"] == "own"
    assert merged({"scope.name": "resource"}, ("own", {}))[0]["scope_name"] == "resource"


def test_an_attribute_unit_counts_before_the_metrics_unit() -> None:
    tags, losses = merged(point={"unit": "percent"}, unit="1")
    assert tags["unit"] == "percent"
    assert losses.changed == {Reason.TAG_COLLISION: 1}
    assert merged(point={"unit": "percent"})[1].changed == {}, "an empty unit is no loss"


def test_global_tags_give_way_to_attributes_and_to_the_field() -> None:
    assert merged(point={"host": "mine"})[0]["host"] == "mine"
    tags, losses = merged(field="host")
    assert "host" not in tags
    assert not losses.changed


def test_a_tag_named_as_the_field_is_renamed() -> None:
    tags, losses = merged(point={"queue.name": "q", "exported_queue_name": "x"}, field="queue_name")
    assert "queue_name" not in tags
    assert tags["exported_queue_name"] == "x"
    assert tags["exported_exported_queue_name"] == "q"
    assert losses.changed == {Reason.FIELD_CLASH: 1}


def test_the_tags_that_stay_do_not_depend_on_their_order() -> None:
    texts = {f"t{number:03}": "v" for number in range(300)}
    tags, losses = merged(point=texts, unit="By")
    shuffled = list(texts.items())
    Random(1).shuffle(shuffled)
    assert merged(point=dict(shuffled), unit="By")[0] == tags
    assert len(tags) == MAX_TAGS + len(GLOBAL)
    assert tags["unit"] == "By"
    assert losses.changed == {Reason.TAG_LIMIT: 302 - MAX_TAGS}


def test_room_is_kept_for_the_tag_that_a_bucket_adds() -> None:
    level = attribute_tags(attributes({f"t{number:03}": "v" for number in range(300)}))
    tags = merge_levels([level], "", (), ("m",), (), ("le",), Losses())
    assert len(tags) == MAX_TAGS - 1


@given(ATTRIBUTES, ATTRIBUTES, ATTRIBUTES, st.randoms(use_true_random=False))
def test_tags_are_sound_whatever_is_sent(
    resource: list[KeyValue], scope: list[KeyValue], point: list[KeyValue], random: Random
) -> None:
    def tags_of(fields: str) -> Tags:
        return merge_tags(resource, ("s", scope), point, None, "u", GLOBAL, "gateway", fields, Losses())

    tags = tags_of("m")
    assert len(dict(tags)) == len(tags)
    assert "m" not in dict(tags)
    for key, value in tags:
        assert 0 < len(key.encode()) <= 256
        assert len(value.encode()) <= 1024
        assert not {"\n"} & {*key, *value}
        assert "." not in key
    if len({attribute.key for attribute in point}) == len(point):
        random.shuffle(point)
        assert tags_of("m") == tags
