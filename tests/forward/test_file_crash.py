"""The file sink is exact whatever interrupts it: a crash at any byte, a full disk, a turn of files, a foreign hand."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config import FileSettings
from gateway.forward import sink
from gateway.forward.cursor import Cursor, Window, read, write
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.encode import Encoder
from gateway.forward.file import LineFile
from gateway.forward.sink import Lane
from gateway.metrics import Meters
from gateway.model import Category
from tests.forward.lanes import until
from tests.forward.made import Buffer, package, point, spans, spelled, unwritable


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "_POLL_S", 0.002)
    monkeypatch.setattr(sink, "_RETRY_S", 0.01)


def line_file(place: Path, category: Category = Category.TRACING, rotate_bytes: int = 1 << 20) -> LineFile:
    return LineFile("file", category, FileSettings(place / "out", rotate_bytes), DeadLetters(place), Meters())


def run(place: Path, buffer: Buffer, through: int, rotate_bytes: int = 1 << 20) -> None:
    """A lane until batch ``through`` is done with."""
    path = place / "cursors" / "file-tracing.json"
    outlet = line_file(place, rotate_bytes=rotate_bytes)
    encoder = Encoder(None, "datakit", None, 300)
    lane = Lane("file", Category.TRACING, buffer.follow, outlet, encoder, path, "", Meters(), "gw", 0.005)
    lane.start()
    try:
        assert until(lambda: read(path) == Cursor(through)), lane.health()
    finally:
        lane.stop(5)


def records(*batches: int) -> Buffer:
    return Buffer([spans(batch, 2, note="käse\nand more") for batch in batches])


@given(st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_crash_at_any_byte_of_a_window_is_made_good(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole, torn = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("torn")
    run(whole, records(1), 1)
    size = (whole / "out" / "tracing.line").stat().st_size
    run(whole, records(1, 2, 3), 3)
    content = (whole / "out" / "tracing.line").read_bytes()
    cut = data.draw(st.integers(size, len(content)), label="what was written before the crash")
    (torn / "out").mkdir()
    (torn / "out" / "tracing.line").write_bytes(content[:cut])
    (torn / "cursors").mkdir()
    write(torn / "cursors" / "file-tracing.json", Cursor(1, Window(2, 3, "", {"size": size})))
    run(torn, records(1, 2, 3, 4), 4)
    run(whole, records(1, 2, 3, 4), 4)
    assert (torn / "out" / "tracing.line").read_bytes() == (whole / "out" / "tracing.line").read_bytes()


def test_a_disk_that_is_full_for_a_while_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [3]
    real = os.fsync

    def fsync(number: int) -> None:
        target = os.readlink(f"/proc/self/fd/{number}")
        if target.endswith(".line") and failures[0]:
            failures[0] -= 1
            raise OSError(28, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    run(tmp_path, records(1, 2), 2)
    assert failures == [0]
    lines = (tmp_path / "out" / "tracing.line").read_text().split("\nopentelemetry")
    assert len(lines) == 4
    assert len(set(lines)) == 4


@pytest.mark.parametrize("content", [b"", b"short\n", None], ids=["emptied", "cut", "taken away"])
def test_a_file_that_somebody_emptied_or_took_away_is_begun_again(tmp_path: Path, content: bytes | None) -> None:
    """As logrotate does. What was in it is its own, and the open window is written in whole."""
    run(tmp_path, records(1), 1)
    path = tmp_path / "out" / "tracing.line"
    size = path.stat().st_size
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    write(tmp_path / "cursors" / "file-tracing.json", Cursor(1, Window(2, 2, "", {"size": size})))
    run(tmp_path, records(1, 2), 2)
    found = path.read_bytes()
    assert found.startswith(content or b"opentelemetry")
    assert found.count(b"opentelemetry,") == 2


def test_a_window_lies_in_one_file_and_every_point_in_one_of_them(tmp_path: Path) -> None:
    for batch in range(1, 6):
        run(tmp_path, records(*range(1, batch + 1)), batch, rotate_bytes=400)
    files = sorted((tmp_path / "out").glob("tracing*.line"))
    contents = [path.read_text() for path in files]
    assert len(files) >= 3
    numbers = sorted(int(part.partition("i")[0]) for text in contents for part in text.split("duration=")[1:])
    assert numbers == [batch * 1000 + at for batch in range(1, 6) for at in range(2)]
    names = [path.name for path in files]
    assert len(names) == len(set(names))


def test_a_crash_between_the_turn_of_files_and_the_cursor_loses_nothing(tmp_path: Path) -> None:
    run(tmp_path, records(1), 1, rotate_bytes=10)
    assert line_file(tmp_path, rotate_bytes=10).open() == {"size": 0}  # and here the process died
    run(tmp_path, records(1, 2), 2, rotate_bytes=10)
    files = sorted((tmp_path / "out").glob("tracing*.line"))
    assert len(files) == 2
    assert sum(path.read_text().count("opentelemetry,") for path in files) == 4


def test_what_lines_cannot_write_is_laid_aside(tmp_path: Path) -> None:
    outlet = line_file(tmp_path, Category.METRIC)
    outlet.open()
    mixed = package("dk_1", point("a"), unwritable(), unwritable(), point("b"))
    outlet.deliver([mixed, package("dk_2", unwritable())], [package("dk_3", point("large"))], threading.Event())
    lines = (tmp_path / "out" / "metric.line").read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["a=1.5", "b=1.5", "large=1.5"]
    letters = list(DeadLetters(tmp_path))
    assert [(each.id, each.points, len(spelled(each.raw()))) for each in letters] == [("dk_1", 2, 2), ("dk_2", 1, 1)]


@pytest.mark.parametrize("note", [{}, {"size": None}, {"size": "0"}, {"size": -1}])
def test_without_a_length_nothing_is_cut(tmp_path: Path, note: dict[str, object]) -> None:
    run(tmp_path, records(1), 1)
    outlet = line_file(tmp_path)
    size = (tmp_path / "out" / "tracing.line").stat().st_size
    assert outlet.open() == {"size": size}
    outlet.resume(note)
    assert (tmp_path / "out" / "tracing.line").stat().st_size == size
