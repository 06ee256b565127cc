"""The fields of a run's manifest that readers need."""

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from heddle.runs.written_files import WrittenFile

Status: TypeAlias = Literal["running", "finished", "interrupted", "failed"]


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
    files: NotRequired[dict[str, WrittenFile]]
