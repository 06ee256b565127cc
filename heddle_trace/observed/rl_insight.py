"""RL-Insight's spans of verl's agent loops, as OTLP JSON or an object a span.

Source: verl-project/rl-insight, docs/monitor/agent_loop_protocol.md (spans `gateway_generation` by
`state_lane_id`, `turn` and `global_steps`) and TRAJECTORY_SPAN_METRIC_FIELD_ALIGNMENT.md (a span a
step of a trajectory, of which `trajectory.timing_source` may say that it was timed when it came).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from heddle_trace.importers.generations import identifier, rl_step_of, tool_name
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.objects import head_objects, objects
from heddle_trace.importers.otel import NESTED, attributes_of, time_of
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.importers.span_fields import parsed_text, whole
from heddle_trace.limits import MAX_STEPS, MAX_WAIT_S, Tokens
from heddle_trace.observed.core import Observations, ObservedFormat, ParsedObservation
from heddle_trace.observed.hosts import HostClocks, spans_of_hosts
from heddle_trace.observed.schema import ObservedRequest

_LANE: Final = "state_lane_id"
_SOURCES: Final = ("gateway", "trajectory")
_SESSION: Final = "session"
_NESTED: Final = {
    "resourceSpans": "resourceSpans.item",
    "batches": "batches.item",
    "spans": "spans.item",
}
_STARTS: Final = ("startTimeUnixNano", "start_time_unix_nano", "start_time_ns", "start_time")
_ENDS: Final = ("endTimeUnixNano", "end_time_unix_nano", "end_time_ns", "end_time")


class _Span(msgspec.Struct, array_like=True):
    """A generation, or with no request the session around those of its lane."""

    start_s: float
    end_s: float
    host: str
    step: int
    request: ObservedRequest | None

    def moved(self, by_s: float) -> "_Span":
        """On a clock that is ahead by so much."""
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)


class RlInsight(ObservedFormat):
    """A trajectory is a lane; the time to its next generation is its tools'."""

    def recognises(self, head: Head) -> bool:
        """Spans of a lane."""
        return any(_LANE in attributes_of(raw) for raw in head_objects(head, NESTED))

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """A request a generation, on one clock where hosts are named."""
        clocks = HostClocks()
        with Sessions(tuple[str, _Span]) as lanes:
            for lane, where, span in _spans(sources, notes):
                lanes.add(lane, (where, span))
                clocks.spans[span.host] += 1
            offsets: dict[str, float] = {}
            if len(clocks.spans) > 1:
                with notes.guard(str(sources[0].path)):
                    offsets = _offsets(lanes, clocks, notes)
            for _, spans in lanes:
                if offsets:
                    spans = [(at, span.moved(offsets.get(span.host, 0.0))) for at, span in spans]
                made = sorted((s for s in spans if s[1].request), key=lambda each: each[1].start_s)
                for step, ((where, each), after) in enumerate(zip_longest(made, made[1:])):
                    assert each.request is not None
                    more: dict[str, Any] = {"step": step, "start_s": each.start_s}
                    if after is None:
                        more["tool"] = None
                    else:
                        more["tool_s"] = max(0.0, after[1].start_s - each.end_s)
                    yield ParsedObservation(where, replace(each.request, **more))


def _offsets(
    lanes: Iterable[tuple[str, list[tuple[str, _Span]]]], clocks: HostClocks, notes: Notes
) -> dict[str, float]:
    """A generation of a later turn follows, and all are within their session."""
    for _, spans in lanes:
        made = sorted((s for _, s in spans if s.request), key=lambda each: each.step)
        for before, after in pairwise(made):
            if before.step < after.step:
                clocks.after(before.host, before.end_s, after.host, after.start_s)
        for around in (span for _, span in spans if span.request is None):
            for each in made:
                clocks.after(around.host, around.start_s, each.host, each.start_s)
                clocks.after(each.host, each.end_s, around.host, around.end_s)
    found = clocks.offsets()
    for host, by_s in found.items():
        notes.assume(
            f"spans of {host}, whose clock differs, moved by {by_s:+,.3f} s", clocks.spans[host]
        )
    return found


def _spans(sources: Sequence[SourceFile], notes: Notes) -> Iterator[tuple[str, str, _Span]]:
    for source in sources:
        for where, raw in objects(source, notes, _NESTED):
            for host, span in spans_of_hosts(raw):
                with notes.guard(where):
                    found = attributes_of(span)
                    kind = found.get("monitor.trace_source")
                    if found.get("trajectory.timing_source") == "receive_time":
                        notes.drop("spans that were timed when they were received")
                    elif kind in (*_SOURCES, _SESSION) and _LANE in found:
                        made = _generation(span, found, host, kind == _SESSION)
                        yield str(found[_LANE]), where, made


def _generation(raw: dict[str, Any], found: dict[str, Any], host: str, is_session: bool) -> _Span:
    start_s, end_s = (
        time_of(next(filter(None, map(raw.get, keys)), None)) for keys in (_STARTS, _ENDS)
    )
    if start_s is None or end_s is None:
        raise DamagedError("span has no start and end time: export the spans with both")
    if not 0.0 <= end_s - start_s <= MAX_WAIT_S:
        raise DamagedError(f"span lasts {end_s - start_s:g} s, which no generation does")
    step = whole(found.get("turn"))
    step = step if type(step) is int and 0 <= step <= MAX_STEPS else 0
    if is_session:
        return _Span(start_s, end_s, host, step, None)
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
    return _Span(start_s, end_s, host, step, request)
