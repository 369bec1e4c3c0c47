"""How far a lane has come, on disk: ``DATA/cursors/SINK-CATEGORY.json``, replaced whole and synced.

A lane sends *windows*: runs of batches. What a window holds is written down before it is sent. After a crash the same
window is made again, from the same batches, into the same bodies with the same package ids; so no point ever goes out
under a second id, however often it is sent.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gateway.buffer.segment import write_file

log = logging.getLogger("locum.forward")


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
        told = json.loads(path.read_bytes())
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
    """Replace the cursor at ``path``. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(asdict(cursor)).encode())
