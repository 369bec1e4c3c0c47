"""A data point becomes its series; buckets are spelled out."""

from __future__ import annotations

from math import inf, isfinite, ldexp

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    NumberDataPoint,
    SummaryDataPoint,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from gateway.config import PointSettings
from gateway.model import Kind, Losses, Reason, Series, Temporality
from gateway.otlp.expand import (
    MAX_EXPONENTIAL_BUCKETS,
    MetricHeader,
    decimal_text,
    exponential_buckets,
    extremes_lie_outside,
    merged_buckets,
    understand,
)
from tests.otlp.strategies import exponential_points

SETTINGS = PointSettings(global_tags=(("host", "gateway"),))
STRICT = PointSettings(parity="strict", global_tags=(("host", "gateway"),))


def attribute(key: str, text: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=text))


def series(
    header: MetricHeader,
    kind: Kind,
    attributes: bytes = b"",
    settings: PointSettings = SETTINGS,
    bounds: tuple[float, ...] = (),
    quantiles: tuple[float, ...] = (),
    losses: Losses | None = None,
) -> list[Series]:
    resource = Resource(attributes=[attribute("service.name", "s"), attribute("host.name", "node")])
    scope = InstrumentationScope(name="probe", attributes=[attribute("team", "a")])
    return understand(
        header,
        resource.SerializeToString(),
        scope.SerializeToString(),
        attributes,
        kind,
        bounds,
        quantiles,
        "192.0.2.7",
        settings,
        Losses() if losses is None else losses,
    )


TAGS = (
    ("host_name", "node"),
    ("remote_ip", "192.0.2.7"),
    ("service_name", "s"),
    ("scope_name", "probe"),
    ("team", "a"),
    ("k", "v"),
    ("unit", "ms"),
    ("host", "gateway"),
)


@pytest.mark.parametrize(
    ("data", "kind", "point"),
    [
        ("gauge", Kind.DOUBLE, NumberDataPoint),
        ("sum", Kind.INT, NumberDataPoint),
        ("histogram", Kind.HISTOGRAM, HistogramDataPoint),
        ("exponential", Kind.EXPONENTIAL, ExponentialHistogramDataPoint),
        ("summary", Kind.SUMMARY, SummaryDataPoint),
    ],
)
def test_every_kind_of_data_has_its_attributes_in_its_own_field(data: str, kind: Kind, point: type) -> None:
    header = MetricHeader("m.x", "ms", data, Temporality.CUMULATIVE, True)  # type: ignore[arg-type]
    raw = point(attributes=[attribute("k", "v")]).SerializeToString()
    (found,) = series(header, kind, raw)
    assert found == Series("otel_service", "m.x", TAGS, kind, "ms", Temporality.CUMULATIVE, True)
    assert Series.unpack(found.pack()) == found


def test_a_summary_is_a_family_with_one_series_a_quantile() -> None:
    family = series(MetricHeader("m", "ms", "summary"), Kind.SUMMARY, quantiles=(0.0, 0.5, 0.999, 1.0))
    assert [found.kind for found in family] == [Kind.SUMMARY] + [Kind.DOUBLE] * 4
    assert [dict(found.tags).get("quantile") for found in family] == [None, "0", "0.5", "0.999", "1"]
    assert {found.field for found in family} == {"m"}


def test_delta_is_a_tag_in_strict_only() -> None:
    header = MetricHeader("m", "", "sum", Temporality.DELTA)
    (found,) = series(header, Kind.INT)
    assert "temporality" not in dict(found.tags)
    raw = NumberDataPoint(attributes=[attribute("temporality", "mine")]).SerializeToString()
    (found,) = series(header, Kind.INT, raw, STRICT)
    assert dict(found.tags)["temporality"] == "delta"
    assert dict(found.tags)["exported_temporality"] == "mine"


@pytest.mark.parametrize(
    ("data", "kind", "key"),
    [
        ("histogram", Kind.HISTOGRAM, "le"),
        ("exponential", Kind.EXPONENTIAL, "le"),
        ("summary", Kind.SUMMARY, "quantile"),
        ("histogram", Kind.HISTOGRAM, "m_count"),
        ("histogram", Kind.HISTOGRAM, "m_bucket"),
        ("summary", Kind.SUMMARY, "m"),
    ],
)
def test_an_attribute_with_a_name_that_the_points_need_is_renamed(data: str, kind: Kind, key: str) -> None:
    losses = Losses()
    header = MetricHeader("m", "", data)  # type: ignore[arg-type]
    number = {"histogram": 9, "exponential": 1, "summary": 7}[data]
    content = attribute(key, "mine").SerializeToString()
    for found in series(header, kind, bytes((number << 3 | 2, len(content))) + content, quantiles=(), losses=losses):
        assert key not in dict(found.tags)
        assert dict(found.tags)[f"exported_{key}"] == "mine"
    assert losses.changed == {Reason.FIELD_CLASH: 1}


def test_a_gauge_keeps_an_attribute_le() -> None:
    raw = NumberDataPoint(attributes=[attribute("le", "mine"), attribute("quantile", "x")]).SerializeToString()
    (found,) = series(MetricHeader("m", "", "gauge"), Kind.DOUBLE, raw)
    assert {("le", "mine"), ("quantile", "x")} <= set(found.tags)


@pytest.mark.parametrize(
    ("name", "kind", "field"),
    [
        ("gpu.util", Kind.DOUBLE, "gpu.util"),
        ("显存.使用", Kind.DOUBLE, "显存.使用"),
        ("two\nlines\\", Kind.DOUBLE, "two lines"),
        ("\\", Kind.DOUBLE, "_"),
        ("f" * 400, Kind.DOUBLE, "f" * 256),
        ("f" * 400, Kind.HISTOGRAM, "f" * (256 - len("_bucket"))),
        ("f" * 400, Kind.SUMMARY, "f" * (256 - len("_count"))),
    ],
)
def test_the_field_is_the_metrics_name(name: str, kind: Kind, field: str) -> None:
    losses = Losses()
    data = {Kind.DOUBLE: "gauge", Kind.HISTOGRAM: "histogram", Kind.SUMMARY: "summary"}[kind]
    (found,) = series(MetricHeader(name, "", data), kind, losses=losses)  # type: ignore[arg-type]
    assert found.field == field
    assert (Reason.KEY_CUT in losses.changed) == (len(name) == 400)


def test_bytes_that_are_no_message_are_an_error_and_poison_nothing() -> None:
    header = MetricHeader("m", "", "gauge")
    for resource, scope, attributes in ((b"\xff", None, b""), (b"", b"\xff", b""), (b"", None, b"\x3a\x05")):
        with pytest.raises(DecodeError):
            understand(header, resource, scope, attributes, Kind.INT, (), (), None, SETTINGS, Losses())
    assert series(header, Kind.INT)


def test_losses_of_a_known_resource_count_for_each_series() -> None:
    resource = Resource(attributes=[attribute("k" * 300, "v")]).SerializeToString()
    for _ in range(2):
        losses = Losses()
        understand(MetricHeader("m", "", "gauge"), resource, None, b"", Kind.INT, (), (), None, SETTINGS, losses)
        assert losses.changed == {Reason.KEY_CUT: 1}


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (5.0, "5"),
        (25.5, "25.5"),
        (1e-9, "0.000000001"),
        (1.5e-7, "0.00000015"),
        (100000.0, "100000"),
        (1e21, "1000000000000000000000"),
        (-0.0, "-0"),
        (0.1, "0.1"),
        (1e16, "10000000000000000"),
        (inf, "+Inf"),
        (-inf, "-Inf"),
        (float("nan"), "NaN"),
    ],
)
def test_a_bound_prints_as_go_prints_it(number: float, text: str) -> None:
    assert decimal_text(number) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_printed_bound_gives_the_bound_back(number: float) -> None:
    text = decimal_text(number)
    assert float(text) == number
    assert "e" not in text


@pytest.mark.parametrize(
    ("bounds", "counts", "merged"),
    [
        ([1.0, 2.0], [1, 2, 3], ([1.0, 2.0], [1, 2, 3])),
        ([1.0, inf], [1, 2, 3], ([1.0], [1, 5])),
        ([inf], [1, 2], ([], [3])),
        ([1.0, 1.0], [1, 1, 1], ([1.0], [2, 1])),
        ([5.0, 1.0, 5.0], [1, 2, 4, 8], ([1.0, 5.0], [3, 4, 8])),
        ([-0.0, 0.0], [1, 2, 4], ([0.0], [3, 4])),
        ([-inf, 1.0], [1, 2, 4], ([-inf, 1.0], [1, 2, 4])),
        ([1.0, 1.0], [2**64 - 1, 2, 3], ([1.0], [1, 3])),
    ],
)
def test_no_two_buckets_keep_one_bound(
    bounds: list[float], counts: list[int], merged: tuple[list[float], list[int]]
) -> None:
    assert merged_buckets(bounds, counts) == merged


def exponential(
    scale: int = 0,
    positive: tuple[int, list[int]] = (0, []),
    negative: tuple[int, list[int]] = (0, []),
    zero_count: int = 0,
    zero_threshold: float = 0.0,
) -> tuple[list[float], list[int]] | None:
    return exponential_buckets(exponential_point(scale, positive, negative, zero_count, zero_threshold))


def exponential_point(
    scale: int = 0,
    positive: tuple[int, list[int]] = (0, []),
    negative: tuple[int, list[int]] = (0, []),
    zero_count: int = 0,
    zero_threshold: float = 0.0,
) -> ExponentialHistogramDataPoint:
    point = ExponentialHistogramDataPoint(scale=scale, zero_count=zero_count, zero_threshold=zero_threshold)
    for buckets, (offset, counts) in ((point.positive, positive), (point.negative, negative)):
        buckets.offset = offset
        buckets.bucket_counts.extend(counts)
    return point


@pytest.mark.parametrize(
    ("point", "lowest", "highest"),
    [
        (exponential_point(positive=(0, [1, 2])), 1.0, 4.0),
        (exponential_point(negative=(0, [1, 2])), -4.0, -1.0),
        (exponential_point(1, (0, [3, 1]), (2, [4, 1]), 2), -4.0, 2.0),
        (exponential_point(zero_count=2), 0.0, 0.0),
        (exponential_point(zero_count=2, zero_threshold=0.5), -0.5, 0.5),
        (exponential_point(zero_count=2, positive=(0, [1])), 0.0, 2.0),
        (exponential_point(3, (5, [1])), 2 ** (5 / 8), 2 ** (6 / 8)),
    ],
)
def test_an_extreme_lies_outside_beyond_the_outermost_bucket(
    point: ExponentialHistogramDataPoint, lowest: float, highest: float
) -> None:
    def told(low: float | None, high: float | None) -> bool:
        told = ExponentialHistogramDataPoint()
        told.CopyFrom(point)
        if low is not None:
            told.min = low
        if high is not None:
            told.max = high
        return extremes_lie_outside(told)

    assert not told(None, None)
    assert not told(lowest, highest)
    assert told(lowest - 0.01, None)
    assert told(None, highest + 0.01)
    assert told(lowest - 0.01, highest + 0.01)


def test_of_a_point_without_buckets_nothing_lies_outside() -> None:
    point = exponential_point(scale=99, positive=(0, [1]))
    for each in (ExponentialHistogramDataPoint(), point):
        each.min, each.max = -1e9, 1e9
        assert not extremes_lie_outside(each)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (exponential(), ([], [])),
        (exponential(zero_count=2), ([0.0], [2, 0])),
        (exponential(positive=(0, [1, 2])), ([0.0, 2.0, 4.0], [0, 1, 2, 0])),
        (exponential(positive=(-1, [1])), ([0.0, 1.0], [0, 1, 0])),
        (exponential(negative=(0, [1, 2])), ([-2.0, -1.0, 0.0], [2, 1, 0, 0])),
        (exponential(1, (0, [3, 1]), (2, [4, 1]), 2), ([-ldexp(2**0.5, 1), -2, 0, 2**0.5, 2], [1, 4, 2, 3, 1, 0])),
        (exponential(zero_count=1, zero_threshold=0.5, positive=(0, [4])), ([0.5, 2.0], [1, 4, 0])),
        (exponential(zero_threshold=3.0, positive=(0, [1, 2])), ([3.0, 4.0], [1, 2, 0])),
        (exponential(zero_threshold=float("nan"), zero_count=1), ([0.0], [1, 0])),
        (exponential(positive=(1022, [1, 2, 4])), ([0.0, ldexp(1, 1023)], [0, 1, 6])),
        (exponential(positive=(-1080, [1, 2])), ([0.0], [3, 0])),
        (exponential(negative=(-1080, [1]), zero_count=2), ([0.0], [3, 0])),
        (exponential(negative=(1023, [1, 2])), ([-ldexp(1, 1023), 0.0], [3, 0, 0])),
        (exponential(-10, (2**31 - 1, [1])), ([0.0], [0, 1])),
        (exponential(20, (-(2**31), [1])), ([0.0], [1, 0])),
        (exponential(21, (0, [1])), None),
        (exponential(-11, (0, [1])), None),
        (exponential(2**31 - 1, zero_count=1), ([0.0], [1, 0])),
        (exponential(zero_count=2**64 - 1, negative=(-1080, [2])), ([0.0], [1, 0])),
    ],
)
def test_exponential_buckets_are_spelled_out(
    found: tuple[list[float], list[int]] | None, wanted: tuple[list[float], list[int]] | None
) -> None:
    assert found == wanted
    assert found is None or not any(str(bound) == "-0.0" for bound in found[0])


def test_powers_of_two_are_exact_at_every_scale() -> None:
    for scale in range(-10, 21):
        index = 1 << max(scale, 0)
        bounds, _ = exponential(scale, (index - 1, [1])) or ([], [])
        assert bounds[-1] == (2.0 if scale >= 0 else (ldexp(1.0, 1 << -scale) if scale > -10 else 0.0))


def test_buckets_without_end_are_left_out() -> None:
    assert exponential(20, (0, [1] * MAX_EXPONENTIAL_BUCKETS)) is not None
    assert exponential(20, (0, [1] * MAX_EXPONENTIAL_BUCKETS), (0, [1])) is None


@given(exponential_points())
def test_spelled_out_buckets_rise_and_lose_no_count(point: ExponentialHistogramDataPoint) -> None:
    spelled = exponential_buckets(point)
    if not spelled or spelled == ([], []):
        return
    bounds, counts = spelled
    assert len(counts) == len(bounds) + 1
    assert all(isfinite(bound) for bound in bounds)
    assert bounds == sorted(set(bounds))
    total = point.zero_count + sum(point.positive.bucket_counts) + sum(point.negative.bucket_counts)
    assert sum(counts) % 2**64 == total % 2**64
