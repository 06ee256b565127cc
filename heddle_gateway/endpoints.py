"""Endpoints of models: chat, completions, token ids, and calls that an engine answers."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError, of_renderer
from heddle_gateway.front import FRONT, Front, Handler, json_response
from heddle_gateway.identity import Identity, identify
from heddle_gateway.openai_api import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    check_supported,
    generate_choice,
    generate_response,
    has_reply,
    models_response,
    new_step,
    rendered_ids,
    text_field,
    usage,
)
from heddle_gateway.rendering import Renderer
from heddle_gateway.reply_tools import tool_of
from heddle_gateway.streams import (
    DONE,
    KEEP_ALIVE,
    TextDeltas,
    chat_chunks,
    event,
    text_chunks,
    token_deltas,
)
from heddle_runtime.generation import Rendered, RenderError

PASSED_ON = ("/tokenize", "/detokenize", f"{CHAT}/render", f"{COMPLETIONS}/render")
EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class _Exchange:
    """One request of a client and its step."""

    def __init__(
        self,
        front: Front,
        request: web.Request,
        endpoint: str,
        body: dict[str, Any],
        rendered: Rendered,
        step: ClientStep,
        request_id: str,
    ) -> None:
        self.front, self.request, self.endpoint = front, request, endpoint
        self.body, self.rendered, self.step = body, rendered, step
        self.request_id = request_id

    async def whole(self) -> web.Response:
        """Wait for the end, and answer with everything."""
        response = await self.response()
        step = self.step
        headers = {
            "x-heddle-engine": step.engine,
            "x-heddle-trajectory": step.trajectory,
            "x-heddle-preempted": str(max(0, step.dispatches - 1)),
        }
        if step.dispatched_s is not None:
            queued_ms = 1e3 * (step.dispatched_s - step.submitted_s)
            headers["x-heddle-queued-ms"] = f"{queued_ms:.0f}"
        return json_response(response, headers=headers)

    async def response(self) -> dict[str, Any]:
        """The whole response object, once the step is over."""
        end = await self.step.answer()
        if self.endpoint == GENERATE:
            return generate_response(self.request_id, self.body, self.step, end)
        made = await _renderer(self.front).derender(
            self.endpoint, self.body, self.rendered, self.step.output_ids, end
        )
        # Before any client has it: the session's next request finds the tool call under way.
        self.front.gateway.sessions.name_tool(self.step, tool_of(made))
        return made

    async def stream(self) -> web.StreamResponse:
        """Send events as tokens come; errors from now on are events too."""
        response = web.StreamResponse(headers=EVENT_STREAM)
        await response.prepare(self.request)
        try:
            if self.endpoint == GENERATE:
                await self._stream_ids(response)
            else:
                await self._stream_text(response)
        except RenderError as refused:
            await response.write(event(of_renderer(refused).body))
        except ApiError as error:
            await response.write(event(error.body))
        await response.write(DONE)
        await response.write_eof()
        return response

    async def _stream_ids(self, response: web.StreamResponse) -> None:
        head = {"request_id": self.request_id, "output_mode": "tokens"}
        if self.step.wants_logprobs:
            await self._wait(response)
        else:
            async for ids in self._deltas():
                if ids is None:
                    await response.write(KEEP_ALIVE)
                else:
                    choice = generate_choice(ids, None, logprobs=False)
                    await response.write(event({**head, "choices": [choice]}))
        end = await self.step.answer()
        rest = self.step.output_ids if self.step.wants_logprobs else ()
        choice = generate_choice(rest, end, logprobs=self.step.wants_logprobs)
        await response.write(event({**head, "choices": [choice]}))
        await self._write_usage(response, head)

    async def _stream_text(self, response: web.StreamResponse) -> None:
        chat, detokenizer = self.endpoint == CHAT, self.front.detokenizer
        name = f"{'chatcmpl' if chat else 'cmpl'}-{self.request_id}"
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": name, "object": kind, "model": self.front.check_model(self.body)}
        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            await response.write(event({**head, "choices": [{**role, "finish_reason": None}]}))
        sent = ""
        if detokenizer is None or self._needs_its_end():
            await self._wait(response)
        else:
            deltas = TextDeltas(detokenizer)
            async for ids in self._deltas():
                if ids is None:
                    await response.write(KEEP_ALIVE)
                    continue
                text = deltas.add(ids)
                if text:
                    sent += text
                    part = {"delta": {"content": text}} if chat else {"text": text}
                    choice = {"index": 0, **part, "finish_reason": None}
                    await response.write(event({**head, "choices": [choice]}))
        whole = {**await self.response(), "id": name}
        chunks = chat_chunks(whole, sent_text=sent) if chat else text_chunks(whole, sent_text=sent)
        for chunk in chunks:
            await response.write(event(chunk))
        await self._write_usage(response, {k: v for k, v in chunks[-1].items() if k != "choices"})

    def _needs_its_end(self) -> bool:
        """Whether the text cannot be known before the end of the step.

        Parsers of tool calls see whole replies only, log-probs come with the end, and a stop string
        is cut off there.
        """
        sampling = self.step.sampling
        shows_special = sampling.get("skip_special_tokens") is False
        return bool(
            self.body.get("tools")
            or self.step.wants_logprobs
            or sampling.get("stop")
            or shows_special
        )

    async def _write_usage(self, response: web.StreamResponse, head: Mapping[str, Any]) -> None:
        options = self.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            counts = usage(len(self.step.prompt_ids), len(self.step.output_ids))
            await response.write(event({**head, "choices": [], "usage": counts}))

    async def _wait(self, response: web.StreamResponse) -> None:
        while not await self.step.ended(self.front.settings.keep_alive_s):
            await response.write(KEEP_ALIVE)

    def _deltas(self) -> Any:
        settings = self.front.settings
        return token_deltas(
            self.step, keep_alive_s=settings.keep_alive_s, coalesce_s=settings.coalesce_s
        )


def model_endpoint(endpoint: str) -> Handler:
    """Return the handler of an endpoint that generates."""

    async def handle(request: web.Request) -> web.StreamResponse:
        front = request.app[FRONT]
        body = await front.body(request)
        model = front.check_model(body)
        check_supported(body)
        who = _identity(front, request, body)
        if endpoint == GENERATE:
            rendered = rendered_ids(body)
        else:
            rendered = await _renderer(front).render(endpoint, body)
        fresh = new_step(endpoint, body, rendered, context_tokens=front.model.context_tokens)
        name = text_field(body, "request_id") or request.headers.get("X-Request-Id", "")
        step = front.gateway.submit(who, fresh, has_reply=has_reply(endpoint, body), model=model)
        if name:
            front.requests[name] = step
        loop = asyncio.get_running_loop()
        began_s, delivered = loop.time(), False
        exchange = _Exchange(
            front, request, endpoint, body, rendered, step, name or f"{id(step):x}"
        )
        try:
            answer = await (exchange.stream() if body.get("stream") else exchange.whole())
            transport = request.transport
            delivered = transport is not None and not transport.is_closing()
            front.metrics.step(step, loop.time() - began_s)
            return answer
        finally:
            front.gateway.sessions.release(step, delivered=delivered)
            if name and front.requests.get(name) is step:
                del front.requests[name]

    return handle


def passed_on(path: str) -> Handler:
    """Return the handler of an endpoint that an engine answers."""

    async def handle(request: web.Request) -> web.StreamResponse:
        front = request.app[FRONT]
        body = await front.body(request)
        front.check_model(body)
        if front.engine_calls is None:
            raise ApiError(501, f"no engine here answers {path}", kind="not_implemented_error")
        return json_response(await front.engine_calls.call(path, body))

    return handle


async def list_models(request: web.Request) -> web.StreamResponse:
    """``GET /v1/models``."""
    model = request.app[FRONT].model
    return json_response(models_response(model.names, model.context_tokens))


def _identity(front: Front, request: web.Request, body: Mapping[str, Any]) -> Identity:
    return identify(
        request.headers,
        body,
        path_session=path_session(request),
        user_is_session=front.settings.user_is_session,
    )


def path_session(request: web.Request) -> str:
    """Return the session id in a path, "" if it has none."""
    return request.match_info.get("session", "")


def _renderer(front: Front) -> Renderer:
    if front.renderer is None:
        raise ApiError(
            501,
            f"this gateway has no renderer for text: send token ids to {GENERATE}",
            kind="not_implemented_error",
        )
    return front.renderer


MODEL_ENDPOINTS: tuple[tuple[str, str, Callable[[], Handler]], ...] = (
    ("POST", CHAT, lambda: model_endpoint(CHAT)),
    ("POST", COMPLETIONS, lambda: model_endpoint(COMPLETIONS)),
    ("POST", GENERATE, lambda: model_endpoint(GENERATE)),
    ("GET", "/v1/models", lambda: list_models),
)
"""Method, path and handler; each is under ``/sessions/{session}`` too."""
