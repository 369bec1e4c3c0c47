"""How far a lane has come, on disk: ``DATA/cursors/SINK-CATEGORY.json``.

A lane sends *windows*: runs of batches. What a window holds is written down before it is sent. After a crash the same
window is made again, from the same batches, into the same bodies with the same package ids; so no point ever goes out
under a second id, however often it is sent.

The file has two places. Each holds a line: a number that rises, a CRC-32 of the rest, a JSON object. The newer of the
two counts, and the older is written over, so a crash in the middle of that costs nothing. (To replace a whole file
and sync its directory took four times the CPU and the time.)
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gateway.buffer.segment import write_file

log = logging.getLogger("locum.forward")

_PLACE_BYTES = 16 << 10
_NUMBER = slice(0, 16)
_CHECK = slice(17, 25)
_CONTENT = 26


@dataclass(frozen=True, slots=True)
class Window:
    """Batches ``first`` to ``last`` of one category, on their way. ``look`` is a hash of what shapes their bodies
    (policy, encoding); ``note`` is the outlet's own, to go on after a crash."""

    first: int
    last: int
    look: str = ""
    note: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cursor:
    """Everything up to batch ``delivered`` is done with; ``window`` may be half done."""

    delivered: int = 0
    window: Window | None = None


def read(path: Path) -> Cursor:
    """The cursor at ``path``. One that is missing or cannot be read begins at the oldest batch: better twice than
    never."""
    try:
        raw = path.read_bytes()
        newest = max(_place(raw, 0), _place(raw, 1))
        if not newest[0]:
            raise ValueError("neither of its places holds a cursor")
        told = json.loads(newest[1])
        window = Window(**told["window"]) if told["window"] else None
        cursor = Cursor(int(told["delivered"]), window)
        if cursor.delivered < 0 or (window and not cursor.delivered < window.first <= window.last):
            raise ValueError("numbers out of order")
        if window and not isinstance(window.note, dict):
            raise ValueError("the note of the window is none")
    except FileNotFoundError:
        return Cursor()
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        log.error("event=cursor_unreadable path=%s error=%r action=begins at the oldest batch", path, str(error))
        return Cursor()
    return cursor


def write(path: Path, cursor: Cursor) -> None:
    """Put a cursor in the place of the older of the two at ``path``, and sync it. Raises ``OSError``, ``ValueError``
    for a note that is too large."""
    content = json.dumps(asdict(cursor)).encode()
    if len(content) > _PLACE_BYTES - _CONTENT - 1:
        raise ValueError(f"the note of a window may have {_PLACE_BYTES} bytes as JSON, not {len(content)}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, _line(1, content).ljust(2 * _PLACE_BYTES))
        return
    try:
        raw = os.pread(descriptor, 2 * _PLACE_BYTES, 0)
        numbers = _place(raw, 0)[0], _place(raw, 1)[0]
        line = _line(max(numbers) + 1, content)
        if len(raw) < 2 * _PLACE_BYTES:
            write_file(path, line.ljust(2 * _PLACE_BYTES))  # something else was there
        else:
            os.pwrite(descriptor, line, _PLACE_BYTES * (numbers[0] > numbers[1]))
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _line(number: int, content: bytes) -> bytes:
    head = b"%016x" % number
    return b"%s %08x %s\n" % (head, zlib.crc32(content, zlib.crc32(head)), content)


def _place(raw: bytes, at: int) -> tuple[int, bytes]:
    """The number and the content of one of the two places; 0 and nothing where it holds none that is whole."""
    line = raw[at * _PLACE_BYTES : (at + 1) * _PLACE_BYTES].partition(b"\n")[0]
    content = line[_CONTENT:]
    if b"%08x" % zlib.crc32(content, zlib.crc32(line[_NUMBER])) != line[_CHECK]:
        return 0, b""
    try:
        return int(line[_NUMBER], 16), content
    except ValueError:
        return 0, b""
