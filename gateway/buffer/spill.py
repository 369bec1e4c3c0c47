"""Sorting more rows than memory should hold: rows are dealt out to slots by series, and each slot is sorted by itself.

What does not fit in one slot goes through files without a name: nothing is left of them after a crash.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gateway.buffer.tables import DISTRIBUTION, NUMBER, Distributions, pick

Array = npt.NDArray[Any]

# Records are picked with ``take``: indexing with an array costs 40 times as much (112 and 2.8 ns a record).


class Slots:
    """Deals series out to slots of about ``slot_rows`` rows; ``counts`` are the rows of each series, by its rank.

    A series with more rows than that fills a slot by itself, and is then sorted in pieces of ``slot_rows``.
    """

    def __init__(self, counts: npt.NDArray[np.int64], slot_rows: int) -> None:
        self.slot_rows = slot_rows
        before = np.cumsum(counts) - counts
        self.of_rank = (before // slot_rows).astype("<u2" if counts.sum() // slot_rows < 65536 else "<u4")
        used = np.unique(self.of_rank[counts > 0])
        self.used: list[int] = used.tolist()

    def order(self, ranks: Array) -> tuple[Array, list[tuple[int, int, int]]]:
        """An order of rows by slot that keeps their order within one, and the slots in it: slot, begin, end."""
        if not len(ranks):
            return ranks, []
        slots = self.of_rank[ranks]
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        begins = np.flatnonzero(np.diff(ordered, prepend=-1))
        ends = np.append(begins[1:], len(ordered))
        return order, list(zip(ordered[begins].tolist(), begins.tolist(), ends.tolist(), strict=True))


def _files(slots: Slots, directory: Path) -> dict[int, IO[bytes]]:
    if len(slots.used) <= 1:
        return {slot: io.BytesIO() for slot in slots.used}
    return {slot: tempfile.TemporaryFile(dir=directory) for slot in slots.used}


def _read(file: IO[bytes], kind: Any, count: int = -1) -> Array:
    width = np.dtype(kind).itemsize
    return np.frombuffer(file.read(count * width if count >= 0 else -1), kind)


def _by_series_and_time(rows: Array) -> Array:
    """The order by series, then time. Rows come by batch, so time mostly rises by itself, which is cheap to see."""
    series = rows["series"]
    near = series - series.min()
    order = np.argsort(near.astype("<u2") if near.max() < 65536 else near, kind="stable")
    ordered, times = series[order], rows["time"][order]
    if ((times[1:] < times[:-1]) & (ordered[1:] == ordered[:-1])).any():
        return np.lexsort((rows["time"], series))
    return order


class NumberSpill:
    """Numbers, whose series are ranks, on their way to being sorted by series and time."""

    def __init__(self, slots: Slots, directory: Path) -> None:
        self._slots = slots
        self._files = _files(slots, directory)

    def add(self, rows: Array) -> None:
        order, pieces = self._slots.order(rows["series"])
        dealt = rows.take(order)
        for slot, begin, end in pieces:
            self._files[slot].write(dealt[begin:end].tobytes())

    def sorted(self) -> Iterator[Array]:
        """The rows in order, piece by piece."""
        for slot in self._slots.used:
            with self._files.pop(slot) as file:
                file.seek(0)
                while len(rows := _read(file, NUMBER, self._slots.slot_rows * 2)):
                    yield rows.take(_by_series_and_time(rows))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class DistributionSpill:
    """As ``NumberSpill``, for distributions: the lists of a slot are in files beside its rows."""

    def __init__(self, slots: Slots, directory: Path) -> None:
        self._slots = slots
        self._rows, self._buckets, self._bounds = (_files(slots, directory) for _ in range(3))

    def add(self, distributions: Distributions) -> None:
        order, pieces = self._slots.order(distributions.rows["series"])
        dealt = pick(distributions, order)
        buckets_end = np.cumsum(dealt.rows["n_buckets"], dtype=np.int64)
        bounds_end = np.cumsum(dealt.rows["n_bounds"], dtype=np.int64)
        buckets_at = bounds_at = 0
        for slot, begin, end in pieces:
            self._rows[slot].write(dealt.rows[begin:end].tobytes())
            buckets_to, bounds_to = int(buckets_end[end - 1]), int(bounds_end[end - 1])
            self._buckets[slot].write(dealt.buckets[buckets_at:buckets_to].tobytes())
            self._bounds[slot].write(dealt.bounds[bounds_at:bounds_to].tobytes())
            buckets_at, bounds_at = buckets_to, bounds_to

    def sorted(self) -> Iterator[Distributions]:
        """The rows in order, piece by piece."""
        for slot in self._slots.used:
            files = [part.pop(slot) for part in (self._rows, self._buckets, self._bounds)]
            with files[0], files[1], files[2]:
                for file in files:
                    file.seek(0)
                while len(rows := _read(files[0], DISTRIBUTION, self._slots.slot_rows * 2)):
                    buckets = _read(files[1], "<u8", int(rows["n_buckets"].sum()))
                    bounds = _read(files[2], "<f8", int(rows["n_bounds"].sum()))
                    yield pick(Distributions(rows, buckets, bounds), _by_series_and_time(rows))

    def close(self) -> None:
        for files in (self._rows, self._buckets, self._bounds):
            for file in files.values():
                file.close()
