"""gzip in: what is legal comes out whole, what is not is refused, and nothing grows past its limit."""

from __future__ import annotations

import gzip
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model import Reason, Refusal
from gateway.receive.inflate import inflate

TEXT = bytes(range(256)) * 40


def unlimited(_: int) -> None:
    pass


@given(st.lists(st.binary(max_size=2000), min_size=1, max_size=4), st.integers(1, 9))
def test_members_come_out_one_after_the_other(contents: list[bytes], level: int) -> None:
    data = b"".join(gzip.compress(content, level) for content in contents)
    assert inflate(data, 1 << 20, unlimited) == b"".join(contents)


@given(st.binary(max_size=500))
def test_any_bytes_are_content_or_a_refusal(data: bytes) -> None:
    try:
        inflate(data, 1 << 20, unlimited)
    except Refusal as refusal:
        assert refusal.reason is Reason.BAD_DATA


@given(st.integers(0, len(gzip.compress(TEXT)) - 1), st.integers(1, 255))
def test_a_flipped_byte_never_changes_the_content(at: int, flip: int) -> None:
    data = bytearray(gzip.compress(TEXT))
    data[at] ^= flip
    try:
        assert inflate(bytes(data), 1 << 20, unlimited) == TEXT
    except Refusal as refusal:
        assert refusal.reason is Reason.BAD_DATA


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_the_ends_of_its_steps_lose_nothing(size: int) -> None:
    content = b"a" * size
    taken: list[int] = []
    assert inflate(gzip.compress(content), size, taken.append) == content
    assert sum(taken) == size


BROKEN = {
    "no gzip": TEXT,
    "a cut": gzip.compress(TEXT)[:-10],
    "a cut in the head": gzip.compress(TEXT)[:5],
    "a cut before the trailer": gzip.compress(TEXT)[:-8],
    "a wrong checksum": gzip.compress(TEXT)[:-8] + b"\0\0\0\0" + struct.pack("<I", len(TEXT)),
    "a wrong length": gzip.compress(TEXT)[:-4] + struct.pack("<I", 10),
    "bytes behind": gzip.compress(TEXT) + b"abc",
    "a cut second member": gzip.compress(TEXT) + gzip.compress(TEXT)[:40],
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused(name: str) -> None:
    with pytest.raises(Refusal) as refused:
        inflate(BROKEN[name], 1 << 20, unlimited)
    assert refused.value.reason is Reason.BAD_DATA
    assert "gzip" in str(refused.value)


def test_nothing_is_nothing() -> None:
    assert inflate(b"", 10, unlimited) == b""


def test_the_limit_counts_all_members() -> None:
    data = gzip.compress(b"a" * 600) * 2
    assert len(inflate(data, 1200, unlimited)) == 1200
    with pytest.raises(Refusal) as refused:
        inflate(data, 1199, unlimited)
    assert refused.value.reason is Reason.TOO_LARGE


def test_a_bomb_is_let_go_after_its_limit() -> None:
    taken: list[int] = []
    with pytest.raises(Refusal):
        inflate(gzip.compress(b"0" * (64 << 20), 1), 8 << 20, taken.append)
    assert sum(taken) <= 8 << 20


def test_members_without_end_are_refused() -> None:
    assert inflate(gzip.compress(b"") * 10_000, 10, unlimited) == b""
    with pytest.raises(Refusal, match="members"):
        inflate(gzip.compress(b"") * 10_001, 10, unlimited)


def test_a_long_input_takes_linear_time() -> None:
    began = time.process_time()
    stored = gzip.compress(bytes(range(256)) * (32 << 12), 0)
    assert len(inflate(stored, 64 << 20, unlimited)) == 32 << 20
    assert time.process_time() - began < 3
