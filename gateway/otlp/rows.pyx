"""Columns that grow while a request is read, and become the body of its batch (``buffer.record`` has the layout)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset


cdef class Rows:
    """Rows of numbers and of distributions, column by column. Memory grows with rows that were read, never ahead."""

    def __dealloc__(self):
        free(self.series)
        free(self.time)
        free(self.start)
        free(self.bits)
        free(self.d_series)
        free(self.d_flags)
        free(self.d_buckets)
        free(self.d_bounds)
        free(self.d_time)
        free(self.d_start)
        free(self.d_count)
        free(self.d_sum)
        free(self.d_min)
        free(self.d_max)
        free(self.buckets)
        free(self.bounds)

    cdef int number(self, uint32_t series, int64_t time, int64_t start, uint64_t bits) except -1:
        """One row of the numbers."""
        cdef uint32_t n = self.n
        if n == self.n_room:
            self.n_room = 256 if n == 0 else n * 2
            self.series = <uint32_t*> grown(self.series, self.n_room, 4)
            self.time = <int64_t*> grown(self.time, self.n_room, 8)
            self.start = <int64_t*> grown(self.start, self.n_room, 8)
            self.bits = <uint64_t*> grown(self.bits, self.n_room, 8)
        self.series[n] = series
        self.time[n] = time
        self.start[n] = start
        self.bits[n] = bits
        self.n = n + 1
        return 0

    cdef int distribution(self) except -1:
        """Room for one more row of the distributions; the caller fills it at ``d`` and counts it."""
        if self.d < self.d_room:
            return 0
        self.d_room = 64 if self.d == 0 else self.d * 2
        self.d_series = <uint32_t*> grown(self.d_series, self.d_room, 4)
        self.d_flags = <uint8_t*> grown(self.d_flags, self.d_room, 1)
        self.d_buckets = <uint32_t*> grown(self.d_buckets, self.d_room, 4)
        self.d_bounds = <uint32_t*> grown(self.d_bounds, self.d_room, 4)
        self.d_time = <int64_t*> grown(self.d_time, self.d_room, 8)
        self.d_start = <int64_t*> grown(self.d_start, self.d_room, 8)
        self.d_count = <uint64_t*> grown(self.d_count, self.d_room, 8)
        self.d_sum = <double*> grown(self.d_sum, self.d_room, 8)
        self.d_min = <double*> grown(self.d_min, self.d_room, 8)
        self.d_max = <double*> grown(self.d_max, self.d_room, 8)
        return 0

    cdef int add_buckets(self, const uint8_t* data, uint64_t size) except -1:
        """``size`` bytes of fixed64 values behind the buckets."""
        cdef uint32_t count = <uint32_t> (size // 8)
        while self.buckets_n + count > self.buckets_room:
            self.buckets_room = 512 if self.buckets_room == 0 else self.buckets_room * 2
            self.buckets = <uint64_t*> grown(self.buckets, self.buckets_room, 8)
        memcpy(self.buckets + self.buckets_n, data, size)
        self.buckets_n += count
        return 0

    cdef int add_bounds(self, const uint8_t* data, uint64_t size) except -1:
        """``size`` bytes of doubles behind the bounds."""
        cdef uint32_t count = <uint32_t> (size // 8)
        while self.bounds_n + count > self.bounds_room:
            self.bounds_room = 512 if self.bounds_room == 0 else self.bounds_room * 2
            self.bounds = <uint64_t*> grown(self.bounds, self.bounds_room, 8)
        memcpy(self.bounds + self.bounds_n, data, size)
        self.bounds_n += count
        return 0

    cdef uint64_t size(self) noexcept:
        return 64 + <uint64_t> self.n * 28 + <uint64_t> self.d * 61 + (<uint64_t> self.buckets_n + self.bounds_n) * 8

    cdef bytes body(self):
        """All of it in the layout of ``buffer.record``."""
        cdef uint32_t counts[6]
        cdef uint64_t n = self.n, d = self.d
        cdef uint64_t total = (
            24 + pad8(n * 4) + n * 24 + pad8(d * 4) * 3 + pad8(d) + d * 48
            + <uint64_t> self.buckets_n * 8 + <uint64_t> self.bounds_n * 8
        )
        body = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> total)
        cdef uint8_t* at = <uint8_t*> PyBytes_AS_STRING(body)
        counts[0], counts[1], counts[2], counts[3] = self.n, self.d, self.buckets_n, self.bounds_n
        counts[4] = counts[5] = 0
        at = put_column(at, counts, 24)
        at = put_column(at, self.series, n * 4)
        at = put_column(at, self.time, n * 8)
        at = put_column(at, self.start, n * 8)
        at = put_column(at, self.bits, n * 8)
        at = put_column(at, self.d_series, d * 4)
        at = put_column(at, self.d_flags, d)
        at = put_column(at, self.d_buckets, d * 4)
        at = put_column(at, self.d_bounds, d * 4)
        at = put_column(at, self.d_time, d * 8)
        at = put_column(at, self.d_start, d * 8)
        at = put_column(at, self.d_count, d * 8)
        at = put_column(at, self.d_sum, d * 8)
        at = put_column(at, self.d_min, d * 8)
        at = put_column(at, self.d_max, d * 8)
        at = put_column(at, self.buckets, <uint64_t> self.buckets_n * 8)
        put_column(at, self.bounds, <uint64_t> self.bounds_n * 8)
        return body


cdef inline uint64_t pad8(uint64_t size) noexcept nogil:
    return (size + 7) & ~<uint64_t> 7


cdef inline uint8_t* put_column(uint8_t* at, const void* column, uint64_t size) noexcept nogil:
    if size:
        memcpy(at, column, size)
    memset(at + size, 0, pad8(size) - size)
    return at + pad8(size)


cdef void* grown(void* column, uint64_t room, uint64_t width) except NULL:
    column = realloc(column, room * width)
    if column == NULL:
        raise MemoryError()
    return column
