"""The fault campaign: what can go wrong with a process, a disk, a clock and a receiver, many times; then the books.

``python -m tests.promises.torture`` runs all of it; ``--table FILE`` writes the table of docs/reliability.md, ``--only
NAME`` runs one fault, ``--scale 0.1`` a tenth of it. The exit code is 1 when a promise was broken.

Points carry numbers. *Lost* was acknowledged and never came, *doubled* came under two package ids. A fault that takes
bytes off the disk may cost what was in them: that is *damaged*, must have been said, and may not be more than was hit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gateway.console import table
from gateway.forward.stand_in import FAULTS
from tests.promises import kill, oracle
from tests.promises.gateway import ROOT
from tests.promises.kill import CONF, Scene, promises, request


@dataclass(slots=True)
class Outcome:
    """What became of one fault. ``broken``: promises that were not kept, as sentences."""

    fault: str
    tried: int = 0
    kills: int = 0
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    damaged: int = 0
    recovered_s: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def row(self) -> tuple[object, ...]:
        times = sorted(self.recovered_s)
        shown = f"{times[len(times) // 2]:.1f}, {times[-1]:.1f}" if times else ""
        state = "yes" if not self.broken else "; ".join(self.broken)
        return (self.fault, self.tried, self.kills, f"{self.acknowledged:,}", self.lost, self.doubled,
                self.damaged, shown, state)  # fmt: skip


COLUMNS = (
    "fault",
    "times tried",
    "kills",
    "acknowledged",
    "lost",
    "doubled",
    "damaged, and said",
    "recovered in s (median, longest)",
    "kept",
)


def books(scene: Scene, into: Outcome, *, may_double: bool = False) -> None:
    """Add what became of the promises to an outcome."""
    arrivals = scene.came()
    into.acknowledged += len(scene.promised.acknowledged)
    into.lost += len(oracle.lost(scene.promised, arrivals))
    doubled = len(oracle.doubled(arrivals))
    into.doubled += doubled
    if doubled and not may_double:
        into.broken.append(f"{doubled} points under two ids")
    for package_id, what in () if may_double else oracle.changed(arrivals).items():
        into.broken.append(f"{package_id}: {what}")
    if invented := oracle.invented(scene.promised, arrivals):
        into.broken.append(f"{len(invented)} points that nobody sent")


def _plain_kills(place: Path, seed: int, times: int) -> Outcome:
    """kill -9 while receiving, sealing, sending, starting"""
    return _kills(place, seed, times, CONF, True)


def _deleting_kills(place: Path, seed: int, times: int) -> Outcome:
    """kill -9 while retention deletes"""
    return _kills(place, seed, times, CONF + 'max_age_s = "1s"\n', False)


def _kills(place: Path, seed: int, times: int, conf: str, faults: bool) -> Outcome:
    place.mkdir(parents=True, exist_ok=True)
    result = kill.campaign(times, place, seed, faults=faults, conf=conf)
    found = Outcome(
        "", result.rounds, result.rounds, result.acknowledged, result.lost, result.doubled, 0, result.ready_s
    )
    if not result.kept:
        found.broken.append(f"{result.changed} packages changed, {result.invented} points invented")
        found.broken += result.differences[:3]
    return found


def _replay_kills(place: Path, seed: int, times: int) -> Outcome:
    """kill -9 of a replay, then --resume"""
    found = Outcome("")
    with Scene(place, seed) as scene:
        scene.gateway.start()
        scene.load(4.0)
        scene.settle()
        books(scene, found)
        scene.arrivals.clear()
        command = [sys.executable, "-m", "gateway.cli", "replay", "--from", "-1h", "--rate", "300k/s"]
        command += ["--conf", str(scene.gateway.conf_dir), "--data", str(scene.data_dir)]
        resume: list[str] = []
        while True:
            process = subprocess.Popen(
                [*command, *resume], cwd=ROOT, env=scene.gateway.environment,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            began = time.monotonic()
            try:
                said = process.communicate(timeout=scene.chance.uniform(0.3, 2.5) if found.tried < times else 120)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                found.tried, found.kills = found.tried + 1, found.kills + 1
                resume = ["--resume"] if list((scene.data_dir / "replays").glob("*.json")) else []
                continue
            if process.returncode:
                found.broken.append(said.strip()[-200:])
            found.recovered_s.append(time.monotonic() - began)
            if found.tried >= times or process.returncode:
                break
            resume = []
        found.lost += len(scene.missing())
        found.doubled += len(oracle.doubled(scene.came()))
        found.broken += [f"{each}: {what}" for each, what in oracle.changed(scene.came()).items()]
        if found.doubled:
            found.broken.append(f"{found.doubled} points under two ids")
    return found


def _terminations(place: Path, seed: int, times: int) -> Outcome:
    """SIGTERM under load"""
    found = Outcome("", times)
    with Scene(place, seed) as scene:
        for _ in range(times):
            scene.gateway.start()
            scene.senders.start(scene.gateway.http, scene.gateway.grpc)
            time.sleep(scene.chance.uniform(0.1, 1.0))
            began = time.monotonic()
            if code := scene.gateway.terminate():
                found.broken.append(f"exit code {code}")
            found.recovered_s.append(time.monotonic() - began)
            scene.senders.stop()
        scene.gateway.start()
        scene.settle()
        books(scene, found)
    return found


@contextlib.contextmanager
def _disk(place: Path, size: str) -> Iterator[Path]:
    """A small file system of its own. Raises ``CalledProcessError`` where it may not be mounted."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


def _full_disk(place: Path, seed: int, times: int) -> Outcome:
    """the disk is full, then not"""
    found = Outcome("", times)
    with _disk(place, "48m") as disk, Scene(disk, seed, CONF + 'min_free_disk_bytes = "0"\n') as scene:
        scene.gateway.start()
        for _ in range(times):
            ballast = disk / "ballast"
            free = shutil.disk_usage(disk).free
            with contextlib.suppress(OSError), ballast.open("wb") as file:
                file.truncate(0)
                os.posix_fallocate(file.fileno(), 0, max(4096, free - 64 * scene.chance.randrange(1, 4000)))
            scene.load(1.0)
            ballast.unlink(missing_ok=True)
            found.recovered_s.append(_takes_again(scene))
            _delete_delivered(scene)
        scene.settle()
        books(scene, found)
        _must_live(scene, found)
    return found


def _delete_delivered(scene: Scene) -> None:
    """Let the small disk not fill up with what is delivered: the next start deletes it by its age."""
    scene.settle()
    if shutil.disk_usage(scene.data_dir).free < 24 << 20:
        own = scene.gateway.conf_dir / "locum.toml"
        kept = own.read_text()
        scene.gateway.terminate()
        own.write_text(kept + 'max_age_s = "1s"\n')
        scene.gateway.start()
        time.sleep(3)
        scene.gateway.terminate()
        own.write_text(kept)
        scene.gateway.start()


def _read_only(place: Path, seed: int, times: int) -> Outcome:
    """the file system turns read-only in mid-run; repaired, and a new start"""
    found = Outcome("", times)
    disk, image = place / "disk", place / "image"
    disk.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(256 << 20)
    _do("mkfs.ext4", "-q", str(image))
    _do("mount", "-o", "loop", str(image), str(disk))
    try:
        with Scene(disk, seed, CONF + 'min_free_disk_bytes = "0"\n') as scene:
            for _ in range(times):
                found.recovered_s.append(scene.gateway.start())
                scene.senders.start(scene.gateway.http, scene.gateway.grpc)
                time.sleep(scene.chance.uniform(0.1, 1.0))
                _do("mount", "-o", "remount,abort", str(disk))  # as the kernel does after an error of the device
                time.sleep(0.5)
                scene.senders.stop()
                _must_live(scene, found)
                scene.gateway.kill()
                _do("umount", str(disk))
                subprocess.run(["e2fsck", "-fy", str(image)], check=False, capture_output=True)
                _do("mount", "-o", "loop", str(image), str(disk))
            scene.gateway.start()
            scene.settle()
            books(scene, found)
            _must_live(scene, found)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False, capture_output=True)
    return found


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _takes_again(scene: Scene) -> float:
    """Seconds until a request is acknowledged again."""
    began = time.monotonic()
    before = len(scene.promised.acknowledged)
    while len(scene.promised.acknowledged) == before and time.monotonic() < began + 60:
        scene.load(0.1)
    return time.monotonic() - began


def _close(scene: Scene, found: Outcome) -> None:
    """Wait for what is on its way, and do the books."""
    found.recovered_s.append(scene.settle())
    books(scene, found)
    _must_live(scene, found)


def _must_live(scene: Scene, found: Outcome) -> None:
    if scene.gateway._process is None or scene.gateway._process.poll() is not None:
        found.broken.append("the process has ended")


Harm = Callable[[Scene], int | None]
"""Do harm to the files of a gateway that is dead; how many requests it may cost (None: any number of points, said)."""


def _harmed(harm: Harm, may_double: bool = False) -> Callable[[Path, int, int], Outcome]:
    """A fault in the files: points that the receiver has not got yet, a dead gateway, the harm, a start."""

    def fault(place: Path, seed: int, times: int) -> Outcome:
        found = Outcome("", times)
        for at in range(times):
            with Scene(place / str(at), seed + at) as scene:
                scene.guance.faults["503"] = 1.0
                scene.gateway.start()
                scene.load(2.5)
                scene.gateway.kill()
                found.kills += 1
                allowed = harm(scene)
                scene.guance.heal()
                found.recovered_s.append(scene.gateway.start())
                _wait_for_standstill(scene)
                before = found.lost
                books(scene, found, may_double=may_double)
                cost, found.lost = found.lost - before, before
                if cost:
                    told = list((scene.data_dir / "quarantine").glob("*.json")) or [
                        line for line in scene.gateway.log if "event=rows_damaged" in line
                    ]
                    records = len(
                        {(kind.replace("bucket", "metric"), number // 2000) for kind, number in scene.missing()}
                    )
                    if not told or (allowed is not None and records > 2 * allowed):
                        found.lost += cost
                    else:
                        found.damaged += cost
                _must_live(scene, found)
            shutil.rmtree(place / str(at), ignore_errors=True)
        return found

    return fault


def _wait_for_standstill(scene: Scene) -> None:
    """Wait until nothing comes any more, or all has come."""
    before, since = -1, time.monotonic()
    while scene.missing() and time.monotonic() - since < 6:
        if len(scene.arrivals) != before:
            before, since = len(scene.arrivals), time.monotonic()
        time.sleep(0.1)


def _some(scene: Scene, pattern: str, first: bool = False) -> Path:
    """One of the files that are there, with something in it."""
    found = [path for path in sorted((scene.data_dir).glob(pattern)) if path.stat().st_size > 100]
    return found[0] if first else scene.chance.choice(found)


def _flip(scene: Scene, path: Path, begin: int = 64) -> None:
    at = scene.chance.randrange(min(begin, path.stat().st_size - 1), path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << scene.chance.randrange(8)]))


def flip_journal(scene: Scene) -> int:
    """a flipped bit in a journal"""
    _flip(scene, _some(scene, "segments/*/journal"))
    return 1


def flip_journal_header(scene: Scene) -> int:
    """a flipped bit in a journal's header"""
    path = _some(scene, "segments/*/journal")
    with path.open("r+b") as file:
        file.seek(scene.chance.randrange(0, 32))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    return 0


def torn_tail(scene: Scene) -> int:
    """a torn record at the journal's end"""
    path = sorted(scene.data_dir.glob("segments/*/journal"))[-1]
    raw = path.read_bytes()
    begin = scene.chance.randrange(0, max(1, len(raw) - 1))
    with path.open("ab") as file:
        file.write(
            raw[begin : begin + scene.chance.randrange(1, 5000)] if scene.chance.random() < 0.5 else os.urandom(999)
        )
    return 0


def zero_tail(scene: Scene) -> int:
    """zeros at the journal's end"""
    with sorted(scene.data_dir.glob("segments/*/journal"))[-1].open("ab") as file:
        file.write(bytes(scene.chance.randrange(1, 20_000)))
    return 0


def flip_manifest(scene: Scene) -> None:
    """a flipped bit in a manifest"""
    _flip(scene, _some(scene, "segments/*/manifest.json"), 0)


def flip_sealed(scene: Scene) -> None:
    """a flipped bit in a sealed file"""
    _flip(scene, _some(scene, "segments/*/*.parquet"))


def lose_index(scene: Scene) -> int:
    """the index garbled or deleted"""
    for path in scene.data_dir.glob("segments/*/index.duckdb*"):
        if scene.chance.random() < 0.5:
            path.unlink()
        else:
            path.write_bytes(os.urandom(10_000))
    return 0


def harm_cursor(scene: Scene) -> int:
    """a cursor garbled or deleted"""
    for path in scene.data_dir.glob("cursors/*.json"):
        choice = scene.chance.randrange(3)
        if choice == 0:
            path.unlink()
        elif choice == 1:
            path.write_bytes(os.urandom(40_000))
        else:
            _flip(scene, path, 0)
    return 0


def _clock(place: Path) -> tuple[dict[str, str], Callable[[float], None]]:
    """The environment of a process whose wall clock can be stepped, and what steps it (seconds from the truth)."""
    place.mkdir(parents=True, exist_ok=True)
    shim, file = place / "step_clock.so", place / "offset"
    source = Path(__file__).with_name("step_clock.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True)
    file.write_bytes(struct.pack("d", 0.0))

    def step(offset_s: float) -> None:
        with file.open("r+b") as opened:
            opened.write(struct.pack("d", offset_s))

    return {"LD_PRELOAD": str(shim), "STEP_CLOCK": str(file)}, step


def _clock_steps(place: Path, seed: int, times: int) -> Outcome:
    """the wall clock steps, up to two days forth and back"""
    found = Outcome("", times)
    environment, step = _clock(place)
    with Scene(place / "gateway", seed, environment=environment) as scene:
        scene.gateway.start()
        for _ in range(times):
            scene.senders.start(scene.gateway.http, scene.gateway.grpc)
            time.sleep(0.2)
            step(scene.chance.uniform(-172_800, 172_800))
            time.sleep(0.3)
            scene.senders.stop()
            if scene.chance.random() < 0.3:
                scene.gateway.kill()
                found.kills += 1
                scene.gateway.start()
        _close(scene, found)
    return found


def _two_days(place: Path, seed: int, times: int) -> Outcome:
    """48 hours without the receiver, simulated: every fault in turn"""
    found = Outcome("", 0)
    environment, step = _clock(place)
    with Scene(place / "gateway", seed, environment=environment) as scene:
        scene.gateway.start()
        kinds = [kind for kind in FAULTS if kind not in ("slow", "400", "400-poison")]
        for hour in range(times):
            scene.guance.heal()
            scene.guance.faults[kinds[hour % len(kinds)]] = 1.0
            step(3600.0 * hour)
            scene.load(0.5)
            found.tried += 1
        scene.guance.heal()
        _close(scene, found)
    return found


def _receiver_fault(kind: str) -> Callable[[Path, int, int], Outcome]:
    """A receiver that goes wrong for a third of the requests in one way."""

    def fault(place: Path, seed: int, times: int) -> Outcome:
        found = Outcome("", times)
        with Scene(place, seed) as scene:
            scene.gateway.start()
            scene.guance.faults[kind] = 0.3
            scene.load(0.3 * times)
            scene.guance.heal()
            found.recovered_s.append(scene.settle())
            _count_dead_letters(scene, found)
            books(scene, found)
            _must_live(scene, found)
        return found

    return fault


def _count_dead_letters(scene: Scene, found: Outcome) -> None:
    """What the receiver refused for good lies in dead letters, with its reason: it is said, not lost."""
    for path in (scene.data_dir / "dead-letters").glob("*/*.json"):
        found.damaged += json.loads(path.read_bytes())["points"]


def _second_gateway(place: Path, seed: int, times: int) -> Outcome:
    """a second gateway on the same directory"""
    found = Outcome("", times)
    with Scene(place, seed) as scene:
        scene.gateway.start()
        scene.senders.start(scene.gateway.http, scene.gateway.grpc)
        for _ in range(times):
            command = [sys.executable, "-m", "gateway.cli", "run", "--conf", str(scene.gateway.conf_dir)]
            done = subprocess.run(
                [*command, "--data", str(scene.data_dir)], cwd=ROOT, env=scene.gateway.environment, check=False,
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            if done.returncode != 2 or f"process {scene.gateway.pid}" not in done.stderr:
                found.broken.append(f"exit code {done.returncode}: {done.stderr[-100:]}")
        scene.senders.stop()
        _close(scene, found)
    return found


def _slow_receiver(place: Path, seed: int, times: int) -> Outcome:
    """a slow receiver under live load: answers stay quick"""
    found = Outcome("", 0)
    with Scene(place, seed) as scene:
        scene.gateway.start()
        scene.guance.faults["slow"] = 1.0
        taken: list[float] = []
        with contextlib.ExitStack() as stack:
            post = kill.http_sender(scene.gateway.http, "metric", stack)
            for _ in range(times):
                numbers = list(itertools.islice(scene.numbers, 40))
                began = time.monotonic()
                if post(request("metric", numbers)):
                    scene.promised.acknowledged |= promises("metric", numbers)
                taken.append(time.monotonic() - began)
                found.tried += 1
                time.sleep(0.01)
        p99 = sorted(taken)[len(taken) * 99 // 100]
        if p99 > 0.1:
            found.broken.append(f"p99 of answers {p99 * 1000:.0f} ms")
        scene.guance.heal()
        _close(scene, found)
    return found


HARMS: tuple[tuple[Harm, int, bool], ...] = (
    (flip_journal, 20, False),
    (flip_journal_header, 10, False),
    (torn_tail, 20, False),
    (zero_tail, 10, False),
    (lose_index, 10, False),
    (harm_cursor, 20, True),
    (flip_manifest, 20, True),
    (flip_sealed, 20, False),
)
"""With how often each is done, and whether points may come under two ids after it."""

Fault = Callable[[Path, int, int], Outcome]
CAMPAIGN: dict[str, tuple[str, Fault, int]] = {
    fault.__name__.strip("_"): (str(fault.__doc__), fault, times)
    for fault, times in (
        (_plain_kills, 700),
        (_deleting_kills, 150),
        (_replay_kills, 100),
        (_terminations, 30),
        (_full_disk, 20),
        (_read_only, 20),
        (_clock_steps, 40),
        (_two_days, 48),
        (_second_gateway, 5),
        (_slow_receiver, 500),
    )
}
CAMPAIGN |= {harm.__name__: (str(harm.__doc__), _harmed(harm, twice), times) for harm, times, twice in HARMS}
CAMPAIGN |= {
    f"receiver_{kind}": (f"the receiver: {told}", _receiver_fault(kind), 10)
    for kind, told in FAULTS.items()
    if kind not in ("slow", "400-poison")
}


def run(name: str, place: Path, seed: int, scale: float = 1.0) -> Outcome:
    """One fault of the campaign."""
    title, fault, times = CAMPAIGN[name]
    found = fault(place / name, seed, max(1, round(times * scale)))
    found.fault = title
    if found.lost:
        found.broken.append(f"{found.lost} points lost")
    return found


_SUMMED = ("tried", "kills", "acknowledged", "lost", "doubled", "damaged")


def markdown(outcomes: list[Outcome]) -> str:
    """The table of docs/reliability.md."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(each.row() for each in outcomes)]
    sums = {name: sum(getattr(each, name) for each in outcomes) for name in _SUMMED}
    total = ["**all**", *(f"{count:,}" for count in sums.values()), "", ""]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [*lines, total]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", action="append", choices=CAMPAIGN, help="only this fault; may be repeated")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of it: 0.1 is a tenth of the times")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", type=Path, help="write the table to this file, in Markdown, after each fault")
    told = parser.parse_args()
    outcomes: list[Outcome] = []
    for name in told.only or CAMPAIGN:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="locum-torture-") as place:
            outcomes.append(run(name, Path(place), told.seed, told.scale))
        print(f"{name}: {time.monotonic() - began:.0f} s {outcomes[-1].row()}", file=sys.stderr, flush=True)
        if told.table:
            told.table.write_text(markdown(outcomes))
    table(COLUMNS, [each.row() for each in outcomes])
    sys.exit(1 if any(each.broken for each in outcomes) else 0)


if __name__ == "__main__":
    main()
