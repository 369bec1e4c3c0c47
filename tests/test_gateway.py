"""What holds from one end of the gateway to the other: strict answers, the whitelist, reloads under load."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from gateway.minutes import Minutes
from gateway.model import ConfigError, Event, Signal
from tests.data import case, golden_cases
from tests.fences import await_fence, between_fences, fence
from tests.otlp import events as of_events
from tests.otlp.points import RECEIVED_NS
from tests.running import JSON, Answer, Running, running, write_own
from tests.test_golden_gateway import second_config, with_received

NOW = 1764590415000000000
STRICT = "[points]\nparity = 'strict'\nhostname = 'gateway-1'\n"

RIGHT: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "01-": (
        0,
        (),
        {
            "lab.kernel.time_count": 4,
            "lab.kernel.time_sum": 12.5,
            "lab.kernel.time_bucket le=+Inf": 4,
            "lab.copy.time_count": 6,
            "lab.copy.time_sum": 9.0,
            "lab.copy.time_bucket le=0.5": 1,
            "lab.copy.time_bucket le=10": 3,
            "lab.copy.time_bucket le=+Inf": 6,
        },
    ),
    "02-": (1, ("lab.kernel.time has 0 counts for 2 bounds",), {"lab.neighbour": 1.5}),
    "03-": (
        0,
        (),
        {
            "lab.delta.temp_count": 5,
            "lab.delta.temp_bucket le=-10": 2,
            "lab.delta.temp_bucket le=0": 5,
            "lab.delta.temp_bucket le=+Inf": 5,
        },
    ),
    "05-": (
        2,
        ("lab.unsorted",),
        {
            "lab.inf_count": 7,
            "lab.inf_sum": 3.0,
            "lab.inf_bucket le=0.1": 1,
            "lab.inf_bucket le=1": 3,
            "lab.inf_bucket le=+Inf": 7,
        },
    ),
    "06-": (
        0,
        ("extreme_outside_buckets", "lab.drift"),
        {
            "lab.drift_min": -5.0,
            "lab.drift_max": 1.9,
            "lab.drift_count": 11,
            "lab.drift_bucket le=-2.8284271247461903": 1,
            "lab.drift_bucket le=-2": 5,
            "lab.drift_bucket le=0": 7,
            "lab.drift_bucket le=1.4142135623730951": 10,
            "lab.drift_bucket le=2": 11,
            "lab.drift_bucket le=+Inf": 11,
        },
    ),
    "08-": (
        1,
        ("lab.unspecified",),
        {
            "lab.reverse temporality=delta +15s": 5,
            "lab.reverse temporality=delta": 7,
            "lab.d_count temporality=delta": 2,
            "lab.d_sum temporality=delta": 2.0,
            "lab.d_bucket temporality=delta le=1": 1,
            "lab.d_bucket temporality=delta le=+Inf": 2,
            "lab.d_count temporality=delta +15s": 3,
            "lab.d_sum temporality=delta +15s": 3.0,
            "lab.d_bucket temporality=delta le=1 +15s": 0,
            "lab.d_bucket temporality=delta le=+Inf +15s": 3,
        },
    ),
    "09-": (1, ("lab.novalue", "3 stale"), {"lab.power rail=a": 31.0, "lab.bytes": 900}),
    "10-": (0, ("tag_collision", "hw_id"), {"hw.gpu.utilization hw-id=dash": 0.42}),
    "11-": (0, ("tag_collision", "lane"), {"lab.dup lane=3": 2}),
    "13-": (
        0,
        ("exported_le",),
        {
            "lab.lat_count exported_le=user quantile=p9": 3,
            "lab.lat_sum exported_le=user quantile=p9": 2.0,
            "lab.lat_bucket exported_le=user quantile=p9 le=0.25": 1,
            "lab.lat_bucket exported_le=user quantile=p9 le=+Inf": 3,
        },
    ),
    "14-": (
        3,
        ("not_finite", "lab.nan"),
        {
            "lab.nan s=q": 1.5,
            "lab.nan s=z": 0.0,
            "lab.win quantile=0.99": 12.0,
            "lab.win_count": 0,
            "lab.win_sum": 0.0,
        },
    ),
    "17-": (0, ("metric_without_data", "lab.old"), {"lab.future": 1}),
    "19-": (0, (), {"lab.first": 1, "lab.noresource": 2, "lab.emptyresource": 3}),
    "20-": (
        3,
        ("3 time_out_of_range", "1 time_zero", "2 time_looks_like_another_unit"),
        {
            "lab.t c=zero received": 0,
            "lab.t c=now": 1,
            "lab.t c=seconds 1764590400": 5,
            "lab.t c=millis 1764590400000": 6,
            "lab.t c=future 1799150415000000000": 7,
            "lab.t c=old 1761134415000000000": 8,
            "lab.startafter": 1,
        },
    ),
}
"""By case: rejected points, what the message has to name, and the values that leave, with their own tags and time."""

COMMON = {"host_name", "hw_id", "hw_type", "remote_ip", "service_name", "scope_name", "unit", "host"}


def spelled(events: Iterable[Event]) -> dict[str, Any]:
    """Each value under a name made of its field, the tags that the cases do not share, and its time. Fails where two
    are the same."""
    found: dict[str, Any] = {}
    for event in events:
        tags = [f"{key}={value}" for key, value in event.tags.items() if key not in COMMON]
        for field, value in event.fields.items():
            name = " ".join([field, *tags, *when(event.time_ns)])
            assert name not in found, f"twice: {name}"
            found[name] = value
    return found


def when(time_ns: int) -> list[str]:
    if time_ns == NOW:
        return []
    if abs(time_ns - time.time_ns()) < 120_000_000_000:
        return ["received"]
    return ["+15s" if time_ns == NOW + 15_000_000_000 else str(time_ns)]


def partial(answer: Answer) -> tuple[int, str]:
    """What was rejected, and the message. Full success has neither."""
    assert answer.status == 200
    if answer.media_type == JSON:
        told = json.loads(answer.body).get("partialSuccess", {})
        return int(told.get("rejectedDataPoints", 0)), told.get("errorMessage", "")
    success = ExportMetricsServiceResponse.FromString(answer.body).partial_success
    return success.rejected_data_points, success.error_message


PATHS = (("http", "/v1/metrics"), ("api", "/v1/metrics"), ("api", "/otel/v1/metrics"))


@pytest.fixture(scope="module", params=PATHS, ids="".join)
def strict(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, str, str]]:
    """A gateway for each port and path, since what it says of a series it says once."""
    with running(tmp_path_factory.mktemp("strict"), STRICT) as gateway:
        yield gateway, *request.param


def fenced(gateway: Running) -> list[Event]:
    """What came out since the last fence."""
    number = len(gateway.guance.requests)
    gateway.call(Signal.METRICS, fence(Signal.METRICS, number))
    await_fence(gateway, Signal.METRICS, number)
    *_, (_, events, _) = between_fences(gateway, Signal.METRICS)
    return events


@pytest.mark.parametrize("name", RIGHT)
def test_strict_does_what_the_case_says_is_right(strict: tuple[Running, str, str], name: str) -> None:
    gateway, port, path = strict
    rejected, named, values = RIGHT[name]
    count, message = partial(gateway.post(path, json.dumps(case(name)).encode(), JSON, port=port))
    found = spelled(fenced(gateway))
    assert found == values
    assert (count, bool(message)) == (rejected, bool(named))
    assert all(part in message for part in named)


TAKEN_16 = {
    "snake-case": ("snake_case", "nothing"),
    "enum-unknown-number": ("bad_temporality", "lab.e2"),
    "null-members": (),
    "empty-object": (),
    "empty-body": (),
}
"""Entries of case 16 that are answered with success in both parities, and what the sender is told in strict."""


@pytest.mark.parametrize("name", [found["name"] for found in case("16-")["requests"]])
def test_strict_tells_a_sender_of_json_what_is_wrong(strict: tuple[Running, str, str], name: str) -> None:
    gateway, port, path = strict
    (found,) = [found for found in case("16-")["requests"] if found["name"] == name]
    body = found["body_raw"].encode() if "body_raw" in found else json.dumps(found["body"]).encode()
    answer = gateway.post(path, body, JSON, port=port)
    assert answer.media_type == JSON
    assert not fenced(gateway)
    if name in TAKEN_16:
        _, message = partial(answer)
        assert bool(message) is bool(TAKEN_16[name])
        assert all(part in message for part in TAKEN_16[name])
    else:
        assert answer.status == 400
        status = json.loads(answer.body)
        assert status["code"] == 3
        assert "resourceMetrics" in status["message"] or name == "top-level-array"


def test_a_media_type_may_have_parameters_and_capitals_and_has_to_be_one_of_otlps(
    strict: tuple[Running, str, str],
) -> None:
    gateway, port, path = strict
    body = json.dumps(case("17-")).encode()
    for media_type in ("application/json; charset=utf-8", "Application/JSON"):
        answer = gateway.post(path, body, media_type, port=port)
        assert (answer.status, answer.media_type) == (200, JSON)
        assert spelled(fenced(gateway)) == {"lab.future": 1}
    assert gateway.post(path, body, "text/plain", port=port).status == 415
    assert "nothing" in partial(gateway.post(path, b'{"hello":1}', JSON, port=port))[1]
    assert not fenced(gateway)


def test_customer_tags_hold_for_metrics_on_the_way_out_and_the_buffer_keeps_every_tag(tmp_path: Path) -> None:
    conf = """
[[inputs.opentelemetry]]
customer_tags = ["hw.id", "reg:^ser"]
"""
    with running(tmp_path, opentelemetry=conf, datakit='hostname = "gateway-1"\n') as gateway:
        for name in ("01-", "10-", "14-"):
            assert gateway.post("/v1/metrics", json.dumps(case(name)).encode(), JSON).status == 200
        events = fenced(gateway)
        always = {"host", "unit"}
        listed = {"hw_id", "service_name"}
        assert {key for event in events for key in event.tags} == always | listed | {"le", "quantile"}
        assert all(event.tags.keys() >= always | listed for event in events)
        assert {event.tags.get("quantile") for event in events if "lab.win" in event.fields} == {"0.99"}
        kept = ask(gateway, "SELECT DISTINCT unnest(map_keys(tags)) FROM samples WHERE field NOT LIKE 'fence%'")
        assert {key for (key,) in kept} >= {"host_name", "hw_type", "remote_ip", "scope_name", "hw-id", "s", "le"}
        ((host,),) = ask(gateway, "SELECT DISTINCT tags['host_name'] FROM samples WHERE field = 'hw.gpu.utilization'")
        assert host == "rack9-n3"


def ask(gateway: Running, sql: str) -> list[list[Any]]:
    """Rows of an answer of the running gateway, as ``locum query`` gets them."""
    answer = gateway.post("/v1/locum/query", json.dumps({"sql": sql}).encode(), JSON, port="api")
    assert answer.status == 200, answer.body
    rows: list[list[Any]] = json.loads(answer.body)["rows"]
    return rows


def counter(number: int) -> bytes:
    """A request with one data point, whose value is the number."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="n")
    metric.gauge.data_points.add(as_int=number, time_unix_nano=NOW)
    return request.SerializeToString()


def test_case_25_a_clock_that_goes_back_changes_neither_order_nor_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, back_ns = time.time_ns, 0
    monkeypatch.setattr(time, "time_ns", lambda: real() - back_ns)
    with running(tmp_path) as gateway:
        for number in range(30):
            if number == 15:
                back_ns = 3_600_000_000_000
            assert gateway.post("/v1/metrics", counter(number)).status == 200
            assert gateway.guance.wait_for(lambda so_far=number: gateway.guance.counts.get("metric", 0) > so_far, 5)  # type: ignore[misc]
        events = fenced(gateway)
        assert [event.fields["n"] for event in events] == list(range(30))
        assert {event.time_ns for event in events} == {NOW}
        received = ask(gateway, "SELECT received FROM batches ORDER BY batch LIMIT 30")
        assert received[14] > received[15], "the clock did go back"


def test_case_25_times_of_two_days_ago_stay_what_they_are(tmp_path: Path) -> None:
    with running(tmp_path) as gateway:
        old_ns = time.time_ns() - 2 * 86_400_000_000_000
        request = ExportMetricsServiceRequest.FromString(counter(1))
        request.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0].time_unix_nano = old_ns
        assert gateway.post("/v1/metrics", request.SerializeToString()).status == 200
        (event,) = fenced(gateway)
        assert event.time_ns == old_ns


def test_a_reload_under_load_drops_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    """Senders on all three ports; each reload changes what the points look like."""
    with running(tmp_path, "[points]\nhostname = 'host-0'\n") as gateway:
        stop = threading.Event()
        acknowledged: list[int] = []
        numbers = iter(range(1_000_000))

        def send() -> None:
            while not stop.is_set():
                number = next(numbers)
                if number % 3:
                    port, path = (("http", "/v1/metrics"), ("api", "/otel/v1/metrics"))[number % 3 - 1]
                    assert gateway.post(path, counter(number), port=port).status == 200
                else:
                    gateway.call(Signal.METRICS, counter(number))
                acknowledged.append(number)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            for number in range(1, 4):
                before = len(acknowledged)
                write_own(gateway.conf_dir, gateway.guance, f"[points]\nhostname = 'host-{number}'\n")
                assert gateway.guance.wait_for(lambda so_far=before: len(acknowledged) > so_far + 20)  # type: ignore[misc]
                gateway.gateway.reload()
        finally:
            stop.set()
            sender.join(30)
        events = fenced(gateway)
        assert sorted(event.fields["n"] for event in events) == acknowledged
        assert {event.tags["host"] for event in events} == {f"host-{number}" for number in range(4)}


def test_a_reload_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with running(tmp_path, "[points]\nhostname = 'host-0'\n") as gateway:
        write_own(gateway.conf_dir, gateway.guance, "[policy]\ncustomer_tags = ['reg:(']\n")
        with pytest.raises(ConfigError, match="customer_tags"):
            gateway.gateway.reload()
        gateway.post("/v1/metrics", counter(7))
        (event,) = fenced(gateway)
        assert (event.fields, event.tags["host"]) == ({"n": 7}, "host-0")


def test_spans_become_datakits_metrics_each_minute_and_before_a_reload(tmp_path: Path) -> None:
    (found,) = golden_cases("tm_tracing_metrics")
    wanted = [{**point, "time": RECEIVED_NS} for point in found["points"] if point["category"] == "metric"]
    with running(tmp_path, version="1.84.1", **dict(second_config(found))) as gateway:
        gateway.call(Signal.TRACES, bytes.fromhex(found["request"]["body_hex"]))
        assert not fenced(gateway)
        gateway.gateway.reload()
        assert of_events.ours(with_received(fenced(gateway))) == of_events.theirs(wanted)
        gateway.gateway.reload()
        assert not fenced(gateway)
        ((kept,),) = ask(gateway, "SELECT count(*) FROM events WHERE category = 'metric'")
        assert kept == len(wanted)


def test_a_minute_ends_by_itself_and_the_last_one_at_the_stop(tmp_path: Path) -> None:
    (found,) = golden_cases("tm_tracing_metrics")
    wanted = sum(point["category"] == "metric" for point in found["points"])
    body = bytes.fromhex(found["request"]["body_hex"])
    with running(tmp_path, **dict(second_config(found))) as gateway:
        minutes = Minutes(gateway.gateway._intake, interval_s=0.01)
        minutes.start()
        gateway.call(Signal.TRACES, body)
        assert gateway.guance.wait_for(lambda: len(gateway.guance.points("metric")) == wanted)
        minutes.stop()
        gateway.call(Signal.TRACES, body)
        minutes.stop()
        assert len(fenced(gateway)) == 2 * wanted


def test_spans_are_not_counted_where_nobody_asked(tmp_path: Path) -> None:
    (found,) = golden_cases("tm_tracing_metrics")
    with running(tmp_path) as gateway:
        gateway.call(Signal.TRACES, bytes.fromhex(found["request"]["body_hex"]))
        gateway.gateway.reload()
        assert not fenced(gateway)
