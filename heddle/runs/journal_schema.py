"""Columns of a journal, derived from the classes of events and commands.

One row per event or command. Fixed columns (`seq`, `time_s`, `kind`, `name`, `cause`) come first,
then one nullable typed column for each field name of any event or command. An engine's shape has
the columns `gpu`, `tp`, `role`, `ep` and `dp`. Other fields that are not plain values (salvaged
tokens, resource plans, planning problems) go as JSON into `payload`. A new event or command needs
no change here. A command's `cause` is not stored: the column `cause` has the row of the event, and
the number of the event follows from it.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from heddle_core.commands import Command, LoopCommand
from heddle_core.events import Event, LoopEvent
from heddle_core.ids import EngineId, EngineShape

WORD = pa.dictionary(pa.int32(), pa.string())
_ARROW: Mapping[type, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    str: WORD,
    EngineId: WORD,
}
EVENTS: tuple[type, ...] = typing.get_args(Event)
COMMANDS: tuple[type, ...] = typing.get_args(Command)
OF_LOOPS = frozenset(
    cls.__name__ for cls in (*typing.get_args(LoopEvent), *typing.get_args(LoopCommand))
)


@dataclass(frozen=True, slots=True)
class Field:
    """A plain field of an event or command class."""

    column: str
    path: str
    """Of the attribute."""
    type: pa.DataType
    optional: bool
    """Whether it may be None."""
    literals: tuple[str, ...]
    """The words it may have, when its annotation lists them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How an event or command class maps to columns."""

    cls: type
    plain: tuple[Field, ...]
    nested: tuple[tuple[str, Any], ...]
    """Name and annotation of each field that goes into the payload."""
    engines: tuple[str, ...]
    """Columns that hold ids of engines."""


def _field(column: str, path: str, hint: Any) -> Field | None:
    """Return the column of a field annotation, or None when it has to go into the payload."""
    optional = False
    while True:
        if isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif typing.get_origin(hint) is typing.Literal:
            return Field(column, path, WORD, optional, typing.get_args(hint))
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            parts = [a for a in typing.get_args(hint) if a is not type(None)]
            if len(parts) != 1:
                return None
            hint, optional = parts[0], True
        else:
            break
    arrow = _ARROW.get(hint)
    return None if arrow is None else Field(column, path, arrow, optional, ())


def _layout(cls: type) -> Layout:
    plain: list[Field] = []
    nested: list[tuple[str, Any]] = []
    engines: list[str] = []
    for name, hint in typing.get_type_hints(cls).items():
        if name in ("time_s", "cause"):
            continue
        if hint is EngineShape:
            for part, kind in typing.get_type_hints(EngineShape).items():
                field = _field(part, f"{name}.{part}", kind)
                assert field is not None, "a shape has plain values only"
                plain.append(field)
            continue
        field = _field(name, name, hint)
        if field is None:
            nested.append((name, hint))
        else:
            plain.append(field)
        if hint is EngineId:
            engines.append(name)
    return Layout(cls, tuple(plain), tuple(nested), tuple(engines))


@cache
def layouts() -> Mapping[str, Layout]:
    """Every event and command class by name, in the order of the unions."""
    return {cls.__name__: _layout(cls) for cls in (*EVENTS, *COMMANDS)}


@cache
def schema() -> pa.Schema:
    """Return the columns of a journal."""
    columns: dict[str, pa.DataType] = {
        "seq": pa.int64(),
        "time_s": pa.float64(),
        "kind": WORD,
        "name": WORD,
        "cause": pa.int64(),
        "trajectory": WORD,
        "step": pa.int64(),
        "engine": WORD,
    }
    for layout in layouts().values():
        for field in layout.plain:
            column = columns.setdefault(field.column, field.type)
            assert column == field.type, f"{field.column} has two types"
    columns["payload"] = pa.string()
    return pa.schema(list(columns.items()))


@cache
def first_words() -> Mapping[str, tuple[str, ...]]:
    """Words with which the dictionary of each word column begins, at least one.

    A dictionary in an Arrow file may grow, but not from nothing.
    """
    found: dict[str, dict[str, None]] = {f.name: {} for f in schema() if f.type == WORD}
    found["kind"] |= dict.fromkeys(("event", "command"))
    found["name"] |= dict.fromkeys(layouts())
    for layout in layouts().values():
        for field in layout.plain:
            if field.type == WORD:
                found[field.column] |= dict.fromkeys(field.literals)
    return {column: tuple(words) or ("",) for column, words in found.items()}
