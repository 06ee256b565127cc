"""What comparisons and plans rank by: time or money."""

import json
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Literal, Protocol, TypeAlias, TypeVar

from heddle.config_files import ConfigError
from heddle.cost.prices import Prices, RunCost, price_option, prices_of

Objective: TypeAlias = Literal["makespan", "cost"]
"""`makespan`: seconds of a rollout, or of an RL step. `cost`: dollars of a rollout, or of the same
number of trained samples."""


class Row(Protocol):
    """What an objective ranks."""

    def value(self, objective: Objective, /) -> float:
        """Seconds or dollars, of which the best row has the least."""
        ...


R = TypeVar("R", bound=Row)


def objective_value(objective: Objective, seconds: float, cost: RunCost) -> float:
    """What an objective makes least. Dollars must be known for `cost` (`check_objective`)."""
    if objective == "makespan":
        return seconds
    assert cost.dollars is not None, "check_objective comes first"
    return cost.dollars


def best_rows(
    rows: Iterable[R], objective: Objective, contest: Callable[[R], Hashable]
) -> tuple[R, ...]:
    """The best row of each contest, the first of equals, in the order of the contests."""
    best: dict[Hashable, R] = {}
    for row in rows:
        known = best.setdefault(contest(row), row)
        if row.value(objective) < known.value(objective):
            best[contest(row)] = row
    return tuple(best.values())


def ranked(rows: Iterable[R], objective: Objective) -> tuple[R, ...]:
    """Rows by the objective; equals in their order."""
    return tuple(sorted(rows, key=lambda row: row.value(objective)))


def prices_for(objective: Objective, own: Mapping[str, float], gpus: Collection[str]) -> Prices:
    """Prices of runs that are ranked by an objective; `own` as of `heddle.cost.prices.prices_of`.

    Raises:
        ConfigError: an own price is of an unknown class; to rank by cost, a class has no price.
    """
    prices = prices_of(own, gpus)
    check_objective(objective, prices, gpus)
    return prices


def check_objective(objective: Objective, prices: Prices, gpus: Iterable[str]) -> None:
    """Refuse to rank by cost where a GPU class has no price, or all are free.

    Raises:
        ConfigError: one has none, or nothing costs anything.
    """
    if objective == "makespan":
        return
    classes = list(gpus)
    if all(prices.dollars_per_hour(gpu) == 0.0 for gpu in classes):
        raise ConfigError(
            f"plan.objective = cost cannot rank what is free: the price of {', '.join(classes)} "
            "is 0; give a price above 0, or leave plan.objective out"
        )
    for gpu in classes:
        if prices.dollars_per_hour(gpu) is None:
            raise ConfigError(
                f"plan.objective = cost needs the price of every GPU class, and {gpu} has none: "
                f"give {price_option(gpu)} for a GPU and hour, or {_toml_key(gpu)} = DOLLARS under "
                "[prices]"
            )


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, flags=re.ASCII) else json.dumps(name)
