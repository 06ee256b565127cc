"""How many GPUs of which class a rollout needs: one row for each cluster that is tried.

Every cluster is estimated from the distribution of the trace's own lengths, as if all trajectories
advance alike (`heddle_core.estimate.equal_progress`). That answers how long *this* trace takes. It
decides nothing in a policy: the engines of a row are those that `heddle` starts, from its history.
Unless only estimates are wanted, each cluster is simulated too: `heddle`, and `verl` at every TP
degree, of which the best is the uniform one to compare with.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

from heddle.comparison.compare import OnProgress as Watch
from heddle.comparison.compare import compare
from heddle.comparison.tuning import tuning, with_policy
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.cost.objective import Objective, prices_for
from heddle.cost.prices import Prices, price_option
from heddle.planning.cluster_sizes import ClusterSize, Sizes, UniformEngines
from heddle.planning.limits import RolloutLimits, recommended_of
from heddle.planning.plan import arrived
from heddle.setup import RunSetup, Workspace, prepare
from heddle.workload import CapacityError
from heddle_core.ids import EngineShape
from heddle_core.parts.planner import EqualProgressPlan
from heddle_core.plans import ResourcePlan
from heddle_trace.history import history_of, tool_rates_of

PLANNED, UNIFORM = "heddle", "verl"

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with the cluster under way, trajectories that are done there, and all of its runs."""


def size_clusters(
    config: RunConfig,
    *,
    gpus: Sequence[int],
    classes: Sequence[str],
    limits: RolloutLimits | None = None,
    objective: Objective | None = None,
    simulated: bool = True,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
) -> Sizes:
    """Estimate a rollout of a trace on every number of `gpus` of every class, and simulate it.

    `config.cluster` has everything else; its own GPUs do not matter. The recommended row keeps
    `limits`. Of those that do, it has the least of the `objective`; None: dollars where there is a
    deadline, else seconds. Of rows within 2 % of the least, the other measure decides.

    Raises:
        ConfigError: nothing to try, a class without the price that a limit or the objective needs,
            or a price of an unknown class.
        CapacityError: no cluster serves the trace; the message has each reason once.
        ValueError: any other of the packages' errors for bad input.
    """
    limits = limits or RolloutLimits()
    if config.cluster.pool or config.cluster.roles:
        raise ConfigError(
            "clusters to compare are of one GPU class each, all of whose engines prefill and "
            "decode: leave out cluster.pool and cluster.roles, or give one cluster"
        )
    if not gpus or not classes:
        raise ConfigError("no cluster to plan for: name one number of GPUs and one class at least")
    if objective is None:
        objective = "makespan" if limits.deadline_s is None else "cost"
    shared = Workspace()
    setups, left_out = _setups(config, gpus, classes, shared)
    if not setups:
        reasons = "; ".join(dict.fromkeys(left_out.values()))
        raise CapacityError(f"no cluster of these serves the trace: {reasons}")
    prices = _prices(config, limits, objective, [setup for _, setup in setups.values()])
    rows = [
        _row(
            mine,
            setup,
            prices,
            shared,
            simulated,
            jobs,
            on_progress and partial(_watch, on_progress, name),
        )
        for name, (mine, setup) in setups.items()
    ]
    recommended = recommended_of(rows, limits, objective)
    rest = sorted((row for row in rows if row is not recommended), key=lambda r: r.makespan_s)
    _, first = next(iter(setups.values()))
    return Sizes(
        trace=first.workload.trace.name,
        trajectories=first.workload.trajectories,
        model=first.profiles.model,
        max_running=config.cluster.max_running,
        history=first.history.name,
        rows=(*([] if recommended is None else [recommended]), *rest),
        left_out=left_out,
        limits=limits,
        objective=objective,
        prices=prices,
        recommended=recommended,
    )


def _setups(
    config: RunConfig, gpus: Sequence[int], classes: Sequence[str], workspace: Workspace
) -> tuple[dict[str, tuple[RunConfig, RunSetup]], dict[str, str]]:
    """Set-ups of `heddle` by cluster, and why the others cannot serve the trace."""
    setups: dict[str, tuple[RunConfig, RunSetup]] = {}
    left_out: dict[str, str] = {}
    for gpu, count in product(dict.fromkeys(classes), dict.fromkeys(gpus)):
        mine = replace(config, cluster=replace(config.cluster, gpu=gpu, gpus=count, mix=()))
        name = f"{count} x {gpu}"
        try:
            base = tuning(mine, tps="best", workspace=workspace).base
            setup = prepare(with_policy(mine, PLANNED, base), workspace=workspace)
        except (CapacityError, ConfigError) as error:
            left_out[name] = str(error)
        else:
            setups[name] = (mine, setup)
    return setups, left_out


def _prices(
    config: RunConfig, limits: RolloutLimits, objective: Objective, setups: Sequence[RunSetup]
) -> Prices:
    """Prices of all classes.

    Raises:
        ConfigError: there is a budget, or classes are compared by dollars, and one has no price.
    """
    classes = list(dict.fromkeys(setup.profile.gpu for setup in setups))
    prices = prices_for("makespan", config.prices, classes)
    unpriced = [gpu for gpu in classes if prices.dollars_per_hour(gpu) is None]
    if unpriced and limits.dollars is not None:
        raise ConfigError(
            f"--budget needs the price of every GPU class, and {unpriced[0]} has none: give "
            f"{price_option(unpriced[0])} for a GPU and hour"
        )
    if unpriced and objective == "cost" and len(classes) > 1:
        raise ConfigError(
            f"the fewest dollars are taken, and {unpriced[0]} has no price: give "
            f"{price_option(unpriced[0])} for a GPU and hour, or plan.objective = makespan"
        )
    return prices


def _row(
    config: RunConfig,
    setup: RunSetup,
    prices: Prices,
    workspace: Workspace,
    simulated: bool,
    jobs: int | None,
    watch: Watch | None,
) -> ClusterSize:
    """One cluster, from estimates and, if wanted, runs."""
    mix, estimated_s, uniform = _estimated(config, setup, workspace)
    bound = setup.bound()
    simulated_s = None
    if simulated:
        with tempfile.TemporaryDirectory(prefix="heddle-plan-") as folder:
            result = compare(
                config,
                [UNIFORM, PLANNED],
                tps="best",
                out=Path(folder),
                jobs=jobs,
                workspace=workspace,
                on_progress=watch,
            )
        baseline, planned = result.best_rows
        simulated_s, seconds = planned.makespan_s.mean, baseline.makespan_s.mean
        uniform = UniformEngines(tp=baseline.variant.cluster.tp, makespan_s=seconds)
    makespan_s = estimated_s if simulated_s is None else simulated_s
    return ClusterSize(
        gpu=setup.profile.gpu,
        gpus=config.cluster.gpus,
        mix=mix,
        estimated_s=estimated_s,
        simulated_s=simulated_s,
        uniform=uniform,
        bound_s=bound.makespan_s,
        solo_s=bound.solo_s,
        cost=prices.cost(setup.profiles.pools, makespan_s),
    )


def _estimated(
    config: RunConfig, setup: RunSetup, workspace: Workspace
) -> tuple[dict[EngineShape, int], float, UniformEngines]:
    """Engines that `heddle` starts with, their estimated makespan, and the best single degree."""
    scripts = setup.workload.scripts
    ts = [arrived(script) for script in scripts]
    planner = setup.policy.planner
    assert isinstance(planner, EqualProgressPlan), "the preset's own planner"
    found = planner.plan(ts, [setup.policy.predictor.remaining_tokens(t) for t in ts])
    plan = found if isinstance(found, ResourcePlan) else found.solve()
    mix = dict(Counter(engine.shape for engine in plan.engines))
    profile = setup.profile
    settings = tuning(config, tps="best", workspace=workspace).settings
    uniform = [{profile.shape(each.tp): each.gpus // each.tp} for each in settings]
    estimated_s, *others = planner.makespans_s(
        history_of(scripts), [mix, *uniform], ts, beyond=tool_rates_of(scripts)
    )
    tps = [each.tp for each in settings]
    seconds, tp = min(zip(others, tps, strict=True))
    return mix, estimated_s, UniformEngines(tp=tp, makespan_s=seconds)


def _watch(
    on_progress: OnProgress, name: str, names: Sequence[str], done: Sequence[int], each: int
) -> None:
    on_progress(name, sum(done), each * len(names))
