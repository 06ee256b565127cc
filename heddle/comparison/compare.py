"""Several policies on one trace and cluster, several seeds each: one table.

Policies without a planner may run at several TP degrees and numbers of running steps, of which
the best is compared (`heddle.comparison.tuning`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from heddle.cluster.profiles import ClusterProfiles
from heddle.comparison.estimates import Estimate, estimate
from heddle.comparison.tuning import Choice, Tuning, Variant, tuning, with_policy
from heddle.config import RunConfig
from heddle.config_error import ConfigError, require
from heddle.cost.objective import Objective, best_rows, objective_value, prices_for, ranked
from heddle.cost.prices import Prices, RunCost
from heddle.executor import Report
from heddle.executor_choice import ExecutorKind, run_all
from heddle.planning.deployment import Deployment
from heddle.policy_inputs import HistorySource
from heddle.runs.bound import Bound
from heddle.runs.comparison_folder import SCHEMA
from heddle.runs.ideal import Ideal
from heddle.search.answered import Answered
from heddle.search.compared import answer_of, deployment_of_comparison, plain_answer
from heddle.search.policies import is_pattern, matching
from heddle.search.race import OnRound
from heddle.search.tuned import LONG_S, SEEDS, Tuned, tuned
from heddle.search.verdict import Answer
from heddle.setup import Workspace, ideal_levels, makespan_bound, prepare
from heddle.simulation import RunResult, simulate
from heddle.workload import Workload

MAX_SEEDS = 1_000
SEED_END = 2**32

OnProgress: TypeAlias = Callable[[Sequence[str], Sequence[int], int], None]
"""Called with the runs' names, how many trajectories each has finished, and how many a run has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One policy over all seeds, at one setting."""

    variant: Variant
    best: bool
    """Whether no other setting of the policy is better by the objective; the first of equals.
    Settings with prefill engines compete apart."""
    runs: tuple[RunResult, ...]
    """By seed."""
    makespan_s: Estimate
    throughput_tok_s: Estimate
    cost: RunCost
    """Of one rollout, mean over the seeds."""
    speedup: float
    """Mean throughput over that of the first policy named, at its best setting."""
    bound_fraction: float
    """Lower bound of the makespan over the mean makespan; 1 could not be better."""
    fluid_fraction: float
    """The same with the fluid optimum, which nothing proves."""
    equal_progress_fraction: float
    """The same with equal progress; above 1 where more is known than equal progress uses."""

    @property
    def policy(self) -> str:
        """The name of the row."""
        return self.variant.name

    def value(self, objective: Objective) -> float:
        """What the objective makes least: mean seconds, or mean dollars."""
        return objective_value(objective, self.makespan_s.mean, self.cost)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        cluster = self.variant.cluster
        setting = {
            "preset": self.variant.policy,
            "tp": cluster.tp,
            "max_running": cluster.max_running,
            "best": self.best,
        }
        if self.variant.speculation_tried:
            setting["speculation"] = cluster.speculation
        tried = self.variant.swept or self.variant.roles_tried
        return {
            "policy": self.policy,
            **(setting if tried else {}),
            **({"roles": cluster.roles} if cluster.roles else {}),
            "makespan_s": self.makespan_s.plain_range(),
            "throughput_tok_s": self.throughput_tok_s.plain_range(),
            **self.cost.plain(),
            "speedup": self.speedup,
            "bound_fraction": self.bound_fraction,
            "fluid_fraction": self.fluid_fraction,
            "equal_progress_fraction": self.equal_progress_fraction,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Answered):
    """What `heddle compare` reports."""

    config: RunConfig
    """Of the first run; where settings were tried, of the policies that run once."""
    tuning: Tuning
    """The settings that were tried."""
    workload: Workload
    """Under the first seed."""
    profiles: ClusterProfiles
    history: HistorySource
    prices: Prices
    objective: Objective
    bound: Bound
    """Of every row, whatever its setting."""
    ideal: Ideal
    policies: tuple[PolicyResult, ...]
    """A row for each policy, or for each setting of one."""
    raced: Tuned | None = None
    """Where the settings of policies were found before the runs: how."""
    long_runs: bool = False
    """Whether there is one seed because runs take long."""
    workspace: Workspace = field(repr=False, compare=False)
    """With inputs of the runs."""

    @property
    def runs(self) -> tuple[RunResult, ...]:
        """All runs, by row and seed."""
        return tuple(run for policy in self.policies for run in policy.runs)

    @property
    def answer(self) -> Answer | None:
        """What to run; None where every policy sees the future."""
        return answer_of(self)

    @property
    def deployment(self) -> Deployment:
        """The engines of what is recommended, and the policy over them."""
        return deployment_of_comparison(self, self.known_answer)

    def rows(self) -> list[dict[str, Any]]:
        """The best of each policy as JSON, the best first."""
        return [row.plain() for row in self.ranking]

    @property
    def best_rows(self) -> tuple[PolicyResult, ...]:
        """One row for each policy, at its best setting where several were tried; one more at its
        best split into prefill and decode engines."""
        return tuple(policy for policy in self.policies if policy.best)

    @property
    def ranking(self) -> tuple[PolicyResult, ...]:
        """`best_rows` by the objective; equals in their order."""
        return ranked(self.best_rows, self.objective)

    @property
    def best_baseline(self) -> PolicyResult | None:
        """The best policy of another system, by the objective; None unless settings were tried."""
        others = [p for p in self.ranking if p.variant.baseline]
        return others[0] if any(p.variant.swept for p in others) else None

    def over_best_baseline(self, row: PolicyResult) -> float | None:
        """Mean throughput of a row over that of the best baseline; None if there is none."""
        baseline = self.best_baseline
        if baseline is None:
            return None
        return row.throughput_tok_s.mean / baseline.throughput_tok_s.mean

    def plain(self, words: Sequence[str] | None = None) -> dict[str, Any]:
        """As JSON; equal seeds give equal values but for `wall_s` and `run`.

        `words` are trace and options of the command that replays what is recommended.
        """
        trace, cluster = self.workload.trace, self.config.cluster
        baseline = self.best_baseline
        return {
            "schema": SCHEMA,
            **plain_answer(self, words),
            "trace": {
                "name": trace.name,
                "trajectories": len(self.workload.scripts),
                "output_tokens": self.workload.output_tokens,
                "sha256": trace.sha256,
                "dropped_over_capacity": len(self.workload.dropped),
                **self.workload.filled,
            },
            "cluster": {
                "gpus": cluster.gpus,
                "gpu": ", ".join(self.profiles.pools),
                **({"pools": self.profiles.plain_pools()} if cluster.pool else {}),
                "model": cluster.model,
                "profile": self.profiles.name,
                **self.profiles.marks,
                "tp": cluster.tp,
                **({"mix": list(cluster.mix)} if cluster.mix else {}),
                **({"roles": cluster.roles} if cluster.roles else {}),
                "max_running": cluster.max_running,
                **self._resources(),
            },
            "history": self.history.plain(),
            "prices": self.prices.plain(self.profiles.pools),
            "objective": self.objective,
            "ranking": [row.policy for row in self.ranking],
            "bound": {
                "makespan_s": self.bound.makespan_s,
                "solo_s": self.bound.solo_s,
                "capacity_s": self.bound.capacity_s,
                **({"tools_s": self.bound.tools_s} if cluster.tool_capacity else {}),
            },
            "ideal": asdict(self.ideal),
            **({"best_baseline": baseline.policy} if baseline else {}),
            **({} if self.raced is None else {"searched": self.raced.plain()}),
            "runs": [
                {**run.row(), "policy": row.policy} for row in self.policies for run in row.runs
            ],
            "policies": [
                {**row.plain(), "over_best_baseline": self.over_best_baseline(row)}
                if baseline
                else row.plain()
                for row in self.policies
            ],
        }

    def _speculation(self) -> dict[str, Any]:
        """Speculative decoding of the cluster, with the acceptance that was taken."""
        drafts = self.profiles.classes[0].drafts(self.config.cluster.tp)
        if self.tuning.speculations or drafts is None:
            return {}
        return {"speculation": str(drafts.speculation)}

    def _resources(self) -> dict[str, Any]:
        """Settings of the cluster that are not the defaults, and that a reader must know."""
        cluster = self.config.cluster
        found = {
            "engine_start_s": cluster.engine_start_s,
            "standby_tp": list(cluster.standby_tp) or None,
            "host_kv": None if cluster.host_kv == "none" else cluster.host_kv,
            **self._speculation(),
        }
        return {name: value for name, value in found.items() if value is not None}


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
    degree and number of running steps of each shipped policy before its runs, among `tps` and
    `slots`, by default all; `on_round` is called as of `heddle.search.race`. `seeds` None: three,
    or one where a run takes over a minute.

    A seed draws values that the trace lacks and permutes the order of its groups, in the same way
    for every policy. The number of processes `jobs` (default: as many as are useful) changes no
    result, nor does `executor`; with ``ray``, runs are tasks of a Ray cluster. `on_progress` is
    called a few times a second; it lists runs by seed, then policy.

    `tps` and `slots` are TP degrees and numbers of running steps of an engine, each a list or
    ``best``. Policies without a planner run at all combinations; others once. `speculation` is
    ``best`` or ``METHOD:best[:ACCEPTANCE]``: all policies run at each setting of it. With `roles`
    all run with prefill and decode engines too. `objective` ranks settings of a policy, and
    policies. Give the same `workspace` to comparisons that have inputs in common.

    Raises:
        ConfigError: no policy, one named twice, an absurd number of seeds or jobs, a setting that
            cannot be tried, a price of an unknown class; to rank by cost, a class without one.
        ValueError: any other of the packages' errors for bad input, before the first run.
        OSError: a run directory cannot be written.
        WorkerError: a process of `jobs` was killed.
        KeyboardInterrupt: a signal; unfinished runs are marked interrupted, and more do nothing.
    """
    names = ["all"] if policies is None else list(policies)
    races = any(map(is_pattern, names))
    policies = matching(names, config)
    _check(policies, seeds, config.seed, jobs)
    shared = Workspace() if workspace is None else workspace
    raced = None
    if races:
        require(not roles, ROLES_NEED_NAMES)
        raced = tuned(
            config,
            policies,
            tps=tps,
            slots=slots,
            speculation=speculation,
            seeds=seeds,
            jobs=jobs,
            workspace=shared,
            on_round=on_round,
        )
        settings = raced.tuning
    else:
        settings = tuning(
            config, tps=tps, slots=slots, speculation=speculation, roles=roles, workspace=shared
        )
    config = replace(config, cluster=settings.base)
    first, profiles = shared.workload(config), shared.profiles(settings.base)
    prices = prices_for(objective, config.prices, profiles.pools)
    variants = settings.variants(config, policies, shared) if raced is None else raced.variants
    one = partial(_simulate, asleep=config.cluster.standby_tp, out=out, config_text=config_text)

    def runs(numbers: Sequence[int]) -> list[RunResult]:
        # By seed first: the trace is filled in once for all policies.
        planned = [(v, config.seed + s) for s in numbers for v in variants]
        each = [replace(with_policy(config, v.policy, v.cluster), seed=seed) for v, seed in planned]
        steps = len(each) * sum(len(script.steps) for script in first.scripts)
        names, total = [f"{v.name} s{seed}" for v, seed in planned], first.trajectories
        watch = None if on_progress is None else lambda ended: on_progress(names, ended, total)
        return run_all(executor, shared, one, each, jobs=jobs, steps=steps, out=out, watch=watch)

    asked = seeds
    if seeds is None and raced is None:
        done = runs([0])
        seeds = 1 if max(run.wall_s for run in done) > LONG_S else SEEDS
        done += runs(range(1, seeds)) if seeds > 1 else []
    else:
        seeds = seeds or (1 if raced is None else raced.seeds)
        done = runs(range(seeds))
    bound, ideal = _least_limits(config, settings, shared, seeds)
    by_seed = [done[i :: len(variants)] for i in range(len(variants))]
    return Comparison(
        config=config,
        tuning=settings,
        workload=first,
        profiles=profiles,
        history=shared.history(config, first.trace),
        prices=prices,
        objective=objective,
        bound=bound,
        ideal=ideal,
        policies=policy_results(variants, by_seed, bound, ideal, objective),
        raced=raced,
        long_runs=asked is None and seeds == 1,
        workspace=shared,
    )


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
        raise ConfigError(f"policy {twice[0]!r} is named twice: name it once")
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


def policy_results(
    variants: Sequence[Variant],
    runs: Sequence[Sequence[RunResult]],
    bound: Bound,
    ideal: Ideal,
    objective: Objective,
) -> tuple[PolicyResult, ...]:
    """A row for each variant, from its runs."""
    rows = [
        PolicyResult(
            variant=variant,
            best=False,
            runs=tuple(mine),
            makespan_s=(makespan_s := estimate([run.summary["makespan_s"] for run in mine])),
            throughput_tok_s=estimate([run.summary["throughput_tok_s"] for run in mine]),
            cost=_mean_cost(mine),
            speedup=1.0,
            bound_fraction=bound.makespan_s / makespan_s.mean,
            fluid_fraction=ideal.fluid_s / makespan_s.mean,
            equal_progress_fraction=ideal.equal_progress_s / makespan_s.mean,
        )
        for variant, mine in zip(variants, runs, strict=True)
    ]
    best = best_rows(rows, objective, lambda row: row.variant.contest)
    reference = best[0].throughput_tok_s.mean
    return tuple(
        replace(row, best=row in best, speedup=row.throughput_tok_s.mean / reference)
        for row in rows
    )


def _mean_cost(runs: Sequence[RunResult]) -> RunCost:
    dollars = [run.summary["dollars"] for run in runs]
    return RunCost(
        gpu_hours=fmean(run.summary["gpu_hours"] for run in runs),
        dollars=None if None in dollars else fmean(dollars),
    )
