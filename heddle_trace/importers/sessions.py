"""Sessions that a log interleaves, grouped in memory that does not grow with the log."""

import sqlite3
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec

from heddle_trace.importers.notes import Notes
from heddle_trace.importers.protocol import ParsedRecord
from heddle_trace.schema import TrajectoryRecord

T = TypeVar("T", bound=Any)

_BATCH = 1_000
_CACHE_KIB = 16 * 1024


class Sessions(Generic[T]):
    """Parts of sessions, returned session by session, each in its original order.

    A context manager. The parts are in a temporary SQLite database: in memory while it is small,
    then in a file that SQLite removes.
    """

    def __init__(self, part: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(part)
        self._encode = msgspec.msgpack.Encoder().encode
        self._pending: list[tuple[str, bytes]] = []

    def __enter__(self) -> "Sessions[T]":
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=OFF")
        self._db.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        self._db.execute("PRAGMA temp_store=FILE")
        self._db.execute("CREATE TABLE parts (session TEXT, part BLOB)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._db.close()

    def add(self, session: str, part: T) -> None:
        self._pending.append((session, self._encode(part)))
        if len(self._pending) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO parts VALUES (?, ?)", self._pending)
        self._db.execute("COMMIT")
        self._pending.clear()

    def __iter__(self) -> Iterator[tuple[str, list[T]]]:
        """Sessions in the order of their first parts."""
        self._flush()
        rows = self._db.execute(
            "SELECT session, part FROM (SELECT rowid AS at, session, part, "
            "min(rowid) OVER (PARTITION BY session) AS first FROM parts) ORDER BY first, at"
        )
        for session, group in groupby(rows, key=itemgetter(0)):
            yield session, [self._decoder.decode(part) for _, part in group]

    def records(
        self, notes: Notes, make: Callable[[str, list[T]], TrajectoryRecord | None]
    ) -> Iterator[ParsedRecord]:
        """The record that `make` makes of each session, if it makes one."""
        for session, parts in self:
            where: str = parts[0].where
            with notes.guard(where):
                record = make(session, parts)
                if record is not None:
                    yield ParsedRecord(where, record)
