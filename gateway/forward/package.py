"""Bodies of points as bytes: where one point ends and the next begins, and what they are as line protocol."""

from __future__ import annotations

from gateway.model import Category
from gateway.otlp.point import decode_points, line


def point_ends(raw: bytes) -> list[int]:
    """Where each point of a ``PBPoints`` body ends. The body is ours, so it is well-formed."""
    ends = []
    at = 0
    while at < len(raw):
        at += 1
        size = shift = 0
        while True:
            byte = raw[at]
            at += 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        at += size
        ends.append(at)
    return ends


def halves(raw: bytes) -> list[tuple[bytes, int]]:
    """A body of two or more points as two: (body, points) each."""
    ends = point_ends(raw)
    middle = len(ends) // 2
    return [(raw[: ends[middle - 1]], middle), (raw[ends[middle - 1] :], len(ends) - middle)]


def as_lines(raw: bytes, category: Category) -> tuple[bytes, bytes, list[bytes]]:
    """A body in line protocol, the points that are in it, and those that line protocol has no way to write
    (``PBPoints`` each)."""
    lines: list[str] = []
    written: list[bytes] = []
    left: list[bytes] = []
    begin = 0
    for end, event in zip(point_ends(raw), decode_points(raw, category), strict=True):
        text = line(event)
        if text is None:
            left.append(raw[begin:end])
        else:
            lines.append(f"{text}\n")
            written.append(raw[begin:end])
        begin = end
    return "".join(lines).encode("utf-8", "surrogateescape"), b"".join(written), left
