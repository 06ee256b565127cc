"""What to do: frozen data, imperative, carried out by a driver.

Each command but a hint ends in exactly one later event, which its docstring names. A driver never
answers from inside `handle`.
"""

from dataclasses import dataclass
from typing import TypeAlias

from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.plan.problem import PlanProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Run a step on an engine. Ends in StepFinished, StepPreempted or the engine's EngineFailed."""

    trajectory: TrajectoryId
    step: int
    engine: EngineId
    priority: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Stop a running step, keep its tokens.

    Ends in StepPreempted, StepFinished when the step won the race, or EngineFailed.
    """

    trajectory: TrajectoryId
    step: int
    engine: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate:
    """Move a trajectory's KV prefix while its tool runs. Ends in MigrationFinished."""

    trajectory: TrajectoryId
    source: EngineId
    target: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvePlan:
    """Search for a resource plan; too long for a decision to wait for. Ends in PlanSolved."""

    plan: int
    problem: PlanProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict:
    """Ask the prediction service for a trajectory's remaining tokens. Ends in Predicted.

    `estimate` is the answer when the model lives in the core and only its running time is the
    world's business; None asks the world's own model.
    """

    trajectory: TrajectoryId
    step: int
    estimate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """Start an engine of `tp` GPUs of class `gpu`. Ends in EngineReady or EngineFailed."""

    engine: EngineId
    tp: int
    gpu: str
    max_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopEngine:
    """Stop an engine, after its running steps if `drain`. Ends in EngineStopped or EngineFailed."""

    engine: EngineId
    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Give a trajectory up. Ends in TrajectoryFinished(outcome="cancelled")."""

    trajectory: TrajectoryId
    reason: str


Command: TypeAlias = (
    Dispatch | Preempt | Migrate | SolvePlan | Predict | StartEngine | StopEngine | Cancel
)
