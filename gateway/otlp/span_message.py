"""A span's ``message``: the JSON of what did not come out of it, as DataKit's three marshalers write it. Pure.

- ``protojson`` (default): proto3 JSON; ids in base64, 64-bit integers as texts, enums by name.
- ``gojson`` and ``jsoniter``: Go's struct as its ``json`` tags name it; integers as numbers, a value as
  ``{"Value":{"IntValue":1}}`` (golden ``t_gojson``, ``t_jsoniter``).

DataKit's copy of the protocol is old: flags of spans and links are not in the message (golden ``t_links``). The text
is made by hand: it is most of a span's cost, and Python's encoder cannot write Go's numbers.

Nesting is bounded by the parsers that made the message (100 levels, ``otlp.json`` and upb), recursion here with it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from math import isfinite, isnan
from typing import Literal

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.otlp.point import number_text

Marshaler = Literal["protojson", "gojson", "jsoniter"]

_KINDS = (
    "SPAN_KIND_UNSPECIFIED",
    "SPAN_KIND_INTERNAL",
    "SPAN_KIND_SERVER",
    "SPAN_KIND_CLIENT",
    "SPAN_KIND_PRODUCER",
    "SPAN_KIND_CONSUMER",
)
_CODES = ("STATUS_CODE_UNSET", "STATUS_CODE_OK", "STATUS_CODE_ERROR")


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between the marshalers: how members, integers and enums are written."""

    is_proto: bool

    def name(self, snake: str) -> str:
        """The member's name for the proto field ``snake``."""
        if not self.is_proto:
            return snake
        first, *rest = snake.split("_")
        return first + "".join(part.capitalize() for part in rest)

    def int64(self, number: int) -> str:
        return f'"{number}"' if self.is_proto else str(number)

    def enum(self, number: int, names: Sequence[str]) -> str:
        return f'"{names[number]}"' if self.is_proto and 0 <= number < len(names) else str(number)


_PROTO, _GO = Dialect(True), Dialect(False)


def dialect(marshaler: Marshaler) -> Dialect:
    return _PROTO if marshaler == "protojson" else _GO


def quote(text: str) -> str:
    """``text`` as a JSON string."""
    return str(encode_basestring(text))


def _base64(raw: bytes) -> str:
    return f'"{b64encode(raw).decode()}"'


def _double(number: float) -> str:
    """As Go writes a float in JSON: no exponent between 1e-6 and 1e21."""
    if not isfinite(number):
        return '"NaN"' if isnan(number) else '"Infinity"' if number > 0 else '"-Infinity"'
    size = abs(number)
    if size and (size < 1e-6 or size >= 1e21):
        digits, _, exponent = f"{number!r}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(exponent):+d}"
    return number_text(number)


def attribute_json(attribute: KeyValue, style: Dialect) -> str:
    """One ``KeyValue``. Empty members are left out, as in Go."""
    members = []
    if attribute.key:
        members.append(f'"key":{quote(attribute.key)}')
    if attribute.HasField("value"):
        members.append(f'"value":{value_json(attribute.value, style)}')
    return f"{{{','.join(members)}}}"


def text_attribute(key: str, text: str, style: Dialect) -> str:
    """The ``KeyValue`` of a text."""
    value = f'{{"stringValue":{quote(text)}}}' if style.is_proto else f'{{"Value":{{"StringValue":{quote(text)}}}}}'
    return f'{{"key":{quote(key)},"value":{value}}}'


def value_json(value: AnyValue, style: Dialect) -> str:
    """One ``AnyValue``."""
    kind = value.WhichOneof("value")
    if kind == "string_value":
        name, text = "stringValue", quote(value.string_value)
    elif kind == "int_value":
        name, text = "intValue", style.int64(value.int_value)
    elif kind == "bool_value":
        name, text = "boolValue", "true" if value.bool_value else "false"
    elif kind == "double_value":
        name, text = "doubleValue", _double(value.double_value)
    elif kind == "bytes_value":
        name, text = "bytesValue", _base64(value.bytes_value)
    elif kind in ("array_value", "kvlist_value"):
        name, text = "arrayValue" if kind == "array_value" else "kvlistValue", list_json(value, style)
    else:
        return "{}" if style.is_proto else '{"Value":null}'
    if style.is_proto:
        return f'{{"{name}":{text}}}'
    return f'{{"Value":{{"{name[0].upper()}{name[1:]}":{text}}}}}'


def list_json(value: AnyValue, style: Dialect) -> str:
    """The ``ArrayValue`` or ``KeyValueList`` of ``value``: ``{"values":[…]}``, ``{}`` for an empty one."""
    if value.HasField("array_value"):
        items = [value_json(item, style) for item in value.array_value.values]
    else:
        items = [attribute_json(item, style) for item in value.kvlist_value.values]
    return f'{{"values":[{",".join(items)}]}}' if items else "{}"


def span_json(span: Span, attributes: Sequence[str], emptied: int | None, cleans: bool, style: Dialect) -> str:
    """The message of ``span``.

    ``attributes`` are the JSON of what did not come out of it. The event with the index ``emptied`` is ``{}``. With
    ``cleans`` (``clean_message``) what stands in fields of its own is left out.
    """
    members: list[str] = []
    if not cleans:
        _add_ids(members, span, style)
    if span.trace_state:
        members.append(f'"{style.name("trace_state")}":{quote(span.trace_state)}')
    if not cleans:
        _add_head(members, span, style)
    if attributes:
        members.append(f'"attributes":[{",".join(attributes)}]')
    _add_count(members, "dropped_attributes_count", span.dropped_attributes_count, style)
    if span.events:
        events = ("{}" if at == emptied else _event(event, style) for at, event in enumerate(span.events))
        members.append(f'"events":[{",".join(events)}]')
    _add_count(members, "dropped_events_count", span.dropped_events_count, style)
    if span.links:
        members.append(f'"links":[{",".join(_link(link, style) for link in span.links)}]')
    _add_count(members, "dropped_links_count", span.dropped_links_count, style)
    if not cleans and span.HasField("status"):
        members.append(f'"status":{_status(span, style)}')
    return f"{{{','.join(members)}}}"


def _add_ids(members: list[str], span: Span, style: Dialect) -> None:
    for name in ("trace_id", "span_id"):
        if raw := getattr(span, name):
            members.append(f'"{style.name(name)}":{_base64(raw)}')


def _add_head(members: list[str], span: Span, style: Dialect) -> None:
    if span.parent_span_id:
        members.append(f'"{style.name("parent_span_id")}":{_base64(span.parent_span_id)}')
    if span.name:
        members.append(f'"name":{quote(span.name)}')
    if span.kind:
        members.append(f'"kind":{style.enum(span.kind, _KINDS)}')
    for name in ("start_time_unix_nano", "end_time_unix_nano"):
        if time := getattr(span, name):
            members.append(f'"{style.name(name)}":{style.int64(time)}')


def _add_count(members: list[str], name: str, count: int, style: Dialect) -> None:
    if count:
        members.append(f'"{style.name(name)}":{count}')


def _attributes(members: list[str], attributes: Iterable[KeyValue], dropped: int, style: Dialect) -> None:
    texts = [attribute_json(attribute, style) for attribute in attributes]
    if texts:
        members.append(f'"attributes":[{",".join(texts)}]')
    _add_count(members, "dropped_attributes_count", dropped, style)


def _event(event: Span.Event, style: Dialect) -> str:
    members = []
    if event.time_unix_nano:
        members.append(f'"{style.name("time_unix_nano")}":{style.int64(event.time_unix_nano)}')
    if event.name:
        members.append(f'"name":{quote(event.name)}')
    _attributes(members, event.attributes, event.dropped_attributes_count, style)
    return f"{{{','.join(members)}}}"


def _link(link: Span.Link, style: Dialect) -> str:
    members = []
    if link.trace_id:
        members.append(f'"{style.name("trace_id")}":{_base64(link.trace_id)}')
    if link.span_id:
        members.append(f'"{style.name("span_id")}":{_base64(link.span_id)}')
    if link.trace_state:
        members.append(f'"{style.name("trace_state")}":{quote(link.trace_state)}')
    _attributes(members, link.attributes, link.dropped_attributes_count, style)
    return f"{{{','.join(members)}}}"


def _status(span: Span, style: Dialect) -> str:
    members = []
    if span.status.message:
        members.append(f'"message":{quote(span.status.message)}')
    if span.status.code:
        members.append(f'"code":{style.enum(span.status.code, _CODES)}')
    return f"{{{','.join(members)}}}"
