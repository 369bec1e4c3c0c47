"""Series by the bytes that make them: the memory that makes a known data point cheap.

True at all times: a slot's ids lie one after the other, each with its definition in ``table``; a slot that was used in
the present epoch or the one before is never forgotten, so a batch on its way to the journal finds its definitions.
The keys are 128-bit hashes under a secret of this process; the bytes themselves are not kept.
"""

import os

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from gateway.series cimport SeriesTable

from gateway.series import TRANSIENT


cdef class Registry:
    """The series that are known, at most ``max_series``.

    Past that, the points of new series still pass, understood anew each time; ``overflowed`` counts them. ``sweep``
    forgets what has not been used for a while. ``settings`` are the PointSettings under which series were understood.
    """

    def __cinit__(self, settings, uint32_t max_series):
        self.table = SeriesTable()
        self.settings = settings
        self.strict = settings.parity == "strict"
        self.max_series = min(max_series, TRANSIENT - 1)
        self.free_series = []
        secret = os.urandom(32)
        memcpy(self.secret, <const uint8_t*> secret, 32)
        for i in range(4):
            self.secret[i] |= 1
        self.mask = 1023
        self.slots = <Slot*> calloc(self.mask + 1, sizeof(Slot))
        if self.slots == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.slots)

    def __len__(self):
        return self.filled

    def definition(self, uint32_t series):
        """The definition of a series in the table. Raises ``KeyError``."""
        return self.table.definition(series)

    def sweep(self):
        """Forget every series that was not used in this epoch or the one before; how many were forgotten."""
        cdef Slot* old = self.slots
        cdef uint64_t old_size = self.mask + 1, size = 1024, i, kept = 0
        cdef uint32_t j
        for i in range(old_size):
            if old[i].count and self.fresh(&old[i]):
                kept += 1
        while kept * 10 > size * 6:
            size *= 2
        fresh = <Slot*> calloc(size, sizeof(Slot))
        if fresh == NULL:
            raise MemoryError()
        forgotten = self.filled - kept
        self.slots, self.mask, self.filled = fresh, size - 1, 0
        for i in range(old_size):
            if not old[i].count:
                continue
            if self.fresh(&old[i]):
                self.place(old[i])
            else:
                for j in range(old[i].count):
                    self.table.clear(old[i].series + j)
                    self.free_series.append(old[i].series + j)
        free(old)
        return forgotten

    cdef bint fresh(self, Slot* slot) noexcept:
        cdef uint32_t j
        for j in range(slot.count):
            if self.table.used[slot.series + j] + 1 >= self.table.epoch:
                return True
        return False

    cdef void place(self, Slot slot) noexcept:
        """Put a slot where there is room for it; there is."""
        cdef uint64_t at = slot.a & self.mask
        while self.slots[at].count:
            at = (at + 1) & self.mask
        self.slots[at] = slot
        self.filled += 1

    cdef Slot* find(self, Hash key) noexcept:
        cdef uint64_t at = key.a & self.mask
        while self.slots[at].count:
            if self.slots[at].a == key.a and self.slots[at].b == key.b:
                return &self.slots[at]
            at = (at + 1) & self.mask
        return NULL

    cdef int grow(self) except -1:
        cdef Slot* old = self.slots
        cdef uint64_t size = self.mask + 1, i
        fresh = <Slot*> calloc(size * 2, sizeof(Slot))
        if fresh == NULL:
            raise MemoryError()
        self.slots, self.mask, self.filled = fresh, size * 2 - 1, 0
        for i in range(size):
            if old[i].count:
                self.place(old[i])
        free(old)
        return 0

    cdef uint32_t remember(self, Hash key, list definitions) except? 0xFFFFFFFF:
        """Take new series in under ``key``; the id of the first."""
        cdef Slot slot
        cdef uint32_t j, series
        cdef bytes definition
        cdef Slot* known = self.find(key)
        if known != NULL:    # another request was faster while this one was being understood
            return known.series
        if (self.filled + 1) * 10 > (self.mask + 1) * 7:
            self.grow()
        slot.a, slot.b, slot.count = key.a, key.b, <uint32_t> len(definitions)
        if slot.count == 1 and self.free_series:
            slot.series = self.free_series.pop()
        else:
            slot.series = self.next_series
            self.next_series += slot.count
        for j in range(slot.count):
            series = slot.series + j
            definition = definitions[j]
            self.table.put(series, <const uint8_t*> definition, <uint32_t> len(definition))
            self.table.used[series] = self.table.epoch
        self.place(slot)
        return slot.series

    cdef uint32_t pass_through(self, list definitions, list into) except? 0xFFFFFFFF:
        """Ids for series that there is no room for, good for one record; adds (id, definition) to ``into``."""
        cdef uint32_t first = <uint32_t> TRANSIENT + self.next_transient, j
        self.overflowed += 1
        self.next_transient = (self.next_transient + <uint32_t> len(definitions)) & 0x3FFFFFFF
        for j in range(<uint32_t> len(definitions)):
            into.append((first + j, definitions[j]))
        return first
