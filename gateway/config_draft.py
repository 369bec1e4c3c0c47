"""The settings while they come together: what is known by now, where each came from, and what was found wrong.

Whoever reads a source puts values in; the later one wins. Nothing raises on the way, so that one look at a
configuration finds all of its errors.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from gateway.config import (
    BufferSettings,
    DatawaySettings,
    FileSettings,
    PointSettings,
    PolicySettings,
    ReceiveSettings,
    TraceSettings,
)
from gateway.config_places import Path as Keys
from gateway.config_places import places
from gateway.config_values import BadValue, convert
from gateway.model import ConfigError
from gateway.policy.rules import compile_pattern

SECTIONS: dict[str, type] = {
    "receive": ReceiveSettings,
    "points": PointSettings,
    "traces": TraceSettings,
    "policy": PolicySettings,
    "buffer": BufferSettings,
    "dataway": DatawaySettings,
    "sinks.file": FileSettings,
}
"""The tables of ``locum.toml``. ``[dataway]`` holds for every Dataway; ``[[sinks.file]]`` is a sink each."""

SECRETS = {("receive", "token"), ("dataway", "proxy"), ("dataway", "urls")}

_NOT_SET_BY_NAME = {("points", "version"), ("dataway", "url")}
_BESIDE_FIELDS = {"receive": ("token_file",), "dataway": ("urls", "url_file")}
"""Keys that are no field: secrets in files, and the addresses, each of which makes a DatawaySettings."""

MAX_FILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to tell the operator. ``place`` is ``file:line:column``, or the name in the environment."""

    level: Literal["error", "note"]
    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was read, or one name in the environment, which has no places within."""

    name: str
    places: dict[Keys, tuple[int, int]] | None = None

    def at(self, *keys: str | int) -> Origin:
        """The place of a key, by its path."""
        return Origin(self, keys)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value stands."""

    source: Source
    keys: Keys

    def at(self, *keys: str | int) -> Origin:
        """The place of something within this value."""
        return Origin(self.source, (*self.keys, *keys))

    def __str__(self) -> str:
        """``file:line:column``; of the nearest thing around it, if the value itself has no place of its own."""
        if self.source.places is None:
            return self.source.name
        for end in range(len(self.keys), 0, -1):
            found = self.source.places.get(self.keys[:end])
            if found:
                return f"{self.source.name}:{found[0]}:{found[1]}"
        return f"{self.source.name}:1:1"


@dataclass(slots=True)
class Draft:
    """Settings by section and key, as far as they are known."""

    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    origins: dict[tuple[str, str], Origin] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    urls: list[tuple[str, Origin]] = field(default_factory=list)
    """The addresses of Dataways, in order."""
    files: list[tuple[FileSettings, dict[str, Origin]]] = field(default_factory=list)
    global_tags: dict[str, tuple[str, Origin]] = field(default_factory=dict)

    def put(self, section: str, key: str, value: Any, origin: Origin) -> None:
        """Take a value, if it can be what the setting wants; else remember what is wrong with it."""
        found = self.convert(section, key, value, origin)
        if found is None:
            return
        if (section, key) == ("points", "global_tags"):
            self.global_tags |= {name: (told, origin.at(name)) for name, told in found}
            return
        if (section, key) in (("policy", "customer_tags"), ("traces", "close_resource")):
            self._check_patterns(found, origin)
        self.values[section, key] = found
        self.origins[section, key] = origin

    def convert(self, section: str, key: str, value: Any, origin: Origin) -> Any:
        """``value`` as the setting wants it; None, and an error, if it cannot be."""
        hint = get_type_hints(SECTIONS[section]).get(key, str)
        try:
            return convert(hint, section, key, value)
        except BadValue as error:
            self.error(origin.at(*error.where), f"{section}.{key}: {error.told((section, key) in SECRETS)}")
            return None

    def error(self, origin: Origin | str, text: str) -> None:
        """Something that has to be put right before a gateway can run."""
        self.findings.append(Finding("error", str(origin), text))

    def note(self, origin: Origin | str, text: str) -> None:
        """Something without effect, or with another one than in DataKit."""
        self.findings.append(Finding("note", str(origin), text))

    def where(self, section: str, key: str) -> str:
        """Where a setting came from, for people."""
        return str(self.origins.get((section, key), "default"))

    def _check_patterns(self, found: tuple[Any, ...], origin: Origin) -> None:
        """Compile every expression, so that a bad one is named with its own line."""
        for index, entry in enumerate(found):
            if isinstance(entry, str):
                if entry.startswith("reg:"):
                    self._compile(entry.removeprefix("reg:"), "policy.customer_tags", origin.at(index))
            else:
                for number, expression in enumerate(entry[1]):
                    self._compile(expression, "traces.close_resource", origin.at(entry[0], number))

    def _compile(self, expression: str, name: str, origin: Origin) -> None:
        try:
            compile_pattern(expression)
        except ConfigError as error:
            self.error(origin, f"{name}: {error}; correct it or take it out")


def settable(section: str) -> list[str]:
    """The keys of a table of ``locum.toml``."""
    own = [item.name for item in fields(SECTIONS[section]) if (section, item.name) not in _NOT_SET_BY_NAME]
    return [*own, *_BESIDE_FIELDS.get(section, ())]


def environment_name(section: str, key: str) -> str:
    """The name of a setting in the environment: ``LOCUM_RECEIVE_TOKEN`` for ``token`` in ``[receive]``."""
    return f"LOCUM_{section}_{key}".replace(".", "_").upper()


def read(path: Path) -> tuple[Source, dict[str, Any]]:
    """A TOML file and where everything stands in it. Raises ``ConfigError``."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); see to its owner and mode") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_FILE_BYTES >> 20} MiB; this is no configuration")
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise ConfigError(f"{path}:{line}:{column}: not UTF-8; save the file in this encoding") from None
    try:
        told = tomllib.loads(text)
        return Source(str(path), places(text)), told
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}:{_syntax_place(str(error), text)}; correct it as TOML") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; this is no configuration") from None


def _syntax_place(error: str, text: str) -> str:
    """``line:column: what is wrong`` out of what tomllib says."""
    what, _, _ = error.partition(" (at ")
    found = re.search(r"\(at line (\d+), column (\d+)\)", error)
    if found:
        return f"{found[1]}:{found[2]}: {what}"
    last = text.rstrip("\n").rsplit("\n", 1)[-1]
    return f"{text.rstrip(chr(10)).count(chr(10)) + 1}:{len(last) + 1}: {what}, at the file's end"
