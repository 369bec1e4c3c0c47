"""The fast reader and the plain one are of one mind: about rows, about losses, and about what is no request."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from gateway.config import PointSettings
from gateway.otlp.registry import Registry
from tests.data import golden_cases
from tests.otlp.agreement import agree
from tests.otlp.strategies import oddly_encoded, requests

TAGS = (("host", "gateway"), ("dc", "lab1"))
DATAKIT = PointSettings(global_tags=TAGS)
STRICT = PointSettings(parity="strict", host_tag="resource", global_tags=TAGS)

many = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
parities = pytest.mark.parametrize("points", [DATAKIT, STRICT], ids=["datakit", "strict"])


@parities
@many
@given(requests())
def test_both_readers_find_the_same_rows(points: PointSettings, request_: ExportMetricsServiceRequest) -> None:
    registry = Registry(points, 1000)
    body = request_.SerializeToString()
    assert agree(registry, body)
    assert agree(registry, body), "series that are known by now"


@parities
@many
@given(requests(), st.randoms(use_true_random=False))
def test_unusual_encodings_mean_the_same(
    points: PointSettings, request_: ExportMetricsServiceRequest, random: Random
) -> None:
    registry = Registry(points, 1000)
    body = oddly_encoded(request_, random)
    assert agree(registry, body)
    agree(registry, request_.SerializeToString())
    assert agree(registry, body)


@many
@given(requests())
def test_series_past_the_limit_are_as_good_as_others(request_: ExportMetricsServiceRequest) -> None:
    registry = Registry(DATAKIT, 2)
    for _ in range(2):
        assert agree(registry, request_.SerializeToString())
    assert len(registry) <= 2


@many
@given(requests(), st.randoms(use_true_random=False), st.data())
def test_damaged_bytes_are_refused_by_both_or_by_none(
    request_: ExportMetricsServiceRequest, random: Random, data: st.DataObject
) -> None:
    body = bytearray(oddly_encoded(request_, random))
    for _ in range(data.draw(st.integers(0, 3))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]
    agree(Registry(DATAKIT, 1000), bytes(body))


@pytest.mark.parametrize(
    "case",
    [case for case in golden_cases("m_", "mt_", "gt_", "pp_m") if case["request"]["signal"] == "metrics"],
    ids=lambda case: str(case["name"]),
)
@parities
def test_golden_requests_mean_the_same_to_both(points: PointSettings, case: dict[str, dict[str, str]]) -> None:
    assert agree(Registry(points, 1000), bytes.fromhex(case["request"]["body_hex"]))


def field(number: int, content: bytes) -> bytes:
    size = bytearray()
    left = len(content)
    while left > 0x7F:
        size.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes((number << 3 | 2, *size, left)) + content


def nested(levels: int) -> bytes:
    """A request whose one attribute of a data point is an array in an array in an array."""
    value = field(1, b"x")
    for _ in range(levels):
        value = field(5, field(1, value))
    point = field(7, field(1, b"k") + field(2, value)) + b"\x31" + bytes(8)
    return field(1, field(2, field(2, field(1, b"m") + field(5, field(1, point)))))


@pytest.mark.parametrize("levels", range(40, 60))
def test_the_depth_of_nesting_is_limited_alike(levels: int) -> None:
    agree(Registry(DATAKIT, 10), nested(levels))


@pytest.mark.parametrize("levels", [0, 1, 50, 90, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102, 1000])
def test_the_depth_of_groups_is_limited_alike(levels: int) -> None:
    group = b"\x9b\x06" * levels + b"\x9c\x06" * levels
    for body in (
        group,
        field(1, group),
        field(1, field(2, group)),
        field(1, field(2, field(2, field(1, b"m") + group))),
    ):
        agree(Registry(DATAKIT, 10), body)


LEGAL_BUT_ODD = {
    "nothing": b"",
    "an unknown group around a group": b"\x9b\x06\xa3\x06\xa4\x06\x9c\x06",
    "a known field of another wire type": b"\x08\x01",
    "a field number of 29 bits": b"\xf8\xff\xff\xff\x0f\x01",
    "field number 0 in a group that nobody knows": b"\x9b\x06\x00\x01\x9c\x06",
    "a varint of ten bytes with bits past the 64th": b"\x78" + b"\x81" * 9 + b"\x7f",
    "a tag of five bytes": b"\xf8\x80\x80\x80\x00\x01",
    "an empty resource in two pieces": field(1, field(1, b"") + field(1, b"")),
}
ILLEGAL = {
    "field number 0": b"\x00\x01",
    "a group that does not end": b"\x9b\x06",
    "a group that ends as another": b"\x9b\x06\xa4\x06",
    "an end without a group": b"\x9c\x06",
    "wire type 6": b"\x0e",
    "wire type 7": b"\x0f",
    "a length past the end": b"\x0a\x05a",
    "a varint that does not end": b"\x08" + b"\x80" * 10,
    "a varint of eleven bytes": b"\x98\x06" + b"\x80" * 10 + b"\x01",
    "a tag of six bytes": b"\xf8\x80\x80\x80\x80\x00\x01",
    "a length of six bytes": b"\x7a\x81\x80\x80\x80\x80\x00a",
    "a field that begins in one piece of a resource and ends in the next": field(
        1, field(1, b"\x30") + field(1, b"\x01")
    ),
    "a histogram's field that does so": field(1, field(2, field(2, field(9, b"\x10") + field(9, b"\x01")))),
    "buckets in a metric's data that other data replaces": field(
        1, field(2, field(2, field(10, field(1, field(8, b"\x10\x81"))) + field(5, b"")))
    ),
    "a tag of 2**32": b"\x80\x80\x80\x80\x10\x01",
    "a name that is not UTF-8": field(1, field(2, field(2, field(1, b"\xff")))),
    "a schema URL that is not UTF-8": field(1, field(3, b"\xc0\x80")),
    "half of a surrogate pair": field(1, field(2, field(2, field(1, b"\xed\xa0\x80")))),
    "packed bounds that are no multiple of 8": field(1, field(2, field(2, field(9, field(1, field(7, b"1234567")))))),
}


@pytest.mark.parametrize("body", LEGAL_BUT_ODD.values(), ids=LEGAL_BUT_ODD)
def test_legal_but_odd_bytes_are_read(body: bytes) -> None:
    assert agree(Registry(DATAKIT, 10), body)


@pytest.mark.parametrize("body", ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_bytes_are_refused_with_their_offset(body: bytes) -> None:
    assert not agree(Registry(DATAKIT, 10), body)


def test_a_message_in_many_pieces_costs_what_its_bytes_cost() -> None:
    """Joined piece by piece, half a megabyte like this took seconds and gigabytes."""
    resource = field(1, field(1, field(1, b"k") + field(2, field(1, b"v" * 100_000))))
    pieces = field(1, resource + b"\x0a\x00" * 20_000 + field(2, b""))
    tracemalloc.start()
    assert agree(Registry(DATAKIT, 10), pieces)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
