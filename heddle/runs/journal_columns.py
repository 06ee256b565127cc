"""The columns of a journal as numpy arrays, for each event and command class."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from mmap import ACCESS_COPY, mmap
from sys import intern
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from heddle.runs.arrow_arrays import numbers_of
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
        count = self._count + len(values)
        dtype = np.promote_types(self._values.dtype, smallest(values))
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


def smallest(values: Any) -> Any:
    """The smallest type that holds these integers, which sorts sooner; of other values, theirs."""
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
        return [json.loads(text or "{}") for text in self.column("payload")]

    def part(self, index: Ints) -> "Rows":
        """Rows at these places."""
        return Rows(len(index), lambda name: self.column(name)[index])


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

    def words_alone(self) -> "Journal":
        """The same without rows, which take memory."""
        return Journal(self.rows, self.trajectories, {}, self._words)

    def blocks(self, dispatches: int) -> Iterator["Journal"]:
        """Cut by trajectory into journals of about so many dispatches each."""
        total = len(self.trajectories)
        if len(self.of("Dispatch")) <= dispatches:
            yield self
            return
        count = np.bincount(self.of("Dispatch").codes("trajectory"), minlength=total)
        block = np.cumsum(count) // dispatches
        block = np.cumsum(np.diff(block, prepend=block[:1]) > 0)
        block_of_row = {
            name: block[rows.column("trajectory")].astype(np.int16)
            for name, rows in self._classes.items()
            if len(rows) and "trajectory" in _columns_of(name)
        }
        for number in range(int(block[-1]) + 1):
            first, end = np.searchsorted(block, [number, number + 1]).tolist()
            classes = dict(self._classes)
            for name, numbers in block_of_row.items():
                part = self._classes[name].part(np.flatnonzero(numbers == number))
                classes[name] = _counted_from(first, part)
            yield Journal(self.rows, self.trajectories[first:end], classes, self._words)


def _counted_from(first: int, rows: Rows) -> Rows:
    """Rows with the codes of their trajectories less `first`."""

    def column(name: str) -> Any:
        return rows.column(name) - first if name == "trajectory" else rows.column(name)

    return Rows(len(rows), column)


@cache
def _columns_of(name: str) -> Sequence[str]:
    layout = layouts()[name]
    nested = ["payload"] if layout.nested else []
    return ["seq", "time_s", *nested, *(field.column for field in layout.plain)]


def all_columns(batches: Iterable[pa.RecordBatch]) -> Journal:
    """Return the columns of all classes, of a journal whose words only grow from batch to batch.

    Raises:
        RunError: as `JournalReader`.
    """
    reader = JournalReader(layouts())
    for batch in batches:
        reader.add(batch)
    return reader.journal()


_UNMEASURED = ("priority", "max_tokens", "estimate", "remaining_tokens")
"""No figure is made from these columns; a large journal has many such values."""


class JournalReader:
    """Takes the batches of a journal, whose words only grow; keeps the classes that are named."""

    def __init__(self, names: Collection[str]) -> None:
        self._found = {
            name: {column: Column() for column in _columns_of(name) if column not in _UNMEASURED}
            for name in names
        }
        self._rows = 0
        self._last: pa.RecordBatch | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the next batch.

        Raises:
            RunError: it names an event that is unknown.
        """
        if not batch.num_rows:
            return
        names, codes = _words(batch, "name"), _values(batch.column("name"))
        order = np.argsort(codes.astype(np.min_scalar_type(len(names))), kind="stable")
        ends = np.cumsum(np.bincount(codes, minlength=len(names))).tolist()
        whole: dict[str, Any] = {"seq": np.arange(self._rows, self._rows + batch.num_rows)}
        for name, start, end in zip(names, [0, *ends[:-1]], ends, strict=True):
            if start == end:
                continue
            if name not in layouts():
                raise RunError(f"journal names {name!r}, which this version does not know")
            for column, values in self._found.get(name, {}).items():
                if column not in whole:
                    whole[column] = _values(batch.column(column))
                values.add(whole[column][order[start:end]])
        self._rows, self._last = self._rows + batch.num_rows, batch

    def journal(self) -> Journal:
        """Return the columns of the batches so far.

        Raises:
            RunError: the batches name a trajectory that never arrived.
        """
        found, last = self._found, self._last

        @cache
        def words(column: str) -> list[str]:
            return [] if last is None else _words(last, column)

        arrived = found["TrajectoryArrived"]["trajectory"].array().astype(np.int64)
        names = words("trajectory")
        rank = np.full(len(names) + 1, -1, np.int32)  # the last answers to code -1
        rank[arrived] = np.arange(len(arrived))
        classes = dict.fromkeys(layouts(), _NO_ROWS)
        for name, of_class in found.items():
            arrays = {column: values.array() for column, values in of_class.items()}
            if len(arrays.get("trajectory", ())):
                arrays["trajectory"] = rank[arrays["trajectory"]]
                # The environment of a trajectory may fail before it arrives.
                place = int(arrays["trajectory"].argmin())
                if name not in OF_LOOPS and arrays["trajectory"][place] < 0:
                    row = arrays["seq"][place]
                    raise RunError(f"journal is damaged: row {row}: its trajectory never arrived")
            classes[name] = _rows(name, arrays)
        return Journal(self._rows, [names[code] for code in arrived.tolist()], classes, words)


def _words(batch: pa.RecordBatch, column: str) -> list[str]:
    coded: Any = batch.column(column)
    words: list[str] = coded.dictionary.to_pylist()
    return words


def _values(column: Any) -> Any:
    """Codes of words, -1 where there is none; numbers, 0 so; texts."""
    none = 0
    if isinstance(column, pa.DictionaryArray):
        column, none = column.indices, -1
    elif pa.types.is_string(column.type):
        # Most are alike: many rows have one object in common.
        return np.array([text and intern(text) for text in column.to_pylist()], object)
    return numbers_of(column, none)


def _rows(name: str, columns: Mapping[str, Any]) -> Rows:
    """Rows of a class with those of its columns that were read."""
    count = len(next(iter(columns.values())))

    def column(wanted: str) -> Any:
        if wanted in columns:
            return columns[wanted]
        assert wanted not in _columns_of(name), f"{wanted} of {name} was not read"
        return np.full(count, -1 if schema().field(wanted).type == WORD else 0)

    return Rows(count, column)


_NO_ROWS = Rows(0, lambda column: np.zeros(0, np.int64))
