"""Segments: their names and states, what a sealed one says of itself, and the lock of the data directory.

True at all times: ``segments/NNNNNNNN.open`` has a journal and may change; ``segments/NNNNNNNN`` is sealed, whole, and
its files named by the manifest never change. Only a rename turns one into the other, or a sealed one into
``NNNNNNNN.deleted``, which nobody reads and the next start removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from gateway.model import StorageError, utc

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 20
_NAME = re.compile(r"([0-9]{8,18})(\.open|\.deleted)?")


class State(StrEnum):
    OPEN = "open"
    SEALED = "sealed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Segment:
    """A directory of the buffer."""

    number: int
    state: State
    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def index(self) -> Path:
        return self.path / "index.duckdb"

    def table(self, name: str) -> Path:
        return self.path / f"{name}.parquet"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a sealed segment."""

    name: str
    bytes: int
    rows: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a sealed segment holds. Times are ns since 1970; ``first_time_ns`` is None where no row has a time.

    ``rows`` are counted per table, ``points`` per category (as in Guance: metric, tracing, logging), ``batches`` per
    signal. ``damaged_bytes`` of the journal were no records (``quarantine/`` has them); ``undefined_rows`` belonged to
    series whose definitions were among them.
    """

    segment: int
    schema_version: int
    locum_version: str
    gateway_id: str
    sealed_ns: int
    first_batch: int
    last_batch: int
    first_received_ns: int
    last_received_ns: int
    first_time_ns: int | None
    last_time_ns: int | None
    series: int
    batches: dict[str, int]
    points: dict[str, int]
    rows: dict[str, int]
    bytes: int
    damaged_bytes: int
    undefined_rows: int
    files: tuple[File, ...]

    @property
    def all_points(self) -> int:
        return sum(self.points.values())

    def has(self, table: str) -> bool:
        return self.rows.get(table, 0) > 0

    def write(self, directory: Path) -> None:
        write_file(directory / MANIFEST, json.dumps(asdict(self), indent=1).encode() + b"\n")

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """What ``write`` has written, whoever says that it did. Raises ``ValueError``."""
        try:
            told = json.loads(text)
            manifest = cls(**(told | {"files": tuple(File(**file) for file in told["files"])}))
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        check_fields(manifest)
        for file in manifest.files:
            check_fields(file)
        return manifest

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a sealed segment. Raises ``StorageError`` if it is missing, garbled, of a later version, or
        if a file is missing or has another size than it says."""
        path = directory / MANIFEST
        try:
            manifest = cls.parse(read_bounded(path, _MAX_MANIFEST_BYTES).decode())
        except (OSError, ValueError) as error:
            raise StorageError(f"{path}: not a manifest that can be read ({error})") from error
        if manifest.schema_version > SCHEMA_VERSION:
            raise StorageError(
                f"{path}: schema version {manifest.schema_version}, this Locum reads up to "
                f"{SCHEMA_VERSION}; use a later Locum"
            )
        for file in manifest.files:
            try:
                size = (directory / file.name).stat().st_size
            except OSError as error:
                raise StorageError(
                    f"{directory / file.name}: {error.strerror}, though the manifest names it"
                ) from error
            if size != file.bytes:
                raise StorageError(f"{directory / file.name}: {size} bytes, the manifest says {file.bytes}")
        return manifest

    def verify(self, directory: Path) -> list[str]:
        """Every file that is not what was sealed, as a sentence; empty when all are."""
        wrong = []
        for file in self.files:
            try:
                found = sha256(directory / file.name)
            except OSError as error:
                wrong.append(f"{directory / file.name}: {error.strerror}")
                continue
            if found != file.sha256:
                wrong.append(f"{directory / file.name}: SHA-256 is {found}, the manifest says {file.sha256}")
        return wrong


def check_fields(of: Any) -> None:
    """Raise ``ValueError`` where a field of a dataclass is not what its annotation says: a text, a number of 64 bits,
    or counts by name."""
    for each in fields(of):
        value, kind = getattr(of, each.name), str(each.type)
        if value is None and kind.endswith("| None"):
            continue
        if kind.startswith("int"):
            right = _is_number(value)
        elif kind == "str":
            right = isinstance(value, str)
        elif kind == "bool":
            right = isinstance(value, bool)
        elif kind == "dict[str, int]":
            right = isinstance(value, dict) and all(_is_number(count) for count in value.values())
        else:
            continue
        if not right:
            raise ValueError(f"{each.name} is {str(value)[:80]!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def read_bounded(path: Path, most: int) -> bytes:
    """A file's content. Raises ``ValueError`` when it has more than ``most`` bytes, ``OSError``; a link is not
    followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most} bytes")
    return content


def sealed(segment: Segment) -> Segment:
    """What a segment is when it is sealed."""
    return Segment(segment.number, State.SEALED, segment.path.with_name(f"{segment.number:08d}"))


def segments(data_dir: Path) -> list[Segment]:
    """The directories of the buffer, by number; other names are not looked at. A missing directory has none."""
    found = []
    try:
        names = os.listdir(data_dir / "segments")
    except FileNotFoundError:
        return []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        state = {None: State.SEALED, ".open": State.OPEN, ".deleted": State.DELETED}[match[2]]
        found.append(Segment(int(match[1]), state, data_dir / "segments" / name))
    return sorted(found, key=lambda segment: (segment.number, segment.state))


def gateway_id(data_dir: Path) -> str:
    """Who this data directory is, for package ids and bundles: drawn once, kept for good."""
    path = data_dir / "gateway-id"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        fresh = secrets.token_hex(8)
        write_file(path, f"{fresh}\n".encode())
        return fresh


def quarantined_numbers(data_dir: Path) -> list[int]:
    """Numbers of the segments that something in quarantine is of."""
    try:
        names = os.listdir(data_dir / "quarantine")
    except FileNotFoundError:
        return []
    return [int(match[0]) for name in names if (match := re.match("[0-9]{8,18}", name))]


def delete(segment: Segment) -> None:
    """Remove a segment: out of sight in one step, then file by file. Raises ``OSError``."""
    hidden = segment.path
    if segment.state is not State.DELETED:
        hidden = segment.path.with_name(f"{segment.number:08d}.deleted")
        os.rename(segment.path, hidden)
    shutil.rmtree(hidden)


def directory_bytes(directory: Path) -> int:
    """Bytes of the files in a directory (one level, as segments are); a file that goes meanwhile counts nothing."""
    total = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
    except FileNotFoundError:
        return 0
    return total


def sync_directory(directory: Path) -> None:
    """Make the names in a directory safe. Raises ``OSError``."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make a file's content safe. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename within a directory, safe when this returns. Raises ``OSError``."""
    os.rename(source, target)
    sync_directory(target.parent)


def write_file(path: Path, content: bytes) -> None:
    """Put ``content`` under the name ``path``, all of it or nothing. Raises ``OSError``."""
    draft = path.with_name(path.name + ".new")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    rename(draft, path)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def quarantine(data_dir: Path, path: Path, why: str) -> Path:
    """Move a file or directory aside, with a note beside it that says why; where it is now. Raises ``OSError``."""
    target = data_dir / "quarantine" / f"{path.name}-{time.time_ns()}"
    target.parent.mkdir(exist_ok=True)
    os.rename(path, target)
    write_note(target, {"from": str(path), "why": why})
    sync_directory(path.parent)
    return target


def write_note(beside: Path, facts: dict[str, str | int]) -> None:
    """The JSON note of something in quarantine."""
    note = facts | {"moved": utc(time.time_ns())}
    write_file(beside.with_name(beside.name + ".json"), json.dumps(note, indent=1).encode() + b"\n")


@contextmanager
def lock(data_dir: Path, address: str = "") -> Iterator[None]:
    """Hold the data directory; ``address`` is where the holder can be asked (``http://127.0.0.1:9529``).

    Raises ``StorageError`` when another process holds it, with its process id and address, or when the directory cannot
    be written.
    """
    path = data_dir / "lock"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); name another with --data") from error
    try:
        if not take_lock(descriptor):
            pid, at = _told(path)
            raise StorageError(
                f"{data_dir}: in use by process {pid}{f' at {at}' if at else ''}; "
                "stop it, or name another directory with --data"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "address": address}).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def take_lock(descriptor: int) -> bool:
    """Take the lock of a file; tried for a moment, since ``lock_holder`` may hold it for an instant."""
    for attempt in range(5):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.01 * attempt)
    return False


def lock_holder(data_dir: Path) -> tuple[int, str] | None:
    """Process id and address of who holds the data directory; None when nobody does."""
    path = data_dir / "lock"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _told(path)
    finally:
        os.close(descriptor)


def _told(path: Path) -> tuple[int, str]:
    try:
        told = json.loads(path.read_bytes())
        return int(told["pid"]), str(told["address"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0, ""
