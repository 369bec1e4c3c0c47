"""Dense ids for the series of one segment.

The journal speaks of series by the registry's ids. Those are not dense, ids of forgotten series are given out again,
and a series that the registry did not remember (``series.TRANSIENT``) has a new id in every record. Here each series
gets one number, in the order of its first definition, so that a table of a segment can use it.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.series import TRANSIENT

UNDEFINED = 0xFFFFFFFF
"""The number of a row whose series was never defined: its definition lay in damaged bytes."""

_KEY_KIND = struct.Struct("<QB")
_TRANSIENTS = 100_000

Ids = npt.NDArray[np.uint32]


def _grown(array: npt.NDArray[Any], size: int, filler: int) -> npt.NDArray[Any]:
    if size <= len(array):
        return array
    larger = np.full(max(size, len(array) * 2), filler, array.dtype)
    larger[: len(array)] = array
    return larger


class Numbering:
    """``count`` series have numbers 0 to ``count`` - 1."""

    def __init__(self) -> None:
        self.count = 0
        self._numbers: Ids = np.full(1024, UNDEFINED, "<u4")
        self._keys: npt.NDArray[np.uint64] = np.zeros(1024, "<u8")
        self._kinds: npt.NDArray[np.uint8] = np.zeros(1024, "<u1")
        self._transient: dict[int, int] = {}
        self._by_definition: dict[bytes, int] = {}

    @property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """The kind of each series, by number."""
        return self._kinds[: self.count]

    def define(self, series: int, definition: bytes) -> int | None:
        """Take in that the journal's ``series`` means ``definition`` from now on; its number if it has not been seen
        under this id before, else None."""
        key, kind = _KEY_KIND.unpack_from(definition)
        if series >= TRANSIENT:
            return self._define_transient(series, key, kind, definition)
        self._numbers = _grown(self._numbers, series + 1, UNDEFINED)
        known = int(self._numbers[series])
        if known != UNDEFINED and self._keys[known] == key and self._kinds[known] == kind:
            return None
        self._numbers[series] = number = self._new(key, kind)
        return number

    def _define_transient(self, series: int, key: int, kind: int, definition: bytes) -> int | None:
        known = self._by_definition.get(definition)
        if known is not None:
            self._transient[series] = known
            return None
        if len(self._by_definition) >= _TRANSIENTS:
            self._by_definition.clear()  # bounded: such a series may have a second number
        self._transient[series] = self._by_definition[definition] = number = self._new(key, kind)
        return number

    def _new(self, key: int, kind: int) -> int:
        number = self.count
        self.count += 1
        self._keys = _grown(self._keys, self.count, 0)
        self._kinds = _grown(self._kinds, self.count, 0)
        self._keys[number], self._kinds[number] = key, kind
        return number

    def end_record(self) -> None:
        """A record is done: its transient ids mean nothing any more."""
        if self._transient:
            self._transient.clear()

    def translate(self, series: Ids) -> Ids:
        """The numbers of a column of journal ids; ``UNDEFINED`` for what has none."""
        if not len(series):
            return series
        if series.max() < len(self._numbers):
            return self._numbers[series]
        numbers: Ids = np.full(len(series), UNDEFINED, "<u4")
        inside = series < len(self._numbers)
        numbers[inside] = self._numbers[series[inside]]
        transient = np.flatnonzero(series >= TRANSIENT)
        numbers[transient] = [self._transient.get(each, UNDEFINED) for each in series[transient].tolist()]
        return numbers
