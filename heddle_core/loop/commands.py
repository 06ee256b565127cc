"""Commands of the RL loop, beside those of its rollouts. Each but `Discard` ends in one event."""

from typing import Literal, TypeAlias

import msgspec

from heddle_core.commands import Command
from heddle_core.ids import EngineId, GroupId, RolloutId, TrajectoryId

UpdateMode: TypeAlias = Literal["drain", "interrupt", "in_flight"]
"""What becomes of running steps at a weight update: there are none, they are stopped and go on
under the new weights with their KV computed again, or they go on with the KV that they have."""

GpuRole: TypeAlias = Literal["rollout", "training"]

GpuPool: TypeAlias = Literal["all", "hybrid"]
"""GPUs that change sides: all of a colocated cluster, whose engines sleep meanwhile, or those of a
hybrid pool, which have no engines while they train."""


class OpenRollout(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Open a rollout of so many trajectories; None: of any number. Ends in RolloutStarted."""

    rollout: RolloutId
    trajectories: int | None
    weights_version: int
    cause: int = 0


class CloseRollout(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Let no more trajectories into a rollout. Ends in RolloutClosed."""

    rollout: RolloutId
    cause: int = 0


class StartTrajectory(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Start the environment of sample number `sample` of a prompt.

    Ends in TrajectoryArrived or StartFailed.
    """

    trajectory: TrajectoryId
    group: GroupId
    sample: int
    rollout: RolloutId
    cause: int = 0


class Score(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Compute the reward of a finished trajectory. Ends in Scored."""

    trajectory: TrajectoryId
    cause: int = 0


class Discard(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Forget a finished trajectory, which will not be trained. It has ended: no event follows."""

    trajectory: TrajectoryId
    cause: int = 0


class AccumulateGradients(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Run forward and backward passes over a part of a batch. Ends in GradientsAccumulated."""

    batch: int
    trajectories: tuple[TrajectoryId, ...]
    cause: int = 0


class Train(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Train on what is left of a batch, and let the optimizer step. Ends in Trained."""

    batch: int
    trajectories: tuple[TrajectoryId, ...]
    cause: int = 0


class UpdateWeights(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Give an engine the newest weights. Ends in EngineUpdated or EngineFailed.

    Without `keep_kv` its KV is void.
    """

    engine: EngineId
    version: int
    mode: UpdateMode
    keep_kv: bool
    cause: int = 0


class AssignGpus(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Let a pool of GPUs work for `role`. Ends in GpusAssigned."""

    role: GpuRole
    pool: GpuPool = "all"
    cause: int = 0


LoopCommand: TypeAlias = (
    OpenRollout
    | CloseRollout
    | StartTrajectory
    | Score
    | Discard
    | AccumulateGradients
    | Train
    | UpdateWeights
    | AssignGpus
)
AnyCommand: TypeAlias = Command | LoopCommand
