"""Looking at what leaves: the points of live batches after the policy, for people. It takes nothing away from a sink.

A tap is slow on purpose (an object a point) and must never hold the gateway up: what comes faster than
``MAX_POINTS_S`` is skipped, and how much was skipped is said.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from gateway.buffer.record import Distributions, Numbers, Record
from gateway.model import CATEGORY_OF, Category, Event, Kind, Series, Unsigned
from gateway.otlp.plain import Row, points
from gateway.otlp.point import decode_point, line
from gateway.series import TRANSIENT

MAX_POINTS_S = 5000


@dataclass(frozen=True, slots=True)
class Filter:
    """Which points to show: a pattern for the metric's name, patterns for tags, a category. Empty: all."""

    metric: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    category: Category | None = None

    def takes_series(self, series: Series) -> bool:
        """``le`` and ``quantile`` of a bucket are not looked at: they are no tags of the series."""
        return (not self.metric or fnmatchcase(series.field, self.metric)) and self._takes_tags(dict(series.tags))

    def takes_event(self, event: Event) -> bool:
        return not self.metric and self._takes_tags({**event.fields, **event.tags})

    def _takes_tags(self, found: dict[str, Any]) -> bool:
        return all(key in found and fnmatchcase(str(found[key]), pattern) for key, pattern in self.tags)


class Spelling:
    """Spells records out into points, as a sink would send them. Keeps the series of one segment at a time."""

    def __init__(self, apply: Callable[[Series], Series], parity: str, wanted: Filter) -> None:
        self._apply = apply
        self._parity = parity
        self._wanted = wanted
        self._segment = -1
        self._series: dict[int, Series] = {}
        self._transient: dict[int, Series] = {}  # of the present record only

    def events(self, record: Record) -> Iterator[Event]:
        """The points of a record that the filter takes."""
        if record.segment != self._segment:
            self._segment = record.segment
            self._series.clear()
        self._transient.clear()
        for series_id, definition in record.definitions:
            series = self._apply(Series.unpack(definition))
            if self._wanted.takes_series(series):
                known = self._series if series_id < TRANSIENT else self._transient
                known[series_id] = series
        category = CATEGORY_OF[record.signal]
        if self._wanted.category not in (None, category):
            return
        if category is Category.METRIC:
            for row in self._rows(record.numbers(), record.distributions()):
                yield from points(row, self._parity)
        found = record.events()
        for number, raw in zip(found.category.tolist(), found.points, strict=True):
            event = decode_point(raw, Category(number))
            if self._wanted.takes_event(event):
                yield event

    def _find(self, series_id: int) -> Series | None:
        return (self._series if series_id < TRANSIENT else self._transient).get(series_id)

    def _rows(self, numbers: Numbers, rows: Distributions) -> Iterator[Row]:
        doubles = numbers.bits.view(np.float64)
        integers = numbers.bits.view(np.int64)
        for at, series_id in enumerate(numbers.series.tolist()):
            series = self._find(series_id)
            if series is not None:
                value = (integers if series.kind is Kind.INT else doubles)[at].item()
                yield Row(series, int(numbers.time[at]), int(numbers.start[at]), value)
        bucket_ends, bound_ends = np.cumsum(rows.n_buckets, dtype=np.int64), np.cumsum(rows.n_bounds, dtype=np.int64)
        for at, series_id in enumerate(rows.series.tolist()):
            series = self._find(series_id)
            if series is None:
                continue
            buckets_end, bounds_end = int(bucket_ends[at]), int(bound_ends[at])
            yield Row(
                series,
                int(rows.time[at]),
                int(rows.start[at]),
                flags=int(rows.flags[at]),
                count=int(rows.count[at]),
                sum=float(rows.sum[at]),
                min=float(rows.min[at]),
                max=float(rows.max[at]),
                buckets=tuple(rows.buckets[buckets_end - int(rows.n_buckets[at]) : buckets_end].tolist()),
                bounds=tuple(rows.bounds[bounds_end - int(rows.n_bounds[at]) : bounds_end].tolist()),
            )


def last_events(records: Iterable[Record], spelling: Spelling, count: int) -> list[Event]:
    """The last ``count`` points of ``records``."""
    kept: deque[Event] = deque(maxlen=count)
    for record in records:
        kept.extend(spelling.events(record))
    return list(kept)


def live_lines(next_record: Callable[[], Record | None], spelling: Spelling, as_json: bool) -> Iterator[str]:
    """A line a point, and empty lines while nothing comes (so that a reader that has gone is noticed).

    ``next_record`` waits a moment for the next record and gives None when there was none.
    """
    budget, skipped, second = MAX_POINTS_S, 0, time.monotonic()
    while True:
        record = next_record()
        now = time.monotonic()
        if now - second >= 1.0:
            if skipped:
                yield f"# {skipped} batches skipped, over {MAX_POINTS_S} points/s; narrow it with --metric or --tag"
            budget, skipped, second = MAX_POINTS_S, 0, now
        if record is None:
            yield ""
            continue
        if budget <= 0 and not record.definitions:
            skipped += 1
            continue
        for event in spelling.events(record):
            budget -= 1
            yield show(event, as_json)


def show(event: Event, as_json: bool) -> str:
    """A point as line protocol, or as one JSON object. What line protocol cannot write is shown as JSON."""
    text = None if as_json else line(event)
    return _json(event) if text is None else text


def _json(event: Event) -> str:
    return json.dumps(
        {
            "category": event.category.path,
            "measurement": event.measurement,
            "tags": dict(event.tags),
            "fields": {key: _plain(value) for key, value in event.fields.items()},
            "time": event.time_ns,
        },
        ensure_ascii=False,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return int(value) if isinstance(value, Unsigned) else value
