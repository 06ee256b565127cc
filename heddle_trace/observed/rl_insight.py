"""RL-Insight's spans of verl's agent loops, as OTLP JSON or an object a span.

Source: verl-project/rl-insight, docs/monitor/agent_loop_protocol.md (spans `gateway_generation` by
`state_lane_id`, `turn` and `global_steps`) and TRAJECTORY_SPAN_METRIC_FIELD_ALIGNMENT.md (a span a
step of a trajectory, of which `trajectory.timing_source` may say that it was timed when it came).
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from heddle_trace.importers.generations import identifier, rl_step_of, tool_name
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.objects import head_objects, objects
from heddle_trace.importers.otel import NESTED, attributes_of, time_of
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.importers.span_fields import parsed_text, whole
from heddle_trace.limits import MAX_WAIT_S, Tokens
from heddle_trace.observed.core import Observations, ObservedFormat, ParsedObservation, grouped
from heddle_trace.observed.schema import ObservedRequest

_LANE: Final = "state_lane_id"
_SOURCES: Final = ("gateway", "trajectory")
_STARTS: Final = ("startTimeUnixNano", "start_time_unix_nano", "start_time_ns", "start_time")
_ENDS: Final = ("endTimeUnixNano", "end_time_unix_nano", "end_time_ns", "end_time")


class _Generation(msgspec.Struct, array_like=True):
    start_s: float
    end_s: float
    request: ObservedRequest


class RlInsight(ObservedFormat):
    """A trajectory is a lane; the time to its next generation is its tools'."""

    def recognises(self, head: Head) -> bool:
        """Spans of a lane."""
        return any(_LANE in attributes_of(raw) for raw in head_objects(head, NESTED))

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """A request a generation."""
        for _, made in grouped(_Generation, _generations(sources, notes)):
            made.sort(key=lambda each: each[1].start_s)
            after: list[_Generation | None] = [*(each for _, each in made[1:]), None]
            for step, ((where, each), following) in enumerate(zip(made, after, strict=True)):
                more: dict[str, Any] = {"tool": None}
                if following is not None:
                    more = {"tool_s": max(0.0, following.start_s - each.end_s)}
                yield ParsedObservation(
                    where, msgspec.structs.replace(each.request, step=step, **more)
                )


def _generations(
    sources: Sequence[SourceFile], notes: Notes
) -> Iterator[tuple[str, str, _Generation]]:
    for source in sources:
        for where, raw in objects(source, notes, NESTED):
            with notes.guard(where):
                found = attributes_of(raw)
                if found.get("trajectory.timing_source") == "receive_time":
                    notes.drop("spans that were timed when they were received")
                elif found.get("monitor.trace_source") in _SOURCES and _LANE in found:
                    yield str(found[_LANE]), where, _generation(raw, found)


def _generation(raw: dict[str, Any], found: dict[str, Any]) -> _Generation:
    start_s, end_s = (
        time_of(next((raw[key] for key in keys if raw.get(key) is not None), None))
        for keys in (_STARTS, _ENDS)
    )
    if start_s is None or end_s is None:
        raise DamagedError("span has no start and end time: export the spans with both")
    if not 0.0 <= end_s - start_s <= MAX_WAIT_S:
        raise DamagedError(f"span lasts {end_s - start_s:g} s, which no generation does")
    tools, uid = parsed_text(found.get("tools")), found.get("uid")
    counts = [whole(found.get(f"{key}_tokens")) for key in ("completion", "prompt")]
    made, given = converted(counts, list[Tokens | None])
    request = ObservedRequest(
        trajectory_id=identifier(str(found[_LANE])),
        step=0,
        group_id=identifier(str(uid)) if uid else None,
        rl_step=rl_step_of(whole(found.get("global_steps"))),
        start_s=start_s,
        llm_s=end_s - start_s,
        tool=tool_name(tuple(map(str, tools)) if isinstance(tools, list) and tools else ("",)),
        input_tokens=given,
        output_tokens=made,
    )
    return _Generation(start_s, end_s, request)
