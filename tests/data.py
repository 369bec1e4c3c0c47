"""Where the test data lies: the copy in this folder, always; the project's shared one too, where it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared"


def golden(signal: str) -> list[dict[str, Any]]:
    """The cases of ``golden/datakit-<signal>.json`` (``signal``: metrics, traces or logs)."""
    return list(json.loads((_root("golden") / f"datakit-{signal}.json").read_text()))


def golden_cases(*prefixes: str) -> list[dict[str, Any]]:
    """The cases of ``golden/cases`` whose names begin with one of ``prefixes``, by name."""
    files = sorted((_root("golden") / "cases").glob("*.json"))
    return [json.loads(file.read_text()) for file in files if file.stem.startswith(prefixes)]


def case(name: str) -> Any:
    """One of ``cases``, by the beginning of its name (``"10-"``)."""
    (file,) = (_root("cases")).glob(f"{name}*.json")
    return json.loads(file.read_text())


def _root(folder: str) -> Path:
    shared = SHARED / folder
    return shared if shared.is_dir() else HERE / folder
