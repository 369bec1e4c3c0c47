"""How the commands print: tables on a terminal, plain text in a pipe, JSON and CSV when asked."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from gateway.buffer.bundle import BundleError, verify
from gateway.buffer.bundle_keys import Signature
from gateway.buffer.imports import Receipt
from gateway.bundles import Export, Import, all_bytes
from gateway.forward.dead_letters import DeadLetter
from gateway.forward.replay import Report
from gateway.forward.resend import Outcome
from gateway.forward.tap import show
from gateway.model import Category, utc
from gateway.otlp.point import decode_points
from gateway.replays import Prepared

_TELL_S = 10.0


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows under their columns. NO_COLOR and pipes are honoured by the library."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(Text("" if value is None else str(value)) for value in row))
    console.print(shown)


def print_answer(answer: dict[str, Any], form: str) -> None:
    """The answer of a question: ``columns``, ``rows`` and ``truncated``. ``form``: "json", "csv", or "" for a table."""
    columns, rows = answer["columns"], answer["rows"]
    if form == "json":
        click.echo(json.dumps(answer, ensure_ascii=False))
        return
    if form == "csv":
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow(columns)
        writer.writerows(rows)
        click.echo(out.getvalue(), nl=False)
    else:
        table(columns, rows)
    if answer["truncated"]:
        click.echo(f"(only the first {len(rows)} rows; --limit says how many)", err=True)


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def print_status(status: dict[str, Any], as_json: bool) -> None:
    """The state of the buffer and of the sinks."""
    if as_json:
        click.echo(json.dumps(status, ensure_ascii=False))
        return
    table(("", ""), [(key.replace("_", " "), _plain(key, value)) for key, value in status["buffer"].items()])
    if status["sinks"]:
        table(
            ("sink", "category", "delivered through batch", "behind (batches)", "behind (s)", "state"),
            [
                (s["sink"], s["category"], s["delivered"], s["lag_batches"], round(s["lag_s"], 1), s["health"] or "ok")
                for s in status["sinks"]
            ],
        )
    else:
        click.echo("no sinks: everything is kept here until one is configured")


def print_letters(letters: Sequence[DeadLetter], as_json: bool) -> None:
    """Dead letters, a line each; the JSON has all of each but its body."""
    if as_json:
        click.echo(json.dumps([_without_body(letter) for letter in letters], ensure_ascii=False))
        return
    if letters:
        rows = [
            (each.id, each.laid_aside, each.sink, each.category, each.points, each.status or "", _said(each))
            for each in letters
        ]
        table(("id", "laid aside", "sink", "category", "points", "status", "said"), rows)
    click.echo(f"{len(letters)} dead letters, {sum(letter.points for letter in letters)} points")


def print_letter(letter: DeadLetter, as_json: bool) -> None:
    """One dead letter with its points."""
    points = decode_points(letter.raw(), Category[letter.category.upper()])
    if as_json:
        spelled = [json.loads(show(point, as_json=True)) for point in points]
        click.echo(json.dumps(_without_body(letter) | {"spelled": spelled}, ensure_ascii=False))
        return
    table(("", ""), [(name.replace("_", " "), value) for name, value in _without_body(letter).items()])
    for point in points:
        click.echo(show(point, as_json=False))


def print_outcomes(outcomes: Iterable[tuple[DeadLetter, Outcome]], as_json: bool) -> bool:
    """What became of each letter, as soon as it is known; whether all were delivered."""
    counts: Counter[str] = Counter()
    for letter, outcome in outcomes:
        counts[outcome] += 1
        if as_json:
            click.echo(json.dumps({"id": letter.id, "points": letter.points, "outcome": outcome}))
        else:
            click.echo(f"{letter.id} {outcome}")
    if not as_json:
        click.echo(", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome))
    return counts.total() == counts[Outcome.DELIVERED]


def show_replay(prepared: Prepared, reports: Iterable[Report], as_json: bool) -> bool:
    """Warnings, a progress bar on a terminal (else a line now and then), and the outcome; whether all went well."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    for warning in prepared.warnings:
        click.echo(f"warning: {warning}", err=True)
    report = prepared.report
    began = told_at = time.monotonic()
    at_first = report.points.total()
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("replay", total=prepared.rows, completed=report.rows)
        for _ in reports:
            now = time.monotonic()
            trouble = prepared.trouble()
            line = f"{(report.points.total() - at_first) / max(now - began, 1e-3):,.0f} points/s"
            line += f", the receiver {trouble}" if trouble else ""
            bar.update(task, completed=report.rows, description=line)
            if not console.is_terminal and now - told_at > _TELL_S:
                told_at = now
                click.echo(f"{report.rows:,} of {prepared.rows:,} rows, {line}", err=True)
    seconds = time.monotonic() - began
    if as_json:
        click.echo(json.dumps(_replay_outcome(prepared, at_first, seconds)))
    else:
        _tell_replay(prepared)
    return prepared.finished and not (prepared.refused or report.damaged or prepared.left_out)


def _replay_outcome(prepared: Prepared, at_first: int, seconds: float) -> dict[str, Any]:
    report = prepared.report
    return {
        "finished": prepared.finished,
        "dry_run": prepared.order.dry_run,
        "sent_points": report.points.total() - prepared.refused,
        "points": dict(report.points),
        "refused_points": prepared.refused,
        "skipped_rows": report.skipped,
        "damaged_rows": report.damaged,
        "left_out_segments": len(prepared.left_out),
        "bodies": report.bodies,
        "seconds": round(seconds, 3),
        "points_s": round((report.points.total() - at_first) / max(seconds, 1e-3)),
    }


def _tell_replay(prepared: Prepared) -> None:
    report, verb = prepared.report, "would be sent" if prepared.order.dry_run else "sent"
    count = report.points.total() - prepared.refused
    click.echo(f"{count:,} points {verb} in {report.bodies:,} bodies ({_counts(report.points)})")
    click.echo(f"{report.skipped:,} rows skipped (outside the times or the filter)")
    click.echo(f"{prepared.refused:,} points refused" + (": locum dead-letters list" if prepared.refused else ""))
    if report.damaged:
        click.echo(f"{report.damaged:,} rows could not be read; the lines above say where", err=True)
    if not prepared.finished:
        click.echo("stopped; the same command with --resume goes on from here", err=True)


@contextmanager
def _bar(what: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on a terminal; it is told how many more are done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=size_bytes)
        yield lambda size: bar.advance(task, size)


def show_export(prepared: Export, as_json: bool) -> bool:
    """What was written, a bundle a line; whether nothing was left out."""
    left_out = list(prepared.left_out)
    with _bar("export", prepared.bytes) as tell:
        for written in prepared.run(tell):
            left_out += written.left_out
            told = written.contents
            if as_json:
                shown = asdict(told) | {"path": str(written.path), "id": written.id, "left_out": written.left_out}
                click.echo(json.dumps(shown))
            else:
                click.echo(
                    f"{written.path}: bundle {written.id}, {len(told.segments)} segments, {_counts(told.points)}, "
                    f"{size(told.bytes)}{', encrypted' if told.encrypted else ''}"
                )
    for each in left_out:
        click.echo(f"left out: {each}", err=True)
    return not left_out


def show_verify(paths: Sequence[Path], trusted: Sequence[Path], as_json: bool) -> bool:
    """Each bundle with what it is, or what is wrong with it; whether all are as they should be."""
    good = True
    with _bar("verify", all_bytes(paths)) as tell:
        for path in paths:
            try:
                found = verify(path, trusted, tell)
            except BundleError as error:
                good = False
                click.echo(json.dumps({"path": str(path), "ok": False, "error": str(error)}) if as_json else str(error))
                continue
            told = found.contents
            if as_json:
                shown = {"path": str(path), "ok": True, "id": found.id, "signature": found.signature.state}
                click.echo(json.dumps(shown | asdict(told)))
            else:
                click.echo(
                    f"{path}: good. Bundle {found.id}, part {told.part} of {told.parts}, of {told.host} "
                    f"(gateway {told.gateway_id}); {_counts(told.points)}; {size(told.bytes)}; "
                    f"{_signed(found.signature)}"
                )
    return good


def _signed(signature: Signature) -> str:
    return {
        "none": "not signed",
        "not checked": "signed, not checked (--key FILE checks it)",
    }.get(signature.state, f"signed by {signature.by}")


def show_import(prepared: Import, as_json: bool) -> None:
    """What came of each bundle, as soon as it is known."""
    with _bar("verify", prepared.bytes) as tell:
        for outcome in prepared.run(tell):
            receipt = outcome.receipt
            if as_json:
                click.echo(json.dumps(asdict(receipt) | {"new": outcome.new, "known": outcome.known}))
            elif outcome.new:
                known = f", {outcome.known} were here already" if outcome.known else ""
                click.echo(
                    f"{receipt.path}: bundle {receipt.id}, {outcome.new} segments imported{known}, "
                    f"{_counts(receipt.points)}. locum replay sends them"
                )
            else:
                click.echo(f"{receipt.path}: bundle {receipt.id} is here already; nothing was changed")


def print_receipts(data_dir: Path, receipts: Sequence[Receipt], as_json: bool) -> None:
    """Imported bundles, a line each, and how many of their segments are still here."""
    here = {each.id: sum((data_dir / place).exists() for place in each.segments) for each in receipts}
    if as_json:
        click.echo(json.dumps([asdict(each) | {"here": here[each.id]} for each in receipts]))
        return
    rows = [
        (
            each.id, _utc(each.imported_ns), each.host, f"{each.part} of {each.parts}", _utc(each.first_time_ns),
            _utc(each.last_time_ns), _counts(each.points), f"{here[each.id]} of {len(each.segments)}", each.signature,
        )
        for each in receipts
    ]  # fmt: skip
    table(("id", "imported", "host", "part", "first time", "last time", "points", "segments here", "signature"), rows)


def _utc(at_ns: int | None) -> str:
    return "" if at_ns is None else utc(at_ns)


def _counts(points: Mapping[str, int]) -> str:
    return ", ".join(f"{category}: {count:,}" for category, count in sorted(points.items())) or "no points"


def _said(letter: DeadLetter) -> str:
    return " ".join((letter.reply or letter.reason).split())[:120]


def _without_body(letter: DeadLetter) -> dict[str, Any]:
    return {name: value for name, value in asdict(letter).items() if name != "body"}


def _plain(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return size(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}: {count}" for name, count in value.items())
    return str(value)
