"""Endpoints of models: chat, completions, token ids, and calls that an engine answers."""

import asyncio
import math
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import web

from heddle_gateway.answers import Reply, joined_logprobs, tool_of, whole_answer, whole_finish
from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError, of_engine, of_renderer
from heddle_gateway.front import Front, Handler, json_response
from heddle_gateway.identity import Identity, identify
from heddle_gateway.openai_api import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    check_supported,
    counted_usage,
    generate_choice,
    generate_response,
    has_reply,
    models_response,
    new_step,
    parse_body,
    rendered_ids,
    text_field,
)
from heddle_gateway.rendering import Renderer
from heddle_gateway.streams import DONE, HEAD_S, KEEP_ALIVE, TextStream, event, token_deltas
from heddle_runtime.generation import GenerationEnd, Rendered, RenderError

PASSED_ON = ("/tokenize", "/detokenize", f"{CHAT}/render", f"{COMPLETIONS}/render")
EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DEADLINE: Final = "X-Heddle-Deadline-S"
"""Header with the seconds after which a client wants no answer any more."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request of a client and its step."""

    front: Front
    request: web.Request
    endpoint: str
    body: dict[str, Any]
    rendered: Rendered
    step: ClientStep
    request_id: str

    @property
    def name(self) -> str:
        """The id of the answer."""
        return {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-"}.get(self.endpoint, "") + self.request_id

    async def whole(self) -> web.Response:
        """Wait for the end, and answer with everything."""
        end = await self.step.answer()
        response = await self._response(end)
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

    async def _response(self, end: GenerationEnd) -> dict[str, Any]:
        """The whole response object."""
        step = self.step
        if self.endpoint == GENERATE:
            return generate_response(self.request_id, self.body, step, end)
        if step.relay is not None and not step.relay.counts_tokens and step.relayed.events:
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
        counted = counted_usage(len(step.prompt_ids), len(step.output_ids), end)
        whole = partial(whole_answer, self.endpoint, self.body, name=self.name, counted=counted)
        if reply is not None and form and not (facts is not None and facts.parses):
            return whole(reply, form=form)
        made = await _renderer(self.front).derender(
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

    async def stream(self) -> web.StreamResponse:
        """Send events as tokens come.

        An error before the first is the response, as it is vLLM's; later ones are events too.
        """
        events = self._id_events() if self.endpoint == GENERATE else self._text_events()
        response = web.StreamResponse(headers=EVENT_STREAM)
        try:
            async for found in events:
                if not response.prepared:
                    await response.prepare(self.request)
                await response.write(KEEP_ALIVE if found is None else event(found))
        except (RenderError, ApiError) as failed:
            error = of_renderer(failed) if isinstance(failed, RenderError) else failed
            if not (response.prepared or error.in_stream):
                raise error from None
            if not response.prepared:
                await response.prepare(self.request)
            await response.write(event(error.body))
        if not response.prepared:
            await response.prepare(self.request)
        await response.write(DONE)
        await response.write_eof()
        return response

    async def _id_events(self) -> Any:
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
            counts = counted_usage(len(step.prompt_ids), len(step.output_ids), end)
            yield {**head, "choices": [], "usage": counts}

    async def _text_events(self) -> Any:
        stream = TextStream(
            self.step,
            _renderer(self.front),
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
                    # Before the client has it, as in `_response`.
                    said = Reply(sent)
                    spoken = {"message": said.message, "text": said.text}
                    name = tool_of({"choices": [spoken]})
                    self.front.gateway.sessions.name_tool(self.step, name)
            yield found


def model_endpoint(endpoint: str) -> Handler:
    """Return the handler of an endpoint that generates."""

    async def handle(front: Front, request: web.Request) -> web.StreamResponse:
        raw = await front.raw_body(request)
        try:
            body = parse_body(raw) if raw else {}
            model = front.check_model(body)
            facts = front.engine_facts() if endpoint != GENERATE else None
            relayed = facts is not None and endpoint in facts.answers
            check_supported(body, relayed=relayed)
            who = _identity(front, request, body)
            if endpoint == GENERATE:
                rendered = rendered_ids(body)
            else:
                rendered = await _renderer(front).render(endpoint, front.for_engines(body))
            fresh = new_step(
                endpoint,
                front.for_engines(body),
                rendered,
                context_tokens=front.model.context_tokens,
                relayed=relayed,
                deadline_s=_deadline_s(request),
            )
        except (RenderError, ApiError) as wrong:
            refusal = await _refusal(front, request, endpoint, raw, wrong)
            if refusal.in_stream:
                return await _error_stream(request, refusal)
            raise refusal from None
        named = request.headers.get("X-Request-Id") or text_field(body, "request_id")
        step = front.gateway.submit(who, fresh, has_reply=has_reply(endpoint, body), model=model)
        if named:
            front.requests[named] = step
        loop = asyncio.get_running_loop()
        began_s, delivered = loop.time(), False
        # An empty one is kept, as vLLM keeps it.
        own = named or ("" if body.get("request_id") == "" else uuid.uuid4().hex[:16])
        exchange = _Exchange(front, request, endpoint, body, rendered, step, own)
        try:
            answer = await (exchange.stream() if body.get("stream") else exchange.whole())
            transport = request.transport
            delivered = transport is not None and not transport.is_closing()
            front.metrics.step(step, loop.time() - began_s)
            return answer
        finally:
            front.gateway.sessions.release(step, delivered=delivered)
            if named and front.requests.get(named) is step:
                del front.requests[named]

    return handle


async def _error_stream(request: web.Request, error: ApiError) -> web.StreamResponse:
    """Send a refusal as vLLM sends it once it has begun to stream."""
    response = web.StreamResponse(headers=EVENT_STREAM)
    await response.prepare(request)
    await response.write(event(error.body) + DONE)
    await response.write_eof()
    return response


async def _refusal(
    front: Front, request: web.Request, endpoint: str, raw: bytes, wrong: RenderError | ApiError
) -> ApiError:
    """Return vLLM's own refusal of a body, if it refuses it too; else ours."""
    ours = of_renderer(wrong) if isinstance(wrong, RenderError) else wrong
    if ours.ours or not 400 <= ours.status < 500 or front.renderer is None:
        return ours
    with suppress(ApiError):
        body = parse_body(raw)
        if (named := front.for_engines(body)) is not body:
            front.check_model(body)
            raw = msgspec.json.encode(named)
    try:
        theirs = await front.renderer.refusal(
            endpoint, raw, request.headers.get("Content-Type", "")
        )
    except (RenderError, ApiError):
        return ours
    return ours if theirs is None else of_engine(theirs)


def _deadline_s(request: web.Request) -> float | None:
    """Return until when a client waits, by the event loop's clock; None: for ever.

    Raises:
        ApiError: they are none.
    """
    given = request.headers.get(DEADLINE)
    if given is None:
        return None
    try:
        limit_s = float(given)
    except ValueError:
        limit_s = math.nan
    if not 0.0 < limit_s < math.inf:
        raise ApiError(400, f"{DEADLINE} is {given[:80]!r}: give seconds, more than 0")
    return asyncio.get_running_loop().time() + limit_s


def passed_on(path: str) -> Handler:
    """Return the handler of an endpoint that an engine answers."""

    async def handle(front: Front, request: web.Request) -> web.StreamResponse:
        body = await front.body(request)
        front.check_model(body)
        if front.renderer is None:
            raise ApiError(501, f"no engine here answers {path}", kind="not_implemented_error")
        return json_response(await front.renderer.call(path, body))

    return handle


async def list_models(front: Front, request: web.Request) -> web.StreamResponse:
    """``GET /v1/models``."""
    return json_response(models_response(front.model))


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


MODEL_ENDPOINTS: tuple[tuple[str, str, Handler], ...] = (
    *(("POST", path, model_endpoint(path)) for path in (CHAT, COMPLETIONS, GENERATE)),
    ("GET", "/v1/models", list_models),
)
"""Method, path and handler; each is under ``/sessions/{session}`` too."""
