"""Events as Guance takes them: the point checker, ``com.guance.Point``, and line protocol. Pure.

The checker is DataKit's (``cliutils/point/check.go``), which every point passes: keys of at most 256 bytes, tag values
of at most 1024, no newlines and no trailing backslashes in either, 256 tags, 1024 fields. Ours cuts on a character's
boundary, and counts what it changed. The encoding is DataKit's to Dataway (golden ``p_lineproto_*``; protobuf:
``PBPoint{name=1, fields=2, time=3}``, ``Field{key=1, i=2, u=3, f=4, b=5, d=6, s=11, is_tag=8}``).
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from math import isfinite
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from gateway.model import Category, Event, FieldValue, Losses, Reason, Refusal, Unsigned, varint
from gateway.otlp.flatten import MAX_KEY_BYTES, MAX_TAGS, MAX_VALUE_BYTES, brief, cut_text

MAX_FIELDS = 1024
MAX_MEASUREMENT_BYTES = 1024
MAX_TEXT_BYTES = 32 << 20
"""Of a text field."""
MAX_EXPANDED_BYTES = 256 << 20
"""Of all events of one request: what their resource says is repeated in each, so a small request can grow."""

Entry = tuple[str, FieldValue, bool]
"""Key, value, whether it is a tag (then the value is a text)."""


@dataclass(frozen=True, slots=True)
class CheckerOptions:
    """How the checker treats one category."""

    keeps_dots: bool = False
    disabled: frozenset[str] = frozenset()
    takes_texts: bool = True
    required: tuple[tuple[str, str], ...] = ()


CHECKER = {
    Category.METRIC: CheckerOptions(keeps_dots=True, takes_texts=False),
    Category.TRACING: CheckerOptions(),
    Category.LOGGING: CheckerOptions(disabled=frozenset({"source", "date"}), required=(("status", "info"),)),
}


def build_event(
    category: Category,
    measurement: str,
    entries: Iterable[Entry],
    time_ns: int,
    losses: Losses,
    global_tags: Iterable[tuple[str, str]] = (),
) -> Event:
    """An event out of ``entries``, in their order; the first of a key counts.

    ``global_tags`` come last, beyond the limits, and only where their key is free. What was changed or dropped is
    counted in ``losses``.
    """
    options = CHECKER[category]
    tags: dict[str, str] = {}
    fields: dict[str, FieldValue] = {}
    for raw_key, value, is_tag in entries:
        key = checked_key(raw_key, options.keeps_dots and not is_tag)
        if not key or key in options.disabled:
            losses.change(Reason.TAG_COLLISION, f"{brief(raw_key)} is no key for a {category.path} point")
            continue
        if len(key) != len(raw_key):
            losses.change(Reason.KEY_CUT, f"{brief(raw_key)} is sent as {brief(key)}")
        if key in tags or key in fields:
            losses.change(Reason.TAG_COLLISION, f"{brief(raw_key)}: the key {brief(key)} is taken; the first counts")
        elif is_tag:
            _add_tag(tags, key, str(value), losses)
        else:
            _add_field(fields, key, value, options, losses)
    for key, text in options.required:
        if key not in tags and key not in fields:
            fields[key] = text
    for key, text in global_tags:
        if key not in tags and key not in fields:
            tags[key] = text
    return Event(category, cut_text(measurement, MAX_MEASUREMENT_BYTES), tags, fields, time_ns)


@lru_cache(maxsize=8192)
def checked_key(key: str, keeps_dots: bool = False) -> str:
    """The key that a point has for ``key``; empty where nothing is left of it."""
    text = cut_text(key, MAX_KEY_BYTES)
    return (text if keeps_dots else text.replace(".", "_")).rstrip("\\").replace("\n", " ")


def _add_tag(tags: dict[str, str], key: str, value: str, losses: Losses) -> None:
    if len(tags) >= MAX_TAGS:
        losses.change(Reason.TAG_LIMIT, f"tag {brief(key)} is beyond the {MAX_TAGS} of a point")
        return
    if "\\" in value or "\n" in value:
        value = value.rstrip("\\").replace("\n", " ")
    if len(value) * 4 > MAX_VALUE_BYTES:
        short = cut_text(value, MAX_VALUE_BYTES)
        if len(short) < len(value):
            losses.change(Reason.VALUE_CUT, f"value of tag {brief(key)} is longer than {MAX_VALUE_BYTES} bytes")
        value = short
    tags[key] = value


def _add_field(
    fields: dict[str, FieldValue], key: str, value: FieldValue, options: CheckerOptions, losses: Losses
) -> None:
    if len(fields) >= MAX_FIELDS:
        losses.change(Reason.TAG_LIMIT, f"field {brief(key)} is beyond the {MAX_FIELDS} of a point")
        return
    if isinstance(value, float):
        if not isfinite(value):
            losses.change(Reason.NOT_FINITE, f"field {brief(key)} is {value}")
            return
    elif isinstance(value, str | bytes):
        if not options.takes_texts:
            losses.change(Reason.FIELD_CLASH, f"field {brief(key)} is a text, which a metric cannot hold")
            return
        if isinstance(value, str) and len(value) * 4 > MAX_TEXT_BYTES:
            short = cut_text(value, MAX_TEXT_BYTES)
            if len(short) < len(value):
                losses.change(Reason.VALUE_CUT, f"field {brief(key)} is longer than {MAX_TEXT_BYTES} bytes")
            value = short
    fields[key] = value


def check_expansion(size: int) -> None:
    """Refuse a request whose events would take ``size`` bytes, where that is too much. Raises ``Refusal``."""
    if size > MAX_EXPANDED_BYTES:
        raise Refusal(
            Reason.TOO_LARGE,
            f"with the attributes of their resources repeated in each, the events of this request take more than "
            f"{MAX_EXPANDED_BYTES >> 20} MiB; send fewer at once",
        )


_SHORT = [varint(size) for size in range(256)]
_UINT64 = 2**64 - 1
_DOUBLE = struct.Struct("<d")


def _size(size: int) -> bytes:
    return _SHORT[size] if size < 256 else varint(size)


@lru_cache(maxsize=8192)
def _encoded_key(key: str) -> bytes:
    raw = key.encode()
    return b"\x0a" + _size(len(raw)) + raw


@lru_cache(maxsize=4096)
def _encoded_tag(key: str, value: str) -> bytes:
    raw = value.encode()
    body = _encoded_key(key) + b"\x5a" + _size(len(raw)) + raw + b"\x40\x01"
    return b"\x12" + _size(len(body)) + body


def _encoded_value(value: FieldValue) -> bytes:
    """One member of the oneof, also where it is zero. ``bool`` and ``Unsigned`` are ints to Python."""
    kind = type(value)
    if kind is str:
        raw = value.encode()  # type: ignore[union-attr]
        return b"\x5a" + _size(len(raw)) + raw
    if kind is float:
        return b"\x21" + _DOUBLE.pack(value)
    if kind is bool:
        return b"\x28\x01" if value else b"\x28\x00"
    if isinstance(value, bytes):
        return b"\x32" + _size(len(value)) + value
    return (b"\x18" if kind is Unsigned else b"\x10") + varint(int(value) & _UINT64)


def encode_point(event: Event) -> bytes:
    """``event`` as a ``com.guance.Point.PBPoint``."""
    name = event.measurement.encode()
    parts = [b"\x0a", _size(len(name)), name]
    for key, text in event.tags.items():
        parts.append(_encoded_tag(key, text))
    for key, value in event.fields.items():
        body = _encoded_key(key) + _encoded_value(value)
        parts += (b"\x12", _size(len(body)), body)
    parts += (b"\x18", varint(event.time_ns & _UINT64))
    return b"".join(parts)


def _point_classes() -> tuple[Any, Any]:
    """The messages ``PBPoint`` and ``PBPoints``, for reading: upb checks every bound and every text."""
    file = descriptor_pb2.FileDescriptorProto(name="guance_point.proto", package="com.guance.Point", syntax="proto3")
    field_type = descriptor_pb2.FieldDescriptorProto
    field = file.message_type.add(name="Field")
    field.oneof_decl.add(name="val")
    field.field.add(name="key", number=1, type=field_type.TYPE_STRING, label=1)
    members = (
        ("i", 2, field_type.TYPE_INT64),
        ("u", 3, field_type.TYPE_UINT64),
        ("f", 4, field_type.TYPE_DOUBLE),
        ("b", 5, field_type.TYPE_BOOL),
        ("d", 6, field_type.TYPE_BYTES),
        ("s", 11, field_type.TYPE_STRING),
    )
    for name, number, kind in members:
        field.field.add(name=name, number=number, type=kind, label=1, oneof_index=0)
    field.field.add(name="is_tag", number=8, type=field_type.TYPE_BOOL, label=1)
    point = file.message_type.add(name="PBPoint")
    point.field.add(name="name", number=1, type=field_type.TYPE_STRING, label=1)
    point.field.add(name="fields", number=2, type=field_type.TYPE_MESSAGE, label=3, type_name=".com.guance.Point.Field")
    point.field.add(name="time", number=3, type=field_type.TYPE_INT64, label=1)
    points = file.message_type.add(name="PBPoints")
    points.field.add(name="arr", number=1, type=field_type.TYPE_MESSAGE, label=3, type_name=".com.guance.Point.PBPoint")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"com.guance.Point.{name}"))
        for name in ("PBPoint", "PBPoints")
    ]
    return classes[0], classes[1]


_PBPoint, _PBPoints = _point_classes()


def decode_point(raw: bytes, category: Category) -> Event:
    """The event that ``encode_point`` made ``raw`` of. Raises ``ValueError`` for other bytes."""
    try:
        point = _PBPoint.FromString(raw)
    except DecodeError as error:
        raise ValueError(f"not a point ({error}): {len(raw)} bytes, beginning with {raw[:16].hex()}") from None
    return _event(point, category)


def decode_points(raw: bytes, category: Category) -> list[Event]:
    """The points of one body to Dataway (``PBPoints``). Raises ``ValueError`` for other bytes."""
    try:
        points = _PBPoints.FromString(raw)
    except DecodeError as error:
        raise ValueError(f"not a body of points ({error}): {len(raw)} bytes") from None
    return [_event(point, category) for point in points.arr]


def _event(point: Any, category: Category) -> Event:
    tags: dict[str, str] = {}
    fields: dict[str, FieldValue] = {}
    for field in point.fields:
        kind = field.WhichOneof("val")
        if kind == "s" and field.is_tag:
            tags[field.key] = field.s
        elif kind == "u":
            fields[field.key] = Unsigned(field.u)
        elif kind is not None:
            fields[field.key] = getattr(field, kind)
    return Event(category, point.name, tags, fields, point.time)


def number_text(number: float) -> str:
    """A finite ``number`` as Go's ``FormatFloat(number, 'f', -1, 64)``: the shortest that reads back, no exponent."""
    text = repr(number)
    if "e" in text:
        text = format(Decimal(text), "f")
    return text.removesuffix(".0")


_MEASUREMENT = str.maketrans({",": "\\,", " ": "\\ ", "\n": "\\ "})
_TAG = str.maketrans({",": "\\,", " ": "\\ ", "=": "\\="})
_FIELD = str.maketrans({",": "\\,", " ": "\\ ", "=": "\\=", '"': '\\"'})
_TEXT = str.maketrans({'"': '\\"', "\\": "\\\\"})


def line(event: Event) -> str | None:
    """``event`` as a line of line protocol, without the line's end; None where no field of it can be written.

    As DataKit writes it (details 8.2): tags and fields sorted, empty tags left out, raw newlines within texts, times
    in ns. What line protocol cannot say (NaN, infinities) is left out; the checker lets none of it come here.
    """
    parts = [event.measurement.translate(_MEASUREMENT)]
    for key, text in sorted(event.tags.items()):
        if text:
            parts.append(f",{key.translate(_TAG)}={text.translate(_TAG)}")
    fields = [
        f"{key.translate(_FIELD)}={written}"
        for key, value in sorted(event.fields.items())
        if (written := _written(value)) is not None
    ]
    if not fields:
        return None
    return f"{''.join(parts)} {','.join(fields)} {event.time_ns}"


def _written(value: FieldValue) -> str | None:
    if isinstance(value, str):
        return f'"{value.translate(_TEXT)}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return number_text(value) if isfinite(value) else None
    if isinstance(value, bytes):
        return f'"{b64encode(value).decode()}"'
    return f"{int(value)}{'u' if isinstance(value, Unsigned) else 'i'}"
