"""``locum replay``: prepare one, warn, run it, keep its progress.

It runs in the command's own process, at low priority, beside a gateway or without one; sealed segments never change, so
it needs no lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from gateway import client, config_files
from gateway.buffer.portions import Chosen, Wanted, all_rows, portions, sealed_segments
from gateway.config import DatawaySettings, PolicySettings, Settings
from gateway.config_values import option_moment
from gateway.forward.dataway import Dataway
from gateway.forward.dead_letters import DeadLetters
from gateway.forward.encode import Encoder
from gateway.forward.replay import Pace, Progress, Replay, Report, progress_path, read_progress, write_progress
from gateway.forward.sink import Outlet, Stopped
from gateway.forward.tap import Filter
from gateway.metrics import Meters
from gateway.model import Category, ConfigError
from gateway.otlp.point import decode_point
from gateway.policy.rules import Rules

_SAVE_S = 1.0
_BEHIND_S = 3.0
"""Live data that waits longer than this has precedence."""
_REWRITTEN_S, _DROPPED_S = 2 * 3600, 12 * 3600


@dataclass(frozen=True, slots=True)
class Order:
    """What a person asks for. ``since`` and ``until`` as written; ``points_s``: 0 is as fast as it goes."""

    since: str
    until: str
    filter: Filter
    sink: str
    points_s: float
    policy_file: Path | None = None
    resume: bool = False
    dry_run: bool = False


@dataclass(slots=True)
class Prepared:
    """A replay that could begin: its segments, how many rows lie in them, what to warn of, and what is wrong with the
    segments that it has to leave out."""

    order: Order
    data_dir: Path
    settings: Settings
    policy: PolicySettings
    to: DatawaySettings
    first_ns: int
    last_ns: int
    name: str
    chosen: list[Chosen]
    report: Report
    refused: int
    warnings: list[str]
    left_out: list[str]
    finished: bool = False
    trouble: Callable[[], str | None] = lambda: None

    @property
    def rows(self) -> int:
        """Rows in the segments that are looked at."""
        return sum(all_rows(each.manifest) for each in self.chosen)


def prepare(data_dir: Path, conf_dir: Path, order: Order, now_ns: int) -> Prepared:
    """Seal what is open, find the segments, read what a replay that was broken off left. Raises ``ConfigError``,
    ``StorageError``."""
    settings = config_files.load(conf_dir, data_dir, os.environ)
    policy = config_files.load_policy(order.policy_file) if order.policy_file else settings.policy
    if order.dry_run and not settings.dataways:
        to = DatawaySettings(url="")
    else:
        to = settings.dataway_sink(order.sink)
    shape = f"{settings.points.parity}/{policy!r}/{to.encoding}/{to.max_body_bytes}"
    name = f"{order.since}/{order.until}/{order.filter!r}/{order.sink}/{shape}"
    before = read_progress(progress_path(data_dir, name)) if order.resume else None
    if order.resume and (before is None or before.finished):
        raise ConfigError(
            f"{data_dir}: there is no replay with these options that was broken off; leave out --resume to begin one"
        )
    first_ns = before.first_ns if before else option_moment("--from", order.since, now_ns)
    last_ns = before.last_ns if before else option_moment("--to", order.until, now_ns)
    if first_ns > last_ns:
        raise ConfigError(f"--from {order.since} is later than --to {order.until}")
    client.seal(data_dir)
    chosen, damaged = sealed_segments(data_dir, Wanted(first_ns, last_ns))
    if before:  # what came since is not part of it: it may lie before the place where this one stopped
        chosen = [each for each in chosen if each.arrived_ns <= before.arrived_ns]
    prepared = Prepared(
        order, data_dir, settings, policy, to, first_ns, last_ns, name, chosen,
        before.report() if before else Report(), before.refused if before else 0, [], damaged,
    )  # fmt: skip
    prepared.warnings = _warnings(prepared, now_ns)
    return prepared


def run(prepared: Prepared, stop: threading.Event) -> Iterator[Report]:
    """Do it; the report after each portion. Ends early, with its progress kept, once ``stop`` is set."""
    order, settings = prepared.order, prepared.settings
    letters, meters = DeadLetters(prepared.data_dir), Meters()
    rules = Rules.compile(prepared.policy)
    apply = rules.apply if rules.touches_metrics else None
    encoder = Encoder(apply, settings.points.parity, None, prepared.to.max_body_bytes)
    outlets: dict[Category, Outlet] = {}
    if not order.dry_run:
        outlets = {
            each: Dataway(order.sink, each, prepared.to, letters, meters, version("locum"), settings.points.hostname)
            for each in Category
        }
    prepared.trouble = lambda: next((said for each in outlets.values() if (said := each.health())), None)
    pace = Pace(order.points_s, lambda: not order.dry_run and client.live_lag_s(prepared.data_dir) > _BEHIND_S, stop)
    replay = Replay(order.sink, encoder, outlets, pace, stop, max(1, prepared.to.connections), prepared.report)
    refused_before, saved_at = prepared.refused, 0.0

    def save(finished: bool) -> None:
        prepared.refused = refused_before + _refused(meters, order.sink)
        if not order.dry_run:
            write_progress(progress_path(prepared.data_dir, prepared.name), _progress(prepared, finished))

    wanted = _wanted(prepared)
    try:
        for report in replay.run(portions(prepared.chosen, wanted, prepared.report.done)):
            if time.monotonic() - saved_at > _SAVE_S:
                saved_at = time.monotonic()
                save(False)
            yield report
        prepared.finished = True
        save(True)
    except Stopped:
        save(False)
        return
    finally:
        for outlet in outlets.values():
            outlet.close()


def _wanted(prepared: Prepared) -> Wanted:
    chosen = prepared.order.filter
    narrow = bool(chosen.metric or chosen.tags)
    return Wanted(
        prepared.first_ns,
        prepared.last_ns,
        chosen.takes_series if narrow else None,
        (lambda category, point: chosen.takes_event(decode_point(point, category))) if narrow else None,
        frozenset(Category) if chosen.category is None else frozenset((chosen.category,)),
    )


def _progress(prepared: Prepared, finished: bool) -> Progress:
    report = prepared.report
    arrived_ns = max((each.arrived_ns for each in prepared.chosen), default=0)
    return Progress(
        prepared.name, prepared.first_ns, prepared.last_ns, arrived_ns, report.done, finished, report.rows,
        report.skipped, report.damaged, report.bodies, dict(report.points), prepared.refused,
    )  # fmt: skip


def _refused(meters: Meters, sink: str) -> int:
    """Points that became dead letters."""
    name = "locum_dead_letter_points_total"
    labels = [{"sink": sink, "category": category.path} for category in Category]
    return int(sum(meters.registry.get_sample_value(name, each) or 0 for each in labels))


def _warnings(prepared: Prepared, now_ns: int) -> list[str]:
    """What to know before old data goes out (DataKit 1.84: ``correctPointTime``, and the expiry of its WAL)."""
    said = [f"{each}; this segment is left out" for each in prepared.left_out]
    times = [first for each in prepared.chosen if (first := each.manifest.first_time_ns) is not None]
    oldest_ns = max(prepared.first_ns, min(times, default=now_ns))
    age_s = (now_ns - oldest_ns) / 1e9
    if not times or age_s < _REWRITTEN_S:
        return said
    said += [
        f"the oldest data is {age_s / 3600:.1f} h old. A DataKit between here and Guance would set times older than "
        "2 h to now; send to a Dataway itself, which keeps them"
    ]
    if age_s >= _DROPPED_S:
        said.append("a DataKit that cannot deliver drops what is older than 12 h without a word")
    said.append("Guance keeps what is younger than the workspace's retention and may ignore the rest")
    return said
