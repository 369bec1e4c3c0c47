"""Questions: what is answered, what is refused, and that the index can be lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gateway.buffer import question, segment
from gateway.buffer.question import QuestionError
from gateway.config import BufferSettings
from gateway.model import Kind, StorageError
from tests.buffer.made import T0, Distribution, Number, Running, events, metrics, running, series, span

KNOWN = [series(0, Kind.DOUBLE), series(1, Kind.INT), series(2, Kind.HISTOGRAM), series(3, Kind.EXPONENTIAL)]


def rows(buffer: Running, statement: str, *parameters: object) -> list[tuple[object, ...]]:
    return question.ask(buffer.catalog, statement, parameters, catch_up=buffer.indexer.catch_up).rows()


def test_a_distribution_is_spelled_out_into_its_family(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(
            metrics([Distribution(2, T0, 10, (1, 2, 3, 2**64 - 3), sum=2.5, min=0.0), Distribution(2, T0 + 1, 4)])
        )
        found = rows(
            buffer,
            "SELECT field, tags['le'], value, int_value, uint_value FROM samples WHERE time = $1::TIMESTAMP_NS "
            "ORDER BY field, uint_value",
            "2025-10-09 08:53:20",
        )
        assert found == [
            ("histogram.metric_bucket", "0.25", None, None, 1),
            ("histogram.metric_bucket", "5", None, None, 3),
            (
                "histogram.metric_bucket",
                "+Inf",
                None,
                None,
                3,
            ),  # the running sum wraps at 2**64, as in DataKit
            ("histogram.metric_bucket", "1000000000000000000000", None, None, 6),
            ("histogram.metric_count", None, None, None, 10),
            ("histogram.metric_min", None, 0.0, None, None),
            ("histogram.metric_sum", None, 2.5, None, None),
        ]
        assert rows(buffer, "SELECT field FROM samples WHERE epoch_ns(time) = $1", T0 + 1) == [
            ("histogram.metric_count",)
        ]


BOUNDS = {
    1e-9: "0.000000001",
    -1.5e-7: "-0.00000015",
    0.1: "0.1",
    5.0: "5",
    25.5: "25.5",
    1e5: "100000",
    1e15: "1000000000000000",
    1e21: "1000000000000000000000",
    1.25e22: "12500000000000000000000",
    5e-324: "0." + "0" * 323 + "5",
    1.7976931348623157e308: "17976931348623157" + "0" * 292,
}


def test_bounds_are_written_as_go_writes_them(tmp_path: Path) -> None:
    ascending = tuple(sorted(BOUNDS))
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Distribution(3, T0, 1, (1,) * (len(BOUNDS) + 1), ascending)]))
        found = rows(buffer, "SELECT tags['le'] FROM samples WHERE field LIKE '%_bucket' ORDER BY uint_value")
        assert [le for (le,) in found] == [*(BOUNDS[bound] for bound in ascending), "+Inf"]


def test_events_can_be_asked_for_by_what_is_in_them(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(events([span(1, raw=b"\xff"), span(250)]))
        assert rows(
            buffer,
            "SELECT source, service, status, trace_id, tags['host'], (fields::JSON ->> 'duration')::INT, category "
            "FROM events WHERE (fields::JSON ->> 'duration')::INT > 100",
        ) == [("opentelemetry", "shop", "ok", f"{250:032x}", "h", 250, "tracing")]


def test_one_question_covers_sealed_and_open_segments_and_joins_each_with_its_own_series(
    tmp_path: Path,
) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Number(1, T0, 1)]))
        buffer.roll()
        buffer.sealed(1)
        buffer.put(metrics([Number(0, T0, 2.5), Number(1, T0, 3)]))
        assert rows(buffer, "SELECT segment, field, coalesce(value, int_value) FROM samples ORDER BY 1, 2") == [
            (1, "int.metric", 1),
            (2, "double.metric", 2.5),
            (2, "int.metric", 3),
        ]


def test_an_empty_buffer_answers_with_no_rows(tmp_path: Path) -> None:
    with running(tmp_path) as buffer:
        for table in ("batches", "series", "numbers", "distributions", "events", "samples"):
            assert rows(buffer, f"SELECT * FROM {table}") == []


REFUSED = [
    "",
    "DELETE FROM numbers",
    "INSERT INTO batches VALUES (1)",
    "CREATE TABLE x AS SELECT 1",
    "DROP VIEW samples",
    "COPY numbers TO '/tmp/x.csv'",
    "ATTACH '/tmp/x.duckdb'",
    "SET threads = 8",
    "RESET memory_limit",
    "PRAGMA enable_profiling",
    "INSTALL httpfs",
    "LOAD httpfs",
    "CALL pragma_version()",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP VIEW samples",
    "EXPLAIN ANALYZE DELETE FROM numbers",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '/tmp/x.csv'",
    "/* x */ EXPLAIN ANALYZE DELETE FROM numbers",
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM glob('/etc/*')",
    "SELECT getenv('HOME')",
    "SELECT * FROM nowhere",
    "SELECT nothing FROM samples",
    "SELECT sum(tags) FROM samples",
    "SELEC 1",
    "WITH x AS (DELETE FROM numbers RETURNING 1) SELECT * FROM x",
    "BEGIN",
    "CHECKPOINT",
    "PREPARE x AS SELECT 1",
]


@pytest.mark.parametrize("kind", ["open", "sealed"])
def test_nothing_but_reading_the_buffer_is_answered(tmp_path: Path, kind: str) -> None:
    with running(tmp_path / "data", KNOWN) as buffer:
        buffer.put(metrics([Number(0, T0, 1.0)]))
        if kind == "sealed":
            buffer.roll()
            buffer.sealed(1)
        for statement in REFUSED:
            with pytest.raises(QuestionError) as refused:
                rows(buffer, statement)
            assert str(tmp_path) not in str(refused.value) or "nowhere" in statement
        with pytest.raises(QuestionError):
            rows(buffer, f"SELECT * FROM read_text('{tmp_path}/data/lock')")
        assert rows(buffer, "SELECT count(*) FROM samples") == [(1,)]


READS = [
    "FROM samples",
    "WITH x AS (SELECT 1 AS a) SELECT a FROM x",
    "DESCRIBE samples",
    "SHOW TABLES",
    "SUMMARIZE numbers",
    "EXPLAIN SELECT * FROM samples",
    "explain analyze select 1",
    "VALUES (1)",
]


@pytest.mark.parametrize("statement", READS)
def test_every_form_of_reading_is_answered(tmp_path: Path, statement: str) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Number(0, T0, 1.0)]))
        assert rows(buffer, statement)


def test_rows_and_time_are_limited(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        answer = question.ask(buffer.catalog, "SELECT * FROM range(100000)", limit=10)
        assert (len(answer.rows()), answer.truncated) == (10, True)
        assert not question.ask(buffer.catalog, "SELECT * FROM range(10)", limit=10).truncated
        with pytest.raises(QuestionError, match=r"no answer within 0\.2 s"):
            question.ask(
                buffer.catalog,
                "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a != b",
                timeout_s=0.2,
            )


def test_too_much_memory_is_refused_and_the_index_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN, BufferSettings(memory_limit_bytes=32 << 20)) as buffer:
        with pytest.raises(QuestionError, match="memory"):
            question.ask(buffer.catalog, "SELECT list(range) FROM range(100000000)")
        buffer.put(metrics([Number(0, T0, 1.0)]))
        assert rows(buffer, "SELECT count(*) FROM samples") == [(1,)]


def test_answers_can_be_said_in_json(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        answer = question.ask(
            buffer.catalog,
            "SELECT make_timestamp_ns(1760000000123456789) AS t, MAP {'a': 1.5::DOUBLE} AS m, 'x'::BLOB AS b, "
            "'nan'::DOUBLE AS f, [1, NULL] AS l, 18446744073709551615::UBIGINT AS u, [make_timestamp_ns(1)] AS lt",
        )
        assert answer.as_json() == {
            "columns": ["t", "m", "b", "f", "l", "u", "lt"],
            "rows": [
                [
                    "2025-10-09 08:53:20.123456789",
                    {"a": 1.5},
                    "eA==",
                    "nan",
                    [1, None],
                    2**64 - 1,
                    ["1970-01-01 00:00:00.000000001"],
                ]
            ],
            "truncated": False,
        }


@pytest.mark.parametrize("what", ["flipped", "deleted"])
def test_an_index_that_is_hit_while_it_is_used_is_made_anew(tmp_path: Path, what: str) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Number(0, T0 + at, float(at)) for at in range(1000)]))
        assert rows(buffer, "SELECT count(*) FROM samples") == [(1000,)]
        (index,) = (tmp_path / "segments").glob("*/index.duckdb")
        for path in index.parent.glob("index.duckdb*"):
            if what == "deleted":
                path.unlink()
            else:
                path.write_bytes(bytes(byte ^ 0x55 for byte in path.read_bytes()))
        buffer.put(metrics([Number(0, T0 - at, float(at)) for at in range(1, 1001)]))
        assert buffer.indexer.catch_up(10)
        assert rows(buffer, "SELECT count(*), count(DISTINCT time) FROM samples") == [(2000, 2000)]


def test_an_index_that_duckdb_can_use_no_more_is_made_anew(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Number(0, T0, 1.0)]))
        assert rows(buffer, "SELECT count(*) FROM samples") == [(1,)]
        buffer.catalog.snapshot().cursor.execute("DROP TABLE s1.numbers")
        buffer.put(metrics([Number(0, T0, 2.0)]))
        assert rows(buffer, "SELECT value FROM samples ORDER BY 1") == [(1.0,), (2.0,)]
        assert buffer.meters.quarantined.labels("index")._value.get() == 1
        buffer.roll()
        buffer.sealed(1)
        assert rows(buffer, "SELECT value FROM samples ORDER BY 1") == [(1.0,), (2.0,)]


def test_what_a_crash_left_open_is_there_after_the_start_whatever_lies_beside_it(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Number(0, T0, 1.0)]))
        assert rows(buffer, "SELECT count(*) FROM samples") == [(1,)]
    (tmp_path / "segments" / "00000001.open" / "index.duckdb").write_bytes(b"garbage")
    with running(tmp_path, KNOWN) as buffer:
        assert rows(buffer, "SELECT count(*) FROM samples") == [(1,)]
        assert segment.segments(tmp_path)[0].state is segment.State.SEALED


def test_files_are_asked_when_no_gateway_runs_and_not_when_one_does(tmp_path: Path) -> None:
    with segment.lock(tmp_path), running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Number(0, T0, 1.0)]))
        with pytest.raises(StorageError, match="in use by process"):
            question.ask_files(tmp_path, "SELECT 1")
        status = question.status(tmp_path)
        assert (status.segments, status.batches, status.points) == ({"open": 1, "sealed": 0}, 1, {"metric": 1})
        assert (status.first_batch, status.last_batch) == (1, 1)
        assert status.oldest_received == status.newest_received != ""
    assert question.ask_files(tmp_path, "SELECT value FROM samples").rows() == [(1.0,)]
    status = question.status(tmp_path)
    assert (status.segments, status.batches, status.points) == ({"open": 0, "sealed": 1}, 1, {"metric": 1})
    assert status.sealed_bytes > 0


def test_a_question_goes_on_while_its_segment_is_sealed(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Number(0, T0 + at, float(at)) for at in range(5000)]))
        assert buffer.indexer.catch_up(5)
        found: list[object] = []
        asking = threading.Thread(
            target=lambda: found.append(
                rows(buffer, "SELECT count(*) FROM numbers a, numbers b WHERE a.value + b.value >= 0")
            )
        )
        asking.start()
        buffer.roll()
        buffer.sealed(1)
        asking.join(30)
        assert found == [[(25_000_000,)]]
