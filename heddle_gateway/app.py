"""The aiohttp application: which path has which handler, and who may call it."""

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from heddle_gateway import control, engine_control
from heddle_gateway.endpoints import MODEL_ENDPOINTS, PASSED_ON, passed_on
from heddle_gateway.errors import not_there
from heddle_gateway.front import (
    MOST_OPEN,
    Access,
    Answering,
    Front,
    Handler,
    answering,
    error_response,
)
from heddle_runtime.vllm_http.probe import GATEWAY_HEADER

BACKLOG: Final = 65_535
"""Connections that wait to be accepted; the system has a limit of its own."""
SPARE_FILES: Final = 1_024
"""Files and sockets beside those of clients."""
_SESSION: Final = "/sessions/{session:[\\s\\S]+}"

_CLIENTS: Final = (
    ("POST", "/finish_session", control.finish_session),
    ("POST", "/programs/release", control.release_program),
    ("POST", _SESSION + "/complete", control.finish_path_session),
    ("DELETE", _SESSION, control.finish_path_session),
    ("GET", "/load", control.load),
)
_ADMINS: Final = (
    ("POST", "/rollouts", control.open_rollout),
    ("POST", "/rollouts/{id}/end", control.close_rollout),
    ("GET", "/workers", control.list_engines),
    ("POST", "/workers", control.add_engine),
    ("DELETE", "/workers/{id:.+}", control.remove_engine),
    ("GET", "/list_workers", control.list_engines),
    ("POST", "/add_worker", control.add_engine),
    ("POST", "/remove_worker", control.remove_engine),
    ("POST", "/abort_requests", control.abort_requests),
    ("POST", "/abort_request", control.abort_requests),
    ("POST", "/inference/v1/abort_requests", control.abort_requests),
    ("POST", "/pause", control.pause),
    ("POST", "/resume", control.resume),
    ("GET", "/get_world_size", engine_control.world_size),
    ("POST", "/init_weight_transfer_engine", engine_control.init_weight_transfer),
    ("POST", "/weight_sync/begin", control.begin_weight_sync),
    ("POST", "/weight_sync/end", control.end_weight_sync),
    ("POST", "/drain", control.drain),
    ("POST", "/reload", control.reload),
    ("GET", "/metrics", control.metrics),
    ("GET", "/heddle/state", control.state),
)


_PATHS: Final = frozenset(path for _, path, _ in (*MODEL_ENDPOINTS, *_CLIENTS, *_ADMINS))
_REQUESTED: Final[web.AppKey[set[Any]]] = web.AppKey("requested", set)
"""Connections that have sent a whole request head; closed ones are dropped from time to time."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a failed request is the gateway's fault: clients that send no HTTP fill no log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, web.RequestPayloadError))


_LOG: Final = logging.getLogger(__name__)
_LOG.addFilter(_is_ours)


class FileLimitError(ValueError):
    """The system permits too few open files; the message has the remedy."""


def most_open() -> int:
    """Return how many requests may be open as far as the system permits files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if hard == resource.RLIM_INFINITY else min(MOST_OPEN, hard - SPARE_FILES)


def raise_file_limit(max_open: int) -> None:
    """Permit a file for each open request.

    Raises:
        FileLimitError: the system permits fewer.
    """
    needed = max_open + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise FileLimitError(
            f"{max_open:,} open requests need {needed:,} files, and the system permits {hard:,}: "
            f"raise the limit (ulimit -n), or give max_open = {max(hard - SPARE_FILES, 1)}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def application(front: Front) -> web.Application:
    """Return the application of a gateway."""
    app = web.Application(client_max_size=front.settings.body_bytes, middlewares=[_unknown_paths])
    app[_REQUESTED] = set()
    app.on_response_prepare.append(_sign)

    def add(method: str, path: str, handle: Handler, access: Access = "client") -> None:
        app.router.add_route(method, path, answering(front, path, handle, access))

    add("GET", "/health", control.health, "open")
    add("GET", "/readyz", control.health, "open")
    add("GET", "/livez", control.livez, "open")
    for method, path, handle in MODEL_ENDPOINTS:
        for each in (path, _SESSION + path):
            add(method, each, handle, "limited" if method == "POST" else "client")
    for path in PASSED_ON:
        add("POST", path, passed_on(path), "limited")
    for method, path, handle in _CLIENTS:
        add(method, path, handle)
    for method, path, handle in _ADMINS:
        add(method, path, handle, "admin")
    for path in engine_control.PASSED_TO_ALL:
        add("POST", path, engine_control.passed_to_all(path), "admin")
    return app


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[GATEWAY_HEADER] = "heddle"


@web.middleware
async def _unknown_paths(request: web.Request, handler: Answering) -> web.StreamResponse:
    """Answer paths and methods that are not there as vLLM does, a slash at the end among them."""
    request.app[_REQUESTED].add(request.protocol)
    missing = request.match_info.http_exception
    if missing is None:
        return await handler(request)
    path = request.path.rstrip("/")
    if missing.status == HTTPStatus.NOT_FOUND and path != request.path and path in _PATHS:
        raise web.HTTPTemporaryRedirect(path + (f"?{request.query_string}" * bool(request.query)))
    return error_response(not_there(missing.status, missing.reason))


@asynccontextmanager
async def listening(
    front: Front, *, host: str, port: int, grace_s: float = 5.0
) -> AsyncIterator[int]:
    """Answer requests inside the block; yields the port, which is a free one for 0.

    Raises:
        OSError: the address cannot be used.
    """
    app = application(front)
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_LOG,
        handler_cancellation=True,
        shutdown_timeout=grace_s,
        keepalive_timeout=75.0,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=BACKLOG)
        await site.start()
        closing = asyncio.create_task(_close_silent(runner, app, front.settings.body_s))
        try:
            yield site.port
        finally:
            closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing
    finally:
        await runner.cleanup()


async def _close_silent(runner: web.AppRunner, app: web.Application, limit_s: float) -> None:
    """Close connections that send no whole request head for `limit_s`: each has a file.

    aiohttp itself closes those that have sent one, after `keepalive_timeout`.
    """
    silent: set[Any] = set()
    requested = app[_REQUESTED]
    while True:
        await asyncio.sleep(limit_s)
        listener = runner.server
        there = set(listener.connections if listener is not None else ())
        requested &= there
        now = there - requested
        for connection in silent & now:
            connection.force_close()
            if connection.transport is not None:
                connection.transport.close()
        silent = now - silent
