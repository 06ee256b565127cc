"""Answers to one request, whole or as a stream, of one step or of several."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from heddle_gateway.answers import (
    Reply,
    called_tools,
    joined_logprobs,
    tool_of,
    whole_answer,
    whole_finish,
)
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError, of_renderer, unavailable
from heddle_gateway.front import Front, error_body, json_response
from heddle_gateway.http import HttpRequest, Response, Stream
from heddle_gateway.openai_api import (
    GENERATE,
    counted_usage,
    generate_choice,
    generate_response,
    joined_answers,
    joined_usage,
)
from heddle_gateway.rendering import Renderer
from heddle_gateway.streams import (
    DONE,
    HEAD_S,
    KEEP_ALIVE,
    TextStream,
    event,
    token_deltas,
    void_tokens,
)
from heddle_runtime.generation import GenerationEnd, Rendered, RenderError
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS, FORWARDED, MESSAGES
from heddle_runtime.vllm_http.relay import ends_answer

EVENT_STREAM: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A step, and the answer that one client gets of it."""

    front: Front
    endpoint: str
    body: dict[str, Any]
    rendered: Rendered
    step: ClientStep
    request_id: str

    @property
    def name(self) -> str:
        """The id of the answer."""
        return {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-"}.get(self.endpoint, "") + self.request_id

    async def answer(self) -> dict[str, Any]:
        """Wait for the end, and return the whole response object."""
        end, step = await self.step.answer(), self.step
        if self.endpoint in FORWARDED:
            return self._forwarded_answer()
        if self.endpoint == GENERATE:
            ids = self.rendered.prompt_ids
            return generate_response(self.request_id, self.body, ids, step, end)
        if step.opaque and step.relayed.events:
            made = {**step.relayed.events[-1], "id": self.name}
        else:
            made = await self._made(end)
        # Before any client has it: the session's next request finds the tool call under way.
        self.front.gateway.sessions.name_tool(step, tool_of(made))
        return made

    async def _made(self, end: GenerationEnd) -> dict[str, Any]:
        """The response of what came as a stream, or as tokens only."""
        step, facts = self.step, self.front.engine_facts()
        relayed = bool(step.relayed.events) and step.relayed.tokens >= len(step.output_ids)
        reply = Reply(step.relayed.events) if relayed else None
        if reply is not None and reply.finish_reason is None:
            reply = None
        form = facts.answers.get(self.endpoint) if facts is not None else None
        counted = counted_usage(step.prompt_tokens, len(step.output_ids), end)
        whole = partial(whole_answer, self.endpoint, self.body, name=self.name, counted=counted)
        if reply is not None and form and not (facts is not None and facts.parses):
            return whole(reply, form=form)
        made = await renderer_of(self.front).derender(
            self.endpoint, self.body, self.rendered, step.output_ids, end
        )
        choice = made["choices"][0]
        if reply is None:
            first = Reply(step.relayed.events).logprobs
            choice["logprobs"] = joined_logprobs(first, choice.get("logprobs"))
            if self.endpoint == CHAT:
                finish = choice.get("finish_reason")
                choice["finish_reason"] = whole_finish(finish, self.body, choice["message"])
            usage = made.get("usage")
            made["usage"] = usage | counted if isinstance(usage, dict) else counted
            return made | {"id": self.name}
        message = choice.get("message")
        if isinstance(message, dict):
            for call, streamed in zip(
                message.get("tool_calls") or (), reply.tool_calls, strict=False
            ):
                call["id"] = streamed["id"] or call["id"]
        return whole(reply, form=form or made, message=message)

    def _forwarded_answer(self) -> dict[str, Any]:
        events = self.step.relayed.events
        if not events:
            raise unavailable("the request was aborted")
        self.front.gateway.sessions.name_tool(self.step, called_tools(events))
        return events[-1]

    def events(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield events as tokens come; None: nothing for some time."""
        if self.endpoint == GENERATE:
            return self._id_events()
        return self._forwarded_events() if self.endpoint in FORWARDED else self._text_events()

    async def _forwarded_events(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield an engine's own events, the last one after the end of the step."""
        step, settings = self.step, self.front.settings
        sent, begun, last = 0, 0, list[dict[str, Any]]()
        news, wait_s = -1, min(HEAD_S, settings.keep_alive_s)
        while not last or not step.over:
            came = await step.progress(news, wait_s)
            news, wait_s = step.news, settings.keep_alive_s
            if sent and step.relayed.begun != begun:
                raise void_tokens()
            begun, new = step.relayed.begun, step.relayed.events[sent:]
            sent += len(new)
            for found in new:
                if last or ends_answer(found):
                    last.append(found)
                else:
                    yield found
            if step.over:
                break
            if not came:
                yield None
        await step.answer()
        self.front.gateway.sessions.name_tool(step, called_tools(step.relayed.events))
        for found in last:
            yield found

    async def _id_events(self) -> AsyncIterator[dict[str, Any] | None]:
        head = {"request_id": self.request_id, "output_mode": "tokens"}
        settings, step = self.front.settings, self.step
        if step.wants_logprobs:
            wait_s = min(HEAD_S, settings.keep_alive_s)
            while not await step.ended(wait_s):
                wait_s = settings.keep_alive_s
                yield None
        else:
            async for ids in token_deltas(
                step, keep_alive_s=settings.keep_alive_s, coalesce_s=settings.coalesce_s
            ):
                choice = None if ids is None else generate_choice(ids, None, logprobs=False)
                yield None if choice is None else {**head, "choices": [choice]}
        end = await step.answer()
        rest = step.output_ids if step.wants_logprobs else ()
        yield {**head, "choices": [generate_choice(rest, end, logprobs=step.wants_logprobs)]}
        options = self.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            counts = counted_usage(step.prompt_tokens, len(step.output_ids), end)
            yield {**head, "choices": [], "usage": counts}

    async def _text_events(self) -> AsyncIterator[dict[str, Any] | None]:
        stream = TextStream(
            self.step,
            renderer_of(self.front),
            self.rendered,
            self.endpoint,
            self.body,
            name=self.name,
            model=self.front.check_model(self.body),
            coalesce_s=self.front.settings.coalesce_s,
        )
        sent: list[dict[str, Any]] = []
        async for found in stream.events(self.front.settings.keep_alive_s):
            if found is not None:
                sent.append(found)
                if any(choice.get("finish_reason") for choice in found["choices"]):
                    # Before the client has it, as in `answer`.
                    said = Reply(sent)
                    spoken = {"message": said.message, "text": said.text}
                    name = tool_of({"choices": [spoken]})
                    self.front.gateway.sessions.name_tool(self.step, name)
            yield found


async def whole(exchanges: Sequence[Exchange], samples: int) -> Response:
    """Wait for the end of every step, and answer with everything."""
    if len(exchanges) == 1:
        answer = await exchanges[0].answer()
    else:
        answer = joined_answers(await asyncio.gather(*(e.answer() for e in exchanges)), samples)
    step = exchanges[0].step
    headers = {
        "x-heddle-engine": step.engine,
        "x-heddle-trajectory": step.trajectory,
        "x-heddle-preempted": str(max(0, step.dispatches - 1)),
    }
    if step.dispatched_s is not None:
        queued_ms = 1e3 * (step.dispatched_s - step.submitted_s)
        headers["x-heddle-queued-ms"] = f"{queued_ms:.0f}"
    return json_response(answer, headers=headers)


async def streamed(request: HttpRequest, exchanges: Sequence[Exchange], samples: int) -> Response:
    """Send events as tokens come.

    An error before the first is the response, as it is vLLM's; later ones are events too.
    """
    response, endpoint = Stream(request, headers=EVENT_STREAM), exchanges[0].endpoint
    events = exchanges[0].events() if len(exchanges) == 1 else _merged(exchanges, samples)
    try:
        async for found in events:
            await response.begin(KEEP_ALIVE if found is None else _encoded(endpoint, found))
    except (RenderError, ApiError) as failed:
        error = of_renderer(failed) if isinstance(failed, RenderError) else failed
        if not (response.begun or error.in_stream):
            raise error from None
        await response.begin(_error_event(endpoint, error))
    if endpoint not in FORWARDED:
        await response.begin(DONE)
    return response


def _encoded(endpoint: str, found: dict[str, Any]) -> bytes:
    if endpoint not in FORWARDED:
        return event(found)
    return b"event: " + str(found.get("type")).encode() + b"\n" + event(found)


def _error_event(endpoint: str, error: ApiError) -> bytes:
    if endpoint not in FORWARDED:
        return event(error.body)
    body = error_body(endpoint, error)
    return _encoded(endpoint, body if endpoint == MESSAGES else {**error.error, "type": "error"})


async def refused_stream(request: HttpRequest, endpoint: str, error: ApiError) -> Response:
    """Send a refusal as vLLM sends it once it has begun to stream."""
    response = Stream(request, headers=EVENT_STREAM)
    await response.begin(_error_event(endpoint, error) + DONE * (endpoint not in FORWARDED))
    return response


async def _merged(
    exchanges: Sequence[Exchange], samples: int
) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the events of several steps as they come, each with the index of its choice."""
    queue: asyncio.Queue[tuple[int, dict[str, Any] | None, bool]] = asyncio.Queue()

    async def read(index: int, exchange: Exchange) -> None:
        try:
            async for found in exchange.events():
                queue.put_nowait((index, found, False))
        finally:
            queue.put_nowait((index, None, True))

    readers = [asyncio.ensure_future(read(*each)) for each in enumerate(exchanges)]
    usages: dict[int, dict[str, Any]] = {}
    left = len(readers)
    try:
        while left:
            index, found, ended = await queue.get()
            if ended:
                left -= 1
                await readers[index]  # raises its error
            elif found is None or found["choices"]:
                choices = [{**each, "index": index} for each in (found or {}).get("choices", ())]
                yield None if found is None else {**found, "choices": choices}
            else:
                usages[index] = found
        if usages:
            counts = [usages[n]["usage"] for n in sorted(usages)]
            yield {**usages[min(usages)], "usage": joined_usage(counts, samples)}
    finally:
        for reader in readers:
            reader.cancel()


def renderer_of(front: Front) -> Renderer:
    """Return the gateway's renderer.

    Raises:
        ApiError: it has none.
    """
    if front.renderer is None:
        raise ApiError(
            501,
            f"this gateway has no renderer for text: send token ids to {GENERATE}",
            kind="not_implemented_error",
        )
    return front.renderer
