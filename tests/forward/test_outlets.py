"""Both ways out pass the suite that every way out has to pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import DatawaySettings, FileSettings
from gateway.forward import dataway as dataway_module
from gateway.forward.dataway import Dataway
from gateway.forward.file import LineFile
from gateway.forward.sink import Outlet
from gateway.forward.stand_in import StandIn
from gateway.model import Category
from tests.forward.suite import Outlets, Way


class DatawayWay(Way):
    def __init__(self, data_dir: Path, guance: StandIn, **settings: object) -> None:
        super().__init__(data_dir)
        self.guance = guance
        self.settings = DatawaySettings(url=guance.url, **settings)  # type: ignore[arg-type]

    def outlet(self) -> Outlet:
        return Dataway("way", Category.TRACING, self.settings, self.letters, self.meters, "1.2.3", "gw")

    def arrived(self) -> list[str]:
        return [str(event.fields["message"]) for event in self.guance.points("tracing")]

    def break_down(self) -> None:
        self.guance.faults["503"] = 1.0

    def recover(self) -> None:
        self.guance.heal()


class LineWay(DatawayWay):
    def arrived(self) -> list[str]:
        seen: set[str] = set()
        lines: list[str] = []
        for request in self.guance.requests:
            if request.taken and request.package_id not in seen:
                seen.add(request.package_id)
                lines += request.body.decode().splitlines()
        return messages(lines)


class FileWay(Way):
    def outlet(self) -> Outlet:
        settings = FileSettings(self.data_dir / "out")
        return LineFile("way", Category.TRACING, settings, self.letters, self.meters)

    @property
    def file(self) -> Path:
        return self.data_dir / "out" / "tracing.line"

    def arrived(self) -> list[str]:
        return messages(self.file.read_text().splitlines())

    def break_down(self) -> None:
        """A file is where the directory should be."""
        (self.data_dir / "out").write_text("in the way")

    def recover(self) -> None:
        os.unlink(self.data_dir / "out")


def messages(lines: list[str]) -> list[str]:
    return [line.partition('message="')[2].partition('"')[0] for line in lines]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataway_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(dataway_module, "MAX_DELAY_S", 0.02)


class TestDataway(Outlets):
    @pytest.fixture
    def way(self, tmp_path: Path) -> Iterator[Way]:
        with StandIn() as guance:
            yield DatawayWay(tmp_path, guance)

    def note_of_the_first_window(self, way: Way) -> dict[str, object]:
        return {}


class TestDatawayOfLines(TestDataway):
    @pytest.fixture
    def way(self, tmp_path: Path) -> Iterator[Way]:
        with StandIn() as guance:
            yield LineWay(tmp_path, guance, encoding="line_protocol", gzip=False)


class TestLineFile(Outlets):
    @pytest.fixture
    def way(self, tmp_path: Path) -> Way:
        return FileWay(tmp_path)

    def note_of_the_first_window(self, way: Way) -> dict[str, object]:
        return {"size": 0}
