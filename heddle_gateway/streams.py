"""Server-sent events of steps: what an engine sends itself, and text or ids of tokens that come."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from heddle_gateway.answers import EventFilter, Reply, WantedFields
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError
from heddle_gateway.openai_api import counted_usage
from heddle_gateway.rendering import Renderer
from heddle_runtime.generation import GenerationEnd, Rendered
from heddle_runtime.vllm_http.probe import CHAT

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
HEAD_S: Final = 0.5
"""Without an event for so long, a response begins all the same; then an error is an event too."""
_SHARE: Final = 4.0
"""Least time between two calls of a renderer for one stream, as a multiple of what one takes: a
parser reads everything again each time."""


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def void_tokens() -> ApiError:
    """Return the error of a stream whose tokens so far are void."""
    return ApiError(
        502,
        "the engine died, and this generation cannot be resumed exactly: send it again",
        kind="server_error",
        code="engine_died",
    )


async def token_deltas(
    step: ClientStep, *, keep_alive_s: float, coalesce_s: float
) -> AsyncIterator[Sequence[int] | None]:
    """Yield the tokens of a step as they come; None: nothing for some time.

    Raises:
        ApiError: it ended without an answer, or tokens that were yielded are void.
    """
    sent: list[int] = []
    news, wait_s = -1, min(HEAD_S, keep_alive_s)
    loop, next_s = asyncio.get_running_loop(), 0.0
    while True:
        came = await step.progress(news, wait_s)
        wait_s = wait_s if came else keep_alive_s
        early_s = next_s - loop.time()
        if early_s > 0 and not step.over:
            await asyncio.sleep(early_s)
        news = step.news
        again = len(sent) if step.revocations else 0
        # Void tokens are made again; where sampling is exact, they are the same.
        if list(step.output_ids[:again]) != sent[: len(step.output_ids[:again])]:
            raise void_tokens()
        new = list(step.output_ids[len(sent) :])
        sent += new
        if new:
            yield new
        elif not came:
            yield None
        if step.over and step.end is not None and len(sent) > len(step.output_ids):
            raise void_tokens()
        if step.over and len(sent) >= len(step.output_ids):
            await step.answer()
            return
        next_s = loop.time() + coalesce_s


class TextStream:
    """The events of one client of a chat or completion.

    While one engine answers the request itself, its events are passed on. What comes after a
    preemption or a move, and from engines that make only tokens, is derendered. Where tokens are
    void, what is made in their place is not sent again, as long as it says the same.
    """

    def __init__(
        self,
        step: ClientStep,
        renderer: Renderer,
        rendered: Rendered,
        endpoint: str,
        body: dict[str, Any],
        *,
        name: str,
        model: str,
        coalesce_s: float,
    ) -> None:
        """`name` is the answer's id; `coalesce_s` the time between derendered events at least."""
        self._step, self._renderer, self._rendered = step, renderer, rendered
        self._endpoint, self._body, self._name, self._model = endpoint, body, name, model
        self._coalesce_s = coalesce_s
        self._wanted = WantedFields(body)
        stops = body.get("stop") or ()
        stops = [stops] if isinstance(stops, str) else stops
        lengths = [len(stop) for stop in stops if isinstance(stop, str)]
        cut = lengths and not body.get("include_stop_str_in_output")
        self._held_back = max(lengths) - 1 if cut else 0
        """Characters that may be the beginning of a stop string."""
        self._filter = self._new_filter()
        self._round = step.relayed.begun
        self._passed_on = 0
        """Events of the engine that were taken."""
        self._said = Reply(())
        """What the client has."""
        self._again: Reply | None = None
        """What is said in place of that, while it is made again."""
        self._revocations = step.revocations
        self._has_role = False
        self._head: dict[str, Any] = {}
        self._pending = ""
        """Text that is held back."""
        self._seen = 0
        """Tokens that are in events."""
        self._state: Any = None

    def _new_filter(self) -> EventFilter:
        return EventFilter(self._body, self._name, as_they_are=self._step.opaque)

    async def events(self, keep_alive_s: float) -> AsyncIterator[dict[str, Any] | None]:
        """Yield events as they are made; None: nothing for some time.

        Raises:
            ApiError: it ended without an answer, or what was sent is void.
            RenderError: text could not be made.
        """
        step, news, wait_s = self._step, -1, min(HEAD_S, keep_alive_s)
        loop, next_s = asyncio.get_running_loop(), 0.0
        while not step.over:
            came = await step.progress(news, wait_s)
            wait_s, news = wait_s if came else keep_alive_s, step.news
            found = [each for one in self._passed() for each in self._new(one)]
            for each in found:
                yield each
            behind = self._ready() > max(self._seen, step.relayed.tokens)
            if behind and not step.over and loop.time() >= next_s:
                began_s = loop.time()
                for one in await self._derendered(None):
                    for each in self._new(one):
                        yield each
                now_s = loop.time()
                next_s = now_s + max(self._coalesce_s, _SHARE * (now_s - began_s))
            elif behind and not step.over:
                await asyncio.sleep(max(0.0, next_s - loop.time()))
                news -= 1  # what is there is to be looked at again
            elif not came and not found:
                yield None
        last = self._passed()
        end = await step.answer()
        last += self._filter.end()
        ended = bool(step.relayed.events) and step.relayed.tokens >= len(step.output_ids)
        if not (ended and _has_end(step.relayed.events)):
            last += await self._derendered(end)
        if self._wanted.usage and not step.opaque and (not last or last[-1]["choices"]):
            counted = counted_usage(step.prompt_tokens, len(step.output_ids), end)
            last.append({**self._heads(), "choices": [], "usage": counted})
        for one in last:
            for each in self._new(one):
                yield each
        if self._again is not None:
            raise void_tokens()

    def _new(self, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an event, or what of it the client does not have yet.

        Raises:
            ApiError: it is another answer than the client has.
        """
        if self._again is None:
            self._said.take(found)
            yield found
            return
        self._again.take(found)
        try:
            rest = self._again.beyond(self._said)
        except ValueError:
            raise void_tokens() from None
        if rest is None:
            return
        before, self._said, self._again = self._said, self._again, None
        choice = dict(found["choices"][0]) if found["choices"] else {}
        text = rest.pop("text")
        if "delta" in choice:
            choice["delta"] = rest | ({"content": text} if text else {})
        else:
            choice["text"] = text
        if choice.get("token_ids"):
            choice["token_ids"] = self._said.token_ids[len(before.token_ids) :]
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and "content" in logprobs and before.logprobs:
            content = self._said.logprobs["content"][len(before.logprobs["content"]) :]
            choice["logprobs"] = {"content": content}
        if choice and (text or rest or choice.get("finish_reason")):
            yield {**found, "choices": [choice]}

    def _ready(self, *, ended: bool = False) -> int:
        """Tokens that can be in events: the last one may be a stop token, which has no text."""
        step = self._step
        if ended:
            return len(step.output_ids)
        if step.wants_logprobs:  # which may come only with the end of a dispatch
            return step.relayed.tokens + max(0, len(step.live_logprobs) - 1)
        return len(step.output_ids) - 1

    def _passed(self) -> list[dict[str, Any]]:
        """The engine's own new events."""
        step = self._step
        begun = step.relayed.begun != self._round or self._passed_on > len(step.relayed.events)
        revoked = step.revocations != self._revocations and step.revoked_from < self._seen
        self._revocations = step.revocations
        if begun or revoked:
            self._round, self._passed_on, self._filter = step.relayed.begun, 0, self._new_filter()
            self._seen, self._state, self._pending = 0, None, ""
            self._again = Reply(()) if self._said.says_anything else None
        made: list[dict[str, Any]] = []
        for found in step.relayed.events[self._passed_on :]:
            self._seen += sum(len(c.get("token_ids") or ()) for c in found["choices"])
            for each in self._filter.take(found):
                self._head = {k: each[k] for k in ("created", "model") if k in each}
                if self._is_role(each):
                    if self._has_role:
                        continue
                    self._has_role = True
                made.append(each)
        self._passed_on = len(step.relayed.events)
        return made

    def _is_role(self, found: Mapping[str, Any]) -> bool:
        deltas = [choice.get("delta") or {} for choice in found["choices"]]
        return any("role" in delta and not delta.get("content") for delta in deltas)

    def _heads(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._endpoint == CHAT else "text_completion"
        self._head = {"created": int(time.time()), "model": self._model} | self._head
        return {"id": self._name, "object": kind, **self._head}

    async def _derendered(self, end: GenerationEnd | None) -> list[dict[str, Any]]:
        """Events of the tokens that no engine's event has; with `end`, the last one."""
        step, made = self._step, []
        before = list(step.output_ids[: self._seen])
        new = list(step.output_ids[self._seen : self._ready(ended=end is not None)])
        logprobs = list(step.logprobs_of(self._seen, len(new)))
        if self._state is None and before:
            # What was passed on gives the state, and text that its engine still held back.
            choice, self._state = await self._more(before, None, ())
            self._pending = _text_of(choice).removeprefix(self._said.text)
        if self._endpoint == CHAT and not self._has_role:
            self._has_role = True
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            first = {
                **self._heads(),
                "choices": [{**role, "logprobs": None, "finish_reason": None}],
            }
            ids = self._rendered.prompt_ids.tolist() if self._wanted.token_ids else None
            made.append(first | {"prompt_token_ids": ids})
        if end is not None and len(logprobs) < len(new):
            logprobs = list(end.logprobs[-len(new) :])
        self._seen += len(new)
        if not (new or end is not None):
            return made
        choice, self._state = await self._more(new, end, logprobs)
        text = self._pending + _text_of(choice)
        if end is None:
            keep = len(text) - self._held_back
            text, self._pending = text[: max(0, keep)], text[max(0, keep) :]
        elif isinstance(end.stop_reason, str) and self._held_back:
            text = text.partition(end.stop_reason)[0]
        calls = (choice.get("delta") or {}).get("tool_calls")
        says = text or calls or self._wanted.token_ids or (logprobs and choice.get("logprobs"))
        if end is None and not says:
            return made
        made.append({**self._heads(), "choices": [self._choice(choice, text, new, end)]})
        return made

    async def _more(
        self, ids: Sequence[int], end: GenerationEnd | None, logprobs: Sequence[Any]
    ) -> tuple[dict[str, Any], Any]:
        return await self._renderer.derender_more(
            self._endpoint, self._body, self._rendered, ids, self._state, end, logprobs
        )

    def _choice(
        self, choice: Mapping[str, Any], text: str, ids: Sequence[int], end: GenerationEnd | None
    ) -> dict[str, Any]:
        made: dict[str, Any] = {"index": 0}
        if self._endpoint == CHAT:
            given = choice.get("delta") or {}
            delta = {k: v for k, v in given.items() if k not in ("role", "content") and v}
            made["delta"] = delta if delta and not text else {"content": text} | delta
        else:
            made["text"] = text
        made |= {"logprobs": choice.get("logprobs"), "finish_reason": None}
        if end is not None:
            made |= {"finish_reason": choice.get("finish_reason"), "stop_reason": end.stop_reason}
        return made | {"token_ids": list(ids) if self._wanted.token_ids else None}


def _text_of(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    return (delta.get("content") if isinstance(delta, dict) else choice.get("text")) or ""


def _has_end(events: Sequence[Mapping[str, Any]]) -> bool:
    return any(c.get("finish_reason") for found in events[-2:] for c in found["choices"])
