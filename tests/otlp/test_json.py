"""OTLP/JSON: what is read, what is ignored, and what is refused with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gateway.model import Losses, Reason, Refusal, Signal
from gateway.otlp.json import MAX_DEPTH, parse
from tests.data import case, golden
from tests.otlp.strategies import requests

SPAN_ID, TRACE_ID = "eee19b7ec3c1b174", "5b8efff798038103d269b633813fc60c"


def read(body: object, signal: Signal = Signal.METRICS, lenient: bool = False) -> tuple[Any, Losses]:
    losses = Losses()
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(signal, raw, lenient, losses), losses


def refused(body: object, signal: Signal = Signal.METRICS, lenient: bool = False) -> str:
    with pytest.raises(Refusal) as refusal:
        read(body, signal, lenient)
    assert refusal.value.reason is Reason.BAD_DATA
    return str(refusal.value)


def metric(**members: object) -> dict[str, object]:
    return {"resourceMetrics": [{"scopeMetrics": [{"metrics": [members]}]}]}


def gauge(**members: object) -> dict[str, object]:
    return metric(name="m", gauge={"dataPoints": [members]})


def point_of(request: ExportMetricsServiceRequest) -> Any:
    return request.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0]


POINT = "resourceMetrics[0].scopeMetrics[0].metrics[0].gauge.dataPoints[0]"


def hex_ids(message: Message) -> Any:
    """A message as OTLP/JSON: ``json_format``'s, with the ids in hex and the enums as integers."""
    found = json_format.MessageToDict(message, use_integers_for_enums=True)

    def walk(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if key in ("traceId", "spanId", "parentSpanId"):
                node[key] = json_format.base64.b64decode(value).hex()
            elif isinstance(value, dict | list):
                walk(value)

    walk(found)
    return found


@given(requests())
@settings(max_examples=100, deadline=None)
def test_a_message_comes_back_from_its_json(request_: ExportMetricsServiceRequest) -> None:
    found, losses = read(hex_ids(request_))
    assert str(found) == str(request_), "as texts: one NaN is as good as another"
    assert not losses.changed or list(losses.changed) == [Reason.NOTHING_RECOGNISED]


@pytest.mark.parametrize("signal", ["metrics", "traces", "logs"])
def test_every_golden_request_is_read(signal: str) -> None:
    for found in golden(signal):
        request, losses = read(found["request"], Signal[signal.upper()])
        assert request.ByteSize()
        assert not losses.message(), found["name"]


@pytest.mark.parametrize("trace_id", [TRACE_ID, TRACE_ID.upper(), ""])
def test_ids_are_hex_of_either_case(trace_id: str) -> None:
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": trace_id, "spanId": SPAN_ID, "kind": 2}]}]}]}
    (span,) = read(body, Signal.TRACES)[0].resource_spans[0].scope_spans[0].spans
    assert (span.trace_id.hex(), span.span_id.hex(), span.kind) == (trace_id.lower(), SPAN_ID, 2)


@pytest.mark.parametrize("trace_id", ["xyz=", "5b8", "5b 8e", "W47/95gDgQPSabYzgT/GDA==", 5])
def test_ids_that_are_not_hex_are_refused(trace_id: object) -> None:
    body = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{}, {"traceId": trace_id}]}]}]}
    assert "logs request: resourceLogs[0].scopeLogs[0].logRecords[1].traceId: " in refused(body, Signal.LOGS)


@pytest.mark.parametrize(
    ("value", "number"),
    [(5, 5), ("5", 5), ("-5", -5), (5.0, 5), ("9223372036854775807", 2**63 - 1), (-(2**63), -(2**63))],
)
def test_64_bits_are_a_string_or_a_number(value: object, number: int) -> None:
    assert point_of(read(gauge(asInt=value))[0]).as_int == number


@pytest.mark.parametrize("value", ["", "x", "1.5", 1.5, "0x1", "١", True, [], {}, 2**63, str(2**63), "9" * 5000, 1e300])
def test_what_is_no_64_bit_integer_is_refused_with_its_place(value: object) -> None:
    assert refused(gauge(asInt=value)).startswith(f"metrics request: {POINT}.asInt: ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        (1, "1.0"),
        ("1.5", "1.5"),
        ("-1e3", "-1000.0"),
        ("NaN", "nan"),
        ("Infinity", "inf"),
        ("-Infinity", "-inf"),
        (-0.0, "-0.0"),
    ],
)
def test_doubles_are_numbers_or_strings(value: object, text: str) -> None:
    assert repr(point_of(read(gauge(asDouble=value))[0]).as_double) == text


@pytest.mark.parametrize("value", ["", "nan", "inf", "1_0", " 1", "0x1p3", True, [], 10**400])
def test_what_is_no_double_is_refused_with_its_place(value: object) -> None:
    assert refused(gauge(asDouble=value)).startswith(f"metrics request: {POINT}.asDouble: ")


@pytest.mark.parametrize(
    ("text", "raw"),
    [
        ("AAEC/w==", b"\0\1\2\xff"),
        ("AAEC_w", b"\0\1\2\xff"),
        ("", b""),
        ("+/+/", b"\xfb\xff\xbf"),
        ("-_-_", b"\xfb\xff\xbf"),
    ],
)
def test_bytes_are_base64_of_either_alphabet(text: str, raw: bytes) -> None:
    body = gauge(attributes=[{"key": "k", "value": {"bytesValue": text}}])
    assert point_of(read(body)[0]).attributes[0].value.bytes_value == raw


@pytest.mark.parametrize("text", ["A", "AA=A", "A A=", "é", 5])
def test_what_is_no_base64_is_refused(text: object) -> None:
    body = gauge(attributes=[{"key": "k", "value": {"bytesValue": text}}])
    assert f"{POINT}.attributes[0].value.bytesValue: " in refused(body)


def test_null_is_absent() -> None:
    (request, losses) = read({"resourceMetrics": [{"resource": None, "scopeMetrics": None}]})
    assert not request.resource_metrics[0].HasField("resource")
    assert not losses.changed
    assert not point_of(read(gauge(asInt=None, attributes=None))[0]).WhichOneof("value")


def test_null_in_an_array_of_values_is_an_empty_value() -> None:
    body = gauge(attributes=[{"key": "k", "value": {"arrayValue": {"values": [None, {"intValue": 1}]}}}])
    empty, one = point_of(read(body)[0]).attributes[0].value.array_value.values
    assert (empty.WhichOneof("value"), one.int_value) == (None, 1)


def test_an_empty_object_is_present() -> None:
    request, _ = read({"resourceMetrics": [{"resource": {}, "scopeMetrics": [{"scope": {}}]}]})
    assert request.resource_metrics[0].HasField("resource")
    assert request.resource_metrics[0].scope_metrics[0].HasField("scope")


def test_of_a_member_sent_twice_the_last_counts() -> None:
    body = json.dumps(gauge(asInt="1")).replace('"asInt": "1"', '"asInt": "1", "asInt": "2"')
    assert point_of(read(body.encode())[0]).as_int == 2


@pytest.mark.parametrize("lenient", [True, False])
def test_the_unknown_is_ignored_at_every_depth(lenient: bool) -> None:
    request, losses = read(case("17-"), lenient=lenient)
    assert [found.name for found in request.resource_metrics[0].scope_metrics[0].metrics] == ["lab.future", "lab.old"]
    assert not losses.changed


def test_a_body_of_which_nothing_is_known_is_warned_about() -> None:
    request, losses = read({"hello": 1})
    assert not request.ByteSize()
    assert losses.changed == {Reason.NOTHING_RECOGNISED: 1}
    assert "nothing recognised" in losses.message()
    assert "resourceMetrics" in losses.message()


def test_snake_case_is_ignored_with_a_hint_and_taken_where_datakit_takes_it() -> None:
    body = {"resource_metrics": [{"scope_metrics": [{"metrics": [{"name": "m"}]}]}]}
    request, losses = read(body)
    assert not request.ByteSize()
    assert "looks like snake_case" in losses.message()
    assert losses.changed == {Reason.SNAKE_CASE_NAME: 1, Reason.NOTHING_RECOGNISED: 1}
    request, losses = read(body, lenient=True)
    assert request.resource_metrics[0].scope_metrics[0].metrics[0].name == "m"
    assert losses.changed == {Reason.SNAKE_CASE_NAME: 2}


def test_enum_names_are_for_the_lenient() -> None:
    body = case("16-")["requests"][0]["body"]
    assert "sum.aggregationTemporality: " in refused(body)
    assert "enums are integers" in refused(body)
    request, losses = read(body, lenient=True)
    assert request.resource_metrics[0].scope_metrics[0].metrics[0].sum.aggregation_temporality == 1
    assert losses.changed == {Reason.ENUM_NAME: 1}
    nobody_knows = metric(sum={"aggregationTemporality": "YESTERDAY"})
    assert "enums are integers" in refused(nobody_knows, lenient=True)
    assert "out of range" in refused(metric(sum={"aggregationTemporality": 2**40}))


CASE_16 = {found["name"]: found for found in case("16-")["requests"]}


@pytest.mark.parametrize("name", ["snake-case", "enum-unknown-number", "null-members", "empty-object", "empty-body"])
@pytest.mark.parametrize("lenient", [True, False])
def test_case_16_what_is_taken(name: str, lenient: bool) -> None:
    found = CASE_16[name]
    read(found["body_raw"].encode() if "body_raw" in found else found["body"], lenient=lenient)


@pytest.mark.parametrize("name", ["attributes-object", "top-level-array"])
@pytest.mark.parametrize("lenient", [True, False])
def test_case_16_what_is_refused(name: str, lenient: bool) -> None:
    refused(CASE_16[name]["body"], lenient=lenient)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "an array where an object belongs"),
        (5, "a number where an object belongs"),
        ({"resourceMetrics": {}}, "resourceMetrics: an object where an array belongs"),
        ({"resourceMetrics": [[]]}, "resourceMetrics[0]: an array where an object belongs"),
        ({"resourceMetrics": [{"resource": []}]}, "resourceMetrics[0].resource: an array where an object belongs"),
        ({"resourceMetrics": [{"schemaUrl": 5}]}, "resourceMetrics[0].schemaUrl: a number where a string belongs"),
        (metric(sum={"isMonotonic": "true"}), "sum.isMonotonic: a string where true or false belongs"),
        (metric(histogram={"dataPoints": [{"bucketCounts": ["1", None]}]}), "bucketCounts[1]: null where an integer"),
        (gauge(flags=-1), "flags: -1 is out of range"),
        (b"{", "not JSON: "),
        (b'{"resourceMetrics": [NaN]}', "NaN stands there bare"),
        (b'{"a": 1} {"b": 2}', "not JSON: Extra data at line 1 column 10"),
        (b'{"a": "\xff"}', "not UTF-8 at offset 7 of 10"),
        (b"\xff\xfe{\0}\0", "not UTF-8 at offset 0 of 6"),
        (
            b'{"resourceMetrics": [{"schemaUrl": "\\ud800"}]}',
            "resourceMetrics[0].schemaUrl: a text with half of a surrog",
        ),
        (b'{"a": ' + b"9" * 5000 + b"}", "more digits than can be read"),
    ],
)
def test_a_wrong_shape_is_refused_with_its_place(body: object, message: str) -> None:
    assert message in refused(body)


@pytest.mark.parametrize("body", [b"", b"  \n", b"{}", b"\xef\xbb\xbf{}"])
def test_an_empty_request_is_one(body: bytes) -> None:
    request, losses = read(body)
    assert not request.ByteSize()
    assert not losses.changed


def nested(levels: int) -> object:
    value: object = {"stringValue": "x"}
    for _ in range(levels):
        value = {"arrayValue": {"values": [value]}}
    return {"resourceMetrics": [{"resource": {"attributes": [{"key": "k", "value": value}]}}]}


def test_nesting_is_bounded_and_what_is_read_can_be_sent_on() -> None:
    deepest = (MAX_DEPTH - 7) // 3  # the value stands on the seventh level, and each array is three
    request, _ = read(nested(deepest))
    assert ExportMetricsServiceRequest.FromString(request.SerializeToString()) == request
    assert "nested deeper" in refused(nested(deepest + 1))


@pytest.mark.parametrize("levels", [MAX_DEPTH + 5, 5_000, 200_000])
def test_nesting_inside_the_unknown_is_bounded(levels: int) -> None:
    assert "nested deeper" in refused(b'{"unknown": ' + b"[" * levels + b"]" * levels + b"}")
    assert "nested deeper" in refused(b'{"a":' * levels + b"1" + b"}" * levels)


def test_shallow_unknown_members_are_fine() -> None:
    read(b'{"unknown": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    ["resourceMetrics", "scopeMetrics", "metrics", "gauge", "dataPoints", "attributes", "key", "value"]
                ),
                inner,
            )
        ),
    )
)
@settings(max_examples=200, deadline=None)
def test_any_json_is_read_or_refused(body: object) -> None:
    try:
        read(body)
    except Refusal as refusal:
        assert refusal.reason is Reason.BAD_DATA


@given(st.binary())
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        read(body)
    except Refusal as refusal:
        assert refusal.reason is Reason.BAD_DATA
