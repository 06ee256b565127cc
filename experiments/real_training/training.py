"""One training loop on real engines: set-up, driver, trainer, run directory, prediction."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from experiments.real_training.echo import EchoAgent
from experiments.real_training.messages import TrainMetrics
from experiments.real_training.prediction import Prediction, predict
from experiments.real_training.run import OwnRewards, TaskEnvironments, TrainingRun, WeightPush
from experiments.real_training.setup import TrainSetup, prompt_of, world_facts
from experiments.real_training.trainer import ProcessTrainer
from heddle.engine_stack import ProcessSolver
from heddle.engines import facts_of, open_vllm
from heddle.running import RunSink
from heddle.runs import RunDirectory, load_run, open_run
from heddle.runs.loop_batches import BatchFigures, loop_columns
from heddle.runs.loop_record import updates
from heddle.signals import StopSignals
from heddle_core.commands import Command
from heddle_core.events import Event, Trained
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.loop.controller import LoopController, TooManyFailuresError
from heddle_rollout.driver import StuckError
from heddle_rollout.loop_driver import LoopServices
from heddle_rollout.services import CoreEstimates
from heddle_runtime.clock import Lateness, RunClock
from heddle_runtime.vllm.launcher import VllmLauncher

TRAINER = "trainer"
"""Folder of checkpoints and of the trainer's log in a run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBatch:
    """A batch, and what the trainer reports of it."""

    figures: BatchFigures
    metrics: TrainMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a training loop reports."""

    setup: TrainSetup
    path: Path
    """Of the run directory."""
    batches: tuple[TrainedBatch, ...]
    update_s: tuple[float, ...]
    """Of every update of an engine."""
    restarts: int
    """Trainer processes that died and were replaced."""
    prediction: Prediction | None
    """None: too little to fit on and to compare."""


class _RecordedLoop:
    """A loop's core that writes the journal and counts what was trained."""

    def __init__(
        self,
        core: LoopController,
        directory: RunDirectory,
        on_batch: Callable[[TrainedBatch], None],
    ) -> None:
        self._core, self._directory, self._on_batch = core, directory, on_batch
        self.sink = RunSink(directory)
        self.metrics: dict[int, TrainMetrics] = {}
        """What the trainer reports of a batch, before its `Trained`."""
        self.batches: list[TrainedBatch] = []

    @property
    def deadline_s(self) -> float | None:
        return self._core.deadline_s

    @property
    def over(self) -> bool:
        return self._core.over

    def handle(self, event: Event) -> Sequence[Command]:
        commands = self._core.handle(event)
        self.sink(event, commands)
        if isinstance(event, Trained):
            figures = loop_columns(self._directory.columns()).batches[-1]
            batch = TrainedBatch(figures=figures, metrics=self.metrics.pop(event.batch))
            self.batches.append(batch)
            self._on_batch(batch)
        return commands


def train(
    setup: TrainSetup,
    *,
    out: Path,
    on_batch: Callable[[TrainedBatch], None] = lambda batch: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> TrainResult:
    """Train under a regime on vLLM engines; return what was measured, and what was predicted.

    Ctrl-C, SIGTERM or SIGHUP ends the run: engines and trainer end, and the run directory is closed
    as interrupted, with the checkpoint of the last batch.

    Raises:
        ValueError: one of the packages' errors for bad input, before anything is started.
        TrainerFailedError, StuckError: trainer or engines cannot go on.
        KeyboardInterrupt: a signal ended the run.
    """
    world = world_facts(setup)
    for note in world["notes"]:
        on_note(note)
    facts = replace(setup.run.facts("heddle_runtime", world), loop=setup.facts)
    with StopSignals() as signals, open_run(out, setup.run.config, facts) as directory:
        core = _RecordedLoop(setup.core(setup.run.controller()), directory, on_batch)
        with signals.deferred():
            restarts, lateness = asyncio.run(_train(setup, core, directory.path, signals))
        update_s = updates(directory.columns())
        directory.finish(
            notes={
                "trained_batches": len(core.batches),
                "trainer_restarts": restarts,
                "first_reward": core.batches[0].metrics.reward,
                "last_reward": core.batches[-1].metrics.reward,
            },
            lateness=lateness,
        )
        path = directory.path
    return TrainResult(
        setup=setup,
        path=path,
        batches=tuple(core.batches),
        update_s=tuple((update_s["ended_s"] - update_s["began_s"])[update_s["updated"]].tolist()),
        restarts=restarts,
        prediction=_predicted(setup, path, on_note),
    )


def _predicted(setup: TrainSetup, path: Path, on_note: Callable[[str], None]) -> Prediction | None:
    """Predict a finished run; a simulation that cannot go on does not take its result away."""
    try:
        return predict(setup, load_run(path).entries())
    except (StuckError, TooManyFailuresError) as error:
        on_note(f"the loop could not be simulated: {error}")
        return None


async def _train(
    setup: TrainSetup,
    core: _RecordedLoop,
    path: Path,
    signals: StopSignals,
) -> tuple[int, Lateness]:
    """Run the loop; return how often the trainer was started again, and how late the clock was."""
    config, cluster = setup.config, setup.config.run.cluster
    loop = asyncio.get_running_loop()
    clock = RunClock(loop)
    solver = ProcessSolver()
    launcher = open_vllm(config.run, path / "engines", setup.engines)
    core.sink.facts = partial(facts_of, launcher)
    trainer = ProcessTrainer(
        config.trainer,
        path / TRAINER,
        on_batch=core.metrics.__setitem__,
        on_error=lambda error: run.fail(error),
    )

    def agent(trajectory: TrajectoryId, group: GroupId) -> EchoAgent:
        return EchoAgent(trajectory, group, config.task, prompt_of(config.task, group), clock)

    run = TrainingRun(
        core,
        launcher,
        clock,
        LoopServices(
            environments=TaskEnvironments(clock, agent),
            rewards=OwnRewards(clock),
            trainer=trainer,
            parts=trainer,
            updates=WeightPush(trainer.weights_to_push),
        ),
        predictions=CoreEstimates(clock, cluster.prediction_s),
        solver=solver,
        tool_capacity=cluster.tool_capacity,
        report_interval_s=cluster.report_interval_s,
    )

    async def whole() -> None:
        await trainer.start()
        await run.run()

    for time_s, name in cluster.faults():
        clock.call_at(time_s, launcher.fail, EngineId(name))
    running = loop.create_task(whole())
    try:
        with (
            signals.on_signal(lambda count: loop.call_soon_threadsafe(running.cancel)),
            suppress(asyncio.CancelledError),
        ):
            await running
    finally:
        await _close(solver, trainer, launcher)
    return trainer.restarts, clock.lateness


async def _close(solver: ProcessSolver, trainer: ProcessTrainer, launcher: VllmLauncher) -> None:
    solver.close()
    try:
        await trainer.close()
    finally:
        await launcher.close()
