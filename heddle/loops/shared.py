"""Several loops on the same GPUs, which change hands between their phases.

An on-policy loop leaves its trainer idle while it generates, and its engines while it trains. A
second loop can have them then (RollMux, arXiv 2512.11306). Each loop is simulated alone; since its
phases do not overlap, they take as long beside another, and only wait for GPUs. Loops wait in the
order in which they ask. Weights and states stay in the memory of the hosts.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import fmean
from typing import Any, Final

import simpy

from heddle.comparison.estimates import Estimate, estimate
from heddle.config_error import ConfigError, require
from heddle.loops.compared import compare_settings
from heddle.loops.config import LoopConfig
from heddle.loops.result import LoopComparison, RegimeResult
from heddle.loops.settings import LoopSettings
from heddle.loops.setup import regime_of
from heddle.runs.loop_batches import BatchFigures
from heddle.setup import Workspace
from heddle.tabled import Tabled

SCHEMA: Final = "heddle.shared-loops/1"
ROUNDS: Final = 4
"""Times that the measured batches of the slowest loop come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """Loops on the same GPUs under one seed."""

    step_s: tuple[float, ...]
    """Mean step of each loop, in seconds."""
    rollout_busy: float
    """Share of the time in which a loop generates or loads weights."""
    train_busy: float
    """Share of the time in which a loop trains."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SharedLoops(Tabled):
    """What loops reach on GPUs of their own, and on the same GPUs."""

    alone: Mapping[str, LoopComparison]
    """Each loop by the name of its file."""
    runs: tuple[SharedRun, ...]
    """By seed."""

    @property
    def best(self) -> tuple[RegimeResult, ...]:
        return tuple(result.best for result in self.alone.values())

    @property
    def shared_s(self) -> tuple[Estimate, ...]:
        """Step of each loop on the same GPUs."""
        return tuple(map(estimate, zip(*(run.step_s for run in self.runs), strict=True)))

    @property
    def gain(self) -> Estimate:
        """GPU time of the same batches with GPUs for each loop, over that with the same GPUs."""
        # A loop whose runs take long has fewer.
        alone = [[run.mean_step_s for run in row.runs[: len(self.runs)]] for row in self.best]
        return estimate(
            [
                sum(own / shared for own, shared in zip(owns, run.step_s, strict=True))
                for owns, run in zip(zip(*alone, strict=True), self.runs, strict=True)
            ]
        )

    @property
    def warnings(self) -> list[str]:
        return [f"{name}: {w}" for name, each in self.alone.items() for w in each.warnings]

    @property
    def verdict(self) -> str:
        """What the same GPUs save, in a sentence."""
        gain, gpus = self.gain, self.best[0].setup.gpus
        slower = (
            f"{shared.mean / row.step_s.mean:.2f} times as long in {name}"
            for (name, row), shared in zip(
                zip(self.alone, self.best, strict=True), self.shared_s, strict=True
            )
        )
        count = len(self.alone)
        if gain.mean <= 1.0:
            return (
                f"Run one loop after the other: sharing {gpus} GPUs saves nothing; a step takes "
                f"{', '.join(slower)}."
            )
        return (
            f"Share the {gpus} GPUs: for the same batches {count} loops need {gain.mean:.2f} times "
            f"as many GPU-hours on {count} x {gpus} GPUs of their own; a step takes "
            f"{', '.join(slower)}."
        )

    @property
    def busy(self) -> dict[str, float]:
        """Share of the time in which GPUs are in use, mean of the seeds."""
        return {
            "rollout": fmean(run.rollout_busy for run in self.runs),
            "train": fmean(run.train_busy for run in self.runs),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Each loop as JSON."""
        gain = self.gain.mean
        return [
            {
                "config": name,
                "regime": row.setup.name,
                "model": row.setup.config.run.cluster.model,
                "policy": row.setup.config.run.policy.preset,
                "alone_step_s": row.step_s.plain(),
                "shared_step_s": shared.plain(),
                "alone_gpu_hours_per_1k_samples": row.cost_per_1k_samples.gpu_hours,
                "shared_gpu_hours_per_1k_samples": row.cost_per_1k_samples.gpu_hours / gain,
                "split_s": row.split_s,
            }
            for (name, row), shared in zip(
                zip(self.alone, self.best, strict=True), self.shared_s, strict=True
            )
        ]

    def plain(self) -> dict[str, Any]:
        notes = {name: list(each.notes) for name, each in self.alone.items() if each.notes}
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "gpus": self.best[0].setup.gpus,
            "gain": self.gain.plain(),
            "busy": self.busy,
            **({"notes": notes} if notes else {}),
            **({"warnings": self.warnings} if self.warnings else {}),
            "loops": self.rows(),
        }


def share_gpus(loops: Mapping[str, LoopConfig], *, jobs: int | None = 1) -> SharedLoops:
    """Simulate loops alone and on the same GPUs, each under its best regime that can take part.

    `loops` are by the names of their files; `run.cluster.gpus` are all GPUs. `jobs` as of
    `heddle.loops.comparison.compare_regimes`.

    Raises:
        ConfigError: fewer than two loops, loops on other GPUs, or no regime that can take part.
        ValueError: any other of the packages' errors for bad input.
    """
    require(
        len(loops) > 1,
        "loop.shared_gpus: give a TOML file for each of two loops or more, none twice, such as "
        "-c a.toml -c b.toml",
    )
    shared = Workspace()
    alone = {name: _alone(name, config, jobs, shared) for name, config in loops.items()}
    _check_gpus(alone)
    seeds = min(len(result.best.runs) for result in alone.values())
    runs = []
    for seed in range(seeds):
        figures = (result.best.runs[seed] for result in alone.values())
        measured = [each.batches[each.first_measured :] for each in figures]
        runs.append(_together(measured, [each.best.setup.config for each in alone.values()]))
    return SharedLoops(alone=alone, runs=tuple(runs))


def _alone(name: str, config: LoopConfig, jobs: int | None, shared: Workspace) -> LoopComparison:
    require(
        not config.colocated,
        f"{name}: loop.colocated already has rollout and training in turn on all GPUs, so none "
        "are idle; leave it or loop.shared_gpus out",
    )
    able = [regime for regime in config.regimes if regime_of(config, regime).alternates]
    if not able:
        raise ConfigError(
            f"{name}: {', '.join(config.regimes)}: rollout and training overlap, so their GPUs are "
            "not idle in turn; take an on-policy regime, such as --regimes sync"
        )
    return compare_settings(replace(config, regimes=tuple(able)), {}, jobs=jobs, workspace=shared)


def _check_gpus(alone: Mapping[str, LoopComparison]) -> None:
    """All loops have as many GPUs of the same types on both sides."""
    found = {}
    for name, result in alone.items():
        setup = result.best.setup
        pools = " + ".join(f"{n} {gpu}" for gpu, n in setup.run.profiles.pools.items())
        found[name] = f"{pools} for rollout, {setup.train_gpus} {setup.config.trainer_gpu} to train"
    if len(set(found.values())) > 1:
        each = "; ".join(f"{name}: {gpus}" for name, gpus in found.items())
        raise ConfigError(
            f"loops on shared GPUs have the same ones, and these differ ({each}): set --gpus, "
            "--gpu and loop.train_gpus alike"
        )


def _together(
    measured: Sequence[Sequence[BatchFigures]], settings: Sequence[LoopSettings]
) -> SharedRun:
    """The batches of each loop, again and again, on common engines and trainer."""
    environment = simpy.Environment()
    engines, trainer = _Place(environment), _Place(environment)
    ends_s: list[list[float]] = [[] for _ in measured]
    over = environment.event()
    wanted = (1 + ROUNDS) * max(map(len, measured)) + 1

    def loop(number: int, config: LoopSettings) -> Generator[simpy.Event, Any, None]:
        request, switch = None, config.switch_times()
        for batch in cycle(measured[number]):
            own = engines.request()
            yield own
            yield environment.timeout(engines.taken_by(number, switch["lend_s"]) + batch.update_s)
            if request is not None:
                trainer.release(request)
            yield environment.timeout(batch.rollout_s)
            engines.release(own)
            engines.used_s += batch.update_s + batch.rollout_s
            yield environment.timeout(batch.reward_s)
            request = trainer.request()
            yield request
            yield environment.timeout(trainer.taken_by(number, switch["return_s"]))
            yield environment.timeout(batch.training_s)
            trainer.used_s += batch.training_s
            ends_s[number].append(environment.now)
            if min(map(len, ends_s)) == wanted and not over.triggered:
                over.succeed()

    for number, config in enumerate(settings):
        environment.process(loop(number, config))
    environment.run(over)
    # The first time through its batches a loop does not yet wait as it will.
    later = [ends[len(each) :] for ends, each in zip(ends_s, measured, strict=True)]
    return SharedRun(
        step_s=tuple((ends[-1] - ends[0]) / (len(ends) - 1) for ends in later),
        rollout_busy=engines.used_s / environment.now,
        train_busy=trainer.used_s / environment.now,
    )


class _Place(simpy.Resource):
    """GPUs that one loop has at a time."""

    def __init__(self, environment: simpy.Environment) -> None:
        super().__init__(environment)
        self._last: int | None = None
        self.used_s = 0.0
        """In the phases that have ended."""

    def taken_by(self, number: int, seconds: float) -> float:
        """A loop has got them; return how long that takes: 0 where it had them last."""
        before, self._last = self._last, number
        return 0.0 if before in (None, number) else seconds
