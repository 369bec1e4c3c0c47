"""Definitions of series by id, one copy for all who need them.

True at all times: a blob is freed when the last table lets go of it, so a sink that is still at an old segment keeps
what it needs after the registry has forgotten the series. All of it happens under the GIL; there is no other lock.

``epoch`` counts what has to be said again: a series whose ``defined`` is not the present epoch is written into the
journal before its next row. It rises with every new segment, and then only: the registry measures by it how long a
series has not been used, and must not forget one that waits to be written because a write failed.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

TRANSIENT = 1 << 31
"""Ids from here on are of series that the registry did not remember: defined in the very record that uses them."""

cdef uint32_t FIRST_TRANSIENT = <uint32_t> 1 << 31
cdef uint32_t BODY_COUNTS = 24


cdef class SeriesTable:
    """See the module. ``count`` series hold ``size_bytes`` bytes of definitions."""

    def __cinit__(self):
        self.epoch = 1

    def __dealloc__(self):
        cdef uint32_t series
        for series in range(self.capacity):
            self.clear(series)
        free(self.blobs)
        free(self.used)
        free(self.defined)

    cdef int reserve(self, uint32_t series) except -1:
        """Make room for the id ``series``."""
        cdef uint32_t capacity
        if series < self.capacity:
            return 0
        if series >= FIRST_TRANSIENT:
            raise ValueError(f"series id {series} is transient and has no place in a table")
        capacity = max(series + 1, 1024, self.capacity + self.capacity // 8)
        blobs = <Blob**> realloc(self.blobs, capacity * sizeof(Blob*))
        if blobs == NULL:
            raise MemoryError()
        self.blobs = blobs
        used = <uint32_t*> realloc(self.used, capacity * sizeof(uint32_t))
        if used == NULL:
            raise MemoryError()
        self.used = used
        defined = <uint32_t*> realloc(self.defined, capacity * sizeof(uint32_t))
        if defined == NULL:
            raise MemoryError()
        self.defined = defined
        memset(self.blobs + self.capacity, 0, (capacity - self.capacity) * sizeof(Blob*))
        memset(self.used + self.capacity, 0, (capacity - self.capacity) * sizeof(uint32_t))
        memset(self.defined + self.capacity, 0, (capacity - self.capacity) * sizeof(uint32_t))
        self.capacity = capacity
        return 0

    cdef void clear(self, uint32_t series) noexcept:
        """Let go of a definition."""
        cdef Blob* blob
        if series >= self.capacity or self.blobs[series] == NULL:
            return
        blob = self.blobs[series]
        self.blobs[series] = NULL
        self.defined[series] = 0
        self.count -= 1
        self.size_bytes -= blob.size
        blob.references -= 1
        if blob.references == 0:
            free(blob)

    cdef const Definition* get(self, uint32_t series) noexcept:
        """The definition of a series, or NULL."""
        if series >= self.capacity or self.blobs[series] == NULL:
            return NULL
        return <const Definition*> (self.blobs[series] + 1)

    cdef int put(self, uint32_t series, const uint8_t* definition, uint32_t size) except -1:
        cdef Blob* blob
        self.reserve(series)
        self.clear(series)
        blob = <Blob*> malloc(sizeof(Blob) + size)
        if blob == NULL:
            raise MemoryError()
        blob.references = 1
        blob.size = size
        memcpy(blob + 1, definition, size)
        self.blobs[series] = blob
        self.count += 1
        self.size_bytes += size
        return 0

    def define(self, uint32_t series, bytes definition not None):
        """Hold ``definition`` under the id ``series``, in place of what was there. Raises ``ValueError`` where its
        sizes do not add up: whoever reads it later trusts them."""
        cdef const Definition* header
        cdef uint64_t size = <uint64_t> len(definition)
        if size < sizeof(Definition):
            raise ValueError(f"definition of {size} bytes")
        header = <const Definition*> <const uint8_t*> definition
        if size != (
            sizeof(Definition)
            + <uint64_t> header.head_size
            + header.field_size
            + header.unit_size
            + <uint64_t> header.bounds_count * sizeof(double)
        ):
            raise ValueError(f"definition of {size} bytes, its header says otherwise")
        self.put(series, <const uint8_t*> definition, <uint32_t> len(definition))

    def share(self, uint32_t series, bytes definition not None, SeriesTable other not None):
        """As ``define``, but with the copy that ``other`` holds, if it holds the same."""
        cdef Blob* blob
        cdef uint32_t size
        if series < other.capacity and other.blobs[series] != NULL:
            blob = other.blobs[series]
            size = <uint32_t> len(definition)
            if blob.size == size and memcmp(blob + 1, <const uint8_t*> definition, size) == 0:
                self.reserve(series)
                if self.blobs[series] == blob:
                    return
                self.clear(series)
                blob.references += 1
                self.blobs[series] = blob
                self.count += 1
                self.size_bytes += blob.size
                return
        self.define(series, definition)

    def definition(self, uint32_t series):
        """The definition of ``series``. Raises ``KeyError``."""
        if series >= self.capacity or self.blobs[series] == NULL:
            raise KeyError(series)
        return (<const uint8_t*> (self.blobs[series] + 1))[: self.blobs[series].size]

    def forget(self):
        """Let go of everything."""
        cdef uint32_t series
        for series in range(self.capacity):
            self.clear(series)

    def next_epoch(self):
        """From now on every series has to be defined again before its next row."""
        self.epoch += 1

    def unsay(self):
        """What was said in this epoch did not reach the journal, or may not have: every series has to be defined again
        before its next row, but has been used as lately as before."""
        if self.capacity:
            memset(self.defined, 0, self.capacity * sizeof(uint32_t))

    def undefined(self, bytes body not None):
        """Definitions (``buffer.record``) of the series of ``body`` that the present epoch has not seen; they count as
        seen from now on. Raises ``KeyError`` for a series that is not in the table."""
        cdef const uint8_t* raw = body
        cdef uint32_t n, d
        cdef uint64_t size = <uint64_t> len(body), at
        if size < BODY_COUNTS:
            raise ValueError("body without counts")
        memcpy(&n, raw, 4)
        memcpy(&d, raw + 4, 4)
        at = BODY_COUNTS + ((<uint64_t> n * 4 + 7) & ~<uint64_t> 7) + <uint64_t> n * 24
        if at + <uint64_t> d * 4 > size:
            raise ValueError("body shorter than its counts")
        cdef list found = []
        self.collect(<const uint32_t*> (raw + BODY_COUNTS), n, found)
        self.collect(<const uint32_t*> (raw + at), d, found)
        return b"".join(found)

    cdef int collect(self, const uint32_t* ids, uint32_t count, list found) except -1:
        cdef uint32_t i, series, size, gap
        cdef const uint8_t* blob
        for i in range(count):
            series = ids[i]
            if series >= FIRST_TRANSIENT or (series < self.capacity and self.defined[series] == self.epoch):
                continue
            if series >= self.capacity or self.blobs[series] == NULL:
                raise KeyError(series)
            self.defined[series] = self.epoch
            size = self.blobs[series].size
            gap = ((size + 7) & ~<uint32_t> 7) - size
            blob = <const uint8_t*> (self.blobs[series] + 1)
            found.append((<const uint8_t*> &series)[:4] + (<const uint8_t*> &size)[:4])
            found.append(blob[:size])
            found.append(b"\0" * gap)
        return 0
