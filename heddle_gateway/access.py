"""A line of JSON for each request: who asked for what, and what came of it."""

import logging
import time
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from heddle_gateway.client_step import ClientStep
from heddle_gateway.http import HttpRequest

_LOG: Final = logging.getLogger(__name__)


class AccessLog:
    """Appends to a file; each line is there when its request is answered."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be written.
        """
        self._path, self._fails = path, False
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def reopen(self) -> None:
        """Go on in the file that has the name now: another one after a rotation.

        Raises:
            OSError: it cannot be written, and the log goes on where it was.
        """
        before, self._file = self._file, self._path.open("ab", buffering=0)
        before.close()

    def write(self, request: HttpRequest, status: int, began_s: float) -> None:
        """Write the line of a request that was answered, or whose client is gone (499)."""
        now_s = time.monotonic()
        line: dict[str, Any] = {
            "time": round(time.time(), 3),
            "tenant": request.tenant,
            "from": request.remote,
            "method": request.method,
            "path": request.path,
            "status": status,
            "seconds": round(now_s - began_s, 6),
            "request_id": request.headers.get("X-Request-Id"),
        }
        if request.steps:
            line |= _of_steps(request.steps)
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._fails = False
        except OSError as error:  # a full disk is no reason to answer nobody
            if not self._fails:
                _LOG.warning("serve.access_log: no line is written while this holds: %s", error)
            self._fails = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _of_steps(steps: list[ClientStep]) -> dict[str, Any]:
    first = steps[0]
    waited = [s.dispatched_s - s.submitted_s for s in steps if s.dispatched_s is not None]
    return {
        "trajectory": first.trajectory,
        "steps": len(steps),
        "engine": first.engine or None,
        "prompt_tokens": sum(step.prompt_tokens for step in steps),
        "output_tokens": sum(step.tokens for step in steps),
        "queued_seconds": round(max(waited), 6) if waited else None,
        "preempted": sum(max(0, step.dispatches - 1) for step in steps),
    }
