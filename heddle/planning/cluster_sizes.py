"""Clusters for a rollout as a report: a row for each, and the one to take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from heddle.cost.objective import Objective
from heddle.cost.prices import Prices, RunCost
from heddle.planning.limits import RolloutLimits, priced, spent_of, unreachable
from heddle_core.ids import EngineShape

SCHEMA = "heddle.plan-sizes/1"
Limit: TypeAlias = Literal["longest trajectory", "capacity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformEngines:
    """Engines of one TP degree: the best of all degrees."""

    tp: int
    makespan_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """A cluster, and how long the rollout takes there."""

    gpu: str
    gpus: int
    mix: Mapping[EngineShape, int]
    """Engines that `heddle` starts with, widest first."""
    estimated_s: float
    simulated_s: float | None
    """Under `heddle`; None if nothing was simulated."""
    uniform: UniformEngines
    """Simulated under `verl`, or estimated if nothing was simulated."""
    bound_s: float
    """No policy ends earlier."""
    solo_s: float
    """The part of the bound that the longest trajectory sets."""
    cost: RunCost

    @property
    def makespan_s(self) -> float:
        """Simulated seconds, or estimated ones if nothing was simulated."""
        return self.estimated_s if self.simulated_s is None else self.simulated_s

    @property
    def error(self) -> float | None:
        """Estimate over simulation, less 1."""
        return None if self.simulated_s is None else self.estimated_s / self.simulated_s - 1.0

    @property
    def limit(self) -> Limit:
        """What sets the bound: no number of GPUs shortens the longest trajectory."""
        return "longest trajectory" if self.solo_s >= self.bound_s else "capacity"

    @property
    def name(self) -> str:
        """For people: ``16 x h100``."""
        return f"{self.gpus} x {self.gpu}"

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "gpu": self.gpu,
            "gpus": self.gpus,
            "tp_mix": {str(shape.tp): count for shape, count in self.mix.items()},
            "estimated_makespan_s": self.estimated_s,
            "simulated_makespan_s": self.simulated_s,
            "estimate_error": self.error,
            "bound_s": self.bound_s,
            "limit": self.limit,
            "best_uniform": {"tp": self.uniform.tp, "makespan_s": self.uniform.makespan_s},
            **self.cost.plain(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The report of a sweep over clusters."""

    trace: str
    trajectories: int
    model: str
    max_running: int
    history: str
    rows: tuple[ClusterSize, ...]
    """The recommended first, then by time."""
    left_out: Mapping[str, str]
    """Clusters that cannot serve the trace, and why."""
    limits: RolloutLimits
    objective: Objective
    prices: Prices
    recommended: ClusterSize | None
    """None: no row keeps both limits."""

    @property
    def simulated(self) -> bool:
        """Whether rows were simulated."""
        return self.rows[0].simulated_s is not None

    @property
    def priced(self) -> bool:
        """Whether every class has a price."""
        return priced(self.rows)

    def spent(self, row: ClusterSize) -> float:
        """Dollars of a row; GPU-hours where a class has no price."""
        return spent_of(self.rows)(row)

    def on_front(self, row: ClusterSize) -> bool:
        """Whether no other row is both faster and cheaper (Pareto)."""
        mine = (row.makespan_s, self.spent(row))
        others = [(other.makespan_s, self.spent(other)) for other in self.rows]
        return not any(s <= mine[0] and d <= mine[1] and (s, d) != mine for s, d in others)

    def unreachable(self) -> str | None:
        """Why no row is recommended, and what is reachable; None if there is one."""
        return None if self.recommended is not None else unreachable(self.rows, self.limits)

    def plain(self) -> dict[str, Any]:
        """As JSON; equal inputs give equal values."""
        return {
            "schema": SCHEMA,
            "trace": {"name": self.trace, "trajectories": self.trajectories},
            "cluster": {"model": self.model, "max_running": self.max_running},
            "history": self.history,
            "prices": self.prices.plain(dict.fromkeys(row.gpu for row in self.rows)),
            "objective": self.objective,
            "deadline_s": self.limits.deadline_s,
            "budget_dollars": self.limits.dollars,
            "recommended": None if self.recommended is None else self.recommended.name,
            "unreachable": self.unreachable(),
            "left_out": dict(self.left_out),
            "sizes": [
                {
                    "name": row.name,
                    **row.plain(),
                    "on_front": self.on_front(row),
                    "in_time": not self.limits.late(row),
                    "in_budget": not self.limits.over_budget(row),
                }
                for row in self.rows
            ],
        }
