"""What a rollout may take, and which of several clusters keeps it best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from heddle.cost.objective import Objective
from heddle.cost.prices import RunCost

NEAR = 0.02
"""Rows whose objective is this near to the least are equal, and the other measure decides."""


class Sized(Protocol):
    """A cluster, and what a rollout takes there."""

    @property
    def name(self) -> str:
        """For people: ``16 x h100``."""
        ...

    @property
    def makespan_s(self) -> float:
        """Seconds of a rollout."""
        ...

    @property
    def cost(self) -> RunCost:
        """Of a rollout."""
        ...


R = TypeVar("R", bound=Sized)
_Least: TypeAlias = tuple[str, Callable[[Sized], float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """What a rollout may take."""

    deadline_s: float | None = None
    dollars: float | None = None

    def late(self, row: Sized) -> bool:
        """Whether a rollout ends after the deadline."""
        return self.deadline_s is not None and row.makespan_s > self.deadline_s

    def over_budget(self, row: Sized) -> bool:
        """Whether a rollout costs more than the budget; rows have prices where there is one."""
        return self.dollars is not None and (row.cost.dollars or 0.0) > self.dollars


def unreachable(rows: Sequence[Sized], limits: RolloutLimits, *, least: bool = False) -> str:
    """Why no row keeps the limits, and what is reachable; of rows that have the `least` that is
    proven, the limits that all break."""
    fastest, cheapest = ("fastest", _seconds), ("cheapest", spent_of(rows))
    given: list[tuple[str, Callable[[Sized], bool], _Least, _Least]] = []
    if limits.deadline_s is not None:
        text = f"--deadline {rounded(limits.deadline_s, 0)} s"
        given.append((text, limits.late, cheapest, fastest))
    if limits.dollars is not None:
        text = f"--budget ${rounded(limits.dollars)}"
        given.append((text, limits.over_budget, fastest, cheapest))
    said = []
    for text, broken, reached, missed in given:
        kept = [row for row in rows if not broken(row)]
        if kept and least:
            continue
        word, key = reached if kept else missed
        row = _said(min(kept or rows, key=key), "at least " if least else "")
        said.append(f"{text} is {'' if kept else 'not '}reachable: the {word} is {row}")
    why = "no cluster of these keeps "
    why += "both limits" if len(said) > 1 else "the limit"
    return f"{why}. {'; '.join(said)}. Raise a limit, or sweep other cluster.gpus or cluster.gpu"


def recommended_of(rows: Sequence[R], limits: RolloutLimits, objective: Objective) -> R | None:
    """The row with the least of the objective within both limits."""
    kept = [row for row in rows if not limits.late(row) and not limits.over_budget(row)]
    if not kept:
        return None
    spent = spent_of(rows)
    first, second = (_seconds, spent) if objective == "makespan" else (spent, _seconds)
    least = min(map(first, kept))
    near = [row for row in kept if first(row) <= least * (1.0 + NEAR)]
    return min(near, key=lambda row: (second(row), first(row)))


def _seconds(row: Sized) -> float:
    return row.makespan_s


def spent_of(rows: Sequence[Sized]) -> Callable[[Sized], float]:
    """Dollars of a row; GPU-hours of all where a class has no price."""
    if not priced(rows):
        return lambda row: row.cost.gpu_hours
    return lambda row: row.cost.dollars or 0.0


def priced(rows: Sequence[Sized]) -> bool:
    return all(row.cost.dollars is not None for row in rows)


def _said(row: Sized, how: str) -> str:
    dollars = row.cost.dollars
    spent = f"{row.cost.gpu_hours:,.2f} GPU-hours" if dollars is None else f"${rounded(dollars)}"
    return f"{row.name} ({how}{rounded(row.makespan_s, 0)} s, {spent})"


def rounded(value: float, places: int = 2) -> str:
    """With so many places, or two digits of what rounds to less than that."""
    return f"{value:,.{places}f}" if value >= 10.0**-places else f"{value:.2g}"
