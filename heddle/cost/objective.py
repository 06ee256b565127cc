"""What comparisons and plans rank by: time or money."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, TypeAlias

from heddle.config_files import ConfigError
from heddle.cost.prices import Prices, price_option, prices_of

Objective: TypeAlias = Literal["makespan", "cost"]
"""`makespan`: seconds of a rollout, or of an RL step. `cost`: dollars of a rollout, or of the same
number of trained samples."""


def objective_value(objective: Objective, *, seconds: float, dollars: float | None) -> float:
    """What an objective makes least. `dollars` must be known for `cost` (`check_objective`)."""
    if objective == "makespan":
        return seconds
    assert dollars is not None, "check_objective comes first"
    return dollars


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
