"""Several regimes on one trace and cluster, several seeds each: one table."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

from heddle.comparison.estimates import LONG_S, SEEDS, estimate
from heddle.config_files import ConfigError
from heddle.cost.objective import Objective, check_objective, ranked
from heddle.executor import Report
from heddle.executor_choice import ExecutorKind, run_all
from heddle.loops.config import LoopConfig
from heddle.loops.data import UnfitError
from heddle.loops.measure import LoopFigures, TrainedSample, loop_figures
from heddle.loops.result import LoopComparison, RegimeResult, plans
from heddle.loops.setup import LoopSetup, loop_core, prepare_loop
from heddle.runs import files, open_run
from heddle.runs.journal_buffer import JournalInMemory
from heddle.runs.journal_columns import Journal
from heddle.runs.loop_batches import OF_BATCHES
from heddle.runs.tables import MEASURED
from heddle.setup import Workspace
from heddle.workload import CapacityError
from heddle_core.commands import Command
from heddle_core.events import Event, Trained
from heddle_core.ids import TrajectoryId
from heddle_core.journal import Sink
from heddle_core.loop.controller import LoopController
from heddle_core.loop.regime import SharedGpusError
from heddle_rollout.core import RecordedCore
from heddle_sim.loop import LoopSimulation
from heddle_sim.training import TrainingError


class NoRegimeError(ConfigError):
    """No regime can take part, each for its reason."""

    def __init__(self, failed: Iterable[ValueError]) -> None:
        self.failed = list(failed)
        super().__init__("; ".join(dict.fromkeys(map(str, self.failed))))


RunResult: TypeAlias = tuple[LoopFigures, float, float, float]
"""Of one run: figures, busy share of its engines, bound, and seconds of its simulation."""


def compare_regimes(
    configs: Sequence[LoopConfig],
    *,
    fitting_only: bool = False,
    objective: Objective = "makespan",
    jobs: int | None = 1,
    executor: ExecutorKind = "processes",
    out: Path | None = None,
    workspace: Workspace | None = None,
    notes: Sequence[str] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> LoopComparison:
    """Run each regime of each configuration; these differ in the split of the GPUs, and in TP.

    Seeds are `config.run.seed` and on; where their number is None, every setting runs under the
    first, and the two best of each regime under `SEEDS`, unless a run takes over `LONG_S`. A regime
    that cannot take part is left out, with its reason, unless none can. With `fitting_only`,
    configurations are left out whose trainer does not fit into memory, or whose engines do not hold
    the contexts, unless none fits. `notes` go into the result. A policy that plans its engines runs
    once for each split and number of running steps. `objective` says which setting of a regime is
    its best, and how regimes rank. `jobs` is the number of processes, which changes no result;
    None: as many as are useful. With `executor` ``ray``, runs are tasks of a Ray cluster. With
    `out`, each run gets a run directory there. `on_progress` gets the number of batches trained and
    of all.

    Raises:
        ValueError: one of the packages' errors for bad input, before the first run.
        WorkerError: a process of `jobs` was killed.
        KeyboardInterrupt: a signal ended the comparison.
    """
    shared = Workspace() if workspace is None else workspace
    setups, left_out = prepare_regimes(configs, shared, fitting_only)
    for setup in setups:
        check_objective(objective, setup.prices, setup.gpus_by_class)
    run = partial(
        _runs,
        partial(run_all, executor, shared, partial(_run_job, out=out), jobs=jobs, out=out),
        on_progress=on_progress,
    )
    given = setups[0].config.seeds
    made = run(setups, range(given or 1))
    long_runs = given is None and max(each[3] for runs in made for each in runs) > LONG_S
    if given is None and not long_runs:
        first = [_row(*each) for each in zip(setups, made, strict=True)]
        finalists = _best_two(first, objective)
        more = iter(run([setups[at] for at in finalists], range(1, SEEDS)))
        for at in finalists:
            made[at] += next(more)
    return LoopComparison(
        tried=tuple(_row(*each) for each in zip(setups, made, strict=True)),
        objective=objective,
        left_out=left_out,
        notes=(*notes, *([f"one seed: a run takes over {LONG_S:.0f} s"] if long_runs else [])),
    )


def _runs(
    run_jobs: Callable[..., Iterable[RunResult]],
    setups: Sequence[LoopSetup],
    seeds: Sequence[int],
    *,
    on_progress: Callable[[int, int], None] | None,
) -> list[list[RunResult]]:
    """The runs of each setup under seeds, counted from that of its configuration."""
    todo = [
        replace(s.requested, regimes=(s.name,), run=replace(run, seed=run.seed + i))
        for s in setups
        for run in [s.requested.run]
        for i in seeds
    ]
    total = sum(config.batches for config in todo)
    watch = None if on_progress is None else lambda done: on_progress(sum(done), total)
    done = iter(run_jobs(todo, steps=_steps(setups, total), watch=watch))
    return [[*islice(done, len(seeds))] for _ in setups]


def _best_two(rows: Sequence[RegimeResult], objective: Objective) -> list[int]:
    """Places of the two best settings of each regime, as the rows come."""
    of: dict[str, list[RegimeResult]] = {}
    for row in ranked(rows, objective):
        of.setdefault(row.setup.label, []).append(row)
    best = {id(row) for each in of.values() for row in each[:2]}
    return [at for at, row in enumerate(rows) if id(row) in best]


def _row(setup: LoopSetup, runs: Sequence[RunResult]) -> RegimeResult:
    figures, busy, bounds_s, _ = zip(*runs, strict=True)
    step_s = estimate([each.mean_step_s for each in figures])
    return RegimeResult(setup=setup, runs=figures, busy=busy, bounds_s=bounds_s, step_s=step_s)


def _steps(setups: Sequence[LoopSetup], batches: int) -> int:
    """About how many steps of trajectories so many batches have."""
    scripts = setups[0].run.workload.scripts
    each = sum(len(script.steps) for script in scripts) / len(scripts)
    return int(each * batches * setups[0].regime.groups * setups[0].regime.samples)


def prepare_regimes(
    configs: Sequence[LoopConfig], workspace: Workspace, fitting_only: bool
) -> tuple[list[LoopSetup], dict[str, str]]:
    """The loops to run, with the first seed, and why other regimes are left out."""
    setups: list[LoopSetup] = []
    failed: dict[str, ValueError] = {}
    for config in configs:
        for name in config.regimes:
            try:
                setups.append(prepare_loop(config, name, workspace=workspace))
            except (TrainingError, CapacityError, UnfitError, SharedGpusError) as error:
                failed[name] = error
    first = configs[0]
    if first.switch_failure_rate and setups and all(s.regime.split.hybrid is None for s in setups):
        raise ConfigError(
            "loop.switch_failure_rate is of GPUs that generate and train by turns, which "
            f"{', '.join(first.regimes)} has none of: leave it out, or add libra or "
            "verl-separate-async"
        )
    names = {setup.name for setup in setups}
    if not names and len(failed) > 1:
        raise NoRegimeError(failed.values())
    for name, failure in failed.items():
        if not names or (name in names and not fitting_only):
            raise failure
    planned = {_split(s): s for s in reversed(setups) if plans(s)}
    left_out = {name: str(error) for name, error in failed.items() if name not in names}
    return [s for s in setups if not plans(s) or planned[_split(s)] is s], left_out


def _split(setup: LoopSetup) -> tuple[str, int, int, str]:
    """What a policy that plans its engines runs once for."""
    cluster = setup.config.run.cluster
    return setup.label, setup.train_gpus, cluster.max_running, cluster.speculation


def _run_job(
    shared: Workspace, config: LoopConfig, report: Report | None, *, out: Path | None
) -> RunResult:
    """One run, as a job of an executor."""
    began_s = perf_counter()
    setup = prepare_loop(config, *config.regimes, workspace=shared)
    batches = count(1)

    def trained(_: Trained) -> None:
        if report is not None:
            report(next(batches))

    figures, busy, samples = (
        run_loop(setup, trained) if out is None else run_loop_into(out, setup, trained)
    )
    return figures, busy, setup.bound_s(samples, figures), perf_counter() - began_s


def run_loop(
    setup: LoopSetup, on_trained: Callable[[Trained], None]
) -> tuple[LoopFigures, float, list[TrainedSample]]:
    """Run one loop; return its figures, the busy share of its engines, and the trained samples.

    Raises:
        StuckError: nothing is left to happen before the loop is over.
        TooManyFailuresError: nearly every start or reward fails.
    """
    recorded = JournalInMemory(OF_BATCHES)
    return _run(setup, on_trained, recorded.record, recorded.journal)


def loop_journal(setup: LoopSetup) -> Journal:
    """Run one loop; return what figures and measured steps are made from. Raises as `run_loop`."""
    recorded = JournalInMemory((*MEASURED, *OF_BATCHES, "LoopStarted", "Score"))
    _run(setup, lambda _: None, recorded.record, recorded.journal)
    return recorded.journal()


def _run(
    setup: LoopSetup,
    on_trained: Callable[[Trained], None],
    sink: Sink,
    journal: Callable[[], Journal],
) -> tuple[LoopFigures, float, list[TrainedSample]]:
    """The same with a sink, and what gives the columns that it has kept."""

    def note(event: Event, commands: Sequence[Command]) -> None:
        sink(event, commands)
        if isinstance(event, Trained):
            on_trained(event)

    core = _Recorded(loop_core(setup, setup.run.controller()), note)
    simulation = LoopSimulation(core, setup.run.simulation, setup.world, on_tokens_lost=core.lose)
    simulation.run()
    gpu_s = simulation.launcher.busy_gpu_s
    may_generate = setup.config.run.cluster.gpus + setup.hybrid_gpus
    share = gpu_s / (may_generate * simulation.clock.now_s)
    hybrid = setup.regime.split.hybrid
    figures, trained = loop_figures(
        journal(),
        setup.data,
        partial(setup.services, simulation),
        first=setup.first_measured,
        trainer_lends=hybrid is not None and not hybrid.own_gpus,
        trainer_waits=setup.regime.update.waits,
        lost=core.lost,
        masks=setup.regime.batching.overlong == "mask",
    )
    return figures, share, trained


def run_loop_into(
    out: Path, setup: LoopSetup, on_trained: Callable[[Trained], None]
) -> tuple[LoopFigures, float, list[TrainedSample]]:
    """The same, into a new run directory in `out`.

    Raises:
        RunError, OSError: the directory cannot be made or written.
    """
    beside = {
        field.name: getattr(setup.config, field.name)
        for field in fields(setup.config)
        if field.name not in ("run", "regimes", "begun")
    }
    facts = replace(setup.run.facts("heddle_sim"), loop={"regime": setup.name, "config": beside})
    config = setup.prices.kept(setup.requested.run, setup.gpus_by_class)
    with open_run(out, config, facts) as directory:
        found = _run(setup, on_trained, directory.record, directory.columns)
        figures = found[0]
        steps = [asdict(batch) for batch in figures.batches]
        files.write_json(directory.path / files.RL_STEPS, {"steps": steps})
        directory.finish(
            solo_tpot=setup.run.profiles.solo_tpot(),
            notes={
                **setup.run.workload.notes,
                **setup.cost(figures.duration_s).plain(),
                "trained_batches": figures.steps,
                "rl_step_s": figures.mean_step_s,
                "samples_per_s": figures.samples_per_s,
                "staleness_mean": figures.mean_staleness,
                "wasted_tokens": figures.wasted_tokens,
            },
        )
    return found


class _Recorded(RecordedCore):
    """A loop's core whose events go to a sink."""

    def __init__(self, core: LoopController, sink: Sink) -> None:
        super().__init__(core, sink)
        self._loop = core
        self.lost: Counter[int] = Counter()
        """Tokens of steps whose trajectory was cancelled, by the batches trained before."""

    @property
    def over(self) -> bool:
        return self._loop.over

    def lose(self, trajectory: TrajectoryId, tokens: int) -> None:
        self.lost[self._loop.trained] += tokens
