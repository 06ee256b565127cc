"""A message in the format of OpenAI's chat API, which many logs use."""

from typing import Any

import msgspec

from heddle_trace.importers.chat import Message, role_of, text_of
from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.generations import UNNAMED
from heddle_trace.importers.protocol import ImportContext
from heddle_trace.limits import Tokens


class CallFunction(msgspec.Struct):
    """The function of a call; arguments as JSON text, or parsed already."""

    name: str | None = None
    arguments: Any = None


class ToolCall(msgspec.Struct):
    """One call; some logs have name and arguments beside each other."""

    function: CallFunction | str | None = None
    name: str | None = None
    arguments: Any = None


class CachedTokens(msgspec.Struct):
    """Part of `Usage`."""

    cached_tokens: Tokens | None = None


class Usage(msgspec.Struct):
    """A provider's counts for one generation, in either of two spellings."""

    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt_tokens_details: CachedTokens | None = None
    input_tokens_details: CachedTokens | None = None

    @property
    def prompt(self) -> int | None:
        """Tokens of the prompt, cached ones included."""
        return self.prompt_tokens if self.prompt_tokens is not None else self.input_tokens

    @property
    def generated(self) -> int | None:
        return self.completion_tokens if self.completion_tokens is not None else self.output_tokens

    @property
    def cached(self) -> int | None:
        """Tokens of the prompt that the provider had in its cache."""
        details = self.prompt_tokens_details or self.input_tokens_details
        return details.cached_tokens if details else None


class ChatMessage(msgspec.Struct):
    """A message; times and usage are additions of logging tools."""

    role: str
    content: Any = None
    tool_calls: list[ToolCall] | None = None
    function_call: CallFunction | None = None
    reasoning_content: str | None = None
    usage: Usage | None = None
    timestamp: float | str | None = None
    created_at: float | str | None = None
    name: str | None = None


def message_of(message: ChatMessage, context: ImportContext) -> Message:
    """The message without its text. Raises DamagedError for a role that is none."""
    role = role_of(message.role)
    calls = [_call(call) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append((message.function_call.name or UNNAMED, message.function_call.arguments))
    usage = message.usage if role == "assistant" and message.usage is not None else Usage()
    tokens = 0
    if usage.generated is None:
        tokens = text_of(message.content, context.tokens, context.notes)
        tokens += context.tokens.count(message.reasoning_content)
        tokens += sum(context.tokens.count(name + written(arguments)) for name, arguments in calls)
    time = message.timestamp if message.timestamp is not None else message.created_at
    return Message(
        role=role,
        tokens=tokens,
        calls=tuple(name for name, _ in calls),
        time_s=seconds(time),
        output=usage.generated,
        input=usage.prompt,
        cached=usage.cached,
    )


def _call(call: ToolCall) -> tuple[str, object]:
    if isinstance(call.function, CallFunction):
        return call.function.name or UNNAMED, call.function.arguments
    return call.function or call.name or UNNAMED, call.arguments


def written(value: object) -> str:
    """Arguments or a content as a text; JSON where they are none."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
