"""Claude Code: session logs, one JSON object a line; a generation is one line a content block.

Source: the logs themselves (`.claude/projects/*/*.jsonl`, versions 1 and 2); no schema of them is
published. Sub-agents are in the file of their session (`isSidechain`) or in one of their own
(`agentId`).
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from heddle_trace.importers.chat import Message, generations_of, prompt_of, text_of
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
    """One line, its message without text. `began` is the fingerprint of a person's message."""

    where: str
    file: str
    uuid: str
    parent: str
    side: bool
    agent: str
    message: Message
    began: str = ""
    message_id: str = ""
    model: str | None = None
    final: bool = False


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
        uuid=line.uuid or where,
        parent=line.parent_uuid or "",
        side=line.is_sidechain,
        agent=line.agent_id or "",
        message=Message(
            "assistant" if line.type == "assistant" else "user", 0, time_s=seconds(line.timestamp)
        ),
    )
    blocks = body.content if isinstance(body.content, list) else [body.content]
    if line.type == "assistant":
        _generated(part, body, blocks, context)
    else:
        _appended(part, line, blocks, context)
    return part


def _generated(part: _Part, body: _Body, blocks: Sequence[Any], context: ImportContext) -> None:
    usage = body.usage or _Usage()
    cached, message = usage.cache_read_input_tokens or 0, part.message
    part.message_id, part.model = body.id or part.uuid, body.model
    message.output, part.final = usage.output_tokens, body.stop_reason is not None
    message.input = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + cached or None
    message.cached = usage.cache_read_input_tokens
    for block in blocks:
        if isinstance(block, dict) and block.get("type") in ("tool_use", "server_tool_use"):
            name = str(block.get("name") or UNNAMED)
            message.calls = (*message.calls, name)
            given = msgspec.json.encode(block.get("input")).decode()
            message.tokens += context.tokens.count(name + given)
        elif not (isinstance(block, dict) and block.get("type") == "redacted_thinking"):
            message.tokens += text_of(block, context.tokens, context.notes)


def _appended(part: _Part, line: _Line, blocks: Sequence[Any], context: ImportContext) -> None:
    results = [b for b in blocks if isinstance(b, dict) and b.get("type") == "tool_result"]
    for block in blocks:
        inner = block.get("content") if isinstance(block, dict) and block in results else block
        part.message.tokens += text_of(inner, context.tokens, context.notes)
    if results:
        part.message.role = "tool"
        part.message.failed = any(bool(block.get("is_error")) for block in results)
    elif line.is_meta:
        part.message.role = "system"
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
    first = next(part for part in parts if part.message.role == "assistant")
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
        own = part.message
        message = generated.get(part.message_id) if own.role == "assistant" else None
        if message is None:
            before = messages[-1].time_s if messages else None
            message = Message(own.role, 0, start_s=before, failed=own.failed)
            messages.append(message)
            if own.role == "assistant":
                generated[part.message_id] = message
        message.tokens += own.tokens
        message.calls = (*message.calls, *own.calls)
        message.time_s = own.time_s if own.time_s is not None else message.time_s
        message.input = own.input if own.input is not None else message.input
        message.cached = own.cached if own.cached is not None else message.cached
        if own.output is not None and (part.final or own.output > message.tokens):
            message.output = max(own.output, message.output or 0)
    return messages
