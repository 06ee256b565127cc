"""The beginning of a file, parsed as far as possible, by which formats are recognised."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import ijson

from heddle_trace.importers.sources import BREAKS, SourceFile, break_message

HEAD_BYTES: Final = 1024**2
_ROWS = 200

Json: TypeAlias = Any
"""A value of unknown structure; formats check it before they use it."""


@dataclass(frozen=True, slots=True)
class Head:
    """What the first megabyte of a file shows.

    `rows` are the first lines that are JSON objects. `document` is the first JSON value of the
    file, cut off where the megabyte ends. `zipped`: the file is a zip archive. `broken` is the
    reason why its head could not be read completely, `start` the megabyte itself.
    """

    first_line: str
    rows: tuple[dict[str, Json], ...]
    document: Json
    zipped: bool = False
    readable: bool = True
    broken: str = ""
    start: bytes = b""

    def has(self, *keys: str) -> bool:
        """Whether the document is an object with all these keys."""
        return isinstance(self.document, dict) and all(key in self.document for key in keys)

    def any_row(self, *keys: str) -> bool:
        """Whether some line is an object with all these keys."""
        return any(all(key in row for key in keys) for row in self.rows)

    @property
    def objects(self) -> tuple[dict[str, Json], ...]:
        """The lines, or the document if it is an object."""
        return self.rows or ((self.document,) if isinstance(self.document, dict) else ())

    def item(self) -> dict[str, Json]:
        """The first element of a document that is a list of objects; else an empty object."""
        if isinstance(self.document, list) and self.document and isinstance(self.document[0], dict):
            return self.document[0]
        return {}


def head_of(source: SourceFile) -> Head:
    """Read the head of a file. Raises TraceError when it cannot be read at all."""
    if source.zipped:
        return Head(first_line="", rows=(), document=None, zipped=True)
    start = bytearray()
    broken = ""
    with source.opened() as stream:
        try:
            # Line by line: a larger piece that ran into damage would be lost.
            while chunk := stream.readline(HEAD_BYTES - len(start)):
                start += chunk
        except BREAKS as error:
            broken = break_message(error)
    return replace(head_of_bytes(bytes(start)), broken=broken)


def head_of_bytes(start: bytes) -> Head:
    """Parse as much as there is."""
    start = start.removeprefix(b"\xef\xbb\xbf")
    rows = tuple(_rows(start))
    return Head(
        first_line=start.partition(b"\n")[0][:200].decode(errors="replace").strip(),
        rows=rows,
        document=rows[0] if rows and _is_row(start) else _document(start),
        readable=b"\x00" not in start and _is_utf8(start),
        start=start,
    )


def _rows(start: bytes) -> Iterator[dict[str, Json]]:
    lines = start.split(b"\n")
    for line in lines[:_ROWS]:
        try:
            value = json.loads(line.decode())  # else json would guess at UTF-16
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _is_row(start: bytes) -> bool:
    """Whether the first line is a whole object, so that the file is not one big document."""
    try:
        return isinstance(json.loads(start.lstrip().partition(b"\n")[0].decode()), dict)
    except (ValueError, RecursionError):
        return False


def _document(start: bytes) -> Json:
    builder = ijson.ObjectBuilder()
    try:
        for event, value in ijson.basic_parse(io.BytesIO(start), use_float=True):
            builder.event(event, value)
    except (ijson.JSONError, UnicodeDecodeError):
        pass  # cut off, as expected; or no JSON, and then there is no value
    return getattr(builder, "value", None)


def _is_utf8(start: bytes) -> bool:
    try:
        start[:HEAD_BYTES].decode()
    except UnicodeDecodeError as error:
        return error.start > len(start) - 4  # a character cut in two by the end of the head
    return True
