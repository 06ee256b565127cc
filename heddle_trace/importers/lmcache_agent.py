"""LMCache agent traces: one request a line, with the whole text of prompt and answer.

Source: LMCache/lmcache-agent-trace. `timestamp` is a Unix time in microseconds at which a request
was sent; when it ended is not recorded.
"""

from collections.abc import Iterator, Sequence

import msgspec

from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.generations import (
    UNNAMED,
    LoggedGeneration,
    derive_added,
    identifier,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.protocol import ImportContext, ParsedRecord
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile
from heddle_trace.schema import TrajectoryRecord


class _Row(msgspec.Struct):
    timestamp: float | str
    input: str
    output: str
    session_id: str


class _Part(msgspec.Struct, array_like=True):
    where: str
    file: str
    time_s: float
    input: int
    output: int


_ROWS = msgspec.json.Decoder(_Row)


class LmcacheAgent:
    """Sessions of agents; requests of a session in the order of their times."""

    assumes = (
        "a request's time is when it was sent; how long it and the tool after it took is not "
        "recorded",
        "between two requests of a session a tool ran, of a name that is not recorded",
        "nothing is known to be repeated: every session is a group of its own",
    )

    def recognises(self, head: Head) -> bool:
        """Rows with input, output and a session."""
        return head.any_row("timestamp", "input", "output", "session_id")

    def records(
        self, sources: Sequence[SourceFile], context: ImportContext
    ) -> Iterator[ParsedRecord]:
        """One record a session, which may go on from file to file."""
        with Sessions(_Part) as sessions:
            for source in sources:
                for where, row in source.rows(context.notes, _ROWS):
                    with context.notes.guard(where):
                        sessions.add(identifier(row.session_id), _part(row, where, source, context))
            for session, parts in sessions:
                with context.notes.guard(parts[0].where):
                    yield ParsedRecord(parts[0].where, _record(session, parts, context))


def _part(row: _Row, where: str, source: SourceFile, context: ImportContext) -> _Part:
    return _Part(
        where=where,
        file=source.path.name,
        time_s=seconds(row.timestamp) or 0.0,
        input=context.tokens.count(row.input),
        output=context.tokens.count(row.output),
    )


def _record(session: str, parts: Sequence[_Part], context: ImportContext) -> TrajectoryRecord:
    ordered = sorted(parts, key=lambda part: part.time_s)
    if ordered != list(parts):
        context.notes.assume("sessions whose lines were not in the order of time, put in order")
    generations = [
        LoggedGeneration(output=p.output, input=p.input, start_s=p.time_s) for p in ordered
    ]
    for g in generations[:-1]:
        g.tools = (UNNAMED,)
    derive_added(generations)
    return TrajectoryRecord(
        trajectory_id=session,
        group_id=session,
        workload=context.workload_or("agent"),
        prompt_tokens=generations[0].input,
        steps=steps_of(generations, context.notes),
        source=parts[0].file,
    )
