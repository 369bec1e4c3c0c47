"""Bundles that come in: checked, unpacked beside the buffer, and only then given their names. Receipts say what came.

``DATA/imported/GATEWAY/NNNNNNNN`` is a segment as its own gateway sealed it. The same bundle twice changes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway.buffer import bundle
from gateway.buffer.bundle import BundleError, Verified
from gateway.buffer.bundle_keys import Decryption, Tell
from gateway.buffer.imported import imported_dir, imported_segments
from gateway.buffer.segment import (
    MANIFEST,
    State,
    check_fields,
    delete,
    directory_bytes,
    segments,
    sha256,
    sync_directory,
    take_lock,
    write_file,
)
from gateway.config import BufferSettings
from gateway.model import StorageError


@dataclass(frozen=True, slots=True)
class Receipt:
    """A bundle that was imported, as ``DATA/receipts/ID.json``. ``segments`` are directories within ``DATA``."""

    id: str
    imported_ns: int
    path: str
    gateway_id: str
    host: str
    part: int
    parts: int
    first_time_ns: int | None
    last_time_ns: int | None
    points: dict[str, int]
    bytes: int
    signature: str
    segments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``new``: segments that were put there; ``known``: that were there already."""

    receipt: Receipt
    new: int
    known: int


def take(
    data_dir: Path,
    verified: Verified,
    own_id: str,
    settings: BufferSettings,
    decryption: Decryption | None,
    tell: Tell = lambda size: None,
) -> Outcome:
    """Import a verified bundle. A gateway may run on ``data_dir`` or not. Raises ``BundleError``; then nothing has
    changed, ``StorageError`` when there is no room or another import is under way, ``OSError``."""
    contents = verified.contents
    with _lock(data_dir):
        draft = imported_dir(data_dir) / ".coming"
        shutil.rmtree(draft, ignore_errors=True)  # of an import that was broken off
        home = imported_dir(data_dir) / contents.gateway_id
        places = {number: home / f"{number:08d}" for number in contents.segments}
        if contents.gateway_id == own_id:
            own = {each.number for each in segments(data_dir) if each.state is State.SEALED}
            places |= {number: data_dir / "segments" / f"{number:08d}" for number in own & places.keys()}
        coming = sorted(number for number, place in places.items() if not place.exists())
        _check_room(data_dir, sum(file.bytes for number in coming for file in contents.segments[number]), settings)
        try:
            if not contents.encrypted:
                decryption = None
            elif decryption is None:
                raise BundleError(f"{verified.path}: is encrypted; name the file with your secret key: --identity FILE")
            for number, place in places.items():
                if number not in coming:
                    _must_be_the_same(verified, number, place, decryption, draft, tell)
            for number in coming:
                bundle.unpack(verified, number, draft / f"{number:08d}", decryption, tell)
            if coming:
                home.mkdir(parents=True, exist_ok=True)
                sync_directory(home.parent)
            for number in coming:
                os.rename(draft / f"{number:08d}", places[number])
            if coming:
                sync_directory(home)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        receipt = _receipt(verified, tuple(str(place.relative_to(data_dir)) for place in places.values()))
        if coming or not _path(data_dir, receipt.id).exists():
            _path(data_dir, receipt.id).parent.mkdir(exist_ok=True)
            write_file(_path(data_dir, receipt.id), json.dumps(asdict(receipt), indent=1).encode() + b"\n")
    return Outcome(receipt, len(coming), len(places) - len(coming))


def _must_be_the_same(
    verified: Verified, number: int, place: Path, decryption: Decryption | None, draft: Path, tell: Tell
) -> None:
    """Raise ``BundleError`` unless the segment that is there is the one in the bundle: by its manifest, which has the
    SHA-256 of the other files."""
    path = verified.path / f"{number:08d}" / (MANIFEST + (".age" if decryption is not None else ""))
    if decryption is None:
        found = sha256(path)
    else:
        draft.mkdir(parents=True, exist_ok=True)
        decryption.decrypt(path, draft / "known", tell)
        found = sha256(draft / "known")
        (draft / "known").unlink()
    if found != sha256(place / MANIFEST):
        raise BundleError(f"{path}: segment {number} of this gateway is here already, with other content: {place}")


def _check_room(data_dir: Path, size_bytes: int, settings: BufferSettings) -> None:
    """Raise ``StorageError`` where an import would take more than half of the budget, or disk that has to stay free."""
    held = sum(directory_bytes(each.path) for each in imported_segments(data_dir))
    if size_bytes and settings.max_bytes and held + size_bytes > settings.max_bytes // 2:
        raise StorageError(
            f"{data_dir}: {held} bytes are imported and {size_bytes} would come; imports may take half of "
            f"buffer.max_bytes, which is {settings.max_bytes}. Drop what was replayed (locum bundle drop), or raise it"
        )
    disk = os.statvfs(data_dir)
    free = disk.f_bavail * disk.f_frsize
    if size_bytes and free - size_bytes < settings.min_free_disk_bytes:
        raise StorageError(
            f"{data_dir}: {free} bytes are free on the disk, {size_bytes} would come, and "
            f"{settings.min_free_disk_bytes} have to stay free (buffer.min_free_disk_bytes)"
        )


def _receipt(verified: Verified, places: tuple[str, ...]) -> Receipt:
    told = verified.contents
    return Receipt(
        verified.id, time.time_ns(), str(verified.path), told.gateway_id, told.host, told.part, told.parts,
        told.first_time_ns, told.last_time_ns, told.points, told.bytes, verified.signature.state, places,
    )  # fmt: skip


def _path(data_dir: Path, receipt_id: str) -> Path:
    return data_dir / "receipts" / f"{receipt_id}.json"


def receipts(data_dir: Path) -> list[Receipt]:
    """What was imported, the first first. Raises ``StorageError`` for a receipt that cannot be read."""
    found = []
    for path in sorted((data_dir / "receipts").glob("*.json")):
        try:
            told = json.loads(path.read_bytes())
            receipt = Receipt(**(told | {"segments": tuple(told["segments"])}))
            check_fields(receipt)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise StorageError(f"{path}: cannot be read ({error}); delete it, and import the bundle again") from None
        found.append(receipt)
    return sorted(found, key=lambda receipt: receipt.imported_ns)


def drop(data_dir: Path, ids: Sequence[str]) -> Iterator[tuple[Receipt, int]]:
    """Delete what these bundles brought, and their receipts; each with how many segments went. What another bundle
    brought too, and one's own segments, stay. Raises ``StorageError`` for an id that is not known."""
    with _lock(data_dir):
        there = {receipt.id: receipt for receipt in receipts(data_dir)}
        unknown = [each for each in ids if each not in there]
        if unknown:
            raise StorageError(f"{data_dir}: no bundle {', '.join(unknown)} was imported; see locum bundle list")
        by_path = {str(each.path.relative_to(data_dir)): each for each in imported_segments(data_dir)}
        for each in dict.fromkeys(ids):
            receipt = there.pop(each)
            kept = {place for other in there.values() for place in other.segments}
            doomed = [by_path[place] for place in receipt.segments if place in by_path and place not in kept]
            for segment in doomed:
                delete(segment)
            _path(data_dir, each).unlink()
            yield receipt, len(doomed)


@contextmanager
def _lock(data_dir: Path) -> Iterator[None]:
    """One import or drop at a time."""
    directory = imported_dir(data_dir)
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        if not take_lock(descriptor):
            raise StorageError(f"{data_dir}: another import is under way; wait for it")
        yield
    finally:
        os.close(descriptor)
