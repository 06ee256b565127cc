"""Events that a driver delivers to a controller: frozen data, names in the past tense.

Every event carries the driver's clock in seconds since the run began. It holds only what a real
engine or environment could report at that moment: no future length, no later prompt.
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
from heddle_core.plans import ResourcePlan

StopReason: TypeAlias = Literal["tool_call", "answer", "length_limit", "error"]
Outcome: TypeAlias = Literal["completed", "truncated", "failed", "cancelled"]
MoveWay: TypeAlias = Literal["kv", "prefill", "none"]
"""How a context came to another engine: its KV was moved, its tokens were prefilled there during
the tool call, or neither, so that its next step prefills it."""


class _Event(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    time_s: float


class RolloutStarted(_Event, frozen=True, kw_only=True):
    """A rollout begins under one weights version.

    `trajectories` arrivals will follow; None leaves the rollout open until `RolloutClosed`.
    """

    rollout: RolloutId
    trajectories: int | None
    weights_version: int = 0


class RolloutClosed(_Event, frozen=True, kw_only=True):
    """An open rollout has `trajectories` in all; those that have not arrived yet will."""

    rollout: RolloutId
    trajectories: int


class ArrivalHints(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What clients' owners want of a trajectory."""

    tier: int = 0
    """Steps of a higher one go before all of a lower one."""
    home: EngineId = EngineId("")
    """Where its KV may be, of an earlier run; "" where none is known."""


class TrajectoryArrived(_Event, frozen=True, kw_only=True, omit_defaults=True):
    """A sample of a prompt is ready to run."""

    rollout: RolloutId
    trajectory: TrajectoryId
    group: GroupId
    task: str
    prompt_tokens: int
    hints: ArrivalHints | None = None
    """None: it is as any other."""


class StepFinished(_Event, frozen=True, kw_only=True):
    """The engine ended a generation.

    `output_tokens` counts this dispatch only: `StepPreempted` reported the tokens from before a
    preemption. `queued_s` is the time inside the engine before the first prefill. `cached_tokens`
    is the part of the prompt served from the prefix cache. `recomputes` counts the engine's own
    preemptions, each of which evicts the KV and prefills again.
    """

    trajectory: TrajectoryId
    step: int
    engine: EngineId
    output_tokens: int
    reason: StopReason
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    recomputes: int = 0


class StepPreempted(_Event, frozen=True, kw_only=True):
    """An abort took effect; the tokens made so far in this dispatch are kept."""

    trajectory: TrajectoryId
    step: int
    engine: EngineId
    output_tokens: int
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    recomputes: int = 0


class ToolStarted(_Event, frozen=True, kw_only=True):
    """The environment began the tool call that the step ended in ("" when no tool was named)."""

    trajectory: TrajectoryId
    step: int
    tool: str


class ToolReturned(_Event, frozen=True, kw_only=True):
    """The tool's result is in the context; the next generation can run.

    `observation_tokens` were appended. `context_tokens` is the size of the next prompt; it is
    smaller than the sum when the agent compacted its history.
    """

    trajectory: TrajectoryId
    step: int
    tool: str
    ok: bool | None
    observation_tokens: int
    context_tokens: int


class TrajectoryFinished(_Event, frozen=True, kw_only=True):
    """The environment closed the trajectory."""

    trajectory: TrajectoryId
    outcome: Outcome


class MigrationFinished(_Event, frozen=True, kw_only=True):
    """The migration is over. Unless `ok`, nothing is at `target` and the home does not change.

    `kv_tokens` are at the target now, by whichever `way`.
    """

    trajectory: TrajectoryId
    source: EngineId
    target: EngineId
    ok: bool
    kv_tokens: int
    way: MoveWay = "kv"


class EngineJoined(_Event, frozen=True, kw_only=True):
    """An engine that no plan has may be used from now on; a StartEngine follows.

    Its owner starts it. It takes its share of the unfinished trajectories, no plan stops it, and
    after a failure it is started again as others are. `engine` is a name of its own.
    """

    engine: EngineId
    shape: EngineShape
    max_running: int


class EngineRecalled(_Event, frozen=True, kw_only=True):
    """The owner of an engine that joined takes it back: it gets no more steps.

    With `drain` its running steps end there; otherwise they go on elsewhere with their tokens. One
    without `drain` may follow one with it. `engine` is the name that it joined by, whatever its
    present id.
    """

    engine: EngineId
    drain: bool


class EngineReady(_Event, frozen=True, kw_only=True):
    """An engine can take steps: first start, restart, or after a reconfiguration."""

    engine: EngineId
    shape: EngineShape
    kv_capacity_tokens: int
    max_running: int


class EngineReported(_Event, frozen=True, kw_only=True):
    """A sample of an engine's own counters, always late. `preemptions` counts from its start."""

    engine: EngineId
    running: int
    waiting: int
    kv_used_tokens: int
    preemptions: int


class EngineStopped(_Event, frozen=True, kw_only=True):
    """A requested stop is done; the engine is drained."""

    engine: EngineId


class EngineFailed(_Event, frozen=True, kw_only=True):
    """An engine died: its running steps and its KV are gone.

    `salvaged` lists the tokens of running steps that had already reached the client, so that none
    is generated twice.
    """

    engine: EngineId
    reason: str
    salvaged: tuple[tuple[TrajectoryId, int], ...] = ()


class PlanSolved(_Event, frozen=True, kw_only=True):
    """The search that `SolvePlan` requested has ended."""

    plan: int
    resource_plan: ResourcePlan


class Predicted(_Event, frozen=True, kw_only=True):
    """The prediction service answered. `None`: it failed, and the last estimate stays valid."""

    trajectory: TrajectoryId
    step: int
    remaining_tokens: float | None


class WeightsUpdated(_Event, frozen=True, kw_only=True):
    """The trainer pushed weights; all KV is stale."""

    version: int


class Tick(_Event, frozen=True, kw_only=True):
    """The controller's `deadline_s` was reached."""


# -- of an RL loop, beside those of its rollouts --------------------------------------------------


class LoopStarted(_Event, frozen=True, kw_only=True):
    """The loop begins: the first event of a run."""


class StartFailed(_Event, frozen=True, kw_only=True):
    """The environment of a trajectory did not start, so it never arrives."""

    trajectory: TrajectoryId
    reason: str


class Scored(_Event, frozen=True, kw_only=True):
    """The reward of a finished trajectory. None: the reward service failed."""

    trajectory: TrajectoryId
    reward: float | None


class GradientsAccumulated(_Event, frozen=True, kw_only=True):
    """The trainer has the gradients of a part of a batch."""

    batch: int


class Trained(_Event, frozen=True, kw_only=True):
    """The trainer has ended a batch."""

    batch: int


class EngineUpdated(_Event, frozen=True, kw_only=True):
    """An engine has weights `version`, and generates again."""

    engine: EngineId
    version: int


class GpusAssigned(_Event, frozen=True, kw_only=True):
    """A pool of GPUs works for `role` now; unless `ok`, it could not, and is where it was."""

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
Event: TypeAlias = (
    RolloutStarted
    | RolloutClosed
    | TrajectoryArrived
    | StepFinished
    | StepPreempted
    | ToolStarted
    | ToolReturned
    | TrajectoryFinished
    | MigrationFinished
    | EngineJoined
    | EngineRecalled
    | EngineReady
    | EngineReported
    | EngineStopped
    | EngineFailed
    | PlanSolved
    | Predicted
    | WeightsUpdated
    | Tick
    | LoopEvent
)
