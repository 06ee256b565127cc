"""Claude Code: session logs, one JSON object a line; a generation is one line a content block.

Source: the logs themselves (`.claude/projects/*/*.jsonl`, versions 1 and 2); no schema of them is
published. Sub-agents are in the file of their session (`isSidechain`) or in one of their own
(`agentId`).
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from heddle_trace.importers.chat import Message, Role, generations_of, prompt_of, text_of
from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.generations import UNNAMED, fingerprint, identifier, steps_of
from heddle_trace.importers.heads import Head
from heddle_trace.importers.protocol import ImportContext, ParsedRecord, Records
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile
from heddle_trace.limits import Tokens
from heddle_trace.schema import TrajectoryRecord

_MAIN: Final = ""


class _Usage(msgspec.Struct):
    input_tokens: Tokens = 0
    cache_creation_input_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class _Body(msgspec.Struct):
    role: str | None = None
    id: str | None = None
    model: str | None = None
    content: Any = None
    usage: _Usage | None = None
    stop_reason: str | None = None


class _Line(msgspec.Struct, rename="camel"):
    type: str
    session_id: str | None = None
    uuid: str | None = None
    parent_uuid: str | None = None
    agent_id: str | None = None
    is_sidechain: bool = False
    is_meta: bool = False
    is_api_error_message: bool = False
    cwd: str | None = None
    timestamp: str | float | None = None
    message: _Body | None = None


class _Part(msgspec.Struct, array_like=True):
    """One line, without its text. `began` is the fingerprint of a person's message."""

    where: str
    file: str
    role: Role
    uuid: str
    parent: str
    side: bool
    agent: str
    time_s: float | None
    tokens: int
    calls: tuple[str, ...] = ()
    failed: bool | None = None
    began: str = ""
    message_id: str = ""
    model: str | None = None
    output: int | None = None
    final: bool = False
    input: int | None = None
    cached: int | None = None


_LINES = msgspec.json.Decoder(_Line)


class ClaudeCode:
    """Sessions of Claude Code, and their sub-agents."""

    assumes = (
        "a tool's time runs from the last block of a generation to the last result; calls that a "
        "person had to approve include their time",
        "output tokens are the log's where it says that the generation ended, else counted over "
        "text, thinking and calls, since the log then has only a first guess",
        "sessions that begin with the same words in the same folder are a group",
    )

    def recognises(self, head: Head) -> bool:
        """Lines of a session with messages, or with what comes before the first."""
        return any("type" in row and ("sessionId" in row or "leafUuid" in row) for row in head.rows)

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record a session, and one for each of its sub-agents."""
        with Sessions(_Part) as sessions:
            for source in sources:
                for where, line in source.rows(context.notes, _LINES):
                    with context.notes.guard(where):
                        part = _part(line, where, source, context)
                        if part is not None:
                            sessions.add(identifier(line.session_id or source.label), part)
            for session, parts in sessions:
                for lane, members in _lanes(parts, context).items():
                    with context.notes.guard(members[0].where):
                        record = _record(session, lane, members, context)
                        if record is not None:
                            yield ParsedRecord(members[0].where, record)


def _part(line: _Line, where: str, source: SourceFile, context: ImportContext) -> _Part | None:
    body = line.message
    if line.type not in ("user", "assistant") or body is None:
        context.notes.drop("lines that are no message")
        return None
    if line.is_api_error_message or body.model == "<synthetic>":
        context.notes.drop("messages that no model made, such as errors")
        return None
    part = _Part(
        where=where,
        file=source.path.name,
        role="assistant" if line.type == "assistant" else "user",
        uuid=line.uuid or where,
        parent=line.parent_uuid or "",
        side=line.is_sidechain,
        agent=line.agent_id or "",
        time_s=seconds(line.timestamp),
        tokens=0,
    )
    blocks = body.content if isinstance(body.content, list) else [body.content]
    if line.type == "assistant":
        _generated(part, body, blocks, context)
    else:
        _appended(part, line, blocks, context)
    return part


def _generated(part: _Part, body: _Body, blocks: Sequence[Any], context: ImportContext) -> None:
    usage = body.usage or _Usage()
    cached = usage.cache_read_input_tokens or 0
    part.message_id, part.model = body.id or part.uuid, body.model
    part.output, part.final = usage.output_tokens, body.stop_reason is not None
    part.input = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + cached or None
    part.cached = usage.cache_read_input_tokens
    for block in blocks:
        if isinstance(block, dict) and block.get("type") in ("tool_use", "server_tool_use"):
            name = str(block.get("name") or UNNAMED)
            part.calls = (*part.calls, name)
            given = msgspec.json.encode(block.get("input")).decode()
            part.tokens += context.tokens.count(name + given)
        elif not (isinstance(block, dict) and block.get("type") == "redacted_thinking"):
            part.tokens += text_of(block, context.tokens, context.notes)


def _appended(part: _Part, line: _Line, blocks: Sequence[Any], context: ImportContext) -> None:
    results = [b for b in blocks if isinstance(b, dict) and b.get("type") == "tool_result"]
    for block in blocks:
        inner = block.get("content") if isinstance(block, dict) and block in results else block
        part.tokens += text_of(inner, context.tokens, context.notes)
    if results:
        part.role = "tool"
        part.failed = any(bool(block.get("is_error")) for block in results)
    elif line.is_meta:
        part.role = "system"
    else:
        part.began = fingerprint(line.cwd, msgspec.json.encode(blocks))


def _lanes(parts: Sequence[_Part], context: ImportContext) -> dict[str, list[_Part]]:
    """The lines of a session by the agent they belong to, each line once."""
    lanes: dict[str, list[_Part]] = {}
    roots: dict[str, str] = {}
    for part in parts:
        if part.uuid in roots:
            context.notes.drop("lines that repeat an earlier one of their session")
            continue
        lane = part.agent
        if part.side and not lane:
            # A sub-agent without a name is identified by the root of its lines.
            lane = roots.get(part.parent) or f"side-{fingerprint(part.uuid)[:8]}"
        roots[part.uuid] = lane if part.side else _MAIN
        lanes.setdefault(lane, []).append(part)
    return lanes


def _record(
    session: str, lane: str, parts: Sequence[_Part], context: ImportContext
) -> TrajectoryRecord | None:
    messages = _messages(parts)
    generations = generations_of(messages, context.notes)
    if not generations:
        context.notes.drop("sessions without a generation")
        return None
    began = next((part.began for part in parts if part.began), "")
    first = next(part for part in parts if part.role == "assistant")
    return TrajectoryRecord(
        trajectory_id=identifier(f"{session}/{lane}") if lane else session,
        group_id=f"prompt-{began}" if began else session,
        workload=context.workload_or("coding-session"),
        prompt_tokens=prompt_of(messages),
        steps=steps_of(generations, context.notes),
        source=first.file,
        model=first.model,
        agent="claude-code/sub-agent" if lane else "claude-code",
        parent_id=session if lane else None,
    )


def _messages(parts: Sequence[_Part]) -> list[Message]:
    """The lines as messages; those of one generation as one."""
    messages: list[Message] = []
    generated: dict[str, Message] = {}
    for part in parts:
        message = generated.get(part.message_id) if part.role == "assistant" else None
        if message is None:
            before = messages[-1].time_s if messages else None
            message = Message(part.role, 0, start_s=before, failed=part.failed)
            messages.append(message)
            if part.role == "assistant":
                generated[part.message_id] = message
        message.tokens += part.tokens
        message.calls = (*message.calls, *part.calls)
        message.time_s = part.time_s if part.time_s is not None else message.time_s
        message.input = part.input if part.input is not None else message.input
        message.cached = part.cached if part.cached is not None else message.cached
        if part.output is not None and (part.final or part.output > message.tokens):
            message.output = max(part.output, message.output or 0)
    return messages
