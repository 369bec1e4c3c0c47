"""OTLP/JSON becomes a protobuf message. Pure.

OTLP/JSON is proto3 JSON with four differences (OTLP specification, JSON Protobuf Encoding): trace and span ids are
hex, enums are integers, names are lowerCamelCase only, and what a receiver does not know it ignores. So the general
parser for proto3 JSON does not do: it would read ids as base64 and refuse what is new.

- The bytes are hostile: nesting is bounded, inside members that nobody knows, too; a number has a range; a text is
  UTF-8 without lone surrogates.
- A member that is null is absent. Of a member that is there twice the last counts.
- ``lenient`` is what DataKit's parser takes beyond that: enums by name and names in snake_case. Both are counted.
- A wrong shape refuses the request, and the message names its place: ``resourceMetrics[0].resource: …``.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from binascii import Error as BinasciiError
from binascii import unhexlify
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, nan
from typing import Any, NoReturn

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.model import Losses, Reason, Refusal, Signal
from gateway.otlp.flatten import brief

MAX_DEPTH = 100
"""Objects and arrays inside one another. Protobuf's own limit of 100 messages is farther away than that."""

Request = ExportMetricsServiceRequest | ExportTraceServiceRequest | ExportLogsServiceRequest

_REQUESTS: dict[Signal, type[Request]] = {
    Signal.METRICS: ExportMetricsServiceRequest,
    Signal.TRACES: ExportTraceServiceRequest,
    Signal.LOGS: ExportLogsServiceRequest,
}

_IDS = frozenset({"trace_id", "span_id", "parent_span_id"})
_INTEGER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)
_NOT_FINITE = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}


def parse(signal: Signal, body: bytes, lenient: bool, losses: Losses) -> Any:
    """The request (``Request``, of the signal's type) that ``body`` says. An empty body is an empty request.

    Raises ``Refusal`` (BAD_DATA), with the place in its message.
    """
    request = _REQUESTS[signal]()
    reader = _Reader(lenient, losses)
    try:
        content = _load(body)
        reader.fill(request, content, 1)
    except _Wrong as wrong:
        raise Refusal(Reason.BAD_DATA, f"{signal.name.lower()} request: {wrong}") from None
    if content and not reader.recognised:
        known = ", ".join(_members(request.DESCRIPTOR))
        losses.change(
            Reason.NOTHING_RECOGNISED, f"nothing recognised: the members of this request are not {known}{reader.hint}"
        )
    return request


class _Wrong(Exception):
    """Something in the body is not as it should be. ``steps`` lead to it, the last one first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.steps: list[str] = []

    def __str__(self) -> str:
        path = "".join(reversed(self.steps)).lstrip(".")
        return f"{path}: {self.args[0]}" if path else str(self.args[0])


def _load(body: bytes) -> object:
    try:
        text = body.decode("utf-8-sig")
        return json.loads(text, parse_constant=_refuse_constant) if text.strip() else {}
    except UnicodeDecodeError as error:
        raise _Wrong(f"not UTF-8 at offset {error.start} of {len(body)}") from None
    except json.JSONDecodeError as error:
        raise _Wrong(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError:
        raise _Wrong("a number has more digits than can be read") from None
    except RecursionError:
        raise _Wrong(_TOO_DEEP) from None


_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"


def _refuse_constant(name: str) -> NoReturn:
    raise _Wrong(f"not JSON: {name} stands there bare; OTLP/JSON writes it as a string")


@dataclass(frozen=True, slots=True)
class _Member:
    """How one member of a message is read. ``read`` is for a scalar; an enum's and a message's are None."""

    name: str
    repeated: bool
    enum: EnumDescriptor | None
    read: Callable[[object], Any] | None


class _Reader:
    """One body on its way into a message."""

    def __init__(self, lenient: bool, losses: Losses) -> None:
        self.lenient = lenient
        self.losses = losses
        self.recognised = False
        self.hint = ""

    def fill(self, message: Message, content: object, depth: int) -> None:
        """Set the fields of ``message`` from a JSON object, ``depth`` levels down. Raises ``_Wrong``."""
        if type(content) is not dict:
            raise _Wrong(f"{_shape(content)} where an object belongs")
        if depth > MAX_DEPTH:
            raise _Wrong(_TOO_DEEP)
        members = _members(message.DESCRIPTOR)
        for key, value in content.items():
            member = members.get(key)
            try:
                if member is None:
                    member = self._unknown(message, key, value, depth)
                    if member is None:
                        continue
                self.recognised = True
                if value is not None:
                    self._set(message, member, value, depth + 1)
            except _Wrong as wrong:
                wrong.steps.append(f".{key[:64]}")
                raise

    def _set(self, message: Message, member: _Member, value: object, depth: int) -> None:
        if member.repeated:
            self._extend(getattr(message, member.name), member, value, depth)
        elif member.read is not None:
            _assign(message, member.name, member.read(value))
        elif member.enum is not None:
            _assign(message, member.name, self._enum(member.enum, value))
        else:
            part = getattr(message, member.name)
            part.SetInParent()
            self.fill(part, value, depth)

    def _extend(self, field: Any, member: _Member, values: object, depth: int) -> None:
        if type(values) is not list:
            raise _Wrong(f"{_shape(values)} where an array belongs")
        if depth > MAX_DEPTH:
            raise _Wrong(_TOO_DEEP)
        for at, value in enumerate(values):
            try:
                if member.read is not None:
                    _append(field, member.read(value))
                else:
                    self.fill(field.add(), {} if value is None else value, depth + 1)
            except _Wrong as wrong:
                wrong.steps.append(f"[{at}]")
                raise

    def _enum(self, enum: EnumDescriptor, value: object) -> int:
        if isinstance(value, str):
            number = enum.values_by_name.get(value)
            if self.lenient and number is not None:
                self.losses.change(Reason.ENUM_NAME, f"{brief(value)}: enums are integers in OTLP/JSON")
                return int(number.number)
            raise _Wrong(f"{brief(value)} where an integer belongs: enums are integers in OTLP/JSON")
        return _read_integer(value)

    def _unknown(self, message: Message, key: str, value: object, depth: int) -> _Member | None:
        """What a member that OTLP/JSON does not have stands for: nothing; in snake_case, and lenient, its field."""
        _check_depth(value, depth)
        if "_" not in key or (field := message.DESCRIPTOR.fields_by_name.get(key)) is None:
            return None
        self.hint = f"; {brief(key)} looks like snake_case, OTLP/JSON has {field.json_name!r}"
        what = "taken for" if self.lenient else "ignored, OTLP/JSON has"
        self.losses.change(Reason.SNAKE_CASE_NAME, f"{brief(key)} looks like snake_case: {what} {field.json_name!r}")
        return _members(message.DESCRIPTOR)[field.json_name] if self.lenient else None


def _check_depth(value: object, depth: int) -> None:
    """Raise ``_Wrong`` if a value that nobody reads is nested too deep."""
    level = [value]
    while level:
        depth += 1
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if depth > MAX_DEPTH and any(isinstance(item, dict | list) for item in level):
            raise _Wrong(_TOO_DEEP)
        level = inner


def _assign(message: Message, name: str, value: Any) -> None:
    try:
        setattr(message, name, value)
    except (ValueError, OverflowError) as error:
        raise _wrong_value(value, error) from None


def _append(field: Any, value: Any) -> None:
    try:
        field.append(value)
    except (ValueError, OverflowError) as error:
        raise _wrong_value(value, error) from None


def _wrong_value(value: object, error: Exception) -> _Wrong:
    if isinstance(error, UnicodeError):
        return _Wrong("a text with half of a surrogate pair, which is no character")
    return _Wrong(f"{str(value)[:32]} is out of range")


@lru_cache(maxsize=256)
def _members(descriptor: Descriptor) -> Mapping[str, _Member]:
    """The members of a message by their names in OTLP/JSON."""
    return {field.json_name: _member(field) for field in descriptor.fields}


def _member(field: FieldDescriptor) -> _Member:
    read: Callable[[object], Any] | None
    if field.type == FieldDescriptor.TYPE_BYTES:
        read = _read_id if field.name in _IDS else _read_base64
    else:
        read = _SCALARS.get(field.cpp_type)
    return _Member(field.name, field.is_repeated, field.enum_type, read)


def _shape(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a string"}
    return names.get(type(value), "a number")


def _read_text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise _Wrong(f"{_shape(value)} where a string belongs")


def _read_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _Wrong(f"{_shape(value)} where true or false belongs")


def _read_integer(value: object) -> int:
    """A number, or, as proto3 JSON writes 64 bits, a string of digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise _Wrong(f"{brief(value) if isinstance(value, str) else _shape(value)} where an integer belongs")


def _read_double(value: object) -> float:
    if isinstance(value, str):
        if value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if _NUMBER.fullmatch(value):
            return float(value)
        raise _Wrong(f"{brief(value)} where a number belongs")
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _Wrong("a number out of a double's range") from None
    raise _Wrong(f"{_shape(value)} where a number belongs")


def _read_id(value: object) -> bytes:
    text = _read_text(value)
    try:
        return unhexlify(text)
    except ValueError:
        raise _Wrong(f"{brief(text)} is not hex: OTLP/JSON writes trace and span ids in hex") from None


def _read_base64(value: object) -> bytes:
    """Base64 of either alphabet, with its padding or without."""
    text = _read_text(value).rstrip("=").translate(_TO_STANDARD)
    try:
        return b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (BinasciiError, ValueError):
        raise _Wrong(f"{brief(text)} is not base64") from None


_TO_STANDARD = str.maketrans("-_", "+/")

_SCALARS: dict[int, Callable[[object], Any]] = {
    FieldDescriptor.CPPTYPE_STRING: _read_text,
    FieldDescriptor.CPPTYPE_BOOL: _read_bool,
    FieldDescriptor.CPPTYPE_DOUBLE: _read_double,
    FieldDescriptor.CPPTYPE_FLOAT: _read_double,
    FieldDescriptor.CPPTYPE_INT32: _read_integer,
    FieldDescriptor.CPPTYPE_INT64: _read_integer,
    FieldDescriptor.CPPTYPE_UINT32: _read_integer,
    FieldDescriptor.CPPTYPE_UINT64: _read_integer,
}
