"""From the real SDKs through the real gateway: what the fake Guance gets is what DataKit would have sent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.forward.stand_in import StandIn
from gateway.model import Event
from tests.promises.gateway import ROOT, GatewayProcess
from tests.receive.test_sdks import JS, SENDERS, _node


@pytest.fixture(scope="module")
def guance() -> Iterator[StandIn]:
    with StandIn() as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def gateway(guance: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    place = tmp_path_factory.mktemp("sdk")
    with GatewayProcess(place, guance.url, "\n[points]\nhostname = 'gateway-1'\n") as process:
        process.start()
        yield process
        assert process.terminate() == 0


def _await(guance: StandIn, category: str, key: str, value: str, count: int) -> list[Event]:
    """The points of a category that have a tag or field ``key`` of this value, once ``count`` of them have come."""

    def found() -> list[Event]:
        return [
            event for event in guance.points(category) if value in (event.tags.get(key), str(event.fields.get(key)))
        ]

    assert guance.wait_for(lambda: len(found()) >= count), [str(event) for event in guance.points()]
    return found()


def test_the_python_sdk_over_grpc_and_http_gives_datakits_points(gateway: GatewayProcess, guance: StandIn) -> None:
    for signal, (send, over_grpc, over_http) in SENDERS.items():
        send(over_grpc(f"http://{gateway.grpc}", insecure=True))
        send(over_http(f"http://{gateway.http}/v1/{signal.name.lower()}"))
    counters = _await(guance, "metric", "service_name", "python-sender", 2)
    assert {event.measurement for event in counters} == {"otel_service"}
    assert all(event.fields == {"a.counter": 7} for event in counters)
    assert all(event.tags["colour"] == "green" and event.tags["host"] == "gateway-1" for event in counters)
    assert all("telemetry_sdk_name" not in event.tags for event in counters)
    spans = _await(guance, "tracing", "service", "python-sender", 2)
    assert {(event.measurement, event.tags["status"], event.tags["span_type"]) for event in spans} == {
        ("opentelemetry", "ok", "entry")
    }
    assert all(event.fields["resource"] == "a span" and len(str(event.fields["trace_id"])) == 32 for event in spans)
    records = _await(guance, "logging", "service", "python-sender", 2)
    assert all(event.measurement == "python-sender" and event.fields["message"] == "a record" for event in records)


def test_the_javascript_sdk_in_all_its_spellings_gives_datakits_points(
    gateway: GatewayProcess, guance: StandIn
) -> None:
    urls = [f"http://{gateway.http}", f"http://{gateway.grpc}"]
    ran = subprocess.run([_node(), "send.mjs", *urls], cwd=JS, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counters = _await(guance, "metric", "service_name", "js-sender", 3)
    assert [event.fields for event in counters] == [{"js.counter": counters[0].fields["js.counter"]}] * 3
    assert counters[0].fields["js.counter"] == 7
    spans = _await(guance, "tracing", "service", "js-sender", 3)
    assert {event.fields["resource"] for event in spans} == {"js span"}
    assert all(len(str(event.fields["span_id"])) == 16 for event in spans)
    records = _await(guance, "logging", "service", "js-sender", 3)
    assert all(event.fields["message"] == "js record" and event.fields["colour"] == "green" for event in records)
    assert {event.tags["status"] for event in records} == {"info"}


def test_every_signal_was_counted(gateway: GatewayProcess, guance: StandIn) -> None:
    assert {request.category for request in guance.requests} == {"metric", "tracing", "logging"}
    assert all(request.headers["content-encoding"] == "gzip" for request in guance.requests)


@contextmanager
def _locum_dataway() -> Iterator[subprocess.Popen[str]]:
    """The command, listening; what it prints is to be read."""
    command = [sys.executable, "-m", "gateway.cli", "dataway", "--listen", "127.0.0.1:0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


def test_locum_dataway_prints_datakits_points(tmp_path: Path) -> None:
    with _locum_dataway() as dataway:
        assert dataway.stdout is not None
        ready, _, url = dataway.stdout.readline().rstrip().rpartition(" ")
        assert ready == "dataway ready"
        with GatewayProcess(tmp_path, f"{url}?token=tkn_{'0' * 32}", "\n[points]\nhostname = 'gateway-1'\n") as gateway:
            gateway.start()
            for send, over_grpc, _ in SENDERS.values():
                send(over_grpc(f"http://{gateway.grpc}", insecure=True))
            points = [json.loads(dataway.stdout.readline()) for _ in SENDERS]
    shown = {point["category"]: point for point in points}
    assert shown["metric"]["measurement"] == "otel_service"
    assert shown["metric"]["fields"] == {"a.counter": 7}
    assert shown["metric"]["tags"]["host"] == "gateway-1"
    assert shown["tracing"]["fields"]["resource"] == "a span"
    assert shown["logging"]["fields"]["message"] == "a record"
