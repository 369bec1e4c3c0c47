"""The plain reading of a request of metrics: upb's parse, one object a row, no cleverness. Pure.

It is what ``otlp.wire`` and the encoders are tested against, and the rules of a data point in the order in which they
are applied. It is too slow for the receiving path, and nothing there uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite, isnan
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    SummaryDataPoint,
)

from gateway.buffer.record import BAD_MAX, BAD_MIN, BAD_SUM, HAS_MAX, HAS_MIN, HAS_SUM
from gateway.config import PointSettings
from gateway.model import (
    LOOKS_LIKE_ANOTHER_UNIT_NS,
    MAX_TIME_NS,
    Category,
    Event,
    FieldValue,
    Kind,
    Losses,
    Reason,
    Series,
    Temporality,
    Unsigned,
)
from gateway.otlp.expand import (
    MAX_QUANTILES,
    OWN_TAG,
    MetricHeader,
    decimal_text,
    exponential_buckets,
    extremes_lie_outside,
    merged_buckets,
    understand,
)

NO_RECORDED_VALUE = 1
"""DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK"""

Point = NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint | SummaryDataPoint


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the numbers (``value``) or of the distributions (the rest); ``buffer.record`` names the columns."""

    series: Series
    time_ns: int
    start_ns: int
    value: float | int | None = None
    flags: int = 0
    count: int = 0
    sum: float = 0.0
    min: float = 0.0
    max: float = 0.0
    buckets: tuple[int, ...] = ()
    bounds: tuple[float, ...] = ()


class _LeaveOut(Exception):
    """The data point cannot be kept, for this reason; ``detail`` goes behind the metric's name."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail


@dataclass(slots=True)
class _Reading:
    """What stays the same while a request is read."""

    sender_address: str | None
    settings: PointSettings
    received_ns: int
    losses: Losses = field(default_factory=Losses)
    known: dict[object, list[Series]] = field(default_factory=dict)

    @property
    def strict(self) -> bool:
        return self.settings.parity == "strict"


@dataclass(frozen=True, slots=True)
class _Metric:
    """What is the same for the data points of one metric."""

    resource: bytes
    scope: bytes | None
    header: MetricHeader
    temporality: int


def read(
    request: ExportMetricsServiceRequest, sender_address: str | None, settings: PointSettings, received_ns: int
) -> tuple[list[Row], Losses]:
    """The rows of a request in its order, and what was lost. Losses of a series are counted once a request."""
    reading = _Reading(sender_address, settings, received_ns)
    rows: list[Row] = []
    for resource_metrics in request.resource_metrics:
        # no resource is an empty resource (case 19); no scope is not an empty scope: it has no scope_name
        resource = resource_metrics.resource.SerializeToString()
        for scope_metrics in resource_metrics.scope_metrics:
            scope = scope_metrics.scope.SerializeToString() if scope_metrics.HasField("scope") else None
            for metric in scope_metrics.metrics:
                rows += _metric_rows(reading, metric, resource, scope)
    return rows, reading.losses


def _metric_rows(reading: _Reading, message: Metric, resource: bytes, scope: bytes | None) -> list[Row]:
    data = message.WhichOneof("data")
    if data is None:
        reading.losses.change(Reason.METRIC_WITHOUT_DATA, message.name)
        return []
    content = getattr(message, data)
    temporality = getattr(content, "aggregation_temporality", 0)
    header = MetricHeader(
        name=message.name,
        unit=message.unit,
        kind_of_data="exponential" if data == "exponential_histogram" else data,
        temporality=Temporality(temporality) if temporality in (1, 2) else Temporality.UNSPECIFIED,
        monotonic=getattr(content, "is_monotonic", False),
    )
    metric = _Metric(resource, scope, header, temporality)
    rows: list[Row] = []
    for point in content.data_points:
        try:
            _check_metric(reading, metric)
            rows += _READERS[data](reading, metric, point)
        except _LeaveOut as loss:
            reading.losses.leave_out(loss.reason, f"{message.name}{loss.detail}")
    return rows


def _check_metric(reading: _Reading, metric: _Metric) -> None:
    """What makes every data point of a metric useless: no name; in strict, no temporality where one is needed."""
    if not metric.header.name:
        raise _LeaveOut(Reason.NO_NAME)
    needs_temporality = metric.header.kind_of_data not in ("gauge", "summary")
    if reading.strict and needs_temporality and metric.temporality not in (1, 2):
        raise _LeaveOut(Reason.BAD_TEMPORALITY)


def _is_stale(point: Point) -> bool:
    return bool(point.flags & NO_RECORDED_VALUE)


def _times(reading: _Reading, point: Point) -> tuple[int, int]:
    """Time and start time. A time of 0 becomes the time of arrival; one past what can be kept is none."""
    time_ns, start_ns = point.time_unix_nano, point.start_time_unix_nano
    if time_ns > MAX_TIME_NS:
        raise _LeaveOut(Reason.TIME_RANGE)
    if time_ns == 0:
        reading.losses.change(Reason.TIME_ZERO, "time 0 becomes the time of arrival")
        time_ns = reading.received_ns
    elif LOOKS_LIKE_ANOTHER_UNIT_NS[0] <= time_ns < LOOKS_LIKE_ANOTHER_UNIT_NS[1]:
        reading.losses.change(Reason.TIME_UNIT, "a time before 1971 is sent on as it is")
    return time_ns, start_ns if start_ns <= MAX_TIME_NS else 0


def _family(
    reading: _Reading,
    metric: _Metric,
    point: Point,
    kind: Kind,
    bounds: tuple[float, ...] = (),
    quantiles: tuple[float, ...] = (),
) -> list[Series]:
    attributes = type(point)(attributes=point.attributes).SerializeToString()
    key = (metric, attributes, kind, bounds, repr(quantiles))
    if key not in reading.known:
        reading.known[key] = understand(
            metric.header,
            metric.resource,
            metric.scope,
            attributes,
            kind,
            bounds,
            quantiles,
            reading.sender_address,
            reading.settings,
            reading.losses,
        )
    return reading.known[key]


def _number(reading: _Reading, metric: _Metric, point: NumberDataPoint) -> Iterator[Row]:
    """A gauge's or a sum's. A stale marker with a value beside it is a value to DataKit (case 09)."""
    value = point.WhichOneof("value")
    if _is_stale(point) and (value is None or reading.strict):
        raise _LeaveOut(Reason.STALE)
    if value is None:
        raise _LeaveOut(Reason.NO_VALUE)
    if value == "as_double" and not isfinite(point.as_double):
        raise _LeaveOut(Reason.NOT_FINITE)
    time_ns, start_ns = _times(reading, point)
    (series,) = _family(reading, metric, point, Kind.DOUBLE if value == "as_double" else Kind.INT)
    yield Row(series, time_ns, start_ns, getattr(point, value))


def _histogram(reading: _Reading, metric: _Metric, point: HistogramDataPoint) -> Iterator[Row]:
    if _is_stale(point) and reading.strict:
        raise _LeaveOut(Reason.STALE)
    bounds, counts = list(point.explicit_bounds), list(point.bucket_counts)
    if any(isnan(bound) for bound in bounds):
        raise _LeaveOut(Reason.BAD_BOUNDS)
    time_ns, start_ns = _times(reading, point)
    if len(counts) != len(bounds) + 1 and (counts or bounds):
        if reading.strict:
            raise _LeaveOut(Reason.BAD_BUCKETS, f" has {len(counts)} counts for {len(bounds)} bounds")
        reading.losses.change(Reason.BUCKETS_LEFT_OUT, f"{len(counts)} counts for {len(bounds)} bounds")
        bounds, counts = [], []
    rising = all(low < high for low, high in pairwise(bounds))
    if not rising and reading.strict:
        raise _LeaveOut(Reason.BAD_BOUNDS)
    if not rising or inf in bounds:
        sent = len(bounds)
        bounds, counts = merged_buckets(bounds, counts)
        if len(bounds) < sent:
            reading.losses.change(Reason.BAD_BOUNDS, "bounds that are there twice, or +Inf, are merged")
    (series,) = _family(reading, metric, point, Kind.HISTOGRAM, tuple(bounds))
    yield _distribution(reading, series, point, time_ns, start_ns, counts, [])


def _exponential(reading: _Reading, metric: _Metric, point: ExponentialHistogramDataPoint) -> Iterator[Row]:
    if _is_stale(point) and reading.strict:
        raise _LeaveOut(Reason.STALE)
    time_ns, start_ns = _times(reading, point)
    buckets = exponential_buckets(point)
    if buckets is None:
        reading.losses.change(Reason.BUCKETS_LEFT_OUT, "more buckets, or another scale, than can be spelled out")
    if extremes_lie_outside(point):
        reading.losses.change(Reason.EXTREME_OUTSIDE, metric.header.name)
    bounds, counts = buckets or ([], [])
    (series,) = _family(reading, metric, point, Kind.EXPONENTIAL)
    yield _distribution(reading, series, point, time_ns, start_ns, counts, bounds)


def _distribution(
    reading: _Reading,
    series: Series,
    point: HistogramDataPoint | ExponentialHistogramDataPoint,
    time_ns: int,
    start_ns: int,
    buckets: list[int],
    bounds: list[float],
) -> Row:
    """A row of either kind of histogram. A sum, minimum or maximum that is not finite is not sent on."""
    flags = 0
    values = {}
    sent = {
        "sum": (point.sum if point.HasField("sum") else None, HAS_SUM, BAD_SUM),
        "min": (point.min if point.HasField("min") else None, HAS_MIN, BAD_MIN),
        "max": (point.max if point.HasField("max") else None, HAS_MAX, BAD_MAX),
    }
    for name, (value, has, bad) in sent.items():
        if value is not None and not isfinite(value):
            reading.losses.change(Reason.NOT_FINITE, f"{name} of {series.field}")
        flags |= 0 if value is None else has if isfinite(value) else bad
        values[name] = 0.0 if value is None or not isfinite(value) else value
    return Row(
        series,
        time_ns,
        start_ns,
        flags=flags,
        count=point.count,
        buckets=tuple(buckets),
        bounds=tuple(bounds),
        **values,
    )


def _summary(reading: _Reading, metric: _Metric, point: SummaryDataPoint) -> Iterator[Row]:
    """One row for count and sum, then a number a quantile. Quantiles that are not finite are left out, of one that
    is there twice the last counts, and too many are none."""
    if _is_stale(point) and reading.strict:
        raise _LeaveOut(Reason.STALE)
    time_ns, start_ns = _times(reading, point)
    quantiles = [(item.quantile, item.value) for item in point.quantile_values]
    if len(quantiles) > MAX_QUANTILES:
        reading.losses.change(Reason.BUCKETS_LEFT_OUT, f"{len(quantiles)} quantiles on one data point")
        quantiles = []
    family = _family(reading, metric, point, Kind.SUMMARY, (), tuple(quantile for quantile, _ in quantiles))
    finite = isfinite(point.sum)
    if not finite:
        reading.losses.change(Reason.NOT_FINITE, f"sum of {metric.header.name}")
    yield Row(
        family[0],
        time_ns,
        start_ns,
        flags=HAS_SUM if finite else BAD_SUM,
        count=point.count,
        sum=point.sum if finite else 0.0,
    )
    last = {quantile: at for at, (quantile, _) in enumerate(quantiles)}
    for at, (quantile, value) in enumerate(quantiles):
        if not (isfinite(quantile) and isfinite(value)):
            reading.losses.change(Reason.NOT_FINITE, f"quantile {quantile} of {metric.header.name}")
        elif last[quantile] != at:
            reading.losses.change(Reason.BUCKETS_LEFT_OUT, f"quantile {quantile} of {metric.header.name}")
        else:
            yield Row(family[1 + at], time_ns, start_ns, value)


_READERS: dict[str, Callable[[_Reading, _Metric, Any], Iterator[Row]]] = {
    "gauge": _number,
    "sum": _number,
    "histogram": _histogram,
    "exponential_histogram": _exponential,
    "summary": _summary,
}


def points(row: Row, parity: str) -> list[Event]:
    """The points that a row is to Guance, in DataKit's order: of a histogram its minimum, maximum, count and sum in
    one, then one a bucket, cumulative (wrapping at 2**64 as in DataKit), with the tag ``le``.

    What was not sent of minimum, maximum and sum is 0 in DataKit, and absent in strict.
    """
    series = row.series
    if row.value is not None:
        return [_point(row, {series.field: row.value})]
    fields: dict[str, FieldValue] = {}
    if series.kind is not Kind.SUMMARY:
        _put(fields, row, parity, "_min", row.min, HAS_MIN, BAD_MIN)
        _put(fields, row, parity, "_max", row.max, HAS_MAX, BAD_MAX)
    fields[f"{series.field}_count"] = Unsigned(row.count)
    _put(fields, row, parity, "_sum", row.sum, HAS_SUM, BAD_SUM)
    family = [_point(row, fields)]
    total = 0
    bounds = row.bounds if series.kind is Kind.EXPONENTIAL else series.bounds
    for count, bound in zip(row.buckets, (*bounds, inf)[: len(row.buckets)], strict=True):
        total = (total + count) % 2**64
        le = {OWN_TAG[series.kind]: decimal_text(bound)}
        family.append(_point(row, {f"{series.field}_bucket": Unsigned(total)}, le))
    return family


def _put(fields: dict[str, FieldValue], row: Row, parity: str, suffix: str, value: float, has: int, bad: int) -> None:
    if row.flags & has or (parity == "datakit" and not row.flags & bad):
        fields[row.series.field + suffix] = value


def _point(row: Row, fields: dict[str, FieldValue], tags: dict[str, str] | None = None) -> Event:
    return Event(
        Category.METRIC, row.series.measurement, {**dict(row.series.tags), **(tags or {})}, fields, row.time_ns
    )
