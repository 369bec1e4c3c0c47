"""Reads an ``ExportMetricsServiceRequest`` off the wire: the hot path. A data point of a known series touches no
Python object here.

Rules:

- The bytes are hostile. Every length is checked against what is left before it is used; memory grows with what was
  really read, never with what a length claims; nesting is bounded. What upb would refuse is refused, whole, with the
  offset; parts that are not kept (exemplars, descriptions, metadata) are checked and skipped.
- Merging in protobuf is concatenation: a singular message that comes twice equals the message whose bytes are both,
  one after the other. So a split message is joined first and then read as one.
- A series is looked up by a keyed 128-bit hash over the raw bytes that make it: sender, resource, scope, metric
  header, attributes, bounds. The key is drawn at the start of the process, so nobody outside can aim for a collision.
  Other bytes for the same series (another order of attributes, say) cost another entry, and are the same series in
  every respect: ``Series.key`` is equal.
- A key not seen before goes through ``expand.understand`` once. That call may let other threads in, so nothing is
  held over it: neither a pointer into the registry nor a row half written.

The oracle is ``otlp.plain`` (upb and the same ``expand``): one truth, two readers.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.math cimport isfinite, isnan
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from gateway.series cimport SeriesTable

import os

from google.protobuf.message import DecodeError
from opentelemetry.proto.metrics.v1.metrics_pb2 import ExponentialHistogramDataPoint

from gateway.buffer.record import BAD_MAX, BAD_MIN, BAD_SUM, HAS_MAX, HAS_MIN, HAS_SUM
from gateway.buffer.record import pack_definitions
from gateway.model import MAX_TIME_NS, Batch, Kind, Losses, Reason, Refusal, Signal, Temporality
from gateway.otlp import expand
from gateway.series import TRANSIENT

cdef extern from *:
    """
    static inline uint64_t locum_mum(uint64_t a, uint64_t b) {
        unsigned __int128 product = (unsigned __int128)a * b;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    """
    uint64_t locum_mum(uint64_t a, uint64_t b) nogil

cdef enum:
    VARINT = 0
    FIXED64 = 1
    LEN = 2
    GROUP = 3
    END_GROUP = 4
    FIXED32 = 5
    MAX_DEPTH = 100
    NO_RECORDED_VALUE = 1

# what the parts that are only checked look like
cdef enum Shape:
    OPAQUE
    TEXT
    EXEMPLAR
    KEY_VALUE
    ANY_VALUE
    ARRAY
    KEY_VALUES
    RESOURCE
    ENTITY
    SCOPE
    QUANTILE

cdef enum Loss:
    NO_VALUE
    NOT_FINITE
    NO_NAME
    TIME_RANGE
    BAD_BUCKETS
    BAD_BOUNDS
    BAD_TEMPORALITY
    STALE
    CHANGED_BUCKETS
    CHANGED_TIME
    CHANGED_FINITE
    CHANGED_NO_DATA
    LOSSES

_LEFT_OUT = {
    NO_VALUE: Reason.NO_VALUE,
    NOT_FINITE: Reason.NOT_FINITE,
    NO_NAME: Reason.NO_NAME,
    TIME_RANGE: Reason.TIME_RANGE,
    BAD_BUCKETS: Reason.BAD_BUCKETS,
    BAD_BOUNDS: Reason.BAD_BOUNDS,
    BAD_TEMPORALITY: Reason.BAD_TEMPORALITY,
    STALE: Reason.STALE,
}
_CHANGED = {
    CHANGED_BUCKETS: Reason.BUCKETS_LEFT_OUT,
    CHANGED_TIME: Reason.TIME_ZERO,
    CHANGED_FINITE: Reason.NOT_FINITE,
    CHANGED_NO_DATA: Reason.METRIC_WITHOUT_DATA,
}

cdef uint64_t LAST_NS = MAX_TIME_NS
cdef uint8_t F_SUM = HAS_SUM, F_MIN = HAS_MIN, F_MAX = HAS_MAX
cdef uint8_t F_BAD_SUM = BAD_SUM, F_BAD_MIN = BAD_MIN, F_BAD_MAX = BAD_MAX
cdef uint64_t MAX_BODY_BYTES = 256 << 20


cdef struct Reader:
    const uint8_t* at
    const uint8_t* end


cdef struct Field:
    uint32_t number
    uint32_t wire
    uint64_t value          # of a varint or a fixed value
    const uint8_t* begin    # of the whole field, its tag included
    const uint8_t* data     # of a LEN field's content
    uint64_t size


cdef struct Hash:
    uint64_t a
    uint64_t b


cdef struct Slot:
    uint64_t a
    uint64_t b
    uint32_t series
    uint32_t count          # ids in a row: 1, or 1 and the quantiles of a summary; 0: the slot is empty


cdef struct Bytes:
    const uint8_t* data
    uint64_t size


cdef struct Header:
    Bytes name
    Bytes unit
    uint32_t kind           # field number of the data in Metric: 5, 7, 9, 10, 11
    uint32_t temporality
    bint monotonic


cdef inline uint64_t load64(const uint8_t* at) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, at, 8)
    return value


cdef inline double as_double(uint64_t bits) noexcept nogil:
    cdef double value
    memcpy(&value, &bits, 8)
    return value


cdef inline int read_varint(Reader* r, uint64_t* value) noexcept nogil:
    cdef uint64_t result = 0
    cdef uint32_t shift = 0
    cdef uint8_t byte
    while r.at < r.end and shift < 70:
        byte = r.at[0]
        if shift == 63 and byte > 1:
            return -1
        r.at += 1
        result |= (<uint64_t> (byte & 0x7F)) << shift
        if byte < 0x80:
            value[0] = result
            return 0
        shift += 7
    return -1


cdef int skip_group(Reader* r, uint32_t number, int depth) noexcept nogil:
    """Read over an unknown group up to its end."""
    cdef Field field
    cdef int found
    if depth <= 0:
        return -1
    while True:
        found = read_field(r, &field, depth - 1)
        if found <= 0:
            return -1
        if field.wire == END_GROUP:
            return 0 if field.number == number else -1


cdef int read_field(Reader* r, Field* field, int depth) noexcept nogil:
    """The next field: 1, or 0 at the end, or -1 where the bytes are no field (``r.at`` is near the fault)."""
    cdef uint64_t tag
    if r.at >= r.end:
        return 0
    field.begin = r.at
    if r.at[0] < 0x80:
        tag = r.at[0]
        r.at += 1
    elif read_varint(r, &tag) < 0:
        return -1
    if tag >> 32 or tag < 8:
        return -1
    field.number = <uint32_t> (tag >> 3)
    field.wire = <uint32_t> (tag & 7)
    if field.wire == LEN:
        if r.at < r.end and r.at[0] < 0x80:
            field.size = r.at[0]
            r.at += 1
        elif read_varint(r, &field.size) < 0:
            return -1
        if field.size > <uint64_t> (r.end - r.at):
            return -1
        field.data = r.at
        r.at += field.size
        return 1
    if field.wire == FIXED64:
        if r.end - r.at < 8:
            return -1
        field.value = load64(r.at)
        r.at += 8
        return 1
    if field.wire == VARINT:
        return 1 if read_varint(r, &field.value) == 0 else -1
    if field.wire == FIXED32:
        if r.end - r.at < 4:
            return -1
        r.at += 4
        return 1
    if field.wire == GROUP:
        return 1 if skip_group(r, field.number, depth) == 0 else -1
    return 1 if field.wire == END_GROUP else -1


cdef bint valid_utf8(const uint8_t* at, uint64_t size) noexcept nogil:
    cdef const uint8_t* end = at + size
    cdef uint8_t lead, low, high
    cdef int more
    while at < end:
        if end - at >= 8 and not load64(at) & 0x8080808080808080u:
            at += 8
            continue
        lead = at[0]
        at += 1
        if lead < 0x80:
            continue
        low, high = 0x80, 0xBF
        if 0xC2 <= lead <= 0xDF:
            more = 1
        elif 0xE0 <= lead <= 0xEF:
            more = 2
            if lead == 0xE0:
                low = 0xA0
            elif lead == 0xED:
                high = 0x9F
        elif 0xF0 <= lead <= 0xF4:
            more = 3
            if lead == 0xF0:
                low = 0x90
            elif lead == 0xF4:
                high = 0x8F
        else:
            return False
        while more:
            if at >= end or at[0] < low or at[0] > high:
                return False
            low, high = 0x80, 0xBF
            at += 1
            more -= 1
    return True


cdef inline Shape child(Shape shape, uint32_t number) noexcept nogil:
    """What a LEN field of a checked message holds (opentelemetry-proto)."""
    if shape == EXEMPLAR:
        return KEY_VALUE if number == 7 else OPAQUE
    if shape == KEY_VALUE:
        return TEXT if number == 1 else (ANY_VALUE if number == 2 else OPAQUE)
    if shape == ANY_VALUE:
        return TEXT if number == 1 else (ARRAY if number == 5 else (KEY_VALUES if number == 6 else OPAQUE))
    if shape == ARRAY:
        return ANY_VALUE if number == 1 else OPAQUE
    if shape == KEY_VALUES:
        return KEY_VALUE if number == 1 else OPAQUE
    if shape == RESOURCE:
        return KEY_VALUE if number == 1 else (ENTITY if number == 3 else OPAQUE)
    if shape == ENTITY:
        return TEXT if 1 <= number <= 4 else OPAQUE
    if shape == SCOPE:
        return TEXT if number <= 2 else (KEY_VALUE if number == 3 else OPAQUE)
    return OPAQUE


cdef const uint8_t* check(Shape shape, const uint8_t* data, uint64_t size, int depth) noexcept nogil:
    """NULL if ``data`` is a well-formed message of that shape, else where it is not."""
    cdef Reader r
    cdef Field field
    cdef const uint8_t* fault
    cdef int found
    if shape == OPAQUE:
        return NULL
    if shape == TEXT:
        return NULL if valid_utf8(data, size) else data
    if depth <= 0:
        return data
    r.at, r.end = data, data + size
    while True:
        found = read_field(&r, &field, depth)
        if found == 0:
            return NULL
        if found < 0 or field.wire == END_GROUP:
            return field.begin
        if field.wire == LEN:
            fault = check(child(shape, field.number), field.data, field.size, depth - 1)
            if fault != NULL:
                return fault


cdef class Rows:
    """Columns that grow: what becomes the body of a batch (``buffer.record``)."""

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


cdef class Registry:
    """Series by the bytes that make them, and their definitions (``table``).

    Bounded by ``max_series``: past it, the points of new series still pass, understood anew each time; ``overflowed``
    counts them. ``sweep`` forgets what has not been used for a while.
    """

    cdef readonly SeriesTable table
    cdef readonly object settings
    cdef readonly uint64_t overflowed
    cdef uint32_t max_series, next_series, next_transient
    cdef list free_series
    cdef Slot* slots
    cdef uint64_t mask, filled
    cdef uint64_t secret[4]
    cdef bint strict

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

    def decode(self, bytes body not None, str sender_address, int64_t received_ns):
        """The batch that a serialized ``ExportMetricsServiceRequest`` makes.

        ``sender_address`` becomes the tag ``remote_ip`` (None: no such tag). Raises ``Refusal``: BAD_DATA with the
        offset of the first byte that makes no sense, TOO_LARGE for more rows than memory is granted for.
        """
        return Request(self, body, sender_address, received_ns).read()

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

    cdef Hash start(self) noexcept:
        cdef Hash h
        h.a, h.b = self.secret[1], self.secret[2]
        return h

    cdef inline void mix(self, Hash* h, const uint8_t* data, uint64_t size) noexcept:
        """Take ``size`` bytes, and their number, into the hash."""
        cdef uint64_t left = size, x, y
        cdef uint8_t rest[16]
        while left >= 16:
            x, y = load64(data), load64(data + 8)
            h.a = locum_mum(h.a ^ x, y ^ self.secret[0])
            h.b = locum_mum(h.b ^ y, x ^ self.secret[3])
            data += 16
            left -= 16
        memset(rest, 0, 16)
        if left:
            memcpy(rest, data, left)
        x, y = load64(rest), load64(rest + 8) ^ size
        h.a = locum_mum(h.a ^ x ^ self.secret[3], y ^ self.secret[0])
        h.b = locum_mum(h.b ^ y ^ self.secret[1], x ^ self.secret[2] ^ size)


cdef class Request:
    """One request while it is being read."""

    cdef Registry registry
    cdef bytes raw
    cdef const uint8_t* base
    cdef str sender_address
    cdef int64_t received_ns
    cdef Rows rows
    cdef object losses
    cdef list kept              # bytes that were joined and must live as long as the request
    cdef list definitions       # of series that the registry has no room for
    cdef uint64_t lost[LOSSES]
    cdef list lost_in           # a metric's name for each kind of loss
    cdef Bytes resource, scope
    cdef bint has_scope
    cdef Header header
    cdef Hash sender_hash, scope_hash, header_hash
    cdef uint64_t left_out

    def __init__(self, Registry registry, bytes raw, str sender_address, int64_t received_ns):
        self.registry = registry
        self.raw = raw
        self.base = raw
        self.sender_address = sender_address
        self.received_ns = received_ns
        self.rows = Rows()
        self.losses = Losses()
        self.kept = []
        self.definitions = []
        self.lost_in = [None] * LOSSES

    cdef int malformed(self, const uint8_t* at, str why="not a well-formed protobuf field") except -1:
        cdef const uint8_t* base = self.base
        offset = f"at offset {at - base} of {len(self.raw)}"
        if at < base or at > base + len(self.raw):
            offset = "in a part that was sent in pieces"
        raise Refusal(Reason.BAD_DATA, f"metrics request: {why} {offset}")

    cdef inline int next(self, Reader* r, Field* field, int depth) except -1:
        """1 and the next field, or 0 at the end. A stray end-group is malformed."""
        cdef int found = read_field(r, field, depth)
        if found < 0 or (found and field.wire == END_GROUP):
            self.malformed(field.begin)
        return found

    cdef int checked(self, Shape shape, const uint8_t* data, uint64_t size, int depth) except -1:
        cdef const uint8_t* fault = check(shape, data, size, depth)
        if fault != NULL:
            self.malformed(fault, "malformed content, or text that is not UTF-8,")
        return 0

    cdef Bytes join(self, Bytes before, const uint8_t* data, uint64_t size):
        """``before`` with more bytes behind it."""
        cdef Bytes both
        joined = before.data[: before.size] + data[:size]
        self.kept.append(joined)
        both.data = joined
        both.size = <uint64_t> len(joined)
        return both

    cdef int merge(self, Bytes* into, Field* field) except -1:
        """Merge a singular message that may come more than once."""
        if into.data == NULL:
            into.data, into.size = field.data, field.size
        else:
            into[0] = self.join(into[0], field.data, field.size)
        return 0

    def read(self):
        cdef Reader r
        cdef Field field
        cdef Registry registry = self.registry
        cdef int loss
        sender = (self.sender_address or "").encode()
        self.sender_hash = registry.start()
        registry.mix(&self.sender_hash, sender, <uint64_t> len(sender))
        r.at, r.end = self.base, self.base + len(self.raw)
        while self.next(&r, &field, MAX_DEPTH):
            if field.number == 1 and field.wire == LEN:
                self.resource_metrics(field.data, field.size)
        for loss in range(LOSSES):
            if not self.lost[loss]:
                continue
            name = self.lost_in[loss]
            if loss in _LEFT_OUT:
                self.losses.leave_out(_LEFT_OUT[loss], name, self.lost[loss])
            else:
                self.losses.change(_CHANGED[loss], name, self.lost[loss])
        points = self.rows.n + self.rows.d
        return Batch(
            Signal.METRICS, self.received_ns, self.rows.body(), points, self.losses, pack_definitions(self.definitions)
        )

    cdef int resource_metrics(self, const uint8_t* data, uint64_t size) except -1:
        cdef Reader r
        cdef Field field
        cdef Bytes resource
        cdef Hash h = self.sender_hash
        resource.data, resource.size = NULL, 0
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 1):
            if field.wire == LEN and field.number == 1:
                self.merge(&resource, &field)
            elif field.wire == LEN and field.number == 3:
                self.checked(TEXT, field.data, field.size, MAX_DEPTH - 2)
        self.checked(RESOURCE, resource.data, resource.size, MAX_DEPTH - 2)
        self.resource = resource
        self.registry.mix(&h, resource.data, resource.size)
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 1):
            if field.wire == LEN and field.number == 2:
                self.scope_metrics(field.data, field.size, h)
        return 0

    cdef int scope_metrics(self, const uint8_t* data, uint64_t size, Hash h) except -1:
        cdef Reader r
        cdef Field field
        cdef Bytes scope
        cdef uint8_t has_scope
        scope.data, scope.size = NULL, 0
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 2):
            if field.wire == LEN and field.number == 1:
                self.merge(&scope, &field)
            elif field.wire == LEN and field.number == 3:
                self.checked(TEXT, field.data, field.size, MAX_DEPTH - 3)
        self.checked(SCOPE, scope.data, scope.size, MAX_DEPTH - 3)
        self.scope = scope
        has_scope = self.has_scope = scope.data != NULL
        self.registry.mix(&h, &has_scope, 1)
        self.registry.mix(&h, scope.data, scope.size)
        self.scope_hash = h
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 2):
            if field.wire == LEN and field.number == 2:
                self.metric(field.data, field.size)
        return 0

    cdef int metric(self, const uint8_t* data, uint64_t size) except -1:
        """Name, unit and the one kind of data of a metric; then its points."""
        cdef Reader r
        cdef Field field
        cdef Bytes content
        cdef Header header
        cdef Hash h = self.scope_hash
        cdef uint64_t packed
        memset(&header, 0, sizeof(Header))
        content.data, content.size = NULL, 0
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 3):
            if field.wire != LEN:
                continue
            if field.number == 1 or field.number == 3 or field.number == 2:
                self.checked(TEXT, field.data, field.size, MAX_DEPTH - 4)
                if field.number == 1:
                    header.name.data, header.name.size = field.data, field.size
                elif field.number == 3:
                    header.unit.data, header.unit.size = field.data, field.size
            elif field.number == 5 or field.number == 7 or 9 <= field.number <= 11:
                if field.number != header.kind:
                    if content.data != NULL:    # the last of a oneof wins, and what it replaces is still checked
                        self.points(content, header, True)
                    header.kind = field.number
                    content.data, content.size = field.data, field.size
                else:
                    self.merge(&content, &field)
            elif field.number == 12:
                self.checked(KEY_VALUE, field.data, field.size, MAX_DEPTH - 4)
        self.header = header
        if header.kind == 0:
            self.lose(CHANGED_NO_DATA)
            return 0
        self.points(content, header, False)
        return 0

    cdef int points(self, Bytes content, Header header, bint only_check) except -1:
        """The points of a gauge, sum, histogram, exponential histogram or summary."""
        cdef Reader r
        cdef Field field
        cdef Hash h = self.scope_hash
        cdef Rows rows = self.rows
        cdef uint32_t kind = header.kind
        cdef uint64_t packed
        r.at, r.end = content.data, content.data + content.size
        while self.next(&r, &field, MAX_DEPTH - 4):
            if field.wire == VARINT and field.number == 2 and kind != 5 and kind != 11:
                header.temporality = <uint32_t> field.value
            elif field.wire == VARINT and field.number == 3 and kind == 7:
                header.monotonic = field.value != 0
        # an unknown temporality is refused in strict, and as good as none otherwise
        packed = kind | (<uint64_t> header.monotonic << 8) | (<uint64_t> header.temporality << 32)
        self.registry.mix(&h, header.name.data, header.name.size)
        self.registry.mix(&h, header.unit.data, header.unit.size)
        self.registry.mix(&h, <const uint8_t*> &packed, 8)
        self.header, self.header_hash = header, h
        r.at, r.end = content.data, content.data + content.size
        while self.next(&r, &field, MAX_DEPTH - 4):
            if field.wire != LEN or field.number != 1:
                continue
            if only_check:
                self.check_point(field.data, field.size)
            elif kind == 5 or kind == 7:
                self.number_point(field.data, field.size)
            elif kind == 9:
                self.histogram_point(field.data, field.size)
            elif kind == 10:
                self.exponential_point(field.data, field.size)
            else:
                self.summary_point(field.data, field.size)
            if rows.size() > MAX_BODY_BYTES:
                raise Refusal(
                    Reason.TOO_LARGE,
                    f"metrics request: its data points take more than {MAX_BODY_BYTES} bytes; send fewer a request",
                )
        return 0

    cdef int lose(self, int loss) except -1:
        """Count a loss; keep the metric's name as its example."""
        self.lost[loss] += 1
        if self.lost_in[loss] is None:
            name = self.header.name.data[: min(self.header.name.size, 256)] if self.header.name.size else b""
            self.lost_in[loss] = name.decode("utf-8", "replace") or "(no name)"
        return 0

    cdef int lose_point(self, int loss, const uint8_t* data, uint64_t size) except -1:
        """Leave a point out. Nobody will look at its attributes, so they are checked here."""
        self.lose(loss)
        return self.check_point(data, size)

    cdef int check_point(self, const uint8_t* data, uint64_t size) except -1:
        """Refuse the request if a point that is not kept is malformed inside."""
        cdef Reader r
        cdef Field field
        cdef uint32_t kind = self.header.kind
        cdef uint32_t attributes = 7 if kind == 5 or kind == 7 or kind == 11 else (9 if kind == 9 else 1)
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN and field.number == attributes:
                self.checked(KEY_VALUE, field.data, field.size, MAX_DEPTH - 6)
            elif field.wire == LEN:
                self.check_part(&field)
        return 0

    cdef int check_part(self, Field* field) except -1:
        """Check a LEN field of a data point that is no attribute."""
        cdef uint32_t kind = self.header.kind, number = field.number
        if (number == 5 and (kind == 5 or kind == 7)) or (number == 8 and kind == 9) or (number == 11 and kind == 10):
            self.checked(EXEMPLAR, field.data, field.size, MAX_DEPTH - 6)
        elif number == 6 and kind == 11:
            self.checked(QUANTILE, field.data, field.size, MAX_DEPTH - 6)
        elif (number == 6 or number == 7) and kind == 9 and field.size % 8:
            self.malformed(field.begin, "packed values that are no multiple of 8 bytes")
        return 0

    cdef int time_of(self, uint64_t time, int64_t* time_ns) except -1:
        """The time of a point in ``time_ns``: 1, or 0 where it is out of range. A time of 0 is the receive time."""
        if time == 0:
            time_ns[0] = self.received_ns
            self.lose(CHANGED_TIME)
            return 1
        if time > LAST_NS:
            return 0
        time_ns[0] = <int64_t> time
        return 1

    cdef bint unusable(self, int* loss) noexcept:
        """Whether no point of this metric can be kept, and why."""
        cdef uint32_t kind = self.header.kind
        if self.header.name.size == 0:
            loss[0] = NO_NAME
            return True
        if self.registry.strict and kind != 5 and kind != 11:
            if self.header.temporality != 1 and self.header.temporality != 2:
                loss[0] = BAD_TEMPORALITY
                return True
        return False

    cdef Bytes attributes_of(self, const uint8_t* data, uint64_t size, uint32_t number):
        """The attributes of a point whose attribute fields do not lie together, one after the other."""
        cdef Reader r
        cdef Field field
        cdef Bytes found
        cdef list parts = []
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN and field.number == number:
                parts.append(field.begin[: r.at - field.begin])
        joined = b"".join(parts)
        self.kept.append(joined)
        found.data, found.size = joined, <uint64_t> len(joined)
        return found

    cdef uint32_t series_of(
        self, Bytes attributes, int kind, uint64_t bounds_at, uint32_t bounds_n, list quantiles, const uint8_t* point
    ) except? 0xFFFFFFFF:
        """The id of the series of a point (the first of a summary's). Bounds lie in ``rows.bounds``."""
        cdef Registry registry = self.registry
        cdef Hash h = self.header_hash
        cdef uint64_t tail = <uint64_t> kind
        cdef Slot* slot
        cdef uint32_t j
        registry.mix(&h, attributes.data, attributes.size)
        if bounds_n:
            registry.mix(&h, <const uint8_t*> (self.rows.bounds + bounds_at), <uint64_t> bounds_n * 8)
        if quantiles:
            packed = repr(quantiles).encode()
            registry.mix(&h, packed, <uint64_t> len(packed))
        h.a = locum_mum(h.a ^ tail, registry.secret[1])
        h.b = locum_mum(h.b ^ registry.secret[2], tail ^ registry.secret[0])
        slot = registry.find(h)
        if slot != NULL:
            for j in range(slot.count):
                registry.table.used[slot.series + j] = registry.table.epoch
            return slot.series
        return self.understand(h, attributes, kind, bounds_at, bounds_n, quantiles, point)

    cdef uint32_t understand(
        self, Hash key, Bytes attributes, int kind, uint64_t bounds_at, uint32_t bounds_n, list quantiles,
        const uint8_t* point,
    ) except? 0xFFFFFFFF:
        """The slow way, once a series."""
        cdef Registry registry = self.registry
        cdef Header header = self.header
        cdef uint32_t first, i
        bounds = tuple([as_double(self.rows.bounds[bounds_at + i]) for i in range(bounds_n)])
        temporality = header.temporality if header.temporality <= 2 else 0
        try:
            family = expand.understand(
                expand.MetricHeader(
                    text_of(header.name), text_of(header.unit), DATA[header.kind],
                    Temporality(temporality), header.monotonic,
                ),
                bytes_of(self.resource),
                bytes_of(self.scope) if self.has_scope else None,
                bytes_of(attributes),
                Kind(kind),
                bounds,
                tuple(quantiles or ()),
                self.sender_address,
                registry.settings,
                self.losses,
            )
        except (DecodeError, UnicodeDecodeError) as error:
            self.malformed(point, f"attributes that cannot be read ({error}) in the data point")
        definitions = [series.pack() for series in family]
        if registry.filled < registry.max_series:
            return registry.remember(key, definitions)
        registry.overflowed += 1
        first = <uint32_t> TRANSIENT + registry.next_transient
        registry.next_transient = (registry.next_transient + <uint32_t> len(definitions)) & 0x3FFFFFFF
        self.definitions.extend((first + i, definition) for i, definition in enumerate(definitions))
        return first

    cdef int number_point(self, const uint8_t* data, uint64_t size) except -1:
        """A NumberDataPoint: a gauge's or a sum's."""
        cdef Reader r
        cdef Field field
        cdef uint64_t bits = 0, time = 0, start = 0
        cdef uint32_t flags = 0
        cdef int kind = 0       # 0: no value; else Kind.DOUBLE or Kind.INT
        cdef const uint8_t* last = NULL
        cdef Bytes attributes
        cdef bint scattered = False
        cdef int64_t time_ns = 0
        cdef int loss = NO_VALUE
        attributes.data, attributes.size = NULL, 0
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN:
                if field.number == 7:
                    if attributes.data == NULL:
                        attributes.data = field.begin
                    elif field.begin != last:
                        scattered = True
                    last = r.at
                elif field.number == 5:
                    self.check_part(&field)
            elif field.wire == FIXED64:
                if field.number == 3:
                    time = field.value
                elif field.number == 4:
                    bits, kind = field.value, 1
                elif field.number == 6:
                    bits, kind = field.value, 2
                elif field.number == 2:
                    start = field.value
            elif field.wire == VARINT and field.number == 8:
                flags = <uint32_t> field.value
        if self.unusable(&loss):
            return self.lose_point(loss, data, size)
        if flags & NO_RECORDED_VALUE and (kind == 0 or self.registry.strict):
            return self.lose_point(STALE, data, size)
        if kind == 0:
            return self.lose_point(NO_VALUE, data, size)
        if kind == 1 and not isfinite(as_double(bits)):
            return self.lose_point(NOT_FINITE, data, size)
        if not self.time_of(time, &time_ns):
            return self.lose_point(TIME_RANGE, data, size)
        if scattered:
            attributes = self.attributes_of(data, size, 7)
        else:
            attributes.size = <uint64_t> (last - attributes.data)
        series = self.series_of(attributes, kind, 0, 0, None, data)
        self.rows.number(series, time_ns, <int64_t> start if start <= LAST_NS else 0, bits)
        return 0

    cdef int histogram_point(self, const uint8_t* data, uint64_t size) except -1:
        """A HistogramDataPoint: one row, its counts behind the other rows' buckets."""
        cdef Reader r
        cdef Field field
        cdef Rows rows = self.rows
        cdef uint64_t time = 0, start = 0, count = 0, total = 0, low = 0, high = 0
        cdef uint32_t flags = 0, buckets_at = rows.buckets_n, bounds_at = rows.bounds_n, n_buckets, n_bounds
        cdef uint8_t has = 0
        cdef const uint8_t* last = NULL
        cdef Bytes attributes
        cdef bint scattered = False, rising
        cdef int64_t time_ns = 0
        cdef int loss = NO_VALUE
        attributes.data, attributes.size = NULL, 0
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN:
                if field.number == 9:
                    if attributes.data == NULL:
                        attributes.data = field.begin
                    elif field.begin != last:
                        scattered = True
                    last = r.at
                elif field.number == 6 or field.number == 7 or field.number == 8:
                    self.check_part(&field)
                    if field.number == 6:
                        rows.add_buckets(field.data, field.size)
                    elif field.number == 7:
                        rows.add_bounds(field.data, field.size)
            elif field.wire == FIXED64:
                if field.number == 2:
                    start = field.value
                elif field.number == 3:
                    time = field.value
                elif field.number == 4:
                    count = field.value
                elif field.number == 5:
                    total, has = field.value, has | F_SUM
                elif field.number == 6:
                    rows.add_buckets(<const uint8_t*> &field.value, 8)
                elif field.number == 7:
                    rows.add_bounds(<const uint8_t*> &field.value, 8)
                elif field.number == 11:
                    low, has = field.value, has | F_MIN
                elif field.number == 12:
                    high, has = field.value, has | F_MAX
            elif field.wire == VARINT and field.number == 10:
                flags = <uint32_t> field.value
        n_buckets, n_bounds = rows.buckets_n - buckets_at, rows.bounds_n - bounds_at
        rows.buckets_n, rows.bounds_n = buckets_at, bounds_at     # until the point is known to stay
        if self.unusable(&loss):
            return self.lose_point(loss, data, size)
        if flags & NO_RECORDED_VALUE and self.registry.strict:
            return self.lose_point(STALE, data, size)
        rising = True
        for i in range(n_bounds):
            if isnan(as_double(rows.bounds[bounds_at + i])):
                return self.lose_point(BAD_BOUNDS, data, size)
            if i and not as_double(rows.bounds[bounds_at + i]) > as_double(rows.bounds[bounds_at + i - 1]):
                rising = False
        if not self.time_of(time, &time_ns):
            return self.lose_point(TIME_RANGE, data, size)
        if n_buckets != n_bounds + 1 and (n_buckets or n_bounds):
            if self.registry.strict:
                return self.lose_point(BAD_BUCKETS, data, size)
            self.lose(CHANGED_BUCKETS)
            n_buckets = n_bounds = 0
        if not rising and self.registry.strict:
            return self.lose_point(BAD_BOUNDS, data, size)
        if scattered:
            attributes = self.attributes_of(data, size, 9)
        else:
            attributes.size = <uint64_t> (last - attributes.data)
        series = self.series_of(attributes, 3, bounds_at, n_bounds, None, data)
        rows.buckets_n = buckets_at + n_buckets
        self.distribution_row(series, has, n_buckets, 0, time_ns, start, count, total, low, high)
        return 0

    cdef int distribution_row(
        self, uint32_t series, uint8_t has, uint32_t n_buckets, uint32_t n_bounds, int64_t time_ns, uint64_t start,
        uint64_t count, uint64_t total, uint64_t low, uint64_t high,
    ) except -1:
        cdef Rows rows = self.rows
        cdef uint32_t d
        if has & F_SUM and not isfinite(as_double(total)):
            has, total = has ^ F_SUM ^ F_BAD_SUM, 0
            self.lose(CHANGED_FINITE)
        if has & F_MIN and not isfinite(as_double(low)):
            has, low = has ^ F_MIN ^ F_BAD_MIN, 0
            self.lose(CHANGED_FINITE)
        if has & F_MAX and not isfinite(as_double(high)):
            has, high = has ^ F_MAX ^ F_BAD_MAX, 0
            self.lose(CHANGED_FINITE)
        rows.distribution()
        d = rows.d
        rows.d_series[d] = series
        rows.d_flags[d] = has
        rows.d_buckets[d] = n_buckets
        rows.d_bounds[d] = n_bounds
        rows.d_time[d] = time_ns
        rows.d_start[d] = <int64_t> start if start <= LAST_NS else 0
        rows.d_count[d] = count
        rows.d_sum[d] = as_double(total)
        rows.d_min[d] = as_double(low)
        rows.d_max[d] = as_double(high)
        rows.d = d + 1
        return 0

    cdef int exponential_point(self, const uint8_t* data, uint64_t size) except -1:
        """An ExponentialHistogramDataPoint. Its buckets are spelled out in Python: their bounds move from point to
        point, so there is little to remember."""
        cdef Reader r
        cdef Field field
        cdef Rows rows = self.rows
        cdef uint64_t time = 0, start = 0, count = 0, total = 0, low = 0, high = 0, value
        cdef uint32_t flags = 0, series
        cdef uint8_t has = 0
        cdef const uint8_t* last = NULL
        cdef Bytes attributes
        cdef bint scattered = False
        cdef int64_t time_ns = 0
        cdef double bound
        cdef int loss = NO_VALUE
        attributes.data, attributes.size = NULL, 0
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN:
                if field.number == 1:
                    if attributes.data == NULL:
                        attributes.data = field.begin
                    elif field.begin != last:
                        scattered = True
                    last = r.at
                elif field.number == 11:
                    self.check_part(&field)
            elif field.wire == FIXED64:
                if field.number == 2:
                    start = field.value
                elif field.number == 3:
                    time = field.value
                elif field.number == 4:
                    count = field.value
                elif field.number == 5:
                    total, has = field.value, has | F_SUM
                elif field.number == 12:
                    low, has = field.value, has | F_MIN
                elif field.number == 13:
                    high, has = field.value, has | F_MAX
            elif field.wire == VARINT and field.number == 10:
                flags = <uint32_t> field.value
        try:
            point = ExponentialHistogramDataPoint.FromString(data[:size])
        except DecodeError:
            self.malformed(data, "an exponential histogram that cannot be read")
        if self.unusable(&loss):
            return self.lose(loss)
        if flags & NO_RECORDED_VALUE and self.registry.strict:
            return self.lose(STALE)
        if not self.time_of(time, &time_ns):
            return self.lose(TIME_RANGE)
        spelled = expand.exponential_buckets(point)
        if spelled is None:
            self.lose(CHANGED_BUCKETS)
            spelled = ((), ())
        bounds, counts = spelled
        if scattered:
            attributes = self.attributes_of(data, size, 1)
        else:
            attributes.size = <uint64_t> (last - attributes.data)
        series = self.series_of(attributes, 4, 0, 0, None, data)
        for value in counts:
            rows.add_buckets(<const uint8_t*> &value, 8)
        for bound in bounds:
            rows.add_bounds(<const uint8_t*> &bound, 8)
        self.distribution_row(
            series, has, <uint32_t> len(counts), <uint32_t> len(bounds), time_ns, start, count, total, low, high
        )
        return 0

    cdef int summary_point(self, const uint8_t* data, uint64_t size) except -1:
        """A SummaryDataPoint: one row for count and sum, and a number for each quantile."""
        cdef Reader r, inner
        cdef Field field, part
        cdef uint64_t time = 0, start = 0, count = 0, total = 0, quantile, value
        cdef uint32_t flags = 0, series, i
        cdef const uint8_t* last = NULL
        cdef Bytes attributes
        cdef bint scattered = False
        cdef int64_t time_ns = 0
        cdef list quantiles = [], values = []
        cdef int loss = NO_VALUE
        attributes.data, attributes.size = NULL, 0
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN:
                if field.number == 7:
                    if attributes.data == NULL:
                        attributes.data = field.begin
                    elif field.begin != last:
                        scattered = True
                    last = r.at
                elif field.number == 6:
                    quantile = value = 0
                    inner.at, inner.end = field.data, field.data + field.size
                    while self.next(&inner, &part, MAX_DEPTH - 6):
                        if part.wire == FIXED64 and part.number == 1:
                            quantile = part.value
                        elif part.wire == FIXED64 and part.number == 2:
                            value = part.value
                    quantiles.append(as_double(quantile))
                    values.append(value)
            elif field.wire == FIXED64:
                if field.number == 2:
                    start = field.value
                elif field.number == 3:
                    time = field.value
                elif field.number == 4:
                    count = field.value
                elif field.number == 5:
                    total = field.value
            elif field.wire == VARINT and field.number == 8:
                flags = <uint32_t> field.value
        if self.unusable(&loss):
            return self.lose_point(loss, data, size)
        if flags & NO_RECORDED_VALUE and self.registry.strict:
            return self.lose_point(STALE, data, size)
        if not self.time_of(time, &time_ns):
            return self.lose_point(TIME_RANGE, data, size)
        if scattered:
            attributes = self.attributes_of(data, size, 7)
        else:
            attributes.size = <uint64_t> (last - attributes.data)
        series = self.series_of(attributes, 5, 0, 0, quantiles, data)
        self.distribution_row(series, F_SUM, 0, 0, time_ns, start, count, total, 0, 0)
        for i in range(<uint32_t> len(values)):
            value = values[i]
            if isfinite(as_double(value)):
                self.rows.number(series + 1 + i, time_ns, <int64_t> start if start <= LAST_NS else 0, value)
            else:
                self.lose(CHANGED_FINITE)
        return 0


DATA = {5: "gauge", 7: "sum", 9: "histogram", 10: "exponential", 11: "summary"}


cdef bytes bytes_of(Bytes part):
    return part.data[: part.size] if part.size else b""


cdef str text_of(Bytes part):
    return bytes_of(part).decode()
