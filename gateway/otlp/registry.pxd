"""C view of the registry, and the keyed hash that it is found by."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from gateway.otlp.protobuf cimport load64
from gateway.series cimport SeriesTable

cdef extern from *:
    """
    static inline uint64_t locum_mum(uint64_t a, uint64_t b) {
        unsigned __int128 product = (unsigned __int128)a * b;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    """
    uint64_t locum_mum(uint64_t a, uint64_t b) nogil


cdef struct Hash:
    uint64_t a
    uint64_t b


cdef struct Slot:
    uint64_t a
    uint64_t b
    uint32_t series
    uint32_t count          # ids in a row: 1, or 1 and the quantiles of a summary; 0: the slot is empty


cdef inline void mix(const uint64_t* secret, Hash* h, const uint8_t* data, uint64_t size) noexcept nogil:
    """Take ``size`` bytes, and their number, into the hash."""
    cdef uint64_t left = size, x, y
    cdef uint8_t rest[16]
    while left >= 16:
        x, y = load64(data), load64(data + 8)
        h.a = locum_mum(h.a ^ x, y ^ secret[0])
        h.b = locum_mum(h.b ^ y, x ^ secret[3])
        data += 16
        left -= 16
    memset(rest, 0, 16)
    if left:
        memcpy(rest, data, left)
    x, y = load64(rest), load64(rest + 8) ^ size
    h.a = locum_mum(h.a ^ x ^ secret[3], y ^ secret[0])
    h.b = locum_mum(h.b ^ y ^ secret[1], x ^ secret[2] ^ size)


cdef class Registry:
    cdef readonly SeriesTable table
    cdef readonly object settings
    cdef readonly uint64_t overflowed
    cdef uint32_t max_series, next_series, next_transient
    cdef list free_series
    cdef Slot* slots
    cdef uint64_t mask, filled
    cdef uint64_t secret[4]
    cdef bint strict

    cdef bint fresh(self, Slot* slot) noexcept
    cdef void place(self, Slot slot) noexcept
    cdef Slot* find(self, Hash key) noexcept
    cdef int grow(self) except -1
    cdef uint32_t remember(self, Hash key, list definitions) except? 0xFFFFFFFF
    cdef uint32_t pass_through(self, list definitions, list into) except? 0xFFFFFFFF
