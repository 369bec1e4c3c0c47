"""The vocabulary of the gateway: the few types that its modules speak to each other.

Four ideas:

- A **Series** is what stays the same from one data point to the next: field, tags, kind, bounds.
  It is understood once (``otlp.expand``) and then travels as its *definition*, a byte string that the
  journal, the registry and the encoders share (``Series.pack``; ``gateway/series.pxd`` is its C view).
- A data point of a metric is a row of numbers beside a series id. Rows travel as columns in a
  ``Batch.body`` (``buffer.record`` has the layout), never as Python objects.
- An **Event** is a span or a log record: a point of its own, with its own tags and fields.
- A **Batch** is what one request became. It is accepted whole, or refused whole with a ``Refusal``.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from functools import lru_cache
from hashlib import blake2b

MAX_TIME_NS = 2**63 - 2
"""The last nanosecond that is kept (11 April 2262). 2**63 - 1 is DuckDB's infinity."""


class Signal(IntEnum):
    """What a request carries. The number is what the journal writes; it never changes its meaning."""

    METRICS = 1
    TRACES = 2
    LOGS = 3


class Category(IntEnum):
    """Guance's category of a point. ``path`` is the last part of Dataway's write address."""

    METRIC = 1
    TRACING = 2
    LOGGING = 3

    @property
    def path(self) -> str:
        return self.name.lower()


CATEGORY_OF = {
    Signal.METRICS: Category.METRIC,
    Signal.TRACES: Category.TRACING,
    Signal.LOGS: Category.LOGGING,
}


class Kind(IntEnum):
    """What a row of a series holds, and which columns it is in (``buffer.record``).

    DOUBLE and INT are rows of the numbers. The others are rows of the distributions: count, and where they
    were sent sum, min and max; HISTOGRAM has its bounds in the series, EXPONENTIAL on each row, SUMMARY none
    (its quantiles are DOUBLE series of their own, with the tag ``quantile``).
    """

    DOUBLE = 1
    INT = 2
    HISTOGRAM = 3
    EXPONENTIAL = 4
    SUMMARY = 5


class Temporality(IntEnum):
    """OTLP's AggregationTemporality. A gauge and a summary are UNSPECIFIED."""

    UNSPECIFIED = 0
    DELTA = 1
    CUMULATIVE = 2


LOOKS_LIKE_ANOTHER_UNIT_NS = (100_000_000, 31_536_000_000_000_000)
"""0.1 s after the beginning of 1970 to a year after it: a time in between is most likely one in seconds, ms or us,
sent as nanoseconds. It is kept as it was sent, and its sender is told."""

Tags = tuple[tuple[str, str], ...]

_DEFINITION = struct.Struct("<QBBBBIHHI")  # series.pxd: struct Definition


@dataclass(frozen=True, slots=True)
class Series:
    """What is true of every row of a series.

    ``tags`` are all of its tags, before the policy, in DataKit's order, keys unique. ``field`` is the metric's
    name with its dots. ``bounds`` only for ``Kind.HISTOGRAM``: the finite upper bounds, ascending.
    """

    measurement: str
    field: str
    tags: Tags
    kind: Kind
    unit: str = ""
    temporality: Temporality = Temporality.UNSPECIFIED
    monotonic: bool = False
    bounds: tuple[float, ...] = ()

    @property
    def key(self) -> int:
        """64-bit hash of the identity: the same in every segment, on every machine, whatever the tag order."""
        digest = blake2b(bytes((self.kind, self.temporality, self.monotonic)), digest_size=8)
        digest.update(_text(0x0A, self.measurement) + _text(0x0A, self.field))
        digest.update(b"".join(sorted(_tag(key, value) for key, value in self.tags)))
        digest.update(struct.pack(f"<{len(self.bounds)}d", *self.bounds))
        return int.from_bytes(digest.digest(), "little")

    def pack(self, key: int | None = None) -> bytes:
        """The definition: a fixed header, then head, field, unit, bounds. The head is the beginning of every
        ``com.guance.Point`` of the series: its measurement and its tags, encoded. ``key``, if it is known already."""
        head = point_head(self.measurement, self.tags)
        name, unit = self.field.encode(), self.unit.encode()
        header = _DEFINITION.pack(
            self.key if key is None else key,
            self.kind,
            self.temporality,
            self.monotonic,
            0,
            len(head),
            len(name),
            len(unit),
            len(self.bounds),
        )
        return b"".join((header, head, name, unit, struct.pack(f"<{len(self.bounds)}d", *self.bounds)))

    @classmethod
    def unpack(cls, definition: bytes) -> Series:
        """The series that ``pack`` made this of."""
        _, kind, temporality, monotonic, _, head_size, name_size, unit_size, bounds = _DEFINITION.unpack_from(
            definition
        )
        head_end = _DEFINITION.size + head_size
        name_end = head_end + name_size
        unit_end = name_end + unit_size
        measurement, tags = read_point_head(definition[_DEFINITION.size : head_end])
        return cls(
            measurement=measurement,
            field=definition[head_end:name_end].decode(),
            tags=tags,
            kind=Kind(kind),
            unit=definition[name_end:unit_end].decode(),
            temporality=Temporality(temporality),
            monotonic=bool(monotonic),
            bounds=struct.unpack_from(f"<{bounds}d", definition, unit_end),
        )


class Unsigned(int):
    """An integer that goes to Guance as unsigned (``u``): counts and buckets."""

    __slots__ = ()


FieldValue = bool | int | float | str | bytes | Unsigned


@dataclass(frozen=True, slots=True)
class Event:
    """A point of its own: a span or a log record, after flattening and policy.

    Keys are unique over tags and fields together. ``time_ns`` is within 0 and ``MAX_TIME_NS``.
    """

    category: Category
    measurement: str
    tags: Mapping[str, str]
    fields: Mapping[str, FieldValue]
    time_ns: int


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a request: the peer's address (no port) as DataKit finds it, and the transport it came by."""

    address: str
    transport: str


class Reason(StrEnum):
    """Why something was refused, dropped, or changed. One word list for the status, the counter and the log."""

    # the whole request
    BAD_DATA = "bad_data"
    TOO_LARGE = "too_large"
    UNSUPPORTED_MEDIA = "unsupported_media"
    UNSUPPORTED_ENCODING = "unsupported_encoding"
    UNAUTHENTICATED = "unauthenticated"
    READ_TIMEOUT = "read_timeout"
    OVERLOADED = "overloaded"
    DISK_FULL = "disk_full"
    STORAGE = "storage"
    STOPPING = "stopping"
    # one data point, span or record: left out, its neighbours stay
    NO_VALUE = "no_value"
    NOT_FINITE = "not_finite"
    NO_NAME = "no_name"
    TIME_RANGE = "time_out_of_range"
    BAD_BUCKETS = "bad_buckets"
    BAD_BOUNDS = "bad_bounds"
    BAD_TEMPORALITY = "bad_temporality"
    STALE = "stale"
    TOO_BIG_POINT = "point_too_big"
    # one attribute, tag or text: changed, and the point stays
    TAG_COLLISION = "tag_collision"
    TAG_LIMIT = "tag_limit"
    KEY_CUT = "key_cut"
    VALUE_CUT = "value_cut"
    FIELD_CLASH = "field_clash"
    BUCKETS_LEFT_OUT = "buckets_left_out"
    EXTREME_OUTSIDE = "extreme_outside_buckets"
    TIME_ZERO = "time_zero"
    TIME_UNIT = "time_looks_like_another_unit"
    METRIC_WITHOUT_DATA = "metric_without_data"
    NOTHING_RECOGNISED = "nothing_recognised"
    ENUM_NAME = "enum_name"
    SNAKE_CASE_NAME = "snake_case_name"
    NESTED_TOO_DEEP = "nested_too_deep"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a refusal of a whole request is answered (OTLP specification, failures)."""

    grpc: str
    http: int
    retryable: bool = False


REFUSALS = {
    Reason.BAD_DATA: Rule("INVALID_ARGUMENT", 400),
    Reason.TOO_LARGE: Rule("RESOURCE_EXHAUSTED", 413),
    Reason.UNSUPPORTED_MEDIA: Rule("INVALID_ARGUMENT", 415),
    Reason.UNSUPPORTED_ENCODING: Rule("UNIMPLEMENTED", 415),
    Reason.UNAUTHENTICATED: Rule("UNAUTHENTICATED", 401),
    Reason.READ_TIMEOUT: Rule("DEADLINE_EXCEEDED", 408),
    Reason.OVERLOADED: Rule("UNAVAILABLE", 503, retryable=True),
    Reason.DISK_FULL: Rule("UNAVAILABLE", 503, retryable=True),
    Reason.STORAGE: Rule("UNAVAILABLE", 503, retryable=True),
    Reason.STOPPING: Rule("UNAVAILABLE", 503, retryable=True),
}
"""The one table of refusals: whoever answers a sender looks here."""


@dataclass(slots=True)
class Losses:
    """What was left out or changed while a request was understood: counts by reason, and one example each.

    ``left_out`` counts data points (spans, records) that will not be sent: they become ``partial_success``.
    ``changed`` counts attributes and texts that were altered, and what is odd and worth a word; their points go on.
    """

    left_out: dict[Reason, int] = field(default_factory=dict)
    changed: dict[Reason, int] = field(default_factory=dict)
    left_out_examples: dict[Reason, str] = field(default_factory=dict)
    changed_examples: dict[Reason, str] = field(default_factory=dict)

    def leave_out(self, reason: Reason, example: str, count: int = 1) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + count
        self.left_out_examples.setdefault(reason, example)

    def change(self, reason: Reason, example: str, count: int = 1) -> None:
        self.changed[reason] = self.changed.get(reason, 0) + count
        self.changed_examples.setdefault(reason, example)

    def add(self, other: Losses) -> None:
        """Count what ``other`` counted, too."""
        for reason, count in other.left_out.items():
            self.leave_out(reason, other.left_out_examples[reason], count)
        for reason, count in other.changed.items():
            self.change(reason, other.changed_examples[reason], count)

    @property
    def rejected(self) -> int:
        """What ``partial_success`` reports. A stale marker carries no data, so it is not a rejection."""
        return sum(count for reason, count in self.left_out.items() if reason is not Reason.STALE)

    def message(self) -> str:
        """One sentence for ``partial_success.error_message``; empty when there is nothing to say."""
        told = [f"{count} {reason}: {self.left_out_examples[reason]}" for reason, count in self.left_out.items()]
        told += [f"{count} {reason}: {self.changed_examples[reason]}" for reason, count in self.changed.items()]
        return "; ".join(told)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one request became, ready to be written: the unit that is accepted, synced and counted.

    ``body`` is laid out by ``buffer.record``; ``points`` is the number of data points, spans or records in it.
    ``definitions`` are those of series that are in no table (ids from ``series.TRANSIENT`` on): they hold for this
    batch only.
    """

    signal: Signal
    received_ns: int
    body: bytes
    points: int
    losses: Losses
    definitions: bytes = b""


class LocumError(Exception):
    """Everything that Locum raises on purpose. The children say who can act."""


class ConfigError(LocumError):
    """The operator can act: the message begins with ``file:line:column`` where there is one."""


class Refusal(LocumError):
    """The sender can act: a whole request was refused."""

    def __init__(self, reason: Reason, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class SinkError(LocumError):
    """The receiver of our data can act: it did not take a body."""


class StorageError(LocumError):
    """The disk's owner can act: something could not be written or read."""


class Wire(Enum):
    """How a request's body is written."""

    PROTOBUF = "application/x-protobuf"
    JSON = "application/json"


def varint(number: int) -> bytes:
    """``number`` (0 to 2**64 - 1) as a protobuf varint."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _text(tag: int, text: str) -> bytes:
    raw = text.encode()
    if len(raw) < 0x80:
        return bytes((tag, len(raw))) + raw
    return bytes((tag,)) + varint(len(raw)) + raw


def point_head(measurement: str, tags: Tags) -> bytes:
    """The beginning of a PBPoint: ``name = 1`` and one ``Field{key = 1, s = 11, is_tag = 8}`` a tag."""
    return _text(0x0A, measurement) + b"".join([_tag(key, value) for key, value in tags])


@lru_cache(maxsize=16384)
def _tag(key: str, value: str) -> bytes:
    """One tag as a field of a PBPoint. Kept, since the series of a device share most of theirs."""
    tag = _text(0x0A, key) + _text(0x5A, value) + b"\x40\x01"
    return b"\x12" + varint(len(tag)) + tag


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = raw[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def _read_text(raw: bytes, at: int) -> tuple[str, int]:
    size, at = _read_varint(raw, at + 1)
    return raw[at : at + size].decode(), at + size


def read_point_head(head: bytes) -> tuple[str, Tags]:
    """Measurement and tags of what ``point_head`` wrote. (Sizes of one byte, which most are, are read in place.)"""
    measurement, at = _read_text(head, 0)
    tags = []
    while at < len(head):
        at += 2
        while head[at - 1] > 0x7F:
            at += 1
        size = head[at + 1]
        if size > 0x7F:
            key, at = _read_text(head, at)
        else:
            key = head[at + 2 : at + 2 + size].decode()
            at += 2 + size
        size = head[at + 1]
        if size > 0x7F:
            value, at = _read_text(head, at)
        else:
            value = head[at + 2 : at + 2 + size].decode()
            at += 2 + size
        tags.append((key, value))
        at += 2
    return measurement, tuple(tags)


def utc(at_ns: int) -> str:
    """A time (ns since 1970) for people: ``2026-11-30T08:00:00Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_ns // 10**9))
