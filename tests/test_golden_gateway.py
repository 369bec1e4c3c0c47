"""DataKit's golden cases through the whole gateway: in by gRPC, protobuf and JSON, out at a fake Guance."""

from __future__ import annotations

import gzip
import json
import time
from base64 import b64decode
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.model import CATEGORY_OF, Event, Losses, Signal
from gateway.otlp import json as otlp_json
from gateway.otlp.point import line as event_line
from tests.data import golden, golden_cases
from tests.fences import await_fence, between_fences, fence
from tests.otlp import events as of_events
from tests.otlp import points as of_points
from tests.otlp.deviations import DEVIATIONS
from tests.otlp.points import RECEIVED_NS
from tests.receive.test_golden_transport import ANSWERED_OTHERWISE
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
REFUSED = {"t_json_base64_ids", "eh_http_wrong_ctype_ok_header"}
"""Cases whose request is refused; they are sent as they are."""


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
        if found["name"] in REFUSED:
            continue
        if found["name"] == "l_default_split_500k":
            found["request"]["body_hex"] = half_a_megabyte().hex()
        yield Case(found["name"], Signal[found["request"]["signal"].upper()], second_config(found), found)


def half_a_megabyte() -> bytes:
    """The request of ``l_default_split_500k``, which is too large for a file."""
    logs = ExportLogsServiceRequest()
    group = logs.resource_logs.add()
    group.resource.attributes.add(key="service.name").value.string_value = "svc-a"
    records = group.scope_logs.add()
    records.scope.name = "logger"
    record = records.log_records.add(severity_number=9, time_unix_nano=1_700_000_000_123_456_789)
    record.body.string_value = "a" * 512_001
    return logs.SerializeToString()


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
    text = json.dumps([point for point in points if point["category"] == CATEGORY_OF[case.signal].path])
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
    assert of_events.ours(with_received(results(case)[name, way].events)) == wanted(case)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.lines])
def test_guance_gets_datakits_lines(results: Results, name: str, way: str) -> None:
    case = CASES[name]
    lines = [event_line(event) for event in understood(case)] if name in DEVIATIONS else None
    texts = lines or [point["line"] for point in case.found["points"]]
    assert sorted(results(case)[name, way].lines) == sorted("\n".join(filter(None, texts)).split("\n"))


AS_SENT = {
    found["name"]: Case(found["name"], Signal[found["request"]["signal"].upper()], second_config(found), found)
    for found in golden_cases("h_", "g_gzip", "uc_", "mp_", "wp_", "eh_", "t_json", "t_http_protobuf", "l_http")
}
"""Cases about the transport, sent as DataKit got them: headers, method, path."""


@pytest.fixture(scope="module")
def transports(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Callable[[Case], Running]]:
    """The gateway of a configuration, kept for the next case."""
    with ExitStack() as stack:
        known: dict[tuple[tuple[str, str], ...], Running] = {}

        def of(case: Case) -> Running:
            if case.config not in known:
                place = tmp_path_factory.mktemp("transport")
                known[case.config] = stack.enter_context(running(place, version=VERSION, **dict(case.config)))
            return known[case.config]

        yield of


@pytest.mark.parametrize("name", AS_SENT)
def test_what_is_sent_as_datakit_got_it_arrives_once_or_is_refused(
    transports: Callable[[Case], Running], name: str
) -> None:
    case = AS_SENT[name]
    gateway = transports(case)
    request, body = case.found["request"], case.sent
    if request["transport"] == "grpc":
        assert gateway.call(case.signal, body, compression=grpc.Compression.Gzip) == b""
        status = 200
    else:
        coding = request["headers"].get("Content-Encoding", "").lower()
        if coding == "gzip" and name not in ("h_gzip_header_plain_body", "h_gzip_truncated"):
            body = gzip.compress(body)
        answer = gateway.post(request["path"], body, port="api", method=request["method"], headers=request["headers"])
        status = answer.status
        expected, _ = ANSWERED_OTHERWISE.get(name, (case.found["response"]["http_status"], ""))
        assert status == (400 if name == "t_json_base64_ids" else expected)
    number = len(gateway.guance.requests)
    gateway.call(case.signal, fence(case.signal, number))
    await_fence(gateway, case.signal, number)
    *_, (_, events, _) = between_fences(gateway, case.signal)
    if status != 200:
        assert not events
    elif case.found["points"] or name in DEVIATIONS:
        assert of_events.ours(with_received(events)) == wanted(case)
    else:
        assert of_events.ours(events) == of_events.ours(understood(case))


def test_datakits_limit_for_grpc_is_for_grpc_alone(transports: Callable[[Case], Running]) -> None:
    case = AS_SENT["mp_small_http"]
    gateway = transports(case)
    with pytest.raises(grpc.RpcError) as refused:
        gateway.call(case.signal, case.sent)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
