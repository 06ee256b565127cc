"""The journal as columns: entries to Arrow record batches and back, exactly.

One row per event or command. Fixed columns (`seq`, `time_s`, `kind`, `name`, `cause`) come first,
then one nullable typed column for each field name of any event or command. An engine's shape has
the columns `gpu`, `tp` and `role`. Other fields that are not plain values (salvaged tokens,
resource plans, planning problems) go as JSON into `payload`. The columns follow from the classes,
so a new event or command needs no change here. A command's `cause` is not stored: the column
`cause` has the row of the event, and the number of the event follows from it.

What may not be in this file: files, metrics, anything that knows one event from another.
"""

import importlib
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from heddle.runs.compatibility import ROLLOUT_OF_OLD_RUNS, upgraded, upgraded_problem
from heddle.runs.shape_keys import from_plain, to_plain
from heddle_core.commands import Command
from heddle_core.events import Event
from heddle_core.ids import EngineId, EngineShape
from heddle_core.journal import Entry
from heddle_core.plans import PlanProblem

TRUSTED = ("heddle_core", "heddle_trace")
"""Packages whose planning problems may be imported by name while a journal is read."""

Column: TypeAlias = Any
"""An Arrow array. Not `pa.Array`: the stubs type what is made from numpy values as booleans."""

Rows: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_WORD = pa.dictionary(pa.int32(), pa.string())
_ARROW: Mapping[type, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    str: _WORD,
    EngineId: _WORD,
}


class JournalError(ValueError):
    """A journal that violates its schema."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """How one event or command class maps to columns."""

    cls: type
    plain: tuple[tuple[str, str, pa.DataType], ...]
    """Column, path of the attribute, and type."""
    nested: tuple[tuple[str, Any], ...]
    engines: tuple[str, ...]
    """Columns that hold ids of engines."""


def _plain_type(hint: Any) -> pa.DataType | None:
    """Return the column type of a field annotation, or None when it has to go into the payload."""
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    if typing.get_origin(hint) is typing.Literal:
        return _WORD
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [a for a in typing.get_args(hint) if a is not type(None)]
        return _plain_type(parts[0]) if len(parts) == 1 else None
    return _ARROW.get(hint)


def _shape(cls: type) -> _Shape:
    plain: list[tuple[str, str, pa.DataType]] = []
    nested: list[tuple[str, Any]] = []
    engines: list[str] = []
    for name, hint in typing.get_type_hints(cls).items():
        if name in ("time_s", "cause"):
            continue
        if hint is EngineShape:
            for part, kind in typing.get_type_hints(EngineShape).items():
                plain.append((part, f"{name}.{part}", _WORD if kind is not int else pa.int64()))
            continue
        column = _plain_type(hint)
        if column is None:
            nested.append((name, hint))
        else:
            plain.append((name, name, column))
        if hint is EngineId:
            engines.append(name)
    return _Shape(cls, tuple(plain), tuple(nested), tuple(engines))


@cache
def _shapes() -> Mapping[str, _Shape]:
    """Every event and command class by name, in the order of the unions."""
    classes = (*typing.get_args(Event), *typing.get_args(Command))
    return {cls.__name__: _shape(cls) for cls in classes}


@cache
def schema() -> pa.Schema:
    """Return the columns of a journal."""
    columns: dict[str, pa.DataType] = {
        "seq": pa.int64(),
        "time_s": pa.float64(),
        "kind": _WORD,
        "name": _WORD,
        "cause": pa.int64(),
        "trajectory": _WORD,
        "step": pa.int64(),
        "engine": _WORD,
    }
    for shape in _shapes().values():
        for name, _, column in shape.plain:
            assert columns.setdefault(name, column) == column, f"{name} has two types"
    columns["payload"] = pa.string()
    return pa.schema(list(columns.items()))


def needed() -> list[str]:
    """Columns of every journal; later ones have a default."""
    later = {"role", "rollout"}
    always: set[str] = set()
    for shape in _shapes().values():
        for field in msgspec.structs.fields(shape.cls):
            (always if field.required else later).add(field.name)
    return [n for n in schema().names if n not in later or n in always - {"rollout"}]


def encode(entries: Sequence[Entry], first_seq: int) -> pa.RecordBatch:
    """Turn entries into rows, each event followed by its commands; `seq` counts from `first_seq`.

    Works a class at a time, not a row at a time: that keeps 200,000 rows well under half a second.
    """
    commands = list(chain.from_iterable(e.commands for e in entries))
    counts = np.fromiter((len(e.commands) for e in entries), np.int64, len(entries))
    ends = np.cumsum(counts + 1)
    event_row = ends - counts - 1
    total = int(ends[-1]) if len(entries) else 0
    is_event = np.zeros(total, bool)
    is_event[event_row] = True
    rows = _by_class(event_row, [e.event for e in entries])
    rows |= _by_class(np.flatnonzero(~is_event), commands)

    cause_row = np.repeat(event_row, counts + 1)
    times = np.fromiter((e.event.time_s for e in entries), np.float64, len(entries))
    names = list(_shapes())
    name_code = np.zeros(total, np.int32)
    for cls, (index, _) in rows.items():
        name_code[index] = names.index(cls.__name__)
    columns: dict[str, Column] = {
        "seq": pa.array(np.arange(first_seq, first_seq + total)),
        "time_s": pa.array(np.repeat(times, counts + 1)),
        "kind": pa.DictionaryArray.from_arrays(
            _column(np.where(is_event, 0, 1).astype(np.int32)), pa.array(["event", "command"])
        ),
        "name": pa.DictionaryArray.from_arrays(_column(name_code), pa.array(names)),
        "cause": pa.array(cause_row + first_seq, mask=is_event),
    }
    for name, parts in _field_parts(rows).items():
        columns[name] = _scatter(parts, total, schema().field(name).type)
    missing = {f.name for f in schema()} - columns.keys()
    columns |= {name: pa.nulls(total, schema().field(name).type) for name in missing}
    return pa.RecordBatch.from_arrays([columns[f.name] for f in schema()], schema=schema())


def _by_class(index: Rows, things: Sequence[Any]) -> dict[type, tuple[Rows, list[Any]]]:
    """For each class, its things in order and their row numbers."""
    found: dict[type, tuple[list[int], list[Any]]] = {}
    for i, thing in enumerate(things):
        kept = found.get(thing.__class__)
        if kept is None:
            kept = found[thing.__class__] = ([], [])
        kept[0].append(i)
        kept[1].append(thing)
    return {cls: (index[at], members) for cls, (at, members) in found.items()}


def _field_parts(
    rows: Mapping[type, tuple[Rows, list[Any]]],
) -> dict[str, list[tuple[Rows, Column]]]:
    """For each column, the row numbers and values that each class gives it."""
    parts: dict[str, list[tuple[Rows, Column]]] = {}
    for cls, (index, things) in rows.items():
        shape = _shapes()[cls.__name__]
        for name, path, column in shape.plain:
            values = pa.array(list(map(attrgetter(path), things)), _value_type(column))
            parts.setdefault(name, []).append((index, values))
        if shape.nested:
            texts = [_payload(thing, shape) for thing in things]
            parts.setdefault("payload", []).append((index, pa.array(texts, pa.string())))
    return parts


def _column(values: Any, mask: Any = None) -> Column:
    return pa.array(values, mask=mask)


def _value_type(column: pa.DataType) -> pa.DataType:
    return column.value_type if isinstance(column, pa.DictionaryType) else column


def _scatter(parts: Sequence[tuple[Rows, Column]], total: int, column: pa.DataType) -> Column:
    """Put each part's values at its row numbers; the other rows are null."""
    order = np.full(total, -1, np.int64)
    start = 0
    for index, values in parts:
        order[index] = np.arange(start, start + len(values))
        start += len(values)
    pool = pa.concat_arrays([values for _, values in parts])
    if isinstance(column, pa.DictionaryType):
        pool = pool.dictionary_encode()
    return pool.take(_column(order, mask=order < 0))


def _payload(thing: Any, shape: _Shape) -> str:
    fields: dict[str, Any] = {}
    for name, hint in shape.nested:
        value = getattr(thing, name)
        if hint is PlanProblem:
            cls = type(value)
            name_of_class = f"{cls.__module__}:{cls.__qualname__}"
            fields[name] = {"class": name_of_class, "value": to_plain(value)}
        else:
            fields[name] = msgspec.to_builtins(value, str_keys=True, enc_hook=str)
    # The standard library's JSON, not msgspec's, which has no infinities.
    return json.dumps(fields, separators=(",", ":"))


def decode(table: pa.Table) -> Iterator[Entry]:
    """Return the entries of a journal, equal to the original ones.

    Raises `JournalError` when a row names an unknown event or command, lacks what it needs, or
    when a command does not follow the event that caused it.
    """
    try:
        things = _things(table)
    except (KeyError, TypeError, json.JSONDecodeError) as e:
        raise JournalError(f"journal is damaged: {type(e).__name__}: {e}") from None
    kinds = table.column("kind").to_pylist()
    seqs = table.column("seq").to_pylist()
    causes = table.column("cause").to_pylist()
    event: Any = None
    event_seq: int | None = None
    number = -1
    commands: list[Any] = []
    for seq, kind, cause, thing in zip(seqs, kinds, causes, things, strict=True):
        if (kind == "event") != isinstance(thing, typing.get_args(Event)):
            raise JournalError(f"journal row {seq}: {type(thing).__name__} is no {kind}")
        if kind == "event":
            if event is not None:
                yield Entry(event, tuple(commands))
            event, event_seq, commands = thing, seq, []
            number += 1
        elif cause != event_seq:
            raise JournalError(f"journal row {seq}: a command caused by {cause}, not {event_seq}")
        else:
            commands.append(msgspec.structs.replace(thing, cause=number))
    if event is not None:
        yield Entry(event, tuple(commands))


def _things(table: pa.Table) -> list[Any]:
    """Build each row's event or command, a class at a time."""
    names = np.asarray(table.column("name").to_pylist(), dtype=object)
    out: list[Any] = [None] * len(names)
    for name in dict.fromkeys(names.tolist()):
        shape = _shapes().get(name)
        if shape is None:
            raise JournalError(f"journal names {name!r}, which this version does not know")
        index = np.flatnonzero(names == name)
        part = table.take(_column(index))
        keys = [f for f, _, _ in shape.plain if f in part.column_names]
        columns: list[Sequence[Any]] = [part.column(key).to_pylist() for key in keys]
        for name_of_column in shape.engines:
            at = keys.index(name_of_column)
            columns[at] = [EngineId(name) for name in columns[at]]
        if "tp" in keys:
            _join_shapes(keys, columns)
        if shape.cls in typing.get_args(Event):
            keys.append("time_s")
            columns.append(part.column("time_s").to_pylist())
        if shape.nested:
            payloads = [json.loads(text or "{}") for text in part.column("payload").to_pylist()]
            for field, hint in shape.nested:
                keys.append(field)
                columns.append([_restore(upgraded(field, p[field]), hint) for p in payloads])
        if any(f == "rollout" for f, _, _ in shape.plain) and "rollout" not in keys:
            keys.append("rollout")
            columns.append([ROLLOUT_OF_OLD_RUNS] * len(index))
        values = zip(*columns, strict=True) if columns else (() for _ in index)
        for i, row in zip(index.tolist(), values, strict=True):
            out[i] = shape.cls(**dict(zip(keys, row, strict=True)))
    return out


def _join_shapes(keys: list[str], columns: list[Sequence[Any]]) -> None:
    """Put the columns of an engine's shape together again."""
    parts = [key for key in ("gpu", "tp", "role") if key in keys]
    values = [columns[keys.index(part)] for part in parts]
    for part in parts:
        at = keys.index(part)
        del keys[at], columns[at]
    keys.append("shape")
    columns.append([EngineShape(*shape) for shape in zip(*values, strict=True)])


def _restore(value: Any, hint: Any) -> Any:
    if hint is PlanProblem:
        path, problem = upgraded_problem(value["class"], value["value"])
        return _convert(problem, _problem_class(path))
    return _convert(value, hint)


T = TypeVar("T")


def _convert(value: Any, cls: type[T]) -> T:
    try:
        return msgspec.convert(from_plain(value), cls, str_keys=True, dec_hook=_from_text)
    except msgspec.ValidationError as e:
        raise JournalError(f"journal payload does not fit {cls}: {e}") from None


def _from_text(cls: type, text: Any) -> Any:
    if cls is EngineId and isinstance(text, str):
        return EngineId(text)
    raise TypeError(f"{cls.__name__} cannot be made of {text!r}")


def _problem_class(path: str) -> type:
    """Find the class of a stored problem, without importing arbitrary modules that a file names."""
    module, _, name = path.partition(":")
    if module.split(".")[0] not in TRUSTED and module not in sys.modules:
        raise JournalError(
            f"journal holds a planning problem of {path}, which is not installed here"
        )
    cls = getattr(importlib.import_module(module), name, None)
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise JournalError(f"journal holds a planning problem of {path}, which is no dataclass")
    return cls
