"""What several regimes reached on one trace and cluster: figures, and the JSON of them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Generic, TypeVar

from heddle.cluster.failures import too_late
from heddle.comparison.estimates import Estimate, estimate
from heddle.cost.objective import Objective, best_rows, objective_value, ranked
from heddle.cost.prices import RunCost
from heddle.loops.data import check_packing, whole_epochs
from heddle.loops.measure import LoopFigures
from heddle.loops.setup import LoopSetup
from heddle.loops.splits import RANDOM
from heddle.loops.staleness import closed_form, reasons
from heddle.tabled import Tabled
from heddle_core.parts.planner import FixedPlan

SCHEMA = "heddle.loop/1"
TRIED = (
    *("regime", "train_gpus", "tp", "max_running"),
    *("step_s", "gpu_hours_per_1k_samples", "dollars_per_1k_samples"),
)
"""What the JSON says of every setting of a regime; of its best, all."""

BIASED = 0.1
"""Length bias from 1 on that is warned of."""
SAME = 1.001
"""Ratio of what the objective makes least, below which regimes are equal."""

F = TypeVar("F", bound=float | None)


class _OfRuns(Generic[F]):
    """A figure of a regime: the mean of that of each run."""

    def __init__(
        self, figure: Callable[[LoopFigures], F], mean: Callable[[Sequence[F]], F]
    ) -> None:
        self._figure, self._mean = figure, mean

    def __get__(self, row: "RegimeResult", _: type) -> F:
        return self._mean([self._figure(run) for run in row.runs])


def mean(values: Sequence[float]) -> float:
    """The sum of the values over their number."""
    return sum(values) / len(values)


def _mean_of_known(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeResult:
    """One regime over all seeds."""

    setup: LoopSetup
    """Of the first seed."""
    runs: tuple[LoopFigures, ...]
    busy: tuple[float, ...]
    """Share of the time in which rollout engines had a batch, by run."""
    bounds_s: tuple[float, ...]
    """Seconds in which no loop can train the same samples, by run."""
    step_s: Estimate

    samples_per_s = _OfRuns(lambda run: run.samples_per_s, mean)
    tokens_per_s = _OfRuns(lambda run: run.tokens_per_s, mean)
    train_busy = _OfRuns(lambda run: run.training_s / run.duration_s, mean)
    """Share of the time in training."""
    length_bias = _OfRuns(lambda run: run.mean_trained_tokens / run.mean_started_tokens, mean)
    """Mean output of a trained trajectory over that of a started one, in measured batches; below 1:
    too short."""
    length_distance = _OfRuns(lambda run: run.length_distance, fmean)
    batch_spread = _OfRuns(lambda run: run.batch_spread, fmean)
    longest_over_mean = _OfRuns(lambda run: run.longest_over_mean, fmean)
    reward_spread = _OfRuns(lambda run: run.reward_spread, _mean_of_known)
    mean_rewards = _OfRuns(lambda run: run.services.mean_rewards, fmean)
    mean_starts = _OfRuns(lambda run: run.services.mean_starts, fmean)
    reward_busy = _OfRuns(lambda run: run.services.reward_busy, _mean_of_known)
    environment_busy = _OfRuns(lambda run: run.services.environment_busy, _mean_of_known)

    @property
    def rollout_busy(self) -> float:
        """Mean of the runs."""
        return mean(self.busy)

    @property
    def bound_fraction(self) -> float:
        """Lower bound over the time of the whole loop, mean of the runs."""
        pairs = zip(self.bounds_s, self.runs, strict=True)
        return mean([bound_s / run.duration_s for bound_s, run in pairs])

    @property
    def bound_step_s(self) -> float:
        """Lower bound of a mean step: that of the loop, in proportion."""
        return self.bound_fraction * self.step_s.mean

    @property
    def cost_per_1k_samples(self) -> RunCost:
        """All GPUs, for as long as a thousand samples take."""
        return self.setup.cost(1000.0 / self.samples_per_s)

    @property
    def equal_samples_per_s(self) -> float:
        """Trained samples a second, each counted by its output tokens over those of a started one.

        Samples that are shorter than those of the data set are less work, and less data.
        """
        return self.samples_per_s * self.length_bias

    def value(self, objective: Objective) -> float:
        """What the objective makes least, for as many tokens as samples of the data set have."""
        return self.value_of_any_length(objective) / self.length_bias

    def value_of_any_length(self, objective: Objective) -> float:
        """Seconds of a step, or dollars of a thousand samples."""
        return objective_value(objective, self.step_s.mean, self.cost_per_1k_samples)

    @property
    def first_run(self) -> "RegimeResult":
        """The same of the first seed alone, which all settings ran under."""
        return replace(
            self,
            runs=self.runs[:1],
            busy=self.busy[:1],
            bounds_s=self.bounds_s[:1],
            step_s=estimate([self.runs[0].mean_step_s]),
        )

    @property
    def staleness(self) -> dict[int, int]:
        """Trained trajectories of measured batches by staleness, over all runs."""
        found: Counter[int] = Counter()
        for run in self.runs:
            found.update(dict(run.staleness))
        return dict(sorted(found.items()))

    @property
    def mean_staleness(self) -> float:
        """Of a trained trajectory."""
        found = self.staleness
        return sum(s * n for s, n in found.items()) / sum(found.values())

    @property
    def closed_staleness(self) -> float:
        """Mean staleness in closed form, mean of the runs (`heddle.loops.staleness`)."""
        regime = self.setup.regime
        return mean([closed_form(regime, run.ages).mean for run in self.runs])

    @property
    def staleness_reasons(self) -> list[str]:
        """Why it differs from the simulated one in the first run; none where it does not."""
        first = self.runs[0]
        return reasons(self.setup.regime, first.ages, first.steps)

    @property
    def wasted_share(self) -> float:
        """Output tokens of discarded trajectories, over all that were made or trained."""
        wasted = sum(run.wasted_tokens for run in self.runs)
        return wasted / (wasted + sum(run.all_trained_tokens for run in self.runs))

    @property
    def masked_share(self) -> float | None:
        """Output tokens of trained trajectories that an over-long filter masks, over all that were
        made; None without one."""
        if self.setup.regime.batching.overlong == "train":
            return None
        paid = sum(run.wasted_tokens + run.all_trained_tokens for run in self.runs)
        return sum(run.masked_tokens for run in self.runs) / paid

    @property
    def split_s(self) -> dict[str, float]:
        """Seconds of a step by what the trainer did or waited for, mean of the runs."""
        splits = [run.mean_split for run in self.runs]
        return {name: fmean(split[name] for split in splits) for name in splits[0]}

    def plain(self) -> dict[str, Any]:
        setup, config, staleness = self.setup, self.setup.config, self.staleness
        cluster, cost = config.run.cluster, self.cost_per_1k_samples

        def over_runs(*figures: str) -> dict[str, int]:
            return {name: sum(getattr(run, name) for run in self.runs) for name in figures}

        return {
            "regime": setup.name,
            **({"epoch_plan": config.epoch_plan} if config.epoch_plan else {}),
            "train_gpus": setup.train_gpus,
            **({"train_gpu": config.trainer_gpu} if config.train_gpu else {}),
            "tp": cluster.tp,
            **({"pools": setup.run.profiles.plain_pools()} if cluster.pool else {}),
            "max_running": cluster.max_running,
            **({} if cluster.drafts() is None else {"speculation": cluster.speculation}),
            "rollout_gpus": cluster.gpus,
            "reward_gpus": config.reward_gpus,
            "pool_gpus": setup.pool_gpus,
            "trainer": {
                "backend": config.train_backend,
                **{name: getattr(setup.layout, name) for name in ("tp", "pp", "cp")},
            },
            "update_s": setup.update.total_s,
            "pause_s": setup.update.pause_s,
            "step_s": self.step_s.plain(),
            "measured_steps": len(self.runs[0].step_s),
            "samples_per_s": self.samples_per_s,
            "equal_samples_per_s": self.equal_samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "gpu_hours_per_1k_samples": cost.gpu_hours,
            "dollars_per_1k_samples": cost.dollars,
            "split_s": self.split_s,
            "busy": {
                "rollout": self.rollout_busy,
                "train": self.train_busy,
                "reward": self.reward_busy,
                "environment": self.environment_busy,
            },
            "at_once": {"rewards": self.mean_rewards, "starts": self.mean_starts},
            "staleness": {
                "mean": self.mean_staleness,
                "max": max(staleness),
                "closed_form": self.closed_staleness,
                "reasons": self.staleness_reasons,
                "histogram": {str(versions): number for versions, number in staleness.items()},
            },
            **over_runs("failed_starts", "gpu_switches", "failed_switches", "wasted_tokens"),
            "wasted_share": self.wasted_share,
            **({} if self.masked_share is None else {"masked_share": self.masked_share}),
            "length_bias": self.length_bias,
            "length_distance": self.length_distance,
            "batch_spread": self.batch_spread,
            "longest_over_mean": self.longest_over_mean,
            "reward_spread": self.reward_spread,
            "known_prompts": len(setup.lengths) / len(setup.data.groups),
            "bound_fraction": self.bound_fraction,
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoopComparison(Tabled):
    tried: tuple[RegimeResult, ...]
    """Every regime at every split of the GPUs and TP degree."""
    objective: Objective = "makespan"
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Regimes that cannot take part, and why."""
    notes: tuple[str, ...] = ()
    """What was chosen where the configuration leaves it open."""

    @property
    def regimes(self) -> tuple[RegimeResult, ...]:
        """Each regime at its best setting by the objective at equal data; the first of equals.

        Of the settings that ran under most seeds.
        """
        most = max(len(row.runs) for row in self.tried)
        often = (row for row in self.tried if len(row.runs) == most)
        return best_rows(often, self.objective, lambda row: row.setup.label)

    @property
    def ranking(self) -> tuple[RegimeResult, ...]:
        """`regimes` by the objective at equal data; equals in their order."""
        return ranked(self.regimes, self.objective)

    @property
    def warnings(self) -> list[str]:
        """What has no effect, and where a ranking that does not look at the data would differ."""
        ends_s = [run.duration_s for row in self.tried for run in row.runs]
        found = too_late(self.tried[0].setup.config.run.cluster.failures, ends_s)
        plainly = sorted(self.regimes, key=lambda row: row.value_of_any_length(self.objective))
        if any(a is not b for a, b in zip(plainly, self.ranking, strict=True)):
            names = ", ".join(
                f"{row.setup.label} ({row.length_bias:.2f} of the length, "
                f"{row.wasted_share:.0%} wasted)"
                for row in plainly
            )
            found.append(f"by {self.objective} per sample, of any length, the order is {names}")
        for row in self.regimes:
            own, epoch, batches = row.setup, row.setup.epoch_batches, row.setup.config.batches
            known = len(own.lengths)
            found += check_packing(own.config, own.data, known, own.run.history.name)
            if len(row.runs[0].step_s) % epoch or batches % epoch:
                found.append(
                    f"{row.setup.label}: batches that are measured are no whole epochs of {epoch}, "
                    "so another order has other prompts: take loop.batches = "
                    f"{whole_epochs(batches, epoch, [row.setup.regime])}"
                )
            if abs(row.length_bias - 1.0) > BIASED:
                found.append(
                    f"{row.setup.label}: what it trains has {row.length_bias:.2f} of the length of "
                    f"what starts, over {len(row.runs[0].step_s)} measured batches: with more "
                    "loop.batches its rank may change"
                )
        return found

    @property
    def best(self) -> RegimeResult:
        return self.ranking[0]

    @property
    def verdict(self) -> str:
        """Which regime to train with, in a sentence."""
        best, *others = self.ranking
        least = best.value(self.objective)
        same = [row.setup.label for row in others if row.value(self.objective) < SAME * least]
        others = others[len(same) :]
        setup, cluster = best.setup, best.setup.config.run.cluster
        of = f"of rollout at TP {cluster.tps} and {setup.train_gpus} of training"
        of = f"in turn, rollout at TP {cluster.tps}" if setup.config.colocated else of
        time_s = f"{best.step_s.mean:,.1f} s a step"
        text = f"Train with {setup.label}, {cluster.gpus} GPUs {of}: {time_s}"
        if best.step_s.ci95 is not None:
            text += " ({:,.1f} to {:,.1f})".format(*best.step_s.ends)
        if same:
            text += f", at equal data as fast as {', '.join(same)}"
        if others:
            more = others[0].value("makespan") / best.value("makespan") - 1.0
            text += f", at equal data {more * 100.0:.0f} % faster than the next best, "
            text += others[0].setup.label
        gain = self.packing_gain(best)
        if gain is not None:
            text += f"; in random order its prompts take {gain:.2f} times as long"
        return f"{text}."

    def packing_gain(self, row: RegimeResult) -> float | None:
        """Time of the same regime with prompts in random order over that of a row."""
        mine = row.setup
        for other in self.regimes if mine.config.epoch_plan not in ("", RANDOM) else ():
            if (other.setup.name, other.setup.config.epoch_plan) == (mine.name, RANDOM):
                return other.step_s.mean / row.step_s.mean
        return None

    def export(self, framework: str | None = None) -> str:
        """Settings to paste into a framework, by default that of the policy.

        Raises:
            ConfigError: no such framework, or it cannot have these engines.
        """
        # A search of loops is built on this module.
        from heddle.planning.blocks import block, framework_of
        from heddle.search.looped import deployment_of_loop

        deployment = deployment_of_loop(self)
        return block(deployment, framework or framework_of(deployment.policy))

    def rows(self) -> list[dict[str, Any]]:
        """The best of each regime as JSON, the best first."""
        return [row.plain() for row in self.ranking]

    def plain(self, words: Sequence[str] | None = None) -> dict[str, Any]:
        """As JSON; `words` are trace and options of the command that runs the best again."""
        from heddle.search.looped import recommended

        first = self.tried[0].setup
        config, trace = first.config, first.run.workload.trace
        cluster = config.run.cluster
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "recommended": recommended(self, words),
            "trace": {
                "name": trace.name,
                "trajectories": len(first.run.workload.scripts),
                "sha256": trace.sha256,
            },
            "policy": config.run.policy.preset,
            "cluster": {
                "gpus": first.gpus,
                "gpu": ", ".join(first.gpus_by_class),
                "model": cluster.model,
                **first.run.profiles.marks,
                "colocated": config.colocated,
                "max_running": cluster.max_running,
            },
            "batch": {"groups": config.groups, "samples": config.samples},
            "steps": config.batches,
            "prices": first.prices.plain(first.gpus_by_class),
            **({"left_out": dict(self.left_out)} if self.left_out else {}),
            **({"notes": list(self.notes)} if self.notes else {}),
            **({"warnings": self.warnings} if self.warnings else {}),
            "objective": self.objective,
            "ranking": [row.setup.label for row in self.ranking],
            "regimes": [
                {**row.plain(), **({} if gain is None else {"packing_gain": gain})}
                for row in self.regimes
                for gain in [self.packing_gain(row)]
            ],
            "tried": [
                {key: row[key] for key in (*TRIED, "speculation", "epoch_plan") if key in row}
                for row in (r.plain() for r in self.tried)
            ],
        }


def plans(setup: LoopSetup) -> bool:
    """Whether its policy chooses TP degrees itself."""
    return not isinstance(setup.run.policy.planner, FixedPlan)
