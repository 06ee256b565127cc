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
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile
from heddle_trace.limits import Tokens
from heddle_trace.observed.protocol import Observations, Placed
from heddle_trace.observed.schema import Clock, Request

_GIVEN, _MADE = ("user_message", "tool_result"), ("reasoning", "text", "tool_call")


class _Event(msgspec.Struct):
    event_type: str
    timestamp: str | float | None = None


class _Tool(msgspec.Struct):
    tool_name: str | None = None
    result_at: str | float | None = None


class _Round(msgspec.Struct):
    session_id: str
    round_index: int
    timing_events: list[_Event]
    round_id: str | None = None
    tools: list[_Tool] | None = None
    input_tokens_total: Tokens | None = None
    prefix_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class _Part(msgspec.Struct, array_like=True):
    where: str
    round: _Round


_ROWS = msgspec.json.Decoder(_Round)


class TraceLab:
    """A trajectory is a turn of a session: from a person's message to the last answer."""

    clock: Clock = "trajectory"
    one_file = False

    def recognises(self, head: Head) -> bool:
        """Rows with events and the number of their round."""
        return head.any_row("session_id", "round_index", "timing_events")

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """A request a round."""
        with Sessions(_Part) as sessions:
            for source in sources:
                for where, row in source.rows(notes, _ROWS):
                    sessions.add(row.session_id, _Part(where, row))
            for session, parts in sessions:
                yield from _session(session, parts, notes)


def _session(session: str, parts: list[_Part], notes: Notes) -> Observations:
    parts.sort(key=lambda part: part.round.round_index)
    seen: set[str] = set()
    turn, step = -1, 0
    for part in parts:
        row = part.round
        if row.round_id in seen:
            notes.drop("repeated rounds")
            continue
        seen |= {row.round_id} if row.round_id else set()
        if turn < 0 or any(event.event_type == _GIVEN[0] for event in row.timing_events):
            turn, step = turn + 1, 0
        with notes.guard(part.where):
            request = _request(identifier(f"{session}/{turn}"), step, row, notes)
            if request is not None:
                step += 1
                yield Placed(part.where, request)


def _request(name: str, step: int, row: _Round, notes: Notes) -> Request | None:
    times = [(event.event_type, seconds(event.timestamp)) for event in row.timing_events]
    made = [at for kind, at in times if kind in _MADE and at is not None]
    given = [at for kind, at in times if kind in _GIVEN and at is not None]
    if not made or not given:
        notes.drop("rounds without the time of their input or output")
        return None
    first, last = min(made), max(made)
    ready = max((at for at in given if at <= first), default=None)
    if ready is None:
        raise DamagedError(
            f"timing_events: the output begins {min(given) - first:.3f} s before its input"
        )
    tools = row.tools or []
    results = [at for tool in tools if (at := seconds(tool.result_at)) is not None]
    return Request(
        trajectory_id=name,
        step=step,
        start_s=ready,
        llm_s=round(last - ready, 6),
        tool=tool_name([tool.tool_name or "" for tool in tools]),
        tool_s=elapsed(last, max(last, *results), "of a tool", notes) if results else None,
        input_tokens=row.input_tokens_total,
        cached_tokens=row.prefix_tokens,
        output_tokens=row.output_tokens,
    )
