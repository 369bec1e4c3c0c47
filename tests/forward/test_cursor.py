"""A cursor is what was written, or the beginning: a file that says something impossible is not believed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.forward import cursor
from gateway.forward.cursor import Cursor, Window

CURSORS = [
    Cursor(),
    Cursor(7),
    Cursor(2**62),
    Cursor(7, Window(8, 8)),
    Cursor(7, Window(9, 40, "datakit/policy", {"size": 12, "name": "käse"})),
]


@pytest.mark.parametrize("told", CURSORS, ids=str)
def test_what_is_written_is_read(tmp_path: Path, told: Cursor) -> None:
    path = tmp_path / "not yet there" / "dataway-metric.json"
    cursor.write(path, Cursor(1))
    cursor.write(path, told)
    assert cursor.read(path) == told
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_thousand_take_no_more_room_than_two(tmp_path: Path) -> None:
    path = tmp_path / "dataway-metric.json"
    sizes = set()
    for number in range(1000):
        cursor.write(path, Cursor(number, Window(number + 1, 10 ** (number % 18) + number)))
        sizes.add(path.stat().st_size)
        assert cursor.read(path).delivered == number
    assert len(sizes) == 1


@pytest.mark.parametrize("before", [1, 2])
def test_a_crash_in_the_middle_of_a_write_leaves_the_one_before(tmp_path: Path, before: int) -> None:
    path = tmp_path / "dataway-metric.json"
    for number in range(before):
        cursor.write(path, Cursor(number, Window(number + 1, 9)))
    old, raw_before = cursor.read(path), path.read_bytes()
    new = Cursor(before)
    cursor.write(path, new)
    raw_after = path.read_bytes()
    changed = [at for at, (one, other) in enumerate(zip(raw_before, raw_after, strict=True)) if one != other]
    for torn in range(changed[0], changed[-1] + 1):  # up to here it got
        path.write_bytes(raw_after[:torn] + raw_before[torn:])
        assert cursor.read(path) == old
        cursor.write(path, new)
        assert cursor.read(path) == new


def test_a_note_that_is_too_large_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "dataway-metric.json"
    cursor.write(path, Cursor(7))
    with pytest.raises(ValueError, match="note"):
        cursor.write(path, Cursor(7, Window(8, 9, note={"name": "x" * 20_000})))
    assert cursor.read(path) == Cursor(7)


def test_one_that_is_missing_begins_at_the_oldest_batch_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cursor.read(tmp_path / "dataway-metric.json") == Cursor()
    assert not caplog.text


def line(content: bytes) -> bytes:
    """Content with the number and the checksum that belong to it."""
    return cursor._line(1, content)


def told(delivered: object, window: object = None) -> bytes:
    return line(json.dumps({"delivered": delivered, "window": window}).encode())


GARBLED = {
    "empty": b"",
    "cut short": told(7)[:-3],
    "zeros, as after a crash of the host": bytes(64),
    "not UTF-8": line(b"\xff\xfe{}"),
    "a list": line(b"[]"),
    "a number": line(b"7"),
    "null": line(b"null"),
    "without its keys": line(b"{}"),
    "a negative number": told(-1),
    "a text for a number": told("seven"),
    "nothing for a number": told(None),
    "an endless number": line(b'{"delivered": Infinity, "window": null}'),
    "a window before what is delivered": told(7, {"first": 7, "last": 9}),
    "a window that ends before it begins": told(7, {"first": 9, "last": 8}),
    "a window without its end": told(7, {"first": 8}),
    "a window of texts": told(7, {"first": "8", "last": "9"}),
    "a window of something unknown": told(7, {"first": 8, "last": 9, "colour": "red"}),
    "a note that is none": told(7, {"first": 8, "last": 9, "note": [12]}),
    "a list in a list in a list": line(b"[" * 100_000),
    "a window that is a list": told(7, [8, 9]),
    "a wrong checksum": told(7).replace(b"7", b"8"),
    "no checksum": b'{"delivered": 7, "window": null}',
}


@pytest.mark.parametrize("name", GARBLED)
def test_one_that_is_garbled_begins_at_the_oldest_batch_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.ERROR)
    path = tmp_path / "dataway-metric.json"
    path.write_bytes(GARBLED[name])
    assert cursor.read(path) == Cursor()
    assert "event=cursor_unreadable" in caplog.text
    assert str(path) in caplog.text


def test_one_that_may_not_be_read_begins_at_the_oldest_batch(tmp_path: Path) -> None:
    path = tmp_path / "dataway-metric.json"
    path.mkdir()
    assert cursor.read(path) == Cursor()


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.integers() | st.text() | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["delivered", "window", "first", "last"]), inner)
        ),
    ).map(lambda value: line(json.dumps(value).encode()))
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_file_can_break_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "dataway-metric.json"
    path.write_bytes(content)
    found = cursor.read(path)
    assert found.delivered >= 0
    assert found.window is None or found.delivered < found.window.first <= found.window.last


def test_a_disk_that_takes_nothing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dataway-metric.json"
    cursor.write(path, Cursor(7))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="space"):
        cursor.write(path, Cursor(8))
    assert cursor.read(path) == Cursor(7)
