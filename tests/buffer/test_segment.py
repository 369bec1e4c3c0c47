"""Names, the lock, the small helpers of segments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.buffer import segment
from gateway.buffer.segment import State
from gateway.model import StorageError

HOLDER = """
import sys
from pathlib import Path
from gateway.buffer import segment
with segment.lock(Path(sys.argv[1]), "http://127.0.0.1:9529"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_directories_are_listed_by_number_and_others_are_not_looked_at(tmp_path: Path) -> None:
    assert segment.segments(tmp_path) == []
    for name in ("00000002", "00000010.open", "00000001.deleted", "x", "1", "00000003.tmp"):
        (tmp_path / "segments" / name).mkdir(parents=True)
    found = [(each.number, each.state) for each in segment.segments(tmp_path)]
    assert found == [(1, State.DELETED), (2, State.SEALED), (10, State.OPEN)]


def test_a_second_process_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    assert segment.lock_holder(tmp_path) is None
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert segment.lock_holder(tmp_path) == (holder.pid, "http://127.0.0.1:9529")
        with (
            pytest.raises(StorageError, match=rf"process {holder.pid} at http://127.0.0.1:9529"),
            segment.lock(tmp_path),
        ):
            pass
    finally:
        holder.kill()
        holder.wait()
    assert segment.lock_holder(tmp_path) is None
    with segment.lock(tmp_path):
        assert segment.lock_holder(tmp_path) is not None
    assert segment.lock_holder(tmp_path) is None


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/data"), segment.lock(tmp_path / "file" / "data"):
        pass


def test_a_deleted_segment_is_out_of_sight_at_once(tmp_path: Path) -> None:
    path = tmp_path / "segments" / "00000001"
    path.mkdir(parents=True)
    (path / "numbers.parquet").write_bytes(b"x")
    segment.delete(segment.segments(tmp_path)[0])
    assert list((tmp_path / "segments").iterdir()) == []
