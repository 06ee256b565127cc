"""Endpoints of models: chat, completions, token ids, and calls that an engine answers."""

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import NOT_FOUND, ApiError, not_there, of_engine, of_renderer
from heddle_gateway.exchange import Exchange, refused_stream, renderer_of, streamed, whole
from heddle_gateway.front import Front, Handler, json_response
from heddle_gateway.http import HttpRequest, Response
from heddle_gateway.identity import Identity, identify
from heddle_gateway.openai_api import (
    GENERATE,
    check_supported,
    has_reply,
    models_response,
    new_step,
    one_prompt_each,
    rendered_ids,
    sample,
    samples_of,
    text_field,
)
from heddle_runtime.generation import Rendered, RenderError, trace_context
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS, FORWARDED, MESSAGES, RESPONSES

PASSED_ON: Final = (
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
    *(f"{path}/render" for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)),
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
)
DEADLINE: Final = "X-Heddle-Deadline-S"
"""Header with the seconds after which a client wants no answer any more."""


def model_endpoint(endpoint: str) -> Handler:
    """Return the handler of an endpoint that generates."""

    async def handle(front: Front, request: HttpRequest) -> Response:
        try:
            body = await front.body(request, has_ids=endpoint == GENERATE)
            checked = await _checked(front, request, endpoint, body)
        except (RenderError, ApiError) as wrong:
            refusal = await _refusal(front, request, endpoint, wrong)
            if refusal.in_stream:
                return await refused_stream(request, endpoint, refusal)
            raise refusal from None
        request.drop_body()  # for as long as the step waits
        with front.tenants.holding(checked.who.tenant, len(checked.steps)):
            return await _answered(front, request, endpoint, checked)

    return handle


@dataclass(frozen=True, slots=True)
class _Checked:
    """A request after all checks, with a step for each answer that it asks for."""

    body: dict[str, Any]
    named: str
    """The client's id of it, "" for none."""
    who: Identity
    model: str
    samples: int
    steps: Sequence[tuple[dict[str, Any], Rendered, ClientStep]]
    """Body, prompt and step of each answer; the samples of a prompt are beside each other."""


async def _checked(
    front: Front, request: HttpRequest, endpoint: str, body: dict[str, Any]
) -> _Checked:
    """Read a request.

    Raises:
        ApiError: it cannot be answered.
        RenderError: it is refused.
    """
    model, body = front.check_model(body), front.for_engines(body)
    facts = front.engine_facts() if endpoint != GENERATE else None
    relayed = facts is not None and (endpoint in facts.answers or endpoint in FORWARDED)
    if endpoint in FORWARDED:
        _check_forwarded(endpoint, body, relayed=relayed, tenant=request.tenant)
    check_supported(body, relayed=relayed)
    who, deadline_s = _identity(front, request, body), _deadline_s(request)
    samples = _samples(endpoint, body)
    named = request.headers.get("X-Request-Id") or text_field(body, "request_id")
    trace, traces = trace_context(request.headers.get("traceparent", "")), front.traces
    make = partial(
        new_step,
        name=named,
        context_tokens=front.model.context_tokens,
        relayed=relayed,
        deadline_s=deadline_s,
        adapter=model if model in front.model.adapters() else "",
        tenant=who.tenant,
    )
    steps = []
    prompts = one_prompt_each(endpoint, body)
    _weigh(front, request, prompts, samples)
    for each in prompts:
        if endpoint == GENERATE:
            rendered = rendered_ids(each, front.prompts, who.session)
            del each["token_ids"]  # as JSON it holds the whole body
        else:
            read = partial(front.prompts.read, who.session)
            rendered = await renderer_of(front).render(endpoint, each, read)
        for number in range(samples):
            if samples > 1:
                one, prompt = sample(each, number), copy(rendered)
                prompt.sampling = sample(rendered.sampling, number)
            else:
                one, prompt = each, rendered
            mine = traces.of_step(trace) if traces is not None else trace
            steps.append((one, prompt, make(endpoint, one, prompt, sample=number, trace=mine)))
    return _Checked(prompts[0], named, who, model, samples, steps)


def _weigh(
    front: Front, request: HttpRequest, prompts: Sequence[dict[str, Any]], samples: int
) -> None:
    """Count a body as often as engines get it, once an answer, where that makes it large.

    Raises:
        ApiError: it is too much.
    """
    more = len(prompts) - 1
    rest = len(msgspec.json.encode({**prompts[0], "prompt": None})) if more else 0
    size = samples * (request.size + more * rest)
    if size > max(request.size, front.settings.body_bytes):
        request.hold(max(size, request.held))


def _samples(endpoint: str, body: Mapping[str, Any]) -> int:
    """How many answers a request wants of each prompt; paths without `n` have one."""
    sampling = body.get("sampling_params") if endpoint == GENERATE else body
    if endpoint in FORWARDED or not isinstance(sampling, Mapping):
        return 1
    return samples_of(sampling)


def _check_forwarded(endpoint: str, body: Mapping[str, Any], *, relayed: bool, tenant: str) -> None:
    if tenant and body.get("previous_response_id"):
        # Engines cannot tell whose a stored response is.
        text = "previous_response_id is not supported with serve.keys: send the whole input"
        raise ApiError(400, text, param="previous_response_id", ours=True)
    if not relayed:
        text = f"{endpoint} is answered by engines by URL, and there are none"
        raise ApiError(501, text, kind="not_implemented_error", ours=True)
    if body.get("background"):
        text = "background is not supported: nobody would wait for the step"
        raise ApiError(400, text, param="background", ours=True)


async def _answered(
    front: Front, request: HttpRequest, endpoint: str, checked: _Checked
) -> Response:
    """Submit the steps of a request, and answer when they bring something."""
    body = checked.body
    named = checked.named
    # An empty one is kept, as vLLM keeps it.
    own = named or ("" if body.get("request_id") == "" else f"{random.getrandbits(64):016x}")
    replied = has_reply(endpoint, body)
    began_s, delivered = time.monotonic(), False
    steps: list[ClientStep] = []
    request.steps = steps
    exchanges = []
    try:
        for one, rendered, fresh in checked.steps:
            step = front.gateway.submit(checked.who, fresh, has_reply=replied, model=checked.model)
            steps.append(step)
            exchanges.append(Exchange(front, endpoint, one, rendered, step, own))
        if named:
            front.requests[named] = steps
        if body.get("stream"):
            answer = await streamed(request, exchanges, checked.samples)
        else:
            answer = await whole(exchanges, checked.samples)
        transport = request.transport
        delivered = transport is not None and not transport.is_closing()
        for step in steps:
            front.metrics.step(step, began_s, time.monotonic())
        return answer
    finally:
        for step in steps:
            front.gateway.sessions.release(step, delivered=delivered)
        if named and front.requests.get(named) is steps:
            del front.requests[named]


async def _refusal(
    front: Front, request: HttpRequest, endpoint: str, wrong: RenderError | ApiError
) -> ApiError:
    """Return vLLM's own refusal of a body, if it refuses it too; else ours.

    A body that vLLM takes is generated until it is known: within the limits of the tenant, and not
    in a pause.
    """
    ours = of_renderer(wrong) if isinstance(wrong, RenderError) else wrong
    if ours.ours or not 400 <= ours.status < 500 or front.renderer is None or front.gateway.paused:
        return ours
    raw = await front.raw_body(request)
    with suppress(ApiError):
        body = await front.body(request)
        if (named := front.for_engines(body)) is not body:
            front.check_model(body)
            raw = msgspec.json.encode(named)
    kind = request.headers.get("Content-Type", "")
    try:
        with front.tenants.holding(request.tenant, 1):
            theirs = await front.renderer.refusal(endpoint, raw, kind)
    except (RenderError, ApiError):
        return ours
    return ours if theirs is None else of_engine(theirs)


def _deadline_s(request: HttpRequest) -> float | None:
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
        text = f"{DEADLINE} is {given[:80]!r}: give seconds, more than 0"
        raise ApiError(400, text, ours=True)
    return asyncio.get_running_loop().time() + limit_s


def passed_on(path: str) -> Handler:
    """Return the handler of an endpoint that an engine answers."""

    async def handle(front: Front, request: HttpRequest) -> Response:
        body = await front.body(request)
        try:
            front.check_model(body)
        except ApiError as wrong:
            raise await _refusal(front, request, path, wrong) from None
        if front.renderer is None:
            raise ApiError(501, f"no engine here answers {path}", kind="not_implemented_error")
        try:
            return json_response(await front.renderer.call(path, front.for_engines(body)))
        except RenderError as refused:
            if str(refused) == NOT_FOUND:
                raise not_there(404, NOT_FOUND) from None
            raise

    return handle


async def list_models(front: Front, request: HttpRequest) -> Response:
    """``GET /v1/models``."""
    return json_response(models_response(front.model, front.others))


async def one_model(front: Front, request: HttpRequest) -> Response:
    """``GET /v1/models/{model}``."""
    name = request.match_info["model"]
    listed = models_response(front.model, front.others)["data"]
    found = next((each for each in listed if each["id"] == name), None)
    if found is None:
        front.check_model({"model": name})
    return json_response(found)


def _identity(front: Front, request: HttpRequest, body: Mapping[str, Any]) -> Identity:
    tenant = request.tenant
    return identify(
        request.headers,
        body,
        tenant=tenant,
        tier=front.tenants.tier(tenant),
        path_session=path_session(request),
        user_is_session=front.settings.user_is_session,
    )


def path_session(request: HttpRequest) -> str:
    """Return the session id in a path, "" if it has none."""
    return request.match_info.get("session", "")


MODEL_ENDPOINTS: tuple[tuple[str, str, Handler], ...] = (
    *(
        ("POST", path, model_endpoint(path))
        for path in (CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES)
    ),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{model:.+}", one_model),
)
"""Method, path and handler; each is under ``/sessions/{session}`` too."""
