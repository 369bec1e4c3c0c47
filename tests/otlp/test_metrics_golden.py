"""Metrics against the points of a real DataKit, and the hostile cases that are about meaning, in both parities."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.config import PointSettings
from gateway.model import MAX_TIME_NS, Event, Losses, Reason
from gateway.otlp.expand import MAX_QUANTILES
from gateway.otlp.plain import Row, points, read
from gateway.otlp.registry import Registry
from gateway.otlp.wire import decode
from tests.data import case, golden, golden_cases
from tests.otlp.deviations import DEVIATIONS
from tests.otlp.points import (
    GOLDEN,
    RECEIVED_NS,
    STRICT,
    by_le,
    events,
    golden_request,
    golden_settings,
    line,
    only,
    ours,
    parse,
    theirs,
)

INSTEAD = json.loads((Path(__file__).parent / "instead.json").read_text())
"""What we send where we differ on purpose, in the form of the golden files."""

PREFIXES = ("m_", "mt_", "gt_", "mp_", "pp_", "tc_", "p_lineproto_", "h_metrics_", "wp_metrics", "uc_", "eh_")
REFUSED = {"h_metrics_to_trace_path", "eh_http_wrong_ctype_ok_header"}
"""Cases that are refused for how they came; ``tests/receive`` has them."""

FIRST_SET = {found["name"]: found for found in golden("metrics")}
SECOND_SET = {
    found["name"]: found
    for found in golden_cases(*PREFIXES)
    if found["request"]["signal"] == "metrics" and found["name"] not in REFUSED
}


@pytest.mark.parametrize("name", FIRST_SET)
def test_the_points_of_a_golden_request_are_datakits_points(name: str) -> None:
    found = FIRST_SET[name]
    sent, _ = events(parse(json.dumps(found["request"]).encode()), GOLDEN)
    assert ours(sent) == theirs(INSTEAD[name] if "deviation" in found else found["points"])
    assert ("deviation" in found) == (name in INSTEAD)


@pytest.mark.parametrize("name", [name for name in SECOND_SET if name not in DEVIATIONS or name in INSTEAD])
def test_the_points_of_a_finer_golden_case_are_datakits_points(name: str) -> None:
    found = SECOND_SET[name]
    sent, _ = events(golden_request(found), golden_settings(found))
    if name in DEVIATIONS:
        assert ours(sent) == theirs(INSTEAD[name])
    elif any("line" in point for point in found["points"]):
        assert sorted(line(event) for event in sent) == sorted(point["line"] for point in found["points"])
    else:
        assert ours(sent) == theirs(found["points"])


def test_a_deviation_is_really_one() -> None:
    """An entry of the table whose points are DataKit's after all would hide a change."""
    for name in DEVIATIONS.keys() & SECOND_SET.keys():
        found = SECOND_SET[name]
        sent, _ = events(golden_request(found), golden_settings(found))
        if any("line" in point for point in found["points"]):
            assert sorted(line(event) for event in sent) != sorted(point["line"] for point in found["points"]), name
        else:
            assert ours(sent) != theirs(found["points"]), name


def test_of_three_hundred_tags_256_and_the_global_ones_stay() -> None:
    found = SECOND_SET["m_attr_300_tags"]
    (point,), losses = events(golden_request(found), golden_settings(found))
    assert len(point.tags) == 256 + len({"host", "dc"})
    assert {"unit", "service_name", "scope_name", "remote_ip", "t000", "t251"} <= point.tags.keys()
    assert "t252" not in point.tags
    assert losses.changed[Reason.TAG_LIMIT] == 304 - 256
    assert point.fields == {"g": 1.0}


def test_points_after_an_entry_without_a_resource_are_sent() -> None:
    found = SECOND_SET["m_nil_resource_second_after_100"]
    sent, _ = events(golden_request(found), golden_settings(found))
    assert len(sent) == len(found["points"]) + 1


def read_case(name: str, settings: PointSettings) -> tuple[list[Event], Losses]:
    return events(parse(json.dumps(case(name)).encode()), settings)


def test_case_01_one_count_without_bounds_is_the_bucket_of_infinity() -> None:
    for settings in (GOLDEN, STRICT):
        sent, losses = read_case("01-", settings)
        assert by_le(sent, "lab.kernel.time") == {"+Inf": 4}
        assert by_le(sent, "lab.copy.time") == {"0.5": 1, "10": 3, "+Inf": 6}
        assert not losses.left_out
        point = only(sent, "lab.kernel.time_count")
        assert point.fields["lab.kernel.time_count"] == 4
        assert point.fields["lab.kernel.time_sum"] == 12.5
        assert ("lab.kernel.time_min" in point.fields) is (settings is GOLDEN)


def test_case_02_bounds_without_counts_cost_no_neighbour() -> None:
    sent, losses = read_case("02-", GOLDEN)
    assert by_le(sent, "lab.kernel.time") == {}
    assert only(sent, "lab.kernel.time_count").fields["lab.kernel.time_sum"] == 7.0
    assert only(sent, "lab.neighbour")
    assert losses.changed == {Reason.BUCKETS_LEFT_OUT: 1}
    sent, losses = read_case("02-", STRICT)
    assert [list(event.fields) for event in sent] == [["lab.neighbour"]]
    assert losses.left_out == {Reason.BAD_BUCKETS: 1}
    assert losses.message() == "1 bad_buckets: lab.kernel.time has 0 counts for 2 bounds"


@pytest.mark.parametrize("name", ["02-", "05-", "06-", "14-"])
def test_what_a_sender_is_told_names_the_metric_at_fault(name: str) -> None:
    request = parse(json.dumps(case(name)).encode())
    batch = decode(Registry(STRICT, 100), request.SerializeToString(), None, RECEIVED_NS)
    _, losses = read(request, None, STRICT, RECEIVED_NS)
    assert batch.losses.left_out_examples == losses.left_out_examples
    assert batch.losses.changed.keys() == losses.changed.keys()
    assert batch.losses.message().startswith(losses.message().partition(";")[0])


def test_case_03_absent_is_zero_in_datakit_and_absent_in_strict() -> None:
    for settings, fields in ((GOLDEN, {"_min", "_max", "_count", "_sum"}), (STRICT, {"_count"})):
        sent, _ = read_case("03-", settings)
        assert by_le(sent, "lab.delta.temp") == {"-10": 2, "0": 5, "+Inf": 5}
        point = only(sent, "lab.delta.temp_count")
        assert point.fields.keys() == {f"lab.delta.temp{suffix}" for suffix in fields}
        assert point.fields.get("lab.delta.temp_sum", 0.0) == 0.0


def test_case_05_no_two_buckets_leave_with_the_same_tags() -> None:
    sent, losses = read_case("05-", GOLDEN)
    assert by_le(sent, "lab.inf") == {"0.1": 1, "1": 3, "+Inf": 7}
    assert by_le(sent, "lab.unsorted") == {"5": 1, "1": 2, "+Inf": 3}
    assert by_le(sent, "lab.dupbound") == {"1": 2, "+Inf": 3}
    assert losses.changed == {Reason.BAD_BOUNDS: 2}
    sent, losses = read_case("05-", STRICT)
    assert by_le(sent, "lab.inf") == {"0.1": 1, "1": 3, "+Inf": 7}
    assert losses.left_out == {Reason.BAD_BOUNDS: 2}
    assert {name for event in sent for name in event.fields} == {"lab.inf_count", "lab.inf_sum", "lab.inf_bucket"}


def test_case_06_exponential_buckets_are_spelled_out_in_value_order() -> None:
    wanted = {"-2.8284271247461903": 1, "-2": 5, "0": 7, "1.4142135623730951": 10, "2": 11, "+Inf": 11}
    for settings in (GOLDEN, STRICT):
        sent, losses = read_case("06-", settings)
        assert by_le(sent, "lab.drift") == wanted
        assert losses.changed == {Reason.EXTREME_OUTSIDE: 1}
        assert losses.message() == "1 extreme_outside_buckets: lab.drift"
        point = only(sent, "lab.drift_count")
        assert point.fields["lab.drift_min"] == -5.0
        assert point.fields["lab.drift_max"] == 1.9
        assert point.fields.get("lab.drift_sum") == (0.0 if settings is GOLDEN else None)


def test_case_08_delta_is_passed_on_and_marked_in_strict() -> None:
    sent, losses = read_case("08-", GOLDEN)
    assert [event.fields["lab.reverse"] for event in sent if "lab.reverse" in event.fields] == [5, 7]
    assert only(sent, "lab.unspecified")
    assert all("temporality" not in event.tags for event in sent)
    assert not losses.left_out
    sent, losses = read_case("08-", STRICT)
    assert [event.fields["lab.d_count"] for event in sent if "lab.d_count" in event.fields] == [2, 3]
    assert {event.tags.get("temporality") for event in sent} == {"delta"}
    assert losses.left_out == {Reason.BAD_TEMPORALITY: 1}


def test_case_09_a_stale_marker_is_no_rejection() -> None:
    sent, losses = read_case("09-", GOLDEN)
    assert [event.fields for event in sent] == [{"lab.power": 0.0}, {"lab.power": 31.0}, {"lab.bytes": 900}]
    assert losses.left_out == {Reason.STALE: 2, Reason.NO_VALUE: 1}
    sent, losses = read_case("09-", STRICT)
    assert [event.fields for event in sent] == [{"lab.power": 31.0}, {"lab.bytes": 900}]
    assert losses.left_out == {Reason.STALE: 3, Reason.NO_VALUE: 1}
    assert losses.rejected == 1


def test_case_10_colliding_keys_have_one_winner_for_every_order() -> None:
    request = parse(json.dumps(case("10-")).encode())
    attributes = request.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0].attributes
    seen = set()
    for _ in range(len(attributes)):
        attributes.append(attributes.pop(0))
        (point,), losses = events(request, GOLDEN)
        seen.add(tuple(point.tags.items()))
        assert losses.changed[Reason.TAG_COLLISION] == 4
    assert len(seen) == 1
    assert point.tags["hw_id"] == "GPU-5eaf0000-0000-4000-8000-00000000beef"
    assert point.tags["host_name"] == "rack9-n3"
    assert point.tags["hw-id"] == "dash"
    assert point.tags["unit"] == "percent"


def test_case_11_of_a_key_sent_twice_the_last_counts() -> None:
    for settings in (GOLDEN, STRICT):
        (point,), losses = read_case("11-", settings)
        assert point.tags["lane"] == "3"
        assert losses.changed == {Reason.TAG_COLLISION: 2}


def test_case_13_an_attribute_le_is_kept_under_another_name() -> None:
    for settings in (GOLDEN, STRICT):
        sent, losses = read_case("13-", settings)
        assert by_le(sent, "lab.lat") == {"0.25": 1, "+Inf": 3}
        assert {(event.tags["exported_le"], event.tags["quantile"]) for event in sent} == {("user", "p9")}
        assert losses.changed[Reason.FIELD_CLASH] == 1


def test_case_14_values_that_are_not_finite_cost_no_neighbour() -> None:
    for settings in (GOLDEN, STRICT):
        sent, losses = read_case("14-", settings)
        values = {event.tags["s"]: event.fields["lab.nan"] for event in sent if "lab.nan" in event.fields}
        assert values == {"q": 1.5, "z": 0.0}
        assert [event.tags["quantile"] for event in sent if "lab.win" in event.fields] == ["0.99"]
        assert losses.left_out == {Reason.NOT_FINITE: 3}
        assert losses.changed == {Reason.NOT_FINITE: 1}


def test_case_17_what_the_future_brings_is_ignored() -> None:
    for settings in (GOLDEN, STRICT):
        sent, losses = read_case("17-", settings)
        assert [event.fields for event in sent] == [{"lab.future": 1}]
        assert losses.changed == {Reason.METRIC_WITHOUT_DATA: 1}
        assert losses.rejected == 0


def test_case_19_no_resource_is_an_empty_one() -> None:
    for settings in (GOLDEN, STRICT):
        sent, losses = read_case("19-", settings)
        assert [event.fields for event in sent] == [{"lab.first": 1}, {"lab.noresource": 2}, {"lab.emptyresource": 3}]
        assert not losses.left_out


def test_case_20_times_are_kept_as_sent_or_left_out_with_a_reason() -> None:
    for settings in (GOLDEN, STRICT):
        sent, losses = read_case("20-", settings)
        times = {event.tags["c"]: event.time_ns for event in sent if "lab.t" in event.fields}
        assert times == {
            "zero": RECEIVED_NS,
            "now": 1764590415000000000,
            "seconds": 1764590400,
            "millis": 1764590400000,
            "future": 1799150415000000000,
            "old": 1761134415000000000,
        }
        assert only(sent, "lab.startafter")
        assert losses.left_out == {Reason.TIME_RANGE: 3}
        assert losses.changed == {Reason.TIME_ZERO: 1, Reason.TIME_UNIT: 2}


def rows_of_one(data: str, **members: object) -> tuple[list[Row], Losses]:
    metric = {"name": "m", data: {"dataPoints": [members]}}
    body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}
    return read(parse(json.dumps(body).encode()), None, GOLDEN, RECEIVED_NS)


def test_the_last_nanosecond_is_kept_and_a_start_past_it_is_none() -> None:
    (row,), losses = rows_of_one("gauge", asInt=1, timeUnixNano=MAX_TIME_NS, startTimeUnixNano=MAX_TIME_NS)
    assert (row.time_ns, row.start_ns) == (MAX_TIME_NS, MAX_TIME_NS)
    (row,), losses = rows_of_one("gauge", asInt=1, timeUnixNano=1, startTimeUnixNano=MAX_TIME_NS + 1)
    assert (row.time_ns, row.start_ns) == (1, 0)
    assert not losses.changed
    rows, losses = rows_of_one("gauge", asInt=1, timeUnixNano=MAX_TIME_NS + 1)
    assert not rows
    assert losses.left_out == {Reason.TIME_RANGE: 1}


def test_of_a_quantile_sent_twice_the_last_counts() -> None:
    quantiles = [{"quantile": 0.5, "value": 1}, {"quantile": 0.9, "value": 2}, {"quantile": 0.5, "value": 3}]
    (summary, *found), losses = rows_of_one("summary", count=3, sum="NaN", timeUnixNano=1, quantileValues=quantiles)
    assert [(dict(row.series.tags)["quantile"], row.value) for row in found] == [("0.9", 2.0), ("0.5", 3.0)]
    assert losses.changed == {Reason.BUCKETS_LEFT_OUT: 1, Reason.NOT_FINITE: 1}
    (event,) = points(summary, "datakit")
    assert event.fields == {"m_count": 3}


def test_too_many_quantiles_are_none() -> None:
    quantiles = [{"quantile": number / 1000} for number in range(MAX_QUANTILES + 1)]
    rows, losses = rows_of_one("summary", count=3, timeUnixNano=1, quantileValues=quantiles)
    assert len(rows) == 1
    assert losses.changed == {Reason.BUCKETS_LEFT_OUT: 1}
    assert len(rows_of_one("summary", count=3, timeUnixNano=1, quantileValues=quantiles[1:])[0]) == 1 + MAX_QUANTILES


def test_host_is_the_senders_where_the_gateway_serves_many() -> None:
    request: Any = parse(json.dumps(FIRST_SET["host-name"]["request"]).encode())
    (point,), _ = events(request, replace(GOLDEN, host_tag="resource"))
    assert point.tags["host"] == "gpu-host-01"
    request = parse(json.dumps(FIRST_SET["gauge-int"]["request"]).encode())
    (point,), _ = events(request, replace(GOLDEN, host_tag="resource"))
    assert point.tags["host"] == "<gateway-host>"
