"""What a configuration of a test says: its settings, its errors, its notes."""

from __future__ import annotations

from pathlib import Path

from gateway.config import Settings
from gateway.config_draft import Finding
from gateway.config_files import check, load

TOKEN = "tkn_0123456789abcdef0123456789abcdef"
URL = f"https://openway.guance.com?token={TOKEN}"


def put(conf: Path, name: str, text: str) -> None:
    path = conf / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def loaded(conf: Path, **environ: str) -> Settings:
    return load(conf, conf.parent / "var", environ)


def findings(conf: Path, **environ: str) -> list[Finding]:
    return check(conf, conf.parent / "var", environ)


def errors(conf: Path, **environ: str) -> list[str]:
    """What is wrong, with the directory's name left out."""
    found = findings(conf, **environ)
    return [str(finding).removeprefix(f"{conf}/") for finding in found if finding.level == "error"]


def notes(conf: Path, **environ: str) -> list[str]:
    found = findings(conf, **environ)
    return [str(finding).removeprefix(f"{conf}/") for finding in found if finding.level == "note"]
