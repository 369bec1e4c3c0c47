"""DataKit's golden cases through the whole gateway: in by gRPC, protobuf and JSON, out at a fake Guance."""

from __future__ import annotations

import json
import re
import time
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.model import Event, Losses, Signal
from gateway.otlp import json as otlp_json
from gateway.otlp.point import line as event_line
from tests.data import golden, golden_cases
from tests.otlp import events as of_events
from tests.otlp import points as of_points
from tests.otlp.deviations import DEVIATIONS
from tests.otlp.points import RECEIVED_NS
from tests.running import JSON, Running, running

HOST, VERSION = "oracle-host", "1.84.1"
WAYS = ("grpc", "protobuf", "json")
_OTLP = Path(__file__).parent / "otlp"
INSTEAD: dict[str, list[dict[str, Any]]] = {
    **json.loads((_OTLP / "instead.json").read_text()),
    **json.loads((_OTLP / "instead_events.json").read_text()),
}
"""What we send where we differ on purpose, in the form of the golden files."""
KINDS: dict[Signal, type[Message]] = {
    Signal.METRICS: ExportMetricsServiceRequest,
    Signal.TRACES: ExportTraceServiceRequest,
    Signal.LOGS: ExportLogsServiceRequest,
}
OTHER_WAYS = {
    "l_default_split_500k": "its request is too large for a file; tests/otlp/test_logs.py makes one",
    "t_json_base64_ids": "refused, see below",
}
"""Cases that do not go all three ways."""
NOT_IN_JSON: dict[str, str] = {}
"""Cases whose request cannot be said in JSON."""


@dataclass(frozen=True)
class Case:
    """A golden case of either set."""

    name: str
    signal: Signal
    config: tuple[tuple[str, str], ...]
    """The texts of DataKit's files, by name without ``.conf``."""
    found: dict[str, Any]

    @cached_property
    def sent(self) -> bytes:
        """The request as it was sent to DataKit."""
        if "body_hex" in self.found["request"]:
            return bytes.fromhex(self.found["request"]["body_hex"])
        return json.dumps(self.found["request"]).encode()

    @cached_property
    def message(self) -> Message:
        if self.sent.startswith(b"{"):
            parsed: Message = otlp_json.parse(self.signal, self.sent, True, Losses())
            return parsed
        return KINDS[self.signal].FromString(self.sent)

    def body(self, way: str) -> bytes:
        """The request in the spelling of a way."""
        if way != "json":
            return self.message.SerializeToString()
        return self.sent if self.sent.startswith(b"{") else as_json(self.message)

    @property
    def of_first_set(self) -> bool:
        return "customer_tags" in self.found

    @property
    def lines(self) -> bool:
        """Whether it goes out as line protocol."""
        return 'content_encoding = "v1"' in dict(self.config)["datakit"]


def as_json(message: Message) -> bytes:
    """OTLP/JSON: ids in hex, enums as numbers."""

    def with_hex(value: Any) -> Any:
        if isinstance(value, list):
            return [with_hex(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {
            key: b64decode(each).hex() if key in ("traceId", "spanId", "parentSpanId") else with_hex(each)
            for key, each in value.items()
        }

    return json.dumps(with_hex(MessageToDict(message, use_integers_for_enums=True))).encode()


def first_set() -> Iterable[Case]:
    for signal in Signal:
        for found in golden(signal.name.lower()):
            wanted = found["customer_tags"]
            key = "customer_tags_all = true" if wanted == "all" else f"customer_tags = {json.dumps(wanted)}"
            config = (("datakit", f'hostname = "{HOST}"\n'), ("opentelemetry", f"[[inputs.opentelemetry]]\n{key}\n"))
            yield Case(f"{found['name']}-{wanted}", signal, config, found)


def second_set() -> Iterable[Case]:
    for found in golden_cases("m_", "t_", "l_", "mt_", "gt_", "pp_", "uc_", "wp_", "tc_", "p_", "eh_", "tm_"):
        name, refused = found["name"], not found["request"].get("body_hex") or "wrong_ctype" in found["name"]
        if refused or name in OTHER_WAYS:
            continue
        yield Case(name, Signal[found["request"]["signal"].upper()], second_config(found), found)


def second_config(found: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    told = found["config"]["datakit_conf"]
    datakit = f"""\
hostname = "{HOST}"

[dataway]
content_encoding = "{told["content_encoding"]}"

[global_host_tags]
{told["global_host_tags"].replace(", ", chr(10))}
"""
    return (("datakit", datakit), ("opentelemetry", found["config"]["input_conf"]))


CASES = {case.name: case for case in [*first_set(), *second_set()]}
_FENCE = re.compile("fence_([0-9]+)")


def fence(signal: Signal, number: int) -> bytes:
    """A request that comes out behind those before it, and ends what belongs to them."""
    name = f"fence_{number}"
    if signal is Signal.METRICS:
        metrics = ExportMetricsServiceRequest()
        metric = metrics.resource_metrics.add().scope_metrics.add().metrics.add(name=name)
        metric.gauge.data_points.add(as_int=1, time_unix_nano=1_700_000_000_000_000_000)
        return metrics.SerializeToString()
    if signal is Signal.TRACES:
        traces = ExportTraceServiceRequest()
        traces.resource_spans.add().scope_spans.add().spans.add(name=name, trace_id=b"t" * 16, span_id=b"s" * 8)
        return traces.SerializeToString()
    logs = ExportLogsServiceRequest()
    logs.resource_logs.add().scope_logs.add().log_records.add().body.string_value = name
    return logs.SerializeToString()


@dataclass(slots=True)
class Delivered:
    """What Guance got for a request: points, or lines where the encoding says so."""

    answer: bytes
    events: list[Event]
    lines: list[str]


def send(gateway: Running, case: Case, way: str) -> bytes:
    """Send a case one of the three ways; the answer's body."""
    if way == "grpc":
        return gateway.call(case.signal, case.body(way))
    if way == "protobuf":
        answer = gateway.post(f"/v1/{case.signal.name.lower()}", case.body(way))
    else:
        answer = gateway.post(gateway.path(case.signal), case.body(way), JSON, port="api")
    assert answer.status == 200, (case.name, answer)
    return answer.body


def deliver(gateway: Running, cases: list[Case]) -> dict[tuple[str, str], Delivered]:
    """Send cases all three ways, each with a fence behind it; what came out, by name and way."""
    sent: list[tuple[Case, str, bytes]] = []
    last: dict[Signal, int] = {}
    for way in WAYS:
        for case in cases:
            if way == "json" and case.name in NOT_IN_JSON:
                continue
            answer = send(gateway, case, way)
            last[case.signal] = len(sent)
            gateway.call(case.signal, fence(case.signal, len(sent)))
            sent.append((case, way, answer))
    for signal, number in last.items():
        await_fence(gateway, signal, number)
    found: dict[tuple[str, str], Delivered] = {}
    for signal in last:
        for number, events, lines in between_fences(gateway, signal):
            case, way, answer = sent[number]
            found[case.name, way] = Delivered(answer, events, lines)
    return found


def category_of(signal: Signal) -> str:
    return {Signal.METRICS: "metric", Signal.TRACES: "tracing", Signal.LOGS: "logging"}[signal]


def await_fence(gateway: Running, signal: Signal, number: int) -> None:
    name, category = f"fence_{number}".encode(), category_of(signal)

    def is_there() -> bool:
        return any(
            request.category == category and re.search(name + b"[^0-9]", request.body + b" ")
            for request in gateway.guance.requests
        )

    assert gateway.guance.wait_for(is_there, 30), f"{name!r} did not come"


def between_fences(gateway: Running, signal: Signal) -> Iterable[tuple[int, list[Event], list[str]]]:
    """What came, up to each fence, with the fence's number."""
    events: list[Event] = []
    lines: list[str] = []
    for request in list(gateway.guance.requests):
        if request.category != category_of(signal):
            continue
        found = request.events()
        for event in found:
            texts = [*event.fields, event.fields.get("resource"), event.fields.get("message")]
            number = next((match[1] for text in texts if (match := _FENCE.match(str(text)))), None)
            if number is None:
                events.append(event)
            else:
                yield int(number), events, lines
                events, lines = [], []
        for text in [] if found else request.body.decode().removesuffix("\n").split("\n"):
            if match := _FENCE.search(text):
                yield int(match[1]), events, lines
                events, lines = [], []
            else:
                lines.append(text)


Results = Callable[[Case], dict[tuple[str, str], Delivered]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What became of the cases of a configuration: one gateway for all of them, when the first is asked for."""
    known: dict[tuple[tuple[str, str], ...], dict[tuple[str, str], Delivered]] = {}

    def of(case: Case) -> dict[tuple[str, str], Delivered]:
        if case.config not in known:
            same = [other for other in CASES.values() if other.config == case.config]
            with running(tmp_path_factory.mktemp("golden"), version=VERSION, **dict(case.config)) as gateway:
                known[case.config] = deliver(gateway, same)
        return known[case.config]

    return of


def wanted_points(case: Case) -> list[dict[str, Any]] | list[Event]:
    """DataKit's points, or ours where we differ on purpose."""
    name = case.found["name"]
    if name in INSTEAD and ("deviation" in case.found or name in DEVIATIONS):
        points = INSTEAD[name]
    elif name in DEVIATIONS:
        return understood(case)
    else:
        points = case.found["points"]
    text = json.dumps([point for point in points if point["category"] == category_of(case.signal)])
    for mark, value in {
        "<gateway-host>": HOST,
        "<fingerprint>_": f"{HOST}_{VERSION}",
        "<fingerprint>": f"{HOST}_{VERSION}",
    }.items():
        text = text.replace(mark, value)
    found: list[dict[str, Any]] = json.loads(text)
    return found


def understood(case: Case) -> list[Event]:
    """What the pure functions make of a case of the second set."""
    if case.signal is Signal.METRICS:
        assert isinstance(case.message, ExportMetricsServiceRequest)
        return of_points.events(case.message, of_points.golden_settings(case.found))[0]
    assert isinstance(case.message, ExportTraceServiceRequest | ExportLogsServiceRequest)
    return of_events.flatten(case.message, *of_events.case_settings(case.found))[0]


def wanted(case: Case) -> list[tuple[object, ...]]:
    points = wanted_points(case)
    if points and isinstance(points[0], Event):
        return of_events.ours(points)  # type: ignore[arg-type]
    return of_events.theirs(points)  # type: ignore[arg-type]


def with_received(events: list[Event]) -> list[Event]:
    """Points whose time is that of the receipt have the one that the tables say."""
    now = time.time_ns()
    return [
        replace(event, time_ns=RECEIVED_NS) if abs(event.time_ns - now) < 120_000_000_000 else event for event in events
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.lines])
def test_guance_gets_datakits_points(results: Results, name: str, way: str) -> None:
    case = CASES[name]
    if way == "json" and name in NOT_IN_JSON:
        pytest.skip(NOT_IN_JSON[name])
    assert of_events.ours(with_received(results(case)[name, way].events)) == wanted(case)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.lines])
def test_guance_gets_datakits_lines(results: Results, name: str, way: str) -> None:
    case = CASES[name]
    lines = [event_line(event) for event in understood(case)] if name in DEVIATIONS else None
    texts = lines or [point["line"] for point in case.found["points"]]
    assert sorted(results(case)[name, way].lines) == sorted("\n".join(filter(None, texts)).split("\n"))
