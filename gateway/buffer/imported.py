"""Segments that other gateways have sealed and a bundle brought here: ``DATA/imported/GATEWAY/NNNNNNNN``.

They are whole and never change, like one's own sealed segments, and are read by questions and replay as those are. No
lane sees them: what came in a bundle goes out by a replay only.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from gateway.buffer.segment import Manifest, Segment, State
from gateway.model import StorageError

log = logging.getLogger("locum.buffer")

GATEWAY_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
_NUMBER = re.compile(r"[0-9]{8,18}")


def imported_dir(data_dir: Path) -> Path:
    return data_dir / "imported"


def imported_segments(data_dir: Path) -> list[Segment]:
    """The segments that lie there, by gateway and number; other names are not looked at."""
    found = []
    for gateway in _names(imported_dir(data_dir), GATEWAY_ID):
        for name in _names(gateway, _NUMBER):
            found.append(Segment(int(name.name), State.SEALED, name))
    return found


def _names(directory: Path, form: re.Pattern[str]) -> list[Path]:
    try:
        return [directory / name for name in sorted(os.listdir(directory)) if form.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


class Imported:
    """What lies there, with manifests that are read once. Any thread may ask."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._known: dict[Path, Manifest | None] = {}

    def sealed(self) -> list[tuple[Segment, Manifest]]:
        """The segments and their manifests. One that is damaged is said once, and left out."""
        there = imported_segments(self._data_dir)
        known = {each.path: self._known.get(each.path, ...) for each in there}
        found = {path: _read(path) if manifest is ... else manifest for path, manifest in known.items()}
        self._known = found
        return [(each, manifest) for each in there if (manifest := found[each.path]) is not None]


def _read(path: Path) -> Manifest | None:
    try:
        return Manifest.read(path)
    except StorageError as error:
        if path.exists():
            log.error("event=imported_segment_damaged path=%s error=%r action=it is left out", path, str(error))
        return None
