"""Bundles: sealed segments carried out of one data directory and into another.

A bundle is a directory: ``bundle.json`` says what is in it and has the SHA-256 of every file; each segment lies in a
directory of its own as it lies in the buffer, Parquet that anybody can read. ``bundle.sig``, if there, signs
``bundle.json``. Encrypted, each file of a segment is an age file instead (``numbers.parquet.age``).

Whoever carries a bundle may have changed it: nothing in it is believed before ``verify`` has looked at all of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import duckdb

from gateway.buffer.bundle_keys import (
    AGE_OVERHEAD,
    Decryption,
    Encryption,
    Hashing,
    KeyRefused,
    Signature,
    Signer,
    Tell,
    sync,
)
from gateway.buffer.imported import GATEWAY_ID
from gateway.buffer.portions import Chosen
from gateway.buffer.sealed import form_faults
from gateway.buffer.segment import MANIFEST, Manifest, check_fields, read_bounded, sha256, sync_directory, write_file
from gateway.buffer.sql import TABLES, quoted
from gateway.model import LocumError

FORMAT = 1
CONTENTS, SIGNATURE = "bundle.json", "bundle.sig"
_AGE = ".age"
_MAX_CONTENTS_BYTES = 64 << 20
_MAX_METRICS = 10_000
_CHUNK = 1 << 20
_SEGMENT_FILES = frozenset([MANIFEST, *(f"{table}.parquet" for table in TABLES)])
_FILE = re.compile(r"([0-9]{8,18})/([a-z]+\.(?:json|parquet))(\.age)?")


class BundleError(LocumError):
    """A bundle is not what it should be, or cannot be made; the message names the file."""


@dataclass(frozen=True, slots=True)
class BundleFile:
    """A file as it lies in the bundle, encrypted or not; ``name`` is ``SEGMENT/FILE``."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose data it is, under which policy it was being sent there, and what was asked for (None: no limit)."""

    gateway_id: str
    host: str
    policy_sha256: str
    asked_from_ns: int | None
    asked_to_ns: int | None


@dataclass(frozen=True, slots=True)
class Contents:
    """What ``bundle.json`` says. Times are ns since 1970; whole segments are taken, so they may reach beyond what was
    asked for. ``points``: by category. ``metrics``: data points by metric, the most frequent ones; the others are
    ``points_of_other_metrics``."""

    format: int
    locum_version: str
    gateway_id: str
    host: str
    policy_sha256: str
    created_ns: int
    asked_from_ns: int | None
    asked_to_ns: int | None
    first_time_ns: int | None
    last_time_ns: int | None
    first_received_ns: int
    last_received_ns: int
    points: dict[str, int]
    metrics: dict[str, int]
    points_of_other_metrics: int
    encrypted: bool
    part: int
    parts: int
    files: tuple[BundleFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def segments(self) -> dict[int, list[BundleFile]]:
        """Files by segment."""
        found: dict[int, list[BundleFile]] = {}
        for file in self.files:
            found.setdefault(int(file.name.split("/")[0]), []).append(file)
        return found


@dataclass(frozen=True, slots=True)
class Written:
    """A bundle that was written. ``left_out``: segments that are damaged or went away meanwhile, as sentences."""

    path: Path
    id: str
    contents: Contents
    left_out: tuple[str, ...]


def bundle_id(text: bytes) -> str:
    """The name of a bundle whose ``bundle.json`` this is: the same for every copy, another for any other."""
    return hashlib.sha256(text).hexdigest()[:16]


def plan_parts(chosen: Sequence[Chosen], split_bytes: int, encrypted: bool) -> list[list[Chosen]]:
    """Which segments go together so that no part is larger than ``split_bytes`` (0: all in one). Raises ``BundleError``
    when a single one is larger."""
    if not split_bytes:
        return [list(chosen)]
    parts: list[list[Chosen]] = [[]]
    room = split_bytes
    for each in chosen:
        size = _size_bytes(each, encrypted)
        if size > split_bytes:
            raise BundleError(
                f"segment {each.segment.number} has {size} bytes and a part may have {split_bytes}; "
                "take a larger --split, or a smaller buffer.segment_bytes for what comes"
            )
        if size > room and parts[-1]:
            parts.append([])
            room = split_bytes
        parts[-1].append(each)
        room -= size
    return parts


def _size_bytes(chosen: Chosen, encrypted: bool) -> int:
    sizes = [file.bytes for file in chosen.manifest.files] + [(chosen.segment.path / MANIFEST).stat().st_size]
    return sum(size + (size // 2048 + AGE_OVERHEAD if encrypted else 0) for size in sizes) + 4096


def write(
    target: Path,
    chosen: Sequence[Chosen],
    origin: Origin,
    *,
    part: int = 1,
    parts: int = 1,
    signer: Signer | None = None,
    encryption: Encryption | None = None,
    tell: Tell = lambda size: None,
) -> Written:
    """Write a bundle: under another name first, so that what has its name is whole. Raises ``BundleError`` when the
    name is taken, ``OSError``."""
    draft = target.with_name(target.name + ".partial")
    if os.path.lexists(target):
        raise BundleError(f"{target}: is there already; name another")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        kept: list[Chosen] = []
        files: list[BundleFile] = []
        left_out: list[str] = []
        metrics: Counter[str] = Counter()
        for each in chosen:
            try:
                copied, counted = _copy_segment(each, draft, encryption, tell), _count_metrics(each)
            except (FileNotFoundError, duckdb.Error, BundleError) as error:
                shutil.rmtree(draft / each.segment.path.name, ignore_errors=True)
                gone = not each.segment.path.exists()
                left_out.append(f"{each.segment.path}: deleted by retention meanwhile" if gone else str(error))
                continue
            kept.append(each)
            files += copied
            metrics += counted
        contents = _contents(kept, files, metrics, origin, part, parts, encryption is not None)
        text = json.dumps(asdict(contents), indent=1).encode() + b"\n"
        write_file(draft / CONTENTS, text)
        if signer is not None:
            write_file(draft / SIGNATURE, signer.sign(text))
        sync_directory(draft)
        os.rename(draft, target)
        sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return Written(target, bundle_id(text), contents, tuple(left_out))


def _copy_segment(chosen: Chosen, draft: Path, encryption: Encryption | None, tell: Tell) -> list[BundleFile]:
    """Copy a segment's files; how they lie in the bundle. Raises ``BundleError`` when one is not as it was sealed."""
    directory = draft / chosen.segment.path.name
    directory.mkdir()
    sealed = {file.name: file.sha256 for file in chosen.manifest.files}
    copied = []
    for name in (*sealed, MANIFEST):
        source, target = chosen.segment.path / name, directory / (name + (_AGE if encryption else ""))
        found = _copy(source, target, tell) if encryption is None else encryption.encrypt(source, target, tell)
        if sealed.get(name, found) != found:
            raise BundleError(f"{source}: SHA-256 is {found}, the manifest says {sealed[name]}; it is left out")
        size, digest = (target.stat().st_size, found) if encryption is None else _hash(target)
        copied.append(BundleFile(f"{directory.name}/{target.name}", size, digest))
    sync_directory(directory)
    return copied


def _copy(source: Path, target: Path, tell: Tell) -> str:
    """Copy a file, synced; its SHA-256."""
    with _open(source) as reader, target.open("xb") as writer:
        hashing = Hashing(reader, tell)
        shutil.copyfileobj(hashing, writer, _CHUNK)
        sync(writer)
    return hashing.sha256


def _hash(path: Path, tell: Tell = lambda size: None) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    with _open(path) as reader:
        hashing = Hashing(reader, tell)
        while hashing.read(_CHUNK):
            pass
    return hashing.bytes, hashing.sha256


def _open(path: Path) -> BinaryIO:
    """A file to be read; a link is not followed. Raises ``OSError``."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _count_metrics(chosen: Chosen) -> Counter[str]:
    """Data points by metric, of a segment of one's own."""
    tables = [table for table in ("numbers", "distributions") if chosen.manifest.has(table)]
    if not tables:
        return Counter()
    path = chosen.segment.table
    rows = " UNION ALL ".join(f"SELECT series FROM read_parquet({quoted(str(path(table)))})" for table in tables)
    with duckdb.connect(config={"threads": 1, "memory_limit": "256MB"}) as connection:
        found = connection.execute(
            f"WITH n AS (SELECT series, count(*) AS rows FROM ({rows}) GROUP BY series) "
            f"SELECT s.field, sum(n.rows)::BIGINT FROM n JOIN read_parquet({quoted(str(path('series')))}) AS s "
            "ON s.id = n.series GROUP BY s.field"
        ).fetchall()
    return Counter(dict(found))


def _contents(
    kept: Sequence[Chosen],
    files: Sequence[BundleFile],
    metrics: Counter[str],
    origin: Origin,
    part: int,
    parts: int,
    encrypted: bool,
) -> Contents:
    manifests = [each.manifest for each in kept]
    firsts = [each.first_time_ns for each in manifests if each.first_time_ns is not None]
    lasts = [each.last_time_ns for each in manifests if each.last_time_ns is not None]
    shown = dict(metrics.most_common(_MAX_METRICS))
    return Contents(
        FORMAT,
        version("locum"),
        origin.gateway_id,
        origin.host,
        origin.policy_sha256,
        time.time_ns(),
        origin.asked_from_ns,
        origin.asked_to_ns,
        min(firsts, default=None),
        max(lasts, default=None),
        min((each.first_received_ns for each in manifests), default=0),
        max((each.last_received_ns for each in manifests), default=0),
        dict(sum((Counter(each.points) for each in manifests), Counter())),
        shown,
        metrics.total() - sum(shown.values()),
        encrypted,
        part,
        parts,
        tuple(files),
    )


@dataclass(frozen=True, slots=True)
class Verified:
    """A bundle in which every byte is as it was written. ``signature``: what can be said of who wrote it."""

    path: Path
    id: str
    contents: Contents
    signature: Signature


def verify(path: Path, trusted: Sequence[Path] = (), tell: Tell = lambda size: None) -> Verified:
    """Look at all of a bundle. With ``trusted`` (public key files) it has to be signed by one of them. Raises
    ``BundleError`` that names the first file that is wrong, ``KeyRefused`` for a key that is none."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise BundleError(f"{path}: not a directory; a bundle is one, with {CONTENTS} in it")
        text = read_bounded(path / CONTENTS, _MAX_CONTENTS_BYTES)
        contents = _parse(text)
    except FileNotFoundError as error:
        raise BundleError(f"{error.filename or path}: is missing") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path / CONTENTS}: cannot be read ({error})") from None
    signature = _check_signature(path, text, trusted)
    _check_names(path, contents)
    for file in contents.files:
        try:
            found = _hash(path / file.name, tell)
        except OSError as error:
            raise BundleError(f"{path / file.name}: {error.strerror}") from None
        if found != (file.bytes, file.sha256):
            raise BundleError(
                f"{path / file.name}: {found[0]} bytes with SHA-256 {found[1]}; "
                f"{CONTENTS} says {file.bytes} with {file.sha256}"
            )
    if not contents.encrypted:
        for number, files in contents.segments.items():
            digests = {file.name.split("/")[1]: file.sha256 for file in files}
            _check_segment(path / f"{number:08d}", contents.gateway_id, number, digests)
    return Verified(path, bundle_id(text), contents, signature)


def read_contents(path: Path) -> Contents:
    """What a bundle says of itself, not verified. Raises ``OSError``, ``ValueError``."""
    return _parse(read_bounded(path / CONTENTS, _MAX_CONTENTS_BYTES))


def _parse(text: bytes) -> Contents:
    """Raises ``ValueError`` for what Locum would not have written."""
    try:
        told = json.loads(text)
        contents = Contents(**(told | {"files": tuple(BundleFile(**file) for file in told["files"])}))
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    check_fields(contents)
    if contents.format > FORMAT:
        raise ValueError(f"format {contents.format}, this Locum reads up to {FORMAT}; use a later Locum")
    if not GATEWAY_ID.fullmatch(contents.gateway_id):
        raise ValueError(f"gateway_id is {contents.gateway_id[:80]!r}")
    names = Counter(file.name for file in contents.files)
    for file in contents.files:
        check_fields(file)
        match = _FILE.fullmatch(file.name)
        if (
            match is None
            or match[2] not in _SEGMENT_FILES
            or bool(match[3]) != contents.encrypted
            or f"{int(match[1]):08d}" != match[1]
            or names[file.name] > 1
        ):
            raise ValueError(f"a file of a bundle is not named {file.name[:80]!r}")
    for number in contents.segments:
        if f"{number:08d}/{MANIFEST}{_AGE if contents.encrypted else ''}" not in names:
            raise ValueError(f"segment {number} has no {MANIFEST}")
    return contents


def _check_signature(path: Path, text: bytes, trusted: Sequence[Path]) -> Signature:
    try:
        signature = read_bounded(path / SIGNATURE, 4096)
    except FileNotFoundError:
        signature = None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path / SIGNATURE}: cannot be read ({error})") from None
    try:
        return Signature.check(text, signature, trusted)
    except KeyRefused as error:
        raise BundleError(f"{path / SIGNATURE}: {error}") from None


def _check_names(path: Path, contents: Contents) -> None:
    """Nothing may lie in a bundle that ``bundle.json`` does not name, and no links."""
    named = {file.name for file in contents.files}
    directories = {name.split("/")[0] for name in named}
    for at, name, mode in _entries(path):
        if stat.S_ISDIR(mode) and name in directories:
            continue
        if not stat.S_ISREG(mode) or name not in named | {CONTENTS, SIGNATURE}:
            kind = "a link" if stat.S_ISLNK(mode) else f"not named by {CONTENTS}"
            raise BundleError(f"{at}: {kind}, so it does not belong here")


def _entries(path: Path) -> Iterator[tuple[Path, str, int]]:
    """What lies in a bundle and in its directories: where, by which name, of which mode."""
    for name in sorted(os.listdir(path)):
        mode = os.lstat(path / name).st_mode
        yield path / name, name, mode
        if stat.S_ISDIR(mode):
            for inner in sorted(os.listdir(path / name)):
                yield path / name / inner, f"{name}/{inner}", os.lstat(path / name / inner).st_mode


def _check_segment(directory: Path, gateway_id: str, number: int, digests: Mapping[str, str]) -> None:
    """Whether a segment that was carried here, in the clear, has the files that its manifest names, of the form that a
    buffer has. ``digests``: the SHA-256 of what lies there. Raises ``BundleError``."""
    try:
        manifest = Manifest.read(directory)
    except LocumError as error:
        raise BundleError(str(error)) from None
    at = directory / MANIFEST
    if (manifest.gateway_id, manifest.segment) != (gateway_id, number):
        raise BundleError(f"{at}: is of segment {manifest.segment} of gateway {manifest.gateway_id[:80]!r}")
    named = sorted([MANIFEST, *(file.name for file in manifest.files)])
    if named != sorted(os.listdir(directory)):
        raise BundleError(f"{at}: names {named}, there are {sorted(os.listdir(directory))}")
    for file in manifest.files:
        if (found := digests[file.name]) != file.sha256:
            raise BundleError(f"{directory / file.name}: SHA-256 is {found}, the manifest says {file.sha256}")
    for fault in form_faults(directory, manifest):
        raise BundleError(fault)


def unpack(
    verified: Verified, number: int, target: Path, decryption: Decryption | None, tell: Tell = lambda size: None
) -> None:
    """Put a segment of a bundle into the new directory ``target``, in the clear and checked again. Raises
    ``BundleError``, ``OSError``."""
    contents = verified.contents
    target.mkdir(parents=True)
    for file in contents.segments[number]:
        source, name = verified.path / file.name, file.name.split("/")[1]
        if decryption is None:
            if _copy(source, target / name, tell) != file.sha256:
                raise BundleError(f"{source}: was changed after it had been verified")
        else:
            decryption.decrypt(source, target / name.removesuffix(_AGE), tell)
    sync_directory(target)
    digests = {path.name: sha256(path) for path in target.iterdir()}
    _check_segment(target, contents.gateway_id, number, digests)
