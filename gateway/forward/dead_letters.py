"""What the receiver will not take, laid aside with its reason: ``DATA/dead-letters/CATEGORY/PACKAGE.json``.

A letter is one package, synced before the cursor moves past it. Nobody deletes it but a person, or a retry that the
receiver takes.
"""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway.buffer.segment import sync_directory, write_file
from gateway.model import Category, ConfigError, utc

log = logging.getLogger("locum.forward")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """``status`` and ``reply`` are the receiver's (0: it was never sent); ``body`` is ``PBPoints`` in base64."""

    id: str
    sink: str
    category: str
    points: int
    reason: str
    status: int
    reply: str
    laid_aside: str
    body: str

    def raw(self) -> bytes:
        return base64.b64decode(self.body)


class DeadLetters:
    """The dead letters of a data directory. ``added``: how many this object has laid aside."""

    def __init__(self, data_dir: Path) -> None:
        self.added = 0
        self._root = data_dir / "dead-letters"

    def add(
        self,
        package_id: str,
        sink: str,
        category: Category,
        raw: bytes,
        points: int,
        reason: str,
        status: int,
        reply: str,
    ) -> None:
        """Lay a package aside. Raises ``OSError``."""
        folder = self._root / category.path
        folder.mkdir(parents=True, exist_ok=True)
        at = utc(time.time_ns())
        body = base64.b64encode(raw).decode()
        letter = DeadLetter(package_id, sink, category.path, points, reason, status, reply[:4096], at, body)
        write_file(folder / f"{package_id}.json", json.dumps(asdict(letter), ensure_ascii=False).encode())
        self.added += 1

    def find(self, ids: Collection[str]) -> list[DeadLetter]:
        """The letters with these ids. Raises ``ConfigError`` for an id that no letter has."""
        found = [letter for letter in self if letter.id in ids]
        missing = sorted(set(ids) - {letter.id for letter in found})
        if missing:
            raise ConfigError(f"{self._root}: no dead letter {', '.join(missing)}; locum dead-letters list names them")
        return found

    def path(self, letter: DeadLetter) -> Path:
        """The letter's file."""
        return self._root / letter.category / f"{letter.id}.json"

    def drop(self, letter: DeadLetter) -> None:
        """Delete a letter for good; one that is gone already is no error. Raises ``OSError``."""
        path = self.path(letter)
        path.unlink(missing_ok=True)
        sync_directory(path.parent)

    def __iter__(self) -> Iterator[DeadLetter]:
        """Every letter that can be read, by category and id; of others the log tells."""
        for path in sorted(self._root.glob("*/*.json")):
            try:
                letter = DeadLetter(**json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError) as error:
                log.warning("event=dead_letter_unreadable path=%s error=%r", path, str(error))
            else:
                yield letter
