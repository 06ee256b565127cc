"""The manifest of a run: as it begins, the fields that readers need, and why it has no results."""

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from heddle.config import RunConfig
from heddle.runs import files
from heddle.runs.written_files import WrittenFile
from heddle_core.policy import PolicyContext

SCHEMA = "heddle.run/2"
Status: TypeAlias = Literal["running", "finished", "interrupted", "failed"]
SIMULATED = "heddle_sim"
"""The driver of a run in the simulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a manifest holds beside the configuration."""

    driver: str
    trace_name: str
    trace_sha256: str
    oracle: bool = False
    """Whether the policy knew the future; such runs are bounds, not results."""
    history: Mapping[str, Any] | None = None
    """Name and hash of the policy's history of earlier rollouts."""
    predictor_model: Mapping[str, Any] | None = None
    """Name and hash of the model that a learned predictor reads."""
    context: PolicyContext | None = None
    """The policy's context, kept for replays; without its model, a file of its own."""
    world: Mapping[str, Any] | None = None
    """Of a run on engines: engines, machine, notes for the user. Of a GPU class: how derived."""
    loop: Mapping[str, Any] | None = None
    """Of an RL loop: its regime, and its configuration beside the rollouts'."""
    bound: Mapping[str, float] | None = None
    """Seconds of the makespan's lower bounds (`heddle.runs.bound`), where they are kept."""
    command_line: Sequence[str] = field(default_factory=lambda: tuple(sys.argv))


def new_manifest(
    name: str, config: RunConfig, facts: RunFacts, started: datetime
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "status": "running",
        "name": name,
        "started": stamp(started),
        "closed": None,
        "error": None,
        "command_line": shlex.join(facts.command_line),
        "driver": facts.driver,
        "world": facts.world,
        "loop": facts.loop,
        "bound": facts.bound,
        "policy": config.policy.preset,
        "seed": config.seed,
        "oracle": facts.oracle,
        "history": facts.history,
        "predictor_model": facts.predictor_model,
        "trace": {"name": facts.trace_name, "path": config.trace, "sha256": facts.trace_sha256},
        "versions": files.versions(),
        "git_commit": files.git_commit(),
        "host": files.host(),
        "pid": os.getpid(),
    }


def stamp(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"


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
