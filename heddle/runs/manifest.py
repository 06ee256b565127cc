"""The fields of a run's manifest that readers need, and why a run has no results."""

import os
import socket
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from heddle.runs.written_files import WrittenFile

Status: TypeAlias = Literal["running", "finished", "interrupted", "failed"]
SIMULATED = "heddle_sim"
"""The driver of a run in the simulator."""


class _FileFacts(TypedDict):
    name: str
    sha256: str


class _LoopFacts(TypedDict):
    regime: str
    config: dict[str, Any]


class ManifestFields(TypedDict):
    """The part of a manifest that readers need."""

    status: Status
    error: str | None
    policy: str
    driver: str
    seed: int
    trace: _FileFacts
    host: dict[str, Any]
    pid: int
    predictor_model: NotRequired[_FileFacts | None]
    loop: NotRequired[_LoopFacts | None]
    bound: NotRequired[dict[str, float] | None]
    files: NotRequired[dict[str, WrittenFile]]


def why_unfinished(manifest: Mapping[str, Any]) -> str:
    """Return the status of an unfinished run, as the end of a sentence."""
    match manifest["status"]:
        case "running":
            here = manifest["host"].get("name") == socket.gethostname()
            if here and not _alive(manifest["pid"]):
                return "its process died before it finished"
            return "is still running, or its process died"
        case "interrupted":
            return "was interrupted before it finished"
        case _:
            return f"failed ({manifest['error']})"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
