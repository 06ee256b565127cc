"""Commands of the controllers, executed by a driver: frozen data, imperative names.

Each command but `Discard` ends in exactly one later event, which its docstring names. A driver
never delivers it from inside `handle`. `cause` is the sequence number of the event that caused the
command. The first event of a run has number 0.
"""

from typing import Literal, TypeAlias

import msgspec

from heddle_core.ids import (
    EngineId,
    EngineShape,
    GpuPool,
    GpuRole,
    GroupId,
    RolloutId,
    TrajectoryId,
)
from heddle_core.plans import PlanProblem


class Dispatch(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Run a step on an engine. Ends in StepFinished, StepPreempted or the engine's EngineFailed.

    With `max_tokens` it ends in StepPreempted after so many, unless the step ends before.
    """

    trajectory: TrajectoryId
    step: int
    engine: EngineId
    priority: float
    max_tokens: int | None = None
    cause: int = 0


class Preempt(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Stop a running step, keep its tokens.

    Ends in StepPreempted, in StepFinished when the step finished first, or in EngineFailed.
    """

    trajectory: TrajectoryId
    step: int
    engine: EngineId
    cause: int = 0


class Migrate(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Move a trajectory's KV prefix. Ends in MigrationFinished.

    While its tool runs, or `copy` before its next dispatch: the source then keeps it as a cache.
    """

    trajectory: TrajectoryId
    source: EngineId
    target: EngineId
    copy: bool = False
    cause: int = 0


class SolvePlan(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Search for a resource plan in the background. Ends in PlanSolved."""

    plan: int
    problem: PlanProblem
    cause: int = 0


class Predict(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Request a trajectory's remaining tokens from the prediction service. Ends in Predicted.

    `estimate` is the policy's own estimate, which a service returns after its latency. With None
    the service must use its own model.
    """

    trajectory: TrajectoryId
    step: int
    estimate: float | None = None
    cause: int = 0


class StartEngine(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Start an engine of this shape. Ends in EngineReady or EngineFailed."""

    engine: EngineId
    shape: EngineShape
    max_running: int
    cause: int = 0


class StopEngine(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Stop an engine, after its running steps if `drain`. Ends in EngineStopped or EngineFailed."""

    engine: EngineId
    drain: bool
    cause: int = 0


class Cancel(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Cancel a trajectory. Ends in TrajectoryFinished(outcome="cancelled")."""

    trajectory: TrajectoryId
    reason: str
    cause: int = 0


# -- of an RL loop, beside those of its rollouts ------------------------------------------------

UpdateMode: TypeAlias = Literal["drain", "interrupt", "in_flight"]
"""What becomes of running steps at a weight update: there are none, they are stopped and go on
under the new weights with their KV computed again, or they go on with the KV that they have."""


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
Command: TypeAlias = (
    Dispatch
    | Preempt
    | Migrate
    | SolvePlan
    | Predict
    | StartEngine
    | StopEngine
    | Cancel
    | LoopCommand
)


class CommandList(list[Command]):
    """The commands that one event causes, in order."""

    __slots__ = ("cause",)

    cause: int
    """Sequence number of the event. Set after construction: an `__init__` would cost as much as a
    command, for every event."""
