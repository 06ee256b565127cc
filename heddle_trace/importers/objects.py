"""Objects of a log one by one: lines, items of an array, or in lists within others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from heddle_trace.importers.heads import Head, head_of
from heddle_trace.importers.notes import Notes
from heddle_trace.importers.sources import SourceFile


def objects(
    source: SourceFile, notes: Notes, nested: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file with their places: lines, items of an array, or all of it.

    `nested` names the lists that hold objects within others, in ijson's notation, by their first
    key.
    """
    head = head_of(source)
    if isinstance(head.document, list):
        rows = source.items(notes, "item", dict[str, Any])
    elif head.rows:
        rows = source.rows(notes, msgspec.json.Decoder(dict[str, Any]))
    else:
        key = next((key for key in nested if head.has(key)), None)
        yield from source.items(notes, nested[key] if key else "", dict[str, Any])
        return
    for where, raw in rows:
        key = next((key for key in nested if isinstance(raw.get(key), list)), None)
        for item in [raw] if key is None else _inner(raw, nested[key].split(".")):
            yield where, item


def objects_of_parts(
    source: SourceFile, notes: Notes, key: str, is_part: Callable[[dict[str, Any]], bool]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file; an array of parts is one object, which has them under `key`."""
    if not is_part(head_of(source).item()):
        yield from objects(source, notes)
        return
    before = notes.damaged
    parts = [part for _, part in source.items(notes, "item", dict[str, Any])]
    if notes.damaged > before:
        notes.drop("trajectories of which a part is damaged")
    else:
        yield str(source.path), {key: parts}


def _inner(value: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects at a path of ijson's."""
    if not path:
        if isinstance(value, dict):
            yield value
    elif path[0] == "item":
        for item in value if isinstance(value, list) else ():
            yield from _inner(item, path[1:])
    elif isinstance(value, dict):
        yield from _inner(value.get(path[0]), path[1:])


def head_objects(head: Head, nested: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The objects that the head of a file shows."""
    for value in head.rows or (head.document,):
        for raw in value if isinstance(value, list) else (value,):
            if isinstance(raw, dict):
                key = next((key for key in nested if isinstance(raw.get(key), list)), None)
                yield from [raw] if key is None else _inner(raw, nested[key].split("."))
