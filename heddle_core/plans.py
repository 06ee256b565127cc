"""A resource plan, and the planning problem as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from heddle_core.ids import EngineId, EngineShape, TrajectoryId


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A planned engine, with `max_running` slots."""

    engine: EngineId
    shape: EngineShape
    max_running: int


class RestartLimit(msgspec.Struct, frozen=True, kw_only=True):
    """How often a failed engine is started again; then its GPUs count as broken."""

    restarts: int = 3
    """Of one engine within `window_s`."""
    window_s: float = 600.0

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise ValueError(f"restarts is {self.restarts}: it must be 0 or more")
        if not self.window_s > 0.0:
            raise ValueError(f"window_s is {self.window_s}: it must be more than 0 seconds")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregation:
    """Prefill engines beside those of every plan, which then only decode."""

    engines: tuple[EngineSpec, ...]
    """Each of role `prefill`."""
    threshold_tokens: int
    """A step with at most so many tokens beyond the KV at its home is prefilled there; 0: none."""
    prefill_s_by_shape: Mapping[EngineShape, float]
    """Estimated seconds of a prompt token, by the shapes of `engines`."""

    def __post_init__(self) -> None:
        if not self.engines or not all(spec.shape.prefills_only for spec in self.engines):
            raise ValueError("disaggregation needs engines of role prefill, and no others")
        if self.threshold_tokens < 0:
            raise ValueError(f"threshold_tokens must be 0 or more, not {self.threshold_tokens}")


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
