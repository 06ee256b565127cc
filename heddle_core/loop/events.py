"""Events of the RL loop, beside those of its rollouts: frozen data, names in the past tense."""

from typing import TypeAlias

import msgspec

from heddle_core.events import Event
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.loop.commands import GpuPool, GpuRole


class LoopStarted(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The loop begins: the first event of a run."""

    time_s: float


class StartFailed(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The environment of a trajectory did not start, so it never arrives."""

    time_s: float
    trajectory: TrajectoryId
    reason: str


class Scored(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The reward of a finished trajectory. None: the reward service failed."""

    time_s: float
    trajectory: TrajectoryId
    reward: float | None


class GradientsAccumulated(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The trainer has the gradients of a part of a batch."""

    time_s: float
    batch: int


class Trained(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The trainer has ended a batch."""

    time_s: float
    batch: int


class EngineUpdated(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An engine has weights `version`, and generates again."""

    time_s: float
    engine: EngineId
    version: int


class GpusAssigned(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A pool of GPUs works for `role` now; unless `ok`, it could not, and is where it was."""

    time_s: float
    role: GpuRole
    pool: GpuPool = "all"
    ok: bool = True


LoopEvent: TypeAlias = (
    LoopStarted
    | StartFailed
    | Scored
    | GradientsAccumulated
    | Trained
    | EngineUpdated
    | GpusAssigned
)
AnyEvent: TypeAlias = Event | LoopEvent
