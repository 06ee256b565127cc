"""Dynamo: request traces (`dynamo.request.trace.v1`) and Agentic Mooncake rows.

Source: ai-dynamo/dynamo, docs/agents and lib/data-gen. A trace holds `request_end` rows and, where
a harness reports them, `tool_end` and `tool_error` rows; a session may span several shards.
Agentic Mooncake rows name what they wait for, and how long after it; in version 2 (pull request
#13586; ai-dynamo/aisimulate) below a header, and with sessions that are unique in their play alone.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec

from heddle_trace.complete import USER
from heddle_trace.importers.generations import (
    UNNAMED,
    LoggedGeneration,
    derive_added,
    identifier,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.joining import PrefixJoin
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.protocol import ImportContext, Records
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile
from heddle_trace.limits import Tokens
from heddle_trace.schema import TrajectoryRecord

_SCHEMA: Final = "dynamo.request.trace.v1"
_AGENTIC: Final = "dynamo.agentic_mooncake"


class _Context(msgspec.Struct):
    session_id: str | None = None
    trajectory_id: str | None = None
    parent_session_id: str | None = None
    parent_trajectory_id: str | None = None


class _ToolCall(msgspec.Struct):
    name: str | None = None


class _Finish(msgspec.Struct):
    finish_reason: str | None = None
    tool_calls: list[_ToolCall] = []


class _Replay(msgspec.Struct):
    trace_block_size: int = 0
    input_length: Tokens | None = None
    input_sequence_hashes: list[int] = []


class _Request(msgspec.Struct):
    request_id: str
    model: str | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    request_received_ms: float | None = None
    total_time_ms: float | None = None
    finish_reason_metadata: _Finish | None = None
    replay: _Replay | None = None


class _Tool(msgspec.Struct):
    tool_class: str = UNNAMED
    status: str | None = None
    started_at_unix_ms: float | None = None
    ended_at_unix_ms: float | None = None
    duration_ms: float | None = None
    output_tokens: Tokens | None = None


class _Dependency(msgspec.Struct):
    request_id: str
    trigger: str
    delay_ms: float


class _Row(msgspec.Struct):
    """A row of a request trace, bare or wrapped, or one of Agentic Mooncake."""

    schema: str | None = None
    event_type: str | None = None
    event_time_unix_ms: float | None = None
    agent_context: _Context | None = None
    request: _Request | None = None
    tool: _Tool | None = None
    event: "_Row | None" = None
    session_id: str | None = None
    request_id: str | None = None
    input_length: Tokens | None = None
    input_tokens: Tokens | None = None
    output_length: Tokens | None = None
    output_tokens: Tokens | None = None
    timestamp: float | None = None
    delay: float | None = None
    tool_wait_ms: float | None = None
    wait_for: list[str] = []
    tool_events: list[_Tool] = []
    play_id: str | None = None
    model: str | None = None
    not_before_ms: float | None = None
    dependencies: list[_Dependency] = []


class _Part(msgspec.Struct, array_like=True):
    """A generation, or with `tool` set the end of a tool call. Times in seconds."""

    where: str
    tree: str
    parent: str | None
    start_s: float | None
    end_s: float | None
    tool: str | None = None
    failed: bool = False
    output: int | None = None
    input: int | None = None
    cached: int | None = None
    calls: tuple[str, ...] = ()
    stopped: bool = False
    model: str | None = None
    waited_s: float | None = None
    """Recorded between what this generation waited for and its start."""
    before: tuple[str, ...] = ()
    before_failed: bool = False
    name: str = ""
    waits_for: tuple[str, ...] = ()


_ROWS = msgspec.json.Decoder(_Row)


class Dynamo:
    """Requests of agents and chats to a Dynamo frontend."""

    assumes = (
        "the wait after a generation runs from its end to the next request of its session: tools, "
        "the agent's own work, and sub-agents that it waited for",
        "a generation that stopped by itself and was followed by another waited for a person",
        "requests without a session are joined by the hashes of their prompts, as in mooncake",
    )

    def recognises(self, head: Head) -> bool:
        """Rows of the schema, bare or wrapped, or rows that name what they wait for."""
        return any(
            row.get("schema") in (_SCHEMA, _AGENTIC)
            or (isinstance(row.get("event"), dict) and row["event"].get("schema") == _SCHEMA)
            or ("request_id" in row and ("wait_for" in row or "request_kind" in row))
            for row in head.rows
        )

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record a session; all files are one trace."""
        rows = _Rows(context)
        with Sessions(_Part) as sessions:
            for source in sources:
                for where, row in source.rows(context.notes, _ROWS):
                    with context.notes.guard(where):
                        kept = rows.part(row.event or row, where, source)
                        if kept is not None:
                            sessions.add(*kept)
            rows.join.note_forgotten("requests", context.notes)
            yield from sessions.records(
                context.notes, partial(_record, began_s=rows.began_s, context=context)
            )


class _Rows:
    """Converts rows to parts; times count from the start of the trace."""

    def __init__(self, context: ImportContext) -> None:
        self.join = PrefixJoin()
        self.began_s = float("inf")
        self._context = context

    def part(self, row: _Row, where: str, source: SourceFile) -> tuple[str, _Part] | None:
        """The session and the part of a row; None unless it is a generation or a tool."""
        if row.event_type in ("tool_end", "tool_error"):
            return self._tool(row, where)
        if row.event_type == "request_end" and row.request is not None:
            return self._request(row, row.request, where, source)
        if row.event_type is None and row.request_id is not None:
            return self._agentic(row, row.request_id, where)
        if row.schema == _AGENTIC:
            return None
        if row.event_type is None:
            raise DamagedError("is neither an event of a request trace nor a request with an id")
        self._context.notes.drop(f"{identifier(row.event_type)} rows")
        return None

    def _request(
        self, row: _Row, request: _Request, where: str, source: SourceFile
    ) -> tuple[str, _Part]:
        agent_context, replay = row.agent_context or _Context(), request.replay or _Replay()
        input_tokens = (
            request.input_tokens if request.input_tokens is not None else replay.input_length
        )
        if request.output_tokens is None:
            raise DamagedError("request.output_tokens is missing")
        end_s = None if row.event_time_unix_ms is None else row.event_time_unix_ms / 1e3
        start_s = None if request.request_received_ms is None else request.request_received_ms / 1e3
        if request.total_time_ms is not None and start_s is not None:
            end_s = start_s + request.total_time_ms / 1e3
        finish = request.finish_reason_metadata or _Finish()
        session = agent_context.trajectory_id or agent_context.session_id
        trajectory = tree = identifier(session or request.request_id)
        cached = request.cached_tokens
        if session is None and replay.trace_block_size > 0 and input_tokens is not None:
            full = min(input_tokens // replay.trace_block_size, len(replay.input_sequence_hashes))
            place = self.join.place(
                trajectory,
                replay.input_sequence_hashes,
                full=full,
                input_tokens=input_tokens,
                output_tokens=request.output_tokens,
            )
            trajectory, tree = place.trajectory, place.tree
        self.began_s = min(self.began_s, start_s if start_s is not None else float("inf"))
        return trajectory, _Part(
            where=where,
            tree=tree,
            parent=agent_context.parent_trajectory_id or agent_context.parent_session_id,
            start_s=start_s,
            end_s=end_s,
            output=request.output_tokens,
            input=input_tokens,
            cached=cached,
            calls=tuple(call.name or UNNAMED for call in finish.tool_calls),
            stopped=finish.finish_reason == "stop",
            model=request.model,
        )

    def _tool(self, row: _Row, where: str) -> tuple[str, _Part] | None:
        agent_context, tool = row.agent_context or _Context(), row.tool
        session = agent_context.trajectory_id or agent_context.session_id or row.session_id
        if session is None or tool is None:
            self._context.notes.drop("tool rows without a session")
            return None
        end_ms = (
            tool.ended_at_unix_ms if tool.ended_at_unix_ms is not None else row.event_time_unix_ms
        )
        start_ms = tool.started_at_unix_ms
        if start_ms is None and end_ms is not None:
            start_ms = end_ms - (tool.duration_ms or 0.0)
        if start_ms is not None and end_ms is not None and start_ms > end_ms:
            raise DamagedError(f"the tool ends {start_ms - end_ms:g} ms before it starts")
        name = identifier(session)
        return name, _Part(
            where=where,
            tree=name,
            parent=None,
            start_s=None if start_ms is None else start_ms / 1e3,
            end_s=None if end_ms is None else end_ms / 1e3,
            tool=tool.tool_class,
            failed=row.event_type == "tool_error" or _failed(tool),
        )

    def _agentic(self, row: _Row, request_id: str, where: str) -> tuple[str, _Part]:
        output = row.output_length if row.output_length is not None else row.output_tokens
        if output is None:
            raise DamagedError("output_length is missing")
        session = row.session_id or request_id
        session = identifier(f"{row.play_id}/{session}" if row.play_id else session)
        after = row.dependencies
        waits = [wait for wait in (row.delay, row.tool_wait_ms) if wait is not None]
        if after and all(each.trigger == "completion" for each in after):
            waits.append(max(each.delay_ms for each in after))
        start_ms = row.timestamp if row.not_before_ms is None else row.not_before_ms
        start_s = None if start_ms is None else start_ms / 1e3
        self.began_s = min(self.began_s, start_s if start_s is not None else float("inf"))
        return session, _Part(
            where=where,
            tree=identifier(row.play_id or session),
            parent=None,
            start_s=start_s,
            end_s=None,
            output=output,
            model=row.model,
            input=row.input_length if row.input_length is not None else row.input_tokens,
            waited_s=sum(waits) / 1e3 if waits else None,
            before=tuple(tool.tool_class for tool in row.tool_events),
            before_failed=any(_failed(tool) for tool in row.tool_events),
            name=request_id,
            waits_for=(*row.wait_for, *(each.request_id for each in after)),
        )


def _failed(tool: _Tool) -> bool:
    return (tool.status or "succeeded").lower() not in ("succeeded", "success", "ok", "completed")


def _generations(parts: Sequence[_Part], context: ImportContext) -> list[LoggedGeneration]:
    """The generations of a session in the order of their starts, with the tools between them."""
    requests = [part for part in parts if part.tool is None]
    if all(part.start_s is not None for part in requests):
        ordered = sorted(requests, key=lambda part: (part.start_s or 0.0, part.end_s or 0.0))
        if ordered != requests:
            context.notes.assume("sessions whose lines were not in the order of time, put in order")
        requests = ordered
    tools = [part for part in parts if part.tool is not None]
    generations = [
        LoggedGeneration(
            output=part.output,
            input=part.input,
            cached=part.cached,
            start_s=part.start_s,
            end_s=part.end_s,
            tools=part.calls,
        )
        for part in requests
    ]
    for index, g in enumerate(generations):
        after = requests[index + 1] if index + 1 < len(requests) else None
        _follow(g, requests[index], after, tools, context.notes)
    derive_added(generations)
    return generations


def _follow(
    g: LoggedGeneration, part: _Part, after: _Part | None, tools: Sequence[_Part], notes: Notes
) -> None:
    """Record what happened between a generation and the next one of its session."""
    until_s = after.start_s if after is not None else None
    ran = [
        tool
        for tool in tools
        if tool.end_s is not None
        and (g.end_s is None or tool.end_s >= g.end_s)
        and (until_s is None or tool.end_s <= until_s)
        and (after is not None or bool(g.tools))
    ]
    if ran:
        g.tools = g.tools or tuple(tool.tool or UNNAMED for tool in ran)
        g.ok = not any(tool.failed for tool in ran)
    if after is None:
        g.until_s = max((tool.end_s for tool in ran if tool.end_s is not None), default=None)
        return
    if after.before:
        g.tools, g.ok = after.before, not after.before_failed
    g.tools = g.tools or ((USER,) if part.stopped else (UNNAMED,))
    g.wait_s, g.until_s = after.waited_s, until_s
    if any(name != part.name for name in after.waits_for):
        g.wait_s = None  # recorded from the end of another session's request, not from this one's
        notes.assume("steps that waited for another session: how long, not recorded")


def _record(
    session: str, parts: Sequence[_Part], began_s: float, context: ImportContext
) -> TrajectoryRecord | None:
    generations = _generations(parts, context)
    if not generations:
        context.notes.drop("sessions without a generation")
        return None
    first_s = generations[0].start_s
    return TrajectoryRecord(
        trajectory_id=session,
        group_id=parts[0].tree,
        workload=context.workload_or("agent"),
        prompt_tokens=generations[0].input,
        arrival_s=None if first_s is None else round(first_s - began_s, 6),
        steps=steps_of(generations, context.notes),
        model=next((part.model for part in parts if part.model), None),
        parent_id=next((part.parent for part in parts if part.parent), None),
    )
