"""What may stand for a setting, in TOML or in the environment, and what it then is. Pure.

Texts stand for everything, so that the environment can say all that a file can: ``"256MB"``, ``"1m30s"``, ``"true"``,
``"a,b"``, ``'["a","b"]'``, ``'{"k":"v"}'`` or ``"k=v,k=v"``.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from gateway.config import Address, mask_url
from gateway.model import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

RANGES: dict[tuple[str, str], tuple[float, float]] = {
    ("receive", "max_request_bytes"): (KIB, GIB),
    ("receive", "max_grpc_request_bytes"): (KIB, GIB),
    ("receive", "max_inflight_bytes"): (KIB, 64 * GIB),
    ("receive", "max_inflight_requests"): (1, 1_000_000),
    ("receive", "read_timeout_s"): (0.1, 3600),
    ("receive", "max_series"): (1, 1_000_000_000),
    ("traces", "sampling_rate"): (0, 1),
    ("traces", "log_max_kib"): (0, 32 * KIB),
    ("buffer", "segment_bytes"): (MIB, 16 * GIB),
    ("buffer", "segment_age_s"): (1, 30 * 86400),
    ("buffer", "memory_limit_bytes"): (32 * MIB, 1024 * GIB),
    ("buffer", "threads"): (1, 256),
    ("dataway", "max_body_bytes"): (100 * KIB, 64 * MIB),
    ("dataway", "timeout_s"): (0.1, 3600),
    ("dataway", "flush_interval_s"): (0.01, 3600),
    ("dataway", "connections"): (1, 256),
    ("sinks.file", "rotate_bytes"): (MIB, 1024 * GIB),
}
"""The least and the most of a number. One that is not here must not be negative. DataKit, too, sends no body limited
to less than 100 KiB (``MinimalRawBodySize``)."""

_UNITS_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
}
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s|m|h|d)\s*")
_ENCODINGS = {"v1": "line_protocol", "v2": "protobuf"}
_LONGEST_SHOWN = 60


class BadValue(ValueError):
    """A value that a setting cannot have. ``where`` leads to the element that is at fault, in a list or a table."""

    def __init__(self, value: object, advice: str, where: tuple[str | int, ...] = ()) -> None:
        super().__init__(advice)
        self.value = value
        self.advice = advice
        self.where = where

    def within(self, *where: str | int) -> BadValue:
        """The same, told from one level further out."""
        return BadValue(self.value, self.advice, (*where, *self.where))

    def told(self, is_secret: bool) -> str:
        """What is wrong and what to do; the value only if it may be seen."""
        return f"this value cannot be used: {self.advice}" if is_secret else f"{shorten(self.value)}: {self.advice}"


def shorten(value: object) -> str:
    """A value for a message: as it is written, not longer than a line."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def nearest(name: str, known: Iterable[str]) -> str:
    """What to do about a name that does not exist."""
    near = difflib.get_close_matches(name, sorted(known), 1)
    return f"did you mean {near[0]}?" if near else "docs/configuration.md lists what there is"


def convert(hint: Any, section: str, key: str, value: Any) -> Any:
    """``value`` as what the setting ``section.key`` of type ``hint`` wants. Raises ``BadValue``."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return convert(next(option for option in options if option is not type(None)), section, key, value)
    if origin is Literal:
        return _choice(options, key, value)
    if origin is tuple:
        return _pairs(options[0], value) if get_origin(options[0]) is tuple else _list(options[0], section, key, value)
    if hint is bool:
        return boolean(value)
    if hint in (int, float):
        return _within_range(section, key, value, _quantity(key, value, hint))
    if hint is Path:
        return Path(text(value))
    return text(value)


def _quantity(key: str, value: Any, kind: type) -> int | float:
    if key.endswith("_bytes"):
        return size(value)
    return span(value) if key.endswith("_s") else number(value, kind)


def _within_range(section: str, key: str, value: Any, found: int | float) -> int | float:
    least, most = RANGES.get((section, key), (0, math.inf))
    if not least <= found <= most:
        bounds = f"at least {written(key, least)}" if found < least else f"at most {written(key, most)}"
        raise BadValue(value, f"it has to be {bounds}")
    return found


def written(key: str, quantity: float) -> str:
    """A number of a setting as one would write it: ``64MiB``, ``1h``, ``512``."""
    steps: tuple[tuple[str, float], ...] = ()
    if key.endswith("_bytes"):
        steps = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    elif key.endswith("_s"):
        steps = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1), ("ms", 1e-3))
    for unit, factor in steps:
        if quantity >= factor and quantity % factor == 0:
            return f"{quantity / factor:g}{unit}"
    return f"{quantity:.12g}"


def _choice(options: tuple[Any, ...], key: str, value: Any) -> Any:
    wanted = _ENCODINGS.get(str(value).lower(), value) if key == "encoding" else value
    if wanted in options:
        return wanted
    raise BadValue(value, f"choose one of {', '.join(map(str, options))}")


def _list(item: Any, section: str, key: str, value: Any) -> tuple[Any, ...]:
    """A list, or a text with its elements between commas; of addresses ``localhost`` is two."""
    if isinstance(value, str):
        parts = value.split(",")
        value = from_json(value) if value.lstrip().startswith("[") and item is not Address else _stripped(parts)
    if not isinstance(value, list | tuple):
        raise BadValue(value, 'write a list, as ["a", "b"]')
    found: list[Any] = []
    for index, part in enumerate(value):
        try:
            found += addresses(part) if item is Address else [convert(item, section, key, part)]
        except BadValue as error:
            raise error.within(index) from None
    return tuple(found)


def _stripped(parts: Iterable[str]) -> list[str]:
    return [part.strip() for part in parts if part.strip()]


def _pairs(item: Any, value: Any) -> tuple[tuple[str, Any], ...]:
    """A table of texts, or of lists of texts."""
    told = value
    if isinstance(value, str):
        told = from_json(value) if value.lstrip().startswith("{") else tags(value)
    if not isinstance(told, dict):
        raise BadValue(value, 'write a table, as { name = "value" }')
    of_texts = get_args(item)[1] is str
    found: list[tuple[str, Any]] = []
    for name, entry in told.items():
        try:
            found.append((name, scalar(entry) if of_texts else _list(str, "", "", entry)))
        except BadValue as error:
            raise error.within(name) from None
    return tuple(found)


def scalar(value: Any) -> str:
    """A text; a number or a truth value as DataKit would write it. Raises ``BadValue``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    return text(value)


def tags(told: str) -> dict[str, str]:
    """``k=v,k=v``, as in ``ENV_GLOBAL_HOST_TAGS``. Raises ``BadValue``."""
    found = {}
    for pair in _stripped(told.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise BadValue(pair, "write k=v,k=v")
        found[key.strip()] = value.strip()
    return found


def from_json(told: str) -> Any:
    """The value of a JSON text. Raises ``BadValue``."""
    try:
        return json.loads(told)
    except (json.JSONDecodeError, RecursionError):
        raise BadValue(told, "this is no valid JSON") from None


def boolean(value: Any) -> bool:
    """true or false; in the environment also 1 and 0, yes and no, on and off. Raises ``BadValue``."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = value.strip().lower()
        if word in ("true", "1", "yes", "on", "t", "y"):
            return True
        if word in ("false", "0", "no", "off", "f", "n"):
            return False
    raise BadValue(value, "write true or false")


def number(value: Any, kind: type) -> Any:
    """A whole number, or any finite one. Raises ``BadValue``."""
    advice = "write a whole number" if kind is int else "write a number"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadValue(value, advice)
    try:
        found = kind(value)
    except (ValueError, OverflowError):
        raise BadValue(value, advice) from None
    if not math.isfinite(found) or (kind is int and isinstance(value, float) and found != value):
        raise BadValue(value, advice)
    return found


def size(value: Any) -> int:
    """Bytes: a number, or a text as ``"256MB"`` (powers of ten) or ``"1GiB"`` (of two). Raises ``BadValue``."""
    advice = 'write a size, as "256MB", "64MiB", or a number of bytes'
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if found is None or found[2].lower() not in _UNITS_BYTES or len(found[1]) > 20:
        raise BadValue(value, advice)
    return int(float(found[1]) * _UNITS_BYTES[found[2].lower()])


def span(value: Any) -> float:
    """Seconds: a number, or a text as ``"30s"``, ``"1m30s"``, ``"500ms"``, ``"7d"``. Raises ``BadValue``."""
    advice = 'write a time, as "30s", "500ms", "1h30m" or "7d"'
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(number(value, float))
    if not isinstance(value, str) or len(value) > _LONGEST_SHOWN:
        raise BadValue(value, advice)
    told = value.strip()
    if re.fullmatch(r"\d+(\.\d+)?", told):
        return float(told)
    parts = _SPAN.findall(told)
    if not parts or _SPAN.sub("", told):
        raise BadValue(value, advice)
    return float(sum(float(amount) * _UNITS_S[unit] for amount, unit in parts))


def moment(told: str, now_ns: int) -> int:
    """A time as a person writes it, in ns since 1970: ``2026-11-30``, ``2026-11-30T08:00:00+08:00`` (without a zone:
    UTC), ``now``, ``-2h`` (before now), or a number of seconds, milliseconds or nanoseconds since 1970. Raises
    ``BadValue``."""
    text = told.strip()
    if text == "now":
        return now_ns
    if text.startswith("-"):
        return now_ns - int(span(text[1:]) * 1e9)
    if text.isdecimal() and 9 <= len(text) <= 19:
        return int(text) * (1 if len(text) > 15 else 10**6 if len(text) > 11 else 10**9)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadValue(told, 'write a time, as "2026-11-30", "2026-11-30T08:00:00+08:00", "now" or "-2h"') from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return (int(at.timestamp()) * 10**6 + at.microsecond) * 1000


def option_moment(option: str, told: str, now_ns: int) -> int:
    """``moment`` for an option of a command. Raises ``ConfigError`` that names it."""
    try:
        return moment(told, now_ns)
    except BadValue as error:
        raise ConfigError(f"{option}: {error}") from None


def text(value: Any) -> str:
    """A text without control characters. Raises ``BadValue``."""
    if not isinstance(value, str):
        raise BadValue(value, "write a text in quotes")
    if any(ord(character) < 32 for character in value):
        raise BadValue(value, "a text must not have control characters, nor more than one line")
    return value


def addresses(value: Any) -> list[Address]:
    """``HOST:PORT`` or ``[IPv6]:PORT``; ``localhost`` is the loopback of IPv4 and of IPv6. Raises ``BadValue``."""
    host, colon, port = text(value).strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    is_port = port.isascii() and port.isdigit() and int(port[:6]) <= 65535
    if not colon or not is_port or (":" in bare and not bracketed) or re.search(r"[\s/\[\]]", bare):
        raise BadValue(value, 'write HOST:PORT, as "127.0.0.1:4317", "[::1]:4317" or "localhost:4317"')
    if bare == "localhost":
        return [Address("127.0.0.1", int(port)), Address("::1", int(port))]
    return [Address(bare or "0.0.0.0", int(port))]


def shown(key: str, value: Any, is_secret: bool) -> str:
    """A value for people, as one would write it in locum.toml; a secret is masked, and what is not set is empty."""
    if value is None or value == "":
        return ""
    if is_secret:
        return mask_url(value) if "://" in str(value) else "****"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return written(key, value)
    if not isinstance(value, tuple):
        return str(value)
    return ", ".join(_entry(entry) for entry in value) or "[]"


def _entry(entry: Any) -> str:
    """An element of a list, or a name of a table and what it has."""
    if not isinstance(entry, tuple):
        return str(entry)
    name, told = entry
    return f"{name}={told if isinstance(told, str) else ' | '.join(told)}"


def placeholder(value: str, known: Mapping[str, str]) -> str | None:
    """DataKit's placeholders in global tags (``__datakit_ip`` or ``$datakit_ip``); None for one that is not known."""
    name = value.removeprefix("__").removeprefix("$")
    if value == name or not name.startswith("datakit_"):
        return value
    return known.get(name)
