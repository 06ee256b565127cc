"""Chat logs with tool calls, in OpenAI's message format.

Source: OpenAI's chat completions API; the fields around the messages depend on the logger.
Two kinds are read. *Conversations*: objects with `messages`, as JSON lines, or in a JSON array, or
one array of messages. *Calls*: JSON lines with a `request` (or its `messages`) and the `response`,
as proxies write them; they are joined by a session id where there is one, else where the messages
of a later call begin with those of an earlier one and its answer.
"""

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec

from heddle_trace.importers.chat import ROLES, Message, generations_of, prompt_of
from heddle_trace.importers.generations import (
    fingerprint,
    identifier,
    reward_in,
    rl_step_of,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.joining import PrefixJoin
from heddle_trace.importers.logged_calls import (
    SESSION_IDS,
    LoggedCall,
    group_of,
    joined,
    named,
    times,
)
from heddle_trace.importers.notes import DamagedError
from heddle_trace.importers.objects import objects_of_parts
from heddle_trace.importers.openai_messages import ChatMessage, Usage, message_of
from heddle_trace.importers.protocol import ImportContext, ParsedRecord, Records
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.schema import TrajectoryRecord


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
            return _is_message(item) or _has_messages(item)
        return any(_has_messages(row) for row in head.rows) or _has_messages(document)

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record a conversation."""
        with Sessions(LoggedCall) as sessions:
            calls = _Calls(context)
            for source in sources:
                found = objects_of_parts(source, context.notes, "messages", _is_message)
                for number, (where, raw) in enumerate(found, start=1):
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
            calls.join.note_forgotten("calls", context.notes)
            yield from sessions.records(context.notes, partial(joined, context=context))


def _is_message(value: dict[str, Any]) -> bool:
    return "role" in value


def _has_messages(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    messages = value.get("messages")
    if messages is None and isinstance(value.get("request"), dict):
        messages = value["request"].get("messages")
    return isinstance(messages, list) and (
        not messages or (isinstance(messages[0], dict) and "role" in messages[0])
    )


def _answer(row: _Row) -> ChatMessage | None:
    """The message that a call was answered with; None for a conversation."""
    choices = row.response.choices if row.response is not None else row.choices
    if choices is None:
        return None
    if not choices or choices[0].message is None:
        raise DamagedError("response.choices: has no message; a call without an answer")
    return choices[0].message


def _group(raw: dict[str, Any], messages: Sequence[ChatMessage]) -> str:
    first = takewhile(lambda message: ROLES.get(message.role) != "assistant", messages)
    return group_of(raw, [(each.role, msgspec.json.encode(each.content)) for each in first])


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
        trajectory_id=identifier(named(raw, (*SESSION_IDS, "id", "uuid")) or name),
        group_id=_group(raw, row.messages),
        workload=context.workload_or("chat"),
        prompt_tokens=prompt_of(messages),
        steps=steps_of(generations, context.notes),
        source=source.path.name,
        model=row.model,
        outcome=outcome if isinstance(outcome, bool) else None,
        reward=reward_in(raw),
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
    ) -> tuple[str, LoggedCall]:
        """The conversation of a call, and the call's part."""
        request = row.request or _Request(messages=row.messages, model=row.model)
        if request.messages is None:
            raise DamagedError("request.messages is missing")
        usage = (row.response.usage if row.response else row.usage) or answer.usage or Usage()
        blocks = [_block(message) for message in (*request.messages, answer)]
        place = self.join.place(
            name, blocks, full=len(blocks), input_tokens=len(blocks) - 1, output_tokens=1
        )
        session = named(raw, SESSION_IDS)
        parsed = message_of(answer, self._context)
        new = [message_of(message, self._context) for message in request.messages[place.shared :]]
        start_s, end_s = times(raw)
        counted = sum(message.tokens for message in new)
        return identifier(session) if session is not None else place.trajectory, LoggedCall(
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
