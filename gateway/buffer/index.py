"""The index of a segment: a DuckDB file, for questions about what is not sealed yet.

It is made from the journal, behind it, in bulk, and thrown away when the segment is sealed or the gateway starts:
nothing is in it that is not in the journal, and nobody but questions reads it. ``offset`` and ``batch`` say how much of
the journal it holds.

Measured (DuckDB 1.5, one thread): a small insert costs 3 ms however few its rows; 131,072 rows cost 0.2 us each.
"""

from __future__ import annotations

import duckdb
import pyarrow as pa

from gateway.buffer.journal import FILE_HEADER, Entry
from gateway.buffer.numbering import Numbering
from gateway.buffer.segment import Segment
from gateway.buffer.sql import SCHEMA, quoted
from gateway.buffer.tables import Gathering, distributions_table, events_table, numbers_table, series_table


class Index:
    """Attached to ``connection``, of which it owns the use until ``detach``; one thread at a time."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, segment: Segment) -> None:
        self.segment = segment
        self.offset = FILE_HEADER.size
        self.batch = 0
        self.rows = 0
        self._pending_end = self._loading_end = self.offset
        self._pending_batch = self._loading_batch = 0
        self._loading: dict[str, pa.Table] = {}
        self._connection = connection
        self._gathering = Gathering(Numbering())
        discard(segment)
        connection.execute(f"ATTACH {quoted(str(segment.index))} AS {self.name}")
        connection.execute(f"USE {self.name}")
        connection.execute(SCHEMA)
        connection.execute("USE memory")

    @property
    def name(self) -> str:
        """What its tables are reached by in SQL: ``s7.numbers``."""
        return f"s{self.segment.number}"

    @property
    def pending(self) -> int:
        """Rows that are gathered and not yet loaded; at least 1 when there is anything."""
        return max(self._gathering.rows, int(self._pending_batch != self.batch))

    def define(self, definitions: tuple[tuple[int, bytes], ...], seen_ns: int) -> None:
        """Take in definitions that came by another way than in a record."""
        self._gathering.define(definitions, seen_ns)

    def gather(self, entry: Entry) -> None:
        self._gathering.add(entry.record)
        self._pending_end = entry.end
        self._pending_batch = entry.record.batch

    def load(self) -> None:
        """Put what was gathered into the file, in one transaction. Raises ``duckdb.OutOfMemoryException``, and then may
        be called again; any other ``duckdb.Error`` means that the index is of no use any more."""
        if not self._loading:
            self._loading = self._tables()
            self._loading_end, self._loading_batch = self._pending_end, self._pending_batch
        connection = self._connection
        connection.execute("BEGIN")
        try:
            for name, table in self._loading.items():
                connection.register("loading", table)
                connection.execute(f"INSERT INTO {self.name}.{name} SELECT * FROM loading")
                connection.unregister("loading")
            connection.execute("COMMIT")
        except duckdb.OutOfMemoryException:
            connection.execute("ROLLBACK")
            raise
        self.rows += sum(table.num_rows for table in self._loading.values())
        self.offset, self.batch = self._loading_end, self._loading_batch
        self._loading = {}

    def _tables(self) -> dict[str, pa.Table]:
        gathering = self._gathering
        kinds = gathering.numbering.kinds
        tables = {"batches": gathering.take_batches(), "series": series_table(gathering.take_series())}
        numbers = gathering.take_numbers()
        if len(numbers):
            tables["numbers"] = numbers_table(numbers, kinds)
        distributions = gathering.take_distributions()
        if len(distributions.rows):
            tables["distributions"] = distributions_table(distributions, kinds)
        events = gathering.take_events()
        if events:
            tables["events"] = events_table(events)
        return {name: table for name, table in tables.items() if table.num_rows}

    def detach(self) -> None:
        """Leave the file. A question that is being answered keeps what it reads. Raises ``duckdb.Error``."""
        self._connection.execute(f"DETACH DATABASE IF EXISTS {self.name}")


def discard(segment: Segment) -> None:
    """Delete the files of an index. Raises ``OSError``."""
    for path in segment.path.glob(f"{segment.index.name}*"):
        path.unlink(missing_ok=True)
