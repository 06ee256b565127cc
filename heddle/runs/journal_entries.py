"""Entries of a journal from its batches, exactly as they were recorded.

What may not be in this file: metrics, anything that knows one event from another.
"""

import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from heddle.runs.arrow_arrays import number_array
from heddle.runs.files import RunError
from heddle.runs.journal_columns import Ints
from heddle.runs.journal_schema import EVENTS, layouts
from heddle.runs.shape_keys import from_plain
from heddle_core.ids import EngineId, EngineShape
from heddle_core.journal import Entry
from heddle_core.plans import PlanProblem

TRUSTED = ("heddle_core", "heddle_trace")
"""Packages whose planning problems may be imported by name while a journal is read."""


def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[Entry]:
    """Return the entries of a journal, equal to the original ones.

    Raises `RunError` when a row names an unknown event or command, lacks what it needs, or
    when a command does not follow the event that caused it.
    """
    event: Any = None
    event_seq: int | None = None
    events = 0
    commands: list[Any] = []
    for batch in batches:
        kinds, seqs, causes = (_list(batch.column(name)) for name in ("kind", "seq", "cause"))
        is_event = np.fromiter((kind == "event" for kind in kinds), np.bool_, len(kinds))
        try:
            things = _things(batch, events - 1 + np.cumsum(is_event))
        except (KeyError, TypeError, json.JSONDecodeError) as e:
            raise RunError(f"journal is damaged: {type(e).__name__}: {e}") from None
        events += int(is_event.sum())
        for seq, kind, cause, thing in zip(seqs, kinds, causes, things, strict=True):
            if (kind == "event") != isinstance(thing, EVENTS):
                raise RunError(f"journal row {seq}: {type(thing).__name__} is no {kind}")
            if kind == "event":
                if event is not None:
                    yield Entry(event, tuple(commands))
                event, event_seq, commands = thing, seq, []
            elif cause != event_seq:
                raise RunError(f"journal row {seq}: a command caused by {cause}, not {event_seq}")
            else:
                commands.append(thing)
    if event is not None:
        yield Entry(event, tuple(commands))


def _list(column: Any) -> list[Any]:
    """Return the values of a column; word by word from its dictionary would be slow."""
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    values: list[Any] = column.to_pylist()
    return values


def _things(batch: pa.RecordBatch, event_numbers: Ints) -> list[Any]:
    """Build each row's event or command, a class at a time; the numbers are those of events."""
    names = np.array(_list(batch.column("name")), object)
    out: list[Any] = [None] * len(names)
    for name in dict.fromkeys(names.tolist()):
        layout = layouts().get(name)
        if layout is None:
            raise RunError(f"journal names {name!r}, which this version does not know")
        index = np.flatnonzero(names == name)
        rows = number_array(index)
        keys = [f.column for f in layout.plain]
        columns: list[Sequence[Any]] = [_list(batch.column(key).take(rows)) for key in keys]
        for name_of_column in layout.engines:
            at = keys.index(name_of_column)
            columns[at] = [EngineId(name) for name in columns[at]]
        if "tp" in keys:
            _join_shapes(keys, columns)
        if layout.cls in EVENTS:
            keys.append("time_s")
            columns.append(_list(batch.column("time_s").take(rows)))
        else:
            keys.append("cause")
            columns.append(event_numbers[index].tolist())
        if layout.nested:
            texts = _list(batch.column("payload").take(rows))
            payloads = [json.loads(text or "{}") for text in texts]
            for field, hint in layout.nested:
                keys.append(field)
                columns.append([restored(p.get(field), hint) for p in payloads])
        for i, row in zip(index.tolist(), zip(*columns, strict=True), strict=True):
            out[i] = layout.cls(**dict(zip(keys, row, strict=True)))
    return out


def _join_shapes(keys: list[str], columns: list[Sequence[Any]]) -> None:
    """Put the columns of an engine's shape together again."""
    parts = EngineShape.__struct_fields__
    values = [columns[keys.index(part)] for part in parts]
    for part in parts:
        at = keys.index(part)
        del keys[at], columns[at]
    keys.append("shape")
    columns.append([EngineShape(*shape) for shape in zip(*values, strict=True)])


def restored(value: Any, hint: Any) -> Any:
    """Make the value of a nested field again from JSON."""
    if hint is PlanProblem:
        return _convert(value["value"], _problem_class(value["class"]))
    return _convert(value, hint)


T = TypeVar("T")


def _convert(value: Any, cls: type[T]) -> T:
    try:
        return msgspec.convert(from_plain(value), cls, str_keys=True, dec_hook=from_text)
    except msgspec.ValidationError as e:
        raise RunError(f"journal payload does not fit {cls}: {e}") from None


def from_text(cls: type, text: Any) -> Any:
    """Make an engine id of its text, for msgspec."""
    if cls is EngineId and isinstance(text, str):
        return EngineId(text)
    raise TypeError(f"{cls.__name__} cannot be made of {text!r}")


def _problem_class(path: str) -> type:
    """Find the class of a stored problem, without importing arbitrary modules that a file names."""
    module, _, name = path.partition(":")
    if module.split(".")[0] not in TRUSTED and module not in sys.modules:
        raise RunError(f"journal holds a planning problem of {path}, which is not installed here")
    cls = getattr(importlib.import_module(module), name, None)
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise RunError(f"journal holds a planning problem of {path}, which is no dataclass")
    return cls
