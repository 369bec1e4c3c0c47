"""Random requests of metrics, and the same message in unusual but legal bytes (hypothesis)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Exemplar,
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    SummaryDataPoint,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from gateway.model import MAX_TIME_NS

Draw = Callable[[st.SearchStrategy[Any]], Any]

KEYS = st.sampled_from(
    [
        *("", "a", "hw.id", "hw_id", "le", "unit", "host", "host.name", "quantile", "scope_name", "remote_ip"),
        *("m", "m_count", "temporality", "process.runtime.name", "x.y.z"),
        *("with\nline", "slash\\", "k" * 300, "键" * 100),
    ]
)
TEXTS = st.sampled_from(["", "a", "b", "two\nlines", "slash\\\\", "c" * 1030, "值" * 400, "\0"]) | st.text(max_size=8)
NUMBERS = (
    st.sampled_from([0.0, -0.0, 1.0, -2.5, 1e300, 5e-324, float("nan"), float("inf"), float("-inf")]) | st.floats()
)
WORDS = st.sampled_from([0, 1, 2, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
TIMES = st.sampled_from([0, 1, 1_700_000_000_000_000_000, MAX_TIME_NS, MAX_TIME_NS + 1, 2**64 - 1])
FLAGS = st.sampled_from([0, 0, 0, 1, 2, 3])
INT64 = st.integers(-(2**63), 2**63 - 1)


def _leaf(draw: Draw) -> AnyValue:
    return draw(
        st.one_of(
            st.just(AnyValue()),
            TEXTS.map(lambda text: AnyValue(string_value=text)),
            st.booleans().map(lambda value: AnyValue(bool_value=value)),
            INT64.map(lambda value: AnyValue(int_value=value)),
            NUMBERS.map(lambda value: AnyValue(double_value=value)),
            st.binary(max_size=8).map(lambda value: AnyValue(bytes_value=value)),
        )
    )


@st.composite
def any_values(draw: Draw, depth: int = 2) -> AnyValue:
    """A value of an attribute, nested a little."""
    kind = draw(st.integers(0, 7)) if depth else 0
    value = AnyValue()
    if kind == 6:
        value.array_value.SetInParent()
        value.array_value.values.extend(draw(st.lists(any_values(depth - 1), max_size=3)))
    elif kind == 7:
        value.kvlist_value.SetInParent()
        value.kvlist_value.values.extend(draw(st.lists(key_values(depth - 1), max_size=3)))
    else:
        value = _leaf(draw)
    return value


@st.composite
def key_values(draw: Draw, depth: int = 2) -> KeyValue:
    attribute = KeyValue(key=draw(KEYS))
    if draw(st.integers(0, 9)):
        attribute.value.CopyFrom(draw(any_values(depth)))
    return attribute


ATTRIBUTES = st.lists(key_values(), max_size=5)


@st.composite
def exemplars(draw: Draw) -> Exemplar:
    return Exemplar(
        filtered_attributes=draw(st.lists(key_values(1), max_size=2)),
        time_unix_nano=draw(TIMES),
        as_double=draw(NUMBERS),
        span_id=draw(st.binary(max_size=8)),
    )


def _common(draw: Draw) -> dict[str, Any]:
    return {
        "attributes": draw(ATTRIBUTES),
        "time_unix_nano": draw(TIMES),
        "start_time_unix_nano": draw(TIMES),
        "flags": draw(FLAGS),
    }


def _optional(draw: Draw, *names: str) -> dict[str, float]:
    return {name: draw(NUMBERS) for name in names if draw(st.booleans())}


@st.composite
def number_points(draw: Draw) -> NumberDataPoint:
    value: dict[str, Any] = draw(
        st.one_of(st.just({}), st.fixed_dictionaries({"as_double": NUMBERS}), st.fixed_dictionaries({"as_int": INT64}))
    )
    return NumberDataPoint(**_common(draw), **value, exemplars=draw(st.lists(exemplars(), max_size=1)))


@st.composite
def histogram_points(draw: Draw) -> HistogramDataPoint:
    """Mostly sound; else bounds that do not rise, are not finite, or are not as many as they should be."""
    bounds = draw(st.lists(NUMBERS, max_size=4))
    if draw(st.booleans()):
        bounds = sorted({bound for bound in bounds if abs(bound) < float("inf")})
    size = draw(st.sampled_from([len(bounds) + 1, len(bounds) + 1, len(bounds) + 1, 0, 1, len(bounds)]))
    return HistogramDataPoint(
        **_common(draw),
        **_optional(draw, "sum", "min", "max"),
        count=draw(WORDS),
        bucket_counts=draw(st.lists(WORDS, min_size=size, max_size=size)),
        explicit_bounds=bounds,
        exemplars=draw(st.lists(exemplars(), max_size=1)),
    )


@st.composite
def buckets(draw: Draw) -> ExponentialHistogramDataPoint.Buckets:
    return ExponentialHistogramDataPoint.Buckets(
        offset=draw(st.sampled_from([0, 1, -1, -3000, 3000, 2**31 - 1, -(2**31)]) | st.integers(-50, 50)),
        bucket_counts=draw(st.lists(WORDS, max_size=5)),
    )


@st.composite
def exponential_points(draw: Draw) -> ExponentialHistogramDataPoint:
    point = ExponentialHistogramDataPoint(
        **_common(draw),
        **_optional(draw, "sum", "min", "max"),
        count=draw(WORDS),
        scale=draw(st.sampled_from([0, 1, 3, 20, 21, -10, -11, 2**31 - 1])),
        zero_count=draw(WORDS),
        zero_threshold=draw(NUMBERS),
        exemplars=draw(st.lists(exemplars(), max_size=1)),
    )
    for name in ("positive", "negative"):
        if draw(st.booleans()):
            getattr(point, name).CopyFrom(draw(buckets()))
    return point


@st.composite
def summary_points(draw: Draw) -> SummaryDataPoint:
    point = SummaryDataPoint(**_common(draw), count=draw(WORDS), sum=draw(NUMBERS))
    for quantile in draw(st.lists(NUMBERS | st.floats(0, 1), max_size=3)):
        point.quantile_values.add(quantile=quantile, value=draw(NUMBERS))
    return point


_POINTS: dict[str, st.SearchStrategy[Any]] = {
    "gauge": number_points(),
    "sum": number_points(),
    "histogram": histogram_points(),
    "exponential_histogram": exponential_points(),
    "summary": summary_points(),
}


@st.composite
def metrics(draw: Draw) -> Metric:
    metric = Metric(name=draw(st.sampled_from(["", "m", "m", "gpu.util", "le", "n" * 300, "back\\"])), unit=draw(TEXTS))
    data = draw(st.sampled_from(["", *_POINTS]))
    if data:
        content = getattr(metric, data)
        content.SetInParent()
        content.data_points.extend(draw(st.lists(_POINTS[data], max_size=3)))
        if data in ("sum", "histogram", "exponential_histogram"):
            content.aggregation_temporality = draw(st.sampled_from([2, 2, 1, 0, 9]))
        if data == "sum":
            content.is_monotonic = draw(st.booleans())
    return metric


@st.composite
def requests(draw: Draw) -> ExportMetricsServiceRequest:
    """A request of metrics of every kind."""
    request = ExportMetricsServiceRequest()
    for _ in range(draw(st.integers(0, 2))):
        resource = ResourceMetrics(schema_url=draw(TEXTS))
        if draw(st.booleans()):
            resource.resource.CopyFrom(Resource(attributes=draw(ATTRIBUTES)))
        for _ in range(draw(st.integers(0, 2))):
            scope = ScopeMetrics(metrics=draw(st.lists(metrics(), max_size=3)))
            if draw(st.booleans()):
                scope.scope.CopyFrom(InstrumentationScope(name=draw(TEXTS), attributes=draw(ATTRIBUTES)))
            resource.scope_metrics.append(scope)
        request.resource_metrics.append(resource)
    return request


VARINT, FIXED64, LEN, GROUP, END_GROUP, FIXED32 = range(6)
_FIXED = {
    FieldDescriptor.TYPE_DOUBLE: ("<d", FIXED64),
    FieldDescriptor.TYPE_FIXED64: ("<Q", FIXED64),
    FieldDescriptor.TYPE_SFIXED64: ("<q", FIXED64),
    FieldDescriptor.TYPE_FIXED32: ("<I", FIXED32),
}


def oddly_encoded(message: Message, random: Random) -> bytes:
    """``message`` as no SDK would write it, but any protobuf parser must read it.

    Fields in any order, a singular message in pieces, a field of a oneof or a singular one sent before in vain,
    packed and unpacked numbers in one field, unknown fields and groups between, varints longer than they need to be.
    The order of repeated fields may change with it: what it means is what upb makes of the bytes.
    """
    chunks = list(_chunks(message, random))
    if random.random() < 0.5:
        random.shuffle(chunks)
    return b"".join(chunks)


def _chunks(message: Message, random: Random) -> Iterator[bytes]:
    for field, value in message.ListFields():
        if random.random() < 0.15:
            yield _unknown(random)
        if field.containing_oneof is not None and random.random() < 0.15:
            yield _in_vain(message, field, random)
        if field.is_repeated and field.message_type is None:
            yield from _numbers(field, list(value), random)
        elif field.is_repeated:
            for item in value:
                yield _field(field.number, LEN, oddly_encoded(item, random), random)
                if random.random() < 0.1:
                    yield _unknown(random)
        elif field.message_type is not None:
            yield from _pieces(field, value, random)
        else:
            if random.random() < 0.1:
                yield _scalar(field, value, random)
            yield _scalar(field, value, random)


def _pieces(field: FieldDescriptor, message: Message, random: Random) -> Iterator[bytes]:
    """A singular message: its fields dealt out to one or more messages, which the reader has to merge."""
    chunks = list(_chunks(message, random))
    piece: list[bytes] = []
    for chunk in chunks:
        piece.append(chunk)
        if random.random() < 0.2:
            yield _field(field.number, LEN, b"".join(piece), random)
            piece = []
    yield _field(field.number, LEN, b"".join(piece), random)


def _in_vain(message: Message, field: FieldDescriptor, random: Random) -> bytes:
    """Another member of the same oneof: what comes after it takes its place."""
    other = random.choice(field.containing_oneof.fields)
    content = message.__class__()
    if other.message_type is not None:
        part = getattr(content, other.name)
        part.SetInParent()
        if hasattr(part, "data_points") and random.random() < 0.7:
            part.data_points.add(time_unix_nano=1).attributes.add(key="vain").value.string_value = "v"
    elif other.type == FieldDescriptor.TYPE_STRING:
        setattr(content, other.name, "vain")
    elif other.type == FieldDescriptor.TYPE_BYTES:
        setattr(content, other.name, b"vain")
    else:
        setattr(content, other.name, 1)
    return content.SerializeToString()


def _numbers(field: FieldDescriptor, values: list[Any], random: Random) -> Iterator[bytes]:
    """Repeated numbers: packed, one by one, or now this and now that."""
    while values:
        size = random.choice([1, len(values), random.randint(1, len(values))])
        part, values = values[:size], values[size:]
        if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES) or random.random() < 0.4:
            yield from (_scalar(field, value, random) for value in part)
        else:
            yield _field(field.number, LEN, b"".join(_bare(field, value, random)[0] for value in part), random)


def _scalar(field: FieldDescriptor, value: Any, random: Random) -> bytes:
    raw, wire = _bare(field, value, random)
    return _field(field.number, wire, raw, random)


def _bare(field: FieldDescriptor, value: Any, random: Random) -> tuple[bytes, int]:
    """A value without its tag, and its wire type."""
    if field.type in _FIXED:
        layout, wire = _FIXED[field.type]
        return struct.pack(layout, value), wire
    if field.type == FieldDescriptor.TYPE_STRING:
        return value.encode(), LEN
    if field.type == FieldDescriptor.TYPE_BYTES:
        return value, LEN
    if field.type in (FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64):
        value = (value << 1) ^ (value >> 63)
    return _varint(int(value) % 2**64, random, 10), VARINT


def _field(number: int, wire: int, raw: bytes, random: Random) -> bytes:
    tag = _varint(number << 3 | wire, random, 5)
    return tag + _varint(len(raw), random, 5) + raw if wire == LEN else tag + raw


def _varint(number: int, random: Random, longest: int) -> bytes:
    """A varint, now and then with more bytes than it needs (at most ``longest``)."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    if len(out) < longest and random.random() < 0.1:
        out[-1] |= 0x80
        out += b"\x80" * random.randint(0, longest - len(out) - 1) + b"\0"
    return bytes(out)


def _unknown(random: Random, depth: int = 3) -> bytes:
    """A field that nobody knows: of any wire type, groups too."""
    number = random.choice([15, 16, 99, 1000, 2**29 - 1])
    wire = random.choice([VARINT, FIXED64, LEN, GROUP, FIXED32] if depth else [VARINT, FIXED64, LEN, FIXED32])
    if wire == GROUP:
        inner = b"".join(_unknown(random, depth - 1) for _ in range(random.randint(0, 2)))
        return _field(number, GROUP, inner, random) + _field(number, END_GROUP, b"", random)
    if wire == VARINT:
        return _field(number, VARINT, _varint(random.getrandbits(64), random, 10), random)
    size = {FIXED64: 8, FIXED32: 4}.get(wire, random.randint(0, 12))
    return _field(number, wire, random.randbytes(size), random)
