"""Bundles: out of one data directory, into another, and on to Guance: every point, byte for byte, once. And what a
bundle must not be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gateway import bundles, client
from gateway.buffer import bundle, imports
from gateway.buffer.bundle import BundleError, Written
from gateway.buffer.bundle_keys import KeyRefused, make_age_keys, make_signing_keys
from gateway.buffer.imported import imported_segments
from gateway.buffer.imports import Outcome
from gateway.model import StorageError
from tests.running import Running, running
from tests.test_replays import ROOT, bytes_of, fill, replayed


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Running]:
    """The machine behind the air gap."""
    with running(tmp_path / "here") as found:
        yield found


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Running]:
    """The machine that reaches Guance."""
    with running(tmp_path / "there") as found:
        yield found


def export(gateway: Running, out: Path, **options: object) -> list[Written]:
    given = {"since": None, "until": None, "split_bytes": 0, "sign_with": None, "recipients": ()} | options
    prepared = bundles.prepare_export(gateway.settings.data_dir, gateway.conf_dir, out, now_ns=time.time_ns(), **given)
    return list(prepared.run(lambda size: None))


def take(
    gateway: Running, *paths: Path, trusted: tuple[Path, ...] = (), identities: tuple[Path, ...] = ()
) -> list[Outcome]:
    prepared = bundles.prepare_import(gateway.settings.data_dir, gateway.conf_dir, paths, trusted, identities)
    return list(prepared.run(lambda size: None))


def locum(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def tree(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its content and when it was changed."""
    found = [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def imported(gateway: Running) -> dict[str, tuple[int, bytes]]:
    data_dir = gateway.settings.data_dir
    return {f"{name}/{at}": it for name in ("imported", "receipts") for at, it in tree(data_dir / name).items()}


def test_what_was_carried_here_and_replayed_is_what_would_have_been_sent_directly(
    here: Running, there: Running, tmp_path: Path
) -> None:
    fill(here)
    client.seal(here.settings.data_dir)
    fill(here, first=6)
    direct = bytes_of(here.guance.requests)
    (written,) = export(here, tmp_path / "out")
    assert len(written.contents.segments) == 2
    assert sum(written.contents.metrics.values()) == written.contents.points["metric"] == 12 * 70
    (outcome,) = take(there, tmp_path / "out")
    assert (outcome.new, outcome.known) == (2, 0)
    prepared, taken = replayed(there)
    assert bytes_of(taken) == direct
    assert prepared.finished
    on_the_spot = {each.package_id for each in replayed(here)[1]}
    assert {each.package_id for each in taken} == on_the_spot, "the same data has the same ids on both machines"


def test_the_same_bundle_twice_changes_nothing_and_says_so(here: Running, there: Running, tmp_path: Path) -> None:
    fill(here)
    export(here, tmp_path / "out")
    take(there, tmp_path / "out")
    before = imported(there)
    assert len([name for name in before if name.startswith("receipts/")]) == 1
    (again,) = take(there, tmp_path / "out")
    assert (again.new, again.known) == (0, 1)
    assert imported(there) == before
    command = [
        sys.executable,
        "-m",
        "gateway.cli",
        "bundle",
        "import",
        str(tmp_path / "out"),
        "--conf",
        str(there.conf_dir),
    ]
    done = subprocess.run(
        [*command, "--data", str(there.settings.data_dir)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "here already; nothing was changed" in done.stdout


def test_a_bundle_that_comes_home_changes_nothing(here: Running, tmp_path: Path) -> None:
    fill(here)
    export(here, tmp_path / "out")
    (outcome,) = take(here, tmp_path / "out")
    assert (outcome.new, outcome.known) == (0, 1)
    assert imported_segments(here.settings.data_dir) == []


def test_questions_see_what_was_imported_beside_ones_own(here: Running, there: Running, tmp_path: Path) -> None:
    fill(here)
    fill(there, requests=2)
    export(here, tmp_path / "out")
    take(there, tmp_path / "out")

    def ask(sql: str) -> list[list[object]]:
        return list(client.query(there.settings.data_dir, there.conf_dir, sql, 100, 30)["rows"])

    assert ask("SELECT count(*) FROM events") == [[8 * 140]]
    assert ask("SELECT count(*), count(DISTINCT segment) FROM samples") == [[8 * 112, 2]]
    assert ask("SELECT max(segment) FROM series") == [[10_000_000_001]]


def test_parts_are_no_larger_than_asked_and_each_stands_alone(here: Running, there: Running, tmp_path: Path) -> None:
    for at in range(3):
        fill(here, first=6 * at)
        client.seal(here.settings.data_dir)
    direct = bytes_of(here.guance.requests)
    largest = max(path.stat().st_size for path in (here.settings.data_dir / "segments").glob("*/*.parquet"))
    with pytest.raises(BundleError, match="--split"):
        export(here, tmp_path / "out", split_bytes=largest)
    one = sum(path.stat().st_size for path in (here.settings.data_dir / "segments" / "00000001").iterdir())
    written = export(here, tmp_path / "out", split_bytes=one + 8192)
    assert [each.path.name for each in written] == ["out-1", "out-2", "out-3"]
    assert [(each.contents.part, each.contents.parts) for each in written] == [(1, 3), (2, 3), (3, 3)]
    for each in written:
        assert sum(path.stat().st_size for path in each.path.rglob("*") if path.is_file()) <= one + 8192
    for name in ("out-3", "out-1", "out-2"):
        take(there, tmp_path / name)
    assert bytes_of(replayed(there)[1]) == direct


def test_only_segments_of_the_time_are_taken(here: Running, tmp_path: Path) -> None:
    fill(here)
    client.seal(here.settings.data_dir)
    between = str(time.time_ns())
    fill(here, first=6)
    assert list(export(here, tmp_path / "late", since=between)[0].contents.segments) == [2]
    assert list(export(here, tmp_path / "early", until=between)[0].contents.segments) == [1]
    with pytest.raises(BundleError, match="nothing to export"):
        export(here, tmp_path / "none", until="2020-01-01")
    with pytest.raises(BundleError, match="is there already"):
        export(here, tmp_path / "late")


def test_an_encrypted_bundle_can_be_read_with_its_key_only(here: Running, there: Running, tmp_path: Path) -> None:
    fill(here)
    direct = bytes_of(here.guance.requests)
    ours, theirs = make_age_keys(tmp_path / "ours"), make_age_keys(tmp_path / "theirs")
    assert ours.secret.stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyRefused, match="is there already"):
        make_age_keys(tmp_path / "ours")
    export(here, tmp_path / "out", recipients=(str(ours.public),))
    raw = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*.age"))
    assert b"promise" not in raw
    assert b"PAR1" not in raw
    bundle.verify(tmp_path / "out")
    with pytest.raises(BundleError, match="--identity"):
        take(there, tmp_path / "out")
    with pytest.raises(KeyRefused, match="cannot be decrypted"):
        take(there, tmp_path / "out", identities=(theirs.secret,))
    assert imported_segments(there.settings.data_dir) == []
    for wanted in (1, 0):
        (outcome,) = take(there, tmp_path / "out", identities=(ours.secret,))
        assert outcome.new == wanted
    assert bytes_of(replayed(there)[1]) == direct


def test_a_key_that_a_bundle_does_not_need_does_no_harm(here: Running, there: Running, tmp_path: Path) -> None:
    fill(here, requests=1)
    export(here, tmp_path / "out")
    (outcome,) = take(there, tmp_path / "out", identities=(make_age_keys(tmp_path / "ours").secret,))
    assert outcome.new == 1


def test_an_encrypted_segment_without_its_manifest_is_refused(here: Running, there: Running, tmp_path: Path) -> None:
    fill(here, requests=1)
    keys = make_age_keys(tmp_path / "ours")
    export(here, tmp_path / "out", recipients=(str(keys.public),))
    path = tmp_path / "out" / "bundle.json"
    told = json.loads(path.read_bytes())
    told["files"] = [file for file in told["files"] if "manifest" not in file["name"]]
    path.write_text(json.dumps(told))
    (tmp_path / "out" / "00000001" / "manifest.json.age").unlink()
    with pytest.raises(BundleError, match=r"segment 1 has no manifest\.json"):
        take(there, tmp_path / "out", identities=(keys.secret,))


def test_a_signature_is_demanded_once_a_key_is_given(here: Running, tmp_path: Path) -> None:
    fill(here, requests=1)
    ours, others = make_signing_keys(tmp_path / "ours"), make_signing_keys(tmp_path / "others")
    export(here, tmp_path / "signed", sign_with=ours.secret)
    export(here, tmp_path / "plain")
    assert bundle.verify(tmp_path / "signed", [others.public, ours.public]).signature.by == str(ours.public)
    assert bundle.verify(tmp_path / "signed").signature.state == "not checked"
    assert bundle.verify(tmp_path / "plain").signature.state == "none"
    with pytest.raises(BundleError, match=r"bundle\.sig: not by .*others"):
        bundle.verify(tmp_path / "signed", [others.public])
    with pytest.raises(BundleError, match=r"bundle\.sig: is missing"):
        bundle.verify(tmp_path / "plain", [ours.public])
    with pytest.raises(KeyRefused, match=r"ours\.pub"):
        export(here, tmp_path / "wrong", sign_with=ours.public)


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    told = json.loads(path.read_bytes())
    change(told)
    path.write_text(json.dumps(told))


def rename_first(out: Path, name: str) -> None:
    """Let ``bundle.json`` give its first file another name."""
    told = json.loads((out / "bundle.json").read_bytes())
    told["files"][0]["name"] = name
    (out / "bundle.json").write_text(json.dumps(told))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def link(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


TAMPERED: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda out: flip(out / "00000001" / "numbers.parquet"), "numbers.parquet"),
    "flipped manifest": (lambda out: flip(out / "00000001" / "manifest.json"), "manifest.json"),
    "cut": (lambda out: os.truncate(out / "00000001" / "events.parquet", 100), "events.parquet"),
    "missing": (lambda out: (out / "00000001" / "series.parquet").unlink(), "series.parquet"),
    "more": (lambda out: (out / "00000001" / "x.parquet").write_bytes(b"x"), "x.parquet: not named"),
    "more above": (lambda out: (out / "evil.sh").write_bytes(b"x"), "evil.sh: not named"),
    "empty directory": (lambda out: (out / "00000009").mkdir(), "00000009: not named"),
    "link": (lambda out: link(out / "00000001" / "events.parquet", Path("/etc/passwd")), "events.parquet: a link"),
    "linked contents": (lambda out: link(out / "bundle.json", Path("/etc/passwd")), "bundle.json"),
    "no contents": (lambda out: (out / "bundle.json").unlink(), "bundle.json: is missing"),
    "path": (lambda out: rename_first(out, "../x.parquet"), "'../x.parquet'"),
    "absolute": (lambda out: rename_first(out, "/etc/passwd"), "passwd"),
    "twice": (lambda out: rename_first(out, "00000001/manifest.json"), "'00000001/manifest.json'"),
    "long number": (lambda out: rename_first(out, "0000000001/batches.parquet"), "0000000001"),
    "gateway": (lambda out: edit(out / "bundle.json", lambda it: it.update(gateway_id="../../x")), "gateway_id"),
    "other gateway": (lambda out: edit(out / "bundle.json", lambda it: it.update(gateway_id="another")), "of gateway"),
    "counts": (lambda out: edit(out / "bundle.json", lambda it: it.update(points={"metric": "many"})), "points"),
    "later format": (lambda out: edit(out / "bundle.json", lambda it: it.update(format=99)), "later Locum"),
    "deep": (lambda out: (out / "bundle.json").write_text("[" * 100_000), "bundle.json"),
    "a list": (lambda out: (out / "bundle.json").write_text("[]"), "bundle.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_what_was_tampered_with_is_refused_by_name_and_nothing_comes_in(
    here: Running, there: Running, tmp_path: Path, name: str
) -> None:
    fill(here, requests=1)
    export(here, tmp_path / "good")
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    change, said = TAMPERED[name]
    change(tmp_path / "bad")
    with pytest.raises(BundleError) as refused:
        take(there, tmp_path / "good", tmp_path / "bad")
    assert said in str(refused.value)
    assert str(tmp_path / "bad") in str(refused.value)
    assert imported(there) == {}


def forge(out: Path, table: str, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change a table, and every hash and number that speaks of it: what only the form can tell."""
    path = out / "00000001" / f"{table}.parquet"
    changed = change(pq.read_table(path))
    pq.write_table(changed, path, row_group_size=1 << 21)
    size, digest = path.stat().st_size, bundle._hash(path)[1]

    def in_manifest(told: dict[str, list[dict[str, object]]]) -> None:
        for file in told["files"]:
            if file["name"] == path.name:
                file.update(bytes=size, sha256=digest)

    edit(path.with_name("manifest.json"), in_manifest)  # type: ignore[arg-type]

    def in_contents(told: dict[str, list[dict[str, object]]]) -> None:
        for file in told["files"]:
            size, digest = bundle._hash(out / str(file["name"]))
            file.update(bytes=size, sha256=digest)

    edit(out / "bundle.json", in_contents)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.drop_columns("point"), "other columns"),
        (lambda table: table.slice(1), "rows, the manifest says"),
        (lambda table: table.take(pa.array([0] * ((1 << 20) + 1))), "rows, the manifest says"),
    ],
)
def test_a_bundle_of_another_form_is_refused_though_its_hashes_are_right(
    here: Running, there: Running, tmp_path: Path, change: Callable[[pa.Table], pa.Table], said: str
) -> None:
    fill(here, requests=1)
    export(here, tmp_path / "out")
    forge(tmp_path / "out", "events", change)
    with pytest.raises(BundleError, match=said):
        take(there, tmp_path / "out")
    assert imported_segments(there.settings.data_dir) == []


def test_series_that_are_not_there_cost_their_rows_and_nothing_else(
    here: Running, there: Running, tmp_path: Path
) -> None:
    fill(here, requests=1)
    export(here, tmp_path / "out")
    at = pq.read_schema(tmp_path / "out" / "00000001" / "numbers.parquet").get_field_index("series")

    def shift(table: pa.Table) -> pa.Table:
        return table.set_column(at, table.schema.field(at), pa.array([4_000_000_000] * table.num_rows, pa.uint32()))

    forge(tmp_path / "out", "numbers", shift)
    take(there, tmp_path / "out")
    prepared, taken = replayed(there)
    assert prepared.report.damaged > 0
    assert {"tracing", "logging"} <= {each.category for each in taken}


def test_another_segment_of_the_same_name_is_refused(here: Running, there: Running, tmp_path: Path) -> None:
    fill(here)
    export(here, tmp_path / "out")
    take(there, tmp_path / "out")
    manifest = imported_segments(there.settings.data_dir)[0].path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    with pytest.raises(BundleError, match="other content"):
        take(there, tmp_path / "out")


def test_what_is_dropped_is_gone_and_can_come_again(here: Running, there: Running, tmp_path: Path) -> None:
    fill(here)
    export(here, tmp_path / "out")
    (outcome,) = take(there, tmp_path / "out")
    data_dir = there.settings.data_dir
    with pytest.raises(StorageError, match="nobody"):
        list(imports.drop(data_dir, ["nobody"]))
    assert [gone for _, gone in imports.drop(data_dir, [outcome.receipt.id])] == [1]
    assert imports.receipts(data_dir) == []
    assert replayed(there)[1] == []
    assert take(there, tmp_path / "out")[0].new == 1


def test_an_import_keeps_to_the_budget(here: Running, tmp_path: Path) -> None:
    fill(here)
    export(here, tmp_path / "out")
    with running(tmp_path / "small") as small:
        data = small.settings.data_dir
        settings = replace(small.settings.buffer, max_bytes=20_000)
        with pytest.raises(StorageError, match=r"buffer\.max_bytes"):
            imports.take(data, bundle.verify(tmp_path / "out"), "own", settings, None)
        settings = replace(small.settings.buffer, min_free_disk_bytes=1 << 60)
        with pytest.raises(StorageError, match=r"min_free_disk_bytes"):
            imports.take(data, bundle.verify(tmp_path / "out"), "own", settings, None)
        assert imported(small) == {}


def test_a_damaged_segment_is_left_out_of_an_export_and_named(here: Running, tmp_path: Path) -> None:
    fill(here)
    client.seal(here.settings.data_dir)
    fill(here, first=6)
    client.seal(here.settings.data_dir)
    flip(here.settings.data_dir / "segments" / "00000001" / "events.parquet")
    (written,) = export(here, tmp_path / "out")
    assert list(written.contents.segments) == [2]
    assert len(written.left_out) == 1
    assert "events.parquet" in written.left_out[0]
    bundle.verify(tmp_path / "out")


def test_the_commands_work_without_a_gateway(tmp_path: Path) -> None:
    with running(tmp_path / "here") as gateway:
        fill(gateway)
        direct = bytes_of(gateway.guance.requests).total()
    places = ["--conf", str(gateway.conf_dir), "--data", str(gateway.settings.data_dir)]
    other = ["--conf", str(gateway.conf_dir), "--data", str(tmp_path / "other")]
    out, key = str(tmp_path / "out"), str(tmp_path / "site")
    assert locum("bundle", "keygen", key).returncode == 0
    done = locum("bundle", "export", out, "--sign", f"{key}.key", *places)
    assert done.returncode == 0, done.stderr
    done = locum("bundle", "verify", out, "--key", f"{key}.pub")
    assert done.returncode == 0
    assert "signed by" in done.stdout
    done = locum("bundle", "import", out, "--json", *other)
    assert json.loads(done.stdout)["new"] == 1
    found = json.loads(locum("bundle", "list", "--json", *other).stdout)[0]
    assert found["here"] == 1
    done = locum("replay", "--from", "-1h", "--dry-run", "--json", *other)
    assert json.loads(done.stdout)["sent_points"] == direct, done.stderr
    flip(Path(out) / "00000001" / "numbers.parquet")
    done = locum("bundle", "verify", out)
    assert (done.returncode, "numbers.parquet" in done.stdout) == (1, True)
    assert locum("bundle", "import", out, *other).returncode == 2
    assert locum("bundle", "drop", found["id"], "--yes", *other).returncode == 0
