"""Logs given where a trace is needed: what they are, and the command that takes them.

The importers are imported when a file is no trace, so that replays start without them.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from heddle_trace.errors import TraceError
from heddle_trace.files import read_trace
from heddle_trace.schema import Trace

if TYPE_CHECKING:
    from heddle_trace.importers.heads import Head


def is_trace(path: Path) -> bool:
    """Whether a file begins like a trace. False for a folder.

    Raises:
        TraceError: it cannot be read.
    """
    return not path.is_dir() and _head(path).any_row("trajectory_id", "steps")


def read_replayed(path: Path) -> Trace:
    """Read a trace to replay.

    Raises:
        TraceError: it is none, or damaged; for a log in a known format, with the command for logs.
    """
    try:
        return read_trace(path)
    except TraceError as error:
        format = _log_format(path)
        if format is None:
            raise error from None
    raise TraceError(
        f"{path}: is {format}, not a trace; `heddle try {path}` imports, compares and plans in one "
        f"command, `heddle trace import {path} -o TRACE.jsonl.gz` only makes a trace"
    )


def _log_format(path: Path) -> str | None:
    """What a path holds in words, if it is no trace but may be imported."""
    from heddle_trace.importers.formats import recognised

    if path.is_dir():
        return "a folder"
    try:
        head = _head(path)
    except TraceError:
        return None
    if head.any_row("trajectory_id", "steps"):
        return None
    found = recognised(head)
    return f"a log of the format {found[0]}" if found else None


def _head(path: Path) -> "Head":
    from heddle_trace.importers.heads import head_of
    from heddle_trace.importers.sources import sources

    (source,) = sources([path])
    return head_of(source)
