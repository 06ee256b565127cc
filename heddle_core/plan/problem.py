"""A resource plan, and the pure problem whose solution it is."""

from dataclasses import dataclass
from typing import Protocol

from heddle_core.ids import EngineId, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine that should exist: `tp` GPUs of class `gpu`, with `max_running` slots."""

    engine: EngineId
    tp: int
    gpu: str
    max_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePlan:
    """Which engines exist and, when the planner also placed, who lives where.

    `homes` lists (engine, members) with members by descending predicted length; an empty `homes`
    leaves placement to the placement part. `believed_makespan_s` is the planner's own estimate.
    """

    engines: tuple[EngineSpec, ...]
    homes: tuple[tuple[EngineId, tuple[TrajectoryId, ...]], ...] = ()
    believed_makespan_s: float | None = None


class PlanProblem(Protocol):
    """Everything a search needs, its seed included, as plain data.

    Solved in a worker process by the runtime and in place by the simulator, which charges
    `charged_s`: a search is bounded by a number of moves, never by a clock, so that equal problems
    have equal solutions.
    """

    @property
    def charged_s(self) -> float:
        """Seconds of solver time that the simulator lets pass."""
        ...

    def solve(self) -> ResourcePlan:
        """Return the plan; pure and deterministic."""
        ...
