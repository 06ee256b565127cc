"""Chat logs with tool calls, in OpenAI's message format.

Source: OpenAI's chat completions API; the fields around the messages depend on the logger.
Two kinds are read. *Conversations*: objects with `messages`, as JSON lines, or in a JSON array, or
one array of messages. *Calls*: JSON lines with a `request` (or its `messages`) and the `response`,
as proxies write them; they are joined by a session id where there is one, else where the messages
of a later call begin with those of an earlier one and its answer.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from heddle_trace.complete import USER
from heddle_trace.importers.chat import Message, generations_of, prompt_of
from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.generations import (
    UNNAMED,
    LoggedGeneration,
    derive_added,
    fingerprint,
    identifier,
    reward_of,
    rl_step_of,
    steps_of,
)
from heddle_trace.importers.heads import Head, head_of
from heddle_trace.importers.joining import PrefixJoin
from heddle_trace.importers.notes import DamagedError
from heddle_trace.importers.openai_messages import ChatMessage, Usage, message_of
from heddle_trace.importers.protocol import ImportContext, ParsedRecord
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.schema import TrajectoryRecord

_IDS: Final = ("trajectory_id", "session_id", "conversation_id", "thread_id", "trace_id")
_GROUPS: Final = ("group_id", "task_id", "prompt_id", "problem_id", "instance_id", "question_id")
_STARTS: Final = ("timestamp", "start_time", "started_at", "created_at", "created")
_ENDS: Final = ("end_time", "ended_at", "completed_at")
_REWARDS: Final = ("reward", "score")
_SPANS: Final = (
    ("duration_s", 1.0),
    ("latency_s", 1.0),
    ("duration_ms", 1e-3),
    ("latency_ms", 1e-3),
)


class _Choice(msgspec.Struct):
    message: ChatMessage | None = None
    finish_reason: str | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    model: str | None = None


class _Request(msgspec.Struct):
    messages: list[ChatMessage] | None = None
    model: str | None = None


class _Row(msgspec.Struct):
    """A line; ids and times go by many names, and are looked up in the line itself."""

    messages: list[ChatMessage] | None = None
    request: _Request | None = None
    response: _Response | None = None
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    model: str | None = None


class _Part(msgspec.Struct, array_like=True):
    """One call, without its text. `new`: tokens of messages that the call before did not have."""

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
    failed: bool | None
    model: str | None


class OpenaiChat:
    """Conversations, or the calls that they were made of."""

    assumes = (
        "the time of a message is when it was written; words of a person after a generation are "
        "waited for as 'user', and are no tool time",
        "conversations without a group or task id are a group where they begin with the same "
        "messages",
    )

    def recognises(self, head: Head) -> bool:
        """Objects with messages that have roles, alone or in a request; or a list of such."""
        document = head.document
        if isinstance(document, list):
            item = head.item()
            return "role" in item or _has_messages(item)
        return any(_has_messages(row) for row in head.rows) or _has_messages(document)

    def records(
        self, sources: Sequence[SourceFile], context: ImportContext
    ) -> Iterator[ParsedRecord]:
        """One record a conversation."""
        with Sessions(_Part) as sessions:
            calls = _Calls(context)
            for source in sources:
                for number, (where, raw) in enumerate(_objects(source, context), start=1):
                    with context.notes.guard(where):
                        row = converted(raw, _Row)
                        name = f"{source.label}/{number}"
                        answer = _answer(row)
                        if answer is None:
                            record = _conversation(row, raw, name, source, context)
                            if record is not None:
                                yield ParsedRecord(where, record)
                        else:
                            sessions.add(*calls.part(row, raw, answer, name, where, source))
            if calls.join.forgotten:
                context.notes.assume(
                    "calls too old to be continued, to bound memory", calls.join.forgotten
                )
            for session, parts in sessions:
                with context.notes.guard(parts[0].where):
                    yield ParsedRecord(parts[0].where, _joined(session, parts, context))


def _has_messages(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    messages = value.get("messages")
    if messages is None and isinstance(value.get("request"), dict):
        messages = value["request"].get("messages")
    return isinstance(messages, list) and (
        not messages or (isinstance(messages[0], dict) and "role" in messages[0])
    )


def _objects(source: SourceFile, context: ImportContext) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file: its lines, the items of its array, or all of it."""
    head = head_of(source)
    if head.rows and not isinstance(head.document, list):
        yield from source.rows(context.notes, msgspec.json.Decoder(dict[str, Any]))
    elif "role" in head.item():
        # One array of messages is one conversation; its messages are read one by one.
        before = context.notes.damaged
        messages = [message for _, message in source.items(context.notes, "item", dict[str, Any])]
        if context.notes.damaged > before:
            context.notes.drop("trajectories of which a part is damaged")
        else:
            yield str(source.path), {"messages": messages}
    elif isinstance(head.document, list):
        yield from source.items(context.notes, "item", dict[str, Any])
    else:
        yield from source.items(context.notes, "", dict[str, Any])


def _answer(row: _Row) -> ChatMessage | None:
    """The message that a call was answered with; None for a conversation."""
    choices = row.response.choices if row.response is not None else row.choices
    if choices is None:
        return None
    if not choices or choices[0].message is None:
        raise DamagedError("response.choices: has no message; a call without an answer")
    return choices[0].message


def _named(raw: dict[str, Any], keys: Sequence[str]) -> str | None:
    """The first of several names that an object, or its metadata, has a value for."""
    for place in (raw, raw.get("metadata"), raw.get("request")):
        if isinstance(place, dict):
            for key in keys:
                value = place.get(key)
                if isinstance(value, str | int) and value != "":
                    return str(value)
    return None


def _group(raw: dict[str, Any], messages: Sequence[ChatMessage]) -> str:
    named = _named(raw, _GROUPS)
    if named is not None:
        return identifier(named)
    first = []
    for message in messages:
        if message.role in ("assistant", "model", "ai"):
            break
        first.append((message.role, msgspec.json.encode(message.content)))
    return f"prompt-{fingerprint(*first)}"


def _conversation(
    row: _Row, raw: dict[str, Any], name: str, source: SourceFile, context: ImportContext
) -> TrajectoryRecord | None:
    if row.messages is None:
        raise DamagedError("has neither messages nor a request and its response")
    messages: list[Message] = []
    for chat in row.messages:
        message = message_of(chat, context)
        if message.role == "assistant" and messages:
            message.start_s = messages[-1].time_s
        messages.append(message)
    generations = generations_of(messages, context.notes)
    if not generations:
        context.notes.drop("conversations without a generation")
        return None
    outcome = raw.get("success", raw.get("resolved"))
    return TrajectoryRecord(
        trajectory_id=identifier(_named(raw, (*_IDS, "id", "uuid")) or name),
        group_id=_group(raw, row.messages),
        workload=context.workload_or("chat"),
        prompt_tokens=prompt_of(messages),
        steps=steps_of(generations, context.notes),
        source=source.path.name,
        model=row.model,
        outcome=outcome if isinstance(outcome, bool) else None,
        reward=next((r for k in _REWARDS if (r := reward_of(raw.get(k))) is not None), None),
        step=rl_step_of(raw.get("step")),
    )


class _Calls:
    """Puts calls into conversations."""

    def __init__(self, context: ImportContext) -> None:
        self.join = PrefixJoin()
        self._context = context

    def part(
        self,
        row: _Row,
        raw: dict[str, Any],
        answer: ChatMessage,
        name: str,
        where: str,
        source: SourceFile,
    ) -> tuple[str, _Part]:
        """The conversation of a call, and the call's part."""
        request = row.request or _Request(messages=row.messages, model=row.model)
        if request.messages is None:
            raise DamagedError("request.messages is missing")
        usage = (row.response.usage if row.response else row.usage) or answer.usage or Usage()
        blocks = [_block(message) for message in (*request.messages, answer)]
        place = self.join.place(
            name, blocks, full=len(blocks), input_tokens=len(blocks) - 1, output_tokens=1
        )
        session = _named(raw, _IDS)
        parsed = message_of(answer, self._context)
        new = [message_of(message, self._context) for message in request.messages[place.shared :]]
        start_s, end_s = _times(raw)
        counted = sum(message.tokens for message in new)
        return identifier(session) if session is not None else place.trajectory, _Part(
            where=where,
            group=_group(raw, request.messages),
            file=source.path.name,
            start_s=start_s,
            end_s=end_s,
            output=usage.generated if usage.generated is not None else parsed.tokens,
            input=usage.prompt if usage.prompt is not None or place.shared else counted,
            cached=usage.cached,
            new=counted,
            calls=parsed.calls,
            after_tool=any(message.role == "tool" for message in new),
            failed=None,
            model=row.model or request.model or (row.response.model if row.response else None),
        )


def _block(message: ChatMessage) -> int:
    """A hash of a message, independent of how the log writes empty fields."""
    calls = [
        (str(call.function.name), str(call.function.arguments))
        if not isinstance(call.function, str) and call.function is not None
        else (str(call.name), str(call.arguments))
        for call in message.tool_calls or ()
    ]
    return int(fingerprint(message.role, message.content or "", calls), 16)


def _times(raw: dict[str, Any]) -> tuple[float | None, float | None]:
    """When a call was sent and answered, as far as the log records it."""
    places = [p for p in (raw, raw.get("metadata"), raw.get("response")) if isinstance(p, dict)]
    start_s = next((_time(p[k]) for p in places for k in _STARTS if p.get(k) is not None), None)
    end_s = next((_time(p[k]) for p in places for k in _ENDS if p.get(k) is not None), None)
    if end_s is None and start_s is not None:
        for place in places:
            for key, unit in _SPANS:
                if isinstance(place.get(key), int | float):
                    return start_s, start_s + place[key] * unit
    return start_s, end_s


def _time(value: object) -> float | None:
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise DamagedError(f"a time is a {type(value).__name__}; a number or ISO 8601 is expected")
    return seconds(value)


def _joined(session: str, parts: Sequence[_Part], context: ImportContext) -> TrajectoryRecord:
    ordered = list(parts)
    if all(part.start_s is not None for part in parts):
        ordered.sort(key=lambda part: part.start_s or 0.0)
    generations = [
        LoggedGeneration(
            output=p.output, input=p.input, cached=p.cached, start_s=p.start_s, end_s=p.end_s
        )
        for p in ordered
    ]
    for index, (g, part) in enumerate(zip(generations, ordered, strict=True)):
        g.tools = part.calls
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
