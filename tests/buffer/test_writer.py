"""The writer: nothing is acknowledged before it is synced, nothing acknowledged is lost, whatever fails in between."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Gauge,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)

from gateway.buffer import writer as writer_module
from gateway.buffer.journal import FILE_HEADER, Damage, Entry, journal_path, read_header, scan
from gateway.buffer.record import Numbers, Record, pack_columns, pack_definitions, pack_events
from gateway.buffer.writer import Writer
from gateway.config import BufferSettings, PointSettings
from gateway.metrics import Meters
from gateway.model import Batch, Kind, Losses, Reason, Refusal, Series, Signal, StorageError
from gateway.otlp.registry import Registry
from gateway.otlp.wire import decode
from gateway.series import TRANSIENT, SeriesTable

WAIT_S = 10.0


def definition(name: str) -> bytes:
    return Series("m", name, (("host", "h"),), Kind.INT).pack()


def table_of(prefix: str, count: int = 4) -> SeriesTable:
    table = SeriesTable()
    for series in range(count):
        table.define(series, definition(f"{prefix}{series}"))
    return table


def metrics(*series: int, value: int = 0, definitions: bytes = b"") -> Batch:
    """A batch with a row for each of ``series``; ``value`` tells it from others."""
    ids = np.array(series, "<u4")
    times = np.zeros(len(ids), "<i8")
    body = pack_columns(Numbers(ids, times, times, np.full(len(ids), value, "<u8")))
    return Batch(Signal.METRICS, 5, body, len(ids), Losses(), definitions)


def logs(value: int, size: int = 8) -> Batch:
    """A batch without series: one event of ``size`` bytes."""
    return Batch(Signal.LOGS, 5, pack_events([(3, value, bytes(size))]), 1, Losses())


def gauge(name: str) -> bytes:
    """A request with one data point."""
    point = NumberDataPoint(as_int=1, time_unix_nano=1_700_000_000_000_000_000)
    metric = Metric(name=name, gauge=Gauge(data_points=[point]))
    return ExportMetricsServiceRequest(
        resource_metrics=[ResourceMetrics(scope_metrics=[ScopeMetrics(metrics=[metric])])]
    ).SerializeToString()


def value_of(record: Record) -> int:
    """What ``metrics`` or ``logs`` put in."""
    return int(record.events().time[0]) if record.signal is Signal.LOGS else int(record.numbers().bits[0])


def records(data_dir: Path, segment: int) -> list[Record]:
    """The records of a segment, which must have no damage."""
    found = list(scan(journal_path(data_dir, segment)))
    assert [each for each in found if isinstance(each, Damage)] == []
    return [each.record for each in found if isinstance(each, Entry)]


def segments(data_dir: Path) -> list[int]:
    return sorted(int(path.name.split(".")[0]) for path in (data_dir / "segments").iterdir())


def numbers(data_dir: Path) -> list[int]:
    return [record.batch for segment in segments(data_dir) for record in records(data_dir, segment)]


@contextmanager
def running(
    data_dir: Path,
    table: SeriesTable | None = None,
    settings: BufferSettings | None = None,
    *,
    on_roll: Callable[[int, int], None] = lambda closed, opened: None,
    full: Callable[[], str | None] = lambda: None,
    max_pending_bytes: int = 128 << 20,
    started: bool = True,
    meters: Meters | None = None,
) -> Iterator[Writer]:
    writer = Writer(
        data_dir,
        settings or BufferSettings(),
        meters or Meters(),
        table or SeriesTable(),
        segment=1,
        first_batch=1,
        gateway_id=b"test",
        on_roll=on_roll,
        full=full,
        max_pending_bytes=max_pending_bytes,
    )
    if started:
        writer.start()
    try:
        yield writer
    finally:
        writer.stop()


class Disk:
    """Stands between the writer and the real disk: counts syncs by file, holds them back, lets calls fail."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.synced: list[str] = []
        self.failing: dict[str, list[int]] = {"fdatasync": [], "writev": [], "ftruncate": []}
        self.reached = threading.Event()
        self.free = threading.Event()
        self.free.set()
        self._real = {name: getattr(os, name) for name in self.failing}
        patched.setattr(os, "fdatasync", self._fdatasync)
        patched.setattr(os, "writev", self._writev)
        patched.setattr(os, "ftruncate", self._ftruncate)

    def hold(self) -> None:
        """Every sync waits until ``free`` is set; ``reached`` says that one waits."""
        self.reached.clear()
        self.free.clear()

    def _fail(self, name: str) -> None:
        if self.failing[name]:
            number = self.failing[name].pop()
            raise OSError(number, os.strerror(number))

    def _fdatasync(self, descriptor: int) -> None:
        self.synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        self.reached.set()
        assert self.free.wait(WAIT_S)
        self._fail("fdatasync")
        self._real["fdatasync"](descriptor)

    def _writev(self, descriptor: int, parts: list[memoryview]) -> int:
        """A failing write puts half of its bytes down first, as a full disk does."""
        if self.failing["writev"]:
            raw = b"".join(bytes(part) for part in parts)
            self._real["writev"](descriptor, [raw[: len(raw) // 2]])
        self._fail("writev")
        return int(self._real["writev"](descriptor, parts))

    def _ftruncate(self, descriptor: int, size: int) -> None:
        self._fail("ftruncate")
        self._real["ftruncate"](descriptor, size)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def refusal(future: Future[int]) -> Refusal:
    error = future.exception(WAIT_S)
    assert isinstance(error, Refusal)
    return error


def test_batches_are_numbered_in_their_order_and_come_back_as_they_were(tmp_path: Path) -> None:
    table = table_of("a")
    batches = [metrics(0, 1, value=7), logs(8), metrics(2, value=9)]
    with running(tmp_path, table) as writer:
        futures = [writer.submit(batch, table) for batch in batches]
        assert [future.result(WAIT_S) for future in futures] == [1, 2, 3]
        committed = writer.committed()
    found = records(tmp_path, 1)
    assert [(record.batch, record.signal, record.points, bytes(record.body)) for record in found] == [
        (number, batch.signal, batch.points, batch.body) for number, batch in enumerate(batches, 1)
    ]
    assert (committed.segment, committed.batch) == (1, 3)
    assert committed.offset == journal_path(tmp_path, 1).stat().st_size
    header = read_header(journal_path(tmp_path, 1))
    assert (header.segment, header.first_batch, header.gateway_id) == (1, 1, b"test")


def test_nothing_is_acknowledged_before_the_sync_is_over(tmp_path: Path, disk: Disk) -> None:
    with running(tmp_path) as writer:
        disk.hold()
        future = writer.submit(logs(1), SeriesTable())
        assert disk.reached.wait(WAIT_S)
        assert records(tmp_path, 1), "written, but not yet safe"
        assert not future.done()
        assert writer.committed().batch == 0
        disk.free.set()
        assert future.result(WAIT_S) == 1
        assert writer.committed().batch == 1


def test_what_comes_while_the_disk_is_busy_is_synced_together(tmp_path: Path, disk: Disk) -> None:
    with running(tmp_path) as writer:
        disk.hold()
        first = writer.submit(logs(0), SeriesTable())
        assert disk.reached.wait(WAIT_S)
        table = SeriesTable()
        # the first batch's table was another one: the group of the rest has a segment of its own
        rest = [writer.submit(logs(number), table) for number in range(1, 200)]
        disk.free.set()
        assert [future.result(WAIT_S) for future in [first, *rest]] == list(range(1, 201))
    assert disk.synced.count(str(journal_path(tmp_path, 1))) == 2, "its header, and the first batch"
    assert disk.synced.count(str(journal_path(tmp_path, 2))) == 2, "its header, and the 199 others"


def test_after_company_the_writer_waits_for_the_others_and_alone_it_does_not(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_LINGER_S", 0.2)
    table = SeriesTable()
    with running(tmp_path, table) as writer:

        def answered_s() -> float:
            began = time.monotonic()
            writer.submit(logs(1), table).result(WAIT_S)
            return time.monotonic() - began

        assert answered_s() < 0.15
        disk.hold()
        first = writer.submit(logs(1), table)
        assert disk.reached.wait(WAIT_S)
        company = [writer.submit(logs(at), table) for at in (2, 3)]
        disk.free.set()
        assert [future.result(WAIT_S) for future in (first, *company)] == [2, 3, 4]
        assert answered_s() >= 0.15, "the sync before was for two"
        assert answered_s() < 0.15, "the sync before was for one"


def test_a_group_has_a_bound(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_GROUP_BYTES", 4 * len(logs(0, 1000).body))
    table = SeriesTable()
    with running(tmp_path, table) as writer:
        disk.hold()
        futures = [writer.submit(logs(0, 1000), table)]
        assert disk.reached.wait(WAIT_S)
        futures += [writer.submit(logs(number, 1000), table) for number in range(1, 9)]
        futures.append(writer.submit(logs(9, 50_000), table))
        disk.free.set()
        assert [future.result(WAIT_S) for future in futures] == list(range(1, 11))
    assert len(disk.synced) == 1 + 1 + 2 + 1, "header, first, twice four, and the one that is larger than the bound"


def test_a_definition_is_written_once_a_segment(tmp_path: Path) -> None:
    table = table_of("a")
    with running(tmp_path, table) as writer:
        for batch in (metrics(0, 1), metrics(0, 1, 2)):
            writer.submit(batch, table).result(WAIT_S)
        assert writer.roll().result(WAIT_S) == 2
        writer.submit(metrics(0), table).result(WAIT_S)
    assert [[series for series, _ in record.definitions] for record in records(tmp_path, 1)] == [[0, 1], [2]]
    assert [record.definitions for record in records(tmp_path, 2)] == [((0, definition("a0")),)]


def test_the_definitions_that_a_batch_brings_stand_in_its_record(tmp_path: Path) -> None:
    table = table_of("a")
    own = ((TRANSIENT, definition("x")), (TRANSIENT + 1, definition("y")))
    with running(tmp_path, table) as writer:
        for _ in range(2):
            batch = metrics(TRANSIENT, 3, TRANSIENT + 1, definitions=pack_definitions(own))
            writer.submit(batch, table).result(WAIT_S)
    first, second = records(tmp_path, 1)
    assert first.definitions == (*own, (3, definition("a3")))
    assert second.definitions == own


def test_a_wish_for_a_new_segment_is_granted_once_there_is_something_in_the_old(tmp_path: Path) -> None:
    rolls = []
    with running(tmp_path, on_roll=lambda closed, opened: rolls.append((closed, opened))) as writer:
        assert writer.roll().result(WAIT_S) == 1, "still empty"
        writer.submit(logs(1), SeriesTable()).result(WAIT_S)
        assert writer.roll().result(WAIT_S) == 2
        committed = writer.committed()
        assert (committed.segment, committed.offset, committed.batch) == (2, FILE_HEADER.size, 1)
    assert rolls == [(1, 2)]
    assert read_header(journal_path(tmp_path, 2)).first_batch == 2


@pytest.mark.parametrize("settings", [BufferSettings(segment_bytes=100), BufferSettings(segment_age_s=0.0)])
def test_a_segment_ends_by_its_size_and_by_its_age(tmp_path: Path, settings: BufferSettings) -> None:
    table = SeriesTable()
    rolls: list[tuple[int, int]] = []
    rolled = threading.Semaphore(0)

    def on_roll(closed: int, opened: int) -> None:
        rolls.append((closed, opened))
        rolled.release()

    with running(tmp_path, table, settings, on_roll=on_roll) as writer:
        for number in range(3):
            assert writer.submit(logs(number, 100), table).result(WAIT_S) == number + 1
            assert rolled.acquire(timeout=WAIT_S)
    assert rolls == [(1, 2), (2, 3), (3, 4)]
    assert [[record.batch for record in records(tmp_path, segment)] for segment in (1, 2, 3, 4)] == [
        [1],
        [2],
        [3],
        [],
    ]


def test_ids_of_one_segment_come_from_one_table(tmp_path: Path) -> None:
    old, new = table_of("old"), table_of("new")
    with running(tmp_path, old) as writer:
        for table, value in ((old, 1), (old, 2), (new, 3), (old, 4), (new, 5)):
            writer.submit(metrics(0, value=value), table).result(WAIT_S)
    assert [
        [(value_of(record), [what for _, what in record.definitions]) for record in records(tmp_path, segment)]
        for segment in segments(tmp_path)
    ] == [
        [(1, [definition("old0")]), (2, [])],
        [(3, [definition("new0")])],
        [(4, [definition("old0")])],
        [(5, [definition("new0")])],
    ]


def test_a_table_that_comes_back_into_an_empty_segment_says_its_series_again(tmp_path: Path) -> None:
    old, new = table_of("old"), table_of("new")
    with running(tmp_path, old) as writer:
        writer.submit(metrics(0), old).result(WAIT_S)
        writer.submit(metrics(0), new).result(WAIT_S)
        assert writer.roll().result(WAIT_S) == 3
        writer.submit(metrics(0), old).result(WAIT_S)
    assert [record.definitions for record in records(tmp_path, 3)] == [((0, definition("old0")),)]


def test_a_swap_of_tables_that_could_not_begin_a_segment_is_tried_again(tmp_path: Path) -> None:
    old, new = table_of("old"), table_of("new")
    with running(tmp_path, old) as writer:
        writer.submit(metrics(0, value=1), old).result(WAIT_S)
        in_the_way = tmp_path / "segments" / "00000002.open"
        in_the_way.write_text("a file where the directory should be")
        assert refusal(writer.submit(metrics(0, value=2), new)).reason is Reason.STORAGE
        in_the_way.unlink()
        writer.submit(metrics(0, value=3), new).result(WAIT_S)
    assert [value_of(record) for record in records(tmp_path, 1)] == [1]
    assert [record.definitions for record in records(tmp_path, 2)] == [((0, definition("new0")),)]


def test_too_much_waiting_is_refused_at_once_and_may_be_sent_again(tmp_path: Path, disk: Disk) -> None:
    table = SeriesTable()
    size = len(logs(0, 1000).body)
    with running(tmp_path, table, max_pending_bytes=2 * size) as writer:
        disk.hold()
        futures = [writer.submit(logs(0, 50_000), table)]
        assert disk.reached.wait(WAIT_S)
        futures += [writer.submit(logs(number, 1000), table) for number in (1, 2)]
        assert writer.pending_bytes == 2 * size
        with pytest.raises(Refusal, match=f"{2 * size} bytes wait") as refused:
            writer.submit(logs(3), table)
        assert (refused.value.reason, refused.value.retry_after_s) == (
            Reason.OVERLOADED,
            writer_module.RETRY_AFTER_S,
        )
        disk.free.set()
        assert [future.result(WAIT_S) for future in futures] == [1, 2, 3]
        assert writer.pending_bytes == 0
        assert writer.submit(logs(4), table).result(WAIT_S) == 4


def test_a_full_buffer_refuses_until_there_is_room(tmp_path: Path) -> None:
    why: list[str | None] = ["1 GiB of 1 GiB"]
    with running(tmp_path, full=lambda: why[0]) as writer:
        with pytest.raises(Refusal, match="the buffer is full: 1 GiB of 1 GiB") as refused:
            writer.submit(logs(1), SeriesTable())
        assert (refused.value.reason, refused.value.retry_after_s) == (
            Reason.DISK_FULL,
            writer_module.RETRY_AFTER_FULL_S,
        )
        why[0] = None
        assert writer.submit(logs(1), SeriesTable()).result(WAIT_S) == 1


def test_stopping_writes_what_waits_and_refuses_what_comes_later(tmp_path: Path, disk: Disk) -> None:
    table = SeriesTable()
    with running(tmp_path, table) as writer:
        disk.hold()
        futures = [writer.submit(logs(0), table)]
        assert disk.reached.wait(WAIT_S)
        futures += [writer.submit(logs(number), table) for number in range(1, 50)]
        stopping = threading.Thread(target=writer.stop)
        stopping.start()
        disk.free.set()
        stopping.join(WAIT_S)
        assert [future.result(0) for future in futures] == list(range(1, 51))
        with pytest.raises(Refusal) as refused:
            writer.submit(logs(50), table)
        assert refused.value.reason is Reason.STOPPING
    assert numbers(tmp_path) == list(range(1, 51))


def test_nobody_waits_for_ever_for_a_writer_that_stops(tmp_path: Path, disk: Disk) -> None:
    table = SeriesTable()
    with running(tmp_path, table) as writer:
        disk.hold()
        writer.submit(logs(0), table)
        assert disk.reached.wait(WAIT_S)
        wish = writer.roll()
        stopping = threading.Thread(target=writer.stop)
        stopping.start()
        disk.free.set()
        stopping.join(WAIT_S)
        wish.exception(0)  # done, one way or the other
        assert refusal(writer.roll()).reason is Reason.STOPPING
        assert writer.wait(99, WAIT_S).batch == 1


def test_a_writer_that_never_began_refuses_what_waits(tmp_path: Path) -> None:
    with running(tmp_path, started=False) as writer:
        future, wish = writer.submit(logs(0), SeriesTable()), writer.roll()
        writer.stop()
        assert refusal(future).reason is Reason.STOPPING
        assert refusal(wish).reason is Reason.STOPPING


def test_waiting_ends_with_the_commit_or_with_the_time(tmp_path: Path) -> None:
    with running(tmp_path) as writer:
        assert writer.wait(0, 0.01).batch == 0
        threading.Timer(0.05, lambda: writer.submit(logs(0), SeriesTable())).start()
        assert writer.wait(0, WAIT_S).batch == 1


def test_a_sender_that_gives_up_waiting_harms_nobody(tmp_path: Path, disk: Disk) -> None:
    """Cancelling an asyncio future cancels the one that it wraps."""
    table = SeriesTable()

    async def give_up(future: Future[int]) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.wrap_future(future)

    with running(tmp_path, table) as writer:
        disk.hold()
        futures = [writer.submit(logs(number), table) for number in range(3)]
        for future in futures[:2]:
            asyncio.run(give_up(future))
        asyncio.run(give_up(writer.roll()))
        disk.free.set()
        assert futures[2].result(WAIT_S) == 3
        assert writer.submit(logs(3), table).result(WAIT_S) == 4
    assert numbers(tmp_path) == [1, 2, 3, 4], "what was taken is written, whether or not somebody waits"


def test_after_a_failed_sync_nothing_is_acknowledged_and_the_file_is_never_written_again(
    tmp_path: Path, disk: Disk
) -> None:
    table = table_of("a")
    with running(tmp_path, table) as writer:
        assert writer.submit(metrics(0, value=1), table).result(WAIT_S) == 1
        before = disk.synced.count(str(journal_path(tmp_path, 1)))
        disk.failing["fdatasync"] = [errno.EIO]
        refused = refusal(writer.submit(metrics(0, 1, value=2), table))
        assert (refused.reason, refused.retry_after_s) == (Reason.STORAGE, writer_module.RETRY_AFTER_S)
        assert writer.committed().batch == 1
        assert writer.submit(metrics(0, 1, value=3), table).result(WAIT_S) == 3, "number 2 may be on the disk"
        assert writer.submit(metrics(0, value=4), table).result(WAIT_S) == 4
        assert writer.committed().segment == 2
    assert disk.synced.count(str(journal_path(tmp_path, 1))) == before + 1
    assert [(record.batch, value_of(record)) for record in records(tmp_path, 1)] == [(1, 1)]
    assert [record.definitions for record in records(tmp_path, 2)] == [
        ((0, definition("a0")), (1, definition("a1"))),
        (),
    ]
    assert read_header(journal_path(tmp_path, 2)).first_batch == 3


def test_a_failed_sync_does_not_forget_the_series_of_the_batches_that_wait(tmp_path: Path, disk: Disk) -> None:
    """The registry is swept whenever a segment begins; what was used in the epoch before must survive that."""
    registry = Registry(PointSettings(), 1000)
    forgotten = []
    with running(tmp_path, registry.table, on_roll=lambda closed, opened: forgotten.append(registry.sweep())) as writer:
        disk.hold()
        disk.failing["fdatasync"] = [errno.EIO]
        lost = writer.submit(logs(1), registry.table)
        assert disk.reached.wait(WAIT_S)
        waiting = writer.submit(decode(registry, gauge("in.the.queue"), None, 5), registry.table)
        disk.free.set()
        assert refusal(lost).reason is Reason.STORAGE
        assert waiting.result(WAIT_S) == 2
    assert forgotten == [0]
    (record,) = records(tmp_path, 2)
    assert [Series.unpack(what).field for _, what in record.definitions] == ["in.the.queue"]


def test_after_a_failed_write_the_file_is_as_before_and_definitions_are_written_again(
    tmp_path: Path, disk: Disk
) -> None:
    table = table_of("a")
    with running(tmp_path, table) as writer:
        writer.submit(metrics(0, value=1), table).result(WAIT_S)
        size = writer.committed().offset
        disk.failing["writev"] = [errno.ENOSPC]
        refused = refusal(writer.submit(metrics(0, 1, value=2), table))
        assert (refused.reason, refused.retry_after_s) == (Reason.DISK_FULL, writer_module.RETRY_AFTER_FULL_S)
        assert "free disk space" not in str(refused), "that is for the operator's log"
        assert journal_path(tmp_path, 1).stat().st_size == size
        writer.submit(metrics(0, 1, value=3), table).result(WAIT_S)
        assert writer.committed().segment == 1
    first, second = records(tmp_path, 1)
    assert (value_of(first), value_of(second)) == (1, 3)
    assert second.definitions == ((0, definition("a0")), (1, definition("a1")))


def test_a_file_that_cannot_be_put_right_is_left_and_its_numbers_with_it(tmp_path: Path, disk: Disk) -> None:
    table = SeriesTable()
    with running(tmp_path, table) as writer:
        writer.submit(logs(1), table).result(WAIT_S)
        disk.failing["writev"], disk.failing["ftruncate"] = [errno.EIO], [errno.EIO]
        assert refusal(writer.submit(logs(2), table)).reason is Reason.STORAGE
        assert writer.submit(logs(3), table).result(WAIT_S) == 3, "number 2 may lie whole in the first segment"
        assert writer.committed().segment == 2
    assert [record.batch for record in records(tmp_path, 2)] == [3]


def test_a_new_segment_that_cannot_be_begun_leaves_the_old_one_in_use(tmp_path: Path, disk: Disk) -> None:
    table = SeriesTable()
    with running(tmp_path, table) as writer:
        writer.submit(logs(1), table).result(WAIT_S)
        disk.failing["fdatasync"] = [errno.ENOSPC]
        assert isinstance(writer.roll().exception(WAIT_S), StorageError)
        assert segments(tmp_path) == [1], "no directory without a journal is left"
        assert writer.submit(logs(2), table).result(WAIT_S) == 2
        assert writer.committed().segment == 1
        assert writer.roll().result(WAIT_S) == 2
        assert writer.submit(logs(3), table).result(WAIT_S) == 3
    assert numbers(tmp_path) == [1, 2, 3]


def test_a_batch_of_an_unknown_series_is_refused_and_the_next_one_is_written(tmp_path: Path) -> None:
    table = table_of("a")
    with running(tmp_path, table) as writer:
        assert refusal(writer.submit(metrics(0, 77), table)).reason is Reason.STORAGE
        writer.submit(metrics(0), table).result(WAIT_S)
    (record,) = records(tmp_path, 1)
    assert record.definitions == ((0, definition("a0")),), "series 0 was only said in the refused batch"


def test_whoever_is_told_of_a_new_segment_cannot_stop_the_writer(tmp_path: Path) -> None:
    def on_roll(closed: int, opened: int) -> None:
        raise RuntimeError("a fault of the listener")

    table = SeriesTable()
    with running(tmp_path, table, on_roll=on_roll) as writer:
        writer.submit(logs(1), table).result(WAIT_S)
        assert isinstance(writer.roll().exception(WAIT_S), StorageError)
        assert writer.submit(logs(2), table).result(WAIT_S) == 2
        assert refusal(writer.submit(logs(3), SeriesTable())).reason is Reason.STORAGE, "a swap of tables tells it too"
        assert writer.submit(logs(4), table).result(WAIT_S) == 3
    assert [[value_of(record) for record in records(tmp_path, segment)] for segment in (1, 2, 3)] == [
        [1],
        [2],
        [4],
    ]


def test_the_figures_count_what_is_safe(tmp_path: Path, disk: Disk) -> None:
    meters, table = Meters(), table_of("a")

    def accepted(signal: str) -> float | None:
        return meters.registry.get_sample_value("locum_accepted_points_total", {"signal": signal})

    with running(tmp_path, table, meters=meters) as writer:
        writer.submit(metrics(0, 1, 2), table).result(WAIT_S)
        writer.submit(logs(1), table).result(WAIT_S)
        disk.failing["fdatasync"] = [errno.EIO]
        refusal(writer.submit(metrics(0), table))
    assert (accepted("metrics"), accepted("logs")) == (3, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let root mount a file system")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_is_full_is_told_and_writing_goes_on_when_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(100_000))
    table = table_of("a")
    acknowledged = []
    with running(small_disk, table) as writer:
        for value in range(1, 100):
            future = writer.submit(metrics(*[value % 4] * 100, value=value), table)
            if future.exception(WAIT_S) is not None:
                break
            acknowledged.append((future.result(), value))
        assert refusal(future).reason is Reason.DISK_FULL
        assert len(acknowledged) > 5
        assert refusal(writer.submit(logs(0, 100_000), table)).reason is Reason.DISK_FULL
        ballast.unlink()
        for value in range(100, 110):
            number = writer.submit(metrics(value % 4, value=value), table).result(WAIT_S)
            acknowledged.append((number, value))
    assert [(record.batch, value_of(record)) for record in records(small_disk, 1)] == acknowledged
    assert len({number for number, _ in acknowledged}) == len(acknowledged)


STEPS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    st.tuples(st.just("submit"), st.integers(0, 1), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    st.tuples(st.just("unknown"), st.integers(0, 1), st.just([1, 9])),
    st.tuples(st.just("roll")),
    st.tuples(st.just("break"), st.sampled_from(["fdatasync", "writev"]), st.sampled_from([errno.EIO, errno.ENOSPC])),
    st.tuples(st.just("break"), st.just("ftruncate"), st.just(errno.EIO)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=25))
def test_whatever_fails_the_journal_holds_every_acknowledged_batch_once_with_its_definitions(
    steps: list[tuple],  # type: ignore[type-arg]
) -> None:
    tables, names = (table_of("a"), table_of("b")), "ab"
    sent: list[tuple[Future[int], int, list[int], str]] = []
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        data_dir = Path(folder)
        disk = Disk(patched)
        with running(data_dir, tables[0]) as writer:
            for value, (verb, *rest) in enumerate(steps, 1):
                if verb == "roll":
                    writer.roll().exception(WAIT_S)
                elif verb == "break":
                    disk.failing[rest[0]] = [rest[1]]
                else:
                    future = writer.submit(metrics(*rest[1], value=value), tables[rest[0]])
                    sent.append((future, value, rest[1], names[rest[0]]))
                    if value % 3:
                        future.exception(WAIT_S)
            for future, *_ in sent:
                future.exception(WAIT_S)
        acknowledged = {
            future.result(): (value, series, name) for future, value, series, name in sent if not future.exception()
        }
        seen = {}
        for segment in segments(data_dir):
            known: dict[int, bytes] = {}
            for each in scan(journal_path(data_dir, segment)):
                if isinstance(each, Damage):
                    continue
                record = each.record
                assert record.batch not in seen, "a number is used once"
                known |= dict(record.definitions)
                series = record.numbers().series.tolist()
                seen[record.batch] = (value_of(record), series, [known[each] for each in series])
        assert {batch: found for batch, found in seen.items() if batch in acknowledged} == {
            batch: (value, series, [definition(f"{name}{each}") for each in series])
            for batch, (value, series, name) in acknowledged.items()
        }
        assert list(acknowledged) == sorted(acknowledged)
