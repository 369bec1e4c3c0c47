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

from libc.math cimport INFINITY, isfinite, isnan
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from gateway.otlp.protobuf cimport (
    EXEMPLAR, FIXED64, KEY_VALUE, LEN, MAX_DEPTH, QUANTILE, RESOURCE, SCOPE, TEXT, VARINT, END_GROUP,
    Field, Reader, Shape, as_double, check, read_field,
)
from gateway.otlp.registry cimport Hash, Registry, Slot, locum_mum, mix
from gateway.otlp.rows cimport Rows

from google.protobuf.message import DecodeError
from opentelemetry.proto.metrics.v1.metrics_pb2 import ExponentialHistogramDataPoint

from gateway.buffer.record import BAD_MAX, BAD_MIN, BAD_SUM, HAS_MAX, HAS_MIN, HAS_SUM, pack_definitions
from gateway.model import (
    LOOKS_LIKE_ANOTHER_UNIT_NS, MAX_TIME_NS, Batch, Kind, Losses, Reason, Refusal, Signal, Temporality,
)
from gateway.otlp import expand

cdef enum:
    NO_RECORDED_VALUE = 1

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
    CHANGED_BOUNDS
    CHANGED_TIME
    CHANGED_UNIT
    CHANGED_FINITE
    CHANGED_NO_DATA
    CHANGED_EXTREMES
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
    CHANGED_BOUNDS: Reason.BAD_BOUNDS,
    CHANGED_TIME: Reason.TIME_ZERO,
    CHANGED_UNIT: Reason.TIME_UNIT,
    CHANGED_FINITE: Reason.NOT_FINITE,
    CHANGED_NO_DATA: Reason.METRIC_WITHOUT_DATA,
    CHANGED_EXTREMES: Reason.EXTREME_OUTSIDE,
}

cdef uint64_t LAST_NS = MAX_TIME_NS
cdef uint64_t OTHER_UNIT_FROM = LOOKS_LIKE_ANOTHER_UNIT_NS[0], OTHER_UNIT_TO = LOOKS_LIKE_ANOTHER_UNIT_NS[1]
cdef uint32_t MAX_QUANTILES = expand.MAX_QUANTILES
cdef uint8_t F_SUM = HAS_SUM, F_MIN = HAS_MIN, F_MAX = HAS_MAX
cdef uint8_t F_BAD_SUM = BAD_SUM, F_BAD_MIN = BAD_MIN, F_BAD_MAX = BAD_MAX
cdef uint64_t MAX_BODY_BYTES = 256 << 20


cdef struct Bytes:
    const uint8_t* data
    uint64_t size


cdef struct Header:
    Bytes name
    Bytes unit
    uint32_t kind           # field number of the data in Metric: 5, 7, 9, 10, 11
    uint32_t temporality
    bint monotonic


cdef struct Point:
    uint64_t time
    uint64_t start
    uint64_t bits           # of a number
    uint64_t count          # of a distribution, as are the next four
    uint64_t total
    uint64_t low
    uint64_t high
    uint8_t has             # flags of buffer.record
    uint32_t flags          # OTLP's
    int kind                # of a number: 0 no value, else Kind.DOUBLE or Kind.INT
    Bytes attributes        # whole fields, as they lie
    const uint8_t* last     # end of the last of them
    bint scattered          # they do not lie together


cdef inline void take_attribute(Point* point, Field* field, const uint8_t* end) noexcept nogil:
    if point.attributes.data == NULL:
        point.attributes.data = field.begin
    elif field.begin != point.last:
        point.scattered = True
    point.last = end


cdef inline void take_distribution(Point* point, Field* field, uint32_t low, uint32_t flags) noexcept nogil:
    """A scalar field of a distribution. ``low``: the field number of min, max is the next; ``flags``: that of flags."""
    if field.wire == FIXED64:
        if field.number == 2:
            point.start = field.value
        elif field.number == 3:
            point.time = field.value
        elif field.number == 4:
            point.count = field.value
        elif field.number == 5:
            point.total, point.has = field.value, point.has | F_SUM
        elif low and field.number == low:
            point.low, point.has = field.value, point.has | F_MIN
        elif low and field.number == low + 1:
            point.high, point.has = field.value, point.has | F_MAX
    elif field.wire == VARINT and field.number == flags:
        point.flags = <uint32_t> field.value


def decode(Registry registry not None, bytes body not None, str sender_address, int64_t received_ns):
    """The batch that a serialized ``ExportMetricsServiceRequest`` makes.

    ``sender_address`` becomes the tag ``remote_ip`` (None: no such tag). Raises ``Refusal``: BAD_DATA with the
    offset of the first byte that makes no sense, TOO_LARGE for more rows than memory is granted for.
    """
    return Request(registry, body, sender_address, received_ns).read()


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

    cdef list merge(self, Bytes* into, Field* field, list pieces, int depth):
        """Take a singular message that may come more than once: its pieces, where there is more than one, for ``join``.
        Each has to be whole fields; joined, half a field and its other half would be a field."""
        if into.data == NULL:
            into.data, into.size = field.data, field.size
            return None
        if pieces is None:
            self.walk(into.data, into.size, depth)
            pieces = [into.data[: into.size]]
        self.walk(field.data, field.size, depth)
        pieces.append(field.data[: field.size])
        return pieces

    cdef int walk(self, const uint8_t* data, uint64_t size, int depth) except -1:
        """Refuse the request if ``data`` is not one field after the other."""
        cdef Reader r
        cdef Field field
        r.at, r.end = data, data + size
        while self.next(&r, &field, depth):
            pass
        return 0

    cdef int join(self, Bytes* into, list pieces) except -1:
        """The message that came in ``pieces``; all of them are joined at once, however many they are."""
        if pieces is not None:
            joined = b"".join(pieces)
            self.kept.append(joined)
            into.data, into.size = joined, <uint64_t> len(joined)
        return 0

    def read(self):
        cdef Reader r
        cdef Field field
        cdef Registry registry = self.registry
        cdef int loss
        sender = (self.sender_address or "").encode()
        self.sender_hash.a, self.sender_hash.b = registry.secret[1], registry.secret[2]
        mix(registry.secret, &self.sender_hash, sender, <uint64_t> len(sender))
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
        cdef list pieces = None
        cdef Registry registry = self.registry
        cdef Hash h = self.sender_hash
        resource.data, resource.size = NULL, 0
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 1):
            if field.wire == LEN and field.number == 1:
                pieces = self.merge(&resource, &field, pieces, MAX_DEPTH - 2)
            elif field.wire == LEN and field.number == 3:
                self.checked(TEXT, field.data, field.size, MAX_DEPTH - 2)
        self.join(&resource, pieces)
        self.checked(RESOURCE, resource.data, resource.size, MAX_DEPTH - 2)
        self.resource = resource
        mix(registry.secret, &h, resource.data, resource.size)
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 1):
            if field.wire == LEN and field.number == 2:
                self.scope_metrics(field.data, field.size, h)
        return 0

    cdef int scope_metrics(self, const uint8_t* data, uint64_t size, Hash h) except -1:
        cdef Reader r
        cdef Field field
        cdef Bytes scope
        cdef list pieces = None
        cdef uint8_t has_scope
        cdef Registry registry = self.registry
        scope.data, scope.size = NULL, 0
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 2):
            if field.wire == LEN and field.number == 1:
                pieces = self.merge(&scope, &field, pieces, MAX_DEPTH - 3)
            elif field.wire == LEN and field.number == 3:
                self.checked(TEXT, field.data, field.size, MAX_DEPTH - 3)
        self.join(&scope, pieces)
        self.checked(SCOPE, scope.data, scope.size, MAX_DEPTH - 3)
        self.scope = scope
        has_scope = self.has_scope = scope.data != NULL
        mix(registry.secret, &h, &has_scope, 1)
        mix(registry.secret, &h, scope.data, scope.size)
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
        cdef list pieces = None
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
                        self.join(&content, pieces)
                        self.points(content, header, True)
                        pieces = None
                    header.kind = field.number
                    content.data, content.size = field.data, field.size
                else:
                    pieces = self.merge(&content, &field, pieces, MAX_DEPTH - 4)
            elif field.number == 12:
                self.checked(KEY_VALUE, field.data, field.size, MAX_DEPTH - 4)
        self.header = header
        if header.kind == 0:
            self.lose(CHANGED_NO_DATA)
            return 0
        self.join(&content, pieces)
        self.points(content, header, False)
        return 0

    cdef int points(self, Bytes content, Header header, bint only_check) except -1:
        """The points of a gauge, sum, histogram, exponential histogram or summary."""
        cdef Reader r
        cdef Field field
        cdef Hash h = self.scope_hash
        cdef Rows rows = self.rows
        cdef Registry registry = self.registry
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
        mix(registry.secret, &h, header.name.data, header.name.size)
        mix(registry.secret, &h, header.unit.data, header.unit.size)
        mix(registry.secret, &h, <const uint8_t*> &packed, 8)
        self.header, self.header_hash = header, h
        r.at, r.end = content.data, content.data + content.size
        while self.next(&r, &field, MAX_DEPTH - 4):
            if field.wire != LEN or field.number != 1:
                continue
            if only_check and kind == 10:
                self.exponential_message(field.data, field.size)
            elif only_check:
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

    cdef int lose(self, int loss, str detail="") except -1:
        """Count a loss; keep the metric's name, and ``detail`` behind it, as its example."""
        self.lost[loss] += 1
        if self.lost_in[loss] is None:
            name = self.header.name.data[: min(self.header.name.size, 256)] if self.header.name.size else b""
            self.lost_in[loss] = (name.decode("utf-8", "replace") or "(no name)") + detail
        return 0

    cdef int lose_point(self, int loss, const uint8_t* data, uint64_t size, str detail="") except -1:
        """Leave a point out. Nobody will look at its attributes, so they are checked here."""
        self.lose(loss, detail)
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
        if OTHER_UNIT_FROM <= time < OTHER_UNIT_TO:
            self.lose(CHANGED_UNIT)
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

    cdef int gather(self, Point* point, const uint8_t* data, uint64_t size, uint32_t number) except -1:
        """Settle where the attributes are: as they lie, or joined where other fields lie between them."""
        cdef Reader r
        cdef Field field
        cdef list parts
        if not point.scattered:
            point.attributes.size = <uint64_t> (point.last - point.attributes.data)
            return 0
        parts = []
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN and field.number == number:
                parts.append(field.begin[: r.at - field.begin])
        joined = b"".join(parts)
        self.kept.append(joined)
        point.attributes.data, point.attributes.size = joined, <uint64_t> len(joined)
        return 0

    cdef uint32_t series_of(
        self, Bytes attributes, int kind, uint64_t bounds_at, uint32_t bounds_n, list quantiles, const uint8_t* point
    ) except? 0xFFFFFFFF:
        """The id of the series of a point (the first of a summary's). Bounds lie in ``rows.bounds``."""
        cdef Registry registry = self.registry
        cdef Hash h = self.header_hash
        cdef uint64_t tail = <uint64_t> kind
        cdef Slot* slot
        cdef uint32_t j
        mix(registry.secret, &h, attributes.data, attributes.size)
        if bounds_n:
            mix(registry.secret, &h, <const uint8_t*> (self.rows.bounds + bounds_at), <uint64_t> bounds_n * 8)
        if quantiles:
            packed = repr(quantiles).encode()
            mix(registry.secret, &h, packed, <uint64_t> len(packed))
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
        cdef uint32_t i
        # upb would measure their depth from here, not from the top
        self.check_point(attributes.data, attributes.size)
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
        if registry.table.count + <uint32_t> len(definitions) <= registry.max_series:
            return registry.remember(key, definitions)
        return registry.pass_through(definitions, self.definitions)

    cdef int number_point(self, const uint8_t* data, uint64_t size) except -1:
        """A NumberDataPoint: a gauge's or a sum's."""
        cdef Reader r
        cdef Field field
        cdef Point point
        cdef int64_t time_ns = 0
        cdef int loss = NO_VALUE
        memset(&point, 0, sizeof(Point))
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN:
                if field.number == 7:
                    take_attribute(&point, &field, r.at)
                elif field.number == 5:
                    self.check_part(&field)
            elif field.wire == FIXED64:
                if field.number == 3:
                    point.time = field.value
                elif field.number == 4:
                    point.bits, point.kind = field.value, 1
                elif field.number == 6:
                    point.bits, point.kind = field.value, 2
                elif field.number == 2:
                    point.start = field.value
            elif field.wire == VARINT and field.number == 8:
                point.flags = <uint32_t> field.value
        if self.unusable(&loss):
            return self.lose_point(loss, data, size)
        if point.flags & NO_RECORDED_VALUE and (point.kind == 0 or self.registry.strict):
            return self.lose_point(STALE, data, size)
        if point.kind == 0:
            return self.lose_point(NO_VALUE, data, size)
        if point.kind == 1 and not isfinite(as_double(point.bits)):
            return self.lose_point(NOT_FINITE, data, size)
        if not self.time_of(point.time, &time_ns):
            return self.lose_point(TIME_RANGE, data, size)
        self.gather(&point, data, size, 7)
        series = self.series_of(point.attributes, point.kind, 0, 0, None, data)
        self.rows.number(series, time_ns, start_of(point.start), point.bits)
        return 0

    cdef int histogram_point(self, const uint8_t* data, uint64_t size) except -1:
        """A HistogramDataPoint: one row, its counts behind the other rows' buckets."""
        cdef Reader r
        cdef Field field
        cdef Point point
        cdef Rows rows = self.rows
        cdef uint32_t buckets_at = rows.buckets_n, bounds_at = rows.bounds_n, n_buckets, n_bounds, i
        cdef bint rising = True
        cdef int64_t time_ns = 0
        cdef int loss = NO_VALUE
        memset(&point, 0, sizeof(Point))
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN:
                if field.number == 9:
                    take_attribute(&point, &field, r.at)
                elif 6 <= field.number <= 8:
                    self.check_part(&field)
                    if field.number == 6:
                        rows.add_buckets(field.data, field.size)
                    elif field.number == 7:
                        rows.add_bounds(field.data, field.size)
            elif field.wire == FIXED64 and field.number == 6:
                rows.add_buckets(<const uint8_t*> &field.value, 8)
            elif field.wire == FIXED64 and field.number == 7:
                rows.add_bounds(<const uint8_t*> &field.value, 8)
            else:
                take_distribution(&point, &field, 11, 10)
        n_buckets, n_bounds = rows.buckets_n - buckets_at, rows.bounds_n - bounds_at
        rows.buckets_n, rows.bounds_n = buckets_at, bounds_at     # until the point is known to stay
        if self.unusable(&loss):
            return self.lose_point(loss, data, size)
        if point.flags & NO_RECORDED_VALUE and self.registry.strict:
            return self.lose_point(STALE, data, size)
        for i in range(n_bounds):
            if isnan(as_double(rows.bounds[bounds_at + i])):
                return self.lose_point(BAD_BOUNDS, data, size)
            if i and not as_double(rows.bounds[bounds_at + i]) > as_double(rows.bounds[bounds_at + i - 1]):
                rising = False
        if not self.time_of(point.time, &time_ns):
            return self.lose_point(TIME_RANGE, data, size)
        if n_buckets != n_bounds + 1 and (n_buckets or n_bounds):
            if self.registry.strict:
                return self.lose_point(BAD_BUCKETS, data, size, f" has {n_buckets} counts for {n_bounds} bounds")
            self.lose(CHANGED_BUCKETS)
            n_buckets = n_bounds = 0
        if not rising and self.registry.strict:
            return self.lose_point(BAD_BOUNDS, data, size)
        if n_bounds and (not rising or as_double(rows.bounds[bounds_at + n_bounds - 1]) == INFINITY):
            n_bounds = self.merged(buckets_at, bounds_at, n_bounds)
            n_buckets = n_bounds + 1
        self.gather(&point, data, size, 9)
        series = self.series_of(point.attributes, 3, bounds_at, n_bounds, None, data)
        rows.buckets_n = buckets_at + n_buckets
        return self.distribution_row(series, &point, time_ns, n_buckets, 0)

    cdef uint32_t merged(self, uint32_t buckets_at, uint32_t bounds_at, uint32_t n_bounds) except? 0xFFFFFFFF:
        """Merge the buckets at the end of the rows that would have one ``le``; how many bounds are left."""
        cdef Rows rows = self.rows
        cdef uint32_t i
        cdef double bound
        bounds, counts = expand.merged_buckets(
            [as_double(rows.bounds[bounds_at + i]) for i in range(n_bounds)],
            [rows.buckets[buckets_at + i] for i in range(n_bounds + 1)],
        )
        for i in range(<uint32_t> len(bounds)):
            bound = bounds[i]
            memcpy(rows.bounds + bounds_at + i, &bound, 8)
        for i in range(<uint32_t> len(counts)):
            rows.buckets[buckets_at + i] = counts[i]
        if <uint32_t> len(bounds) < n_bounds:
            self.lose(CHANGED_BOUNDS)
        return <uint32_t> len(bounds)

    cdef object exponential_message(self, const uint8_t* data, uint64_t size):
        """upb's reading of an ExponentialHistogramDataPoint. Depth is measured from the top, as upb would."""
        self.check_point(data, size)
        try:
            return ExponentialHistogramDataPoint.FromString(data[:size])
        except DecodeError:
            self.malformed(data, "an exponential histogram that cannot be read")

    cdef int exponential_point(self, const uint8_t* data, uint64_t size) except -1:
        """An ExponentialHistogramDataPoint. Its buckets are spelled out in Python: their bounds move from point to
        point, so there is little to remember."""
        cdef Reader r
        cdef Field field
        cdef Point point
        cdef Rows rows = self.rows
        cdef uint64_t value
        cdef double bound
        cdef int64_t time_ns = 0
        cdef int loss = NO_VALUE
        memset(&point, 0, sizeof(Point))
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN and field.number == 1:
                take_attribute(&point, &field, r.at)
            else:
                take_distribution(&point, &field, 12, 10)
        message = self.exponential_message(data, size)
        if self.unusable(&loss):
            return self.lose(loss)
        if point.flags & NO_RECORDED_VALUE and self.registry.strict:
            return self.lose(STALE)
        if not self.time_of(point.time, &time_ns):
            return self.lose(TIME_RANGE)
        spelled = expand.exponential_buckets(message)
        if spelled is None:
            self.lose(CHANGED_BUCKETS)
            spelled = ((), ())
        if expand.extremes_lie_outside(message):
            self.lose(CHANGED_EXTREMES)
        bounds, counts = spelled
        self.gather(&point, data, size, 1)
        series = self.series_of(point.attributes, 4, 0, 0, None, data)
        for value in counts:
            rows.add_buckets(<const uint8_t*> &value, 8)
        for bound in bounds:
            rows.add_bounds(<const uint8_t*> &bound, 8)
        return self.distribution_row(series, &point, time_ns, <uint32_t> len(counts), <uint32_t> len(bounds))

    cdef int summary_point(self, const uint8_t* data, uint64_t size) except -1:
        """A SummaryDataPoint: one row for count and sum, and a number for each quantile."""
        cdef Reader r, inner
        cdef Field field, part
        cdef Point point
        cdef uint64_t quantile, value
        cdef uint32_t series, sent = 0, i
        cdef int64_t time_ns = 0
        cdef list quantiles = [], values = []
        cdef int loss = NO_VALUE
        memset(&point, 0, sizeof(Point))
        r.at, r.end = data, data + size
        while self.next(&r, &field, MAX_DEPTH - 5):
            if field.wire == LEN and field.number == 7:
                take_attribute(&point, &field, r.at)
            elif field.wire == LEN and field.number == 6:
                quantile = value = 0
                inner.at, inner.end = field.data, field.data + field.size
                while self.next(&inner, &part, MAX_DEPTH - 6):
                    if part.wire == FIXED64 and part.number == 1:
                        quantile = part.value
                    elif part.wire == FIXED64 and part.number == 2:
                        value = part.value
                sent += 1
                if sent <= MAX_QUANTILES:
                    quantiles.append(as_double(quantile))
                    values.append(value)
            else:
                take_distribution(&point, &field, 0, 8)
        if self.unusable(&loss):
            return self.lose_point(loss, data, size)
        if point.flags & NO_RECORDED_VALUE and self.registry.strict:
            return self.lose_point(STALE, data, size)
        if not self.time_of(point.time, &time_ns):
            return self.lose_point(TIME_RANGE, data, size)
        if sent > MAX_QUANTILES:
            self.lose(CHANGED_BUCKETS)
            quantiles, values = [], []
        self.gather(&point, data, size, 7)
        point.has = F_SUM    # not optional in a summary
        series = self.series_of(point.attributes, 5, 0, 0, quantiles, data)
        self.distribution_row(series, &point, time_ns, 0, 0)
        last = {which: i for i, which in enumerate(quantiles)}
        for i in range(<uint32_t> len(values)):
            value = values[i]
            if not isfinite(quantiles[i]) or not isfinite(as_double(value)):
                self.lose(CHANGED_FINITE)
            elif last[quantiles[i]] != i:    # one that is there twice: the last counts
                self.lose(CHANGED_BUCKETS)
            else:
                self.rows.number(series + 1 + i, time_ns, start_of(point.start), value)
        return 0

    cdef int distribution_row(
        self, uint32_t series, Point* point, int64_t time_ns, uint32_t n_buckets, uint32_t n_bounds
    ) except -1:
        """Write a distribution down; its buckets and bounds are there already."""
        cdef Rows rows = self.rows
        cdef uint32_t d
        if point.has & F_SUM and not isfinite(as_double(point.total)):
            point.has, point.total = point.has ^ F_SUM ^ F_BAD_SUM, 0
            self.lose(CHANGED_FINITE)
        if point.has & F_MIN and not isfinite(as_double(point.low)):
            point.has, point.low = point.has ^ F_MIN ^ F_BAD_MIN, 0
            self.lose(CHANGED_FINITE)
        if point.has & F_MAX and not isfinite(as_double(point.high)):
            point.has, point.high = point.has ^ F_MAX ^ F_BAD_MAX, 0
            self.lose(CHANGED_FINITE)
        rows.distribution()
        d = rows.d
        rows.d_series[d] = series
        rows.d_flags[d] = point.has
        rows.d_buckets[d] = n_buckets
        rows.d_bounds[d] = n_bounds
        rows.d_time[d] = time_ns
        rows.d_start[d] = start_of(point.start)
        rows.d_count[d] = point.count
        rows.d_sum[d] = as_double(point.total)
        rows.d_min[d] = as_double(point.low)
        rows.d_max[d] = as_double(point.high)
        rows.d = d + 1
        return 0


cdef inline int64_t start_of(uint64_t start) noexcept nogil:
    return <int64_t> start if start <= LAST_NS else 0


DATA = {5: "gauge", 7: "sum", 9: "histogram", 10: "exponential", 11: "summary"}


cdef bytes bytes_of(Bytes part):
    return part.data[: part.size] if part.size else b""


cdef str text_of(Bytes part):
    return bytes_of(part).decode()
