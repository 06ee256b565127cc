"""Clusters for a rollout as a report: a row for each, and the one to take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from heddle.cost.objective import Objective
from heddle.cost.prices import Prices, RunCost
from heddle_core.ids import EngineShape

SCHEMA = "heddle.plan-sizes/1"
NEAR = 0.02
"""Rows whose objective is this near to the least are equal, and the other measure decides."""

Limit: TypeAlias = Literal["longest trajectory", "capacity"]
_Least: TypeAlias = "tuple[str, Callable[[ClusterSize], float]]"


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
class RolloutLimits:
    """What a rollout may take."""

    deadline_s: float | None = None
    dollars: float | None = None

    def late(self, row: ClusterSize) -> bool:
        """Whether a rollout ends after the deadline."""
        return self.deadline_s is not None and row.makespan_s > self.deadline_s

    def over_budget(self, row: ClusterSize) -> bool:
        """Whether a rollout costs more than the budget; rows have prices where there is one."""
        return self.dollars is not None and (row.cost.dollars or 0.0) > self.dollars


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
        return _priced(self.rows)

    def spent(self, row: ClusterSize) -> float:
        """Dollars of a row; GPU-hours where a class has no price."""
        return _spent_of(self.rows)(row)

    def on_front(self, row: ClusterSize) -> bool:
        """Whether no other row is both faster and cheaper (Pareto)."""
        mine = (row.makespan_s, self.spent(row))
        others = [(other.makespan_s, self.spent(other)) for other in self.rows]
        return not any(s <= mine[0] and d <= mine[1] and (s, d) != mine for s, d in others)

    def unreachable(self) -> str | None:
        """Why no row is recommended, and what is reachable; None if there is one."""
        if self.recommended is not None:
            return None
        limits = self.limits
        fastest, cheapest = ("fastest", _seconds), ("cheapest", self.spent)
        given: list[tuple[str, Callable[[ClusterSize], bool], _Least, _Least]] = []
        if limits.deadline_s is not None:
            text = f"--deadline {limits.deadline_s:,.0f} s"
            given.append((text, limits.late, cheapest, fastest))
        if limits.dollars is not None:
            text = f"--budget ${limits.dollars:,.2f}"
            given.append((text, limits.over_budget, fastest, cheapest))
        said = []
        for text, broken, reached, missed in given:
            kept = [row for row in self.rows if not broken(row)]
            word, least = reached if kept else missed
            row = _said(min(kept or self.rows, key=least))
            said.append(f"{text} is {'' if kept else 'not '}reachable: the {word} is {row}")
        why = "no cluster of these keeps "
        why += "both limits" if len(said) > 1 else "the limit"
        return f"{why}. {'; '.join(said)}. Raise a limit, or name other --gpus or --gpu"

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


def recommended_of(
    rows: Sequence[ClusterSize], limits: RolloutLimits, objective: Objective
) -> ClusterSize | None:
    """The row with the least of the objective within both limits."""
    kept = [row for row in rows if not limits.late(row) and not limits.over_budget(row)]
    if not kept:
        return None
    spent = _spent_of(rows)
    first, second = (_seconds, spent) if objective == "makespan" else (spent, _seconds)
    least = min(map(first, kept))
    near = [row for row in kept if first(row) <= least * (1.0 + NEAR)]
    return min(near, key=lambda row: (second(row), first(row)))


def _seconds(row: ClusterSize) -> float:
    return row.makespan_s


def _spent_of(rows: Sequence[ClusterSize]) -> Callable[[ClusterSize], float]:
    """Dollars of a row; GPU-hours of all where a class has no price."""
    if not _priced(rows):
        return lambda row: row.cost.gpu_hours
    return lambda row: row.cost.dollars or 0.0


def _priced(rows: Sequence[ClusterSize]) -> bool:
    return all(row.cost.dollars is not None for row in rows)


def _said(row: ClusterSize) -> str:
    dollars = row.cost.dollars
    paid = f"{row.cost.gpu_hours:,.2f} GPU-hours" if dollars is None else f"${dollars:,.2f}"
    return f"{row.name} ({row.makespan_s:,.0f} s, {paid})"
