"""Commands of the controller, executed by a driver: frozen data, imperative names.

Each command ends in exactly one later event, which its docstring names. A driver never delivers it
from inside `handle`. `cause` is the sequence number of the event that caused the command. The first
event of a run has number 0.
"""

from typing import TypeAlias

import msgspec

from heddle_core.ids import EngineId, EngineShape, TrajectoryId
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


Command: TypeAlias = (
    Dispatch | Preempt | Migrate | SolvePlan | Predict | StartEngine | StopEngine | Cancel
)


class CommandList(list[Command]):
    """The commands that one event causes, in order."""

    __slots__ = ("cause",)

    cause: int
    """Sequence number of the event. Set after construction: an `__init__` would cost as much as a
    command, for every event."""
