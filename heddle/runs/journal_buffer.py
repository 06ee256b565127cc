"""Events and commands into typed buffers, and these into record batches.

The values of a row go into the buffer of its class at once, so that the journal holds no object.
The codes of words are the same in the whole journal, so a batch adds only new words to the file. A
run without an end of its own forgets words: their number has no bound.

What may not be in this file: metrics, anything that knows one event from another.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from struct import Struct
from types import CodeType
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from heddle.runs.arrow_arrays import number_array, numbers_of, word_array
from heddle.runs.journal_columns import Journal, JournalReader
from heddle.runs.journal_schema import (
    COMMANDS,
    EVENTS,
    WORD,
    Layout,
    first_words,
    layouts,
    schema,
)
from heddle.runs.shape_keys import to_plain
from heddle_core.commands import Command
from heddle_core.events import Event
from heddle_core.plans import PlanProblem

Values: TypeAlias = np.ndarray[Any, np.dtype[Any]]
PACKED_ROWS = 512
"""Rows that are packed at a time: the code of all classes, and the rows, are in the cache then."""
CHUNK_ENTRIES = 5_000
"""Entries per batch: many, for cheap columns, but few enough for the processor's cache."""
MOST_WORDS = 4_096
"""Words of a column after which a writer that forgets begins their codes again."""

_PACKED: Mapping[pa.DataType, tuple[str, Any]] = {
    pa.int64(): ("q", np.int64),
    pa.float64(): ("d", np.float64),
    pa.bool_(): ("b", np.int8),
    WORD: ("i", np.int32),
}
_CODE_OF_BOOL: Mapping[bool | None, int] = {None: -1, False: 0, True: 1}
_IS_EVENT = np.array([True] * len(EVENTS) + [False] * len(COMMANDS))


class _Words(dict[str, int]):
    """Codes of the words of a column, in order of their first use."""

    def __init__(self, first: Sequence[str]) -> None:
        super().__init__()
        self._first = first
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self.clear()
        self._new: list[str] = []
        self._array: Any = word_array([])
        for word in self._first:
            self[word]

    def __missing__(self, word: str) -> int:
        code = self[word] = len(self)
        self._new.append(word)
        return code

    def array(self) -> Any:
        """The words as an Arrow array: the same object until there is another word."""
        if self._new:
            self._array = pa.concat_arrays([self._array, word_array(self._new)])
            self._new = []
        return self._array


class _ClassBuffer:
    """Rows of one class, packed one after the other, and the JSON of their nested fields."""

    def __init__(
        self, kind: int, layout: Layout, words: Mapping[str, _Words], order: bytearray
    ) -> None:
        self._rows, self._payloads = bytearray(), list[str]()
        columns: list[tuple[str, Any]] = []
        codes, values = "=", list[str]()
        names: dict[str, Any] = {"put": self._rows.extend, "order": order.append}
        if layout.cls in EVENTS:
            columns, codes, values = [("time_s", np.float64)], "=d", ["row.time_s"]
        for field in layout.plain:
            code, dtype = _PACKED[field.type]
            value = f"row.{field.path}"
            if field.type == WORD:
                assert not field.optional, f"{field.column}: a word that may be None"
                names[f"of_{field.column}"] = words[field.column]
                value = f"of_{field.column}[{value}]"
            elif field.type == pa.bool_():
                names["of_bool"] = _CODE_OF_BOOL
                value = f"of_bool[{value}]"
            elif field.optional:
                columns.append((_some(field.column), np.bool_))
                codes += "?"
                values.append(f"{value} is not None")
                value = f"0 if {value} is None else {value}"
            columns.append((field.column, dtype))
            codes += code
            values.append(value)
        self.is_event = layout.cls in EVENTS
        self.columns = tuple((field.column, field.optional) for field in layout.plain)
        self.dtype, self._names = np.dtype(columns), {name for name, _ in columns}
        names["pack"] = Struct(codes).pack
        text = f"put(pack({', '.join(values)}))"
        if layout.nested:
            payloads, nested = self._payloads, layout.nested
            names["nest"] = lambda row: payloads.append(_payload(row, nested))
            text += " or nest(row)"
        # One expression per class, made as dataclasses make their methods: fields are read without
        # a loop. The order comes last: what is in it is whole.
        self.put: Callable[[Any], object] = eval(
            _compiled(f"lambda row: {text} or order({kind})"), names
        )

    def take(self, count: int) -> tuple[Values, list[str]]:
        """Take out this many rows, as a structured array, and their payloads; drop all others."""
        rows = np.frombuffer(bytes(self._rows), self.dtype, count)
        payloads = self._payloads[:count]
        self._rows.clear()
        self._payloads.clear()
        return rows, payloads

    def some(self, column: str, rows: Values) -> Values:
        """Where rows of this class have a value in an optional column."""
        name = _some(column)
        found: Values = rows[name] if name in self._names else rows[column] >= 0
        return found


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, f"<{__name__}>", "eval")


def _some(column: str) -> str:
    """Name of the buffer column that says where an optional column has a value."""
    return f"{column} is not None"


class JournalBuffer:
    """The rows since the last batch. `on_full` is called after every `entries` events."""

    def __init__(
        self,
        *,
        entries: int = CHUNK_ENTRIES,
        on_full: Callable[[], object] = lambda: None,
        forgets: bool = False,
    ) -> None:
        """`forgets`: after `MOST_WORDS` words, those of later batches have other codes."""
        self._most_words = MOST_WORDS if forgets else math.inf
        self.rows = 0
        """Rows in all batches so far."""
        self._words = {column: _Words(first) for column, first in first_words().items()}
        self._recorded: list[Event | Command] = []
        self._order = bytearray()
        """Class of each row that is packed."""
        self._packed = 0
        """How many these are; after an interrupt, how many of them are whole."""
        self._classes = {
            name: _ClassBuffer(kind, layout, self._words, self._order)
            for kind, (name, layout) in enumerate(layouts().items())
        }
        self._put = {layouts()[name].cls: buffer.put for name, buffer in self._classes.items()}
        self._entries, self._full, self._on_full = 0, entries, on_full
        self._whole = True

    def record(self, event: Event, commands: Sequence[Command]) -> None:
        """Add an event and the commands that it caused; nothing more after an error in this."""
        rows = self._recorded
        rows.append(event)
        if commands:
            rows.extend(commands)
        self._entries += 1
        if len(rows) >= PACKED_ROWS or self._entries >= self._full:
            self._pack()
            if self._entries >= self._full:
                self._on_full()

    def _pack(self) -> None:
        # Taken out first: after an interrupt these rows are lost, and those before are whole.
        rows, self._recorded = self._recorded, []
        if rows:
            put = self._put
            for row in rows:
                put[row.__class__](row)
            self._packed = len(self._order)

    def take(self) -> pa.RecordBatch:
        """Take out the recorded entries as the next rows of the journal.

        After an interrupt in the middle of this, there are none.
        """
        self._pack()
        entries, self._entries = self._entries, 0
        codes: Values = np.frombuffer(bytes(self._order), np.int8, self._packed)
        is_event = _IS_EVENT[codes]
        if not self._whole:
            codes, is_event = codes[:0], is_event[:0]
        elif int(np.count_nonzero(is_event)) > entries:
            # The last event was interrupted before all of its commands were there.
            end = int(np.flatnonzero(is_event)[entries])
            codes, is_event = codes[:end], is_event[:end]
        self._whole = False
        self._order.clear()
        self._packed = 0
        batch = self._batch(codes, is_event)
        for words in self._words.values():
            if len(words) > self._most_words:
                words.forget()
        self._whole = True
        return batch

    def _batch(self, codes: Values, is_event: Values) -> pa.RecordBatch:
        total, first = len(codes), self.rows
        order = np.argsort(codes, kind="stable")
        ends = np.cumsum(np.bincount(codes, minlength=len(self._classes))).tolist()
        row, time_s = np.arange(total), np.zeros(total)
        event_row = np.maximum.accumulate(np.where(is_event, row, 0))
        columns: dict[str, Values] = {
            "seq": row + first,
            "kind": (~is_event).astype(np.int32),
            "name": codes.astype(np.int32),
            "cause": event_row + first,
        }
        some: dict[str, Values] = {"cause": ~is_event}
        texts: list[str | None] = []
        for buffer, start, end in zip(self._classes.values(), [0, *ends[:-1]], ends, strict=True):
            if start == end:
                continue
            index, (rows, payloads) = order[start:end], buffer.take(end - start)
            if buffer.is_event:
                time_s[index] = rows["time_s"]
            for column, optional in buffer.columns:
                if column not in columns:
                    columns[column] = np.zeros(total, rows[column].dtype)
                    some[column] = np.zeros(total, np.bool_)
                columns[column][index] = rows[column]
                some[column][index] = buffer.some(column, rows) if optional else True
            if payloads:
                texts = texts or [None] * total
                for at, text in zip(index.tolist(), payloads, strict=True):
                    texts[at] = text
        columns["time_s"] = time_s[event_row]
        self.rows += total
        return self._arrow(total, columns, some, texts)

    def _arrow(
        self,
        total: int,
        columns: dict[str, Values],
        some: dict[str, Values],
        texts: Sequence[str | None],
    ) -> pa.RecordBatch:
        """Put columns together; where one is missing, or `some` is false, it is null."""
        arrays: list[Any] = []
        for field in list(schema())[:-1]:
            words = self._words.get(field.name)
            if field.name in columns:
                values = columns[field.name]
                values = values > 0 if field.type == pa.bool_() else values
                array = number_array(values, some.get(field.name))
            else:
                array = pa.nulls(total, pa.int32() if words is not None else field.type)
            if words is not None:
                array = pa.DictionaryArray.from_arrays(array, words.array(), safe=False)
            arrays.append(array)
        arrays.append(word_array(texts) if texts else pa.nulls(total, pa.string()))
        return pa.RecordBatch.from_arrays(arrays, schema=schema())


def of_growing_words(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a writer that forgot words with codes that are the same in all."""
    known = {column: _Words(first) for column, first in first_words().items()}
    for batch in batches:
        arrays = list[Any](batch.columns)
        for at, (name, column) in enumerate(zip(batch.schema.names, arrays, strict=True)):
            if name in known:
                codes = np.array([known[name][w] for w in column.dictionary.to_pylist()], np.int32)
                there = numbers_of(column.indices, 0)
                array = number_array(codes[there], column.is_valid().to_numpy(zero_copy_only=False))
                words = known[name].array()
                arrays[at] = pa.DictionaryArray.from_arrays(array, words, safe=False)
        yield pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


class JournalInMemory:
    """The columns of a journal that is written to no file; other classes are left out."""

    def __init__(self, names: Collection[str]) -> None:
        reader = self._reader = JournalReader(names)
        rows = self._rows = JournalBuffer(on_full=lambda: reader.add(rows.take()))
        self._wanted = frozenset(layouts()[name].cls for name in names)

    def record(self, event: Event, commands: Sequence[Command]) -> None:
        kept = [command for command in commands if command.__class__ in self._wanted]
        if kept or event.__class__ in self._wanted:
            self._rows.record(event, kept)

    def journal(self) -> Journal:
        self._reader.add(self._rows.take())
        return self._reader.journal()


def _payload(row: Any, nested: Sequence[tuple[str, Any]]) -> str:
    fields: dict[str, Any] = {}
    for name, hint in nested:
        value = getattr(row, name)
        if hint is PlanProblem:
            cls = type(value)
            name_of_class = f"{cls.__module__}:{cls.__qualname__}"
            fields[name] = {"class": name_of_class, "value": to_plain(value)}
        else:
            fields[name] = msgspec.to_builtins(value, str_keys=True, enc_hook=str)
    # The standard library's JSON, not msgspec's, which has no infinities.
    return json.dumps(fields, separators=(",", ":"))
