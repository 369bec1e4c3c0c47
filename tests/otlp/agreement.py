"""What the fast reader and the plain one find in the same bytes, side by side. (The fuzz target uses it, too.)"""

from __future__ import annotations

import struct

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gateway.buffer.record import Numbers, read_body, read_definitions
from gateway.model import Batch, Kind, Losses, Reason, Refusal, Series
from gateway.otlp.plain import Row, read
from gateway.otlp.registry import Registry
from gateway.otlp.wire import decode
from tests.otlp.points import RECEIVED_NS

SENDER = "192.0.2.7"

OF_A_ROW = {
    Reason.TIME_ZERO,
    Reason.TIME_UNIT,
    Reason.BUCKETS_LEFT_OUT,
    Reason.BAD_BOUNDS,
    Reason.METRIC_WITHOUT_DATA,
    Reason.NOT_FINITE,
    Reason.EXTREME_OUTSIDE,
}
"""Changes that are counted for each data point. The others are counted once a series, so the readers' counts differ
where the same series is written in other bytes."""


def series_of(registry: Registry, batch: Batch) -> dict[int, Series]:
    """The series of a batch by id: the registry's, and those that are only in the batch."""
    numbers, distributions, _ = read_body(batch.body)
    transient = dict(read_definitions(batch.definitions))
    ids = {*numbers.series.tolist(), *distributions.series.tolist()}
    return {found: Series.unpack(transient.get(found) or registry.definition(found)) for found in ids}


def rows_of(registry: Registry, batch: Batch) -> tuple[list[Row], list[Row]]:
    """The rows of a batch: numbers, distributions."""
    series = series_of(registry, batch)
    numbers, found, _ = read_body(batch.body)
    rows = []
    bucket_at = bound_at = 0
    buckets, bounds = found.buckets.tolist(), found.bounds.tolist()
    for at in range(len(found.series)):
        n_buckets, n_bounds = int(found.n_buckets[at]), int(found.n_bounds[at])
        rows.append(
            Row(
                series[int(found.series[at])],
                int(found.time[at]),
                int(found.start[at]),
                flags=int(found.flags[at]),
                count=int(found.count[at]),
                sum=float(found.sum[at]),
                min=float(found.min[at]),
                max=float(found.max[at]),
                buckets=tuple(buckets[bucket_at : bucket_at + n_buckets]),
                bounds=tuple(bounds[bound_at : bound_at + n_bounds]),
            )
        )
        bucket_at, bound_at = bucket_at + n_buckets, bound_at + n_bounds
    assert (bucket_at, bound_at) == (len(buckets), len(bounds))
    return number_rows(series, numbers), rows


def number_rows(series: dict[int, Series], numbers: Numbers) -> list[Row]:
    rows = []
    columns = (numbers.series.tolist(), numbers.time.tolist(), numbers.start.tolist(), numbers.bits.tolist())
    for found, time_ns, start_ns, bits in zip(*columns, strict=True):
        layout = "<d" if series[found].kind is Kind.DOUBLE else "<q"
        (value,) = struct.unpack(layout, struct.pack("<Q", bits))
        rows.append(Row(series[found], time_ns, start_ns, value))
    return rows


def told(losses: Losses) -> tuple[dict[Reason, int], dict[Reason, int]]:
    changed = {reason: count for reason, count in losses.changed.items() if reason in OF_A_ROW}
    return losses.left_out, changed


def agree(registry: Registry, body: bytes) -> bool:
    """Whether the body is a request; fails where the two readers differ. Rows are compared as texts: NaN is NaN, and
    -0.0 is not 0.0."""
    try:
        batch = decode(registry, body, SENDER, RECEIVED_NS)
    except Refusal as refusal:
        assert refusal.reason is Reason.BAD_DATA, refusal
        assert "offset" in str(refusal) or "sent in pieces" in str(refusal), refusal
        batch = None
    try:
        request = ExportMetricsServiceRequest.FromString(body)
    except DecodeError:
        assert batch is None, "upb refuses what the fast reader took"
        return False
    assert batch is not None, "the fast reader refuses what upb takes"
    wanted, losses = read(request, SENDER, registry.settings, RECEIVED_NS)
    numbers, distributions = rows_of(registry, batch)
    assert list(map(repr, numbers)) == [repr(row) for row in wanted if row.value is not None]
    assert list(map(repr, distributions)) == [repr(row) for row in wanted if row.value is None]
    assert batch.points == len(wanted)
    assert told(batch.losses) == told(losses)
    return True
