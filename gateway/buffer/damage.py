"""What can be saved of a journal's damaged bytes, and where the rest is kept for people to look at.

A record is lost when one of its bytes is wrong, but the definitions in it are needed by the records behind it. Each
definition carries the hash of its own content (``Series.key``), so those that are whole can be told from the others.
"""

from __future__ import annotations

import struct
from pathlib import Path

from gateway.buffer import segment as segments
from gateway.buffer.journal import (
    FILE_HEADER,
    RECORD_HEADER,
    RECORD_MAGIC,
    Damage,
    Header,
    file_header,
    read_header,
)
from gateway.buffer.record import padded
from gateway.model import Series, StorageError

_ENTRY = struct.Struct("<II")
_DEFINITIONS_SIZE = struct.Struct("<12xI")
_MAX_KEPT_BYTES = 64 << 20
_MAX_MISSES = 16

Definitions = tuple[tuple[int, bytes], ...]


def read(journal: Path, damage: Damage) -> bytes:
    """The damaged bytes, the first 64 MiB at most. Raises ``OSError``."""
    with journal.open("rb") as file:
        file.seek(damage.offset)
        return file.read(min(damage.end - damage.offset, _MAX_KEPT_BYTES))


def salvage(raw: bytes) -> Definitions:
    """The definitions that are whole in what was once a record."""
    if len(raw) < RECORD_HEADER.size:
        return ()
    end = min(len(raw), RECORD_HEADER.size + _DEFINITIONS_SIZE.unpack_from(raw)[0])
    found = []
    at, misses = RECORD_HEADER.size, 0
    while at + _ENTRY.size <= end and misses < _MAX_MISSES:
        series, size = _ENTRY.unpack_from(raw, at)
        definition = raw[at + _ENTRY.size : at + _ENTRY.size + size]
        if _is_whole(definition):
            found.append((series, definition))
            misses = 0
        else:
            misses += 1
        at += _ENTRY.size + padded(size)
    return tuple(found)


def _is_whole(definition: bytes) -> bool:
    try:
        series = Series.unpack(definition)
        return series.pack() == definition and series.key == int.from_bytes(definition[:8], "little")
    except (ValueError, IndexError, struct.error):
        return False


def keep(data_dir: Path, segment: int, damage: Damage, raw: bytes) -> None:
    """Put damaged bytes into ``quarantine/``, with a note. Done again, it writes the same. Raises ``OSError``."""
    target = data_dir / "quarantine" / f"{segment:08d}-journal-{damage.offset}"
    target.parent.mkdir(exist_ok=True)
    segments.write_file(target, raw)
    segments.write_note(
        target,
        {"segment": segment, "offset": damage.offset, "end": damage.end, "why": damage.why, "kept": len(raw)},
    )


def repair_header(data_dir: Path, segment: int, journal: Path) -> bool:
    """Write a new header where that of a journal cannot be read and records lie behind it; whether the journal can be
    read now. The old header goes to ``quarantine/``. Raises ``OSError``."""
    try:
        read_header(journal)
        return True
    except StorageError:
        pass
    with journal.open("r+b") as file:
        raw = file.read(FILE_HEADER.size + len(RECORD_MAGIC))
        if raw[FILE_HEADER.size :] != RECORD_MAGIC:
            return False
        old = Damage(0, FILE_HEADER.size, "the file's header cannot be read")
        keep(data_dir, segment, old, raw[: FILE_HEADER.size])
        file.seek(0)
        file.write(file_header(Header(segment, 0, 0, b"")))
    segments.sync_file(journal)
    return True
