"""Spans of Chrome's trace events, which Perfetto opens: `X`, and `B` with `E`.

Source: the Trace Event Format of Chromium. Times are microseconds; `M` events name processes and
tracks, and come before what is on them.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.objects import head_objects, objects
from heddle_trace.importers.sources import SourceFile, converted

_NESTED: Final = {"traceEvents": "traceEvents.item"}


class _Event(msgspec.Struct):
    ph: str
    pid: int | str = 0
    tid: int | str = 0
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class ChromeSpan(msgspec.Struct, array_like=True):
    """A span with the names of its process and its track."""

    process: str
    track: str
    name: str
    start_s: float
    end_s: float


def processes(head: Head) -> Iterator[str]:
    """Names of processes that the head of a file shows."""
    for raw in head_objects(head, _NESTED):
        if raw.get("name") == "process_name" and isinstance(raw.get("args"), dict):
            yield str(raw["args"].get("name"))


def chrome_spans(source: SourceFile, notes: Notes) -> Iterator[tuple[str, ChromeSpan]]:
    """Spans with their places, in the order of their `X` or `E`."""
    names: dict[object, str] = {}
    stacks: dict[object, list[_Event]] = {}
    for where, raw in objects(source, notes, _NESTED):
        with notes.guard(where):
            event = converted(raw, _Event)
            track = (event.pid, event.tid)
            if event.ph == "M" and event.name in ("process_name", "thread_name"):
                named = event.pid if event.name == "process_name" else track
                names[named] = str(event.args.get("name"))
                continue
            stack = stacks.setdefault(track, [])
            if event.ph == "B":
                stack.append(event)
            elif event.ph in ("E", "X"):
                if event.ph == "E" and not stack:
                    raise DamagedError("ends a span that never began: its first part is missing")
                begun = stack.pop() if event.ph == "E" else event
                end_us = event.ts if event.ph == "E" else event.ts + event.dur
                if end_us < begun.ts:
                    raise DamagedError(f"ts: the clock goes back in span {begun.name[:60]!r}")
                process, on = names.get(event.pid, ""), names.get(track, f"{event.pid}/{event.tid}")
                yield where, ChromeSpan(process, on, begun.name, begun.ts / 1e6, end_us / 1e6)
