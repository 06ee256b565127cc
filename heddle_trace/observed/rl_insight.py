"""RL-Insight's spans of verl's agent loops, as OTLP JSON or an object a span.

Source: verl-project/rl-insight, docs/monitor/agent_loop_protocol.md (spans `gateway_generation` by
`state_lane_id`, `turn` and `global_steps`) and TRAJECTORY_SPAN_METRIC_FIELD_ALIGNMENT.md (a span a
step of a trajectory, of which `trajectory.timing_source` may say that it was timed when it came).
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from heddle_trace.importers.generations import identifier, rl_step_of, tool_name
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.objects import head_objects, objects
from heddle_trace.importers.otel import NESTED, attributes_of, time_of
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile
from heddle_trace.importers.span_fields import parsed_text, whole
from heddle_trace.observed.protocol import Observations, Placed
from heddle_trace.observed.schema import Clock, Request

_LANE: Final = "state_lane_id"
_SOURCES: Final = ("gateway", "trajectory")
_STARTS: Final = ("startTimeUnixNano", "start_time_unix_nano", "start_time_ns", "start_time")
_ENDS: Final = ("endTimeUnixNano", "end_time_unix_nano", "end_time_ns", "end_time")


class _Turn(msgspec.Struct, array_like=True):
    where: str
    start_s: float
    end_s: float
    rl_step: int | None
    group: str | None
    tools: tuple[str, ...]
    input: int | None
    output: int | None


class RlInsight:
    """A trajectory is a lane; the time to its next generation is its tools'."""

    clock: Clock = "shared"
    one_file = False

    def recognises(self, head: Head) -> bool:
        """Spans of a lane."""
        return any(_LANE in attributes_of(raw) for raw in head_objects(head, NESTED))

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """A request a generation."""
        with Sessions(_Turn) as lanes:
            for source in sources:
                for where, raw in objects(source, notes, NESTED):
                    with notes.guard(where):
                        found = attributes_of(raw)
                        if found.get("trajectory.timing_source") == "receive_time":
                            notes.drop("spans that were timed when they were received")
                        elif found.get("monitor.trace_source") in _SOURCES and _LANE in found:
                            lanes.add(str(found[_LANE]), _turn(raw, found, where))
            for lane, turns in lanes:
                turns.sort(key=lambda turn: turn.start_s)
                after: list[_Turn | None] = [*turns[1:], None]
                for step, (turn, following) in enumerate(zip(turns, after, strict=True)):
                    yield Placed(turn.where, _request(identifier(lane), step, turn, following))


def _request(lane: str, step: int, turn: _Turn, following: _Turn | None) -> Request:
    waited_s = None if following is None else max(0.0, following.start_s - turn.end_s)
    return Request(
        trajectory_id=lane,
        group_id=turn.group,
        step=step,
        rl_step=turn.rl_step,
        start_s=turn.start_s,
        llm_s=turn.end_s - turn.start_s,
        tool=None if waited_s is None else tool_name(turn.tools or ("",)),
        tool_s=waited_s,
        input_tokens=turn.input,
        output_tokens=turn.output,
    )


def _turn(raw: dict[str, Any], found: dict[str, Any], where: str) -> _Turn:
    start_s, end_s = (
        time_of(next((raw[key] for key in keys if raw.get(key) is not None), None))
        for keys in (_STARTS, _ENDS)
    )
    if start_s is None or end_s is None:
        raise DamagedError("span has no start and end time: export the spans with both")
    if end_s < start_s:
        raise DamagedError(f"span ends {start_s - end_s:g} s before it begins")
    tools = parsed_text(found.get("tools"))
    uid = found.get("uid")
    return _Turn(
        where=where,
        start_s=start_s,
        end_s=end_s,
        rl_step=rl_step_of(whole(found.get("global_steps"))),
        group=identifier(str(uid)) if uid else None,
        tools=tuple(map(str, tools)) if isinstance(tools, list) else (),
        input=_count(found.get("prompt_tokens")),
        output=_count(found.get("completion_tokens")),
    )


def _count(value: Any) -> int | None:
    number = whole(value)
    return number if isinstance(number, int) and not isinstance(number, bool) else None
