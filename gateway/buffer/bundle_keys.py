"""The keys of bundles: Ed25519 to sign (PEM files, as openssl makes them) and age's X25519 to encrypt (files as
age-keygen makes them). The cryptography is that of the libraries ``cryptography`` and ``pyrage``."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyrage
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gateway.buffer.segment import read_bounded
from gateway.model import LocumError

AGE_OVERHEAD = 4096
"""More than an age file's header for a dozen recipients has; besides, 16 bytes for each 64 KiB."""
_MAX_KEY_BYTES = 64 << 10


class KeyRefused(LocumError):
    """A key cannot be read, or a signature is not by a key that is trusted."""


@dataclass(frozen=True, slots=True)
class Signature:
    """``state``: "none", "not checked" (no key was given to check it with), or "good", by the key in file ``by``."""

    state: str
    by: str = ""

    @classmethod
    def check(cls, text: bytes, signature: bytes | None, trusted: Sequence[Path]) -> Signature:
        """Raises ``KeyRefused`` when keys are trusted and none of them has signed."""
        keys = {str(path): _public_key(path) for path in trusted}
        if not keys:
            return cls("none" if signature is None else "not checked")
        if signature is None:
            raise KeyRefused("is missing, though a key was given to check it with")
        try:
            raw = base64.b64decode(signature.strip(), validate=True)
        except binascii.Error:
            raise KeyRefused("is no signature") from None
        for name, key in keys.items():
            try:
                key.verify(raw, text)
            except InvalidSignature:
                continue
            return cls("good", name)
        raise KeyRefused(f"not by {' or '.join(keys)}")


class Signer:
    """A private key. ``path``: a PEM file without a password. Raises ``KeyRefused``."""

    def __init__(self, path: Path) -> None:
        try:
            key = serialization.load_pem_private_key(read_bounded(path, _MAX_KEY_BYTES), None)
        except (OSError, ValueError, TypeError) as error:
            raise KeyRefused(f"{path}: no private key in PEM without a password ({error})") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise KeyRefused(f"{path}: not an Ed25519 key; make one with: locum bundle keygen NAME")
        self._key = key

    def sign(self, text: bytes) -> bytes:
        return base64.b64encode(self._key.sign(text)) + b"\n"


def _public_key(path: Path) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(read_bounded(path, _MAX_KEY_BYTES))
    except (OSError, ValueError) as error:
        raise KeyRefused(f"{path}: no public key in PEM ({error})") from None
    if not isinstance(key, Ed25519PublicKey):
        raise KeyRefused(f"{path}: not an Ed25519 key")
    return key


Tell = Callable[[int], None]
"""Told how many bytes more are done."""


class Hashing:
    """A file that is read, hashed, counted and told about."""

    def __init__(self, file: BinaryIO, tell: Tell) -> None:
        self._file = file
        self._tell = tell
        self._digest = hashlib.sha256()
        self.bytes = 0

    def read(self, size: int = -1) -> bytes:
        chunk = self._file.read(size)
        self._digest.update(chunk)
        self.bytes += len(chunk)
        self._tell(len(chunk))
        return chunk

    @property
    def sha256(self) -> str:
        """Of what was read so far."""
        return self._digest.hexdigest()


def sync(file: BinaryIO) -> None:
    """Make what was written safe. Raises ``OSError``."""
    file.flush()
    os.fsync(file.fileno())


class Encryption:
    """For those ``recipients`` (``age1...``, or a file with such lines) that can read what is encrypted. Raises
    ``KeyRefused``."""

    def __init__(self, recipients: Sequence[str]) -> None:
        self._recipients = []
        for told in recipients:
            for line in [told] if told.startswith("age1") else _lines(Path(told)):
                try:
                    self._recipients.append(pyrage.x25519.Recipient.from_str(line))
                except pyrage.RecipientError as error:
                    raise KeyRefused(f"{told}: {line[:80]!r} is no recipient of age ({error})") from None

    def encrypt(self, source: Path, target: Path, tell: Tell) -> str:
        """Write ``source`` to the new file ``target``, encrypted; the SHA-256 of ``source``. Raises ``OSError``."""
        with source.open("rb") as reader, target.open("xb") as writer:
            plain = Hashing(reader, tell)
            pyrage.encrypt_io(plain, writer, self._recipients)
            sync(writer)
        return plain.sha256


class Decryption:
    """With the secret keys in these files. Raises ``KeyRefused``."""

    def __init__(self, identities: Sequence[Path]) -> None:
        self._identities = []
        for path in identities:
            for line in _lines(path):
                try:
                    self._identities.append(pyrage.x25519.Identity.from_str(line))
                except pyrage.IdentityError as error:
                    raise KeyRefused(f"{path}: no secret key of age ({error})") from None

    def decrypt(self, source: Path, target: Path, tell: Tell) -> None:
        """Write what is encrypted in ``source`` to the new file ``target``. Raises ``KeyRefused``, ``OSError``."""
        with source.open("rb") as reader, target.open("xb") as writer:
            try:
                pyrage.decrypt_io(Hashing(reader, tell), writer, self._identities)
            except pyrage.DecryptError as error:
                raise KeyRefused(f"{source}: cannot be decrypted with this key ({error})") from None
            sync(writer)


def _lines(path: Path) -> list[str]:
    """Lines of a key file, without comments. Raises ``KeyRefused``."""
    try:
        text = read_bounded(path, _MAX_KEY_BYTES).decode()
    except (OSError, ValueError) as error:
        raise KeyRefused(f"{path}: cannot be read ({error})") from None
    found = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not found:
        raise KeyRefused(f"{path}: has no key in it")
    return found


@dataclass(frozen=True, slots=True)
class KeyPair:
    """``secret`` can be read by its owner only; ``public`` is for the others."""

    secret: Path
    public: Path


def make_signing_keys(name: Path) -> KeyPair:
    """``NAME.key`` and ``NAME.pub``, to sign with. Raises ``KeyRefused`` when one is there already."""
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return _write_pair(name, secret, public)


def make_age_keys(name: Path) -> KeyPair:
    """``NAME.key`` and ``NAME.pub``, to encrypt for and decrypt with. Raises ``KeyRefused`` when one is there."""
    identity = pyrage.x25519.Identity.generate()
    public = f"{identity.to_public()}\n"
    return _write_pair(name, f"# public key: {public}{identity}\n".encode(), public.encode())


def _write_pair(name: Path, secret: bytes, public: bytes) -> KeyPair:
    pair = KeyPair(name.with_name(name.name + ".key"), name.with_name(name.name + ".pub"))
    for path, content, mode in ((pair.secret, secret, 0o600), (pair.public, public, 0o644)):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            raise KeyRefused(f"{path}: is there already, and a key is not overwritten; name another") from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            sync(file)
    return pair
