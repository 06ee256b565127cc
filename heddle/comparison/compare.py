"""Several policies on one trace and cluster, several seeds each: one table.

Policies without a planner may run at several TP degrees and numbers of running steps, of which
the best is compared (`heddle.comparison.tuning`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from heddle.comparison.estimates import LONG_S, SEEDS
from heddle.comparison.result import Comparison, policy_results
from heddle.comparison.tuning import (
    Choice,
    Tuning,
    Variant,
    tuning,
    with_admission,
    with_policy,
)
from heddle.config import RunConfig
from heddle.config_error import ConfigError, require
from heddle.cost.objective import Objective, prices_for
from heddle.executor import Report
from heddle.executor_choice import ExecutorKind, run_all
from heddle.runs.bound import Bound
from heddle.runs.ideal import Ideal
from heddle.search.draws import check_history
from heddle.search.policies import is_pattern, matching
from heddle.search.race import OnRound
from heddle.search.tuned import tuned
from heddle.setup import Workspace, ideal_levels, makespan_bound, prepare
from heddle.simulation import RunResult, simulate
from heddle_core.presets import ADAPTIVE

MAX_SEEDS = 1_000
SEED_END = 2**32

OnProgress: TypeAlias = Callable[[Sequence[str], Sequence[int], int], None]
"""Called with the runs' names, how many trajectories each has finished, and how many a run has."""


def compare(
    config: RunConfig,
    policies: Sequence[str] | None = None,
    *,
    tps: Choice = None,
    slots: Choice = None,
    speculation: str | None = None,
    objective: Objective = "makespan",
    roles: bool = False,
    seeds: int | None = 1,
    out: Path = Path("runs"),
    jobs: int | None = None,
    executor: ExecutorKind = "processes",
    config_text: str | None = None,
    workspace: Workspace | None = None,
    on_progress: OnProgress | None = None,
    on_round: OnRound | None = None,
) -> Comparison:
    """Run each policy under seeds `config.seed`, `config.seed` + 1, ...; put the results together.

    Without `policies`, and with patterns such as ``verl*`` or ``all``, a race finds the best TP
    degree and slots of each before its runs. `seeds` None: three, or one of over a minute.

    `tps` and `slots` are lists or ``best``: policies without a planner run at all combinations.
    `speculation` is ``best`` or ``METHOD:best[:ACCEPTANCE]``; `roles`: with prefill engines too.

    Raises:
        ConfigError: no policy, one twice, or what cannot be tried or priced.
        ValueError: any other of the packages' errors for bad input, before the first run.
        OSError: a run directory cannot be written.
        WorkerError, KeyboardInterrupt: a killed process, a signal.
    """
    names = matching(["all"] if policies is None else policies, config)
    races = policies is None or any(map(is_pattern, policies))
    require(not (races and roles), ROLES_NEED_NAMES)
    _check([with_admission(name, config.cluster) for name in names], seeds, config.seed, jobs)
    shared = Workspace() if workspace is None else workspace
    warning = check_history(config, shared, again=True)
    raced, tried = None, (tps, slots, speculation)
    if races:
        raced = tuned(config, names, *tried, seeds, jobs=jobs, workspace=shared, on_round=on_round)
    settings = raced.tuning if raced else tuning(config, *tried, roles, workspace=shared)
    config = replace(config, cluster=settings.base)
    prices = prices_for(objective, config.prices, shared.profiles(settings.base).pools)
    variants = raced.variants if raced else settings.variants(config, names, shared)
    one = partial(_simulate, asleep=config.cluster.standby_tp, out=out, config_text=config_text)
    runs = partial(_runs, config, variants, shared, one, executor, jobs, out, on_progress)
    count = seeds if raced is None else raced.seeds
    done = runs(range(count or 1))
    if count is None:
        count = 1 if max(run.wall_s for run in done) > LONG_S else SEEDS
        done += runs(range(1, count))
    bound, ideal = _least_limits(config, settings, shared, count)
    by_seed = [done[i :: len(variants)] for i in range(len(variants))]
    return Comparison(
        config=config,
        tuning=settings,
        workload=(first := shared.workload(config)),
        profiles=shared.profiles(settings.base),
        history=shared.history(config, first.trace),
        prices=prices,
        objective=objective,
        bound=bound,
        ideal=ideal,
        policies=policy_results(variants, by_seed, bound, ideal, objective),
        raced=raced,
        long_runs=seeds is None and count == 1,
        history_warning=warning,
        workspace=shared,
    )


def _runs(
    config: RunConfig,
    variants: Sequence[Variant],
    shared: Workspace,
    one: Callable[[Workspace, RunConfig, Report | None], RunResult],
    executor: ExecutorKind,
    jobs: int | None,
    out: Path,
    on_progress: OnProgress | None,
    numbers: Sequence[int],
) -> list[RunResult]:
    """Run all variants under so many seeds, by seed first: a trace is filled in once for all."""
    planned = [(v, config.seed + s) for s in numbers for v in variants]
    each = [replace(with_policy(config, v.policy, v.cluster), seed=seed) for v, seed in planned]
    first = shared.workload(config)
    steps = len(each) * sum(len(script.steps) for script in first.scripts)
    labels, total = [f"{v.name} s{seed}" for v, seed in planned], first.trajectories
    watch = None if on_progress is None else lambda ended: on_progress(labels, ended, total)
    return run_all(executor, shared, one, each, jobs=jobs, steps=steps, out=out, watch=watch)


ROLES_NEED_NAMES = (
    "--sweep cluster.roles needs names: list policies in --policies, such as verl,heddle"
)


def _simulate(
    shared: Workspace,
    config: RunConfig,
    report: Report | None,
    *,
    asleep: tuple[int, ...],
    out: Path,
    config_text: str | None,
) -> RunResult:
    """One run of a comparison, as a job of an executor.

    Engines asleep leave less KV. What rows with such engines cannot hold is left out of all rows.
    """
    held = replace(config, cluster=replace(config.cluster, standby_tp=asleep))
    return simulate(
        prepare(config, workspace=shared, workload=shared.workload(held)),
        out=out,
        config_text=config_text,
        on_progress=None if report is None else lambda finished, total: report(finished),
    )


def _check(policies: Sequence[str], seeds: int | None, first_seed: int, jobs: int | None) -> None:
    if not policies:
        raise ConfigError("no policy is named: list them in --policies; see `heddle policies list`")
    twice = [p for p in dict.fromkeys(policies) if list(policies).count(p) > 1]
    if twice:
        added = f"; --max-running auto adds +{ADAPTIVE}" if twice[0].endswith(ADAPTIVE) else ""
        raise ConfigError(f"policy {twice[0]!r} is named twice: name it once{added}")
    seeds = SEEDS if seeds is None else seeds
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"seeds must be from 1 to {MAX_SEEDS:,}, not {seeds}")
    if first_seed + seeds > SEED_END:
        raise ConfigError(f"seed {first_seed} and {seeds - 1} after it pass {SEED_END - 1}")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be 1 or more, not {jobs}")


def _least_limits(
    config: RunConfig, settings: Tuning, shared: Workspace, seeds: int
) -> tuple[Bound, Ideal]:
    """What holds for every setting of speculative decoding."""
    found = [_limits(replace(config, cluster=each), shared, seeds) for each in settings.planned]
    return min(found, key=lambda limits: limits[0].makespan_s)


def _limits(config: RunConfig, shared: Workspace, seeds: int) -> tuple[Bound, Ideal]:
    """What holds for every seed: drawn values differ, so the lowest bound counts.

    Some row may have no engines asleep, so the bound has all memory for KV.
    """
    fill = shared.workload(config).fill
    drawn = fill is not None and any(f.drawn for f in fill.fields.values())
    cluster = replace(config.cluster, standby_tp=())
    profiles = shared.profiles(cluster)
    found = []
    for seed in range(seeds if drawn else 1):
        workload = shared.workload(replace(config, seed=config.seed + seed))
        bound = makespan_bound(workload, profiles, cluster)
        found.append((bound, ideal_levels(workload, profiles, cluster, bound)))
    return min(found, key=lambda pair: pair[0].makespan_s)
