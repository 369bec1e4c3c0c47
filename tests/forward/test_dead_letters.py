"""What is laid aside can be found and read again, with the reason, whatever the receiver said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.forward.dead_letters import DeadLetters
from gateway.model import Category
from tests.forward.made import body_of, point, spelled


def add(letters: DeadLetters, name: str = "dk_1", category: Category = Category.METRIC, reply: str = "no") -> None:
    letters.add(name, "dataway", category, body_of(point()), 1, "the receiver does not take it", 400, reply)


def test_a_letter_holds_the_points_and_why(tmp_path: Path) -> None:
    letters = DeadLetters(tmp_path)
    add(letters, reply="unknown käse\n\0")
    (letter,) = letters
    assert (letter.id, letter.sink, letter.category, letter.points) == ("dk_1", "dataway", "metric", 1)
    assert (letter.reason, letter.status, letter.reply) == ("the receiver does not take it", 400, "unknown käse\n\0")
    assert spelled(letter.raw()) == spelled(body_of(point()))
    assert letter.laid_aside.endswith("Z")
    path = tmp_path / "dead-letters" / "metric" / "dk_1.json"
    assert json.loads(path.read_text("utf-8"))["id"] == "dk_1"
    assert [each.name for each in path.parent.iterdir()] == ["dk_1.json"]


def test_the_same_package_is_one_letter(tmp_path: Path) -> None:
    """After a crash a window is sent, and refused, a second time."""
    letters = DeadLetters(tmp_path)
    add(letters)
    add(letters)
    assert len(list(letters)) == 1


def test_letters_come_by_category_and_id(tmp_path: Path) -> None:
    letters = DeadLetters(tmp_path)
    for name, category in (("dk_2", Category.TRACING), ("dk_3", Category.METRIC), ("dk_1", Category.METRIC)):
        add(letters, name, category)
    assert [(each.category, each.id) for each in letters] == [
        ("metric", "dk_1"),
        ("metric", "dk_3"),
        ("tracing", "dk_2"),
    ]


def test_of_a_long_reply_the_beginning_is_kept(tmp_path: Path) -> None:
    letters = DeadLetters(tmp_path)
    add(letters, reply="x" * 100_000)
    assert [len(each.reply) for each in letters] == [4096]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"id": "dk_0"}', b"\xff"])
def test_a_damaged_letter_hides_no_other_and_is_told(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    letters = DeadLetters(tmp_path)
    add(letters)
    (tmp_path / "dead-letters" / "metric" / "dk_0.json").write_bytes(content)
    assert [each.id for each in letters] == ["dk_1"]
    assert "dk_0.json" in caplog.text


def test_without_a_directory_there_are_none(tmp_path: Path) -> None:
    assert not list(DeadLetters(tmp_path / "nowhere"))


def test_a_disk_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "dead-letters").write_text("in the way")
    with pytest.raises(OSError, match="dead-letters"):
        add(DeadLetters(tmp_path))
