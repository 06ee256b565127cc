"""Messages of a chat, converted to generations; many formats share this.

A generation is a message of the assistant. The messages between it and the next one were appended
to the context: results of tools, or words of a person. A message's time is when it was written: for
one of the assistant's, the end of its generation.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from heddle_trace.complete import USER
from heddle_trace.importers.generations import UNNAMED, LoggedGeneration, derive_added
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.tokens import Counter

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
}


def role_of(name: str) -> Role:
    """The role by any of its names. Raises DamagedError for a name that is none."""
    if name not in ROLES:
        raise DamagedError(f"role {name[:40]!r} is not known; use {', '.join(ROLES)}")
    return ROLES[name]


class Message(msgspec.Struct, array_like=True):
    """A message without its text. Times in Unix seconds; tokens counted, or recorded ones.

    `output`, `input`, `cached` are the source's own counts for a generation; `start_s` is when it
    was requested. `failed` is the tool's own report.
    """

    role: Role
    tokens: int
    calls: tuple[str, ...] = ()
    time_s: float | None = None
    start_s: float | None = None
    output: int | None = None
    input: int | None = None
    cached: int | None = None
    failed: bool | None = None


def prompt_of(messages: Sequence[Message]) -> int | None:
    """Tokens of the first prompt: what was recorded, else the messages before the first answer."""
    tokens = 0
    for message in messages:
        if message.role == "assistant":
            return message.input if message.input is not None else tokens
        tokens += message.tokens
    return tokens


def generations_of(
    messages: Sequence[Message], notes: Notes, *, simulated_user: bool = False
) -> list[LoggedGeneration]:
    """The generations of a chat.

    With a simulated user, a part of the environment, words after the last generation count; those
    of a person do not. Raises DamagedError for a log whose calls have no results at all.
    """
    answers = list(_answers(messages))
    generations = [_generation(answer, after) for answer, after in answers]
    for g, following, (answer, after) in zip(generations, generations[1:], answers, strict=False):
        broken_off = answer.calls and not any(m.role == "tool" for m in after)
        if g.tools and g.until_s is None and not broken_off:
            g.until_s = following.start_s
    if generations and generations[-1].tools == (USER,) and not simulated_user:
        generations[-1].tools, generations[-1].added = (), None
    derive_added(generations)
    _check_results(answers, notes)
    return generations


def _answers(messages: Sequence[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Each message of the assistant, with what follows it up to the next one."""
    answer: Message | None = None
    after: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            if answer is not None:
                yield answer, after
            answer, after = message, []
        elif answer is not None:
            after.append(message)
    if answer is not None:
        yield answer, after


def _generation(answer: Message, after: Sequence[Message]) -> LoggedGeneration:
    results = [m for m in after if m.role == "tool"]
    words = [m for m in after if m.role == "user"]
    g = LoggedGeneration(
        output=answer.output if answer.output is not None else answer.tokens,
        input=answer.input,
        cached=answer.cached,
        start_s=answer.start_s,
        end_s=answer.time_s,
    )
    if answer.calls or results:
        g.tools = answer.calls or tuple(UNNAMED for _ in results)
        failures = [m.failed for m in results if m.failed is not None]
        g.ok = not any(failures) if failures else None
        # A call without a result was broken off; how long a person then thought is no tool time.
        g.until_s = max((m.time_s for m in results if m.time_s is not None), default=None)
        g.added = sum(m.tokens for m in after) if results else None
    elif words:
        g.tools = (USER,)
        g.until_s = words[-1].time_s
        g.added = sum(m.tokens for m in after)
    elif after:
        g.added = sum(m.tokens for m in after)
    return g


def _check_results(answers: Sequence[tuple[Message, Sequence[Message]]], notes: Notes) -> None:
    """Note calls without a result; refuse a log that has calls and never a result.

    The last generation of a chat that was cut off may well wait for one.
    """
    calling = [(answer, after) for answer, after in answers[:-1] if answer.calls]
    unanswered = [answer for answer, after in calling if not any(m.role == "tool" for m in after)]
    if calling and len(unanswered) == len(calling):
        raise DamagedError(
            f"calls {unanswered[0].calls[0]!r} and others, and has no result of any tool; "
            "export the log with its tool messages"
        )
    if unanswered:
        notes.assume(
            "steps whose tool gave no result: its time and size not recorded", len(unanswered)
        )


def text_of(content: object, tokens: Counter, notes: Notes) -> int:
    """Tokens of a message's content: a text, or a list of parts of which some are text."""
    if content is None:
        return 0
    if isinstance(content, str):
        return tokens.count(content)
    if isinstance(content, dict):
        return _part(content, tokens, notes)
    if isinstance(content, list):
        return sum(
            tokens.count(p) if isinstance(p, str) else _part(p, tokens, notes) for p in content
        )
    raise DamagedError(f"a message's content is a {type(content).__name__}; text is expected")


def _part(part: object, tokens: Counter, notes: Notes) -> int:
    if not isinstance(part, dict):
        raise DamagedError(f"a part of a message is a {type(part).__name__}; an object is expected")
    for key in ("text", "thinking", "reasoning", "refusal", "content"):
        value = part.get(key)
        if isinstance(value, str):
            return tokens.count(value)
        if isinstance(value, list):
            return text_of(value, tokens, notes)
    notes.drop(f"parts of messages that are no text ({str(part.get('type'))[:40]}): 0 tokens")
    return 0
