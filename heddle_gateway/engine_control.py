"""Control calls that go on to every engine: for trainers whose only URL is the gateway's.

The paths are those of vLLM's development mode, as SkyRL's client calls them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from heddle_gateway.errors import ApiError
from heddle_gateway.front import EngineControl, Front, Handler, json_response
from heddle_gateway.http import HttpRequest, Response

NEW_WEIGHTS: Final = ("/update_weights", "/finish_weight_update", "/collective_rpc")
"""After them engines may have other weights."""
NO_KV: Final = ("/reset_prefix_cache", "/sleep")
"""After them engines hold no KV of before."""
PASSED_TO_ALL: Final = ("/start_weight_update", "/wake_up", *NEW_WEIGHTS, *NO_KV)


def control_of(front: Front) -> EngineControl:
    """Return the control of the engines.

    Raises:
        ApiError: there is none.
    """
    if front.control is None:
        raise ApiError(
            501,
            "engines that the gateway started take no control calls; `heddle serve --worker URL` "
            "passes them on",
            kind="not_implemented_error",
        )
    return front.control


def passed_to_all(path: str) -> Handler:
    """Return the handler of a path that every engine gets with the same body and query."""

    async def handle(front: Front, request: HttpRequest) -> Response:
        control, body = control_of(front), await front.body(request)
        if path == "/sleep":
            front.gateway.pause()
        query = f"?{request.query_string}" if request.query_string else ""
        answers = await control.call_all(path + query, [body] * len(control.names))
        if path in NEW_WEIGHTS or path in NO_KV:
            front.gateway.void_kv(new_weights=path in NEW_WEIGHTS)
        tags = request.query.every("tags")
        if path == "/wake_up" and (not tags or "kv_cache" in tags):
            front.gateway.resume()
        return json_response({"status": "ok", "engines": answers})

    return handle


async def world_size(front: Front, request: HttpRequest) -> Response:
    """``GET /get_world_size``: that of all engines together."""
    answers = await control_of(front).call_all("/get_world_size")
    return json_response({"world_size": sum(_sizes(answers))})


async def init_weight_transfer(front: Front, request: HttpRequest) -> Response:
    """``POST /init_weight_transfer_engine``: each engine gets the ranks after those before it."""
    control, body = control_of(front), await front.body(request)
    info = body.get("init_info")
    offset = info.get("rank_offset") if isinstance(info, dict) else None
    bodies: list[Mapping[str, Any]] = [body] * len(control.names)
    if isinstance(offset, int):
        bodies = []
        for size in _sizes(await control.call_all("/get_world_size")):
            bodies.append({**body, "init_info": {**body["init_info"], "rank_offset": offset}})
            offset += size
    answers = await control.call_all("/init_weight_transfer_engine", bodies)
    return json_response({"status": "ok", "engines": answers})


async def engines_paused(front: Front, query: str) -> Sequence[str]:
    """Pause the engines that can, and return them."""
    if front.control is None:
        return []
    bodies: list[Mapping[str, Any]] = [{} for _ in front.control.names]
    return list(await front.control.call_all(f"/pause?{query}", bodies, optional=True))


async def engines_resumed(front: Front) -> None:
    """Let paused engines go on."""
    if front.control is not None:
        await front.control.call_all("/resume", [{} for _ in front.control.names], optional=True)


def _sizes(answers: Mapping[str, Any]) -> list[int]:
    """World sizes of engines.

    Raises:
        ApiError: an engine did not say its own.
    """
    found = []
    for name, answer in answers.items():
        size = answer.get("world_size") if isinstance(answer, Mapping) else None
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ApiError(502, f"{name} did not say its world size", kind="server_error")
        found.append(size)
    return found
