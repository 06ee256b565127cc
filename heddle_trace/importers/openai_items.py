"""An item of an input or output in OpenAI's Responses API."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from heddle_trace.importers.chat import role_of, text_of
from heddle_trace.importers.generations import fingerprint
from heddle_trace.importers.openai_messages import written
from heddle_trace.importers.protocol import ImportContext

CALL, RESULT = "_call", "_output"
"""Ends of the types of calls and of their results."""

_BY_CLIENT: Final = (
    "function_call",
    "custom_tool_call",
    "local_shell_call",
    "shell_call",
    "apply_patch_call",
    "computer_call",
)
"""Calls that the client runs; others run within the response, as these do that bring a result."""


class Item(msgspec.Struct):
    """One item, of which only messages and references may be without a type."""

    type: str = "message"
    role: str | None = None
    content: Any = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    input: Any = None
    action: Any = None
    operation: Any = None
    output: Any = None
    summary: Any = None


def calls_by_client(output: Sequence[Item]) -> tuple[str, ...]:
    """Names of the calls that the client has to run: the response does not hold their results."""
    done = {item.call_id for item in output if item.type.endswith(RESULT)}
    return tuple(
        item.name or item.type.removesuffix(CALL)
        for item in output
        if item.type in _BY_CLIENT and (item.call_id is None or item.call_id not in done)
    )


def tokens_of(item: Item, context: ImportContext) -> int:
    """Tokens of an item's text, where the log has no usage."""
    tokens, notes = context.tokens, context.notes
    if item.type == "reasoning":
        return text_of(item.summary, tokens, notes) + text_of(item.content, tokens, notes)
    if item.type == "message":
        return text_of(item.content, tokens, notes)
    if item.type.endswith(RESULT):
        return text_of(_shown(item.output), tokens, notes)
    if item.type.endswith(CALL):
        return tokens.count((item.name or "") + _written(item))
    notes.drop(f"items that are no text ({item.type[:40]}): 0 tokens")
    return 0


def block_of(item: Item) -> int:
    """A hash of an item that does not depend on how a client sends it back.

    Raises DamagedError for a role that is none.
    """
    role = None if item.role is None else role_of(item.role)
    content, result = _plain(item.content), _plain(item.output)
    return int(fingerprint(item.type, role, content, item.name, _written(item), result), 16)


def _plain(content: Any) -> str:
    """The text of a content, whether it is a text or a list of parts."""
    if isinstance(content, list):
        parts = (p.get("text", p) if isinstance(p, dict) else p for p in content)
        return "".join(map(written, parts))
    return written(content)


def _shown(output: Any) -> Any:
    """The output of a call as text or parts; that of a shell is in its two streams."""
    if isinstance(output, list):
        return [
            f"{part.get('stdout', '')}{part.get('stderr', '')}"
            if isinstance(part, dict) and "stdout" in part
            else part
            for part in output
        ]
    return output


def _written(item: Item) -> str:
    """What the model wrote as the arguments of a call."""
    given = (item.arguments, item.input, item.action, item.operation)
    return "".join(map(written, given))
