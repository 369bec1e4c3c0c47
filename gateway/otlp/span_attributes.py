"""Which attributes of a span become fields, and which stay in its message. Pure.

Attributes come in lists: resource, scope, span, each event. Within a list the last of a key wins, save the integer
``http_status_code``, a tag, whose first wins (golden ``t_http_both_methods``). Between lists the later one wins. So it
is in DataKit where a duplicate survives (``t_dup_res_span_sep``); where its copies lie side by side DataKit drops all
of them (``t_dup_res_span``), and where an attribute is named like a field of the span's own it destroys both
(``t_core_key_override``). Here the span's own field stands, and the attribute stays in the message.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from gateway.model import FieldValue, Losses, Reason
from gateway.otlp.flatten import brief
from gateway.otlp.point import checked_key
from gateway.otlp.span_message import Dialect, attribute_json, dialect, list_json
from gateway.policy.rules import Rules

_PROTO = dialect("protojson")


@dataclass(frozen=True, slots=True)
class Found:
    """An attribute that came out: its value as a field's or tag's, and what it was."""

    value: FieldValue
    is_tag: bool
    attribute: KeyValue


@dataclass(frozen=True, slots=True)
class Chosen:
    """What one list became: fields and tags by key, and the JSON of what stays in the message."""

    found: Mapping[str, Found]
    rest: list[str]


@dataclass(frozen=True, slots=True)
class Level:
    """The attributes of a resource or scope: chosen once for all of its spans that need the same keys themselves."""

    attributes: list[KeyValue]
    _chosen: dict[frozenset[str], Chosen] = field(default_factory=dict)

    def choose(self, rules: Rules, taken: frozenset[str], style: Dialect, losses: Losses) -> Chosen:
        chosen = self._chosen.get(taken)
        if chosen is None:
            chosen = self._chosen[taken] = choose(self.attributes, rules, taken, style, losses)
        return chosen


def native_value(value: AnyValue) -> FieldValue | None:
    """The value of a field, typed as it was sent; None where there is none (golden ``t_attr_types_custom``).

    Bytes are text where they are UTF-8, else base64 (DataKit sends an invalid text); lists are proto3 JSON.
    """
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return str(value.string_value)
    if kind == "int_value":
        return int(value.int_value)
    if kind == "bool_value":
        return bool(value.bool_value)
    if kind == "double_value":
        return float(value.double_value)
    if kind == "bytes_value":
        try:
            return value.bytes_value.decode()
        except UnicodeDecodeError:
            return b64encode(value.bytes_value).decode()
    if kind in ("array_value", "kvlist_value"):
        return list_json(value, _PROTO)
    return None


def choose(
    attributes: Iterable[KeyValue], rules: Rules, taken: frozenset[str], style: Dialect, losses: Losses
) -> Chosen:
    """Sort one list. ``taken`` are the keys that the span needs itself.

    An attribute that is chosen and has no value is left out, as in DataKit (golden ``t_attr_types_list``).
    """
    found: dict[str, Found] = {}
    rest: list[str] = []
    for attribute in attributes:
        selected = rules.span_key(attribute.key)
        key = checked_key(selected) if selected else ""
        if not key:
            rest.append(attribute_json(attribute, style))
            continue
        value = native_value(attribute.value)
        if value is None:
            continue
        if key in taken:
            losses.change(Reason.FIELD_CLASH, f"attribute {brief(attribute.key)} stays in message: {key} is the span's")
            rest.append(attribute_json(attribute, style))
        elif isinstance(value, float) and not isfinite(value):
            losses.change(Reason.NOT_FINITE, f"attribute {brief(attribute.key)} stays in message: it is {value}")
            rest.append(attribute_json(attribute, style))
        elif key == "http_status_code" and isinstance(value, int) and not isinstance(value, bool):
            found.setdefault(key, Found(str(value), True, attribute))
        else:
            _count_loss(found, key, value, losses)
            found[key] = Found(value, False, attribute)
    return Chosen(found, rest)


def merge(lists: Iterable[Chosen], losses: Losses) -> dict[str, Found]:
    """All that came out; the later list wins."""
    merged: dict[str, Found] = {}
    for chosen in lists:
        if not merged:
            merged.update(chosen.found)
            continue
        for key, found in chosen.found.items():
            _count_loss(merged, key, found.value, losses)
            merged[key] = found
    return merged


def _count_loss(found: Mapping[str, Found], key: str, value: FieldValue, losses: Losses) -> None:
    earlier = found.get(key)
    if earlier is not None and earlier.value != value:
        losses.change(
            Reason.TAG_COLLISION, f"{brief(earlier.attribute.key)}: {brief(key)} is there again; the last counts"
        )
