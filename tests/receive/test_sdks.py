"""The real SDKs' exporters, unchanged, against the receivers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc import _log_exporter as log_grpc
from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as metric_grpc
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as trace_grpc
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http import _log_exporter as log_http
from opentelemetry.exporter.otlp.proto.http import metric_exporter as metric_http
from opentelemetry.exporter.otlp.proto.http import trace_exporter as trace_http
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from gateway.model import Signal, Wire
from tests.receive.conftest import Receivers, Start

RESOURCE = Resource({"service.name": "python-sender"})
JS = Path(__file__).parent.parent / "js"


def send_metric(exporter: Any) -> None:
    provider = MeterProvider([PeriodicExportingMetricReader(exporter, 3_600_000)], RESOURCE)
    provider.get_meter("test").create_counter("a.counter").add(7, {"colour": "green"})
    provider.shutdown()


def send_span(exporter: Any) -> None:
    provider = TracerProvider(resource=RESOURCE)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("test").start_span("a span").end()
    provider.shutdown()


def send_record(exporter: Any) -> None:
    provider = LoggerProvider(RESOURCE)
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    provider.get_logger("test").emit(body="a record")
    provider.shutdown()


SENDERS: dict[Signal, tuple[Callable[[Any], None], Any, Any]] = {
    Signal.METRICS: (send_metric, metric_grpc.OTLPMetricExporter, metric_http.OTLPMetricExporter),
    Signal.TRACES: (send_span, trace_grpc.OTLPSpanExporter, trace_http.OTLPSpanExporter),
    Signal.LOGS: (send_record, log_grpc.OTLPLogExporter, log_http.OTLPLogExporter),
}


@pytest.mark.parametrize("signal", SENDERS)
@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_the_python_sdk_sends_over_grpc(receivers: Receivers, signal: Signal, compression: Any) -> None:
    send, exporter, _ = SENDERS[signal]
    send(exporter(f"http://127.0.0.1:{receivers.grpc_port}", insecure=True, compression=compression))
    _assert_one(receivers, signal, "grpc")


@pytest.mark.parametrize("signal", SENDERS)
@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
@pytest.mark.parametrize("api", [False, True])
def test_the_python_sdk_sends_over_http(receivers: Receivers, signal: Signal, compression: Any, api: bool) -> None:
    send, _, exporter = SENDERS[signal]
    place = f"{receivers.api_port}/otel" if api else f"{receivers.http_port}"
    send(exporter(f"http://127.0.0.1:{place}/v1/{signal.name.lower()}", compression=compression))
    _assert_one(receivers, signal, "http")


def test_the_python_sdk_sends_its_token(start: Start) -> None:
    receivers = start(token="s3cret")
    bearer = {"authorization": "Bearer s3cret"}
    send_metric(
        metric_grpc.OTLPMetricExporter(f"http://127.0.0.1:{receivers.grpc_port}", insecure=True, headers=bearer)
    )
    send_span(trace_http.OTLPSpanExporter(f"http://127.0.0.1:{receivers.http_port}/v1/traces", headers=bearer))
    assert [accepted.signal for accepted in receivers.backend.accepted] == [Signal.METRICS, Signal.TRACES]


def test_the_javascript_sdk_sends_everything(receivers: Receivers) -> None:
    node = _node()
    urls = [f"http://127.0.0.1:{receivers.http_port}", f"http://127.0.0.1:{receivers.grpc_port}"]
    ran = subprocess.run([node, "send.mjs", *urls], cwd=JS, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len([json.loads(line) for line in ran.stdout.splitlines()]) == 9
    expected = [
        (signal, wire, transport)
        for signal in (Signal.METRICS, Signal.TRACES, Signal.LOGS)
        for wire, transport in ((Wire.JSON, "http"), (Wire.PROTOBUF, "http"), (Wire.PROTOBUF, "grpc"))
    ]
    accepted = receivers.backend.accepted
    assert [(got.signal, got.wire, got.sender.transport) for got in accepted] == expected
    assert all("js-sender" in str(got.message) and "green" in str(got.message) for got in accepted)


def _node() -> str:
    """Node, with the packages of ``tests/js`` beside the script."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not here")
    if not (JS / "node_modules" / "@opentelemetry").is_dir():
        install = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(install, cwd=JS, capture_output=True, text=True, timeout=110, check=False, env=os.environ)
        assert done.returncode == 0, done.stderr[-2000:]
    return node


def _assert_one(receivers: Receivers, signal: Signal, transport: str) -> None:
    (accepted,) = receivers.backend.accepted
    assert (accepted.signal, accepted.wire, accepted.sender.transport) == (signal, Wire.PROTOBUF, transport)
    assert accepted.sender.address == "127.0.0.1"
    assert "python-sender" in str(accepted.message)
