"""Endpoints of sessions, rollouts, engines and control."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlencode

from heddle_core.ids import RolloutId
from heddle_gateway.endpoints import path_session
from heddle_gateway.engine_control import engines_paused, engines_resumed
from heddle_gateway.errors import ApiError
from heddle_gateway.front import Front, json_response
from heddle_gateway.gateway import Gateway
from heddle_gateway.http import HttpRequest, Response
from heddle_gateway.identity import owned, readable
from heddle_gateway.openai_api import text_field
from heddle_rollout.driver import RolloutError
from heddle_runtime.vllm_http.endpoint import UnreachableError, without_user

WEIGHT_SYNC_S: Final = 300.0
"""A weight sync that does not end for so long is given up: dispatches go on."""
DRAIN_LIMIT_S: Final = 600.0
FINISH_S: Final = 5.0
"""Of the end of a session at the server of another model."""

# -- sessions ------------------------------------------------------------------------------------


async def finish_session(front: Front, request: HttpRequest) -> Response:
    """``POST /finish_session?session_id=``: any number of times, for any id."""
    session = request.query.get("session_id") or text_field(await front.body(request), "session_id")
    if not session:
        raise ApiError(400, "give session_id", param="session_id")
    return await _finish(front, request, session)


async def finish_path_session(front: Front, request: HttpRequest) -> Response:
    """``DELETE /sessions/{session}`` and ``POST /sessions/{session}/complete``."""
    return await _finish(front, request, path_session(request))


async def release_program(front: Front, request: HttpRequest) -> Response:
    """``POST /programs/release``."""
    program = text_field(await front.body(request), "program_id")
    if not program:
        raise ApiError(400, "give program_id", param="program_id")
    return await _finish(front, request, program)


async def _finish(front: Front, request: HttpRequest, session: str) -> Response:
    tenant = request.tenant
    finished = front.gateway.sessions.finish(owned(tenant, session))
    path = f"/finish_session?{urlencode({'session_id': session})}"
    # Another gateway does not know whose a session is.
    for other in front.others.values() if not tenant else ():
        with suppress(UnreachableError):
            answer = (await other.call(path, {}, limit_s=FINISH_S)).json()
            finished |= isinstance(answer, dict) and answer.get("finished") is True
    return json_response({"status": "ok", "finished": finished})


# -- rollouts ------------------------------------------------------------------------------------


async def open_rollout(front: Front, request: HttpRequest) -> Response:
    """``POST /rollouts {id, trajectories, weights_version}``."""
    body = await front.body(request)
    name = readable(text_field(body, "id"))
    if not name:
        raise ApiError(400, "give id", param="id")
    trajectories = _count(body, "trajectories")
    version = _count(body, "weights_version") or 0
    try:
        front.gateway.open_rollout(
            RolloutId(name), trajectories=trajectories, weights_version=version
        )
    except RolloutError as error:
        raise ApiError(409, str(error), param="id") from None
    return json_response({"status": "ok", "id": name})


async def close_rollout(front: Front, request: HttpRequest) -> Response:
    """``POST /rollouts/{id}/end``."""
    try:
        front.gateway.close_rollout(RolloutId(readable(request.match_info["id"])))
    except RolloutError as error:
        raise ApiError(409, str(error), param="id") from None
    return json_response({"status": "ok"})


# -- engines -------------------------------------------------------------------------------------


async def add_engine(front: Front, request: HttpRequest) -> Response:
    """``POST /workers {url, tp, gpu, max_running}`` and ``POST /add_worker?url=``."""
    body = await front.body(request)
    url = request.query.get("url") or text_field(body, "url")
    if not url:
        raise ApiError(400, "give the url of the engine", param="url")
    urls = front.engine_urls
    if urls is None:
        raise ApiError(
            409,
            "this gateway starts its engines itself; `heddle serve --worker URL` takes others",
            code="own_engines",
        )
    return json_response({"status": "ok", **await urls.add(url, body)})


async def list_engines(front: Front, request: HttpRequest) -> Response:
    """``GET /workers`` and ``GET /list_workers``."""
    found: Sequence[Mapping[str, Any]]
    if front.settings.lists_itself:
        url = f"http://{request.headers.get('Host', '')}"
        found = [{"id": url, "url": url}]
    elif front.engine_urls is not None:
        found = front.engine_urls.registered()
    else:
        found = [
            {"id": str(name), "url": None, "max_running": slots}
            for name, slots in front.gateway.engines.items()
        ]
    return json_response({"workers": found, "urls": [each["url"] for each in found]})


async def remove_engine(front: Front, request: HttpRequest) -> Response:
    """``DELETE /workers/{id or URL}?drain=`` and ``POST /remove_worker?url=``.

    It answers at once; a draining engine is listed until it has left.
    """
    engine = request.query.get("url") or request.match_info.get("id", "")
    drain = {"": False, "false": False, "0": False, "true": True, "1": True}.get(
        request.query.get("drain", "").lower()
    )
    if drain is None:
        shown = request.query["drain"][:80]
        raise ApiError(400, f"drain is {shown!r}: give true or false", param="drain")
    if front.engine_urls is None:
        raise ApiError(409, "this gateway starts its engines itself", code="own_engines")
    found = front.engine_urls.remove(engine, drain=drain)
    if found is None:
        raise ApiError(
            404, f"no engine {without_user(engine)[:200]!r} is registered", kind="not_found_error"
        )
    return json_response({"status": "ok", **found})


# -- control -------------------------------------------------------------------------------------


async def abort_requests(front: Front, request: HttpRequest) -> Response:
    """``POST /abort_requests`` and ``/abort_request``: some by id, or all."""
    body = await front.body(request)
    ids = body.get("request_ids")
    if ids is None and body.get("rid"):
        ids = [body["rid"]]
    reason = "aborted by a request"
    if not ids or body.get("abort_all"):
        return json_response({"status": "ok", "aborted": front.gateway.abort_all(reason)})
    if not isinstance(ids, list):
        raise ApiError(400, "request_ids must be a list", param="request_ids")
    named = (front.requests.get(i, ()) for i in ids if isinstance(i, str))
    found = [step for steps in named for step in steps]
    for step in found:
        front.gateway.sessions.abort(step, reason)
    return json_response({"status": "ok", "aborted": len(found)})


async def pause(front: Front, request: HttpRequest) -> Response:
    """``POST /pause?mode=``: ``abort`` ends running steps, ``wait`` answers when none runs.

    ``keep`` leaves them as they are. Engines that can pause themselves do so last, with the same
    query: then ``keep`` stops running steps until the end of the pause.
    """
    gateway = front.gateway
    mode = request.query.get("mode", "wait")
    if mode not in ("abort", "wait", "keep"):
        raise ApiError(400, f"mode is {mode!r}; give abort, wait or keep", param="mode")
    gateway.pause()
    if mode == "abort":
        gateway.abort_all("aborted by a pause")
    drained = mode == "keep" or await gateway.drained(DRAIN_LIMIT_S)
    paused = await engines_paused(front, urlencode({**request.query, "mode": mode}))
    if request.query.get("clear_cache") == "true" and paused:
        gateway.void_kv(new_weights=False)
    return json_response({"status": "paused", "mode": mode, "drained": drained, "engines": paused})


async def resume(front: Front, request: HttpRequest) -> Response:
    """``POST /resume {weights_version}``."""
    version = _count(await front.body(request), "weights_version")
    before = front.gateway.weights_version
    await engines_resumed(front)
    front.gateway.resume(version)
    answer = {"status": "resumed"}
    if version is not None and version < before:  # as after a training that began at a checkpoint
        answer["note"] = f"weights_version was {before}, and is {version} now"
    return json_response(answer)


async def begin_weight_sync(front: Front, request: HttpRequest) -> Response:
    """``POST /weight_sync/begin``: a pause that ends by itself if nobody ends it."""
    gateway = front.gateway
    gateway.pause()
    asyncio.get_running_loop().call_later(WEIGHT_SYNC_S, _end_weight_sync, gateway, gateway.pauses)
    return json_response({"status": "paused", "drained": await gateway.drained(DRAIN_LIMIT_S)})


def _end_weight_sync(gateway: Gateway, pause: int) -> None:
    """End the pause that a weight sync began, and no later one."""
    if gateway.paused and gateway.pauses == pause:
        gateway.resume()


async def end_weight_sync(front: Front, request: HttpRequest) -> Response:
    """``POST /weight_sync/end {weights_version}``."""
    version = _count(await front.body(request), "weights_version")
    if version is None:
        version = _count({"weights_version": front.gateway.weights_version + 1}, "weights_version")
    front.gateway.resume(version)
    return json_response({"status": "resumed", "weights_version": front.gateway.weights_version})


# -- what there is -------------------------------------------------------------------------------


async def health(front: Front, request: HttpRequest) -> Response:
    """``GET /health``: 200 while an engine takes work."""
    ready = front.gateway.ready
    return json_response(
        {"status": "ok" if ready else "no engine is ready"},
        status=200 if ready else 503,
    )


async def livez(front: Front, request: HttpRequest) -> Response:
    """``GET /livez``: 200 until an error has ended the run."""
    failed = front.gateway.failed
    return json_response({"status": "failed" if failed else "ok"}, status=500 if failed else 200)


async def drain(front: Front, request: HttpRequest) -> Response:
    """``POST /drain``: no more steps, and the end once no step is under way."""
    steps = len(list(front.gateway.sessions.under_way))
    front.end()
    return json_response({"status": "draining", "steps": steps})


async def reload(front: Front, request: HttpRequest) -> Response:
    """``POST /reload``: keys and engines are read again; 500 if some of it cannot be used."""
    notes = await front.reload() if front.reload else ()
    said = {"status": "failed" if notes else "ok", "notes": notes}
    return json_response(said, status=500 if notes else 200)


async def metrics(front: Front, request: HttpRequest) -> Response:
    """``GET /metrics``."""
    return Response(
        front.metrics.text(front.gateway).encode(),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def load(front: Front, request: HttpRequest) -> Response:
    """``GET /load``: steps under way, with ``include_inflight=true`` by queue as vLLM has them."""
    steps = list(front.gateway.sessions.under_way)
    answer: dict[str, Any] = {"server_load": len(steps)}
    if request.query.get("include_inflight") == "true":
        waiting = sum(step.dispatches == 0 for step in steps)
        counts = {"running": len(steps) - waiting, "waiting": waiting}
        queues = [{"name": name, "num_requests": n, "requests": []} for name, n in counts.items()]
        answer["inflight"] = [{"data_parallel_rank": 0, "queues": queues}]
    return json_response(answer)


async def state(front: Front, request: HttpRequest) -> Response:
    """``GET /heddle/state``: engines, and the steps under way."""
    gateway = front.gateway
    steps = [
        {
            "trajectory": step.trajectory,
            "engine": step.engine or None,
            "prompt_tokens": step.prompt_tokens,
            "output_tokens": len(step.output_ids),
            "dispatches": step.dispatches,
            "clients": step.clients,
        }
        for step in gateway.sessions.under_way
    ]
    return json_response(
        {
            "engines": [{"id": str(e), "max_running": n} for e, n in gateway.engines.items()],
            "paused": gateway.paused,
            "weights_version": gateway.weights_version,
            "sessions": len(gateway.sessions),
            "trajectories": gateway.sessions.trajectories,
            "trajectories_in_tool": gateway.sessions.idle,
            "steps": steps,
        }
    )


def _count(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        text = f"{name} must be a whole number from 0 to {2**31 - 1:,}"
        raise ApiError(400, text, param=name)
    return value
