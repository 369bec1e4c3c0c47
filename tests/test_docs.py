"""What the program has is in the documentation: figures, reasons, endpoints, commands, options, faults, tables.

(``tests/config/test_docs.py`` holds the settings to theirs.)
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from fastapi.routing import APIRoute

from gateway.buffer.tables import SCHEMAS
from gateway.cli import main
from gateway.forward.stand_in import FAULTS
from gateway.metrics import Meters
from gateway.model import REFUSALS, Reason
from gateway.receive.http import OTLP_PATHS
from gateway.web.api import api
from gateway.web.inspect import routes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_every_figure_is_in_operations_with_its_labels() -> None:
    text = page("operations.md")
    for metric in Meters().registry._collector_to_names:
        suffix = "_total" if metric._type == "counter" else ""  # type: ignore[attr-defined]
        name = f"{metric._name}{suffix}"  # type: ignore[attr-defined]
        labels = ", ".join(metric._labelnames)  # type: ignore[attr-defined]
        assert f"| `{name}` | {labels}{' ' if labels else ''}|" in text, f"{name} ({labels}) is not in operations.md"


def test_no_figure_is_in_the_documentation_that_does_not_exist() -> None:
    known = {name for names in Meters().registry._collector_to_names.values() for name in names}
    for file in PAGES:
        for name in re.findall(r"`(locum_[a-z_]+)", file.read_text()):
            assert name in known, f"{file.name} names {name}"


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained(reason: Reason) -> None:
    rows = [line for line in page("points.md").splitlines() if line.startswith("|") and f"`{reason}`" in line]
    assert rows, f"{reason} is not in points.md"


@pytest.mark.parametrize(("reason", "rule"), REFUSALS.items())
def test_every_refusal_is_explained_with_its_status(reason: Reason, rule: object) -> None:
    (row,) = [line for line in page("points.md").splitlines() if line.startswith(f"| `{reason}` |")]
    assert str(REFUSALS[reason].http) in row


def test_every_endpoint_is_in_operations() -> None:
    class Service:
        version = hostname = ""
        meters = Meters()

    app = api(Service(), None, routes(Service()))  # type: ignore[arg-type]
    found = {route.path for route in _routes(app.routes)}
    assert {"/v1/ping", "/metrics", "/v1/locum/query"} <= found
    for path in found | OTLP_PATHS.keys():
        assert f"{path}`" in page("operations.md"), f"{path} is not in operations.md"


def _routes(some: list[object]) -> Iterator[APIRoute]:
    """The routes, those of included routers, too (newer versions of the framework keep them nested)."""
    for route in some:
        if isinstance(route, APIRoute):
            yield route
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from _routes(inner.routes)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_in_dataway(fault: str) -> None:
    assert re.search(rf"^\|.*`{fault}`.*\|.*\|.*\|$", page("dataway.md"), re.MULTILINE)


@pytest.mark.parametrize("table", [*SCHEMAS, "samples"])
def test_every_table_is_in_buffer_with_its_columns(table: str) -> None:
    (row,) = [line for line in page("buffer.md").splitlines() if line.startswith(f"| `{table}` |")]
    for column in SCHEMAS[table].names if table != "samples" else ("value", "int_value", "uint_value", "field", "tags"):
        assert re.search(rf"\b{column}\b", row), f"{table}.{column} is not in buffer.md"


def _shell_lines() -> Iterator[tuple[str, str]]:
    """Every line of every shell block, with the page that it is on."""
    for file in PAGES:
        for block in re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE):
            yield from ((file.name, line) for line in block.splitlines() if re.search(r"\blocum [a-z]", line))


def test_every_command_in_the_documentation_exists() -> None:
    seen = set()
    for name, line in _shell_lines():
        found = re.search(r"(?:^|[ /$])locum ((?!ready)[a-z].*)", line)
        if not found:
            continue
        words = shlex.split(found[1], comments=True)
        command: click.Command = main
        while isinstance(command, click.Group) and words:
            next_command = command.commands.get(words.pop(0))
            assert next_command is not None, f"{name}: {line}"
            command = next_command
        options = {option for parameter in command.params for option in parameter.opts}
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= options, f"{name}: {line}"
        seen.add(command.name)
    assert seen >= {"check", "dataway", "query", "status", "tap"}


def test_every_target_of_make_in_the_documentation_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for file in PAGES:
        for target in re.findall(r"(?:^|`|' )make ([a-z]+)", file.read_text(), re.MULTILINE):
            assert target in targets, f"{file.name}: make {target}"


def test_every_link_leads_somewhere() -> None:
    for file in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", file.read_text()):
            place, anchor = file.parent / target[0] if target[0] else file, target[1].lstrip("#")
            if target[0].endswith("performance.md") and not place.exists():
                continue  # written with the measurements
            assert place.exists(), f"{file.name}: {target[0]}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", place.read_text(), re.MULTILINE)
                assert anchor in [_anchor(heading) for heading in headings], f"{file.name}: #{anchor}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_two_readmes_have_the_same_parts_commands_and_links() -> None:
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    for pattern in (r"^(#+) ", r"^(```)", r"\]\((docs/[^)]*)\)", r"^((?:\.venv|make|curl|ENV)\S*)"):
        assert re.findall(pattern, english, re.MULTILINE) == re.findall(pattern, chinese, re.MULTILINE), pattern
