"""A directory of configuration of its own for each test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    folder = tmp_path / "conf"
    folder.mkdir()
    return folder
