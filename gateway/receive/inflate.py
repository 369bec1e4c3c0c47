"""gzip, against senders who mean harm: what comes out is counted while it comes out."""

from __future__ import annotations

from collections.abc import Callable

from isal import isal_zlib

from gateway.model import Reason, Refusal

MAGIC = b"\x1f\x8b"
"""How gzip begins. No protobuf message does: field 3 of wire type 7, which does not exist."""
_WBITS = 31
_OUT_BYTES = 1 << 20
_IN_BYTES = 256 << 10
_MAX_MEMBERS = 10_000


def inflated_size(data: bytes) -> int:
    """What the last gzip member says its content has, modulo 2**32: true of honest senders, and free."""
    return int.from_bytes(data[-4:], "little")


def inflate(data: bytes, limit_bytes: int, take: Callable[[int], None]) -> bytes:
    """The content of a gzip file of one or more members.

    ``take(n)`` is told of every ``n`` bytes that come out and may refuse them. Raises ``Refusal``: TOO_LARGE past
    ``limit_bytes``, BAD_DATA for what is no gzip, is cut short, has a wrong checksum or length, or has bytes behind it.
    An empty ``data`` is empty: some senders put the header on an empty request.
    """
    if not data:
        return b""
    parts: list[bytes] = []
    size = at = 0
    members = 1
    stream = isal_zlib.decompressobj(wbits=_WBITS)
    waiting = b""
    while True:
        # isal copies what it has not yet read with every step: it is given a slice at a time
        if not waiting and at < len(data):
            waiting = data if len(data) <= _IN_BYTES else data[at : at + _IN_BYTES]
            at += len(waiting)
        if stream.eof:
            if not waiting:
                break
            members += 1
            if members > _MAX_MEMBERS:
                raise Refusal(Reason.BAD_DATA, f"gzip: more than {_MAX_MEMBERS} members")
            stream = isal_zlib.decompressobj(wbits=_WBITS)
        given = len(waiting)
        try:
            part = stream.decompress(waiting, _OUT_BYTES)
        except isal_zlib.error as error:  # type: ignore[misc]  # the stub has it wrong
            raise Refusal(Reason.BAD_DATA, f"gzip: {error}") from None
        waiting = stream.unused_data if stream.eof else stream.unconsumed_tail
        if not part and not stream.eof and len(waiting) == given:
            raise Refusal(Reason.BAD_DATA, "gzip: the body ends before the gzip stream does")
        size += len(part)
        if size > limit_bytes:
            raise Refusal(Reason.TOO_LARGE, f"more than {limit_bytes} bytes after decompression; send less a request")
        take(len(part))
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
