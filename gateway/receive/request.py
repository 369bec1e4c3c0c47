"""What the head of an HTTP request says, read without any IO: media type, coding, token, sender, origin.

Header names are lower case, as ASGI has them. Of a header that was sent twice the first counts, as in DataKit (Go).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from gateway.model import Reason, Refusal, Sender, Signal, Wire

Headers = list[tuple[bytes, bytes]]

_WIRES = {b"application/x-protobuf": Wire.PROTOBUF, b"application/json": Wire.JSON}
_FORWARDED = (b"x-forwarded-for", b"x-real-ip", b"proxy-client-ip")
_MAX_HOST_CHARACTERS = 253


@dataclass(frozen=True, slots=True)
class Request:
    """What is known of a request before its body."""

    signal: Signal
    wire: Wire
    coding: bytes
    """Content-Encoding as it was spelled: gzip in any case, or nothing."""
    sender: Sender


def first_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The headers by name."""
    return dict(reversed(list(headers)))


def read_head(signal: Signal, scope: Mapping[str, Any], headers: Mapping[bytes, bytes], token: str | None) -> Request:
    """Check everything that can be checked before the body. Raises ``Refusal``."""
    if token is not None and not token_matches(token, headers, scope["query_string"]):
        raise Refusal(Reason.UNAUTHENTICATED, "the header 'Authorization: Bearer TOKEN' is missing or wrong")
    wire = wire_of(headers)
    if wire is None:
        told = headers.get(b"content-type", b"").decode("latin-1")[:100]
        raise Refusal(
            Reason.UNSUPPORTED_MEDIA, f"Content-Type {told!r}: send application/x-protobuf or application/json"
        )
    return Request(
        signal,
        wire,
        _coding(scope["headers"]),
        Sender(remote_address(scope, headers), "http"),
    )


def announced_bytes(headers: Mapping[bytes, bytes]) -> int | None:
    """Content-Length; None for a chunked body."""
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() and b"transfer-encoding" not in headers else None


def wire_of(headers: Mapping[bytes, bytes]) -> Wire | None:
    """The encoding that Content-Type names, whatever its parameters and its case; None for another."""
    return _WIRES.get(headers.get(b"content-type", b"").partition(b";")[0].strip().lower())


def _coding(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """What the body is coded with. Two codings, on one line or on two, are refused like one that is not known."""
    codings = [value.strip() for name, value in headers if name == b"content-encoding"]
    told = b", ".join(coding for coding in codings if coding)
    known = told.lower()
    if known in (b"", b"identity"):
        return b""
    if known == b"gzip":
        return told
    raise Refusal(Reason.UNSUPPORTED_ENCODING, f"Content-Encoding {told.decode('latin-1')[:100]!r}: send gzip or none")


def token_matches(token: str, headers: Mapping[bytes, bytes], query: bytes) -> bool:
    """Whether a request carries the token: ``Authorization: Bearer`` or, as Dataway has it, ``?token=``."""
    scheme, _, told = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        told = next((field[6:] for field in query.split(b"&") if field.startswith(b"token=")), b"")
        told = unquote_to_bytes(told)
    return hmac.compare_digest(told.strip(), token.encode())


def remote_address(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> str:
    """Who sent it, as DataKit finds it: the first forwarded entry that is ``host:port`` (a bare address is passed
    over: golden h_xff, h_xff_port), else the peer."""
    for name in _FORWARDED:
        told = headers.get(name)
        if told is None:
            continue
        for entry in told.decode("latin-1").split(","):
            host, colon, port = entry.strip().rpartition(":")
            if colon and port.isdigit() and (":" not in host or (host.startswith("[") and host.endswith("]"))):
                host = host.strip("[]")
                if 0 < len(host) <= _MAX_HOST_CHARACTERS and host.isprintable():
                    return host
    peer = scope.get("client")
    return str(peer[0]) if peer else ""


def cors_headers(origins: tuple[str, ...], headers: Mapping[bytes, bytes]) -> Headers:
    """What a browser must see on every answer to let a page of an allowed origin read it. Others send no Origin."""
    origin = headers.get(b"origin")
    if origin is None:
        return []
    if "*" in origins:
        return [(b"access-control-allow-origin", b"*")]
    if origin.decode("latin-1") in origins:
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
    return [(b"vary", b"origin")]


def preflight_headers(origins: tuple[str, ...], headers: Mapping[bytes, bytes]) -> Headers:
    """The answer to a browser that asks before it sends: any header it names, POST only, for two hours."""
    wanted = headers.get(b"access-control-request-headers", b"content-type, content-encoding, authorization")
    answered = [
        *cors_headers(origins, headers),
        (b"access-control-allow-methods", b"POST, OPTIONS"),
        (b"access-control-allow-headers", wanted),
        (b"access-control-max-age", b"7200"),
    ]
    if headers.get(b"access-control-request-private-network") == b"true":
        answered.append((b"access-control-allow-private-network", b"true"))
    return answered
