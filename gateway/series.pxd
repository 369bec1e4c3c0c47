"""C view of a series' definition (``model.Series.pack``) and of the table that holds them."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef packed struct Definition:
    uint64_t key
    uint8_t kind
    uint8_t temporality
    uint8_t monotonic
    uint8_t reserved
    uint32_t head_size
    uint16_t field_size
    uint16_t unit_size
    uint32_t bounds_count
    # then head, field, unit, bounds (float64)


cdef struct Blob:
    uint32_t references
    uint32_t size
    # then the definition


cdef class SeriesTable:
    cdef Blob** blobs
    cdef uint32_t* used
    cdef uint32_t* defined
    cdef uint32_t capacity
    cdef readonly uint32_t count
    cdef readonly uint64_t size_bytes
    cdef readonly uint32_t epoch

    cdef int reserve(self, uint32_t series) except -1
    cdef void clear(self, uint32_t series) noexcept
    cdef const Definition* get(self, uint32_t series) noexcept
    cdef int put(self, uint32_t series, const uint8_t* definition, uint32_t size) except -1
    cdef int collect(self, const uint32_t* ids, uint32_t count, list found) except -1
