"""Fields that spans of several tracers have in common: ids, inputs and outputs of a generation."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from heddle_core.json_faults import NO_JSON
from heddle_trace.importers.generations import UNNAMED, fingerprint
from heddle_trace.importers.logged_calls import GROUP_IDS
from heddle_trace.importers.notes import DamagedError
from heddle_trace.importers.tokens import Counter

_SESSIONS: Final = ("session_id", "session.id", "thread_id", "conversation_id")
_MOST_DIGITS: Final = 20
"""More have no count and no time in nanoseconds."""

_NO_TEXT: Final = ("role", "type", "id", "tool_call_id", "finish_reason", "model")


def id_in(value: Any, field: str) -> str | None:
    """An id, or None where there is none. Raises DamagedError for what can be none."""
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DamagedError(f"{field}: an id is text, not a {type(value).__name__}")
    return str(value)


def named_in(places: Sequence[Any]) -> tuple[str | None, str | None]:
    """The session and the group that objects such as metadata name."""
    found: list[str | None] = []
    for keys in (_SESSIONS, GROUP_IDS):
        values = (place.get(key) for place in places if isinstance(place, dict) for key in keys)
        found.append(next((str(v) for v in values if isinstance(v, str | int) and v != ""), None))
    return found[0], found[1]


def parsed_text(value: Any) -> Any:
    """A value that some exports write as a text of JSON."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return msgspec.json.decode(value)
        except NO_JSON:
            return value
    return value


def whole(value: Any) -> Any:
    """A number that some exports write as its digits; what is none stays as it is."""
    digits = isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS
    return int(value) if digits else value


def tokens_in(value: Any, tokens: Counter) -> int:
    """Tokens of all texts of a recorded input or output."""
    if isinstance(value, str):
        return tokens.count(value)
    if isinstance(value, list):
        return sum(tokens_in(item, tokens) for item in value)
    if isinstance(value, dict):
        return sum(tokens_in(v, tokens) for k, v in value.items() if k not in _NO_TEXT)
    return 0


def calls_in(value: Any) -> Iterator[str]:
    """Names of the tools that a recorded output asks for, in the usual message formats."""
    if isinstance(value, list):
        for item in value:
            yield from calls_in(item)
    elif isinstance(value, dict):
        if value.get("type") in ("tool_call", "tool_use", "function_call", "function"):
            inner = value.get("function")
            name = inner.get("name") if isinstance(inner, dict) else value.get("name")
            yield name if isinstance(name, str) else UNNAMED
            return
        calls = value.get("tool_calls")
        if isinstance(calls, list) and calls:
            for call in calls:
                yield from calls_in({"type": "tool_call", **call} if isinstance(call, dict) else {})
            return
        for item in value.values():
            yield from calls_in(item)


def prompt_hash(value: Any) -> str | None:
    """A hash of a recorded input; None of nothing."""
    return None if value in (None, "", [], {}) else fingerprint(msgspec.json.encode(value))
