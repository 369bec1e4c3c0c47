"""What a sender is told: the response messages of OTLP, and ``google.rpc.Status`` for a refusal."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsPartialSuccess, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from gateway.model import REFUSALS, Reason, Refusal, Signal, Wire
from gateway.receive.intake import Ticket

MAX_MESSAGE_CHARACTERS = 4096
"""A sender has to be able to take the answer (OTLP 1.11: keep responses well under 4 MiB)."""


def success(ticket: Ticket, signal: Signal, wire: Wire) -> bytes:
    """The response of an accepted request. Full success has no ``partial_success`` at all: no bytes, or ``{}``."""
    if not ticket.message:
        return b"" if wire is Wire.PROTOBUF else b"{}"
    return _encode(_partial(signal, ticket.rejected, ticket.message[:MAX_MESSAGE_CHARACTERS]), wire)


def _partial(signal: Signal, rejected: int, message: str) -> Message:
    if signal is Signal.METRICS:
        metrics = ExportMetricsPartialSuccess(rejected_data_points=rejected, error_message=message)
        return ExportMetricsServiceResponse(partial_success=metrics)
    if signal is Signal.TRACES:
        spans = ExportTracePartialSuccess(rejected_spans=rejected, error_message=message)
        return ExportTraceServiceResponse(partial_success=spans)
    records = ExportLogsPartialSuccess(rejected_log_records=rejected, error_message=message)
    return ExportLogsServiceResponse(partial_success=records)


def status(refusal: Refusal) -> Status:
    """The ``google.rpc.Status`` of a refusal: RetryInfo where trying again helps, BadRequest where it does not."""
    rule = REFUSALS[refusal.reason]
    message = str(refusal)[:MAX_MESSAGE_CHARACTERS]
    details: list[Message] = []
    if rule.retryable:
        details.append(RetryInfo(retry_delay=_duration(refusal.retry_after_s or 1.0)))
    elif refusal.reason is Reason.BAD_DATA:
        details.append(BadRequest(field_violations=[BadRequest.FieldViolation(description=message)]))
    return Status(code=grpc_code(refusal).value[0], message=message, details=[_any(detail) for detail in details])


def grpc_code(refusal: Refusal) -> Any:
    """The gRPC status code of a refusal."""
    return grpc.StatusCode[REFUSALS[refusal.reason].grpc]


def status_body(refusal: Refusal, wire: Wire) -> bytes:
    """``status`` in the encoding of the request."""
    return _encode(status(refusal), wire)


def _encode(message: Message, wire: Wire) -> bytes:
    if wire is Wire.PROTOBUF:
        return message.SerializeToString()
    return json_format.MessageToJson(message, indent=None).encode()


def _any(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
