"""TraceLab's rounds of coding agents: an LLM invocation a line, with events and tools in it.

Source: uw-syfi/TraceLab, README.md (data format), artifacts/utils/DB_SCHEMA.md and
example_sessions/sanitized/round_trace.jsonl. Its `round_id` is not unique: rounds are repeated.
"""

from collections.abc import Sequence

import msgspec

from heddle_trace.importers.clocks import elapsed, seconds
from heddle_trace.importers.generations import identifier, tool_name
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.sources import SourceFile
from heddle_trace.limits import RlStep, Tokens
from heddle_trace.observed.core import Observations, ObservedFormat, ParsedObservation, grouped
from heddle_trace.observed.schema import ObservedRequest

_GIVEN, _MADE = ("user_message", "tool_result"), ("reasoning", "text", "tool_call")


class _Event(msgspec.Struct):
    event_type: str
    timestamp: str | float | None = None


class _Tool(msgspec.Struct):
    tool_name: str | None = None
    result_at: str | float | None = None


class _Round(msgspec.Struct):
    session_id: str
    round_index: RlStep
    timing_events: list[_Event]
    round_id: str | None = None
    tools: list[_Tool] | None = None
    input_tokens_total: Tokens | None = None
    prefix_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class TraceLab(ObservedFormat):
    """A trajectory is a turn of a session: from a person's message to the last answer."""

    clock = "trajectory"

    def recognises(self, head: Head) -> bool:
        """Rows with events and the number of their round."""
        return head.any_row("session_id", "round_index", "timing_events")

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """A request a round."""
        rows = (row for each in sources for row in each.rows(notes, msgspec.json.Decoder(_Round)))
        for session, rounds in grouped(_Round, ((row.session_id, at, row) for at, row in rows)):
            seen: set[str] = set()
            part, step = -1, 0
            for where, row in sorted(rounds, key=lambda each: each[1].round_index):
                if row.round_id in seen:
                    notes.drop("repeated rounds")
                    continue
                seen |= {row.round_id} if row.round_id else set()
                if part < 0 or any(event.event_type == _GIVEN[0] for event in row.timing_events):
                    part, step = part + 1, 0
                with notes.guard(where):
                    request = _request(identifier(f"{session}/{part}"), step, row, notes)
                    if request is not None:
                        step += 1
                        yield ParsedObservation(where, request)


def _request(name: str, step: int, row: _Round, notes: Notes) -> ObservedRequest | None:
    times = [(event.event_type, seconds(event.timestamp)) for event in row.timing_events]
    made, given = ([at for what, at in times if what in k and at] for k in (_MADE, _GIVEN))
    if not made or not given:
        notes.drop("rounds without the time of their input or output")
        return None
    ready = max((at for at in given if at <= min(made)), default=None)
    if ready is None:
        raise DamagedError(
            f"timing_events: output begins {min(given) - min(made):.3f} s before its input"
        )
    results = [at for tool in row.tools or () if (at := seconds(tool.result_at)) is not None]
    last = max(made)
    return ObservedRequest(
        trajectory_id=name,
        step=step,
        start_s=ready,
        llm_s=round(last - ready, 6),
        tool=tool_name([tool.tool_name or "" for tool in row.tools or ()]),
        tool_s=elapsed(last, max(last, *results), "of a tool", notes) if results else None,
        input_tokens=row.input_tokens_total,
        cached_tokens=row.prefix_tokens,
        output_tokens=row.output_tokens,
    )
