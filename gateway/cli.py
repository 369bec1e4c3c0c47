"""The ``locum`` command. Each sub-command is a thin shell over a function elsewhere; imports are made where they are
used, so that a quick command stays quick.

Exit codes: 0 all is well, 1 the answer is no (findings, a refused question), 2 it could not be tried.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gateway.model import LocumError

Command = TypeVar("Command", bound=Callable[..., Any])


def _places(command: Command) -> Command:
    """The options that every command has."""
    command = click.option(
        "--conf",
        "conf_dir",
        type=click.Path(path_type=Path),
        default=Path("conf"),
        show_default=True,
        help="Where datakit.conf, opentelemetry.conf and locum.toml are (each optional).",
    )(command)
    return click.option(
        "--data",
        "data_dir",
        type=click.Path(path_type=Path),
        default=Path("var"),
        show_default=True,
        help="Where the buffer, the cursors and the dead letters are.",
    )(command)


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="locum", prog_name="locum")
def main() -> None:
    """A stand-in for DataKit: OTLP in, the points that DataKit would have sent out, everything kept on disk."""


def run_main() -> None:
    """The command's entry: errors that Locum raises on purpose become one line and exit code 2."""
    try:
        main.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except LocumError as error:
        click.echo(f"locum: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


@main.command()
@_places
@click.option("--no-collector", is_flag=True, help="Without the GPU collector (it is not part of this version yet).")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def run(conf_dir: Path, data_dir: Path, no_collector: bool, log_level: str) -> None:
    """Run the gateway until SIGTERM or Ctrl-C. SIGHUP reads the configuration again."""
    from gateway import app

    app.run(conf_dir, data_dir, log_level)


@main.command()
@_places
@_json
def check(conf_dir: Path, data_dir: Path, as_json: bool) -> None:
    """Read the configuration and say what it means, and what is wrong with it. Exit code 1: there are errors."""
    from gateway import config_files
    from gateway.console import table

    try:
        settings = config_files.load(conf_dir, data_dir, os.environ)
    except LocumError as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "errors": str(error).splitlines(), "notes": []}))
        else:
            click.echo(str(error), err=True)
        sys.exit(1)
    rows = config_files.describe(conf_dir, data_dir, os.environ)
    if as_json:
        click.echo(json.dumps({"ok": True, "errors": [], "notes": list(settings.notes), "settings": rows}))
        return
    table(("section", "key", "value", "from"), rows)
    for note in settings.notes:
        click.echo(f"note: {note}")
    click.echo(f"{conf_dir}: no errors, {len(settings.notes)} notes")


@main.command()
@click.argument("sql")
@_places
@_json
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=10_000, show_default=True, help="Rows at most.")
@click.option("--timeout", "timeout_s", type=float, default=60.0, show_default=True, help="Seconds at most.")
def query(sql: str, conf_dir: Path, data_dir: Path, as_json: bool, as_csv: bool, limit: int, timeout_s: float) -> None:
    """Ask the buffer in SQL (DuckDB's). Tables: samples, series, numbers, distributions, events, batches.

    \b
    locum query "SELECT field, count(*) FROM samples GROUP BY field"
    """
    from gateway import client
    from gateway.console import print_answer

    print_answer(
        client.query(data_dir, conf_dir, sql, limit, timeout_s), "json" if as_json else "csv" if as_csv else ""
    )


@main.command()
@_places
@_json
@click.option("--metric", help="Only metrics whose name matches this pattern (* and ? as in a shell).")
@click.option(
    "--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Only points with this tag; * and ? as in a shell."
)
@click.option("--category", type=click.Choice(["metric", "tracing", "logging"]), help="Only points of this category.")
@click.option("--last", type=click.IntRange(0, 100_000), default=0, help="Begin with the last N points.")
@click.option("--no-follow", is_flag=True, help="End after the last N points.")
def tap(
    conf_dir: Path,
    data_dir: Path,
    as_json: bool,
    metric: str | None,
    tags: tuple[str, ...],
    category: str | None,
    last: int,
    no_follow: bool,
) -> None:
    """Show points as they leave: after the policy, as line protocol or JSON."""
    from gateway import client

    for line in client.tap(data_dir, conf_dir, metric, tags, category, last, not no_follow, as_json):
        click.echo(line)


@main.group()
def buffer() -> None:
    """The buffer on disk."""


@buffer.command("status")
@_places
@_json
def buffer_status(conf_dir: Path, data_dir: Path, as_json: bool) -> None:
    """How full the buffer is, what is in it, and how far each sink has come."""
    from gateway import client
    from gateway.console import print_status

    print_status(client.status(data_dir, conf_dir), as_json)


@main.command()
@_places
@_json
@click.option("--from", "since", required=True, metavar="TIME", help="Points of this time and later.")
@click.option("--to", "until", default="now", show_default=True, metavar="TIME", help="Points of this time and before.")
@click.option("--metric", default="", help="Only metrics whose name matches this pattern (* and ? as in a shell).")
@click.option(
    "--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Only points with this tag; * and ? as in a shell."
)
@click.option("--category", type=click.Choice(["metric", "tracing", "logging"]), help="Only points of this category.")
@click.option("--sink", default="dataway", show_default=True, help="Where to: dataway, dataway-2, ...")
@click.option("--rate", "points_s", metavar="N/s", default="0", help="Points a second at most. Default: no limit.")
@click.option(
    "--policy",
    "policy_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Another whitelist than today's: a file of the form of opentelemetry.conf.",
)
@click.option("--resume", is_flag=True, help="Go on with the replay of the same options that was broken off.")
@click.option("--dry-run", is_flag=True, help="Say what would be sent, and send nothing.")
def replay(
    conf_dir: Path,
    data_dir: Path,
    as_json: bool,
    since: str,
    until: str,
    metric: str,
    tags: tuple[str, ...],
    category: str | None,
    sink: str,
    points_s: str,
    policy_file: Path | None,
    resume: bool,
    dry_run: bool,
) -> None:
    """Send what is kept once more: with its own times, under today's whitelist, the same data under the same ids.

    TIME is 2026-11-30, 2026-11-30T08:00:00+08:00 (UTC without a zone), now, or -2h. Live data has precedence. Exit code
    1: something was refused, could not be read, or it was stopped.
    """
    from gateway import replays
    from gateway.console import show_replay
    from gateway.forward.tap import Filter
    from gateway.model import Category

    pairs = tuple((key, value) for key, equals, value in (tag.partition("=") for tag in tags) if key and equals)
    if len(pairs) < len(tags):
        raise click.BadParameter("write KEY=VALUE", param_hint="--tag")
    chosen = Filter(metric, pairs, Category[category.upper()] if category else None)
    order = replays.Order(since, until, chosen, sink, _rate(points_s), policy_file, resume, dry_run)
    stop = _stop_on_signals()
    os.nice(10)  # a gateway on this host comes first
    prepared = replays.prepare(data_dir, conf_dir, order, time.time_ns())
    sys.exit(0 if show_replay(prepared, replays.run(prepared, stop), as_json) else 1)


@main.group()
def bundle() -> None:
    """Carry sealed segments to another machine: export, verify, import; then locum replay sends them."""


_trusted = click.option(
    "--key",
    "trusted",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A public key: the bundle has to be signed by it. May be repeated; one of them will do.",
)


@bundle.command("export")
@click.argument("out", type=click.Path(path_type=Path))
@_places
@_json
@click.option("--from", "since", metavar="TIME", help="Segments with points of this time and later.  [default: all]")
@click.option("--to", "until", metavar="TIME", help="Segments with points of this time and before.  [default: all]")
@click.option("--split", metavar="SIZE", help="Write OUT-1, OUT-2, ... of at most this size each (4GB).")
@click.option("--sign", "sign_with", type=click.Path(path_type=Path), metavar="FILE", help="Sign with this key file.")
@click.option(
    "--recipient",
    "recipients",
    multiple=True,
    metavar="KEY",
    help="Encrypt for this age key (age1..., or a file with it). May be repeated; each of them can read it.",
)
def bundle_export(
    out: Path,
    conf_dir: Path,
    data_dir: Path,
    as_json: bool,
    since: str | None,
    until: str | None,
    split: str | None,
    sign_with: Path | None,
    recipients: tuple[str, ...],
) -> None:
    """Write what is kept to the directory OUT. What is still open is sealed first; whole segments are taken.

    TIME is 2026-11-30, 2026-11-30T08:00:00+08:00 (UTC without a zone), now, or -2h. Exit code 1: a segment is damaged
    and was left out.
    """
    from gateway import bundles
    from gateway.console import show_export

    prepared = bundles.prepare_export(
        data_dir, conf_dir, out, since, until, _size(split), sign_with, recipients, time.time_ns()
    )
    sys.exit(0 if show_export(prepared, as_json) else 1)


@bundle.command("verify")
@click.argument("paths", nargs=-1, required=True, metavar="BUNDLE...", type=click.Path(path_type=Path))
@_json
@_trusted
def bundle_verify(paths: tuple[Path, ...], as_json: bool, trusted: tuple[Path, ...]) -> None:
    """Look at every byte of bundles, offline. Exit code 1: a file is not what it should be, and which."""
    from gateway.console import show_verify

    sys.exit(0 if show_verify(paths, trusted, as_json) else 1)


@bundle.command("import")
@click.argument("paths", nargs=-1, required=True, metavar="BUNDLE...", type=click.Path(path_type=Path))
@_places
@_json
@_trusted
@click.option(
    "--identity",
    "identities",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file with your secret age key, for a bundle that is encrypted.",
)
def bundle_import(
    paths: tuple[Path, ...],
    conf_dir: Path,
    data_dir: Path,
    as_json: bool,
    trusted: tuple[Path, ...],
    identities: tuple[Path, ...],
) -> None:
    """Verify bundles, and put what is in them where questions and replay find it. The same one twice changes nothing.

    Nothing is imported when one of them does not verify (exit code 2). A gateway may run meanwhile.
    """
    from gateway import bundles
    from gateway.console import show_import

    show_import(bundles.prepare_import(data_dir, conf_dir, paths, trusted, identities), as_json)


@bundle.command("list")
@_places
@_json
def bundle_list(conf_dir: Path, data_dir: Path, as_json: bool) -> None:
    """What was imported, and whether it is still here."""
    from gateway.buffer.imports import receipts
    from gateway.console import print_receipts

    print_receipts(data_dir, receipts(data_dir), as_json)


@bundle.command("drop")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@_places
@click.option("--yes", is_flag=True, help="Do not ask.")
def bundle_drop(ids: tuple[str, ...], conf_dir: Path, data_dir: Path, yes: bool) -> None:
    """Delete what was imported with these bundles, for good."""
    from gateway.buffer.imports import drop

    if not yes:
        click.confirm(f"Delete what {len(ids)} bundles brought to {data_dir} for good?", abort=True)
    for receipt, segments in drop(data_dir, ids):
        click.echo(f"{receipt.id}: {segments} segments deleted")


@bundle.command("keygen")
@click.argument("name", type=click.Path(path_type=Path))
@click.option("--age", "for_age", is_flag=True, help="Keys to encrypt with, instead of keys to sign with.")
def bundle_keygen(name: Path, for_age: bool) -> None:
    """Make NAME.key, which stays with you, and NAME.pub, which the others need."""
    from gateway.buffer.bundle_keys import make_age_keys, make_signing_keys

    pair = make_age_keys(name) if for_age else make_signing_keys(name)
    click.echo(f"{pair.secret}: keep it secret\n{pair.public}: for the others")


def _size(told: str | None) -> int:
    """Bytes, as the configuration writes them: 4GB, 700MiB."""
    from gateway.config_values import BadValue, size

    try:
        return size(told) if told is not None else 0
    except BadValue as error:
        raise click.BadParameter(str(error), param_hint="--split") from None


def _rate(told: str) -> float:
    """Points a second: ``50000``, ``50000/s``, ``50k/s``, ``1.5M/s``."""
    number, unit = told.strip().removesuffix("/s"), 1.0
    if number[-1:] in ("k", "M"):
        number, unit = number[:-1], 1e3 if number[-1] == "k" else 1e6
    try:
        rate = float(number) * unit
    except ValueError:
        rate = -1.0
    if not 0 <= rate < 1e12:
        raise click.BadParameter("write points a second, as 50000/s or 50k/s", param_hint="--rate")
    return rate


def _stop_on_signals() -> threading.Event:
    """An event that Ctrl-C and SIGTERM set."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


@main.group("dead-letters")
def dead_letters() -> None:
    """What the receiver did not take, with its reason."""


_ids = click.argument("ids", nargs=-1, metavar="[ID]...")
_all = click.option("--all", "take_all", is_flag=True, help="Every dead letter.")


@dead_letters.command("list")
@_places
@_json
@click.option("--sink", help="Only of this sink.")
@click.option("--category", type=click.Choice(["metric", "tracing", "logging"]), help="Only of this category.")
def dead_letters_list(conf_dir: Path, data_dir: Path, as_json: bool, sink: str | None, category: str | None) -> None:
    """One line each: when, to whom, how many points, and what the receiver said."""
    from gateway.console import print_letters
    from gateway.forward.dead_letters import DeadLetters

    found = [each for each in DeadLetters(data_dir) if sink in (None, each.sink) and category in (None, each.category)]
    print_letters(found, as_json)


@dead_letters.command("show")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@_places
@_json
def dead_letters_show(ids: tuple[str, ...], conf_dir: Path, data_dir: Path, as_json: bool) -> None:
    """The whole reply, and the points in line protocol (or as JSON)."""
    from gateway.console import print_letter
    from gateway.forward.dead_letters import DeadLetters

    for letter in DeadLetters(data_dir).find(ids):
        print_letter(letter, as_json)


@dead_letters.command("retry")
@_ids
@_all
@_places
@_json
@click.option("--timeout", "timeout_s", type=float, default=60.0, show_default=True, help="Seconds at most, for all.")
def dead_letters_retry(
    ids: tuple[str, ...], take_all: bool, conf_dir: Path, data_dir: Path, as_json: bool, timeout_s: float
) -> None:
    """Send them again, under the same ids. What is taken is deleted here. Exit code 1: something was not taken."""
    from gateway.client import retry_letters
    from gateway.console import print_outcomes

    _must_choose(ids, take_all)
    outcomes = retry_letters(data_dir, conf_dir, None if take_all else ids, timeout_s)
    sys.exit(0 if print_outcomes(outcomes, as_json) else 1)


@dead_letters.command("drop")
@_ids
@_all
@_places
@click.option("--yes", is_flag=True, help="Do not ask.")
def dead_letters_drop(ids: tuple[str, ...], take_all: bool, conf_dir: Path, data_dir: Path, yes: bool) -> None:
    """Delete them for good."""
    from gateway.forward.dead_letters import DeadLetters

    _must_choose(ids, take_all)
    letters = DeadLetters(data_dir)
    chosen = list(letters) if take_all else letters.find(ids)
    points = sum(letter.points for letter in chosen)
    if chosen and not yes:
        click.confirm(f"Delete {len(chosen)} dead letters with {points} points for good?", abort=True)
    for letter in chosen:
        letters.drop(letter)
    click.echo(f"{len(chosen)} dead letters with {points} points deleted")


def _must_choose(ids: tuple[str, ...], take_all: bool) -> None:
    if bool(ids) == take_all:
        raise click.UsageError("name dead letters by their ids (locum dead-letters list), or take --all")


@main.command()
@click.option("--listen", default="127.0.0.1:9528", show_default=True, metavar="HOST:PORT")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="KIND:SHARE",
    help="Go wrong for this share of the requests; may be repeated. See docs/dataway.md for the kinds.",
)
@click.option("--token", help="Refuse requests whose token is another.")
@click.option("--swallow", is_flag=True, help="Only count; for load tests.")
@click.option(
    "--record", type=click.Path(path_type=Path), help="Write every request to this file, a JSON object a line."
)
@click.option("--quiet", is_flag=True, help="Do not print the points.")
@_json
def dataway(
    listen: str,
    faults: tuple[str, ...],
    token: str | None,
    swallow: bool,
    record: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """A fake Guance: takes what a gateway sends, prints it, and goes wrong when asked to."""
    from gateway.forward import stand_in

    host, _, port = listen.rpartition(":")
    stand_in.serve(
        host.strip("[]"),
        int(port),
        faults=faults,
        token=token,
        swallow=swallow,
        record=record,
        quiet=quiet,
        as_json=as_json,
    )


if __name__ == "__main__":
    run_main()
