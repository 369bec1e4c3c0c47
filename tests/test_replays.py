"""Replay: the points of the first time, each once, under ids that stay; narrowed, broken off, damaged, held back."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway import client, replays
from gateway.config_values import BadValue, moment
from gateway.forward.package import point_ends
from gateway.forward.replay import Pace
from gateway.forward.sink import Stopped
from gateway.forward.stand_in import Taken
from gateway.forward.tap import Filter
from gateway.model import Category, ConfigError, Event, Signal
from tests.forward.lanes import until
from tests.promises.kill import request
from tests.running import Running, running

ROOT = Path(__file__).parent.parent
SIGNALS = {"metric": Signal.METRICS, "tracing": Signal.TRACES, "logging": Signal.LOGS}
ORDER = replays.Order("-1h", "now", Filter(), "dataway", 0)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as found:
        yield found


def fill(gateway: Running, first: int = 0, requests: int = 6, points: int = 70) -> None:
    """Send numbered points of every category, and wait until they have come out."""
    before = Counter(each.category for each in gateway.guance.points())
    for at in range(first, first + requests):
        numbers = list(range(1 + at * points, 1 + (at + 1) * points))
        for category, signal in SIGNALS.items():
            assert gateway.post(f"/v1/{signal.name.lower()}", request(category, numbers)).status == 200
    wanted = {"metric": points // 5 * 7, "tracing": points, "logging": points}  # a histogram is three points

    def came() -> bool:
        now = Counter(each.category.path for each in gateway.guance.points())
        return all(now[name] - before[Category[name.upper()]] >= count * requests for name, count in wanted.items())

    assert until(came)


def bytes_of(taken: list[Taken]) -> Counter[tuple[str, bytes]]:
    """Every point that was taken, byte for byte."""
    found: Counter[tuple[str, bytes]] = Counter()
    for each in taken:
        begin = 0
        for end in point_ends(each.body):
            found[each.category, each.body[begin:end]] += 1
            begin = end
    return found


def replayed(gateway: Running, order: replays.Order = ORDER, **changes: object) -> tuple[replays.Prepared, list[Taken]]:
    """A replay to its end, and what came of it at the fake Guance."""
    gateway.guance.requests.clear()
    order = replace(order, **changes)  # type: ignore[arg-type]
    prepared = replays.prepare(gateway.settings.data_dir, gateway.conf_dir, order, time.time_ns())
    for _ in replays.run(prepared, threading.Event()):
        pass
    return prepared, list(gateway.guance.requests)


def test_a_replay_sends_the_same_points_byte_for_byte_and_under_the_same_ids_each_time(gateway: Running) -> None:
    fill(gateway)
    live = bytes_of(gateway.guance.requests)
    first, once = replayed(gateway)
    assert bytes_of(once) == live
    assert first.finished
    assert first.report.points.total() == live.total()
    _, twice = replayed(gateway)
    assert Counter(each.package_id for each in twice) == Counter(each.package_id for each in once)
    assert len({each.package_id for each in once}) == len(once)


def test_what_is_in_the_open_segment_is_replayed_too_and_what_comes_later_is_in_the_next(gateway: Running) -> None:
    fill(gateway)
    replayed(gateway)
    fill(gateway, first=6, requests=1)
    prepared, taken = replayed(gateway)
    assert len({each.segment.number for each in prepared.chosen}) == 2
    assert {int(str(each.fields["message"]).removeprefix("promise-")) for each in logs(taken)} == set(range(1, 491))


def logs(taken: list[Taken]) -> list[Event]:
    return [event for each in taken for event in each.events() if each.category == "logging"]


@pytest.mark.parametrize(
    ("chosen", "categories"),
    [
        (Filter(category=Category.LOGGING), {"logging"}),
        (Filter(metric="promise.*"), {"metric"}),
        (Filter(metric="other"), set()),
        (Filter(tags=(("way", "3"),)), {"metric"}),
    ],
)
def test_a_filter_takes_what_tap_would_show(gateway: Running, chosen: Filter, categories: set[str]) -> None:
    fill(gateway)
    prepared, taken = replayed(gateway, filter=chosen)
    assert {each.category for each in taken} == categories
    assert prepared.report.skipped + prepared.report.rows > 0
    for key, value in chosen.tags:
        assert {event.tags[key] for each in taken for event in each.events()} == {value}


def test_times_outside_are_skipped(gateway: Running) -> None:
    fill(gateway)
    later = str(time.time_ns())
    fill(gateway, first=6, requests=1)
    prepared, taken = replayed(gateway, since=later)
    assert {int(str(each.fields["message"]).removeprefix("promise-")) for each in logs(taken)} == set(range(421, 491))
    assert prepared.report.skipped == 3 * 420
    assert replayed(gateway, since="-3h", until="-2h")[1] == []


def test_another_policy_shapes_the_points(gateway: Running, tmp_path: Path) -> None:
    fill(gateway)
    path = tmp_path / "narrow.conf"
    path.write_text('[[inputs.opentelemetry]]\ncustomer_tags = ["service.name"]\n')
    _, taken = replayed(gateway, policy_file=path, filter=Filter(category=Category.METRIC))
    events = [event for each in taken for event in each.events()]
    assert events
    assert all("way" not in event.tags for event in events)
    path.write_text('[[inputs.opentelemetry]]\ncustomer_tags = ["reg:("]\n')
    with pytest.raises(ConfigError, match=r"narrow\.conf:2"):
        replayed(gateway, policy_file=path)


def test_a_dry_run_counts_and_sends_nothing(gateway: Running) -> None:
    fill(gateway)
    prepared, taken = replayed(gateway, dry_run=True)
    assert taken == []
    assert prepared.report.points == {"metric": 6 * 98, "tracing": 420, "logging": 420}


def test_what_was_broken_off_goes_on_where_it_was(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "_SAVE_S", 0.0)
    fill(gateway)
    live = bytes_of(gateway.guance.requests)
    client.seal(gateway.settings.data_dir)
    fill(gateway, first=6)
    live += bytes_of(gateway.guance.requests) - live
    gateway.guance.requests.clear()
    with pytest.raises(ConfigError, match="--resume"):
        replays.prepare(gateway.settings.data_dir, gateway.conf_dir, replace(ORDER, resume=True), time.time_ns())
    stop = threading.Event()
    prepared = replays.prepare(gateway.settings.data_dir, gateway.conf_dir, ORDER, time.time_ns())
    for report in replays.run(prepared, stop):
        if report.done is not None:
            stop.set()
    assert not prepared.finished
    first = list(gateway.guance.requests)
    again, rest = replayed(gateway, resume=True)
    assert again.finished
    assert rest
    once = {each.package_id: each for each in (*first, *rest)}
    assert bytes_of(list(once.values())) == live
    assert again.report.points.total() == live.total()
    with pytest.raises(ConfigError, match="--resume"):
        replayed(gateway, resume=True)


def test_what_the_receiver_refuses_is_laid_aside_and_counted(gateway: Running) -> None:
    fill(gateway)
    gateway.guance.fail("400", 1000)
    prepared, _ = replayed(gateway, filter=Filter(tags=(("way", "3"),)))
    assert prepared.refused == prepared.report.points.total() > 0


def test_a_damaged_row_group_costs_its_rows_and_is_counted(gateway: Running) -> None:
    fill(gateway)
    client.seal(gateway.settings.data_dir)
    path = gateway.settings.data_dir / "segments" / "00000001" / "events.parquet"
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.write_bytes(raw)
    prepared, taken = replayed(gateway)
    assert prepared.report.damaged == 840
    assert {each.category for each in taken} == {"metric"}


def test_live_data_comes_first() -> None:
    answers = iter([True, True, False])
    stop = threading.Event()
    pace = Pace(0, lambda: next(answers), stop)
    began = time.monotonic()
    pace.wait(1)
    assert 1.9 < time.monotonic() - began < 4
    stop.set()
    behind = Pace(0, lambda: True, stop)
    with pytest.raises(Stopped):
        behind.wait(1)


def test_a_rate_is_kept() -> None:
    pace = Pace(1000, lambda: False, threading.Event())
    began = time.monotonic()
    for _ in range(6):
        pace.wait(100)
    assert 0.45 < time.monotonic() - began < 0.8


def test_the_command_warns_shows_and_says_what_was_sent(gateway: Running) -> None:
    fill(gateway)
    command = [sys.executable, "-m", "gateway.cli", "replay", "--conf", str(gateway.conf_dir)]
    command += ["--data", str(gateway.settings.data_dir)]
    done = subprocess.run([*command, "--from", "-1h"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{6 * 98 + 840:,} points sent" in done.stdout
    done = subprocess.run([*command, "--from", "-1h", "--json"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert json.loads(done.stdout)["sent_points"] == 6 * 98 + 840
    done = subprocess.run([*command, "--from", "tomorrow"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "--from" in done.stderr


def test_old_data_is_warned_of(gateway: Running) -> None:
    fill(gateway)
    day_later = time.time_ns() + 86_400 * 10**9
    prepared = replays.prepare(
        gateway.settings.data_dir, gateway.conf_dir, replace(ORDER, since="2020-01-01"), day_later
    )
    assert [word for word in ("2 h", "12 h", "retention") if any(word in each for each in prepared.warnings)] == [
        "2 h",
        "12 h",
        "retention",
    ]


@pytest.mark.parametrize(
    ("told", "ns"),
    [
        ("now", 10**18),
        ("-1m30s", 10**18 - 90 * 10**9),
        ("1970-01-02", 86_400 * 10**9),
        ("1970-01-02T00:00:00+08:00", 57_600 * 10**9),
        ("1970-01-01T00:00:01.5Z", 1_500_000_000),
        ("1764590400", 1764590400 * 10**9),
        ("1764590400123", 1764590400123 * 10**6),
        ("1764590400123456789", 1764590400123456789),
    ],
)
def test_a_time_is_written_in_many_ways(told: str, ns: int) -> None:
    assert moment(told, 10**18) == ns


@pytest.mark.parametrize("told", ["", "yesterday", "-", "12", "2026-13-01"])
def test_what_is_no_time_is_refused(told: str) -> None:
    with pytest.raises(BadValue):
        moment(told, 0)
