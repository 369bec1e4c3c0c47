"""Spans become points of the category tracing, as DataKit's OpenTelemetry input makes them. Pure.

One span, one point (details 4; golden ``t_*``): its own keys first, then the attributes that the rules choose
(``span_attributes``), and in ``message`` the JSON of what is left (``span_message``). Where DataKit answers "success"
and loses the request (two ``*.system`` attributes, a missing resource or value), ours keeps every span. Times are
never rewritten: 0 becomes the time of receipt, one that no point can have leaves the span out.

Always true: a key that the span needs itself is never an attribute's; what an attribute loses that way is in message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from gateway.config import PointSettings, TraceSettings
from gateway.model import MAX_TIME_NS, Category, Event, FieldValue, Losses, Reason
from gateway.otlp.flatten import brief
from gateway.otlp.point import MAX_FIELDS, MAX_TEXT_BYTES, build_event, check_expansion, checked_key
from gateway.otlp.span_attributes import Chosen, Found, Level, choose, merge
from gateway.otlp.span_message import Dialect, attribute_json, dialect, span_json, text_attribute
from gateway.policy.rules import Rules, compile_pattern

MAX_SPAN_BYTES = 16 << 20
"""Of one span as it was sent. Dataway takes bodies of 1 MiB."""

Core = dict[str, tuple[FieldValue, bool]]
"""The span's own keys: value, and whether it is a tag."""

_STATUS = {0: "ok", 1: "ok", 2: "error"}
_KINDS = {0: "unspecified", 1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
_SYSTEMS = frozenset({"db.system", "rpc.system", "messaging.system"})
_DB_HOSTS = frozenset({"net.peer.name", "server.address"})
_ALIASES = {
    "exception.type": "error_type",
    "exception.message": "error_message",
    "exception.stacktrace": "error_stack",
}
_SOURCE_TYPES = {
    "http_scheme": "web",
    "http_method": "web",
    "rpc_system": "web",
    "db_system": "db",
    "messaging_system": "message_queue",
}


@dataclass(frozen=True, slots=True)
class _Request:
    """What is the same for all spans of a request."""

    points: PointSettings
    traces: TraceSettings
    rules: Rules
    style: Dialect
    received_ns: int
    id_text: Callable[[bytes], str]
    span_type: Callable[[str, str], str]
    common: Core
    """Keys that every span has with one value: source, remote_ip, the configured tags."""
    source_type: str
    losses: Losses


@dataclass(slots=True)
class _Group:
    """The spans of one resource. ``runtime_id`` is the resource's, else that of its first span; it holds for all."""

    service: str
    level: Level
    global_tags: tuple[tuple[str, str], ...]
    runtime_id: str
    looked_for_runtime_id: bool = False


def flatten_spans(
    request: ExportTraceServiceRequest,
    sender_address: str | None,
    points: PointSettings,
    traces: TraceSettings,
    rules: Rules,
    received_ns: int,
) -> tuple[list[Event], Losses]:
    """The points of a request, and what was left out or changed.

    ``sender_address`` becomes ``remote_ip``; None: no such tag. Raises ``Refusal`` (TOO_LARGE) where few bytes would
    become far too many, and ``ConfigError`` for a pattern in ``close_resource`` that does not compile.
    """
    _check_size(request)
    losses = Losses()
    tags = {checked_key(key): text for key, text in traces.tags}
    common: Core = {"dk_fingerprint": (f"{points.hostname}_{points.version}", True), "source": ("opentelemetry", True)}
    if sender_address is not None:
        common["remote_ip"] = (sender_address, True)
    common.update({key: (text, True) for key, text in tags.items() if key})
    id_text = id_rule(traces)
    context = _Request(
        points=points,
        traces=traces,
        rules=rules,
        style=dialect(traces.json_marshaler),
        received_ns=received_ns,
        id_text=id_text,
        span_type=_span_types(request, id_text),
        common=common,
        source_type=next((_SOURCE_TYPES[key] for key in _SOURCE_TYPES if key in tags), "custom"),
        losses=losses,
    )
    events: list[Event] = []
    size = 0
    for resource_spans in request.resource_spans:
        group = _flatten_resource(resource_spans, context)
        size += sum(len(str(event.fields.get("message", ""))) for event in group)
        check_expansion(size)
        events += _sampled(group, traces)
    return events, losses


def _check_size(request: ExportTraceServiceRequest) -> None:
    size = 0
    for resource_spans in request.resource_spans:
        shared = resource_spans.resource.ByteSize()
        for scope_spans in resource_spans.scope_spans:
            size += (shared + scope_spans.scope.ByteSize()) * len(scope_spans.spans)
    check_expansion(size)


def id_rule(traces: TraceSettings) -> Callable[[bytes], str]:
    """How ids are written (golden ``t_ids_odd``, ``t_ddtrace_ids``, ``t_zhaoshang_ids``)."""
    if traces.compatible_ddtrace:
        return lambda raw: str(int.from_bytes(raw[-8:], "big")) if len(raw) >= 8 else "0"
    if traces.compatible_zhaoshang:
        return lambda raw: _text_or_hex(raw) if len(raw) > 8 else hex_id(raw)
    return hex_id


def hex_id(raw: bytes) -> str:
    """An id as DataKit writes it: hex; ``0`` where it is empty or the one character 0."""
    return raw.hex() if raw and raw != b"0" else "0"


def _text_or_hex(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.hex()


def _span_types(request: ExportTraceServiceRequest, id_text: Callable[[bytes], str]) -> Callable[[str, str], str]:
    """Entry, local or exit, by what else the request holds (golden ``t_hierarchy``)."""
    spans: set[str] = set()
    parents: set[str] = set()
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                spans.add(id_text(span.span_id))
                parents.add(id_text(span.parent_span_id))

    def span_type(span: str, parent: str) -> str:
        if parent == "0" or parent not in spans:
            return "entry"
        return "local" if span in parents else "exit"

    return span_type


def _flatten_resource(resource_spans: ResourceSpans, context: _Request) -> list[Event]:
    group = _group(resource_spans, context)
    events = []
    for scope_spans in resource_spans.scope_spans:
        scope = Level(list(scope_spans.scope.attributes))
        for span in scope_spans.spans:
            event = _flatten_span(span, group, scope, context)
            if event is not None:
                events.append(event)
    return events


def _group(resource_spans: ResourceSpans, context: _Request) -> _Group:
    attributes = list(resource_spans.resource.attributes)
    service, runtime_id, host = "unknown_service", "", ""
    for attribute in attributes:
        if attribute.key == "service.name":
            service = attribute.value.string_value
        elif attribute.key == "runtime_id":
            runtime_id = attribute.value.string_value
        elif attribute.key == "host.name":
            host = attribute.value.string_value
    if context.traces.clean_message:
        attributes = [each for each in attributes if each.key not in ("service.name", "runtime_id")]
    global_tags = context.points.global_tags
    if context.points.host_tag == "resource" and host:
        global_tags = tuple({**dict(global_tags), "host": host}.items())
    return _Group(service, Level(attributes), global_tags, runtime_id)


def _flatten_span(span: Span, group: _Group, scope: Level, context: _Request) -> Event | None:
    """The point of ``span``; None where it was left out."""
    losses, cleans = context.losses, context.traces.clean_message
    time_ns = span.start_time_unix_nano or context.received_ns
    if time_ns > MAX_TIME_NS:
        losses.leave_out(Reason.TIME_RANGE, f"span {brief(span.name)} starts at {time_ns} ns")
        return None
    if not span.start_time_unix_nano:
        losses.change(Reason.TIME_ZERO, f"span {brief(span.name)} has no start; it gets the time of receipt")
    if span.ByteSize() > MAX_SPAN_BYTES:
        losses.leave_out(Reason.TOO_BIG_POINT, f"span {brief(span.name)} is larger than {MAX_SPAN_BYTES >> 20} MiB")
        return None

    attributes = list(span.attributes)
    core = _core(span, group, attributes, context)
    taken = _taken(frozenset(core), context.traces.del_message)
    lists = [
        group.level.choose(context.rules, taken, context.style, losses),
        scope.choose(context.rules, taken, context.style, losses),
        choose(attributes, context.rules, taken, context.style, losses),
    ]
    emptied = None
    events: list[Chosen] = []
    if span.events:
        emptied, events = _choose_events(span, core, lists, taken, context)
    merged = merge((*lists, *events), losses)

    rest = [text for chosen in lists for text in chosen.rest]
    if context.rules.span_key("trace_id") is None:
        rest.append(text_attribute("trace_id", str(core["trace_id"][0]), context.style))
    rest += [text for chosen in events for text in chosen.rest]
    rest += _cut_to_limit(merged, len(core), context)
    code = merged.get("http_status_code")
    if context.traces.tracing_metrics and code is not None and code.is_tag:
        core["http_status_class"] = (f"{str(code.value)[:1]}xx", True)

    for key, found in merged.items():
        core[key] = (found.value, found.is_tag)
    if not context.traces.del_message:
        message = span_json(span, rest, emptied if cleans else None, cleans, context.style)
        if len(message) * 4 > MAX_TEXT_BYTES and len(message.encode()) > MAX_TEXT_BYTES:
            losses.leave_out(Reason.TOO_BIG_POINT, f"the message of span {brief(span.name)} is too large")
            return None
        core["message"] = (message, False)
    entries = [(key, value, is_tag) for key, (value, is_tag) in core.items()]
    return build_event(Category.TRACING, "opentelemetry", entries, time_ns, losses, group.global_tags)


@lru_cache(maxsize=256)
def _taken(core: frozenset[str], deletes_message: bool) -> frozenset[str]:
    """The keys that no attribute may have. Few sets occur; one object each, so that levels find what they chose."""
    return core if deletes_message else core | {"message"}


def _core(span: Span, group: _Group, attributes: list[KeyValue], context: _Request) -> Core:
    """The span's own keys, in DataKit's order. Takes the attributes that became one of them off ``attributes``."""
    traces, id_text = context.traces, context.id_text
    trace, own, parent = id_text(span.trace_id), id_text(span.span_id), id_text(span.parent_span_id)
    nanoseconds = span.end_time_unix_nano - span.start_time_unix_nano
    duration = nanoseconds // 1000 if nanoseconds >= 0 else -(-nanoseconds // 1000)  # Go cuts towards zero
    core: Core = {
        "trace_id": (trace, False),
        "parent_id": (parent, False),
        "span_id": (own, False),
        "resource": (span.name, False),
        "start": (span.start_time_unix_nano // 1000, False),
        "duration": (duration, False),
        "status": (_STATUS.get(span.status.code, "info") if span.HasField("status") else "info", True),
        "span_type": (context.span_type(own, parent), True),
        "service": (group.service, True),
    }
    system = _first_system(attributes) if traces.split_service_name else None
    if system is not None:
        core["service"] = (system.value.string_value, True)
        core["base_service"] = (group.service, True)
        if traces.clean_message:
            attributes.remove(system)
    core.update(context.common)
    if span.kind in _KINDS:
        core.setdefault("span_kind", (_KINDS[span.kind], True))
    if any(attribute.key == "db.system" for attribute in attributes):
        host = next((attribute.value.string_value for attribute in attributes if attribute.key in _DB_HOSTS), "")
        if host:
            core.setdefault("db_host", (host, True))
    core.setdefault("source_type", (context.source_type, True))
    _add_runtime_id(core, group, attributes, traces.clean_message)
    return core


def _first_system(attributes: Iterable[KeyValue]) -> KeyValue | None:
    return next((each for each in attributes if each.key in _SYSTEMS and each.value.string_value), None)


def _add_runtime_id(core: Core, group: _Group, attributes: list[KeyValue], cleans: bool) -> None:
    if not group.runtime_id and not group.looked_for_runtime_id:
        own = next((each for each in attributes if each.key == "runtime_id" and each.value.string_value), None)
        if own is not None:
            group.runtime_id = own.value.string_value
            if cleans:
                attributes.remove(own)
    group.looked_for_runtime_id = True
    if not group.runtime_id:
        return
    core["runtime-id"] = core["runtime_id"] = (group.runtime_id, False)


def _choose_events(
    span: Span, core: Core, lists: Sequence[Chosen], taken: frozenset[str], context: _Request
) -> tuple[int | None, list[Chosen]]:
    """What the attributes of a span's events become; and the index of its first exception, which goes to ``core`` as
    ``error_type``, ``error_message`` and ``error_stack``.

    With ``clean_message`` that event leaves the message. Its other attributes are treated as those of other events,
    and so is a type that ``error.type`` leaves no room for; DataKit loses both (golden ``t_events_exception``,
    ``t_error_type_and_exception``).
    """
    emptied = next((at for at, event in enumerate(span.events) if event.name == "exception"), None)
    chosen = []
    for at, event in enumerate(span.events):
        attributes: Iterable[KeyValue] = event.attributes
        if at == emptied:
            left = _alias(event, core, lists)
            attributes = left if context.traces.clean_message else event.attributes
        chosen.append(choose(attributes, context.rules, taken, context.style, context.losses))
    return emptied, chosen


def _alias(event: Span.Event, core: Core, lists: Sequence[Chosen]) -> list[KeyValue]:
    """Put the texts of the exception into ``core``; the attributes that found no place there."""
    left = []
    for attribute in event.attributes:
        alias = _ALIASES.get(attribute.key)
        if alias is None or not attribute.value.HasField("string_value"):
            left.append(attribute)
            continue
        text = attribute.value.string_value
        earlier = next((chosen.found[alias].value for chosen in lists if alias in chosen.found), None)
        if earlier is None and alias not in core:
            core[alias] = (text, False)
        elif text != (core[alias][0] if earlier is None else earlier):
            left.append(attribute)
    return left


def _cut_to_limit(merged: dict[str, Found], core: int, context: _Request) -> list[str]:
    """Take what is beyond the fields of a point off ``merged``; its JSON, for the message."""
    room = MAX_FIELDS - core - 2  # message, dk_sampling_rate
    if len(merged) <= room:
        return []
    over = list(merged)[room:]
    context.losses.change(Reason.TAG_LIMIT, f"attribute {brief(over[0])} stays in message: too many fields", len(over))
    return [attribute_json(merged.pop(key).attribute, context.style) for key in over]


def _sampled(events: list[Event], traces: TraceSettings) -> list[Event]:
    """The points of one resource that are kept: all or none (details 4.8).

    ``close_resource`` comes first; a batch with an error is never sampled.
    """
    if not events:
        return events
    if traces.close_resource and any(_is_closed(event, traces) for event in events):
        return []
    rate = traces.sampling_rate
    if rate is None or any(event.tags.get("status") in ("error", "critical") for event in events):
        return events
    first, *others = events
    if _number_of_id(str(first.fields["trace_id"])) % 10000 > int(10000 * rate):
        return []
    return [replace(first, fields={**first.fields, "dk_sampling_rate": float(rate)}), *others]


def _is_closed(event: Event, traces: TraceSettings) -> bool:
    resource = str(event.fields["resource"])
    return any(
        compile_pattern(pattern)(resource)
        for service, patterns in traces.close_resource
        if service in ("*", event.tags.get("service"))
        for pattern in patterns
    )


def _number_of_id(text: str) -> int:
    """DataKit's number of a trace id: decimal, else hex of 64 bits, else the last eight characters themselves."""
    for base in (10, 16):
        try:
            number = int(text, base) if len(text) <= 64 else 2**64
        except ValueError:
            continue
        if 0 <= number < 2**64:
            return number
    return int.from_bytes(text.encode()[-8:], "big")
