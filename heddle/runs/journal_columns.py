"""The columns of a journal as numpy arrays, for each event and command class.

They come from a table that was read, or are the ones that its writer kept; both give the same.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from mmap import ACCESS_COPY, mmap
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from heddle.runs.files import RunError
from heddle.runs.journal_schema import OF_LOOPS, WORD, layouts, schema

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Bools: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


class Column:
    """Values that come in parts: floats, texts, or integers in the smallest type that holds them.

    A column may be large, so its memory is not of the heap: all of it is free once it is dropped.
    """

    def __init__(self) -> None:
        self._values: Any = np.zeros(0, np.int8)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, values: Any) -> None:
        """Append an array."""
        count = self._count + len(values)
        dtype = np.promote_types(self._values.dtype, _smallest(values))
        if dtype != self._values.dtype or count > len(self._values):
            larger = _pages(max(count, 2 * len(self._values)), dtype)
            larger[: self._count] = self.array()
            self._values = larger
        self._values[self._count : count] = values
        self._count = count

    def array(self) -> Any:
        """All values so far."""
        return self._values[: self._count]


_INTEGERS = ((np.int8, 1 << 7), (np.int16, 1 << 15), (np.int32, 1 << 31))


def _smallest(values: Any) -> Any:
    """Return the smallest type that holds these integers; of other values, their own."""
    if values.dtype.kind == "i" and len(values):
        least, most = int(values.min()), int(values.max())
        for dtype, limit in _INTEGERS:
            if -limit <= least and most < limit:
                return dtype
    return values.dtype


def _pages(count: int, dtype: Any) -> Any:
    """Return an array of zeros in memory pages of its own; of texts, in the heap."""
    if np.dtype(dtype).kind == "O" or not count:
        return np.zeros(count, dtype)
    pages = mmap(-1, count * np.dtype(dtype).itemsize, access=ACCESS_COPY)
    return np.frombuffer(pages, dtype)


Kept: TypeAlias = Mapping[str, Mapping[str, Column]]
"""Columns of classes."""


class Rows:
    """Rows of one class or of several, in the order of the journal."""

    def __init__(self, count: int, column: Callable[[str], Any]) -> None:
        self._count, self._column = count, column

    def __len__(self) -> int:
        return self._count

    def column(self, name: str) -> Any:
        """Codes of words, numbers, or texts of `payload`, as they are kept."""
        return self._column(name)

    @property
    def seq(self) -> Ints:
        """Row numbers in the journal, ascending."""
        return self.ints("seq")

    def floats(self, column: str) -> Floats:
        """Values of a number column; 0 where there is none."""
        return np.asarray(self.column(column), np.float64)

    def ints(self, column: str) -> Ints:
        """Values of an integer or bool column; 0 where there is none."""
        return np.asarray(self.column(column), np.int64)

    def codes(self, column: str) -> Ints:
        """Codes of a word column into `Journal.words`; -1 where there is none."""
        return np.asarray(self.column(column), np.int64)

    def payloads(self) -> list[Any]:
        """Nested fields."""
        return [json.loads(text or "{}") for text in self.column("payload")]

    def part(self, index: Ints) -> "Rows":
        """Rows at these places."""
        return Rows(len(index), lambda name: self.column(name)[index])

    def split(self, indexes: Sequence[Ints]) -> list["Rows"]:
        """Rows at each of these places; uses up what was kept by a writer."""
        return [self.part(index) for index in indexes]


class Journal:
    """A whole journal, or that of some of its trajectories.

    Codes of trajectories count from 0 in order of arrival.
    """

    def __init__(
        self,
        rows: int,
        trajectories: Sequence[str],
        classes: Mapping[str, Rows],
        words: Callable[[str], Sequence[str]],
    ) -> None:
        self.rows = rows
        """In the whole journal."""
        self.trajectories = trajectories
        self._classes, self._words = classes, words

    def of(self, *names: str) -> Rows:
        """Rows of these events or commands."""
        found = [rows for rows in (self._classes[name] for name in names) if len(rows)]
        if len(found) < 2:
            return found[0] if found else _NO_ROWS
        order = np.argsort(np.concatenate([rows.seq for rows in found]), kind="stable")

        def column(name: str) -> Any:
            return np.concatenate([rows.column(name) for rows in found])[order]

        return Rows(len(order), column)

    def words(self, column: str) -> Sequence[str]:
        """The words that codes of this column stand for."""
        return self.trajectories if column == "trajectory" else self._words(column)

    def blocks(self, dispatches: int) -> Iterator["Journal"]:
        """Cut by trajectory into journals of about so many dispatches each, which have no others.

        Uses up the rows with a trajectory if a writer kept them.
        """
        total = len(self.trajectories)
        if len(self.of("Dispatch")) <= dispatches:
            yield self
            return
        count = np.bincount(self.of("Dispatch").codes("trajectory"), minlength=total)
        block = np.cumsum(count) // dispatches
        block = np.cumsum(np.diff(block, prepend=block[:1]) > 0)
        firsts = np.searchsorted(block, np.arange(int(block[-1]) + 2)).tolist()
        blocks: list[dict[str, Rows]] = [dict(self._classes) for _ in firsts[1:]]
        for name, rows in self._classes.items():
            if len(rows) and "trajectory" in _columns_of(name):
                numbers = block[rows.codes("trajectory")].astype(np.int16)
                order = np.argsort(numbers, kind="stable")
                ends = np.cumsum(np.bincount(numbers, minlength=len(blocks)))[:-1]
                for classes, part in zip(blocks, rows.split(np.split(order, ends)), strict=True):
                    classes[name] = part
        blocks.reverse()
        for first, end in itertools.pairwise(firsts):
            classes = {name: _counted_from(first, rows) for name, rows in blocks.pop().items()}
            yield Journal(self.rows, self.trajectories[first:end], classes, self._words)


def _counted_from(first: int, rows: Rows) -> Rows:
    """Rows with the codes of their trajectories less `first`."""

    def column(name: str) -> Any:
        return rows.column(name) - first if name == "trajectory" else rows.column(name)

    return Rows(len(rows), column)


@cache
def _columns_of(name: str) -> frozenset[str]:
    return frozenset(field.column for field in layouts()[name].plain)


def of_table(table: pa.Table) -> Journal:
    """Return the columns of a journal that was read.

    Raises:
        RunError: it names an event that is unknown, or a trajectory that never arrived.
    """
    columns = _Table(table)
    names = columns.words("name")
    codes = columns.whole("name")
    classes: dict[str, Rows] = dict.fromkeys(layouts(), _NO_ROWS)
    for code in np.unique(codes).tolist():
        if names[code] not in classes:
            raise RunError(f"journal names {names[code]!r}, which this version does not know")
        classes[names[code]] = columns.rows(np.flatnonzero(codes == code))
    arrived = classes["TrajectoryArrived"].codes("trajectory")
    rank, trajectories = _arrival_order(arrived, columns.words("trajectory"))
    columns.rank_trajectories(rank)
    for name, rows in classes.items():
        if name in OF_LOOPS or not (len(rows) and "trajectory" in _columns_of(name)):
            continue  # the environment of a trajectory may fail before it arrives
        if rows.codes("trajectory").min() < 0:
            row = int(rows.seq[int(rows.codes("trajectory").argmin())])
            raise RunError(f"journal is damaged: row {row}: its trajectory never arrived")
    return Journal(table.num_rows, trajectories, classes, columns.words)


def of_kept(rows: int, kept: Kept, words: Mapping[str, Sequence[str]]) -> Journal:
    """Return the columns that the writer of a journal kept; `kept` is used up."""
    arrived: Ints = np.zeros(0, np.int64)
    if "TrajectoryArrived" in kept:
        arrived = kept["TrajectoryArrived"]["trajectory"].array()
    rank, trajectories = _arrival_order(arrived, words["trajectory"])
    classes: dict[str, Rows] = dict.fromkeys(layouts(), _NO_ROWS)
    for name, columns in kept.items():
        arrays = {column: values.array() for column, values in columns.items()}
        if any(map(len, arrays.values())):
            if "trajectory" in arrays:
                arrays["trajectory"] = rank[arrays["trajectory"]].astype(np.int32)
            classes[name] = _KeptRows(name, arrays)
    return Journal(rows, trajectories, classes, words.__getitem__)


class _KeptRows(Rows):
    """Rows of a class with the columns that a writer kept."""

    def __init__(self, name: str, columns: dict[str, Any]) -> None:
        super().__init__(len(next(iter(columns.values()))), columns.__getitem__)
        self._name, self._columns = name, columns

    def column(self, name: str) -> Any:
        """Values that were kept; 0 or code -1 in a column that the class has not."""
        if name in self._columns:
            return self._columns[name]
        assert name not in _columns_of(self._name), f"{name} of {self._name} was not kept"
        return np.full(len(self), -1 if schema().field(name).type == WORD else 0)

    def split(self, indexes: Sequence[Ints]) -> list[Rows]:
        """Rows at each of these places; this has no rows any more."""
        parts: list[dict[str, Any]] = [{} for _ in indexes]
        for column in list(self._columns):
            values = self._columns.pop(column)
            for part, index in zip(parts, indexes, strict=True):
                part[column] = _pages(len(index), values.dtype)
                np.take(values, index, out=part[column], mode="clip")
        return [_KeptRows(self._name, columns) for columns in parts]


def _arrival_order(arrived: Ints, words: Sequence[str]) -> tuple[Ints, list[str]]:
    """Return the place of each trajectory in order of arrival by its code, and the names so."""
    rank = np.full(len(words) + 1, -1, np.int64)  # the last answers to code -1
    rank[arrived] = np.arange(len(arrived))
    return rank, [words[code] for code in arrived.tolist()]


class _Table:
    """A table's columns as arrays, each made when it is first read."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table.unify_dictionaries()
        self._arrays: dict[str, Any] = {}
        self._lists: dict[str, Sequence[str]] = {}

    def rows(self, index: Ints) -> Rows:
        def column(name: str) -> Any:
            if name == "seq":
                return index
            if name == "payload":
                texts: list[Any] = self._table.column(name).take(index).to_pylist()
                return np.array(texts, object)
            return self.whole(name)[index]

        return Rows(len(index), column)

    def words(self, name: str) -> Sequence[str]:
        self.whole(name)
        return self._lists[name]

    def rank_trajectories(self, rank: Ints) -> None:
        self._arrays["trajectory"] = rank[self._arrays["trajectory"]]

    def whole(self, name: str) -> Any:
        """Values of all rows: codes of words, -1 where there is none; numbers, 0 so."""
        if name not in self._arrays:
            values: Any = self._table.column(name).combine_chunks()
            if isinstance(values, pa.ChunkedArray):  # of a table without rows
                values = pa.array([], values.type)
            none: Any = 0
            if isinstance(values, pa.DictionaryArray):
                words: list[Any] = values.dictionary.to_pylist()
                self._lists[name] = words
                values, none = values.indices, -1
            elif pa.types.is_boolean(values.type):
                none = False
            if values.null_count:
                values = values.fill_null(none)
            self._arrays[name] = values.to_numpy(zero_copy_only=False)
        return self._arrays[name]


_NO_ROWS = Rows(0, lambda column: np.zeros(0, np.int64))
