"""DataKit's golden transport cases: who is answered how. (What becomes of the points is tested elsewhere.)"""

from __future__ import annotations

import gzip
from typing import Any

import grpc
import pytest

from gateway.model import Signal
from tests.data import golden_cases
from tests.receive.conftest import Receivers, Start

CASES = {
    case["case"] if "case" in case else case["name"]: case for case in golden_cases("g_", "h_", "eh_", "uc_", "wp_")
}

ANSWERED_OTHERWISE: dict[str, tuple[Any, str]] = {
    "eh_http_wrong_ctype_ok_header": (415, "OTLP: another media type is not a bad request"),
    "g_bad_payload": ("INVALID_ARGUMENT", "OTLP: bad data must not be retried, INTERNAL says nothing of that"),
    "g_logs_empty": ("OK", "OTLP: an empty request succeeds; DataKit fails on its own answer"),
    "g_too_large": ("OK", "the default limit is 64 MiB, as OTLP 1.11 recommends"),
    "h_ctype_charset": (200, "OTLP: parameters of a media type do not break it"),
    "h_ctype_upper": (200, "media types have no case"),
    "h_deflate_header": (415, "a coding that is not known is refused, not ignored"),
    "h_empty_body_json": (200, "OTLP: an empty request succeeds"),
    "h_get": (405, "the path exists, the method does not"),
    "h_put": (405, "the path exists, the method does not"),
    "h_gzip_header_plain_body": (400, "DataKit says 200 and loses the request"),
    "h_metrics_json_unknown_field": (200, "OTLP: receivers ignore fields that they do not know"),
    "h_wrong_path_v1metrics": (200, "OTLP's own paths are served on every port"),
}
"""Where Locum's answer differs from DataKit's, each with its reason."""


def body_of(case: dict[str, Any]) -> bytes:
    """What was sent, before a compression that the transport's client does."""
    request = case["request"]
    if "body_hex" in request:
        return bytes.fromhex(request["body_hex"])
    return b"\x0a\x00" * (request["body_bytes"] // 2)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["request"]["transport"] == "http"])
def test_http_is_answered_as_datakit_does_or_better(receivers: Receivers, name: str) -> None:
    case = CASES[name]
    request, body = case["request"], body_of(case)
    coding = request["headers"].get("Content-Encoding", "").lower()
    if coding == "gzip" and name not in ("h_gzip_header_plain_body", "h_gzip_truncated"):
        body = gzip.compress(body)
    answer = receivers.post(
        request["path"], body, request["headers"], port=receivers.api_port, method=request["method"]
    )
    expected, _ = ANSWERED_OTHERWISE.get(name, (case["response"]["http_status"], ""))
    assert answer.status == expected
    if answer.status == 200:
        assert answer.body == (b"{}" if "json" in request["headers"]["Content-Type"] else b"")
        address = case["points"][0]["tags"]["remote_ip"] if case["points"] else "127.0.0.1"
        assert [accepted.sender.address for accepted in receivers.backend.accepted] == [address]
    else:
        assert not receivers.backend.accepted


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["request"]["transport"] == "grpc"])
def test_grpc_is_answered_as_datakit_does_or_better(receivers: Receivers, name: str) -> None:
    case = CASES[name]
    expected, _ = ANSWERED_OTHERWISE.get(name, (case["response"]["grpc_code"], ""))
    compression = grpc.Compression.Gzip if case["request"].get("compression") == "gzip" else None
    try:
        answer = receivers.call(case["request"]["method"], body_of(case), compression=compression)
    except grpc.RpcError as error:
        assert error.code().name == expected
        assert not receivers.backend.accepted
    else:
        assert (expected, answer) == ("OK", b"")
        assert len(receivers.backend.accepted) == 1


def test_datakits_own_limit_can_be_set(start: Start) -> None:
    receivers = start(max_grpc_request_bytes=16 << 20)
    with pytest.raises(grpc.RpcError) as refused:
        receivers.call(Signal.METRICS, body_of(CASES["g_too_large"]))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_paths_of_opentelemetry_conf_are_served(start: Start) -> None:
    receivers = start(metric_path="/my/metrics")
    assert receivers.post("/my/metrics", b"", port=receivers.api_port).status == 200
    assert receivers.post("/otel/v1/metrics", b"", port=receivers.api_port).status == 404


def test_every_difference_is_one(receivers: Receivers) -> None:
    same = [
        name
        for name, (ours, _) in ANSWERED_OTHERWISE.items()
        if ours in (CASES[name]["response"].get("http_status"), CASES[name]["response"].get("grpc_code"))
    ]
    assert not same
