"""A resource plan, and the planning problem as plain data."""

from typing import Protocol

import msgspec

from heddle_core.ids import EngineId, EngineShape, TrajectoryId


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A planned engine, with `max_running` slots."""

    engine: EngineId
    shape: EngineShape
    max_running: int


class PlanError(ValueError):
    """A plan that cannot be carried out; the message names the engine."""


class ResourcePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The engines and, when the planner also placed, the home of each trajectory.

    `homes` lists (engine, members) with members by descending predicted length. Empty `homes` leave
    placement to the placement part. `estimated_makespan_s` is the planner's own estimate.
    """

    engines: tuple[EngineSpec, ...]
    homes: tuple[tuple[EngineId, tuple[TrajectoryId, ...]], ...] = ()
    estimated_makespan_s: float | None = None

    def check(self) -> None:
        """Check the names.

        Raises:
            PlanError: an engine is planned twice, or `homes` names one that is not planned.
        """
        names: dict[EngineId, None] = {}
        for spec in self.engines:
            if spec.engine in names:
                raise PlanError(
                    f"a plan has engine {spec.engine!r} twice: give each a name of its own"
                )
            names[spec.engine] = None
        for name, _ in self.homes:
            if name not in names:
                raise PlanError(
                    f"a plan has homes on engine {name!r}, which is not among its engines: "
                    f"{', '.join(names) or 'none'}"
                )


class PlanProblem(Protocol):
    """Everything a search needs, its seed included, as plain data.

    The runtime solves it in a worker process. The simulator solves it in place and charges
    `charged_s`. A search is bounded by a number of moves, never by a clock, so equal problems have
    equal solutions.
    """

    @property
    def charged_s(self) -> float:
        """Seconds of solver time that the simulator lets pass."""
        ...

    def solve(self) -> ResourcePlan:
        """Return the plan; pure and deterministic."""
        ...
