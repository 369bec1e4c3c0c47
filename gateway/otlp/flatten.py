"""Attributes become tags: the rules of names, texts, limits and collisions. Pure.

What a tag is in the end (DataKit 1.84, golden cases ``m_attr_*``, ``tag-*``, ``attr-*``):

- Key: ``.`` becomes ``_``, at most 256 bytes, no trailing backslashes, a newline is a space; never empty.
- Value: one text (``value_text``), no trailing backslashes, a newline is a space, at most 1024 bytes.
- Levels in this order, the first of a name wins: resource and ``remote_ip``; scope and ``scope_name``; data point;
  ``unit``. Global tags come last and give way to every tag and field of their name.

Where DataKit leaves it to the order of a Go map, ours depends on nothing but the content: the tags of one level are
in the order of their keys; of two attributes of one level that end as the same tag, the one whose key needed no
rewriting wins, then the smaller original key; what does not fit into 256 tags is the end of that order. Where DataKit
cuts a character in two or loses the metric's value, ours keeps both whole. Whatever is lost is counted.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isinf
from typing import Literal

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from gateway.model import Losses, Reason, Tags

DELETED_KEYS = frozenset(
    {
        "process.command_line",
        "process.executable.path",
        "process.runtime.description",
        "process.runtime.name",
        "process.runtime.version",
        "telemetry.distro.name",
        "telemetry.distro.version",
        "telemetry.sdk.language",
        "telemetry.sdk.name",
        "telemetry.sdk.version",
    }
)
"""Attributes that DataKit removes on every level (golden ``deleted-keys``)."""

MAX_TAGS = 256
"""Of a point, its global tags not counted (golden ``m_attr_300_tags``)."""
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 1024


def cut_text(text: str, size_bytes: int) -> str:
    """``text``, or as much of its beginning as fits into ``size_bytes`` bytes of UTF-8 in whole characters."""
    if len(text) * 4 <= size_bytes or (len(text) <= size_bytes and text.isascii()):
        return text
    raw = text[:size_bytes].encode()
    if len(raw) <= size_bytes:
        return text[:size_bytes]
    return raw[:size_bytes].decode(errors="ignore")


def value_text(value: AnyValue) -> str | None:
    """The text of an attribute's value; None where it has none.

    As DataKit: a double has three decimals. Unlike it (golden ``attr-types``): bytes are base64, arrays and kvlists
    are compact JSON in the order they were sent in, an empty value is left out and harms nobody else.
    """
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return str(value.string_value)
    if kind == "int_value":
        return str(value.int_value)
    if kind == "bool_value":
        return "true" if value.bool_value else "false"
    if kind == "double_value":
        return _double_text(value.double_value)
    if kind == "bytes_value":
        return b64encode(value.bytes_value).decode()
    if kind in ("array_value", "kvlist_value"):
        return json.dumps(_json_value(value), ensure_ascii=False, separators=(",", ":"))
    return None


def _double_text(number: float) -> str:
    """Go's ``%.3f``."""
    if isfinite(number):
        return f"{number:.3f}"
    if isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return "NaN"


def _json_value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_json_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {item.key: _json_value(item.value) for item in value.kvlist_value.values}
    if kind == "bytes_value":
        return b64encode(value.bytes_value).decode()
    if kind == "double_value" and not isfinite(value.double_value):
        return _double_text(value.double_value)
    if kind is None or kind == "string_value_strindex":
        return None
    plain: object = getattr(value, kind)
    return plain


@dataclass(frozen=True, slots=True)
class Level:
    """The tags of one level in the order of their keys, and what making them has cost."""

    tags: Mapping[str, str]
    losses: Losses


def attribute_tags(attributes: Iterable[KeyValue], fixed: Mapping[str, str] | None = None) -> Level:
    """The tags that the attributes of one level make.

    ``fixed`` are tags of our own on this level (``remote_ip``, ``scope_name``), which win against its attributes.
    Of a key that is sent twice the last counts, as in DataKit (golden ``m_attr_dup_keys_same_list``).
    """
    losses = Losses()
    texts: dict[str, str] = {}
    for attribute in attributes:
        key = attribute.key
        if not key or key in DELETED_KEYS:
            continue
        text = value_text(attribute.value)
        if text is None:
            continue
        if texts.get(key, text) != text:
            losses.change(Reason.TAG_COLLISION, f"attribute {brief(key)} is there twice; the last one counts")
        texts[key] = text
    tags = dict(fixed or ())
    rewritten = []
    for key in sorted(texts):
        name = tag_key(key, losses)
        if name != key:
            rewritten.append((name, key))
        else:
            _put(tags, key, key, texts[key], losses)
    for name, key in rewritten:
        if name:
            _put(tags, name, key, texts[key], losses)
    return Level(dict(sorted(tags.items())), losses)


def _put(tags: dict[str, str], name: str, key: str, text: str, losses: Losses) -> None:
    value = tag_value(text, name, losses)
    if tags.setdefault(name, value) != value:
        losses.change(Reason.TAG_COLLISION, f"attribute {brief(key)}: the tag {brief(name)} is taken on its level")


def tag_key(key: str, losses: Losses) -> str:
    """The tag's key for an attribute's key; empty where nothing is left of it."""
    name = cut_text(key.replace(".", "_"), MAX_KEY_BYTES)
    if len(name) < len(key):
        losses.change(Reason.KEY_CUT, f"{brief(key)} is longer than {MAX_KEY_BYTES} bytes")
    return name.rstrip("\\").replace("\n", " ")


def tag_value(text: str, name: str, losses: Losses) -> str:
    """The tag's value for an attribute's text. DataKit strips backslashes before it replaces newlines."""
    if "\\" in text or "\n" in text:
        text = text.rstrip("\\").replace("\n", " ")
    value = cut_text(text, MAX_VALUE_BYTES)
    if len(value) < len(text):
        losses.change(Reason.VALUE_CUT, f"value of {brief(name)} is longer than {MAX_VALUE_BYTES} bytes")
    return value


def resource_level(attributes: Iterable[KeyValue], sender_address: str | None) -> Level:
    """The first level. ``remote_ip`` stands in the resource: it wins against an attribute of that name on any level
    (golden ``m_attr_remote_ip``)."""
    return attribute_tags(attributes, None if sender_address is None else {"remote_ip": sender_address})


def scope_level(name: str, attributes: Iterable[KeyValue]) -> Level:
    """The level of a scope that was sent: ``scope_name``, also an empty one (golden ``m_scope_empty_name``)."""
    losses = Losses()
    level = attribute_tags(attributes, {"scope_name": tag_value(name, "scope_name", losses)})
    level.losses.add(losses)
    return level


def merge_levels(
    levels: Sequence[Level],
    unit: str,
    global_tags: Iterable[tuple[str, str]],
    fields: Sequence[str],
    own: Iterable[tuple[str, str]],
    reserved: Sequence[str],
    losses: Losses,
) -> Tags:
    """All tags of a series, in DataKit's order.

    ``levels``: resource, scope (where one was sent), data point. ``fields`` are the fields that its points have: an
    attribute that ends as one of them is renamed, since DataKit would drop the metric's value. ``own`` are tags that
    only we add. ``reserved`` are keys that the points add for themselves (``le``, ``quantile``), so an attribute of
    that name is renamed, too: if it won as in DataKit, the buckets of a histogram would overwrite each other (golden
    ``m_hist_le_unit_attr_collision``). A global tag gives way to both.
    """
    tags: dict[str, str] = {}
    for level in levels:
        if level.losses.changed:
            losses.add(level.losses)
        for key, value in level.tags.items():
            if tags.setdefault(key, value) != value:
                losses.change(Reason.TAG_COLLISION, f"tag {brief(key)} is taken on an earlier level; that one counts")
    text = tag_value(unit, "unit", losses)
    if tags.setdefault("unit", text) != text and text:
        losses.change(Reason.TAG_COLLISION, "an attribute unit counts before the metric's unit")
    own = tuple(own)
    taken = {*fields, *reserved, *(key for key, _ in own)}
    if not taken.isdisjoint(tags):
        tags = _renamed(tags, taken, losses)
    tags.update(own)
    room = MAX_TAGS - len(reserved)
    if len(tags) > room:
        tags = _first(tags, room, {"unit", *(key for key, _ in own)}, losses)
    for key, value in global_tags:
        if key not in taken:
            tags.setdefault(key, value)
    return tuple(tags.items())


def _renamed(tags: Mapping[str, str], taken: set[str], losses: Losses) -> dict[str, str]:
    """``tags`` with other keys for those that are ``taken``."""
    renamed: dict[str, str] = {}
    for key, value in tags.items():
        name = key
        while name in taken or (name != key and (name in tags or name in renamed)):
            name = cut_text(f"exported_{name}", MAX_KEY_BYTES) if len(name) < MAX_KEY_BYTES else ""
        if name != key:
            losses.change(Reason.FIELD_CLASH, f"tag {brief(key)} is sent as {brief(name)}: the point needs its name")
        if name:
            renamed[name] = value
    return renamed


def _first(tags: Mapping[str, str], room: int, always: set[str], losses: Losses) -> dict[str, str]:
    """The first ``room`` tags; those in ``always`` are among them."""
    left = room - len(always)
    kept: dict[str, str] = {}
    for key, value in tags.items():
        if key in always:
            kept[key] = value
        elif left > 0:
            kept[key] = value
            left -= 1
    losses.change(Reason.TAG_LIMIT, f"{len(tags)} tags on one series, at most {room} are sent", len(tags) - room)
    return kept


def brief(text: str) -> str:
    """``text`` quoted and short, for a message."""
    return repr(text if len(text) <= 64 else text[:61] + "...")


def merge_tags(
    resource_attributes: Iterable[KeyValue],
    scope: tuple[str, Iterable[KeyValue]] | None,
    point_attributes: Iterable[KeyValue],
    sender_address: str | None,
    unit: str,
    global_tags: Sequence[tuple[str, str]],
    host_tag: Literal["gateway", "resource"],
    field: str,
    losses: Losses,
) -> Tags:
    """All tags of a series of one field, from its attributes (``merge_levels`` has the rules)."""
    resource = resource_level(resource_attributes, sender_address)
    levels = [resource]
    if scope is not None:
        levels.append(scope_level(*scope))
    levels.append(attribute_tags(point_attributes))
    return merge_levels(levels, unit, host_tags(resource, global_tags, host_tag), (field,), (), (), losses)


def host_tags(
    resource: Level, global_tags: Sequence[tuple[str, str]], host_tag: Literal["gateway", "resource"]
) -> tuple[tuple[str, str], ...]:
    """The global tags. With ``host_tag="resource"`` the sender's ``host.name``, where it sent one, is ``host``."""
    host = resource.tags.get("host_name") if host_tag == "resource" else None
    if not host:
        return tuple(global_tags)
    return tuple({**dict(global_tags), "host": host}.items())
