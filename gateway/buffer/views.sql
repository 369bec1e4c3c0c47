-- What a question sees, over sealed segments and the open one. buffer/sql.py fills in the tables.
-- Ids of series are joined within their own segment.

CREATE TEMP VIEW batches AS $batches;
CREATE TEMP VIEW series AS $series;
CREATE TEMP VIEW numbers AS $numbers;
CREATE TEMP VIEW distributions AS $distributions;
CREATE TEMP VIEW events AS $events;

-- A double as Guance writes it in the tag `le`: shortest digits, no exponent (Go's FormatFloat(x, 'f', -1, 64)).
CREATE TEMP MACRO shifted(sign, digits, point) AS
    sign || CASE
        WHEN point <= 0 THEN '0.' || repeat('0', -point) || digits
        WHEN point >= length(digits) THEN digits || repeat('0', point - length(digits))
        ELSE digits[:point] || '.' || digits[point + 1:]
    END;
CREATE TEMP MACRO number_text(x) AS CASE
    WHEN x = 'inf'::DOUBLE THEN '+Inf'
    WHEN x = '-inf'::DOUBLE THEN '-Inf'
    WHEN NOT contains(x::VARCHAR, 'e') THEN regexp_replace(x::VARCHAR, '\.0$$', '')
    ELSE shifted(
        CASE WHEN x < 0 THEN '-' ELSE '' END,
        regexp_replace(regexp_extract(x::VARCHAR, '^-?([0-9.]+)e', 1), '\.0$$|\.', ''),
        length(regexp_extract(x::VARCHAR, '^-?([0-9]+)', 1)) + regexp_extract(x::VARCHAR, 'e(.*)$$', 1)::INTEGER
    )
END;
CREATE TEMP MACRO le_texts(bounds) AS
    list_append(list_transform(bounds, lambda bound: number_text(bound)), '+Inf');
-- Counts up to and with each bucket; they wrap at 2**64, as in DataKit.
CREATE TEMP MACRO running(counts) AS
    list_transform(range(1, len(counts) + 1), lambda i: (list_sum(counts[:i]) % 18446744073709551616)::UBIGINT);

-- One row a value: numbers as they are, and each distribution spelled out into its family. What was not sent has no row.
CREATE TEMP VIEW samples AS
WITH described AS (
    SELECT *, CASE WHEN bounds IS NOT NULL THEN le_texts(bounds) END AS les FROM series
),
spread AS (
    SELECT d.*, s.measurement, s.field, s.tags, s.key,
        CASE WHEN d.bounds IS NOT NULL THEN le_texts(d.bounds) ELSE s.les END AS les
    FROM distributions AS d JOIN described AS s ON d.segment = s.segment AND d.series = s.id
)
SELECT n.segment, n.series, n.time, n.value, n.int_value, NULL::UBIGINT AS uint_value, n.start_time, n.batch,
    s.measurement, s.field, s.tags, s.key
FROM numbers AS n JOIN series AS s ON n.segment = s.segment AND n.series = s.id
UNION ALL
SELECT segment, series, time, min, NULL, NULL, start_time, batch, measurement, field || '_min', tags, key
FROM spread WHERE min IS NOT NULL
UNION ALL
SELECT segment, series, time, max, NULL, NULL, start_time, batch, measurement, field || '_max', tags, key
FROM spread WHERE max IS NOT NULL
UNION ALL
SELECT segment, series, time, NULL, NULL, count, start_time, batch, measurement, field || '_count', tags, key
FROM spread
UNION ALL
SELECT segment, series, time, sum, NULL, NULL, start_time, batch, measurement, field || '_sum', tags, key
FROM spread WHERE sum IS NOT NULL
UNION ALL
SELECT segment, series, time, NULL, NULL, total, start_time, batch, measurement, field || '_bucket',
    map_concat(tags, MAP {'le': coalesce(le, '+Inf')}), key
FROM (
    SELECT segment, series, time, start_time, batch, measurement, field, tags, key,
        unnest(running(buckets)) AS total, unnest(les[:len(buckets)]) AS le
    FROM spread WHERE len(buckets) > 1 AND len(les) > 1
);
