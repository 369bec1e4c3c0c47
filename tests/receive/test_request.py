"""The head of an HTTP request, as tables."""

from __future__ import annotations

import pytest

from gateway.model import Reason, Refusal, Signal, Wire
from gateway.receive.request import (
    cors_headers,
    first_headers,
    preflight_headers,
    read_head,
    remote_address,
    token_matches,
    wire_of,
)

PEER = {"client": ("192.0.2.1", 4711), "query_string": b""}


@pytest.mark.parametrize(
    ("media", "wire"),
    [
        (b"application/x-protobuf", Wire.PROTOBUF),
        (b"Application/X-Protobuf", Wire.PROTOBUF),
        (b"application/x-protobuf;proto=x.y", Wire.PROTOBUF),
        (b"application/json", Wire.JSON),
        (b"application/json; charset=utf-8", Wire.JSON),
        (b" application/json ;charset=utf-8;a=b", Wire.JSON),
        (b"application/protobuf", None),
        (b"text/plain", None),
        (b"application/jsonx", None),
        (b"", None),
    ],
)
def test_a_media_type_is_known_with_any_parameters_and_in_any_case(media: bytes, wire: Wire | None) -> None:
    assert wire_of({b"content-type": media}) is wire


@pytest.mark.parametrize(
    ("forwarded", "address"),
    [
        ({}, "192.0.2.1"),
        ({b"x-forwarded-for": b"10.9.8.7"}, "192.0.2.1"),
        ({b"x-forwarded-for": b"10.9.8.7:1234"}, "10.9.8.7"),
        ({b"x-forwarded-for": b"10.9.8.7, 10.9.8.6:80"}, "10.9.8.6"),
        ({b"x-real-ip": b"10.9.8.7:1"}, "10.9.8.7"),
        ({b"proxy-client-ip": b"10.9.8.7:1"}, "10.9.8.7"),
        ({b"x-forwarded-for": b"10.9.8.7", b"x-real-ip": b"10.0.0.1:2"}, "10.0.0.1"),
        ({b"x-forwarded-for": b"[2001:db8::1]:443"}, "2001:db8::1"),
        ({b"x-forwarded-for": b"2001:db8::1"}, "192.0.2.1"),
        ({b"x-forwarded-for": b":80"}, "192.0.2.1"),
        ({b"x-forwarded-for": b"10.9.8.7:http"}, "192.0.2.1"),
        ({b"x-forwarded-for": b"a" * 300 + b":80"}, "192.0.2.1"),
        ({b"x-forwarded-for": b"a\x00b:80"}, "192.0.2.1"),
    ],
)
def test_the_sender_is_the_first_forwarded_host_with_a_port_or_the_peer(
    forwarded: dict[bytes, bytes], address: str
) -> None:
    assert remote_address(PEER, forwarded) == address


def test_a_sender_without_an_address_is_nobody() -> None:
    assert remote_address({"client": None}, {}) == ""


@pytest.mark.parametrize(
    ("codings", "coding"),
    [
        ([], b""),
        ([b"identity"], b""),
        ([b""], b""),
        ([b"gzip"], b"gzip"),
        ([b"GZip"], b"GZip"),
        ([b"br"], None),
        ([b"gzip, gzip"], None),
        ([b"gzip", b"gzip"], None),
        ([b"gzip", b"identity"], None),
        ([b"x" * 1000], None),
    ],
)
def test_one_coding_is_taken_if_it_is_gzip(codings: list[bytes], coding: bytes | None) -> None:
    headers = [(b"content-type", b"application/json"), *((b"content-encoding", told) for told in codings)]
    scope = PEER | {"headers": headers}
    if coding is not None:
        assert read_head(Signal.LOGS, scope, first_headers(headers), None).coding == coding
        return
    with pytest.raises(Refusal) as refused:
        read_head(Signal.LOGS, scope, first_headers(headers), None)
    assert refused.value.reason is Reason.UNSUPPORTED_ENCODING
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("authorization", "query", "matches"),
    [
        (b"Bearer s3cret", b"", True),
        (b"bearer s3cret", b"", True),
        (b"Bearer  s3cret", b"", True),
        (b"", b"token=s3cret", True),
        (b"", b"a=b&token=s3cret", True),
        (b"Basic czNjcmV0", b"token=s3cret", True),
        (b"Bearer wrong", b"token=s3cret", False),
        (b"s3cret", b"", False),
        (b"Bearer ", b"", False),
        (b"", b"token=", False),
        (b"", b"nottoken=s3cret", False),
        (b"", b"", False),
        (b"Bearer \xff\xfe", b"", False),
    ],
)
def test_a_token_comes_as_bearer_or_in_the_query(authorization: bytes, query: bytes, matches: bool) -> None:
    headers = {b"authorization": authorization} if authorization else {}
    assert token_matches("s3cret", headers, query) is matches


def test_a_token_in_the_query_may_be_escaped() -> None:
    assert token_matches("s/ü", {}, b"&" * 10_000 + b"token=s%2F%C3%BC")


def test_the_first_of_two_headers_counts() -> None:
    assert first_headers([(b"x-real-ip", b"one"), (b"x-real-ip", b"two")]) == {b"x-real-ip": b"one"}


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        (("*",), b"https://app.example", b"*"),
        (("https://app.example",), b"https://app.example", b"https://app.example"),
        (("https://app.example",), b"https://evil.example", None),
        ((), b"https://app.example", None),
        (("*",), None, None),
    ],
)
def test_only_allowed_origins_may_read_an_answer(
    origins: tuple[str, ...], origin: bytes | None, allowed: bytes | None
) -> None:
    headers = {} if origin is None else {b"origin": origin}
    assert dict(cors_headers(origins, headers)).get(b"access-control-allow-origin") == allowed


def test_a_preflight_allows_what_the_browser_asks_for() -> None:
    asked = {
        b"origin": b"https://app.example",
        b"access-control-request-headers": b"content-type,x-token,traceparent",
        b"access-control-request-private-network": b"true",
    }
    told = dict(preflight_headers(("*",), asked))
    assert told[b"access-control-allow-headers"] == b"content-type,x-token,traceparent"
    assert told[b"access-control-allow-private-network"] == b"true"
    assert b"POST" in told[b"access-control-allow-methods"]
