"""Log records become points of the category logging, as DataKit's OpenTelemetry input makes them. Pure.

One record, one point, or several where its message is longer than ``log_max`` (details 5; golden ``l_*``). All
attributes become fields, as text: those of the resource count before those of the scope, and those before the
record's. Where DataKit lets an attribute take the place of the real message, status or service, or drops it for its
name (``source``, ``date``), ours keeps both: the attribute is sent as ``exported_<name>``. A record without a body is
kept with an empty message. Times are never rewritten: 0 becomes the time of receipt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs

from gateway.config import PointSettings, TraceSettings
from gateway.model import MAX_TIME_NS, Category, Event, Losses, Reason
from gateway.otlp.flatten import DELETED_KEYS, brief, cut_text, value_text
from gateway.otlp.point import MAX_FIELDS, Entry, build_event, check_expansion, checked_key
from gateway.otlp.traces import id_rule

MAX_ATTRIBUTE_BYTES = 32768
"""Of an attribute's text (golden ``l_attr_long``)."""

_PIECE_NS = 1_000_000
"""What each further piece of a long message is later."""

_RESERVED = frozenset(
    {
        "message",
        "status",
        "service",
        "trace_id",
        "span_id",
        "dk_fingerprint",
        "schema_url",
        "scope_name",
        "source",
        "date",
    }
)
_ROOM = MAX_FIELDS - 8
"""Fields for attributes and configured tags: the record's own always have their place."""
_LEVELS = ("trace", "debug", "info", "warn", "error", "fatal")
_BAD_BYTE = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True, slots=True)
class _Request:
    """What is the same for all records of a request."""

    points: PointSettings
    conf_tags: tuple[tuple[str, str], ...]
    reserved: frozenset[str]
    address: str | None
    piece: int
    """Characters of a message; 0: no bound."""
    id_text: Callable[[bytes], str]
    received_ns: int
    losses: Losses


@dataclass(frozen=True, slots=True)
class _Group:
    """What is the same for all records of a resource, then of a scope."""

    measurement: str
    tags: tuple[Entry, ...]
    own: tuple[Entry, ...]
    fields: Mapping[str, str]
    size: int
    """Bytes of the attributes as they were sent: each piece of a message repeats them."""


def flatten_logs(
    request: ExportLogsServiceRequest,
    sender_address: str | None,
    points: PointSettings,
    traces: TraceSettings,
    received_ns: int,
) -> tuple[list[Event], Losses]:
    """The points of a request, and what was left out or changed.

    ``sender_address`` becomes ``remote_ip``; None: no such tag. Raises ``Refusal`` (TOO_LARGE) where few bytes would
    become far too many.
    """
    reserved = _RESERVED if sender_address is None else _RESERVED | {"remote_ip"}
    context = _Request(
        points=points,
        conf_tags=tuple((checked_key(key), text) for key, text in traces.tags),
        reserved=reserved,
        address=sender_address,
        piece=max(0, traces.log_max_kib) * 1024,
        id_text=id_rule(traces),
        received_ns=received_ns,
        losses=Losses(),
    )
    events: list[Event] = []
    size = 0
    for resource_logs in request.resource_logs:
        resource = _resource_group(resource_logs, context)
        for scope_logs in resource_logs.scope_logs:
            group = _scope_group(resource, scope_logs, context)
            for record in scope_logs.log_records:
                pieces = _pieces(_body_text(record.body), context.piece)
                own_size = 0 if len(pieces) == 1 else record.ByteSize()
                size += (group.size + own_size) * len(pieces)
                check_expansion(size)
                _add_record(events, record, pieces, group, context)
    return events, context.losses


def _resource_group(resource_logs: ResourceLogs, context: _Request) -> _Group:
    attributes = resource_logs.resource.attributes
    names = {"log.source": "", "service.name": "", "host.name": ""}
    for attribute in attributes:
        if attribute.key in names:
            names[attribute.key] = attribute.value.string_value
    service, host = names["service.name"], names["host.name"]
    tags: list[Entry] = [("service", service or "unSetServiceName", True)]
    if context.address is not None:
        tags.append(("remote_ip", context.address, True))
    tags.append(("dk_fingerprint", f"{context.points.hostname}_{context.points.version}", True))
    if host:
        tags.append(("host", host, True))
    return _Group(
        measurement=names["log.source"] or service or "otel_logs",
        tags=tuple(tags),
        own=(("schema_url", resource_logs.schema_url, False),),
        fields=_attribute_fields(attributes, {}, context),
        size=resource_logs.resource.ByteSize(),
    )


def _scope_group(resource: _Group, scope_logs: ScopeLogs, context: _Request) -> _Group:
    return _Group(
        measurement=resource.measurement,
        tags=resource.tags,
        own=(*resource.own, ("scope_name", scope_logs.scope.name, False)),
        fields=_attribute_fields(scope_logs.scope.attributes, resource.fields, context),
        size=resource.size + scope_logs.scope.ByteSize(),
    )


def _attribute_fields(attributes: Iterable[KeyValue], earlier: Mapping[str, str], context: _Request) -> dict[str, str]:
    """``earlier`` and the fields of ``attributes``, whose keys give way to it.

    Within a list the last of a key counts; of two keys that become one the one that needed no rewriting, then the
    smaller (DataKit: any of them, golden ``l_attr_collide_flatten``).
    """
    losses = context.losses
    texts: dict[str, str] = {}
    for attribute in attributes:
        key = attribute.key
        if key in DELETED_KEYS:
            continue
        text = value_text(attribute.value)
        if text is None:
            continue
        if texts.get(key, text) != text:
            losses.change(Reason.TAG_COLLISION, f"attribute {brief(key)} is there twice; the last one counts")
        texts[key] = text
    fields = dict(earlier)
    rewritten = []
    for key in texts:
        name = checked_key(key)
        if name == key:
            _put(fields, key, key, texts[key], context)
        elif name:
            rewritten.append((name, key))
    for name, key in sorted(rewritten):
        _put(fields, name, key, texts[key], context)
    return fields


def _put(fields: dict[str, str], name: str, key: str, text: str, context: _Request) -> None:
    losses = context.losses
    if len(name) < len(key):
        losses.change(Reason.KEY_CUT, f"attribute {brief(key)} is sent as {brief(name)}")
    if name in context.reserved:
        name = checked_key(f"exported_{name}")
        losses.change(Reason.FIELD_CLASH, f"attribute {brief(key)} is sent as {name}: the record needs its key")
    if len(text) * 4 > MAX_ATTRIBUTE_BYTES:
        short = cut_text(text, MAX_ATTRIBUTE_BYTES)
        if len(short) < len(text):
            losses.change(Reason.VALUE_CUT, f"attribute {brief(key)} is longer than {MAX_ATTRIBUTE_BYTES} bytes")
        text = short
    if name not in fields and len(fields) >= _ROOM:
        losses.change(Reason.TAG_LIMIT, f"attribute {brief(key)} is beyond the {MAX_FIELDS} fields of a point")
    elif fields.setdefault(name, text) != text:
        losses.change(Reason.TAG_COLLISION, f"attribute {brief(key)}: the field {brief(name)} is taken")


def _add_record(events: list[Event], record: LogRecord, pieces: list[str], group: _Group, context: _Request) -> None:
    losses = context.losses
    sent_ns = record.time_unix_nano or record.observed_time_unix_nano
    time_ns = sent_ns or context.received_ns
    if time_ns > MAX_TIME_NS - (len(pieces) - 1) * _PIECE_NS:
        losses.leave_out(Reason.TIME_RANGE, f"a log record is of {time_ns} ns")
        return
    if not sent_ns:
        losses.change(Reason.TIME_ZERO, "a log record has no time; it gets the time of receipt")
    fields = _attribute_fields(record.attributes, group.fields, context) if record.attributes else dict(group.fields)
    for key, text in context.conf_tags:
        if key and key not in context.reserved and len(fields) < _ROOM:
            fields.setdefault(key, text)
    entries: list[Entry] = [(key, text, False) for key, text in fields.items()]
    entries += group.own
    entries.append(("span_id", context.id_text(record.span_id), False))
    entries.append(("trace_id", context.id_text(record.trace_id), False))
    entries.append(("status", _status(record), True))
    entries += (tag for tag in group.tags if tag[0] not in fields)
    for number, text in enumerate(pieces):
        events.append(
            build_event(
                Category.LOGGING,
                group.measurement,
                [*entries, ("message", text, False)],
                time_ns + number * _PIECE_NS,
                losses,
                context.points.global_tags,
            )
        )


def _status(record: LogRecord) -> str:
    """By the number of the severity; its text only beyond the 24 numbers there are (golden ``l_severities``)."""
    number = record.severity_number
    if 1 <= number <= 24:
        return _LEVELS[(number - 1) // 4]
    return (record.severity_text if number else "") or "unknown"


def _body_text(body: AnyValue) -> str:
    """The message. Of bytes that are no UTF-8 each bad one becomes U+FFFD (golden ``l_body_bytes``)."""
    kind = body.WhichOneof("value")
    if kind == "string_value":
        return str(body.string_value)
    if kind == "bytes_value":
        return _BAD_BYTE.sub("\ufffd", body.bytes_value.decode(errors="surrogateescape"))
    if kind == "double_value" and abs(body.double_value) < float("inf"):
        return f"{body.double_value:f}"
    return value_text(body) or ""


def _pieces(text: str, size: int) -> list[str]:
    """``text`` in pieces of ``size`` characters; one empty piece for an empty text."""
    if not size or len(text) <= size:
        return [text]
    return [text[at : at + size] for at in range(0, len(text), size)]
