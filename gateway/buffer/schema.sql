-- The tables of an open segment (index.duckdb) and, with the column `segment` in front, of a sealed one (Parquet).
-- buffer/tables.py makes their rows; a test holds the two together.

CREATE TABLE batches (
    batch UBIGINT, received TIMESTAMP_NS, signal VARCHAR, points UINTEGER, bytes UBIGINT
);

-- `id` is dense within its segment and means nothing outside it; `key` is the same in every segment.
CREATE TABLE series (
    id UINTEGER, key UBIGINT, measurement VARCHAR, field VARCHAR, tags MAP(VARCHAR, VARCHAR), kind VARCHAR, unit VARCHAR,
    temporality VARCHAR, monotonic BOOLEAN, bounds DOUBLE[], first_seen TIMESTAMP_NS
);

-- A row has a `value` or an `int_value`, as its series' kind says.
CREATE TABLE numbers (
    series UINTEGER, time TIMESTAMP_NS, value DOUBLE, int_value BIGINT, start_time TIMESTAMP_NS, batch UBIGINT
);

-- `buckets` are counts as sent, not accumulated. `bounds` only where they differ from row to row (exponential
-- histograms); else they are in the series. `sum`, `min`, `max`: NULL where none was sent. `flags`: buffer/record.py.
CREATE TABLE distributions (
    series UINTEGER, time TIMESTAMP_NS, start_time TIMESTAMP_NS, batch UBIGINT, count UBIGINT, sum DOUBLE, min DOUBLE,
    max DOUBLE, flags UTINYINT, buckets UBIGINT[], bounds DOUBLE[]
);

-- `fields` is a JSON object; `point` is the event as it goes to Dataway (com.guance.Point).
CREATE TABLE events (
    batch UBIGINT, category VARCHAR, time TIMESTAMP_NS, source VARCHAR, service VARCHAR, status VARCHAR,
    trace_id VARCHAR, tags MAP(VARCHAR, VARCHAR), fields VARCHAR, point BLOB
);
