"""What a comparison found: a row for each policy, and what to run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from heddle.cluster.failures import too_late
from heddle.cluster.profiles import ClusterProfiles
from heddle.command_config import plan_settings
from heddle.comparison.estimates import Estimate, estimate
from heddle.comparison.tuning import Tuning, Variant
from heddle.config import RunConfig
from heddle.cost.objective import Objective, best_rows, objective_value, ranked
from heddle.cost.prices import Prices, RunCost
from heddle.planning.deployment import Deployment
from heddle.policy_inputs import HistorySource
from heddle.runs.bound import Bound
from heddle.runs.comparison_folder import SCHEMA
from heddle.runs.ideal import Ideal
from heddle.search.answered import Answered
from heddle.search.compared import answer_of, deployment_of_comparison, interval_of, plain_answer
from heddle.search.tuned import Tuned
from heddle.search.verdict import Recommendation
from heddle.setup import Workspace
from heddle.simulation import RunResult
from heddle.workload import Workload


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

    @property
    def times(self) -> tuple[float, ...]:
        """Makespans by seed, in seconds."""
        return tuple(run.summary["makespan_s"] for run in self.runs)

    def figure(self, key: str) -> float | None:
        """Mean over the seeds that have it."""
        known = [run.summary[key] for run in self.runs if run.summary[key] is not None]
        return fmean(known) if known else None

    def value(self, objective: Objective) -> float:
        """What the objective makes least: mean seconds, or mean dollars."""
        return objective_value(objective, self.makespan_s.mean, self.cost)

    def plain(self) -> dict[str, Any]:
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
            "throughput_tok_s": self.throughput_tok_s.plain_range(),
            **self.cost.plain(),
            "speedup": self.speedup,
            "bound_fraction": self.bound_fraction,
            "fluid_fraction": self.fluid_fraction,
            "equal_progress_fraction": self.equal_progress_fraction,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Answered):
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
    remark: str = ""
    """The last sentence of the verdict, where it is not of what was tried."""
    history_warning: str = ""
    workspace: Workspace = field(repr=False, compare=False)
    """With inputs of the runs."""

    @property
    def framework(self) -> str | None:
        """That is to run what is recommended; None: any."""
        return plan_settings(self.config).framework

    @property
    def runs(self) -> tuple[RunResult, ...]:
        """All runs, by row and seed."""
        return tuple(run for policy in self.policies for run in policy.runs)

    @property
    def answer(self) -> Recommendation | None:
        """What to run; None where every policy sees the future."""
        return answer_of(self)

    @property
    def deployment(self) -> Deployment:
        """The engines of what is recommended, and the policy over them."""
        return deployment_of_comparison(self, self.known_answer)

    def rows(self) -> list[dict[str, Any]]:
        """The best of each policy as JSON, the best first."""
        return [self._plain(row) for row in self.ranking]

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

    @property
    def warnings(self) -> list[str]:
        """What of the configuration has no effect, and what policies know."""
        ends_s = [run.summary["makespan_s"] for run in self.runs]
        known = [self.history_warning] if self.history_warning else []
        return [*known, *too_late(self.config.cluster.failures, ends_s)]

    def plain(self, words: Sequence[str] | None = None) -> dict[str, Any]:
        """As JSON; equal seeds give equal values but for `wall_s` and `run`.

        `words` are trace and options of the command that replays what is recommended.
        """
        cluster = self.config.cluster
        baseline = self.best_baseline
        return {
            "schema": SCHEMA,
            **plain_answer(self, words),
            "trace": self.workload.plain() | {"output_tokens": self.workload.output_tokens},
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
            **({"warnings": self.warnings} if self.warnings else {}),
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
                self._plain(row)
                | ({"over_best_baseline": self.over_best_baseline(row)} if baseline else {})
                for row in self.policies
            ],
        }

    def _plain(self, row: PolicyResult) -> dict[str, Any]:
        made = interval_of(self, row.times).plain() | row.makespan_s.plain()
        return row.plain() | {"makespan_s": made}

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
