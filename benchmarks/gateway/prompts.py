"""Requests of sessions whose prompts grow by what each step makes: as text, and as token ids.

A text names its session and step, so that a mock engine can render it without reading the rest.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

STEPS = 8
"""Of a session; a rollout of coding agents has 7.8 on average."""
TEXT_BYTES = 2_048
"""Of a chat body, about."""
TEXT_TOKENS = 448
"""Of the first prompt of a session that sends text."""
OUTPUT_IDS = tuple(range(700, 708))
_TOOL_IDS = tuple(range(900, 908))
_FIRST_ID = 1_000
_MARK = re.compile(rb"session-(\d+)-(\d+);")
_WORDS = "in the next step the agent reads a file of the repository and runs its tests again "


def _joined(ids: Iterator[int] | tuple[int, ...]) -> bytes:
    return ",".join(map(str, ids)).encode()


@lru_cache
def _middle(tokens: int) -> bytes:
    """The part of a first prompt that all sessions share."""
    return _joined(16 + (n * 7_919) % 90_000 for n in range(tokens - 1))


_STEP = _joined((*OUTPUT_IDS, *_TOOL_IDS))
_GROWTH = tuple(b"".join([b",", _STEP]) * step for step in range(STEPS))


def ids_json(session: int, step: int, *, first_tokens: int) -> bytes:
    """Return the prompt of a step as JSON: that of the step before, its output, a tool's answer."""
    return b"[%d,%b%b]" % (_FIRST_ID + session, _middle(first_tokens), _GROWTH[step])


def session_and_step(body: bytes) -> tuple[int, int]:
    """Read whose text this is; 0 and 0 for any other text."""
    found = _MARK.search(body)
    return (int(found[1]), int(found[2])) if found else (0, 0)


_TEXT = (_WORDS * (TEXT_BYTES // len(_WORDS) + 1)).encode()


def chat_body(session: int, step: int, *, stream: bool = False) -> bytes:
    """Return a chat request of `TEXT_BYTES`."""
    mark = b"session-%d-%d;" % (session, step)
    head = b'{"model":"mock","max_tokens":16,"stream":%b,' % (b"true" if stream else b"false")
    head += b'"messages":[{"role":"user","content":"' + mark
    return head + _TEXT[: TEXT_BYTES - len(head) - 4] + b'"}]}'


def token_ids_body(session: int, step: int, *, tokens: int, stream_tokens: int = 0) -> bytes:
    """Return a request of vLLM's token endpoint, with `tokens` in its first prompt."""
    return b'{"token_ids":%b,"sampling_params":{"max_tokens":%d},"stream":%b}' % (
        ids_json(session, step, first_tokens=tokens),
        stream_tokens or 16,
        b"true" if stream_tokens else b"false",
    )


def sglang_body(session: int, step: int, *, tokens: int) -> bytes:
    """Return a request of SGLang's token endpoint."""
    ids = ids_json(session, step, first_tokens=tokens)
    return b'{"input_ids":%b,"sampling_params":{"max_new_tokens":16}}' % ids


def completion_body(session: int, step: int, *, tokens: int) -> bytes:
    """Return a request of OpenAI's completions with token ids."""
    ids = ids_json(session, step, first_tokens=tokens)
    return b'{"model":"mock","prompt":%b,"max_tokens":16}' % ids
