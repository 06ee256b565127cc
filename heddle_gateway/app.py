"""Which path has which handler, and who may call it."""

import re
import resource
import time
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

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
from heddle_gateway.http import HttpRequest, Response
from heddle_gateway.http_server import serving

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


class Routes:
    """Which path and method has which handler; implements `heddle_gateway.http_server.Handle`."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._fixed: dict[str, dict[str, Answering]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Answering]]] = {}
        """By how a path is written: ``{name}`` is a part of it, ``{name:regex}`` what fits."""
        for path in ("/health", "/readyz"):
            self._add(front, "GET", path, control.health, "open")
        self._add(front, "GET", "/livez", control.livez, "open")
        for method, path, handle in MODEL_ENDPOINTS:
            for each in (path, _SESSION + path):
                self._add(front, method, each, handle, "limited" if method == "POST" else "client")
        for path in PASSED_ON:
            self._add(front, "POST", path, passed_on(path), "limited")
        for method, path, handle in _CLIENTS:
            self._add(front, method, path, handle, "client")
        for method, path, handle in _ADMINS:
            self._add(front, method, path, handle, "admin")
        for path in engine_control.PASSED_TO_ALL:
            self._add(front, "POST", path, engine_control.passed_to_all(path), "admin")

    def _add(self, front: Front, method: str, path: str, handle: Handler, access: Access) -> None:
        # A metric's label has no backslash, which would begin an escape.
        answer = answering(front, re.sub(r"{(\w+):[^}]*}", r"{\1}", path), handle, access)
        if "{" not in path:
            self._fixed.setdefault(path, {})[method] = answer
            return
        written = re.sub(r"{(\w+)}", r"{\1:[^/]+}", path)
        pattern = re.compile(re.sub(r"{(\w+):([^}]*)}", r"(?P<\1>\2)", written))
        self._patterns.setdefault(path, (pattern, {}))[1][method] = answer

    def __call__(self, request: HttpRequest) -> Awaitable[Response]:
        """Answer a request."""
        methods = self._fixed.get(unquote(request.path))
        if methods is not None and (answer := methods.get(request.method)) is not None:
            return answer(request)
        allowed = methods is not None
        for pattern, methods in self._patterns.values():
            if (found := pattern.fullmatch(request.path)) is not None:
                allowed = True
                if (answer := methods.get(request.method)) is not None:
                    parts = found.groupdict()
                    request.match_info = {name: unquote(text) for name, text in parts.items()}
                    return answer(request)
        missing = HTTPStatus.METHOD_NOT_ALLOWED if allowed else HTTPStatus.NOT_FOUND
        return self._missing(request, missing)

    async def _missing(self, request: HttpRequest, status: HTTPStatus) -> Response:
        """Answer paths and methods that are not there as vLLM does, a slash at the end too."""
        path, answer = request.path.rstrip("/"), error_response(not_there(status, status.phrase))
        if status == HTTPStatus.NOT_FOUND and path != request.path and path in _PATHS:
            query = f"?{request.query_string}" * bool(request.query_string)
            answer = Response(status=307, headers={"Location": path + query})
        if self._front.access_log is not None:
            self._front.access_log.write(request, answer.status, time.monotonic())
        return answer


def listening(
    front: Front, *, host: str, port: int, grace_s: float = 5.0
) -> AbstractAsyncContextManager[int]:
    """Answer requests inside the block; yields the port, which is a free one for 0.

    Raises:
        OSError: the address cannot be used.
    """
    settings = front.settings
    return serving(
        Routes(front),
        host=host,
        port=port,
        body_bytes=settings.body_bytes,
        head_s=settings.body_s,
        grace_s=grace_s,
    )
