"""What several regimes reached on one trace and cluster: figures, and the JSON of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from heddle.comparison.estimates import Estimate
from heddle.cost.objective import Objective, objective_value
from heddle.cost.prices import RunCost
from heddle.loop.measure import LoopFigures
from heddle.loop.setup import LoopSetup
from heddle_core.parts.planner import FixedPlan

SCHEMA = "heddle.loop/1"


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

    @property
    def bound_fraction(self) -> float:
        """Lower bound over the time of the whole loop, mean of the runs."""
        pairs = zip(self.bounds_s, self.runs, strict=True)
        return sum(bound_s / run.duration_s for bound_s, run in pairs) / len(self.runs)

    @property
    def samples_per_s(self) -> float:
        """Mean of the runs."""
        return sum(run.samples_per_s for run in self.runs) / len(self.runs)

    @property
    def tokens_per_s(self) -> float:
        """Mean of the runs."""
        return sum(run.tokens_per_s for run in self.runs) / len(self.runs)

    @property
    def cost_per_1k_samples(self) -> RunCost:
        """All GPUs, for as long as a thousand samples take."""
        return self.setup.prices.cost(self.setup.gpus_by_class, 1000.0 / self.samples_per_s)

    def value(self, objective: Objective) -> float:
        """What the objective makes least: seconds of a step, or dollars of a thousand samples."""
        dollars = self.cost_per_1k_samples.dollars
        return objective_value(objective, seconds=self.step_s.mean, dollars=dollars)

    @property
    def rollout_busy(self) -> float:
        """Mean of the runs."""
        return sum(self.busy) / len(self.busy)

    @property
    def train_busy(self) -> float:
        """Share of the time in training."""
        return sum(run.training_s / run.duration_s for run in self.runs) / len(self.runs)

    @property
    def staleness(self) -> dict[int, int]:
        """Trained trajectories by staleness, over all runs."""
        found: dict[int, int] = {}
        for run in self.runs:
            for versions, number in run.staleness:
                found[versions] = found.get(versions, 0) + number
        return dict(sorted(found.items()))

    @property
    def mean_staleness(self) -> float:
        """Of a trained trajectory."""
        found = self.staleness
        return sum(s * n for s, n in found.items()) / sum(found.values())

    @property
    def wasted_share(self) -> float:
        """Output tokens of discarded trajectories, over all that were made or trained."""
        wasted = sum(run.wasted_tokens for run in self.runs)
        trained = sum(run.all_trained_tokens for run in self.runs)
        return wasted / (wasted + trained)

    @property
    def length_bias(self) -> float:
        """Mean output of a trained trajectory over that of a started one; below 1: too short."""
        biases = [run.mean_trained_tokens / run.mean_started_tokens for run in self.runs]
        return sum(biases) / len(biases)

    @property
    def length_distance(self) -> float:
        """Kolmogorov-Smirnov distance of trained to started lengths, mean of the runs."""
        return fmean(run.length_distance for run in self.runs)

    @property
    def split_s(self) -> dict[str, float]:
        """Seconds of a step by what the trainer did or waited for, mean of the runs."""
        splits = [run.mean_split for run in self.runs]
        return {name: fmean(split[name] for split in splits) for name in splits[0]}

    @property
    def reward_busy(self) -> float | None:
        """Share of the reward service's places in use; None where it is elastic."""
        return _mean_of([run.services.reward_busy for run in self.runs])

    @property
    def environment_busy(self) -> float | None:
        """Share of the environments that may be alive which are; None without a limit."""
        return _mean_of([run.services.environment_busy for run in self.runs])

    @property
    def mean_rewards(self) -> float:
        """Rewards that are computed at once."""
        return fmean(run.services.mean_rewards for run in self.runs)

    @property
    def mean_starts(self) -> float:
        """Environments that start at once."""
        return fmean(run.services.mean_starts for run in self.runs)

    @property
    def bound_step_s(self) -> float:
        """Lower bound of a mean step: that of the loop, in proportion."""
        return self.bound_fraction * self.step_s.mean

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        staleness = self.staleness
        return {
            "regime": self.setup.name,
            "train_gpus": self.setup.train_gpus,
            "tp": self.setup.config.run.cluster.tp,
            "max_running": self.setup.config.run.cluster.max_running,
            "rollout_gpus": self.setup.config.run.cluster.gpus,
            "reward_gpus": self.setup.config.reward_gpus,
            "pool_gpus": self.setup.pool_gpus,
            "trainer": {
                "backend": self.setup.config.train_backend,
                "tp": self.setup.layout.tp,
                "pp": self.setup.layout.pp,
            },
            "update_s": self.setup.update.total_s,
            "pause_s": self.setup.update.pause_s,
            "step_s": self.step_s.plain(),
            "measured_steps": len(self.runs[0].step_s),
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "gpu_hours_per_1k_samples": self.cost_per_1k_samples.gpu_hours,
            "dollars_per_1k_samples": self.cost_per_1k_samples.dollars,
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
                "histogram": {str(versions): number for versions, number in staleness.items()},
            },
            "failed_starts": sum(run.failed_starts for run in self.runs),
            "gpu_switches": sum(run.gpu_switches for run in self.runs),
            "failed_switches": sum(run.failed_switches for run in self.runs),
            "wasted_tokens": sum(run.wasted_tokens for run in self.runs),
            "wasted_share": self.wasted_share,
            "length_bias": self.length_bias,
            "length_distance": self.length_distance,
            "bound_fraction": self.bound_fraction,
        }


def _mean_of(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopComparison:
    """What `heddle loop` reports."""

    tried: tuple[RegimeResult, ...]
    """Every regime at every split of the GPUs and TP degree."""
    objective: Objective = "makespan"

    @property
    def regimes(self) -> tuple[RegimeResult, ...]:
        """Each regime at its best setting by the objective; the first of equals."""
        best: dict[str, RegimeResult] = {}
        for row in self.tried:
            known = best.setdefault(row.setup.name, row)
            if row.value(self.objective) < known.value(self.objective):
                best[row.setup.name] = row
        return tuple(best.values())

    @property
    def ranking(self) -> tuple[RegimeResult, ...]:
        """`regimes` by the objective; equals in their order."""
        return tuple(sorted(self.regimes, key=lambda row: row.value(self.objective)))

    @property
    def splits(self) -> tuple[int, ...]:
        """Numbers of training GPUs that were tried."""
        return tuple(dict.fromkeys(row.setup.train_gpus for row in self.tried))

    @property
    def running(self) -> tuple[int, ...]:
        """Numbers of running steps of an engine that were tried."""
        numbers = (row.setup.config.run.cluster.max_running for row in self.tried)
        return tuple(dict.fromkeys(numbers))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        first = self.tried[0].setup
        config, trace = first.config, first.run.workload.trace
        cluster = config.run.cluster
        return {
            "schema": SCHEMA,
            "trace": {
                "name": trace.name,
                "trajectories": len(first.run.workload.scripts),
                "sha256": trace.sha256,
            },
            "policy": config.run.policy.preset,
            "cluster": {
                "gpus": first.gpus,
                "gpu": first.run.profile.gpu,
                "model": cluster.model,
                **first.run.profile.marks,
                "colocated": config.colocated,
                "max_running": cluster.max_running,
            },
            "batch": {"groups": config.groups, "samples": config.samples},
            "steps": config.batches,
            "prices": first.prices.plain(first.gpus_by_class),
            "objective": self.objective,
            "ranking": [row.setup.name for row in self.ranking],
            "regimes": [row.plain() for row in self.regimes],
            "tried": [
                {
                    "regime": row.setup.name,
                    "train_gpus": row.setup.train_gpus,
                    "tp": row.setup.config.run.cluster.tp,
                    "max_running": row.setup.config.run.cluster.max_running,
                    "step_s": row.step_s.plain(),
                    "gpu_hours_per_1k_samples": row.cost_per_1k_samples.gpu_hours,
                    "dollars_per_1k_samples": row.cost_per_1k_samples.dollars,
                }
                for row in self.tried
            ],
        }


def plans(setup: LoopSetup) -> bool:
    """Whether its policy chooses TP degrees itself."""
    return not isinstance(setup.run.policy.planner, FixedPlan)
