"""Sealing: crash-safe at every step, complete, and kept from what damage does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from gateway.buffer import seal, segment
from gateway.buffer.catalog import Catalog, Recovered
from gateway.buffer.journal import Header, file_header, record_parts, scan
from gateway.buffer.reader import follow
from gateway.buffer.record import pack_definitions
from gateway.buffer.segment import Manifest, Segment, State
from gateway.config import BufferSettings
from gateway.metrics import Meters
from gateway.model import Batch, Kind, Series, StorageError
from gateway.series import TRANSIENT, SeriesTable
from tests.buffer.made import Distribution, Number, Reading, events, metrics, running, series, span

KNOWN = [series(0, Kind.DOUBLE), series(1, Kind.INT), series(2, Kind.HISTOGRAM)]

STEPS = ("cleared", "series", "batches", "events", "numbers", "distributions", "manifest", "renamed")


class Stopped(Exception):
    """As if the process had ended here."""


def stop_after(wanted: str) -> Callable[[str], None]:
    def step(name: str) -> None:
        if name == wanted:
            raise Stopped(name)

    return step


def journal(data_dir: Path, *batches: Batch, number: int = 1, known: list[Series] = KNOWN) -> Segment:
    """A closed segment with these batches."""
    table = SeriesTable()
    for each, definition in enumerate(known):
        table.define(each, definition.pack())
    path = data_dir / "segments" / f"{number:08d}.open"
    path.mkdir(parents=True)
    with (path / "journal").open("wb") as file:
        file.write(file_header(Header(number, 1, 0, b"gateway")))
        for batch_number, batch in enumerate(batches, 1):
            definitions = batch.definitions + table.undefined(batch.body)
            parts, _ = record_parts(
                batch_number, batch.received_ns, batch.signal, batch.points, definitions, batch.body
            )
            file.write(b"".join(parts))
    return Segment(number, State.OPEN, path)


def some_batches() -> list[Batch]:
    return [
        metrics([Number(0, 5, 1.5), Number(1, 5, 7), Number(0, 3, 2.5)]),
        events([span(1), span(2)]),
        metrics([Distribution(2, 9, 10, (1, 2, 3, 4), sum=0.5), Number(1, 9, -(2**63))]),
    ]


def told(data_dir: Path) -> list[list[tuple[object, ...]]]:
    """What a follower is told of a data directory on which no gateway runs."""
    reading, found = Reading(), []
    follower = follow(data_dir, None, 0)
    while (record := follower.next(0)) is not None:
        found.append(reading.rows(record))
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_after_any_step_of_sealing_loses_nothing_and_the_next_start_finishes_it(
    tmp_path: Path, step: str
) -> None:
    closed = journal(tmp_path, *some_batches())
    before = told(tmp_path)
    with pytest.raises(Stopped):
        seal.seal(tmp_path, closed, stop_after(step))
    assert told(tmp_path) == before
    with running(tmp_path) as buffer:
        sealed = buffer.sealed(1)
        buffer.indexer.catch_up(5)
        assert Manifest.read(sealed.path).verify(sealed.path) == []
    assert told(tmp_path) == before
    assert sorted(each.name for each in sealed.path.iterdir()) == [
        "batches.parquet",
        "distributions.parquet",
        "events.parquet",
        "manifest.json",
        "numbers.parquet",
        "series.parquet",
    ]


@pytest.mark.parametrize("step", ["index deleted", "journal deleted"])
def test_a_crash_while_the_rest_is_deleted_is_made_good(tmp_path: Path, step: str) -> None:
    closed = journal(tmp_path, *some_batches())
    (closed.path / "index.duckdb").write_bytes(b"x")
    before = told(tmp_path)
    manifest = seal.seal(tmp_path, closed)
    assert manifest is not None
    with pytest.raises(Stopped):
        seal.tidy(segment.sealed(closed), manifest, lambda first, last: False, stop_after(step))
    assert told(tmp_path) == before
    assert seal.tidy(segment.sealed(closed), manifest, lambda first, last: False)
    assert not (segment.sealed(closed).path / "index.duckdb").exists()
    assert told(tmp_path) == before


def test_the_journal_stays_while_a_sink_needs_its_batches(tmp_path: Path) -> None:
    closed = journal(tmp_path, *some_batches())
    manifest = seal.seal(tmp_path, closed)
    sealed = segment.sealed(closed)
    assert manifest is not None
    assert not seal.tidy(sealed, manifest, lambda first, last: first <= 3 <= last)
    assert [entry.record.batch for entry in scan(sealed.journal)] == [1, 2, 3]  # type: ignore[union-attr]
    assert seal.tidy(sealed, manifest, lambda first, last: first <= 4 <= last)
    assert not sealed.journal.exists()


def test_the_manifest_says_what_is_in_the_segment(tmp_path: Path) -> None:
    manifest = seal.seal(tmp_path, journal(tmp_path, *some_batches()))
    assert manifest is not None
    assert (manifest.first_batch, manifest.last_batch, manifest.series) == (1, 3, 3)
    assert (manifest.batches, manifest.points) == ({"metrics": 2, "traces": 1}, {"metric": 5, "tracing": 2})
    assert manifest.rows == {"series": 3, "batches": 3, "events": 2, "numbers": 4, "distributions": 1}
    assert (manifest.first_time_ns, manifest.last_time_ns) == (3, span(2).time_ns)
    assert manifest.gateway_id == "gateway"
    assert Manifest.read(tmp_path / "segments" / "00000001") == manifest


def test_any_duckdb_reads_a_sealed_segment_by_itself_in_the_order_of_series_and_time(tmp_path: Path) -> None:
    seal.seal(tmp_path, journal(tmp_path, *some_batches()))
    folder = tmp_path / "segments" / "00000001"
    rows = duckdb.sql(
        f"SELECT n.segment, field, epoch_ns(time), value, int_value FROM '{folder}/numbers.parquet' n "
        f"JOIN '{folder}/series.parquet' s ON n.series = s.id"
    ).fetchall()
    assert sorted(rows, key=str) == sorted(
        [
            (1, "double.metric", 3, 2.5, None),
            (1, "double.metric", 5, 1.5, None),
            (1, "int.metric", 5, None, 7),
            (1, "int.metric", 9, None, -(2**63)),
        ],
        key=str,
    )
    table = pq.read_table(folder / "numbers.parquet")
    order = list(zip(table["series"].to_pylist(), table["time"].cast("int64").to_pylist(), strict=True))
    assert order == sorted(order)


def test_rows_beyond_one_slot_come_out_in_order_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [series(number, Kind.HISTOGRAM if number % 3 == 0 else Kind.INT) for number in range(50)]
    batches = [
        metrics(
            [
                Distribution(number, 1000 - at, at, (at, number, 1, 2))
                if number % 3 == 0
                else Number(number, 1000 - at, number * at)
                for number in range(50)
            ]
        )
        for at in range(20)
    ]
    closed = journal(tmp_path, *batches, known=known)
    before = told(tmp_path)
    monkeypatch.setattr(seal, "SLOT_ROWS", 64)
    monkeypatch.setattr(seal, "SLOT_BYTES", 4096 * 10)
    monkeypatch.setattr(seal, "_DEAL_ROWS", 100)
    manifest = seal.seal(tmp_path, closed)
    assert manifest is not None
    shutil.rmtree(closed.path, ignore_errors=True)
    (tmp_path / "segments" / "00000001" / "journal").unlink()
    assert told(tmp_path) == before
    table = pq.read_table(tmp_path / "segments" / "00000001" / "numbers.parquet")
    order = list(zip(table["series"].to_pylist(), table["time"].cast("int64").to_pylist(), strict=True))
    assert order == sorted(order)


def test_a_segment_without_records_disappears(tmp_path: Path) -> None:
    assert seal.seal(tmp_path, journal(tmp_path)) is None
    assert segment.segments(tmp_path) == []


def test_a_file_that_is_no_journal_stays_what_it_is(tmp_path: Path) -> None:
    closed = journal(tmp_path)
    closed.journal.write_bytes(b"something else")
    with pytest.raises(StorageError, match="not a journal"):
        seal.seal(tmp_path, closed)
    catalog = Catalog(tmp_path, BufferSettings(), Meters())
    catalog.seal_all(catalog.recover().closed)
    catalog.close()
    assert segment.segments(tmp_path) == []
    (note,) = (tmp_path / "quarantine").glob("*.json")
    assert "not a journal" in note.read_text()


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x40
    path.write_bytes(raw)


def test_a_flipped_byte_costs_one_record_and_not_the_definitions_in_it(tmp_path: Path) -> None:
    closed = journal(tmp_path, *some_batches())
    before = told(tmp_path)
    first = next(iter(scan(closed.journal)))
    flip(closed.journal, first.end - 4)  # in the body of the record that defines series 0 and 1
    assert told(tmp_path) == before[1:]
    manifest = seal.seal(tmp_path, closed)
    assert manifest is not None
    assert manifest.damaged_bytes == first.end - first.offset
    assert manifest.undefined_rows == 0
    (segment.sealed(closed).journal).unlink()
    assert told(tmp_path) == before[1:]
    kept = tmp_path / "quarantine" / f"00000001-journal-{first.offset}"
    assert kept.stat().st_size == first.end - first.offset
    assert "checksum" in kept.with_name(kept.name + ".json").read_text()


def test_rows_whose_definition_was_hit_are_left_out_and_counted(tmp_path: Path) -> None:
    closed = journal(tmp_path, *some_batches(), metrics([Number(0, 8, 8.0), Number(1, 8, 8)]))
    before = told(tmp_path)
    first = next(iter(scan(closed.journal)))
    flip(closed.journal, first.offset + 48 + 8 + 30)  # in the first definition
    expected = [*before[1:3], [row for row in before[3] if row[1] == KNOWN[1].pack()]]
    assert told(tmp_path) == expected
    manifest = seal.seal(tmp_path, closed)
    assert manifest is not None
    assert manifest.undefined_rows == 1
    segment.sealed(closed).journal.unlink()
    assert told(tmp_path) == expected


def test_a_journal_whose_header_is_hit_keeps_its_records(tmp_path: Path) -> None:
    closed = journal(tmp_path, *some_batches())
    before = told(tmp_path)
    flip(closed.journal, 3)
    assert seal.seal(tmp_path, closed) is not None
    assert told(tmp_path) == before


def test_a_torn_record_costs_itself_and_zeros_cost_nothing(tmp_path: Path) -> None:
    closed = journal(tmp_path, *some_batches())
    before = told(tmp_path)
    with closed.journal.open("ab") as file:
        file.write(bytes(4096))
    assert told(tmp_path) == before
    whole = closed.journal.stat().st_size
    with closed.journal.open("r+b") as file:
        file.truncate(whole - 4096 - 9)
    manifest = seal.seal(tmp_path, closed)
    assert manifest is not None
    assert manifest.damaged_bytes > 0
    assert told(tmp_path) == before[:2]


def test_series_ids_that_are_given_out_again_or_are_transient_do_not_mix_rows_up(tmp_path: Path) -> None:
    def defined(batch: Batch, *definitions: tuple[int, bytes]) -> Batch:
        return Batch(
            batch.signal,
            batch.received_ns,
            batch.body,
            batch.points,
            batch.losses,
            pack_definitions(definitions),
        )

    other, third = series(7, Kind.INT).pack(), series(8, Kind.DOUBLE).pack()
    batches = [
        metrics([Number(0, 1, 1.0)]),
        defined(metrics([Number(0, 2, 2)]), (0, other)),
        defined(metrics([Number(TRANSIENT + 1, 3, 3.0)]), (TRANSIENT + 1, third)),
        defined(metrics([Number(TRANSIENT + 2, 4, 4.0)]), (TRANSIENT + 2, third)),
    ]
    closed = journal(tmp_path, *batches)
    before = told(tmp_path)
    assert [rows[0][1] for rows in before] == [KNOWN[0].pack(), other, third, third]
    manifest = seal.seal(tmp_path, closed)
    assert manifest is not None
    assert manifest.series == 3
    segment.sealed(closed).journal.unlink()
    assert told(tmp_path) == before


def test_a_damaged_row_group_costs_its_rows_and_a_damaged_manifest_its_segment(tmp_path: Path) -> None:
    closed = journal(tmp_path, *some_batches())
    before = told(tmp_path)
    seal.seal(tmp_path, closed)
    sealed = segment.sealed(closed)
    sealed.journal.unlink()
    column = pq.ParquetFile(sealed.table("numbers")).metadata.row_group(0).column(2)
    flip(sealed.table("numbers"), column.data_page_offset + column.total_compressed_size - 2)
    found = told(tmp_path)
    assert found[1] == before[1]
    assert [row for rows in found for row in rows if row[0] == "distribution"] == [
        row for rows in before for row in rows if row[0] == "distribution"
    ]
    assert Manifest.read(sealed.path).verify(sealed.path) != []
    (sealed.path / segment.MANIFEST).write_text("{}")
    assert told(tmp_path) == []
    meters = Meters()
    catalog = Catalog(tmp_path, BufferSettings(), meters)
    assert catalog.recover() == Recovered([], 2, 1)
    catalog.close()
    assert meters.quarantined.labels("segment")._value.get() == 1
    assert segment.segments(tmp_path) == []


def test_a_start_goes_on_with_numbers_that_nobody_has_used(tmp_path: Path) -> None:
    def recovered() -> Recovered:
        catalog = Catalog(tmp_path, BufferSettings(), Meters())
        try:
            return catalog.recover()
        finally:
            catalog.close()

    assert recovered() == Recovered([], 1, 1)
    closed = journal(tmp_path, *some_batches(), number=4)
    assert recovered() == Recovered([closed], 5, 4)
    torn = closed.journal.stat().st_size - 5
    with closed.journal.open("r+b") as file:
        file.truncate(torn)
    assert recovered().next_batch > 4  # the torn record may have been number 3, or what is left of several
    seal.seal(tmp_path, closed)
    assert recovered() == Recovered([], 5, 3)


def test_a_data_point_may_be_several_rows(tmp_path: Path) -> None:
    summary = replace(metrics([Number(0, at, float(at)) for at in range(9)]), points=1)
    closed = journal(tmp_path, summary)
    before = told(tmp_path)
    seal.seal(tmp_path, closed)
    segment.sealed(closed).journal.unlink()
    assert told(tmp_path) == before
