"""Spans against the points of a real DataKit; what Locum does better; and that no request, however odd, breaks it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from gateway.config import PointSettings, PolicySettings, TraceSettings
from gateway.model import MAX_TIME_NS, ConfigError, Event, Reason, Refusal
from gateway.otlp.point import MAX_FIELDS, decode_point, encode_point, line
from tests.data import golden, golden_cases
from tests.otlp.deviations import DEVIATIONS
from tests.otlp.events import (
    NO_POLICY,
    TRACES,
    case_request,
    case_settings,
    first_policy,
    flatten,
    golden_points,
    ours,
    parse,
    theirs,
)
from tests.otlp.points import RECEIVED_NS

INSTEAD = json.loads((Path(__file__).parent / "instead_events.json").read_text())
"""What we send where we differ on purpose, in the form of the golden files."""

FIRST_SET = {f"{found['name']}-{found['customer_tags']}": found for found in golden("traces")}
SECOND_SET = {
    found["name"]: found
    for found in golden_cases("t_", "pl_", "pp_", "tc_", "tm_", "g_gzip", "wp_", "uc_", "mp_")
    if found["request"]["signal"] == "traces"
}
LINES = golden_cases("p_lineproto_trace")
START = 1_700_000_000_123_456_789
ALL = PolicySettings(customer_tags_all=True)


@pytest.mark.parametrize("name", FIRST_SET)
def test_the_points_of_a_golden_request_are_datakits_points(name: str) -> None:
    found = FIRST_SET[name]
    sent, losses = flatten(parse("traces", found["request"]), policy=first_policy(found["customer_tags"]))
    assert ours(sent) == theirs(golden_points(found))
    assert not losses.left_out


@pytest.mark.parametrize("name", [name for name in SECOND_SET if name != "t_json_base64_ids"])
def test_the_points_of_a_finer_golden_case_are_datakits_points_or_those_of_the_table(name: str) -> None:
    found = SECOND_SET[name]
    sent, _ = flatten(case_request(found), *case_settings(found))
    assert (name in INSTEAD) == (name in DEVIATIONS)
    assert ours(sent) == theirs(INSTEAD[name] if name in DEVIATIONS else golden_points(found))
    if name in DEVIATIONS and not name.startswith("tc_"):
        assert ours(sent) != theirs(golden_points(found)), "no deviation any more: take it off the table"


def test_ids_in_base64_are_refused_with_their_place() -> None:
    with pytest.raises(Refusal, match=r"spans\[0\]\.traceId"):
        case_request(SECOND_SET["t_json_base64_ids"])


@pytest.mark.parametrize("found", LINES, ids=lambda found: found["name"])
def test_line_protocol_is_datakits(found: dict[str, Any]) -> None:
    (event,), _ = flatten(case_request(found), *case_settings(found))
    assert line(event) == "\n".join(point["line"] for point in found["points"])


def request(*spans: Span, resource: dict[str, Any] | None = None, scope: dict[str, Any] | None = None) -> Any:
    """A request of one resource and one scope."""
    found = ExportTraceServiceRequest()
    group = found.resource_spans.add()
    group.resource.attributes.extend(attributes(**(resource or {})))
    scope_spans = group.scope_spans.add()
    scope_spans.scope.attributes.extend(attributes(**(scope or {})))
    scope_spans.spans.extend(spans)
    return found


def attributes(**values: Any) -> list[KeyValue]:
    """Attributes; ``__`` in a name is a dot."""
    return [KeyValue(key=key.replace("__", "."), value=any_value(value)) for key, value in values.items()]


def any_value(value: Any) -> AnyValue:
    if isinstance(value, AnyValue):
        return value
    name = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value", bytes: "bytes_value"}
    return AnyValue(**{name[type(value)]: value})


def span(**values: Any) -> Span:
    given = {"trace_id": b"t" * 16, "span_id": b"s" * 8, "start_time_unix_nano": START, **values}
    own = given.pop("own", {})
    return Span(**given, attributes=attributes(**own))


def one(found: Any, **settings: Any) -> Event:
    (event,), _ = flatten(found, **settings)
    return event


def message(event: Event) -> Any:
    return json.loads(str(event.fields["message"]))


def left(event: Event) -> dict[str, Any]:
    """The attributes in the message, by key."""
    return {each["key"]: each.get("value") for each in message(event).get("attributes", [])}


def test_the_later_list_wins_and_the_loss_is_counted() -> None:
    found = request(span(own={"env": "span"}), resource={"env": "resource"}, scope={"env": "scope"})
    (event,), losses = flatten(found)
    assert event.fields["env"] == "span"
    assert losses.changed == {Reason.TAG_COLLISION: 2}
    found.resource_spans[0].scope_spans[0].spans[0].events.add(name="e").attributes.extend(attributes(env="event"))
    assert one(found).fields["env"] == "event"


def test_three_copies_that_are_the_same_are_no_loss() -> None:
    (event,), losses = flatten(request(span(own={"env": "a"}), resource={"env": "a"}, scope={"env": "a"}))
    assert event.fields["env"] == "a"
    assert not losses.changed


@pytest.mark.parametrize(
    "key", ["trace_id", "status", "service", "source", "remote_ip", "dk_fingerprint", "span_type", "message", "start"]
)
def test_no_attribute_takes_the_place_of_the_spans_own_key(key: str) -> None:
    plain = one(request(span()), policy=ALL)
    for found in (request(span(own={key: "mine"})), request(span(), resource={key: "mine"})):
        (event,), losses = flatten(found, policy=ALL)
        assert event.tags == plain.tags
        assert {**event.fields, "message": ""} == {**plain.fields, "message": ""}
        assert left(event)[key] == {"stringValue": "mine"}
        assert losses.changed == {Reason.FIELD_CLASH: 1}


def test_keys_that_only_some_spans_need_are_free_for_the_attributes_of_the_others() -> None:
    database = span(own={"db.system": "mysql", "server.address": "db-1"})
    event, other = flatten(request(database, span(), resource={"base_service": "b", "db_host": "h"}), policy=ALL)[0]
    assert event.tags["base_service"] == "unknown_service"
    assert left(event) == {"base_service": {"stringValue": "b"}}
    assert event.fields["db_host"] == "h"  # db.system left with clean_message, so the span has no db_host itself
    assert (other.fields["base_service"], other.fields["db_host"]) == ("b", "h")
    event = one(request(database, resource={"db_host": "h"}), policy=ALL, traces=replace(TRACES, clean_message=False))
    assert event.tags["db_host"] == "db-1"
    assert left(event) == {"db_host": {"stringValue": "h"}}


def test_two_systems_name_the_service_by_the_first_and_lose_nothing() -> None:
    event = one(request(span(own={"rpc.system": "grpc", "db.system": "mysql", "server.address": "db"})))
    assert (event.tags["service"], event.tags["base_service"]) == ("grpc", "unknown_service")
    assert event.fields["db_system"] == "mysql"
    assert event.tags["db_host"] == "db"


def test_an_empty_system_names_no_service() -> None:
    event = one(request(span(own={"db.system": "", "rpc.system": "grpc"}), resource={"service.name": "svc"}))
    assert event.tags["service"] == "grpc"
    event = one(request(span(own={"db.system": ""}), resource={"service.name": "svc"}))
    assert event.tags["service"] == "svc"
    assert "base_service" not in event.tags


def test_the_runtime_id_of_the_first_span_holds_for_those_behind_it() -> None:
    events, _ = flatten(request(span(own={"runtime_id": "r1"}), span(own={"runtime_id": "r2"}), span()))
    assert [event.fields.get("runtime_id") for event in events] == ["r1", "r1", "r1"]
    assert [event.fields.get("runtime-id") for event in events] == ["r1", "r1", "r1"]
    assert ["runtime_id" in left(event) for event in events] == [False, True, False]


def test_a_runtime_id_that_only_a_later_span_has_stays_in_its_message() -> None:
    first, later = flatten(request(span(), span(own={"runtime_id": "r2"})))[0]
    assert "runtime_id" not in first.fields | later.fields
    assert left(later)["runtime_id"] == {"stringValue": "r2"}


def test_an_exception_loses_nothing_to_its_aliases() -> None:
    found = request(span(own={"error.type": "E1"}))
    event = found.resource_spans[0].scope_spans[0].spans[0].events.add(name="exception")
    event.attributes.extend(
        [
            *attributes(**{"exception.type": "E2", "exception.message": 5, "exception.stacktrace": "first", "x": 1}),
            *attributes(**{"exception.stacktrace": "second"}),
        ]
    )
    point = one(found)
    assert point.fields["error_type"] == "E1"
    assert point.fields["exception_type"] == "E2"
    assert point.fields["exception_message"] == 5
    assert (point.fields["error_stack"], point.fields["exception_stacktrace"]) == ("first", "second")
    assert left(point)["x"] == {"intValue": "1"}
    assert message(point)["events"] == [{}]


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "unspecified"), (1, "internal"), (2, "server"), (3, "client"), (4, "producer"), (5, "consumer"), (9, None)],
)
def test_kinds(number: int, name: str | None) -> None:
    found = request(span())
    found.resource_spans[0].scope_spans[0].spans[0].kind = number
    assert one(found).tags.get("span_kind") == name


@pytest.mark.parametrize(("code", "status"), [(0, "ok"), (1, "ok"), (2, "error"), (7, "info")])
def test_status(code: int, status: str) -> None:
    assert one(request(span(status=Status(code=code)))).tags["status"] == status  # type: ignore[arg-type]
    assert one(request(span())).tags["status"] == "info"


@pytest.mark.parametrize(
    ("start", "end", "time", "duration"),
    [
        (START, START + 1999, START, 1),
        (START, START - 1999, START, -1),
        (START, 0, START, -(START // 1000)),
        (0, 5000, RECEIVED_NS, 5),
        (MAX_TIME_NS, MAX_TIME_NS, MAX_TIME_NS, 0),
        (MAX_TIME_NS + 1, 0, None, None),
        (2**64 - 1, 0, None, None),
    ],
)
def test_times(start: int, end: int, time: int | None, duration: int | None) -> None:
    events, losses = flatten(request(span(start_time_unix_nano=start, end_time_unix_nano=end), span()))
    if time is None:
        assert losses.left_out == {Reason.TIME_RANGE: 1}
        assert len(events) == 1
    else:
        assert (events[0].time_ns, events[0].fields["duration"], events[0].fields["start"]) == (
            time,
            duration,
            start // 1000,
        )
        assert losses.changed == ({} if start else {Reason.TIME_ZERO: 1})


def test_what_is_not_finite_stays_in_the_message() -> None:
    own = {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1e21}
    event = one(request(span(own=own)), policy=ALL)
    assert event.fields["d"] == 1e21
    assert [value["doubleValue"] for value in left(event).values()] == ["NaN", "Infinity", "-Infinity"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2.0, "2"),
        (-0.0, "-0"),
        (1e20, "100000000000000000000"),
        (1.2345678901234567e20, "123456789012345670000"),
        (1e21, "1e+21"),
        (1e-6, "0.000001"),
        (9.5e-7, "9.5e-7"),
    ],
)
def test_numbers_in_a_message_are_written_as_go_does(number: float, text: str) -> None:
    event = one(request(span(own={"x": number})))
    assert f'{{"doubleValue":{text}}}' in str(event.fields["message"])


def test_more_attributes_than_a_point_has_fields_stay_in_the_message() -> None:
    own = {f"k{number}": number for number in range(2000)}
    (event,), losses = flatten(request(span(own=own)), policy=ALL)
    assert len(event.fields) <= MAX_FIELDS
    numbers = {key for key in event.fields if key[1:].isdigit()}
    assert numbers | left(event).keys() == own.keys()
    assert losses.changed == {Reason.TAG_LIMIT: len(left(event))}


def test_a_tag_is_cut_between_characters() -> None:
    (event,), losses = flatten(request(span(), resource={"service.name": "é" * 600 + "x\\\n"}))
    assert event.tags["service"] == "é" * 512
    assert losses.changed == {Reason.VALUE_CUT: 1}


def test_conf_tags_override_and_global_tags_give_way() -> None:
    traces = replace(TRACES, tags=(("service", "fixed"), ("a.b", "c")))
    points = PointSettings(hostname="h", global_tags=(("host", "h"), ("env", "global"), ("dc", "d")))
    event = one(request(span(own={"env": "mine"})), traces=traces, points=points)
    assert (event.tags["service"], event.tags["a_b"], event.tags["dc"]) == ("fixed", "c", "d")
    assert event.fields["env"] == "mine"
    assert "env" not in event.tags


def test_the_host_is_the_senders_where_the_gateway_serves_many() -> None:
    points = PointSettings(hostname="h", global_tags=(("host", "h"),), host_tag="resource")
    assert one(request(span(), resource={"host.name": "gpu-1"}), points=points).tags["host"] == "gpu-1"
    assert one(request(span()), points=points).tags["host"] == "h"


def test_without_a_sender_there_is_no_remote_ip_and_an_attribute_may_have_the_name() -> None:
    event = one(request(span(own={"remote_ip": "x"})), address=None, policy=ALL)
    assert event.fields["remote_ip"] == "x"
    assert "remote_ip" not in event.tags


@pytest.mark.parametrize(("service", "kept"), [("svc", 0), ("other", 2)])
def test_a_closed_resource_takes_its_whole_batch_along(service: str, kept: int) -> None:
    traces = replace(TRACES, close_resource=(("svc", ("^drop",)),))
    found = request(span(name="drop-me"), span(name="kid"), resource={"service.name": service})
    assert len(flatten(found, traces=traces)[0]) == kept


def test_a_bad_pattern_of_close_resource_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"\(\?!"):
        flatten(request(span()), traces=replace(TRACES, close_resource=(("*", ("a(?!b)",)),)))


def test_the_sampler_keeps_errors_and_marks_the_first_span_of_what_it_keeps() -> None:
    sampler = replace(TRACES, sampling_rate=0.5)
    low, high = b"\0" * 8, b"\0\0\0\0\0\0\x27\x0f"  # 0 and 9999: short ids are hex numbers
    events, _ = flatten(request(span(trace_id=low), span(trace_id=low)), traces=sampler)
    assert [event.fields.get("dk_sampling_rate") for event in events] == [0.5, None]
    assert flatten(request(span(trace_id=high)), traces=sampler)[0] == []
    error = Status(code=Status.STATUS_CODE_ERROR)
    events, _ = flatten(request(span(trace_id=high), span(trace_id=high, status=error)), traces=sampler)
    assert ["dk_sampling_rate" in event.fields for event in events] == [False, False]


def test_a_span_that_no_receiver_takes_is_left_out() -> None:
    events, losses = flatten(request(span(own={"big": "x" * (17 << 20)}), span()))
    assert len(events) == 1
    assert losses.left_out == {Reason.TOO_BIG_POINT: 1}


def test_a_large_resource_of_very_many_spans_is_refused() -> None:
    found = request(*[span() for _ in range(2000)], resource={"big": "x" * (1 << 18)})
    with pytest.raises(Refusal) as caught:
        flatten(found)
    assert caught.value.reason is Reason.TOO_LARGE


def test_the_deepest_value_that_a_request_can_hold_is_read() -> None:
    value = AnyValue(string_value="end")
    depth = 0
    while True:
        deeper = AnyValue(array_value=ArrayValue(values=[value]))
        try:
            found = ExportTraceServiceRequest.FromString(request(span(own={"deep": deeper})).SerializeToString())
        except Exception:  # noqa: BLE001 - upb's own limit
            break
        value, depth = deeper, depth + 1
    assert depth > 40
    found = request(span(own={"deep": value}))
    assert "end" in json.dumps(message(one(found)))
    assert "end" in str(one(found, policy=ALL).fields["deep"])


KEYS = st.one_of(
    st.sampled_from(
        ["db.system", "rpc.system", "env", "status", "http.status_code", "runtime_id", "a.b", "a_b", "", "trace_id"]
    ),
    st.text(max_size=8),
)
VALUES = st.recursive(
    st.one_of(
        st.just(AnyValue()),
        st.builds(lambda value: AnyValue(string_value=value), st.text(max_size=12)),
        st.builds(lambda value: AnyValue(bool_value=value), st.booleans()),
        st.builds(lambda value: AnyValue(int_value=value), st.integers(-(2**63), 2**63 - 1)),
        st.builds(lambda value: AnyValue(double_value=value), st.floats()),
        st.builds(lambda value: AnyValue(bytes_value=value), st.binary(max_size=6)),
    ),
    lambda inner: st.one_of(
        st.builds(lambda values: AnyValue(array_value=ArrayValue(values=values)), st.lists(inner, max_size=3)),
        st.builds(
            lambda values: AnyValue(
                kvlist_value=KeyValueList(values=[KeyValue(key=key, value=value) for key, value in values])
            ),
            st.lists(st.tuples(st.text(max_size=4), inner), max_size=3),
        ),
    ),
    max_leaves=5,
)
PAIRS = st.builds(lambda key, value: KeyValue(key=key, value=value), KEYS, VALUES) | st.builds(
    lambda key: KeyValue(key=key), KEYS
)
LISTS = st.lists(PAIRS, max_size=5)
IDS = st.sampled_from([b"", b"0", b"a" * 8, b"b" * 8, b"\xff" * 16])
TIMES = st.sampled_from([0, 1, START, START + 5, MAX_TIME_NS, 2**63, 2**64 - 1])
SPANS = st.builds(
    Span,
    trace_id=IDS,
    span_id=IDS,
    parent_span_id=IDS,
    trace_state=st.sampled_from(["", "a=b"]),
    name=st.text(max_size=5),
    kind=st.integers(0, 5),
    start_time_unix_nano=TIMES,
    end_time_unix_nano=TIMES,
    attributes=LISTS,
    dropped_attributes_count=st.integers(0, 2),
    events=st.lists(
        st.builds(
            Span.Event,
            time_unix_nano=TIMES,
            name=st.sampled_from(["", "e", "exception"]),
            attributes=LISTS,
            dropped_attributes_count=st.integers(0, 2),
        ),
        max_size=2,
    ),
    dropped_events_count=st.integers(0, 2),
    links=st.lists(st.builds(Span.Link, trace_id=IDS, span_id=IDS, attributes=LISTS), max_size=2),
    dropped_links_count=st.integers(0, 2),
    status=st.one_of(st.none(), st.builds(Status, code=st.integers(0, 2), message=st.text(max_size=3))),
)


@settings(max_examples=150, deadline=None)
@given(
    spans=st.lists(SPANS, max_size=4),
    resource=LISTS,
    scope=LISTS,
    traces=st.builds(
        TraceSettings,
        split_service_name=st.booleans(),
        clean_message=st.booleans(),
        del_message=st.booleans(),
        json_marshaler=st.sampled_from(["protojson", "gojson", "jsoniter"]),
        compatible_ddtrace=st.booleans(),
        compatible_zhaoshang=st.booleans(),
        sampling_rate=st.sampled_from([None, 0.0, 0.5, 1.0]),
        tracing_metrics=st.booleans(),
    ),
    policy=st.sampled_from([NO_POLICY, ALL, PolicySettings(("a.b", "reg:x"))]),
)
def test_every_request_gives_sound_points(
    spans: list[Span],
    resource: list[KeyValue],
    scope: list[KeyValue],
    traces: TraceSettings,
    policy: PolicySettings,
) -> None:
    """Keys are unique, messages are JSON, every span is a point or counted, and a point reads back as it was."""
    found = request(*spans)
    found.resource_spans[0].resource.attributes.extend(resource)
    found.resource_spans[0].scope_spans[0].scope.attributes.extend(scope)
    events, losses = flatten(found, traces=traces, policy=policy)
    if traces.sampling_rate is None:
        assert len(events) + sum(losses.left_out.values()) == len(spans)
    for event in events:
        assert not event.tags.keys() & event.fields.keys()
        assert all("." not in key for key in (*event.tags, *event.fields))
        assert decode_point(encode_point(event), event.category) == event
        assert line(event)
        assert {"status", "service", "span_type", "dk_fingerprint", "remote_ip", "host"} <= event.tags.keys() | {
            *event.fields
        }
        assert ("message" in event.fields) is not traces.del_message
        if not traces.del_message:
            assert isinstance(message(event), dict)


@settings(max_examples=200, deadline=None)
@given(sent=SPANS)
def test_a_message_that_keeps_everything_is_protobufs_own_json(sent: Span) -> None:
    """protobuf's writer is the oracle for ours: with nothing chosen and nothing cleaned, the message is the span."""
    sent.start_time_unix_nano = START
    for attribute in (*sent.attributes, *(each for event in sent.events for each in event.attributes)):
        attribute.key = f"x.{attribute.key}"
    traces = replace(TRACES, clean_message=False, split_service_name=False)
    event = one(request(sent), traces=traces)
    wanted = Span()
    wanted.CopyFrom(sent)
    wanted.attributes.append(KeyValue(key="trace_id", value=AnyValue(string_value=str(event.fields["trace_id"]))))
    for each in sent.events:
        wanted.attributes.extend(each.attributes)
    # 1e17 is written with or without an exponent; 64-bit integers are texts, so nothing is lost as a float
    written = json.loads(str(event.fields["message"]), parse_int=float)
    assert written == json.loads(json.dumps(MessageToDict(wanted)), parse_int=float)
