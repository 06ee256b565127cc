"""Server-sent events of steps: tokens or text as they come, and chunks of a whole response."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError
from heddle_gateway.rendering import Detokenizer

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
_WINDOW: Final = 5
"""Tokens before new ones that are decoded with them: their text depends on them."""


def event(data: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class TextDeltas:
    """The text of tokens as they come; characters appear when all their tokens are there."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._ids: list[int] = []
        self._read = 0
        """Tokens whose text was returned."""
        self.text = ""
        """Returned so far."""

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that new tokens bring; empty while a character is incomplete."""
        self._ids.extend(ids)
        start = max(0, self._read - _WINDOW)
        before = self._detokenizer.decode(self._ids[start : self._read])
        whole = self._detokenizer.decode(self._ids[start:])
        if whole.endswith(_UNFINISHED) or not whole.startswith(before):
            return ""
        self._read = len(self._ids)
        self.text += whole[len(before) :]
        return whole[len(before) :]


async def token_deltas(
    step: ClientStep, *, keep_alive_s: float, coalesce_s: float
) -> AsyncIterator[Sequence[int] | None]:
    """Yield the tokens of a step as they come, several at once; None: nothing for some time.

    Raises:
        ApiError: it ended without an answer, or tokens that were yielded are void.
    """
    seen = 0
    loop, next_s = asyncio.get_running_loop(), 0.0
    while True:
        came = await step.progress(seen, keep_alive_s)
        early_s = next_s - loop.time()
        if early_s > 0 and not step.over:
            await asyncio.sleep(early_s)
        if step.revoked_from is not None and step.revoked_from < seen:
            raise ApiError(
                502,
                "the engine died, and this generation cannot be resumed exactly: send it again",
                kind="server_error",
                code="engine_died",
            )
        new = step.output_ids[seen:]
        seen += len(new)
        if new:
            yield new
        elif not came:
            yield None
        if step.over and seen >= len(step.output_ids):
            await step.answer()
            return
        next_s = loop.time() + coalesce_s


def chat_chunks(response: Mapping[str, Any], *, sent_text: str = "") -> list[dict[str, Any]]:
    """Return a whole chat response as chunks, without the text that was sent already."""
    head = {key: response[key] for key in ("id", "created", "model") if key in response}
    head["object"] = "chat.completion.chunk"
    chunks: list[dict[str, Any]] = []
    for choice in response["choices"]:
        message = choice["message"]
        delta = {
            key: value
            for key, value in message.items()
            if key not in ("role", "content", "tool_calls") and value
        }
        content = _left_of(message.get("content") or "", sent_text)
        if content:
            delta["content"] = content
        if message.get("tool_calls"):
            delta["tool_calls"] = [
                {"index": n} | call for n, call in enumerate(message["tool_calls"])
            ]
        rest = {k: v for k, v in choice.items() if k not in ("message", "finish_reason")}
        if delta:
            chunks.append({**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]})
            rest.pop("logprobs", None)
            rest.pop("token_ids", None)
        ended = {**rest, "delta": {}, "finish_reason": choice.get("finish_reason")}
        chunks.append({**head, "choices": [ended]})
    return chunks


def text_chunks(response: Mapping[str, Any], *, sent_text: str = "") -> list[dict[str, Any]]:
    """Return a whole completion as one chunk, without the text that was sent already."""
    choices = [
        {**choice, "text": _left_of(choice.get("text") or "", sent_text)}
        for choice in response["choices"]
    ]
    return [{k: v for k, v in response.items() if k != "usage"} | {"choices": choices}]


def _left_of(text: str, sent: str) -> str:
    return text[len(sent) :] if text.startswith(sent) else ""
