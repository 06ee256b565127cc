"""Logs given where a trace is needed: what they are.

The importers are imported when a file is no trace, so that replays start without them.
"""

import gzip
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from heddle_trace.errors import TraceError
from heddle_trace.files import read_trace
from heddle_trace.schema import Trace

if TYPE_CHECKING:
    from heddle_trace.importers.heads import Head


FIRST_LINE_BYTES = 1 << 24


def read_replayed(path: Path) -> Trace:
    """Read a trace to replay.

    Raises:
        TraceError: it is none, or damaged; for a log in a known format, with the command for logs.
    """
    try:
        return read_trace(path)
    except TraceError as error:
        format = log_format(path)
        if format is None:
            raise error from None
    raise TraceError(
        f"{path}: is {format}, not a trace; make one of it: "
        f"`heddle trace import {path} -o TRACE.jsonl.gz`"
    )


def log_format(path: Path) -> str | None:
    """What a path holds in words, if it is no trace but may be imported."""
    if path.is_dir():
        return "a folder"
    if not path.is_file() or _begins_as_trace(path):
        return None
    from heddle_trace.importers.formats import recognised

    try:
        head = _head(path)
    except TraceError:
        return None
    if head.any_row("trajectory_id", "steps"):
        return None
    found = recognised(head)
    return f"a log of the format {found[0]}" if found else None


def _begins_as_trace(path: Path) -> bool:
    """Whether the first line is a trajectory: then no importer is asked."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as lines:
            first = json.loads(lines.readline(FIRST_LINE_BYTES))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "trajectory_id" in first and "steps" in first


def _head(path: Path) -> "Head":
    from heddle_trace.importers.heads import head_of
    from heddle_trace.importers.sources import sources

    (source,) = sources([path])
    return head_of(source)
