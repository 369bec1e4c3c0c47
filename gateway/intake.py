"""From a request's bytes to a batch on its way to the disk: where the receivers' ``accept`` leads.

Holds the present generation of meaning (registry, rules). A reload swaps in a new one; requests that are being read
finish with the old.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.buffer.record import pack_events
from gateway.buffer.writer import Writer
from gateway.config import Settings
from gateway.metrics import Meters
from gateway.model import Batch, Event, Losses, Reason, Refusal, Sender, Signal, Wire
from gateway.otlp import json as otlp_json
from gateway.otlp.logs import flatten_logs
from gateway.otlp.point import encode_point
from gateway.otlp.registry import Registry
from gateway.otlp.traces import flatten_spans
from gateway.otlp.tracing_metrics import TracingMetrics
from gateway.otlp.wire import decode
from gateway.policy.rules import Rules
from gateway.receive.intake import Ticket

log = logging.getLogger("locum.intake")

Request = TypeVar("Request", ExportTraceServiceRequest, ExportLogsServiceRequest)

_WORTH_A_WARNING = {Reason.TIME_UNIT, Reason.METRIC_WITHOUT_DATA, Reason.NOTHING_RECOGNISED, Reason.ENUM_NAME}
"""Changes that a sender is told of in both parities: its exporter is at fault. The rest only in strict."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one version of the settings makes of a request."""

    settings: Settings
    rules: Rules
    registry: Registry
    tracing_metrics: TracingMetrics | None
    """Counts spans, where that is asked for."""

    @classmethod
    def of(cls, settings: Settings) -> Generation:
        """Raises ``ConfigError`` for a pattern that does not compile."""
        traces = settings.traces
        counting = TracingMetrics(
            settings.points, traces.tracing_metric_tag_whitelist, traces.tracing_metric_tag_blacklist
        )
        return cls(
            settings,
            Rules.compile(settings.policy),
            Registry(settings.points, settings.receive.max_series),
            counting if traces.tracing_metrics else None,
        )


class Intake:
    """Turns requests into batches and hands them to the writer."""

    def __init__(self, generation: Generation, writer: Writer, meters: Meters) -> None:
        self.generation = generation
        self._writer = writer
        self._meters = meters

    def accept(self, signal: Signal, wire: Wire, body: bytes, sender: Sender) -> Ticket:
        """Understand a request and queue it. Raises ``Refusal`` if it is refused whole.

        The ticket is done when the batch is synced. A request without a single point to keep needs no disk.
        """
        generation = self.generation
        batch, events = read_request(generation, signal, wire, body, sender, time.time_ns())
        if batch.points:
            done = self._writer.submit(batch, generation.registry.table)
            if generation.tracing_metrics is not None and signal is Signal.TRACES:
                _observe(generation.tracing_metrics, events, done)
        else:
            done = Future()
            done.set_result(0)
        if batch.losses.left_out or batch.losses.changed:
            done.add_done_callback(lambda ended: self._count(batch, ended))
        rejected = batch.losses.rejected
        tells = (
            rejected or generation.settings.points.parity == "strict" or _WORTH_A_WARNING & batch.losses.changed.keys()
        )
        return Ticket(done, rejected, batch.losses.message() if tells else "")

    def submit_tracing_metrics(self, generation: Generation) -> None:
        """Queue what was made of a generation's spans since the last time, as a batch like any other. What cannot be
        written is counted as left out: nobody sends it again."""
        if generation.tracing_metrics is None:
            return
        now_ns = time.time_ns()
        if generation.tracing_metrics.overflowed:
            log.warning("event=tracing_metrics_overflowed spans=%d", generation.tracing_metrics.overflowed)
        events = generation.tracing_metrics.drain(now_ns)
        if not events:
            return
        batch = Batch(Signal.METRICS, now_ns, _packed(events), len(events), Losses())

        def count_refused(error: BaseException | None) -> None:
            if error is not None:
                reason = error.reason if isinstance(error, Refusal) else Reason.DISK_FULL
                self._meters.left_out.labels("metrics", reason).inc(len(events))
                log.warning("event=tracing_metrics_lost points=%d error=%r", len(events), str(error))

        try:
            done = self._writer.submit(batch, generation.registry.table)
        except Refusal as refusal:
            count_refused(refusal)
        else:
            done.add_done_callback(lambda ended: count_refused(ended.exception()))

    def _count(self, batch: Batch, done: Future[int]) -> None:
        """Count a batch's losses, once it is safe: one that is refused comes again, and its losses with it."""
        if done.exception() is not None:
            return
        signal = batch.signal.name.lower()
        for reason, count in batch.losses.left_out.items():
            self._meters.left_out.labels(signal, reason).inc(count)
        for reason, count in batch.losses.changed.items():
            self._meters.changed.labels(signal, reason).inc(count)


def read_request(
    generation: Generation, signal: Signal, wire: Wire, body: bytes, sender: Sender, received_ns: int
) -> tuple[Batch, list[Event]]:
    """The batch that a request makes, and its spans or records. Pure but for what the registry remembers. Raises
    ``Refusal``."""
    settings = generation.settings
    address = sender.address if settings.receive.remote_ip else None
    json_losses = Losses()
    if wire is Wire.JSON:
        lenient = settings.points.parity == "datakit"
        body = otlp_json.parse(signal, body, lenient, json_losses).SerializeToString()
    events: list[Event] = []
    if signal is Signal.METRICS:
        batch = decode(generation.registry, body, address, received_ns)
    else:
        events, losses = _read_events(generation, signal, body, address, received_ns)
        batch = Batch(signal, received_ns, _packed(events), len(events), losses)
    batch.losses.add(json_losses)
    return batch, events


def _packed(events: list[Event]) -> bytes:
    return pack_events([(event.category, event.time_ns, encode_point(event)) for event in events])


def _observe(metrics: TracingMetrics, spans: list[Event], done: Future[int]) -> None:
    """Count spans once they are safe: those of a refused request come again."""
    done.add_done_callback(lambda ended: metrics.observe(spans) if ended.exception() is None else None)


def _read_events(
    generation: Generation, signal: Signal, body: bytes, address: str | None, received_ns: int
) -> tuple[list[Event], Losses]:
    settings = generation.settings
    if signal is Signal.TRACES:
        spans = _parse(ExportTraceServiceRequest, body)
        return flatten_spans(spans, address, settings.points, settings.traces, generation.rules, received_ns)
    records = _parse(ExportLogsServiceRequest, body)
    return flatten_logs(records, address, settings.points, settings.traces, received_ns)


def _parse(kind: type[Request], body: bytes) -> Request:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise Refusal(Reason.BAD_DATA, f"not a well-formed {kind.__name__} ({error})") from None
