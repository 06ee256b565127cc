"""What happened: frozen data, past tense, told to the controller by a driver.

Nothing here acts. Every event carries the driver's clock in seconds since the run began, and only
what a real engine or environment could have told at that moment: no future length, no later prompt.
"""

from typing import Literal, TypeAlias

import msgspec

from heddle_core.ids import EngineId, EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_core.plans import ResourcePlan

StopReason: TypeAlias = Literal["tool_call", "answer", "length_limit", "error"]
Outcome: TypeAlias = Literal["completed", "truncated", "failed", "cancelled"]
MoveWay: TypeAlias = Literal["kv", "prefill", "none"]
"""How a context came to another engine: its KV was moved, its tokens were prefilled there during
the tool call, or neither, so that its next step prefills it."""


class RolloutStarted(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A rollout begins under one weights version.

    `trajectories` arrivals will follow; None leaves the rollout open until `RolloutClosed`.
    """

    time_s: float
    rollout: RolloutId
    trajectories: int | None
    weights_version: int = 0


class RolloutClosed(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """No more trajectories will arrive in an open rollout."""

    time_s: float
    rollout: RolloutId


class TrajectoryArrived(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A sample of a prompt is ready to run."""

    time_s: float
    rollout: RolloutId
    trajectory: TrajectoryId
    group: GroupId
    task: str
    prompt_tokens: int


class StepFinished(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The engine ended a generation.

    `output_tokens` counts this dispatch only: tokens kept from before a preemption were reported by
    `StepPreempted`. `queued_s` is time inside the engine before the first prefill, `cached_tokens`
    the part of the prompt served from the prefix cache, `recomputes` how often the engine itself
    took the KV away and had to prefill again.
    """

    time_s: float
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


class StepPreempted(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An abort took effect; the tokens made so far in this dispatch are kept."""

    time_s: float
    trajectory: TrajectoryId
    step: int
    engine: EngineId
    output_tokens: int
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    recomputes: int = 0


class ToolStarted(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The environment began the tool call that the step ended in ("" when no tool was named)."""

    time_s: float
    trajectory: TrajectoryId
    step: int
    tool: str


class ToolReturned(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The tool's answer is in the context; the next generation can run.

    `observation_tokens` were appended; `context_tokens` is the size of the next prompt, which is
    smaller than the sum when the agent compacted its history.
    """

    time_s: float
    trajectory: TrajectoryId
    step: int
    tool: str
    ok: bool | None
    observation_tokens: int
    context_tokens: int


class TrajectoryFinished(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The environment closed the trajectory."""

    time_s: float
    trajectory: TrajectoryId
    outcome: Outcome


class MigrationFinished(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The move is over; unless `ok`, nothing is at `target` and the home stays where it was.

    `kv_tokens` are at the target now, whichever `way` they came.
    """

    time_s: float
    trajectory: TrajectoryId
    source: EngineId
    target: EngineId
    ok: bool
    kv_tokens: int
    way: MoveWay = "kv"


class EngineReady(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An engine can take steps: first start, restart, or after a reconfiguration."""

    time_s: float
    engine: EngineId
    shape: EngineShape
    kv_capacity_tokens: int
    max_running: int


class EngineReported(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A sample of an engine's own counters; late by nature. `preemptions` counts from its start."""

    time_s: float
    engine: EngineId
    running: int
    waiting: int
    kv_used_tokens: int
    preemptions: int


class EngineStopped(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A stop that was asked for is done; the engine is drained."""

    time_s: float
    engine: EngineId


class EngineFailed(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An engine died: its running steps and its KV are gone.

    `salvaged` lists the tokens of running steps that had already reached the client, so that
    nothing is generated twice.
    """

    time_s: float
    engine: EngineId
    reason: str
    salvaged: tuple[tuple[TrajectoryId, int], ...] = ()


class PlanSolved(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The search that `SolvePlan` asked for has ended."""

    time_s: float
    plan: int
    resource_plan: ResourcePlan


class Predicted(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The prediction service answered. `None`: it failed, and the last estimate holds."""

    time_s: float
    trajectory: TrajectoryId
    step: int
    remaining_tokens: float | None


class WeightsUpdated(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The trainer pushed weights; all KV is stale."""

    time_s: float
    version: int


class Tick(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The controller's `deadline_s` was reached."""

    time_s: float


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
    | EngineReady
    | EngineReported
    | EngineStopped
    | EngineFailed
    | PlanSolved
    | Predicted
    | WeightsUpdated
    | Tick
)
