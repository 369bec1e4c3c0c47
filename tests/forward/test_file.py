"""The file sink writes each point once, a crash included."""

from __future__ import annotations

from pathlib import Path

from gateway.config import FileSettings
from gateway.forward.cursor import Cursor, Window, write
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.file import LineFile
from gateway.metrics import Meters
from gateway.model import Category
from tests.forward.lanes import Shelf, event, lane, record, until


def outlet(place: Path, rotate_bytes: int = 1 << 20) -> LineFile:
    settings = FileSettings(place / "out", rotate_bytes)
    return LineFile("file", Category.LOGGING, settings, DeadLetters(place), Meters())


def test_points_are_lines_in_a_file_of_their_category(tmp_path: Path) -> None:
    running = lane(outlet(tmp_path), Shelf([record(1, [event(1), event(2)])]), tmp_path)
    running.start()
    assert until(lambda: running.delivered == 1)
    running.stop(2)
    lines = (tmp_path / "out" / "logging.line").read_text().splitlines()
    assert lines == [f'app,service=app message="m{n}" {1796000000000000000 + n}' for n in (1, 2)]


def test_a_window_that_was_half_written_is_written_again_from_its_beginning(tmp_path: Path) -> None:
    shelf = Shelf([record(1, [event(1)])])
    running = lane(outlet(tmp_path), shelf, tmp_path)
    running.start()
    assert until(lambda: running.delivered == 1)
    running.stop(2)
    path = tmp_path / "out" / "logging.line"
    size = path.stat().st_size
    write(tmp_path / "cursors" / "test-logging.json", Cursor(1, Window(2, 2, "as it is", {"size": size})))
    with path.open("a") as file:
        file.write('app,service=app message="m2" 17960000')  # the crash came here
    shelf.records.append(record(2, [event(2)]))
    again = lane(outlet(tmp_path), shelf, tmp_path)
    again.start()
    assert until(lambda: again.delivered == 2)
    again.stop(2)
    assert [line.split()[1] for line in path.read_text().splitlines()] == ['message="m1"', 'message="m2"']


def test_a_full_file_is_moved_aside_between_windows(tmp_path: Path) -> None:
    shelf = Shelf([record(1, [event(1)])])
    for batch in (1, 2, 3):
        shelf.records = [record(batch, [event(batch)])]
        running = lane(outlet(tmp_path, rotate_bytes=10), shelf, tmp_path)
        running.start()
        assert until(lambda running=running, batch=batch: running.delivered == batch)  # type: ignore[misc]
        running.stop(2)
    files = sorted((tmp_path / "out").glob("logging*.line"))
    assert len(files) == 3
    assert sum(len(path.read_text().splitlines()) for path in files) == 3
