"""gzip, against senders who mean harm: what comes out is counted while it comes out."""

from __future__ import annotations

from collections.abc import Callable

from isal import isal_zlib

from gateway.model import Reason, Refusal

_GZIP = 31
_STEP_BYTES = 1 << 20


def inflate(data: bytes, limit_bytes: int, take: Callable[[int], None]) -> bytes:
    """The content of a gzip file of one or more members.

    ``take(n)`` is told of every ``n`` bytes that come out and may refuse them. Raises ``Refusal``: TOO_LARGE past
    ``limit_bytes``, BAD_DATA for what is no gzip, is cut short, has a wrong checksum or length, or has bytes behind it.
    An empty ``data`` is empty: some senders put the header on an empty request.
    """
    parts: list[bytes] = []
    size = 0
    while data:
        stream = isal_zlib.decompressobj(wbits=_GZIP)
        while not stream.eof:
            try:
                part = stream.decompress(data, _STEP_BYTES)
            except isal_zlib.error as error:  # type: ignore[misc]  # the stub does not know that it is a class
                raise Refusal(Reason.BAD_DATA, f"gzip: {error}") from None
            if not part and not stream.eof and not stream.unconsumed_tail:
                raise Refusal(Reason.BAD_DATA, "gzip: the body ends before the gzip stream does")
            size += len(part)
            if size > limit_bytes:
                raise Refusal(
                    Reason.TOO_LARGE, f"more than {limit_bytes} bytes after decompression; send less a request"
                )
            take(len(part))
            parts.append(part)
            data = stream.unconsumed_tail
        data = stream.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)
