"""``locum bundle``: find what is to be exported, and import what was brought. Runs beside a gateway or without one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway import client, config_files
from gateway.buffer import bundle, imports, segment
from gateway.buffer.bundle import BundleError, Origin, Verified, Written
from gateway.buffer.bundle_keys import Decryption, Encryption, Signer, Tell
from gateway.buffer.portions import Chosen, Wanted, sealed_segments
from gateway.config import BufferSettings
from gateway.config_values import option_moment


@dataclass(frozen=True, slots=True)
class Export:
    """An export that could begin. ``left_out``: segments whose manifest is damaged, as sentences."""

    out: Path
    parts: list[list[Chosen]]
    origin: Origin
    signer: Signer | None
    encryption: Encryption | None
    numbered: bool
    left_out: list[str]

    @property
    def bytes(self) -> int:
        return sum(each.manifest.bytes for part in self.parts for each in part)

    def run(self, tell: Tell) -> Iterator[Written]:
        """Write the parts; each when it is done. Raises ``BundleError``, ``OSError``."""
        for at, part in enumerate(self.parts, 1):
            target = self.out.with_name(f"{self.out.name}-{at}") if self.numbered else self.out
            yield bundle.write(
                target,
                part,
                self.origin,
                part=at,
                parts=len(self.parts),
                signer=self.signer,
                encryption=self.encryption,
                tell=tell,
            )


def prepare_export(
    data_dir: Path,
    conf_dir: Path,
    out: Path,
    since: str | None,
    until: str | None,
    split_bytes: int,
    sign_with: Path | None,
    recipients: Sequence[str],
    now_ns: int,
) -> Export:
    """Read the keys, seal what is open, find the segments. Raises ``ConfigError``, ``StorageError``, ``BundleError``,
    ``KeyRefused``."""
    settings = config_files.load(conf_dir, data_dir, os.environ)
    from_ns = None if since is None else option_moment("--from", since, now_ns)
    to_ns = None if until is None else option_moment("--to", until, now_ns)
    signer = Signer(sign_with) if sign_with is not None else None
    encryption = Encryption(recipients) if recipients else None
    client.seal(data_dir)
    wanted = Wanted(-(2**63) if from_ns is None else from_ns, 2**63 - 1 if to_ns is None else to_ns)
    own_id = segment.gateway_id(data_dir)
    found, damaged = sealed_segments(data_dir, wanted)
    chosen = [each for each in found if each.manifest.gateway_id == own_id]
    if not chosen and not damaged:
        raise BundleError(f"{data_dir}: nothing of these times is kept here, so there is nothing to export")
    policy = hashlib.sha256(json.dumps(asdict(settings.policy), sort_keys=True).encode()).hexdigest()
    origin = Origin(own_id, settings.points.hostname, policy, from_ns, to_ns)
    parts = bundle.plan_parts(chosen, split_bytes, encryption is not None)
    return Export(out, parts, origin, signer, encryption, split_bytes > 0, damaged)


@dataclass(frozen=True, slots=True)
class Import:
    """Bundles that could be imported, none of them verified yet."""

    data_dir: Path
    paths: tuple[Path, ...]
    trusted: tuple[Path, ...]
    own_id: str
    settings: BufferSettings
    decryption: Decryption | None
    bytes: int

    def run(self, tell: Tell) -> Iterator[imports.Outcome]:
        """Verify all, then import one after the other. Raises ``BundleError``, ``StorageError``, ``OSError``."""
        verified: list[Verified] = [bundle.verify(path, self.trusted, tell) for path in self.paths]
        for each in verified:
            yield imports.take(self.data_dir, each, self.own_id, self.settings, self.decryption)


def prepare_import(
    data_dir: Path, conf_dir: Path, paths: tuple[Path, ...], trusted: tuple[Path, ...], identities: tuple[Path, ...]
) -> Import:
    """Read settings and keys. A data directory that is not there is made. Raises ``ConfigError``, ``KeyRefused``."""
    settings = config_files.load(conf_dir, data_dir, os.environ)
    decryption = Decryption(identities) if identities else None
    data_dir.mkdir(parents=True, exist_ok=True)
    own_id = segment.gateway_id(data_dir)
    return Import(data_dir, paths, trusted, own_id, settings.buffer, decryption, all_bytes(paths))


def all_bytes(paths: Sequence[Path]) -> int:
    """Bytes that bundles say they have; what cannot be read counts nothing."""
    total = 0
    for path in paths:
        try:
            total += bundle.read_contents(path).bytes
        except (OSError, ValueError):
            continue
    return total
