"""Spells records out into the points that leave: the hot path of the way out. No Python object a point.

Theory: every point of a series begins with the same bytes, its *head* (measurement and tags), which its definition
carries already encoded. So a number is its head copied, one field, one time. A histogram row is its head copied once
for min, max, count and sum, and once a bucket with a tag ``le`` behind it; the ``le`` fields of a set of bounds are
encoded once and shared by all series that have these bounds.

Bodies are ``PBPoints{repeated PBPoint arr = 1}`` (com.guance.Point), cut so that none is larger than it may be.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, _PyBytes_Resize
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from gateway.series cimport Definition, SeriesTable

from gateway.buffer.record import BAD_MAX, BAD_MIN, BAD_SUM, HAS_MAX, HAS_MIN, HAS_SUM
from gateway.model import Kind, Series, varint
from gateway.otlp.expand import decimal_text
from gateway.series import TRANSIENT

cdef uint8_t F_SUM = HAS_SUM, F_MIN = HAS_MIN, F_MAX = HAS_MAX
cdef uint8_t F_BAD_SUM = BAD_SUM, F_BAD_MIN = BAD_MIN, F_BAD_MAX = BAD_MAX
cdef uint8_t DOUBLE = Kind.DOUBLE, INT = Kind.INT, EXPONENTIAL = Kind.EXPONENTIAL, SUMMARY = Kind.SUMMARY
cdef uint32_t FIRST_TRANSIENT = TRANSIENT
cdef uint32_t MAX_LE_SETS = 65536

cdef enum:
    BODY_COUNTS = 24
    INT_TAG = 0x10       # Field.i = 2, varint
    UINT_TAG = 0x18      # Field.u = 3, varint
    DOUBLE_TAG = 0x21    # Field.f = 4, fixed64


cdef inline uint32_t varint_size(uint64_t value) noexcept nogil:
    cdef uint32_t size = 1
    while value > 0x7F:
        value >>= 7
        size += 1
    return size


cdef inline uint8_t* put_varint(uint8_t* at, uint64_t value) noexcept nogil:
    while value > 0x7F:
        at[0] = <uint8_t> (value | 0x80)
        value >>= 7
        at += 1
    at[0] = <uint8_t> value
    return at + 1


cdef inline uint8_t* put(uint8_t* at, const void* data, uint64_t size) noexcept nogil:
    memcpy(at, data, size)
    return at + size


cdef struct Key:    # a field's name: the metric's, and what is behind it
    const uint8_t* name
    uint32_t name_size
    const char* suffix
    uint32_t suffix_size


cdef inline uint32_t field_size(Key* key, uint8_t tag, uint64_t value) noexcept nogil:
    """Bytes of a Field message's content."""
    cdef uint32_t name = key.name_size + key.suffix_size
    return 1 + varint_size(name) + name + 1 + (8 if tag == DOUBLE_TAG else varint_size(value))


cdef inline uint8_t* put_field(uint8_t* at, Key* key, uint8_t tag, uint64_t value) noexcept nogil:
    at[0] = 0x12
    at = put_varint(at + 1, field_size(key, tag, value))
    at[0] = 0x0A
    at = put_varint(at + 1, key.name_size + key.suffix_size)
    at = put(at, key.name, key.name_size)
    at = put(at, key.suffix, key.suffix_size)
    at[0] = tag
    if tag == DOUBLE_TAG:
        return put(at + 1, &value, 8)
    return put_varint(at + 1, value)


cdef class LeTags:
    """The encoded ``le`` fields of one set of bounds, the last of them +Inf. Where two have the same text, only the
    later is sent: it is the larger, and the other would be overwritten."""

    cdef bytes encoded
    cdef uint32_t count
    cdef uint32_t* ends
    cdef uint8_t* skip

    def __cinit__(self, bounds):
        texts = [decimal_text(bound) for bound in bounds] + ["+Inf"]
        self.count = <uint32_t> len(texts)
        self.ends = <uint32_t*> malloc(self.count * sizeof(uint32_t))
        self.skip = <uint8_t*> malloc(self.count)
        if self.ends == NULL or self.skip == NULL:
            raise MemoryError()
        last = {text: at for at, text in enumerate(texts)}
        parts, size = [], 0
        for at, text in enumerate(texts):
            raw = text.encode()
            tag = b"\x0a\x02le\x5a" + varint(len(raw)) + raw + b"\x40\x01"
            parts.append(b"\x12" + varint(len(tag)) + tag)
            size += len(parts[at])
            self.ends[at] = size
            self.skip[at] = last[text] != at
        self.encoded = b"".join(parts)

    def __dealloc__(self):
        free(self.ends)
        free(self.skip)


cdef class Encoder:
    """Encodes the records of one lane. ``apply`` is the policy (None: every tag leaves); ``parity`` says what becomes
    of a sum, minimum or maximum that was not sent: 0 in "datakit", nothing in "strict". ``share``: a table whose
    copies of definitions are used where they are the same.

    Give it each record's ``definitions``, then its body; ``forget`` at the beginning of a segment. Points that are
    larger than a body may be come to lie in ``oversized``, and the caller answers for them.
    """

    cdef SeriesTable table, share
    cdef object apply
    cdef bint strict
    cdef dict le_sets           # LeTags by the bytes of their bounds
    cdef dict le_of             # LeTags by series id
    cdef dict transient         # definitions that hold for one record
    cdef list done
    cdef public list oversized
    cdef PyObject* body         # a bytes object that only this encoder knows: points are written where they will lie
    cdef uint64_t size, room, max_body_bytes
    cdef uint32_t points

    def __cinit__(self, apply, str parity, SeriesTable share=None, uint64_t max_body_bytes=1 << 20):
        self.table = SeriesTable()
        self.share = share
        self.apply = apply
        self.strict = parity == "strict"
        self.max_body_bytes = max_body_bytes
        self.le_sets, self.le_of, self.transient = {}, {}, {}
        self.done, self.oversized = [], []

    def __dealloc__(self):
        Py_XDECREF(self.body)

    def forget(self):
        """A new segment begins: ids mean something else from now on."""
        self.table.forget()
        self.le_of.clear()

    def define(self, definitions):
        """Take in the series that a record defines: (id, definition) each."""
        cdef uint32_t series
        cdef bytes definition
        self.transient.clear()
        for series, definition in definitions:
            if self.apply is not None:
                before = Series.unpack(definition)
                after = self.apply(before)
                if after is not before:
                    definition = after.pack()
            if series >= FIRST_TRANSIENT:
                self.transient[series] = definition
            elif self.share is None:
                self.table.define(series, definition)
            else:
                self.table.share(series, definition, self.share)
            if definition[8] == Kind.HISTOGRAM:
                self.le_of[series] = self.le_tags(bounds_of(definition))

    cdef LeTags le_tags(self, bytes bounds):
        """The encoded tags of a set of bounds (float64, little-endian)."""
        found = self.le_sets.get(bounds)
        if found is None:
            if len(self.le_sets) >= MAX_LE_SETS:
                self.le_sets.clear()
            found = self.le_sets[bounds] = LeTags(memoryview(bounds).cast("d") if bounds else ())
        return found

    cdef const Definition* definition(self, uint32_t series) except NULL:
        cdef const Definition* found
        cdef bytes transient
        if series >= FIRST_TRANSIENT:
            transient = self.transient[series]
            return <const Definition*> <const uint8_t*> transient
        found = self.table.get(series)
        if found == NULL:
            raise KeyError(f"series {series} is not defined")
        return found

    cdef uint8_t* begin(self, uint64_t content) except NULL:
        """Room for one more point of ``content`` bytes, its frame written; what is returned is to be filled to the
        last byte. Begins another body where this one would grow too large."""
        cdef uint64_t whole = 1 + varint_size(content) + content
        cdef uint8_t* at
        if self.size and self.size + whole > self.max_body_bytes:
            self.cut()
        if self.size + whole > self.room:
            self.grow(self.size + whole)
        at = <uint8_t*> PyBytes_AS_STRING(<object> self.body) + self.size
        at[0] = 0x0A
        at = put_varint(at + 1, content)
        self.size += whole
        self.points += 1
        return at

    cdef int grow(self, uint64_t wanted) except -1:
        """Room for ``wanted`` bytes in the present body, and for more to come."""
        cdef uint64_t least = self.max_body_bytes if self.done else 65536    # where one was full, the next will be
        cdef uint64_t room = max(wanted, min(self.max_body_bytes, 2 * self.room), least)
        if self.body == NULL:
            fresh = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> room)
            self.body = <PyObject*> fresh
            Py_INCREF(fresh)
        else:
            _PyBytes_Resize(&self.body, <Py_ssize_t> room)
        self.room = room
        return 0

    cdef int cut(self) except -1:
        """End the present body."""
        _PyBytes_Resize(&self.body, <Py_ssize_t> self.size)
        body = <object> self.body
        Py_XDECREF(self.body)
        self.body, self.room = NULL, 0
        if self.size > self.max_body_bytes:
            self.oversized.append(body)
        else:
            self.done.append((body, self.points))
        self.size = self.points = 0
        return 0

    def full(self):
        """The bodies that are full by now: (bytes, points) each."""
        done, self.done = self.done, []
        return done

    def finish(self):
        """The bodies since the last time, the last of them as full as it is: (bytes, points) each."""
        if self.size:
            self.cut()
        return self.full()

    def add(self, const uint8_t[::1] body):
        """Encode the rows and events of a record's body. Raises ``KeyError`` for a series that was not defined,
        ``ValueError`` for a body that is shorter than it says."""
        cdef uint32_t counts[6]
        cdef const uint8_t* at = &body[0]
        cdef const uint8_t* end = at + body.shape[0]
        if body.shape[0] < BODY_COUNTS:
            raise ValueError("body without counts")
        memcpy(counts, at, BODY_COUNTS)
        at = self.numbers(at + BODY_COUNTS, end, counts[0])
        at = self.distributions(at, end, counts[1], counts[2], counts[3])
        self.events(at, end, counts[4], counts[5])

    cdef const uint8_t* numbers(self, const uint8_t* at, const uint8_t* end, uint64_t n) except NULL:
        cdef const uint32_t* series = <const uint32_t*> at
        cdef const int64_t* time = <const int64_t*> (at + pad8(n * 4))
        cdef const uint64_t* bits = <const uint64_t*> (time + 2 * n)
        cdef const Definition* known
        cdef const uint8_t* head
        cdef uint8_t* to
        cdef uint8_t tag
        cdef uint32_t inner
        cdef uint64_t i
        cdef Key key
        if pad8(n * 4) + n * 24 > <uint64_t> (end - at):
            raise ValueError("body shorter than its numbers")
        key.suffix, key.suffix_size = b"", 0
        for i in range(n):
            known = self.definition(series[i])
            head = <const uint8_t*> (known + 1)
            key.name, key.name_size = head + known.head_size, known.field_size
            tag = INT_TAG if known.kind == INT else DOUBLE_TAG
            inner = field_size(&key, tag, bits[i])
            to = self.begin(
                known.head_size + 1 + varint_size(inner) + inner + 1 + varint_size(<uint64_t> time[i])
            )
            to = put(to, head, known.head_size)
            to = put_field(to, &key, tag, bits[i])
            to[0] = 0x18
            put_varint(to + 1, <uint64_t> time[i])
        return at + pad8(n * 4) + n * 24

    cdef const uint8_t* distributions(
        self, const uint8_t* at, const uint8_t* end, uint64_t d, uint64_t all_buckets, uint64_t all_bounds
    ) except NULL:
        cdef const uint32_t* series = <const uint32_t*> at
        cdef const uint8_t* flags = at + pad8(d * 4)
        cdef const uint32_t* n_buckets = <const uint32_t*> (flags + pad8(d))
        cdef const uint32_t* n_bounds = <const uint32_t*> (<const uint8_t*> n_buckets + pad8(d * 4))
        cdef const int64_t* time = <const int64_t*> (<const uint8_t*> n_bounds + pad8(d * 4))
        cdef const uint64_t* count = <const uint64_t*> (time + 2 * d)
        cdef const uint64_t* sums = count + d
        cdef const uint64_t* buckets = count + 4 * d
        cdef const uint8_t* bounds = <const uint8_t*> (buckets + all_buckets)
        cdef const Definition* known
        cdef LeTags le
        cdef uint64_t i, bucket_at = 0, bound_at = 0
        if pad8(d * 4) * 3 + pad8(d) + (d * 6 + all_buckets + all_bounds) * 8 > <uint64_t> (end - at):
            raise ValueError("body shorter than its distributions")
        for i in range(d):
            known = self.definition(series[i])
            self.summary_point(known, flags[i], time[i], count[i], sums[i], sums[d + i], sums[2 * d + i])
            if bucket_at + n_buckets[i] > all_buckets or bound_at + n_bounds[i] > all_bounds:
                raise ValueError("more buckets than the body has")
            if n_buckets[i]:
                if known.kind == EXPONENTIAL:
                    le = self.le_tags((bounds + bound_at * 8)[: n_bounds[i] * 8])
                else:
                    le = self.le_of[series[i]]
                if le.count != n_buckets[i]:
                    raise ValueError(f"{n_buckets[i]} buckets for {le.count} bounds")
                self.bucket_points(known, le, time[i], buckets + bucket_at)
            bucket_at += n_buckets[i]
            bound_at += n_bounds[i]
        return bounds + all_bounds * 8

    cdef int summary_point(
        self, const Definition* known, uint8_t flags, int64_t time, uint64_t count, uint64_t total, uint64_t low,
        uint64_t high,
    ) except -1:
        """``_min _max _count _sum``, as DataKit orders them; a summary has no minimum and no maximum."""
        cdef const uint8_t* head = <const uint8_t*> (known + 1)
        cdef Key keys[4]
        cdef uint8_t tags[4]
        cdef uint64_t values[4]
        cdef uint32_t n = 0, inner
        cdef uint64_t size = known.head_size + 1 + varint_size(<uint64_t> time)
        cdef uint8_t* to
        cdef uint32_t i
        if known.kind != SUMMARY and (flags & F_MIN or not (self.strict or flags & F_BAD_MIN)):
            keys[n].suffix, keys[n].suffix_size, tags[n], values[n] = b"_min", 4, DOUBLE_TAG, low
            n += 1
        if known.kind != SUMMARY and (flags & F_MAX or not (self.strict or flags & F_BAD_MAX)):
            keys[n].suffix, keys[n].suffix_size, tags[n], values[n] = b"_max", 4, DOUBLE_TAG, high
            n += 1
        keys[n].suffix, keys[n].suffix_size, tags[n], values[n] = b"_count", 6, UINT_TAG, count
        n += 1
        if flags & F_SUM or not (self.strict or flags & F_BAD_SUM):
            keys[n].suffix, keys[n].suffix_size, tags[n], values[n] = b"_sum", 4, DOUBLE_TAG, total
            n += 1
        for i in range(n):
            keys[i].name, keys[i].name_size = head + known.head_size, known.field_size
            inner = field_size(&keys[i], tags[i], values[i])
            size += 1 + varint_size(inner) + inner
        to = put(self.begin(size), head, known.head_size)
        for i in range(n):
            to = put_field(to, &keys[i], tags[i], values[i])
        to[0] = 0x18
        put_varint(to + 1, <uint64_t> time)
        return 0

    cdef int bucket_points(self, const Definition* known, LeTags le, int64_t time, const uint64_t* buckets) except -1:
        """A point a bucket, its count added to those before it (wrapping at 2**64, as in DataKit)."""
        cdef const uint8_t* head = <const uint8_t*> (known + 1)
        cdef const uint8_t* tags = le.encoded
        cdef uint64_t total = 0
        cdef uint32_t i, tag_at = 0, tag_size, inner
        cdef uint8_t* to
        cdef Key key
        key.name, key.name_size = head + known.head_size, known.field_size
        key.suffix, key.suffix_size = b"_bucket", 7
        for i in range(le.count):
            total += buckets[i]
            tag_size = le.ends[i] - tag_at
            if not le.skip[i]:
                inner = field_size(&key, UINT_TAG, total)
                to = self.begin(
                    known.head_size + tag_size + 1 + varint_size(inner) + inner + 1 + varint_size(<uint64_t> time)
                )
                to = put(to, head, known.head_size)
                to = put(to, tags + tag_at, tag_size)
                to = put_field(to, &key, UINT_TAG, total)
                to[0] = 0x18
                put_varint(to + 1, <uint64_t> time)
            tag_at = le.ends[i]
        return 0

    cdef int events(self, const uint8_t* at, const uint8_t* end, uint64_t n, uint64_t size) except -1:
        """Events are encoded already."""
        cdef const uint32_t* sizes = <const uint32_t*> (at + pad8(n) + n * 8)
        cdef const uint8_t* event = <const uint8_t*> sizes + pad8(n * 4)
        cdef uint64_t i
        if pad8(n) + n * 8 + pad8(n * 4) + size > <uint64_t> (end - at):
            raise ValueError("body shorter than its events")
        for i in range(n):
            if event + sizes[i] > end:
                raise ValueError("event past the end of the body")
            put(self.begin(sizes[i]), event, sizes[i])
            event += sizes[i]
        return 0


cdef inline uint64_t pad8(uint64_t size) noexcept nogil:
    return (size + 7) & ~<uint64_t> 7


cdef bytes bounds_of(bytes definition):
    """The bounds of a definition, as they lie in it."""
    cdef const Definition* known = <const Definition*> <const uint8_t*> definition
    cdef uint32_t at = sizeof(Definition) + known.head_size + known.field_size + known.unit_size
    return definition[at : at + known.bounds_count * 8]
