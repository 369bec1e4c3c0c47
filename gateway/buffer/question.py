"""Questions in SQL over the whole buffer: sealed segments and the open one.

A question can only read: one statement that is a SELECT (or a form of it), in a transaction that cannot write, in a
DuckDB that reaches no file outside the segments and whose settings are locked (``sql.connect``). It is bounded in rows,
time and memory.
"""

from __future__ import annotations

import base64
import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from gateway.buffer import segment, sql
from gateway.buffer.catalog import Catalog, Snapshot
from gateway.buffer.journal import Entry, scan
from gateway.buffer.segment import Manifest, Segment, State
from gateway.buffer.tables import SCHEMAS
from gateway.config import BufferSettings
from gateway.metrics import Meters
from gateway.model import CATEGORY_OF, LocumError, StorageError, utc

MAX_SQL_CHARS = 1_000_000
_ATTEMPTS = 3
_EXPLAIN = re.compile(r"\s*EXPLAIN\s+(ANALYZE\s+)?(\([^()]*\)\s*)?", re.IGNORECASE)


class QuestionError(LocumError):
    """Who asked can act: the question is not understood, not allowed, or asks for too much."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``table`` has at most as many rows as were allowed; ``truncated``: there were more."""

    table: pa.Table
    truncated: bool

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def rows(self) -> list[tuple[Any, ...]]:
        """Rows of Python values. Times are text (``2025-10-09 08:53:20.123456789``)."""
        if not self.table.num_columns:
            return []
        return list(zip(*(_values(column) for column in self.table.columns), strict=True))

    def as_json(self) -> dict[str, Any]:
        """``columns``, ``rows`` and ``truncated``, of what JSON can say; bytes are base64."""
        rows = [[_json_value(value) for value in row] for row in self.rows()]
        return {"columns": self.columns, "rows": rows, "truncated": self.truncated}


@dataclass(frozen=True, slots=True)
class BufferStatus:
    """The buffer on disk, for ``locum buffer status``. ``points``: data points, spans and records by category."""

    data_dir: str
    segments: dict[str, int]
    batches: int
    points: dict[str, int]
    first_batch: int
    last_batch: int
    oldest_received: str
    newest_received: str
    sealed_bytes: int
    open_bytes: int
    quarantine_files: int
    quarantine_bytes: int


def ask(
    catalog: Catalog,
    statement: str,
    parameters: Sequence[object] = (),
    *,
    limit: int = 10_000,
    timeout_s: float = 60.0,
    catch_up: Callable[[float], bool] = lambda timeout_s: True,
) -> Answer:
    """Answer a question about everything that was accepted before it. ``catch_up(timeout_s)`` waits for the index.

    Raises ``QuestionError`` when the statement is not one that reads, is wrong, takes longer than ``timeout_s``, or
    needs more memory than questions may have.
    """
    deadline = time.monotonic() + timeout_s
    if not catch_up(timeout_s):
        raise QuestionError(f"the index has not caught up within {timeout_s:g} s; ask again, or allow more time")
    for attempt in range(_ATTEMPTS):
        try:
            return _answer(catalog.snapshot(), statement, parameters, limit, deadline, timeout_s)
        except (duckdb.IOException, duckdb.CatalogException, duckdb.BinderException) as error:
            # A segment may have been sealed or deleted meanwhile: look again at what there is.
            if attempt + 1 == _ATTEMPTS or time.monotonic() > deadline:
                raise QuestionError(_sentence(error)) from None
    raise AssertionError("unreachable")


def ask_files(
    data_dir: Path,
    statement: str,
    parameters: Sequence[object] = (),
    *,
    limit: int = 10_000,
    timeout_s: float = 60.0,
    settings: BufferSettings | None = None,
) -> Answer:
    """As ``ask``, of a data directory on which no gateway runs; what a crash has left open is sealed first. Raises
    ``StorageError`` when another process holds it."""
    with segment.lock(data_dir):
        catalog = Catalog(data_dir, settings or BufferSettings(), Meters())
        try:
            catalog.seal_all(catalog.recover().closed)
            return ask(catalog, statement, parameters, limit=limit, timeout_s=timeout_s)
        finally:
            catalog.close()


def seal_files(data_dir: Path, settings: BufferSettings | None = None) -> None:
    """Seal what a gateway that runs no more has left open. Raises ``StorageError`` when another process holds it."""
    with segment.lock(data_dir):
        catalog = Catalog(data_dir, settings or BufferSettings(), Meters())
        try:
            catalog.seal_all(catalog.recover().closed)
        finally:
            catalog.close()


def status(data_dir: Path) -> BufferStatus:
    """What lies in the data directory; it is not locked and may change meanwhile."""
    counts = {state.value: 0 for state in (State.OPEN, State.SEALED)}
    contents: list[_Contents] = []
    sealed_bytes = open_bytes = 0
    for found in segment.segments(data_dir):
        if found.state is State.DELETED:
            continue
        counts[found.state.value] += 1
        size = segment.directory_bytes(found.path)
        if found.state is State.OPEN:
            open_bytes += size
        else:
            sealed_bytes += size
        with contextlib.suppress(StorageError, OSError):
            contents.append(_journalled(found.journal) if found.state is State.OPEN else _sealed(found.path))
    contents = [each for each in contents if each.batches]
    kept = [path for path in _files(data_dir / "quarantine") if path.suffix != ".json"]
    return BufferStatus(
        data_dir=str(data_dir),
        segments=counts,
        batches=sum(each.batches for each in contents),
        points=dict(sum((each.points for each in contents), Counter())),
        first_batch=min((each.first_batch for each in contents), default=0),
        last_batch=max((each.last_batch for each in contents), default=0),
        oldest_received=_time(min((each.first_received_ns for each in contents), default=0)),
        newest_received=_time(max((each.last_received_ns for each in contents), default=0)),
        sealed_bytes=sealed_bytes,
        open_bytes=open_bytes,
        quarantine_files=len(kept),
        quarantine_bytes=sum(path.stat().st_size for path in kept),
    )


@dataclass(frozen=True, slots=True)
class _Contents:
    """What is in one segment."""

    batches: int
    points: Counter[str]
    first_batch: int
    last_batch: int
    first_received_ns: int
    last_received_ns: int


def _sealed(path: Path) -> _Contents:
    told = Manifest.read(path)
    return _Contents(
        sum(told.batches.values()), Counter(told.points), told.first_batch, told.last_batch,
        told.first_received_ns, told.last_received_ns,
    )  # fmt: skip


def _journalled(journal: Path) -> _Contents:
    batches: list[int] = []
    received_ns: list[int] = []
    points: Counter[str] = Counter()
    for entry in scan(journal):
        if isinstance(entry, Entry):
            batches.append(entry.record.batch)
            received_ns.append(entry.record.received_ns)
            points[CATEGORY_OF[entry.record.signal].path] += entry.record.points
    return _Contents(
        len(batches), points, min(batches, default=0), max(batches, default=0),
        min(received_ns, default=0), max(received_ns, default=0),
    )  # fmt: skip


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()] if directory.is_dir() else []


def _time(at_ns: int) -> str:
    return utc(at_ns) if at_ns else ""


def _check(cursor: duckdb.DuckDBPyConnection, statement: str) -> None:
    """Raise ``QuestionError`` unless ``statement`` is one statement that reads."""
    if len(statement) > MAX_SQL_CHARS:
        raise QuestionError(f"a question of {len(statement)} characters; {MAX_SQL_CHARS} are allowed")
    found = cursor.extract_statements(statement)
    if len(found) == 1 and found[0].type == duckdb.StatementType.EXPLAIN:
        explain = _EXPLAIN.match(statement)
        found = cursor.extract_statements(statement[explain.end() :]) if explain else []
    if len(found) != 1:
        raise QuestionError("one statement at a time, please: SELECT, WITH, FROM, DESCRIBE, SHOW, SUMMARIZE or EXPLAIN")
    if found[0].type != duckdb.StatementType.SELECT:
        raise QuestionError(
            f"the buffer can only be read, and this is {found[0].type.name}; "
            "ask with SELECT, WITH, FROM, DESCRIBE, SHOW, SUMMARIZE or EXPLAIN"
        )


def _answer(
    snapshot: Snapshot,
    statement: str,
    parameters: Sequence[object],
    limit: int,
    deadline: float,
    timeout_s: float,
) -> Answer:
    cursor = snapshot.cursor
    try:
        _check(cursor, statement)
        cursor.execute(_views(snapshot))
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        with _time_limit(cursor, deadline):
            reader = cursor.execute(statement, list(parameters)).to_arrow_reader(min(limit + 1, 65_536))
            return _take(reader, limit)
    except duckdb.InterruptException:
        raise QuestionError(f"no answer within {timeout_s:g} s; ask for less, or allow more time") from None
    except duckdb.OutOfMemoryException as error:
        raise QuestionError(
            f"the answer needs more memory than buffer.memory_limit_bytes allows: {_sentence(error)}"
        ) from None
    except (duckdb.IOException, duckdb.CatalogException, duckdb.BinderException):
        raise
    except duckdb.Error as error:
        raise QuestionError(_sentence(error)) from None
    finally:
        cursor.close()


def _take(reader: pa.RecordBatchReader, limit: int) -> Answer:
    batches, rows = [], 0
    for batch in reader:
        batches.append(batch)
        rows += batch.num_rows
        if rows > limit:
            break
    table = pa.Table.from_batches(batches, reader.schema)
    return Answer(table.slice(0, limit), table.num_rows > limit)


@contextlib.contextmanager
def _time_limit(cursor: duckdb.DuckDBPyConnection, deadline: float) -> Iterator[None]:
    timer = threading.Timer(max(deadline - time.monotonic(), 0.001), cursor.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


ANOTHER_GATEWAY = 10_000_000_000
"""Segment 3 of the second of the gateways whose segments were imported is 20000000003 in a question."""


def _views(snapshot: Snapshot) -> str:
    numbered: dict[int, list[tuple[Segment, Manifest]]] = {0: list(snapshot.sealed)}
    gateways = {manifest.gateway_id for _, manifest in snapshot.imported}
    added = {gateway: at * ANOTHER_GATEWAY for at, gateway in enumerate(sorted(gateways), 1)}
    for each, manifest in snapshot.imported:
        numbered.setdefault(added[manifest.gateway_id], []).append((each, manifest))
    sealed = {table: _paths(table, numbered) for table in sql.TABLES}
    return sql.views(sealed, snapshot.attached, {table: _empty(schema) for table, schema in SCHEMAS.items()})


def _paths(table: str, numbered: Mapping[int, Sequence[tuple[Segment, Manifest]]]) -> list[tuple[int, list[Path]]]:
    found = [
        (added, [each.table(table).resolve() for each, manifest in sealed if manifest.has(table)])
        for added, sealed in numbered.items()
    ]
    return [(added, paths) for added, paths in found if paths]


_SQL_TYPES = {
    "uint8": "UTINYINT",
    "uint32": "UINTEGER",
    "uint64": "UBIGINT",
    "int64": "BIGINT",
    "double": "DOUBLE",
    "bool": "BOOLEAN",
    "string": "VARCHAR",
    "binary": "BLOB",
    "timestamp[ns]": "TIMESTAMP_NS",
}


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        return f"MAP({_sql_type(kind.key_type)}, {_sql_type(kind.item_type)})"
    if pa.types.is_list(kind):
        return f"{_sql_type(kind.value_type)}[]"
    return _SQL_TYPES[str(kind)]


def _empty(schema: pa.Schema) -> str:
    columns = ", ".join(f"NULL::{_sql_type(column.type)} AS {column.name}" for column in schema)
    return f"SELECT NULL::UINTEGER AS segment, {columns} LIMIT 0"


def _sentence(error: Exception) -> str:
    """DuckDB's message without its hints at configuration."""
    return str(error).split("\n\nPossible solutions")[0].strip()


def _values(column: pa.ChunkedArray) -> list[Any]:
    kind = _with_texts(column.type)
    if kind != column.type:
        column = column.cast(kind)
    values: list[Any] = column.to_pylist(maps_as_pydicts="lossy")
    return values


def _with_texts(kind: pa.DataType) -> pa.DataType:
    """The type with texts in place of times: Python's own times end at microseconds."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_map(kind):
        return pa.map_(_with_texts(kind.key_type), _with_texts(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(_with_texts(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_texts(field.type)) for field in kind])
    return kind


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {str(key): _json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    return str(value)
