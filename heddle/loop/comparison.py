"""Several regimes on one trace and cluster, several seeds each: one table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from heddle.comparison import Estimate, estimate, useful_processes
from heddle.executor import Executor, InProcess, Processes, Report
from heddle.loop.config import LoopConfig
from heddle.loop.measure import LoopFigures, LoopMeasure
from heddle.loop.setup import LoopSetup, loop_core, prepare_loop
from heddle.runs import open_run
from heddle.setup import Workspace, solo_tpot
from heddle.signals import StopSignals
from heddle.workload import CapacityError
from heddle_core.controller import Controller
from heddle_core.ids import GroupId
from heddle_core.journal import Sink
from heddle_core.loop.commands import AnyCommand
from heddle_core.loop.controller import LoopController
from heddle_core.loop.events import AnyEvent, Trained
from heddle_core.parts.planner.fixed import FixedPlan
from heddle_sim.loop import LoopSimulation
from heddle_sim.training import TrainingError

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
    def dollars_per_1k_samples(self) -> float | None:
        """All GPUs, for as long as a thousand samples take."""
        price = self.setup.price
        if price is None:
            return None
        return price * self.setup.gpus * 1000.0 / self.samples_per_s / 3600.0

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

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        staleness = self.staleness
        return {
            "regime": self.setup.name,
            "train_gpus": self.setup.train_gpus,
            "tp": self.setup.config.run.cluster.tp,
            "rollout_gpus": self.setup.config.run.cluster.gpus,
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
            "dollars_per_1k_samples": self.dollars_per_1k_samples,
            "busy": {"rollout": self.rollout_busy, "train": self.train_busy},
            "staleness": {
                "mean": self.mean_staleness,
                "max": max(staleness),
                "histogram": {str(versions): number for versions, number in staleness.items()},
            },
            "failed_starts": sum(run.failed_starts for run in self.runs),
            "wasted_tokens": sum(run.wasted_tokens for run in self.runs),
            "wasted_share": self.wasted_share,
            "length_bias": self.length_bias,
            "bound_fraction": self.bound_fraction,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopComparison:
    """What `heddle loop` reports."""

    tried: tuple[RegimeResult, ...]
    """Every regime at every split of the GPUs and TP degree."""

    @property
    def regimes(self) -> tuple[RegimeResult, ...]:
        """Each regime at its setting with the shortest step; the first of equals."""
        best: dict[str, RegimeResult] = {}
        for row in self.tried:
            known = best.setdefault(row.setup.name, row)
            if row.step_s.mean < known.step_s.mean:
                best[row.setup.name] = row
        return tuple(best.values())

    @property
    def splits(self) -> tuple[int, ...]:
        """Numbers of training GPUs that were tried."""
        return tuple(dict.fromkeys(row.setup.train_gpus for row in self.tried))

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
                "gpu": cluster.gpu,
                "model": cluster.model,
                "colocated": config.colocated,
                "max_running": cluster.max_running,
            },
            "batch": {"groups": config.groups, "samples": config.samples},
            "steps": config.steps,
            "regimes": [row.plain() for row in self.regimes],
            "tried": [
                {
                    "regime": row.setup.name,
                    "train_gpus": row.setup.train_gpus,
                    "tp": row.setup.config.run.cluster.tp,
                    "step_s": row.step_s.plain(),
                }
                for row in self.tried
            ],
        }


@dataclass(frozen=True, slots=True)
class _Job:
    """One run of a comparison."""

    config: LoopConfig
    name: str
    """Of the regime."""


@dataclass(frozen=True, slots=True)
class _Done:
    figures: LoopFigures
    busy: float
    bound_s: float


def compare_regimes(
    configs: Sequence[LoopConfig],
    *,
    fitting_only: bool = False,
    jobs: int | None = 1,
    out: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoopComparison:
    """Run each regime of each configuration; these differ in the split of the GPUs, and in TP.

    Seeds are `config.run.seed` and on. With `fitting_only`, configurations are left out whose
    trainer does not fit into memory, or whose engines do not hold the contexts, unless none fits. A
    policy that plans its engines runs once for each split. `jobs` is the number of processes, which
    changes no result; None: as many as are useful. With `out`, each run gets a run directory there.
    `on_progress` gets the number of batches trained and of all.

    Raises:
        ValueError: one of the packages' errors for bad input, before the first run.
        WorkerError: a process of `jobs` was killed.
        KeyboardInterrupt: a signal ended the comparison.
    """
    shared = Workspace()
    setups = _prepared(configs, shared, fitting_only)
    todo = [
        _Job(replace(s.asked, run=replace(s.asked.run, seed=s.asked.run.seed + i)), s.name)
        for s in setups
        for i in range(s.config.seeds)
    ]
    total = sum(job.config.steps for job in todo)
    processes = useful_processes(len(todo), _steps(setups)) if jobs is None else jobs
    executor: Executor[Workspace] = (
        InProcess(shared) if processes == 1 else Processes(processes, shared)
    )
    watch = None if on_progress is None else lambda done: on_progress(sum(done), total)
    with StopSignals():
        done = dict(executor.map(partial(_run_job, out=out), todo, watch))
    rows, begin = [], 0
    for setup in setups:
        end = begin + setup.config.seeds
        rows.append(_row(setup, [done[index] for index in range(begin, end)]))
        begin = end
    return LoopComparison(tried=tuple(rows))


def _steps(setups: Sequence[LoopSetup]) -> int:
    """About how many steps of trajectories all runs have."""
    scripts = setups[0].run.workload.scripts
    each = sum(len(script.steps) for script in scripts) / len(scripts)
    batches = sum(s.config.steps * s.config.seeds for s in setups)
    return int(each * batches * setups[0].regime.groups * setups[0].regime.samples)


def _prepared(
    configs: Sequence[LoopConfig], workspace: Workspace, fitting_only: bool
) -> list[LoopSetup]:
    """The loops to run, with the first seed."""
    setups: list[LoopSetup] = []
    failed: dict[str, ValueError] = {}
    for config in configs:
        for name in config.regimes:
            try:
                setups.append(prepare_loop(config, name, workspace=workspace))
            except (TrainingError, CapacityError) as error:
                if not fitting_only:
                    raise
                failed[name] = error
    for name, failure in failed.items():
        if all(setup.name != name for setup in setups):
            raise failure
    planned = {(s.name, s.train_gpus): s for s in reversed(setups) if plans(s)}
    return [s for s in setups if not plans(s) or planned[s.name, s.train_gpus] is s]


def _run_job(
    shared: Workspace, job: _Job, report: Report | None, *, out: Path | None = None
) -> _Done:
    """One run, as a job of an executor."""
    setup = prepare_loop(job.config, job.name, workspace=shared)
    batches = 0

    def trained() -> None:
        nonlocal batches
        batches += 1
        if report is not None:
            report(batches)

    figures, busy, samples = (
        run_loop(setup, trained) if out is None else run_loop_into(out, setup, trained)
    )
    return _Done(figures, busy, setup.bound_s(samples, figures.training_s))


def _row(setup: LoopSetup, done: Sequence[_Done]) -> RegimeResult:
    return RegimeResult(
        setup=setup,
        runs=tuple(each.figures for each in done),
        busy=tuple(each.busy for each in done),
        bounds_s=tuple(each.bound_s for each in done),
        step_s=estimate([each.figures.mean_step_s for each in done]),
    )


def plans(setup: LoopSetup) -> bool:
    """Whether its policy chooses TP degrees itself."""
    return not isinstance(setup.run.policy.planner, FixedPlan)


def run_loop(
    setup: LoopSetup, on_trained: Callable[[], None], sink: Sink | None = None
) -> tuple[LoopFigures, float, list[tuple[GroupId, int]]]:
    """Run one loop; return its figures, the busy share of its engines, and the trained samples.

    Every event goes to `sink` with its commands.

    Raises:
        StuckError: nothing is left to happen before the loop is over.
        TooManyFailuresError: nearly every start or reward fails.
    """
    core = loop_core(setup, Controller(setup.run.policy))
    measured = _Measured(core, setup.data.output_tokens, on_trained, sink)
    measure = measured.measure
    simulation = LoopSimulation(measured, setup.run.simulation, setup.world, on_lost=measure.lost)
    simulation.run()
    gpu_s = simulation.launcher.busy_gpu_s
    may_generate = setup.config.run.cluster.gpus + setup.hybrid_gpus
    share = gpu_s / (may_generate * simulation.clock.now_s)
    return measure.figures(first=setup.first_measured), share, measure.trained


def run_loop_into(
    out: Path, setup: LoopSetup, on_trained: Callable[[], None]
) -> tuple[LoopFigures, float, list[tuple[GroupId, int]]]:
    """The same, into a new run directory in `out`.

    Raises:
        RunError, OSError: the directory cannot be made or written.
    """
    beside = {
        field.name: getattr(setup.config, field.name)
        for field in fields(setup.config)
        if field.name not in ("run", "regimes")
    }
    facts = replace(setup.run.facts("heddle_sim"), loop={"regime": setup.name, "config": beside})
    with open_run(out, setup.run.config, facts) as directory:
        found = run_loop(setup, on_trained, directory.record)
        figures = found[0]
        directory.finish(
            solo_tpot=solo_tpot(setup.run.profile, setup.config.run.cluster),
            notes={
                **setup.run.workload.notes,
                "trained_batches": figures.steps,
                "rl_step_s": figures.mean_step_s,
                "samples_per_s": figures.samples_per_s,
                "staleness_mean": figures.mean_staleness,
                "wasted_tokens": figures.wasted_tokens,
            },
        )
    return found


class _Measured:
    """A loop's core that counts what passes."""

    def __init__(
        self,
        core: LoopController,
        output_tokens: Callable[[GroupId, int], int],
        on_trained: Callable[[], None],
        sink: Sink | None,
    ) -> None:
        self._core, self._on_trained, self._sink = core, on_trained, sink
        self.measure = LoopMeasure(output_tokens)

    @property
    def deadline_s(self) -> float | None:
        return self._core.deadline_s

    @property
    def over(self) -> bool:
        return self._core.over

    def handle(self, event: AnyEvent) -> Sequence[AnyCommand]:
        commands = self._core.handle(event)
        self.measure.take(event, commands, self._core.version)
        if self._sink is not None:
            self._sink(cast(Any, event), cast(Any, commands))
        if isinstance(event, Trained):
            self._on_trained()
        return commands
