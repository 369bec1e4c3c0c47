"""The journal: what was written comes back, and damage costs the record that it hit and no other (case 24)."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.buffer import journal
from gateway.buffer.journal import (
    FILE_HEADER,
    RECORD_HEADER,
    RECORD_MAGIC,
    Damage,
    Entry,
    Header,
    Tail,
    file_header,
    read_header,
    record_parts,
    scan,
    write_all,
)
from gateway.buffer.record import pack_definitions, padded
from gateway.model import Signal, StorageError
from tests.data import case

HEADER = Header(segment=7, first_batch=1, created_ns=1_700_000_000_000_000_000, gateway_id=b"gateway")
BODY_SIZE, CRC, DEFINITIONS_SIZE, BATCH, SIGNAL = 16, 8, 12, 24, 40
"""Where a record's header has them."""


@dataclass(frozen=True)
class Written:
    """A record as the test wrote it."""

    batch: int
    body: bytes
    definitions: tuple[tuple[int, bytes], ...] = ()
    signal: Signal = Signal.METRICS
    points: int = 1
    received_ns: int = 5

    @property
    def raw(self) -> bytes:
        parts, size = record_parts(
            self.batch,
            self.received_ns,
            self.signal,
            self.points,
            pack_definitions(self.definitions),
            self.body,
        )
        raw = b"".join(bytes(part) for part in parts)
        assert len(raw) == size == padded(size)
        return raw


def records(count: int, body_bytes: int = 100) -> list[Written]:
    return [Written(batch, bytes((batch % 251,)) * body_bytes) for batch in range(1, count + 1)]


def write(path: Path, written: Sequence[Written], behind: bytes = b"") -> list[int]:
    """A journal with ``written``; where each record begins, and where the last one ends."""
    raw = bytearray(file_header(HEADER))
    borders = [len(raw)]
    for record in written:
        raw += record.raw
        borders.append(len(raw))
    path.write_bytes(bytes(raw) + behind)
    return borders


def read(path: Path, offset: int = 0, end: int | None = None) -> tuple[list[Written], list[Damage]]:
    """All that a journal gives back; entries and damages must follow each other without a gap."""
    found, damages = [], []
    at = max(offset, FILE_HEADER.size)
    for each in scan(path, offset, end):
        assert each.offset == at < each.end
        at = each.end
        if isinstance(each, Damage):
            damages.append(each)
            continue
        record = each.record
        assert record.segment == HEADER.segment
        found.append(
            Written(
                record.batch,
                bytes(record.body),
                record.definitions,
                record.signal,
                record.points,
                record.received_ns,
            )
        )
    assert at == (path.stat().st_size if end is None else min(end, path.stat().st_size))
    return found, damages


def patch(path: Path, at: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(raw)


def flip(path: Path, at: int, bit: int = 0) -> None:
    patch(path, at, bytes((path.read_bytes()[at] ^ 1 << bit,)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


WRITTEN = st.lists(
    st.builds(
        Written,
        batch=st.integers(0, 2**64 - 1),
        body=st.binary(max_size=300),
        definitions=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=3).map(tuple),
        signal=st.sampled_from(Signal),
        points=st.integers(0, 2**32 - 1),
        received_ns=st.integers(-(2**63), 2**63 - 1),
    ),
    max_size=12,
)


@given(WRITTEN, st.sampled_from([64, 100, 256, 4 << 20]))
def test_every_record_comes_back_as_it_was_written_however_little_is_read_at_a_time(
    written: list[Written], read_bytes: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(journal, "_READ_BYTES", read_bytes)
        path = Path(folder) / "journal"
        borders = write(path, written)
        assert read(path) == (written, [])
        for count, border in enumerate(borders):
            assert read(path, border) == (written[count:], [])
            assert read(path, 0, border) == (written[:count], [])


def test_the_header_says_what_the_journal_is(path: Path) -> None:
    write(path, [])
    assert read_header(path) == HEADER
    assert read(path) == ([], [])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not a journal"),
        (file_header(HEADER)[:63], "not a journal"),
        (b"PAR1" + file_header(HEADER)[4:], "not a journal"),
        (file_header(HEADER)[:8] + struct.pack("<I", 2) + file_header(HEADER)[12:], "journal version 2"),
    ],
)
def test_a_file_that_is_no_journal_is_named(path: Path, raw: bytes, says: str) -> None:
    path.write_bytes(raw)
    for look in (read_header, lambda path: list(scan(path)), Tail):
        with pytest.raises(StorageError, match=f"{path}: {says}"):
            look(path)


@pytest.mark.parametrize("cut", range(1, 65))
def test_a_torn_tail_costs_the_last_record_and_is_told_with_its_range(path: Path, cut: int) -> None:
    written = records(3)
    borders = write(path, written)
    os.truncate(path, borders[-1] - cut)
    found, damages = read(path)
    assert found == written[:2]
    (damage,) = damages
    assert (damage.offset, damage.end, damage.harmless) == (borders[2], borders[-1] - cut, False)
    assert "before the record does" in damage.why


@pytest.mark.parametrize("kept", range(1, RECORD_HEADER.size + 1))
def test_the_beginning_of_a_record_at_the_end_is_no_record(path: Path, kept: int) -> None:
    write(path, records(2), behind=records(1)[0].raw[:kept])
    found, damages = read(path)
    assert found == records(2)
    assert [damage.harmless for damage in damages] == [False]


def test_a_flipped_bit_costs_the_one_record_that_it_hit(path: Path) -> None:
    written = records(5, body_bytes=41)
    borders = write(path, written)
    whole = path.read_bytes()
    padding = range(borders[3] - len(written[2].raw) + RECORD_HEADER.size + 41, borders[3])
    for at in range(borders[2], borders[3]):
        for bit in range(8):
            flip(path, at, bit)
            found, damages = read(path)
            if at in padding:
                assert (found, damages) == (written, []), "what fills up to a multiple of 8 means nothing"
            else:
                assert found == written[:2] + written[3:], f"byte {at - borders[2]} bit {bit}"
                assert [(damage.offset, damage.end) for damage in damages] == [(borders[2], borders[3])]
            path.write_bytes(whole)


def test_a_size_that_leads_to_another_record_by_chance_costs_no_neighbour(path: Path) -> None:
    written = records(4, body_bytes=976)
    borders = write(path, written)
    assert borders[1] - borders[0] == 1024
    patch(path, borders[0] + BODY_SIZE, struct.pack("<I", 2000))
    found, damages = read(path)
    assert found == written[1:]
    assert [(damage.offset, damage.end) for damage in damages] == [(borders[0], borders[1])]


@pytest.mark.parametrize("field", [DEFINITIONS_SIZE, BODY_SIZE])
@pytest.mark.parametrize("lie", [0, 8, 5_000, 2**31, 2**32 - 1])
def test_a_size_that_lies_costs_its_record_and_little_memory(path: Path, field: int, lie: int) -> None:
    written = [replace(record, definitions=((1, b"definition"),)) for record in records(200, body_bytes=60_000)]
    borders = write(path, written)
    patch(path, borders[100] + field, struct.pack("<I", lie))
    tracemalloc.start()
    try:
        seen = [(each.offset, isinstance(each, Damage)) for each in scan(path)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == [(border, border == borders[100]) for border in borders[:-1]]
    assert peak < 24 << 20


@pytest.mark.parametrize("count", [1, 7, 8, 47, 48, 49, 4096, 10_000])
def test_zeros_behind_the_last_record_are_harmless(path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(journal, "_READ_BYTES", 4096)
    written = records(3)
    borders = write(path, written, behind=bytes(count))
    found, damages = read(path)
    assert found == written
    assert [(each.offset, each.end, each.harmless) for each in damages] == [(borders[-1], borders[-1] + count, True)]


@pytest.mark.parametrize("behind", [b"x", bytes(5000) + b"x", b"x" + bytes(5000), RECORD_MAGIC, RECORD_MAGIC[:5]])
def test_anything_else_behind_the_last_record_is_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch, behind: bytes
) -> None:
    monkeypatch.setattr(journal, "_READ_BYTES", 256)
    write(path, records(3), behind=behind)
    found, damages = read(path)
    assert found == records(3)
    assert [damage.harmless for damage in damages] == [False]


@pytest.mark.parametrize("gap", [bytes(4096), b"\xff" * 4096, RECORD_MAGIC[:-1] * 99])
@pytest.mark.parametrize("read_bytes", [64, 100, 4 << 20])
def test_records_behind_a_lost_stretch_are_found(
    path: Path, monkeypatch: pytest.MonkeyPatch, gap: bytes, read_bytes: int
) -> None:
    monkeypatch.setattr(journal, "_READ_BYTES", read_bytes)
    written = records(4)
    borders = write(path, written[:2])
    with path.open("ab") as file:
        file.write(gap + written[2].raw + written[3].raw)
    found, damages = read(path)
    assert found == written
    assert [(each.offset, each.end) for each in damages] == [(borders[-1], borders[-1] + len(gap))]
    assert not damages[0].harmless, "records lie behind it: something was there"


def test_a_record_that_a_sender_hid_in_its_data_is_never_taken_for_one(path: Path) -> None:
    """Whoever knows the layout can put a whole record, with the right checksum, into a request."""
    hidden = Written(9, b"forged").raw
    written = [Written(1, b"a"), Written(2, b"x" * 40 + hidden * 3), Written(3, b"c")]
    borders = write(path, written)
    assert read(path) == (written, [])
    flip(path, borders[1] + RECORD_HEADER.size)
    found, damages = read(path)
    assert found == [written[0], written[2]]
    assert [(each.offset, each.end) for each in damages] == [(borders[1], borders[2])]


def test_magic_numbers_by_the_thousand_in_lost_bytes_are_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [Written(1, b"a"), Written(2, RECORD_MAGIC * 20_000), Written(3, b"c")]
    borders = write(path, written)
    flip(path, borders[1] + BATCH)
    asked = []
    pread = os.pread

    def counted(descriptor: int, size: int, at: int) -> bytes:
        raw = pread(descriptor, size, at)
        asked.append(len(raw))
        return raw

    monkeypatch.setattr(os, "pread", counted)
    found, _ = read(path)
    assert found == [written[0], written[2]]
    assert sum(asked) < 10 * path.stat().st_size, "read again for every magic: thousands of times that"


def test_a_whole_record_that_means_nothing_is_damage(path: Path) -> None:
    for signal, definitions in ((9, b""), (1, b"\x01\0\0\0\xff\xff\0\0"), (1, b"\x01\0\0\0")):
        parts, _ = record_parts(2, 5, signal, 1, definitions, b"body")  # type: ignore[arg-type]
        borders = write(path, records(1), behind=b"".join(map(bytes, parts)))
        with path.open("ab") as file:
            file.write(Written(3, b"c").raw)
        found, damages = read(path)
        assert found == [*records(1), Written(3, b"c")]
        assert [damage.offset for damage in damages] == [borders[-1]]
        assert "cannot be understood" in damages[0].why


def test_a_journal_that_is_shorter_than_it_was_said_to_be_comes_to_an_end(path: Path) -> None:
    written = records(3)
    borders = write(path, written)
    assert read(path, 0, borders[-1] + 10_000) == (written, [])


def test_a_journal_that_shrinks_while_it_is_read_comes_to_an_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_READ_BYTES", 256)
    borders = write(path, records(9))
    reading = scan(path)
    first = next(reading)
    os.truncate(path, borders[2])
    rest = list(reading)
    assert isinstance(first, Entry)
    assert [each.record.batch for each in rest if isinstance(each, Entry)] == [2]


@settings(max_examples=300)
@given(st.data())
def test_whatever_happens_to_one_stretch_of_bytes_the_other_records_come_back(data: st.DataObject) -> None:
    written = records(8, body_bytes=data.draw(st.sampled_from([0, 3, 16, 80, 464])))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        borders = write(path, written)
        at = data.draw(st.integers(FILE_HEADER.size, borders[-1] - 1))
        garbage = data.draw(st.binary(min_size=1, max_size=min(200, borders[-1] - at)))
        patch(path, at, garbage)
        found, _ = read(path)
    untouched = [
        record
        for record, begin, end in zip(written, borders[:-1], borders[1:], strict=True)
        if end <= at or at + len(garbage) <= begin
    ]
    assert [record for record in found if record in untouched] == untouched
    assert all(record in written for record in found)


def test_a_tail_reads_what_is_committed_and_nothing_beyond(path: Path) -> None:
    written = records(3)
    borders = write(path, written)
    with Tail(path) as tail:
        assert tail.segment == HEADER.segment
        assert tail.read(0) == []
        assert tail.read(borders[0]) == []
        assert [entry.record.batch for entry in tail.read(borders[2])] == [1, 2]
        assert (tail.offset, tail.read(borders[2])) == (borders[2], [])
        (entry,) = tail.read(borders[3])
        assert (entry.offset, entry.end, entry.record.batch) == (borders[2], borders[3], 3)
    with Tail(path, borders[1]) as tail:
        assert [entry.record.batch for entry in tail.read(borders[3])] == [2, 3]


@given(st.lists(st.integers(0, 400), min_size=1, max_size=10), st.integers(1, 600))
def test_a_tail_gives_every_record_once_however_little_it_may_read(sizes: list[int], limit: int) -> None:
    written = [Written(batch, bytes(size)) for batch, size in enumerate(sizes, 1)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        borders = write(path, written)
        given_out = []
        with Tail(path) as tail:
            while entries := tail.read(borders[-1], limit):
                assert len(entries) == 1 or entries[-1].end - entries[0].offset <= limit
                given_out += entries
        assert [entry.record.batch for entry in given_out] == list(range(1, len(sizes) + 1))
        assert [entry.offset for entry in given_out] == borders[:-1]


def test_a_tail_gives_out_what_lies_before_the_damage_and_then_says_where_it_is(path: Path) -> None:
    borders = write(path, records(4))
    flip(path, borders[2] + RECORD_HEADER.size)
    with Tail(path) as tail:
        assert [entry.record.batch for entry in tail.read(borders[-1])] == [1, 2]
        for _ in range(2):
            with pytest.raises(StorageError, match=f"bytes at {borders[2]} are not the record"):
                tail.read(borders[-1])


@pytest.mark.parametrize("left", [0, 10, 200])
def test_a_tail_does_not_take_a_journal_cut_short_for_one_that_has_nothing_new(path: Path, left: int) -> None:
    borders = write(path, records(4))
    os.truncate(path, borders[2] + min(left, borders[-1] - borders[2] - 1))
    with Tail(path, borders[2]) as tail, pytest.raises(StorageError, match="shorter than what was synced"):
        while tail.read(borders[-1]):
            pass


@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(1, 40))
def test_short_writes_are_gone_on_with(parts: list[bytes], most: int) -> None:
    writev = os.writev

    def short(descriptor: int, buffers: Sequence[memoryview]) -> int:
        return writev(descriptor, [b"".join(bytes(part) for part in buffers)[:most]])

    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "writev", short)
        path = Path(folder) / "file"
        with path.open("wb", buffering=0) as file:
            write_all(file.fileno(), parts)
        assert path.read_bytes() == b"".join(parts)


def test_more_parts_than_one_system_call_takes_are_written(path: Path) -> None:
    parts = [str(number).encode() for number in range(3000)]
    with path.open("wb", buffering=0) as file:
        write_all(file.fileno(), parts)
    assert path.read_bytes() == b"".join(parts)


def test_the_steps_of_case_24_that_concern_the_journal_are_tested_here() -> None:
    steps = {step["id"] for step in case("24-")["steps"]}
    assert {"torn-tail", "flip-middle", "length-lie", "zero-tail", "enospc", "eio-fsync"} <= steps
