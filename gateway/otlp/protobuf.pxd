"""Protobuf's wire format, read in place: fields one after the other, each length checked before it is used.

Everything here is inline C without Python objects. ``check`` looks at messages that are not kept: they must be
well-formed, as upb would have them, but nothing of them is remembered.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy


cdef enum:
    VARINT = 0
    FIXED64 = 1
    LEN = 2
    GROUP = 3
    END_GROUP = 4
    FIXED32 = 5
    MAX_DEPTH = 100

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


cdef inline uint64_t load64(const uint8_t* at) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, at, 8)
    return value


cdef inline double as_double(uint64_t bits) noexcept nogil:
    cdef double value
    memcpy(&value, &bits, 8)
    return value


cdef inline int read_varint(Reader* r, uint64_t* value, uint32_t bits) noexcept nogil:
    """A varint of at most ``bits`` / 7 bytes. Of the last byte of ten, what does not fit into 64 bits is cut off."""
    cdef uint64_t result = 0
    cdef uint32_t shift = 0
    cdef uint8_t byte
    while r.at < r.end and shift < bits:
        byte = r.at[0]
        r.at += 1
        result |= (<uint64_t> (byte & 0x7F)) << shift
        if byte < 0x80:
            value[0] = result
            return 0
        shift += 7
    return -1


cdef inline int skip_group(Reader* r, uint32_t number, int depth) noexcept nogil:
    """Read over an unknown group up to its end."""
    cdef Field field
    cdef int found
    if depth <= 0:
        return -1
    while True:
        found = read_any_field(r, &field, depth - 1)
        if found <= 0:
            return -1
        if field.wire == END_GROUP:
            return 0 if field.number == number else -1


cdef inline int read_field(Reader* r, Field* field, int depth) noexcept nogil:
    """The next field: 1, or 0 at the end, or -1 where the bytes are no field (``r.at`` is near the fault)."""
    cdef int found = read_any_field(r, field, depth)
    return -1 if found > 0 and field.number == 0 else found


cdef inline int read_any_field(Reader* r, Field* field, int depth) noexcept nogil:
    """As ``read_field``, but field number 0 passes: in a group that nobody knows, upb does not look."""
    cdef uint64_t tag
    if r.at >= r.end:
        return 0
    field.begin = r.at
    if r.at[0] < 0x80:
        tag = r.at[0]
        r.at += 1
    elif read_varint(r, &tag, 35) < 0:
        return -1
    if tag >> 32:
        return -1
    field.number = <uint32_t> (tag >> 3)
    field.wire = <uint32_t> (tag & 7)
    if field.wire == LEN:
        if r.at < r.end and r.at[0] < 0x80:
            field.size = r.at[0]
            r.at += 1
        elif read_varint(r, &field.size, 35) < 0:
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
        return 1 if read_varint(r, &field.value, 70) == 0 else -1
    if field.wire == FIXED32:
        if r.end - r.at < 4:
            return -1
        r.at += 4
        return 1
    if field.wire == GROUP:
        return 1 if skip_group(r, field.number, depth) == 0 else -1
    return 1 if field.wire == END_GROUP else -1


cdef inline bint valid_utf8(const uint8_t* at, uint64_t size) noexcept nogil:
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


cdef inline const uint8_t* check(Shape shape, const uint8_t* data, uint64_t size, int depth) noexcept nogil:
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
