"""The file sink: line protocol, one file a category, for people and for tools that read files.

Exactly once, a crash included: the length of the file is written down with each window, and a window that is written
again begins by cutting the file back to that length.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from gateway.buffer.segment import sync_directory
from gateway.config import FileSettings
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.package import as_lines
from gateway.forward.sink import Package
from gateway.metrics import Meters
from gateway.model import Category


class LineFile:
    """The outlet of one lane: ``PATH/CATEGORY.line``, moved aside as ``CATEGORY-TIME.line`` when it is large enough."""

    def __init__(
        self, name: str, category: Category, settings: FileSettings, dead_letters: DeadLetters, meters: Meters
    ) -> None:
        self._name = name
        self._category = category
        self._path = settings.path / f"{category.path}.line"
        self._rotate_bytes = settings.rotate_bytes
        self._dead_letters = dead_letters
        self._dead = meters.dead_letters.labels(name, category.path)
        self._bytes = meters.delivered_bytes.labels(name, category.path)

    def open(self) -> dict[str, Any]:
        """Where the window will begin. A full file is moved aside first, so that a window lies in one file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        size = self._path.stat().st_size if self._path.exists() else 0
        if size >= self._rotate_bytes:
            moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
            self._path.rename(self._path.with_name(f"{self._category.path}-{moment}-{time.time_ns() % 10**9:09d}.line"))
            sync_directory(self._path.parent)
            size = 0
        return {"size": size}

    def pack(self, raw: bytes) -> bytes:
        return raw

    def resume(self, note: dict[str, Any]) -> None:
        """Cut off what a crash left of the window. Without a length nothing is cut: better twice than never."""
        size = note.get("size")
        if isinstance(size, int) and size >= 0 and self._path.exists() and self._path.stat().st_size > size:
            os.truncate(self._path, size)

    def deliver(self, packages: list[Package], oversized: list[Package], stop: threading.Event) -> None:
        with self._path.open("ab") as file:
            for package in [*packages, *oversized]:
                lines, _, unwritable = as_lines(package.body, self._category)
                file.write(lines)
                self._bytes.inc(len(lines))
                if unwritable:
                    raw = b"".join(unwritable)
                    reason = "line protocol has no way to write it"
                    self._dead_letters.add(package.id, self._name, self._category, raw, len(unwritable), reason, 0, "")
                    self._dead.inc(len(unwritable))
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self._path.parent)

    def health(self) -> str | None:
        return None

    def close(self) -> None:
        """Nothing is held open between windows."""
