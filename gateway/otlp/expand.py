"""A data point not seen before becomes a series, or a family of them. Pure; called once a series by ``otlp.wire``.

What is the same for all rows of a series is settled here: names, tags, kind, bounds. What changes from row to row
(times, values, counts) is never seen here, but for the two things that are too rare or too involved for the fast
reader: the buckets of an exponential histogram, and bounds that are no good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from math import inf, isfinite, isinf, isnan, ldexp
from typing import Literal

from google.protobuf.message import Message
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    NumberDataPoint,
    SummaryDataPoint,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from gateway.config import PointSettings
from gateway.model import Kind, Losses, Reason, Series, Tags, Temporality
from gateway.otlp.flatten import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    Level,
    attribute_tags,
    brief,
    cut_text,
    host_tags,
    merge_levels,
    resource_level,
    scope_level,
)

MEASUREMENT = "otel_service"

MAX_EXPONENTIAL_BUCKETS = 4096
"""Of one data point, after they are spelled out; SDKs use 160."""
MIN_SCALE, MAX_SCALE = -10, 20
"""What the OpenTelemetry data model works with; beyond, bounds are no longer told apart by a float64."""
_ROUNDING = 1e-9
MAX_QUANTILES = 256
"""Of one summary data point. Each is a series of its own, and costs its sender two bytes."""

SUFFIXES = {
    Kind.HISTOGRAM: ("_min", "_max", "_count", "_sum", "_bucket"),
    Kind.EXPONENTIAL: ("_min", "_max", "_count", "_sum", "_bucket"),
    Kind.SUMMARY: ("_count", "_sum"),
}
"""The fields of a distribution behind its name, in DataKit's order."""

OWN_TAG = {Kind.HISTOGRAM: "le", Kind.EXPONENTIAL: "le", Kind.SUMMARY: "quantile"}
"""The tag that tells the members of a family apart."""

_WORD = 2**64
_CACHED_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class MetricHeader:
    """What a Metric says of all its data points. A gauge and a summary have no temporality."""

    name: str
    unit: str
    kind_of_data: Literal["gauge", "sum", "histogram", "exponential", "summary"]
    temporality: Temporality = Temporality.UNSPECIFIED
    monotonic: bool = False


def understand(
    header: MetricHeader,
    resource: bytes,
    scope: bytes | None,
    attributes: bytes,
    kind: Kind,
    bounds: tuple[float, ...],
    quantiles: tuple[float, ...],
    sender_address: str | None,
    settings: PointSettings,
    losses: Losses,
) -> list[Series]:
    """The series of a data point: one, or for a summary its own and then one of DOUBLE for each of ``quantiles``.

    ``resource`` and ``scope`` are serialized messages (None: no scope was sent), ``attributes`` the data point's
    attribute fields as they were sent, one behind the other. ``bounds`` have been through ``merged_buckets`` where
    they needed it. Raises ``DecodeError`` or ``UnicodeDecodeError`` for bytes that are not what they should be.
    """
    levels = [_resource_level(resource, sender_address)]
    if scope is not None:
        levels.append(_scope_level(scope))
    levels.append(attribute_tags(point_attributes(header, attributes)))
    field = field_name(header.name, kind, losses)
    delta = settings.parity == "strict" and header.temporality is Temporality.DELTA
    tags = merge_levels(
        levels,
        header.unit,
        host_tags(levels[0], settings.global_tags, settings.host_tag),
        fields=(field, *(field + suffix for suffix in SUFFIXES[kind])) if kind in SUFFIXES else (field,),
        own=(("temporality", "delta"),) if delta else (),
        reserved=(OWN_TAG[kind],) if kind in OWN_TAG else (),
        losses=losses,
    )
    series = Series(
        measurement=MEASUREMENT,
        field=field,
        tags=tags,
        kind=kind,
        unit=cut_text(header.unit, MAX_VALUE_BYTES),
        temporality=header.temporality,
        monotonic=header.monotonic,
        bounds=bounds,
    )
    if kind is not Kind.SUMMARY:
        return [series]
    return [series, *(_quantile_series(series, tags, quantile) for quantile in quantiles)]


def _quantile_series(summary: Series, tags: Tags, quantile: float) -> Series:
    return replace(summary, kind=Kind.DOUBLE, tags=(*tags, (OWN_TAG[Kind.SUMMARY], decimal_text(quantile))))


def _resource_level(resource: bytes, sender_address: str | None) -> Level:
    if len(resource) > _CACHED_BYTES:
        return resource_level(Resource.FromString(resource).attributes, sender_address)
    return _known_resource_level(resource, sender_address)


@lru_cache(maxsize=256)
def _known_resource_level(resource: bytes, sender_address: str | None) -> Level:
    return resource_level(Resource.FromString(resource).attributes, sender_address)


def _scope_level(scope: bytes) -> Level:
    if len(scope) > _CACHED_BYTES:
        return _read_scope_level(scope)
    return _known_scope_level(scope)


@lru_cache(maxsize=256)
def _known_scope_level(scope: bytes) -> Level:
    return _read_scope_level(scope)


def _read_scope_level(scope: bytes) -> Level:
    message = InstrumentationScope.FromString(scope)
    return scope_level(message.name, message.attributes)


_DATA_POINT: dict[str, type[Message]] = {
    "gauge": NumberDataPoint,
    "sum": NumberDataPoint,
    "histogram": HistogramDataPoint,
    "exponential": ExponentialHistogramDataPoint,
    "summary": SummaryDataPoint,
}


def point_attributes(header: MetricHeader, attributes: bytes) -> Iterable[KeyValue]:
    """The attributes in the raw attribute fields of a data point, whose number differs from type to type."""
    point = _DATA_POINT[header.kind_of_data].FromString(attributes)
    found: Iterable[KeyValue] = getattr(point, "attributes")  # noqa: B009 (no common type has it)
    return found


def field_name(name: str, kind: Kind, losses: Losses) -> str:
    """The field for a metric's name: its dots stay, the rest is as for a tag's key (golden ``field-name-long``).

    A distribution's name is cut so that ``_bucket`` still fits behind it; DataKit cuts behind it, and several fields
    become one. A name that is nothing but backslashes, which DataKit loses, becomes underscores.
    """
    longest = max((len(suffix) for suffix in SUFFIXES.get(kind, ())), default=0)
    field = cut_text(name, MAX_KEY_BYTES - longest)
    if len(field) < len(name):
        losses.change(Reason.KEY_CUT, f"metric name {brief(name)} is longer than {MAX_KEY_BYTES - longest} bytes")
    return (field.rstrip("\\") or "_" * len(field)).replace("\n", " ")


def decimal_text(number: float) -> str:
    """Go's ``FormatFloat(number, 'f', -1, 64)``: the shortest digits that give the number back, no exponent."""
    if isnan(number):
        return "NaN"
    if isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    text = repr(number)
    if "e" in text:
        text = format(Decimal(text), "f")
    return text.removesuffix(".0")


def merged_buckets(bounds: Sequence[float], counts: Sequence[int]) -> tuple[list[float], list[int]]:
    """Bounds and counts without two buckets of one ``le``: the last of them has the largest cumulative count and
    stays, what the others held moves into the next bucket. A bound of +Inf is the bucket that every histogram ends
    with (golden ``m_hist_bound_inf``, case 05). There is one more of ``counts`` than of ``bounds``; none is NaN.
    """
    last = {bound: at for at, bound in enumerate(bounds)}
    kept_bounds, kept_counts = [], []
    held = 0
    for at, bound in enumerate(bounds):
        held += counts[at]
        if bound < inf and last[bound] == at:
            kept_bounds.append(bound)
            kept_counts.append(held % _WORD)
            held = 0
    kept_counts.append((held + counts[-1]) % _WORD)
    return kept_bounds, kept_counts


def exponential_buckets(point: ExponentialHistogramDataPoint) -> tuple[list[float], list[int]] | None:
    """Bounds (finite, ascending) and counts (one more: the last is +Inf's) of an exponential data point.

    None where there is more than can be spelled out. Two empty lists where nothing was counted. The bucket of zero is
    always there, at ``zero_threshold`` or 0, so that a family does not change its members with the first zero.
    Buckets are given by their upper bounds, which a positive one contains (data model: (base^i, base^(i+1)]) and a
    negative one does not ([-base^(i+1), -base^i)): a value that is exactly a negative bound counts into the next.
    A bound out of a float64's reach joins its neighbour: zero, or +Inf.
    """
    positive, negative = point.positive, point.negative
    size = len(positive.bucket_counts) + len(negative.bucket_counts)
    if not size and not point.zero_count:
        return [], []
    if size > MAX_EXPONENTIAL_BUCKETS or (size and not MIN_SCALE <= point.scale <= MAX_SCALE):
        return None
    bounds: list[float] = []
    counts: list[int] = []
    held = 0
    powers = _powers(point.scale, negative.offset, len(negative.bucket_counts))
    for power, count in zip(reversed(powers), reversed(negative.bucket_counts), strict=True):
        held += count
        if 0 < power < inf:
            _add_bucket(bounds, counts, -power, held)
            held = 0
    threshold = point.zero_threshold
    zero = threshold if isfinite(threshold) and threshold > 0 else 0.0
    _add_bucket(bounds, counts, zero, held + point.zero_count)
    rest = 0
    powers = _powers(point.scale, positive.offset + 1, len(positive.bucket_counts))
    for power, count in zip(powers, positive.bucket_counts, strict=True):
        if power < inf:
            _add_bucket(bounds, counts, power, count)
        else:
            rest += count
    counts.append(rest)
    return bounds, [count % _WORD for count in counts]


def extremes_lie_outside(point: ExponentialHistogramDataPoint) -> bool:
    """Whether the minimum or the maximum lies beyond the outermost bucket: a sender that contradicts itself. Rounding
    of a bound is forgiven."""
    positive, negative, scale = point.positive, point.negative, point.scale
    size = len(positive.bucket_counts) + len(negative.bucket_counts)
    if not (size or point.zero_count) or (size and not MIN_SCALE <= scale <= MAX_SCALE):
        return False
    zero = point.zero_threshold
    if negative.bucket_counts:
        lowest = -_power(scale, negative.offset + len(negative.bucket_counts))
    else:
        lowest = -zero if point.zero_count else _power(scale, positive.offset)
    if positive.bucket_counts:
        highest = _power(scale, positive.offset + len(positive.bucket_counts))
    else:
        highest = zero if point.zero_count else -_power(scale, negative.offset)
    return bool(
        (point.HasField("min") and point.min < lowest - _ROUNDING * abs(lowest))
        or (point.HasField("max") and point.max > highest + _ROUNDING * abs(highest))
    )


def _add_bucket(bounds: list[float], counts: list[int], bound: float, count: int) -> None:
    """A bucket behind the others, or, where its bound is not above theirs, into the last of them."""
    if bounds and bound <= bounds[-1]:
        counts[-1] += count
    else:
        bounds.append(bound)
        counts.append(count)


@lru_cache(maxsize=64)
def _powers(scale: int, first: int, count: int) -> tuple[float, ...]:
    return tuple(_power(scale, index) for index in range(first, first + count))


def _power(scale: int, index: int) -> float:
    """``base ** index``, base being ``2 ** 2 ** -scale``: exact where it is a power of two, inf where it is beyond."""
    if scale <= 0:
        exponent, mantissa = index << -scale, 1.0
    else:
        exponent, part = divmod(index, 1 << scale)
        mantissa = 2.0 ** (part / (1 << scale))
    try:
        return ldexp(mantissa, exponent)
    except OverflowError:
        return inf
