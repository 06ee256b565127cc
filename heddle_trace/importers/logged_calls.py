"""Calls to a model as proxies log them, one object each, put together to trajectories.

The fields around request and response depend on the logger: ids and times go by many names, and are
looked up in the object itself.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from heddle_trace.complete import USER
from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.generations import (
    UNNAMED,
    LoggedGeneration,
    derive_added,
    fingerprint,
    identifier,
    steps_of,
)
from heddle_trace.importers.protocol import ImportContext
from heddle_trace.schema import TrajectoryRecord

SESSION_IDS: Final = (
    "trajectory_id",
    "session_id",
    "conversation_id",
    "thread_id",
    "trace_id",
)
GROUP_IDS: Final = ("group_id", "task_id", "prompt_id", "problem_id", "instance_id", "question_id")
_STARTS: Final = ("timestamp", "start_time", "started_at", "created_at", "created")
_ENDS: Final = ("end_time", "ended_at", "completed_at")
_SPANS: Final = (
    ("duration_s", 1.0),
    ("latency_s", 1.0),
    ("duration_ms", 1e-3),
    ("latency_ms", 1e-3),
)


class LoggedCall(msgspec.Struct, array_like=True):
    """One call, without its text. `new`: tokens of what the call before did not have."""

    where: str
    group: str
    file: str
    start_s: float | None
    end_s: float | None
    output: int
    input: int | None
    cached: int | None
    new: int
    calls: tuple[str, ...]
    after_tool: bool
    model: str | None


def named(raw: dict[str, Any], keys: Sequence[str]) -> str | None:
    """The first of several names that an object, its request, or metadata have a value for."""
    places = [raw, raw.get("metadata"), raw.get("request")]
    sides = (raw.get("request"), raw.get("response"))
    places += [side.get("metadata") for side in sides if isinstance(side, dict)]
    for place in places:
        if isinstance(place, dict):
            for key in keys:
                value = place.get(key)
                if isinstance(value, str | int) and value != "":
                    return str(value)
    return None


def group_of(raw: dict[str, Any], first: Iterable[object]) -> str:
    """The group that a logger names, else one of all calls with these first messages."""
    group = named(raw, GROUP_IDS)
    return identifier(group) if group is not None else f"prompt-{fingerprint(*first)}"


def times(raw: dict[str, Any]) -> tuple[float | None, float | None]:
    """When a call was sent and answered, as far as the log records it. Unix seconds.

    Raises DamagedError for what is no time.
    """
    places = [p for p in (raw, raw.get("metadata"), raw.get("response")) if isinstance(p, dict)]
    start_s = next((seconds(p[k]) for p in places for k in _STARTS if p.get(k) is not None), None)
    end_s = next((seconds(p[k]) for p in places for k in _ENDS if p.get(k) is not None), None)
    if end_s is None and start_s is not None:
        for place in places:
            for key, unit in _SPANS:
                if isinstance(place.get(key), int | float):
                    return start_s, start_s + place[key] * unit
    return start_s, end_s


def joined(session: str, calls: Sequence[LoggedCall], context: ImportContext) -> TrajectoryRecord:
    """The trajectory of calls that belong together, in the order of time where all have one."""
    ordered = list(calls)
    if all(call.start_s is not None for call in calls):
        ordered.sort(key=lambda call: call.start_s or 0.0)
    generations = [
        LoggedGeneration(
            output=c.output, input=c.input, cached=c.cached, start_s=c.start_s, end_s=c.end_s
        )
        for c in ordered
    ]
    for index, (g, call) in enumerate(zip(generations, ordered, strict=True)):
        g.tools = call.calls
        if index + 1 < len(ordered):
            after = ordered[index + 1]
            g.tools = g.tools or ((UNNAMED,) if after.after_tool else (USER,))
            g.until_s = after.start_s
            g.added = after.new if after.input is None else None
    derive_added(generations)
    return TrajectoryRecord(
        trajectory_id=session,
        group_id=ordered[0].group,
        workload=context.workload_or("chat"),
        prompt_tokens=generations[0].input,
        steps=steps_of(generations, context.notes),
        source=ordered[0].file,
        model=ordered[0].model,
    )
