"""The journal of a segment: the only file that an answer waits for.

True at all times: a record is appended whole and synced before its sender is answered; nothing that was synced is
ever changed. A reader trusts no byte: every record carries a magic, its sizes and a CRC-32 over all the rest, and where
one does not check out, reading goes on at the next magic.

File header (64 bytes): magic, version u32, segment u64, first batch u64, created ns i64, gateway id (16 bytes).
Record header (48 bytes), then definitions, then body (``buffer.record``), then zeros up to a multiple of 8::

    magic 8s | crc u32 | definitions_size u32 | body_size u32 | points u32 | batch u64 | received_ns i64 | signal u8

The CRC covers everything behind it up to the end of the body. Sizes are checked against the file before anything is
read by them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from gateway.buffer.record import Record, padded, read_definitions
from gateway.model import Signal, StorageError

FILE_MAGIC = b"LOCUMJ1\n"
RECORD_MAGIC = b"\x93LOCREC\xa5"
FILE_HEADER = struct.Struct("<8sI4xQQq16s8x")
RECORD_HEADER = struct.Struct("<8sIIIIQqB7x")
_CRC_END = 12
_READ_BYTES = 1 << 20

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Header:
    """What a journal says of itself. ``first_batch`` is the number that its first record has, or would have had."""

    segment: int
    first_batch: int
    created_ns: int
    gateway_id: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and where it lies: bytes ``offset`` to ``end`` of the journal."""

    offset: int
    end: int
    record: Record


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes ``offset`` to ``end`` that are no record. ``harmless``: zeros behind the last record, as a crash may leave
    them; no data was there."""

    offset: int
    end: int
    why: str
    harmless: bool = False


def open_directory(data_dir: Path, segment: int) -> Path:
    """The directory of a segment that is still written to."""
    return data_dir / "segments" / f"{segment:08d}.open"


def journal_path(data_dir: Path, segment: int) -> Path:
    return open_directory(data_dir, segment) / "journal"


def file_header(header: Header) -> bytes:
    return FILE_HEADER.pack(
        FILE_MAGIC,
        1,
        header.segment,
        header.first_batch,
        header.created_ns,
        header.gateway_id.ljust(16, b"\0")[:16],
    )


def read_header(path: Path) -> Header:
    """The header of a journal. Raises ``StorageError`` where the file is too short or another kind of file."""
    with path.open("rb") as file:
        raw = file.read(FILE_HEADER.size)
    if len(raw) < FILE_HEADER.size or raw[:8] != FILE_MAGIC:
        raise StorageError(f"{path}: not a journal (its first bytes are {raw[:8]!r}); move it away to go on without it")
    _, version, segment, first_batch, created_ns, gateway_id = FILE_HEADER.unpack(raw)
    if version != 1:
        raise StorageError(
            f"{path}: journal version {version}, this Locum reads version 1; use the Locum that wrote it"
        )
    return Header(segment, first_batch, created_ns, gateway_id.rstrip(b"\0"))


def record_parts(
    batch: int, received_ns: int, signal: Signal, points: int, definitions: bytes, body: Buffer
) -> tuple[list[Buffer], int]:
    """A record as pieces to be written one after the other, and their size together."""
    rest = RECORD_HEADER.pack(RECORD_MAGIC, 0, len(definitions), len(body), points, batch, received_ns, signal)[
        _CRC_END:
    ]
    crc = crc32(body, crc32(definitions, crc32(rest)))
    size = RECORD_HEADER.size + len(definitions) + len(body)
    head = RECORD_MAGIC + crc.to_bytes(4, "little") + rest
    pad = bytes(padded(size) - size)
    return [head + definitions, body, pad] if pad else [head + definitions, body], padded(size)


def write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    """Write all of ``parts``; a short write is gone on with. Raises ``OSError``."""
    pending = [memoryview(part) for part in parts if len(part)]
    at = 0
    while at < len(pending):
        written = os.writev(descriptor, pending[at : at + 512])
        while written:
            part = pending[at]
            if written < len(part):
                pending[at] = part[written:]
                break
            written -= len(part)
            at += 1


def _check(raw: memoryview, at: int, segment: int) -> tuple[Record, int] | str | int:
    """The record at ``at``: the record and its size; or how many bytes it needs if ``raw`` ends too early; or why it
    is none."""
    if at + RECORD_HEADER.size > len(raw):
        return RECORD_HEADER.size
    magic, crc, definitions_size, body_size, points, batch, received_ns, signal = RECORD_HEADER.unpack_from(raw, at)
    if magic != RECORD_MAGIC:
        return "no record begins here"
    content = RECORD_HEADER.size + definitions_size + body_size
    if at + padded(content) > len(raw):
        return padded(content)
    if crc32(raw[at + _CRC_END : at + content]) != crc:
        return "checksum does not match"
    body_at = at + RECORD_HEADER.size + definitions_size
    try:
        definitions = read_definitions(raw[at + RECORD_HEADER.size : body_at])
        record = Record(
            segment, batch, received_ns, Signal(signal), points, definitions, raw[body_at : body_at + body_size]
        )
    except ValueError as error:
        return f"whole, but it cannot be understood: {error}"
    return record, padded(content)


def scan(path: Path, offset: int = 0, end: int | None = None) -> Iterator[Entry | Damage]:
    """Every record of a journal in order, and every stretch of bytes that is none.

    ``offset``: where to begin (the end of an entry; 0: the first record). ``end``: how much of the file counts (all).
    Raises ``StorageError`` if the file's header cannot be read, ``OSError`` if the disk cannot.
    """
    segment = read_header(path).segment
    at = max(offset, FILE_HEADER.size)
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        if end is not None:
            size = min(end, size)
        raw, raw_at = b"", at
        while at < size:
            found = _check(memoryview(raw), at - raw_at, segment)
            if isinstance(found, tuple):
                record, length = found
                yield Entry(at, at + length, record)
                at += length
                continue
            if isinstance(found, int):
                if at + found <= size and raw_at + len(raw) < size:
                    want = min(max(_READ_BYTES, found), size - at)
                    raw, raw_at = _read(descriptor, at, want), at
                    if len(raw) < want:
                        size = at + len(raw)  # the file has become shorter
                    continue
                found = f"the file ends {at + found - size} bytes before the record does"
            next_at = _next_record(descriptor, at, size)
            if next_at is None:
                hit = raw.find(RECORD_MAGIC, at - raw_at + 1, size - raw_at)
                next_at = raw_at + hit if hit >= 0 else None
            damage = Damage(at, next_at, found) if next_at else _resynchronise(descriptor, at, size, found)
            yield damage
            at = damage.end


def _read(descriptor: int, at: int, size: int) -> bytes:
    parts = []
    while size > 0:
        part = os.pread(descriptor, size, at)
        if not part:
            break
        parts.append(part)
        at += len(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _next_record(descriptor: int, at: int, size: int) -> int | None:
    """Where the damaged record at ``at`` ends by its own header, if the record with the next number begins there.

    What lies within it is then not searched: a sender may have put something there that looks like a record. A size
    that was hit may lead to some other record, but not to the one with the next number.
    """
    header = _read(descriptor, at, min(RECORD_HEADER.size, size - at))
    if len(header) < RECORD_HEADER.size or not header.startswith(RECORD_MAGIC):
        return None
    _, _, definitions_size, body_size, _, batch, _, _ = RECORD_HEADER.unpack(header)
    end = int(at + padded(RECORD_HEADER.size + definitions_size + body_size))
    if end + RECORD_HEADER.size > size:
        return None
    follower = _read(descriptor, end, RECORD_HEADER.size)
    if len(follower) < RECORD_HEADER.size or not follower.startswith(RECORD_MAGIC):
        return None
    return end if RECORD_HEADER.unpack(follower)[5] == batch + 1 else None


def _resynchronise(descriptor: int, at: int, size: int, why: str) -> Damage:
    """The stretch from ``at`` to the next magic, or to the end of the file."""
    zeros = True
    search = at
    while search < size:
        raw = _read(descriptor, search, min(_READ_BYTES, size - search))
        hit = raw.find(RECORD_MAGIC, 1 if search == at else 0)
        if hit >= 0:
            return Damage(at, search + hit, why)
        zeros = zeros and not raw.strip(b"\0")
        if len(raw) < len(RECORD_MAGIC) or search + len(raw) >= size:
            break
        search += len(raw) - len(RECORD_MAGIC) + 1
    return Damage(at, size, "zeros behind the last record" if zeros else why, harmless=zeros)


class Tail:
    """Reads a journal while it grows, never past what the writer has synced."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        header = read_header(path)
        self.segment = header.segment
        self.offset = max(offset, FILE_HEADER.size)
        self._file = path.open("rb", buffering=0)

    def read(self, committed: int, limit_bytes: int = _READ_BYTES) -> list[Entry]:
        """The next records up to byte ``committed`` of the file; at least one if there is one, and about
        ``limit_bytes`` of them at most. Raises ``StorageError`` where synced bytes are no longer what was written."""
        size = min(limit_bytes, committed - self.offset)
        raw = self._take(size, committed) if size > 0 else memoryview(b"")
        entries: list[Entry] = []
        at = 0
        while at < len(raw):
            found = _check(raw, at, self.segment)
            if isinstance(found, tuple):
                record, length = found
                entries.append(Entry(self.offset + at, self.offset + at + length, record))
                at += length
            elif entries:
                break
            elif isinstance(found, int) and self.offset + found <= committed:
                size = max(found, size)
                raw = self._take(size, committed)
            else:
                raise StorageError(
                    f"{self._file.name}: bytes at {self.offset} are not the record that was synced there"
                )
        self.offset += at
        return entries

    def _take(self, size: int, committed: int) -> memoryview:
        raw = _read(self._file.fileno(), self.offset, size)
        if len(raw) < size:
            raise StorageError(f"{self._file.name}: shorter than what was synced ({committed} bytes)")
        return memoryview(raw)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
