"""Followers: every batch once and in order, whatever happens to the segments under them."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pytest

from gateway.buffer import seal, segment
from gateway.buffer.reader import Follower, follow
from gateway.buffer.segment import Segment, segments
from gateway.config import BufferSettings
from gateway.model import Kind, Refusal, Signal
from tests.buffer.made import Number, Reading, Running, events, metrics, running, series, span, wait_for

KNOWN = [series(number, Kind.INT) for number in range(40)]
SMALL = BufferSettings(segment_bytes=20_000, min_free_disk_bytes=0)
BATCHES = 400


def write(buffer: Running, count: int = BATCHES) -> None:
    for number in range(count):
        if number % 10 == 0:
            buffer.put(events([span(number)]))
        else:
            buffer.put(metrics([Number((number + at) % 40, number, number * 100 + at) for at in range(20)]))


class Listener(threading.Thread):
    """Follows to the end and keeps what it was told."""

    def __init__(self, follower: Follower, last: int, pause_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.follower, self.last, self.pause_s = follower, last, pause_s
        self.batches: list[int] = []
        self.values: dict[int, set[tuple[str, int]]] = {}
        self.error: Exception | None = None

    def run(self) -> None:
        reading = Reading()
        deadline = time.monotonic() + 60
        try:
            while self.follower.position < self.last and time.monotonic() < deadline:
                record = self.follower.next(0.5)
                if record is None:
                    continue
                self.batches.append(record.batch)
                rows = reading.rows(record)
                if record.signal is Signal.METRICS:
                    self.values[record.batch] = {(str(row[1]), int(row[4])) for row in rows}  # type: ignore[call-overload]
                if self.pause_s:
                    time.sleep(self.pause_s)
        except Exception as error:  # noqa: BLE001 (told by the test)
            self.error = error


def test_followers_get_every_batch_once_in_order_while_segments_are_sealed_under_them(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN, SMALL) as buffer:
        listeners = [
            Listener(follow(tmp_path, buffer.writer, 0), BATCHES),
            Listener(follow(tmp_path, buffer.writer, 0), BATCHES, pause_s=0.002),
            Listener(follow(tmp_path, buffer.writer, 0, Signal.METRICS), BATCHES),
            Listener(follow(tmp_path, buffer.writer, 0, Signal.TRACES), BATCHES, pause_s=0.01),
        ]
        for listener in listeners:
            listener.start()
        write(buffer)
        late = Listener(follow(tmp_path, buffer.writer, 57), BATCHES)
        late.start()
        for listener in (*listeners, late):
            listener.join(60)
            assert listener.error is None
            assert listener.follower.lost_batches == 0
        every = list(range(1, BATCHES + 1))
        traces = [batch for batch in every if batch % 10 == 1]
        assert listeners[0].batches == listeners[1].batches == every
        assert listeners[2].batches == [batch for batch in every if batch not in traces]
        assert listeners[3].batches == [batch for batch in traces if batch <= BATCHES]
        assert late.batches == every[57:]
        expected = {
            batch: {(str(KNOWN[(batch - 1 + at) % 40].pack()), (batch - 1) * 100 + at) for at in range(20)}
            for batch in listeners[2].batches
        }
        for listener in listeners[:3]:
            assert listener.values == expected
        assert len(segments(tmp_path)) > 3


def test_a_follower_that_is_overtaken_by_retention_counts_what_it_lost_and_ends_at_the_end(
    tmp_path: Path,
) -> None:
    settings = BufferSettings(segment_bytes=20_000, max_bytes=600_000, min_free_disk_bytes=0, when_full="drop_oldest")
    with running(tmp_path, KNOWN, settings) as buffer:
        follower = follow(tmp_path, buffer.writer, 0)
        buffer.put(events([span(1)]))
        assert follower.next(5)
        pruned = buffer.meters.pruned_points.labels("no", "max_bytes")._value
        deadline = time.monotonic() + 30
        while not pruned.get() and time.monotonic() < deadline:
            with contextlib.suppress(Refusal):  # full for a moment, until what is closed is sealed and can go
                write(buffer, 100)
        assert pruned.get() > 0
        last = buffer.writer.committed().batch
        listener = Listener(follower, last)
        listener.run()
        assert listener.error is None
        assert follower.position == last
        assert len(listener.batches) + follower.lost_batches == last - 1
        assert listener.batches == sorted(set(listener.batches))


def test_a_byte_that_changes_in_the_open_journal_costs_its_record_only(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Number(0, 1, 1)]))
        begin = buffer.writer.committed().offset
        buffer.put(metrics([Number(1, 2, 2)]))
        buffer.put(metrics([Number(1, 3, 3)]))
        path = tmp_path / "segments" / "00000001.open" / "journal"
        raw = bytearray(path.read_bytes())
        raw[begin + 20] ^= 1
        path.write_bytes(raw)
        listener = Listener(follow(tmp_path, buffer.writer, 0), 3)
        listener.run()
        assert listener.error is None
        assert listener.batches == [1, 3]
        assert listener.values[3] == {(str(KNOWN[1].pack()), 3)}  # its definition was saved from the damaged record
        assert buffer.indexer.catch_up(5)


def test_what_is_damaged_in_the_journal_of_a_sealed_segment_is_read_from_its_files(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        begins = []
        for number in range(4):
            begins.append(buffer.writer.committed().offset)
            buffer.put(metrics([Number(number, number, number)]))
        journal = (tmp_path / "segments" / "00000001.open" / "journal").read_bytes()
        buffer.roll()
        wait_for((tmp_path / "segments" / "00000001" / "manifest.json").exists)
        wait_for(lambda: not (tmp_path / "segments" / "00000001" / "journal").exists())
        raw = bytearray(journal)
        raw[begins[2] + 20] ^= 1
        (tmp_path / "segments" / "00000001" / "journal").write_bytes(raw)  # as if a sink had needed it
        listener = Listener(follow(tmp_path, buffer.writer, 0), 4)
        listener.run()
        assert listener.error is None
        assert listener.batches == [1, 2, 3, 4]
        assert listener.values[3] == {(str(KNOWN[2].pack()), 2)}


def test_a_follower_of_events_passes_over_metrics_without_reading_them(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        follower = follow(tmp_path, buffer.writer, 0, Signal.TRACES)
        buffer.put(events([span(1)]))
        assert (record := follower.next(5)) is not None
        assert record.batch == 1
        begin = buffer.writer.committed().offset
        for number in range(20):
            buffer.put(metrics([Number(0, number, number)]))
        with (tmp_path / "segments" / "00000001.open" / "journal").open("r+b") as journal:
            journal.seek(begin)
            journal.write(b"?" * 1000)  # whoever read them would stumble
        assert follower.next(0) is None
        assert follower.position == 21
        buffer.put(events([span(2)]))
        assert (record := follower.next(5)) is not None
        assert record.batch == 22
        assert follower.position == 22


def test_a_follower_that_is_closed_returns_at_once(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        follower = follow(tmp_path, buffer.writer, 0)
        waiting = threading.Thread(target=follower.next, args=(30,), daemon=True)
        waiting.start()
        follower.close()
        waiting.join(2)
        assert not waiting.is_alive()
        assert follower.next(30) is None


def test_a_batch_is_told_as_soon_as_it_is_safe(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN) as buffer:
        follower = follow(tmp_path, buffer.writer, 0)
        assert follower.next(0) is None
        for number in range(1, 20):
            buffer.put(metrics([Number(0, number, number)]))
            record = follower.next(5)
            assert record is not None
            assert record.batch == number
            assert record.definitions == (((0, KNOWN[0].pack()),) if number == 1 else ())
        buffer.roll()
        assert follower.next(0) is None
        buffer.put(metrics([Number(0, 1, 1)]))
        record = follower.next(5)
        assert record is not None
        assert (record.segment, record.definitions) == (2, ((0, KNOWN[0].pack()),))


def test_without_a_writer_a_follower_ends_where_the_files_end(tmp_path: Path) -> None:
    with running(tmp_path, KNOWN, SMALL) as buffer:
        write(buffer, 50)
        wait_for(lambda: len(segments(tmp_path)) > 1)
    follower = follow(tmp_path, None, 0)
    found = []
    while (record := follower.next(0)) is not None:
        found.append(record.batch)
    assert found == list(range(1, 51))


def test_a_segment_that_is_sealed_between_being_found_and_being_opened_is_read_in_its_new_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, KNOWN) as buffer:
        buffer.put(metrics([Number(0, 1, 1)]), metrics([Number(1, 2, 2)]))
    found = segments(tmp_path)

    def found_before_it_was_sealed(data_dir: Path) -> list[Segment]:
        monkeypatch.undo()
        manifest = seal.seal(data_dir, found[0])
        assert manifest is not None
        seal.tidy(segment.sealed(found[0]), manifest, lambda first, last: False)
        return found

    monkeypatch.setattr(segment, "segments", found_before_it_was_sealed)
    listener = Listener(follow(tmp_path, None, 0), 2)
    listener.run()
    assert listener.error is None
    assert listener.batches == [1, 2]
