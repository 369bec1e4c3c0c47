"""Metrics that DataKit makes of spans where ``tracing_metric_enable`` is set. No IO, no clock.

Each minute the owner drains what was observed since the last time (details 6; golden ``tm_tracing_metrics``): hits,
errors, both again for spans with an HTTP status, a histogram of the latency, and apdex for each HTTP resource.
``observe`` may be called by several threads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import floor
from threading import Lock

from gateway.config import PointSettings
from gateway.model import Category, Event, FieldValue, Losses, Unsigned
from gateway.otlp.point import Entry, build_event

DEFAULT_LABELS = (
    "service",
    "source",
    "operation",
    "env",
    "status",
    "version",
    "resource",
    "host",
    "http_status_code",
    "http_status_class",
    "rpc_grpc_status_code",
    "pod_name",
    "pod_namespace",
    "project",
    "remote_ip",
)
_APDEX_LABELS = ("service", "env", "version", "resource", "source", "remote_ip")
_BOUNDS_US = (
    *(100, 500, 1_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000, 500_000),
    *(1_000_000, 5_000_000, 30_000_000, 60_000_000, 300_000_000),
)
_SATISFIED_US, _TOLERATED_US = 2_000_000, 8_000_000
MAX_LABEL_SETS = 10_000
"""Within one minute. Spans of further ones are counted in ``overflowed``, not in the metrics."""

Labels = tuple[str, ...]


@dataclass(slots=True)
class _Counts:
    """What was seen with one set of labels."""

    is_http: bool
    is_error: bool
    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_US) + 1))
    sum: float = 0.0


class TracingMetrics:
    """Counts spans until they are drained. ``labels`` are those of DataKit, changed by the two lists."""

    def __init__(self, points: PointSettings, whitelist: Sequence[str] = (), blacklist: Sequence[str] = ("resource",)):
        wanted = dict.fromkeys((*DEFAULT_LABELS, *(label.replace(".", "_") for label in whitelist)))
        self._labels = tuple(label for label in wanted if label not in blacklist)
        self._points = points
        self._global_keys = frozenset(key for key, _ in points.global_tags)
        self._lock = Lock()
        self._counts: dict[Labels, _Counts] = {}
        self._apdex: dict[Labels, list[int]] = {}
        self.overflowed = 0

    def observe(self, events: Iterable[Event]) -> None:
        """Count spans, as ``flatten_spans`` made them."""
        with self._lock:
            for event in events:
                self._observe(event)

    def _observe(self, event: Event) -> None:
        duration = event.fields["duration"]
        if not isinstance(duration, int):
            return
        labels = tuple(self._value(event, label) for label in self._labels)
        counts = self._counts.get(labels)
        if counts is None:
            if len(self._counts) >= MAX_LABEL_SETS:
                self.overflowed += 1
                return
            is_http = "http_status_code" in self._labels and bool(event.tags.get("http_status_code"))
            is_error = "status" in self._labels and event.tags.get("status") == "error"
            counts = self._counts[labels] = _Counts(is_http, is_error)
        counts.buckets[bisect_left(_BOUNDS_US, duration)] += 1
        counts.sum += duration
        if counts.is_http:
            apdex = self._apdex.setdefault(tuple(self._apdex_value(event, label) for label in _APDEX_LABELS), [0, 0, 0])
            apdex[(duration > _SATISFIED_US) + (duration > _TOLERATED_US)] += 1

    def _value(self, event: Event, label: str) -> str:
        """The span's value, before the global tags came to it, as in DataKit."""
        value: FieldValue | None = event.fields.get(label)
        if value is None and label not in self._global_keys:
            value = event.tags.get(label)
        return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    def _apdex_value(self, event: Event, label: str) -> str:
        """Apdex knows tags only; ``env`` and ``version`` are fields, so they are empty, as in DataKit."""
        return str(event.fields["resource"]) if label == "resource" else event.tags.get(label, "")

    def drain(self, now_ns: int) -> list[Event]:
        """The points of what was observed since the last time, all with the time ``now_ns``."""
        with self._lock:
            counts, self._counts = self._counts, {}
            apdex, self._apdex = self._apdex, {}
            self.overflowed = 0
        events: list[Event] = []
        for labels, seen in counts.items():
            tags: list[Entry] = [(name, text, True) for name, text in zip(self._labels, labels, strict=True)]
            events += (self._point([*tags, *entries], now_ns) for entries in _entries(seen))
        for labels, (satisfied, tolerated, frustrated) in apdex.items():
            score = (satisfied + tolerated // 2) / (satisfied + tolerated + frustrated)  # DataKit divides integers
            tags = [(name, text, True) for name, text in zip(_APDEX_LABELS, labels, strict=True)]
            tags.append(("apdex", floor(score * 100 + 0.5) / 100, False))
            events.append(self._point(tags, now_ns))
        return events

    def _point(self, entries: list[Entry], now_ns: int) -> Event:
        """A global tag comes where its key is free: not ``host``, a label that is mostly empty."""
        return build_event(Category.METRIC, "tracing_metrics", entries, now_ns, Losses(), self._points.global_tags)


def _entries(seen: _Counts) -> list[list[Entry]]:
    """The fields of each point of one set of labels."""
    count = sum(seen.buckets)
    names = ["hits"]
    names += ["hits_by_http_status"] if seen.is_http else []
    names += ["errors"] if seen.is_error else []
    names += ["errors_by_http_status"] if seen.is_http and seen.is_error else []
    points: list[list[Entry]] = [[(name, float(count), False)] for name in names]
    points.append([("latency_count", Unsigned(count), False), ("latency_sum", seen.sum, False)])
    *cumulative, total = accumulate(seen.buckets)
    for bound, below in zip(_BOUNDS_US, cumulative, strict=True):
        points.append([("latency_bucket", Unsigned(below), False), ("le", str(bound), True)])
    if cumulative[-1] != total:
        points.append([("latency_bucket", Unsigned(total), False), ("le", "+Inf", True)])
    return points
