"""Log records against the points of a real DataKit, and what Locum does better."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from gateway.config import PointSettings
from gateway.model import MAX_TIME_NS, Event, Reason, Refusal
from gateway.otlp.point import MAX_FIELDS, decode_point, encode_point, line
from tests.data import golden, golden_cases
from tests.otlp.deviations import DEVIATIONS
from tests.otlp.events import (
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
from tests.otlp.test_traces import LISTS, VALUES, any_value, attributes

INSTEAD = json.loads((Path(__file__).parent / "instead_events.json").read_text())
FIRST_SET = {f"{found['name']}-{found['customer_tags']}": found for found in golden("logs")}
SECOND_SET = {
    found["name"]: found
    for found in golden_cases("l_", "pl_", "pp_", "tc_")
    if found["request"]["signal"] == "logs" and found["name"] != "l_default_split_500k"
}
LINES = golden_cases("p_lineproto_log")
TIME = 1_700_000_000_123_456_789


@pytest.mark.parametrize("name", FIRST_SET)
def test_the_points_of_a_golden_request_are_datakits_points(name: str) -> None:
    found = FIRST_SET[name]
    sent, losses = flatten(parse("logs", found["request"]), policy=first_policy(found["customer_tags"]))
    assert ours(sent) == theirs(INSTEAD[found["name"]] if "deviation" in found else golden_points(found))
    assert not losses.left_out


@pytest.mark.parametrize("name", SECOND_SET)
def test_the_points_of_a_finer_golden_case_are_datakits_points_or_those_of_the_table(name: str) -> None:
    found = SECOND_SET[name]
    sent, _ = flatten(case_request(found), *case_settings(found))
    assert (name in INSTEAD) == (name in DEVIATIONS)
    assert ours(sent) == theirs(INSTEAD[name] if name in DEVIATIONS else golden_points(found))
    if name in DEVIATIONS and not name.startswith("tc_"):
        assert ours(sent) != theirs(golden_points(found)), "no deviation any more: take it off the table"


@pytest.mark.parametrize("found", LINES, ids=lambda found: found["name"])
def test_line_protocol_is_datakits_with_its_raw_newlines(found: dict[str, Any]) -> None:
    (event,), _ = flatten(case_request(found), *case_settings(found))
    assert line(event) == "\n".join(point["line"] for point in found["points"])


def request(*records: LogRecord, resource: dict[str, Any] | None = None, scope: dict[str, Any] | None = None) -> Any:
    """A request of one resource and one scope."""
    found = ExportLogsServiceRequest()
    group = found.resource_logs.add()
    group.resource.attributes.extend(attributes(**(resource or {})))
    scope_logs = group.scope_logs.add()
    scope_logs.scope.attributes.extend(attributes(**(scope or {})))
    scope_logs.log_records.extend(records)
    return found


def record(body: Any = "m", own: dict[str, Any] | None = None, **values: Any) -> LogRecord:
    given = {"time_unix_nano": TIME, **values}
    return LogRecord(**given, body=any_value(body), attributes=attributes(**(own or {})))


def one(found: Any, **settings: Any) -> Event:
    (event,), _ = flatten(found, **settings)
    return event


def test_half_a_megabyte_and_one_character_are_two_pieces() -> None:
    """Golden ``l_default_split_500k``, whose request is too large for a file."""
    (found,) = golden_cases("l_default_split_500k")
    body = request(record("a" * 512_001, severity_number=9), resource={"service.name": "svc-a"})
    body.resource_logs[0].scope_logs[0].scope.name = "logger"
    sent, _ = flatten(body, *case_settings(found))
    assert ours(sent) == theirs(golden_points(found))


@pytest.mark.parametrize(
    ("resource", "measurement", "service"),
    [
        ({}, "otel_logs", "unSetServiceName"),
        ({"service.name": "svc"}, "svc", "svc"),
        ({"log.source": "app", "service.name": "svc"}, "app", "svc"),
        ({"log.source": "app"}, "app", "unSetServiceName"),
        ({"log.source": "", "service.name": ""}, "otel_logs", "unSetServiceName"),
    ],
)
def test_the_source_is_the_measurement(resource: dict[str, Any], measurement: str, service: str) -> None:
    event = one(request(record(), resource=resource))
    assert (event.measurement, event.tags["service"]) == (measurement, service)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("", ""),
        (AnyValue(), ""),
        (-3, "-3"),
        (False, "false"),
        (1.5, "1.500000"),
        (1e21, "1000000000000000000000.000000"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Inf"),
        (b"raw\xff", "raw\ufffd"),
        (b"\xe6\xb5 \xf0\x9f\x98\x80", "\ufffd\ufffd \U0001f600"),
        (AnyValue(kvlist_value=KeyValueList(values=attributes(k="v", n=2))), '{"k":"v","n":2}'),
    ],
)
def test_bodies(body: Any, text: str) -> None:
    assert one(request(record(body))).fields["message"] == text


@pytest.mark.parametrize(
    ("number", "text", "status"),
    [
        (0, "T", "unknown"),
        (1, "", "trace"),
        (8, "", "debug"),
        (24, "X", "fatal"),
        (25, "T25", "T25"),
        (25, "", "unknown"),
    ],
)
def test_severities(number: int, text: str, status: str) -> None:
    found = request(record(severity_text=text))
    found.resource_logs[0].scope_logs[0].log_records[0].severity_number = number
    assert one(found).tags["status"] == status


@pytest.mark.parametrize(
    ("time", "observed", "wanted"),
    [
        (TIME, 5, TIME),
        (0, 5, 5),
        (0, 0, RECEIVED_NS),
        (MAX_TIME_NS, 0, MAX_TIME_NS),
        (MAX_TIME_NS + 1, 0, None),
        (2**64 - 1, 0, None),
        (0, 2**63, None),
    ],
)
def test_times(time: int, observed: int, wanted: int | None) -> None:
    events, losses = flatten(request(record(time_unix_nano=time, observed_time_unix_nano=observed)))
    assert [event.time_ns for event in events] == ([] if wanted is None else [wanted])
    assert losses.left_out == ({Reason.TIME_RANGE: 1} if wanted is None else {})
    assert losses.changed == ({Reason.TIME_ZERO: 1} if wanted == RECEIVED_NS else {})


def test_pieces_whose_times_would_leave_the_range_are_left_out_together() -> None:
    traces = replace(TRACES, log_max_kib=1)
    events, losses = flatten(request(record("x" * 1025, time_unix_nano=MAX_TIME_NS)), traces=traces)
    assert (events, losses.left_out) == ([], {Reason.TIME_RANGE: 1})


def test_ids_are_written_as_those_of_spans() -> None:
    found = request(record(trace_id=b"\1" * 16, span_id=b"\0" * 7 + b"\x0a"))
    fields = one(found).fields
    assert (fields["trace_id"], fields["span_id"]) == ("01" * 16, "000000000000000a")
    fields = one(found, traces=replace(TRACES, compatible_ddtrace=True)).fields
    assert (fields["trace_id"], fields["span_id"]) == (str(0x0101010101010101), "10")


def test_pieces_are_the_whole_message() -> None:
    text = "测" * 3000
    events, _ = flatten(request(record(text)), traces=replace(TRACES, log_max_kib=1))
    assert "".join(str(event.fields["message"]) for event in events) == text
    assert [event.time_ns - TIME for event in events] == [0, 1_000_000, 2_000_000]
    assert len(flatten(request(record(text)), traces=replace(TRACES, log_max_kib=0))[0]) == 1


def test_earlier_levels_win_and_the_loss_is_counted() -> None:
    found = request(record(own={"k": "record", "n": 1}), resource={"k": "resource"}, scope={"k": "scope"})
    (event,), losses = flatten(found)
    assert (event.fields["k"], event.fields["n"]) == ("resource", "1")
    assert losses.changed == {Reason.TAG_COLLISION: 2}


def test_of_keys_that_become_one_the_same_wins_in_every_order() -> None:
    own = {"hw.id": "dot", "hw_id": "under"}
    for order in (own, dict(reversed(own.items()))):
        assert one(request(record(own=order))).fields["hw_id"] == "under"
    own = {"a.b_c": "later", "a.b.c": "smaller"}
    for order in (own, dict(reversed(own.items()))):
        assert one(request(record(own=order))).fields["a_b_c"] == "smaller"


@pytest.mark.parametrize(
    "key",
    ["message", "status", "service", "source", "date", "trace_id", "span_id", "remote_ip", "schema_url", "scope_name"],
)
def test_no_attribute_takes_the_place_of_the_records_own_key(key: str) -> None:
    plain = one(request(record()))
    for found in (request(record(own={key: "mine"})), request(record(), resource={key: "mine"})):
        (event,), losses = flatten(found)
        assert event.tags == plain.tags
        assert event.fields == {**plain.fields, f"exported_{key}": "mine"}
        assert losses.changed == {Reason.FIELD_CLASH: 1}


def test_the_host_is_the_senders_and_an_attribute_host_counts_before_it() -> None:
    points = PointSettings(hostname="h", global_tags=(("host", "h"),))
    assert one(request(record()), points=points).tags["host"] == "h"
    assert one(request(record(), resource={"host.name": "gpu-1"}), points=points).tags["host"] == "gpu-1"
    event = one(request(record(own={"host": "a"}), resource={"host.name": "gpu-1"}), points=points)
    assert (event.fields["host"], "host" in event.tags) == ("a", False)


def test_long_attributes_are_cut_between_characters() -> None:
    (event,), losses = flatten(request(record(own={"v": "é" * 20_000, "k" * 300: "x"})))
    assert event.fields["v"] == "é" * 16_384
    assert event.fields["k" * 256] == "x"
    assert losses.changed == {Reason.VALUE_CUT: 1, Reason.KEY_CUT: 1}


def test_more_attributes_than_fields_leave_room_for_the_records_own() -> None:
    (event,), losses = flatten(request(record(own={f"k{number}": "v" for number in range(1500)})))
    assert len(event.fields) <= MAX_FIELDS
    assert event.fields["message"] == "m"
    assert losses.changed[Reason.TAG_LIMIT] == 1500 - (len(event.fields) - 5)


def test_pieces_of_a_record_with_large_attributes_are_refused() -> None:
    body = record("x" * (4 << 20), own={f"k{number}": "v" * 30_000 for number in range(8)})
    with pytest.raises(Refusal) as caught:
        flatten(request(body), traces=replace(TRACES, log_max_kib=1))
    assert caught.value.reason is Reason.TOO_LARGE


@settings(max_examples=150, deadline=None)
@given(
    records=st.lists(
        st.builds(
            LogRecord,
            time_unix_nano=st.sampled_from([0, 1, TIME, MAX_TIME_NS, 2**64 - 1]),
            severity_number=st.integers(0, 24),
            severity_text=st.text(max_size=4),
            body=st.one_of(st.none(), VALUES),
            attributes=LISTS,
            trace_id=st.binary(max_size=16),
            span_id=st.binary(max_size=8),
        ),
        max_size=4,
    ),
    resource=LISTS,
    scope=LISTS,
)
def test_every_request_gives_sound_points(
    records: list[LogRecord], resource: list[KeyValue], scope: list[KeyValue]
) -> None:
    """Keys are unique, every record is a point or counted, and a point reads back as it was."""
    found = request(*records)
    found.resource_logs[0].resource.attributes.extend(resource)
    found.resource_logs[0].scope_logs[0].scope.attributes.extend(scope)
    events, losses = flatten(found)
    assert len(events) + sum(losses.left_out.values()) == len(records)
    for event in events:
        assert not event.tags.keys() & event.fields.keys()
        assert decode_point(encode_point(event), event.category) == event
        assert line(event)
        assert {"status", "service", "dk_fingerprint", "remote_ip"} <= event.tags.keys()
        assert {"message", "trace_id", "span_id", "schema_url", "scope_name"} <= event.fields.keys()
        assert "host" in event.tags or "host" in event.fields
