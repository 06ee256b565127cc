"""Which of several clusters to take: each is searched, and the best that keeps the limits taken."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple, TypeAlias

from heddle.command_config import plan_settings
from heddle.comparison.tuning import Choice
from heddle.config import RunConfig
from heddle.config_error import ConfigError, require
from heddle.cost.objective import Objective, prices_for
from heddle.cost.prices import Prices, RunCost, price_option
from heddle.loops.config import loop_of
from heddle.planning.blocks import block
from heddle.planning.deployment import Deployment, deployment_of_search
from heddle.planning.limits import RolloutLimits, recommended_of, rounded, spent_of, unreachable
from heddle.search.answered import Answered
from heddle.search.loops import search_loops
from heddle.search.result import SearchResult, judged_bounds, search
from heddle.search.verdict import (
    Recommendation,
    answer_of_search,
    plain,
    plain_setting,
    verdict_of_search,
)
from heddle.setup import Workspace
from heddle.workload import CapacityError
from heddle_sim.training import TrainingError

ONE_TYPE_EACH = (
    "clusters to compare are of one GPU class each, all of whose engines prefill and decode: leave "
    "out cluster.pool and cluster.roles, or give one cluster"
)
BEST: Final = "best"
OnCluster: TypeAlias = Callable[[str, str, int, int], None]
"""Called with the cluster, and with what `heddle.search.race.OnRound` has."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchedClusters(Answered):
    clusters: tuple[SearchResult, ...]
    """The recommended first, then by makespan."""
    left_out: Mapping[str, str]
    """Clusters that cannot serve the trace, and why."""
    limits: RolloutLimits
    objective: Objective

    @property
    def framework(self) -> str | None:
        return plan_settings(self.taken.setup.config).framework

    @property
    def taken(self) -> SearchResult:
        """The recommended one."""
        return self.clusters[0]

    def spent(self, row: SearchResult) -> float:
        """Dollars of a cluster; GPU-hours where a type has no price."""
        return spent_of(self.clusters)(row)

    @property
    def front(self) -> tuple[SearchResult, ...]:
        """Clusters than which no other is both faster and cheaper (Pareto), the cheapest first."""
        at = {id(row): (row.makespan_s, self.spent(row)) for row in self.clusters}
        found = [
            row
            for row in self.clusters
            if not any(
                s <= at[id(row)][0] and d <= at[id(row)][1] and (s, d) != at[id(row)]
                for s, d in at.values()
            )
        ]
        return tuple(sorted(found, key=self.spent))

    @property
    def answer(self) -> Recommendation:
        """What to run there."""
        return answer_of_search(self.taken)

    @property
    def verdict(self) -> str:
        """What to run; of several clusters, where."""
        if len(self.clusters) + len(self.left_out) > 1 or self.limits != RolloutLimits():
            return verdict_of_clusters(self)
        return verdict_of_search(self.taken)

    @property
    def deployment(self) -> Deployment:
        """The engines of what is recommended, and the policy over them."""
        return deployment_of_search(self.taken)

    def rows(self) -> list[dict[str, Any]]:
        """What was judged there as JSON, the recommended first."""
        found = self.taken
        return [plain_setting(each, found.gpus, found.cost_of(each)) for each in found.judged]


def search_clusters(
    config: RunConfig,
    *,
    gpus: Sequence[int],
    classes: Sequence[str],
    limits: RolloutLimits,
    objective: Objective | None = None,
    budget_s: float | None = None,
    on_round: OnCluster | None = None,
    regimes: Sequence[str] = (),
    splits: Mapping[str, Choice] | None = None,
    **given: Any,
) -> SearchedClusters:
    """Search every number of `gpus` of every class, as `heddle.search.result.search` does; with
    `regimes`, for a loop, at `splits`, which are `train_gpus` and `tps` of `search_loops`.

    The recommended cluster keeps the limits with the least of the objective, by default dollars
    where there is a deadline; of clusters within 2 % of it, the other measure decides. The time of
    the search is divided evenly. A signal ends it with the clusters that it has.

    Raises:
        ConfigError: none keeps the limits, a price is missing, or a framework has no such engines.
        CapacityError: no cluster serves the trace; the message has each reason once.
        ValueError: any other of the packages' errors for bad input.
    """
    several = len(set(classes)) * len(set(gpus)) > 1
    require(not (several and (config.cluster.pool or config.cluster.roles)), ONE_TYPE_EACH)
    if objective is None:
        objective = "makespan" if limits.deadline_s is None else "cost"
    prices = _prices(config, limits, objective, classes)
    pairs = product(dict.fromkeys(classes), dict.fromkeys(gpus))
    configs = {f"{count} x {gpu}": _on(config, gpu, count) for gpu, count in pairs}
    shared = Workspace()
    if limits != RolloutLimits() and not regimes and not given.get("speculation"):
        _check_bounds(configs, limits, prices, shared, given.get("slots"))
    search_one = partial(_search_loop, regimes, splits or {}) if regimes else search
    how = partial(search_one, prices=prices, workspace=shared, **given)
    rows, left_out = _search_each(configs, how, budget_s, on_round)
    rows, left_out = _on_the_same_data(rows, left_out)
    if not rows:
        reasons = "; ".join(dict.fromkeys(left_out.values()))
        raise CapacityError(f"no cluster of these serves the trace: {reasons}")
    recommended = recommended_of(rows, limits, objective)
    if recommended is None:
        alone_s = 0.0 if regimes else min(row.setup.bound().solo_s for row in rows)
        raise ConfigError(f"{unreachable(rows, limits)}{_alone(alone_s, limits)}")
    if framework := given.get("framework"):
        block(deployment_of_search(recommended), framework)
    rest = sorted((row for row in rows if row is not recommended), key=lambda r: r.makespan_s)
    return SearchedClusters(
        clusters=(recommended, *rest),
        left_out=left_out,
        limits=limits,
        objective=objective,
    )


def _search_each(
    configs: Mapping[str, RunConfig],
    search_one: Callable[..., SearchResult],
    budget_s: float | None,
    on_round: OnCluster | None,
) -> tuple[list[SearchResult], dict[str, str]]:
    """Clusters that were searched, and why the others were not.

    Raises:
        KeyboardInterrupt: a signal before any was.
        ValueError: the only one cannot be.
    """
    rows: list[SearchResult] = []
    left_out: dict[str, str] = {}
    interrupted = False
    for name, each in configs.items():
        if interrupted:
            left_out[name] = "not searched: interrupted"
            continue
        try:
            found = search_one(
                each,
                budget_s=None if budget_s is None else budget_s / len(configs),
                on_round=on_round and partial(on_round, name),
            )
        except KeyboardInterrupt:
            if not rows:
                raise
            left_out[name], interrupted = "not searched: interrupted", True
        except (CapacityError, ConfigError, TrainingError) as error:
            if len(configs) == 1:
                raise
            left_out[name] = str(error)
        else:
            rows.append(found)
            interrupted = found.interrupted
    return rows, left_out


def _on_the_same_data(
    rows: Sequence[SearchResult], left_out: Mapping[str, str]
) -> tuple[list[SearchResult], dict[str, str]]:
    """Clusters that hold the most trajectories, and why the others are left out: what is easier to
    run ends sooner."""
    dropped = {row.name: len(row.setup.workload.dropped) for row in rows}
    least = min(dropped.values(), default=0)
    fewer = {
        name: f"its engines or trainer do not hold {count - least:,} trajectories that others hold"
        for name, count in dropped.items()
        if count > least
    }
    return [row for row in rows if row.name not in fewer], {**left_out, **fewer}


def _search_loop(
    regimes: Sequence[str], splits: Mapping[str, Choice], config: RunConfig, **given: Any
) -> SearchResult:
    train_gpus, tps = splits.get("train_gpus", BEST), splits.get("tps", BEST)
    return search_loops(loop_of(config, regimes), train_gpus=train_gpus, tps=tps, **given)


class _Least(NamedTuple):
    """A cluster, and what a rollout takes there at least."""

    name: str
    makespan_s: float
    cost: RunCost
    alone_s: float
    """Of the longest trajectory."""


def _check_bounds(
    configs: Mapping[str, RunConfig],
    limits: RolloutLimits,
    prices: Prices,
    shared: Workspace,
    slots: Sequence[int] | None,
) -> None:
    """Refuse limits that the bounds of all clusters break."""
    rows = []
    for name, config in configs.items():
        with suppress(CapacityError, ConfigError):  # The search says why.
            pools, bounds = judged_bounds(config, shared, slots)
            least_s, alone_s = (min(b.makespan_s for b in bounds), min(b.solo_s for b in bounds))
            rows.append(_Least(name, least_s, prices.cost(pools, least_s), alone_s))
    if rows and (all(map(limits.late, rows)) or all(map(limits.over_budget, rows))):
        alone = _alone(min(each.alone_s for each in rows), limits)
        raise ConfigError(f"{unreachable(rows, limits, least=True)}{alone}")


def _on(config: RunConfig, gpu: str, count: int) -> RunConfig:
    if config.cluster.pool:
        return config
    return replace(config, cluster=replace(config.cluster, gpu=gpu, gpus=count))


def _alone(alone_s: float, limits: RolloutLimits) -> str:
    """That no number of GPUs keeps a deadline, where the longest trajectory alone is later."""
    if limits.deadline_s is None or alone_s <= limits.deadline_s:
        return ""
    return f". No number of GPUs keeps it: the longest trajectory alone takes {alone_s:,.0f} s"


def _prices(
    config: RunConfig, limits: RolloutLimits, objective: Objective, classes: Sequence[str]
) -> Prices:
    prices = prices_for("makespan", config.prices, classes)
    unpriced = [gpu for gpu in classes if prices.dollars_per_hour(gpu) is None]
    needed = limits.dollars is not None or (objective == "cost" and len(classes) > 1)
    if unpriced and needed:
        raise ConfigError(
            f"{unpriced[0]} has no price, and dollars decide: give {price_option(unpriced[0])} "
            "for a GPU and hour"
        )
    return prices


def verdict_of_clusters(result: SearchedClusters) -> str:
    """Which cluster to take, why, and what to run there."""
    taken, limits = result.taken, result.limits
    said = []
    if limits.deadline_s is not None:
        said.append(f"ends in {rounded(limits.deadline_s, 0)} s")
    if limits.dollars is not None:
        said.append(f"costs at most ${rounded(limits.dollars)}")
    least = "fastest" if result.objective == "makespan" else "cheapest"
    within = f" that {' and '.join(said)}" if said else ""
    paid = taken.cost.dollars
    cost = f"{taken.cost.gpu_hours:,.2f} GPU-hours" if paid is None else f"${rounded(paid)}"
    spread, what = taken.best.makespan_s, taken.best.of
    late = ""
    if spread.high is not None and spread.high > (limits.deadline_s or math.inf):
        late = f" A {what} of other prompts may take {spread.high:,.0f} s."
    clusters = len(result.clusters)
    why = f", which {' and '.join(said)}" if said else ""
    if clusters > 1:
        why = f": the {least} of {clusters} clusters{within}"
    return f"Take {taken.name}, {cost} a {what}{why}.{late} {verdict_of_search(taken)}"


def plain_clusters(result: SearchedClusters, words: Sequence[str]) -> dict[str, Any]:
    """As JSON: the answer of the recommended cluster, with all of them."""
    taken = result.taken
    found = plain(taken, words_of(taken, words))
    found["searched"]["complete"] = all(row.complete for row in result.clusters)
    return {
        **found,
        "verdict": verdict_of_clusters(result),
        "objective": result.objective,
        "deadline_s": result.limits.deadline_s,
        "budget_dollars": result.limits.dollars,
        "clusters": [
            {
                "name": row.name,
                **plain_setting(row.best, row.gpus, row.cost),
                "bound_s": row.bound_s,
                "in_time": not result.limits.late(row),
                "in_budget": not result.limits.over_budget(row),
            }
            for row in result.clusters
        ],
        "left_out": dict(result.left_out),
    }


def words_of(row: SearchResult, words: Sequence[str]) -> list[str]:
    """Words of a command with the GPUs of a cluster in place of its own."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("--gpu", "--gpus"):
            next(rest, None)
        else:
            kept.append(word)
    gpu = row.setup.config.cluster.gpu
    # Those of a trainer too, where they are of this type.
    count = {name.lower(): count for name, count in row.gpus.items()}[gpu.lower()]
    return [*kept, "--gpu", gpu, "--gpus", str(count)]
