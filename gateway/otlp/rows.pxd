"""C view of the columns that a request fills."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef class Rows:
    cdef uint32_t n, n_room
    cdef uint32_t* series
    cdef int64_t* time
    cdef int64_t* start
    cdef uint64_t* bits

    cdef uint32_t d, d_room
    cdef uint32_t* d_series
    cdef uint8_t* d_flags
    cdef uint32_t* d_buckets
    cdef uint32_t* d_bounds
    cdef int64_t* d_time
    cdef int64_t* d_start
    cdef uint64_t* d_count
    cdef double* d_sum
    cdef double* d_min
    cdef double* d_max

    cdef uint32_t buckets_n, buckets_room
    cdef uint64_t* buckets
    cdef uint32_t bounds_n, bounds_room
    cdef uint64_t* bounds

    cdef int number(self, uint32_t series, int64_t time, int64_t start, uint64_t bits) except -1
    cdef int distribution(self) except -1
    cdef int add_buckets(self, const uint8_t* data, uint64_t size) except -1
    cdef int add_bounds(self, const uint8_t* data, uint64_t size) except -1
    cdef uint64_t size(self) noexcept
    cdef bytes body(self)
