"""The SQL of the buffer: tables of an open segment, and the views over all segments that questions see."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import duckdb

from gateway.config import BufferSettings

SCHEMA = (files("gateway.buffer") / "schema.sql").read_text()
_VIEWS = string.Template((files("gateway.buffer") / "views.sql").read_text())
TABLES = ("batches", "series", "numbers", "distributions", "events")


def quoted(text: str) -> str:
    """A string literal."""
    return "'" + text.replace("'", "''") + "'"


def connect(data_dir: Path, settings: BufferSettings) -> duckdb.DuckDBPyConnection:
    """DuckDB in memory, to which indexes are attached: bounded in memory, threads and disk, and shut off from
    every file outside ``data_dir/segments`` and ``data_dir/imported``. Raises ``duckdb.Error``, ``OSError``."""
    folder = data_dir.resolve()
    spill = folder / "tmp"
    spill.mkdir(parents=True, exist_ok=True)
    connection = duckdb.connect(
        ":memory:",
        config={
            "memory_limit": f"{settings.memory_limit_bytes}B",
            "threads": settings.threads,
            "temp_directory": str(spill),
            "max_temp_directory_size": f"{max(settings.memory_limit_bytes * 16, 1 << 30)}B",
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        },
    )
    allowed = ", ".join(quoted(f"{path}/") for path in (folder / "segments", folder / "imported", spill))
    connection.execute(f"SET allowed_directories = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def views(
    sealed: Mapping[str, Sequence[tuple[int, Sequence[Path]]]],
    attached: Sequence[tuple[int, str]],
    columns: Mapping[str, str],
) -> str:
    """Statements that make the views ``batches``, ``series``, ``numbers``, ``distributions``, ``events`` and
    ``samples``.

    ``sealed``: Parquet files by table, each gateway's with what is added to its segments' numbers (0 for one's own).
    ``attached``: number and name of each open segment's index. ``columns``: by table, what stands for the columns where
    there is neither (``... LIMIT 0``).
    """
    parts = {}
    for table in TABLES:
        sources = [f"SELECT {number}::UINTEGER AS segment, * FROM {name}.{table}" for number, name in attached]
        for added, paths in sealed.get(table, ()):
            listed = ", ".join(quoted(str(path)) for path in paths)
            wanted = f"* REPLACE (segment + {added}::UBIGINT AS segment)" if added else "*"
            sources.append(f"SELECT {wanted} FROM read_parquet([{listed}])")
        parts[table] = "\nUNION ALL ".join(sources) or columns[table]
    return _VIEWS.substitute(parts)
