"""Predicts the later steps of a training run, with rates that are fitted on its earlier ones.

The simulator runs the whole loop again: the same regime and policy, the same trajectories with the
lengths and tool times that they had, and rates of engines and trainer fitted on the first half of
the steps. The second half is compared. So what is predicted is time, not lengths.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from experiments.real_training.observed import ObservedDispatch, ObservedRun
from experiments.real_training.setup import TrainSetup
from heddle.setup import make_policy
from heddle_core.commands import Command
from heddle_core.controller import Controller
from heddle_core.defaults import SPARE_SLOTS
from heddle_core.events import Event, Trained
from heddle_core.ids import EngineId, GroupId
from heddle_core.journal import Entry
from heddle_rollout.driver import StuckError
from heddle_sim.config import SimulationConfig
from heddle_sim.latency import LatencyTable
from heddle_sim.loop import LoopSimulation, LoopWorld
from heddle_trace.schema import TrajectoryScript

Times: TypeAlias = NDArray[np.float64]

LEAST_STEPS = 4
"""Fewer leave nothing to fit on or to compare."""
MIN_TOKENS = 4
"""Of a generation that counts for the time of an iteration."""
SAME_ITERATION_S = 0.5e-3
"""Steps whose prefills begin within this time are in one iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Fitted on the first half of a run; every time in seconds."""

    iteration_s: tuple[float, float]
    """Of one that decodes: fixed, and for each running step."""
    prefill_s: tuple[float, float]
    """Added to an iteration that prefills: fixed, and for each step in prefill."""
    dispatch_s: float
    """From a dispatch until the engine begins with it, beside the iteration under way."""
    training_s: tuple[float, float]
    """Of a batch: fixed, and for each token."""
    part_s: tuple[float, float]
    """Of another part of a batch, likewise; zeros without any."""
    update_s: float
    """Of a weight update; engines generate nothing meanwhile."""
    start_s: float | None
    """Of an engine that is started again; None: there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Step times of a run, and what the simulator says."""

    fitted_steps: int
    """The first ones, on which the rates are fitted."""
    measured_s: tuple[float, ...]
    predicted_s: tuple[float, ...]
    rates: Rates

    @property
    def error_pct(self) -> float:
        """Of the mean step that was not fitted on."""
        first = self.fitted_steps
        return (fmean(self.predicted_s[first:]) / fmean(self.measured_s[first:]) - 1.0) * 100.0

    @property
    def step_error_pct(self) -> float:
        """Of one such step, without sign: the median, which a disturbed machine moves least."""
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        return median(abs(p / m - 1.0) * 100.0 for p, m in list(pairs)[self.fitted_steps :])


def predict(setup: TrainSetup, entries: Iterable[Entry]) -> Prediction | None:
    """Fit a run's rates and simulate it; None: it has too little to fit on.

    That is fewer than `LEAST_STEPS` steps, or no generation of `MIN_TOKENS` in the first half.

    Raises:
        StuckError: the simulated loop cannot go on.
    """
    run = ObservedRun()
    for entry in entries:
        run.take(entry.event, entry.commands)
    if len(run.trained_s) < LEAST_STEPS:
        return None
    first = len(run.trained_s) // 2
    # The first step has the engines' first iterations, which are slower.
    rates = _fit(run, run.trained_s[0], run.trained_s[first - 1])
    if rates is None:
        return None
    simulated = _simulated(setup, run, rates)
    return Prediction(
        fitted_steps=first,
        measured_s=_differences(run.trained_s),
        predicted_s=_differences(simulated),
        rates=rates,
    )


def _differences(times_s: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(d) for d in np.diff(np.asarray([0.0, *times_s])))


# -- rates --------------------------------------------------------------------------------------


def _fit(run: ObservedRun, from_s: float, until_s: float) -> Rates | None:
    """Fit rates on what ended in this time; None: no generation was long enough."""
    dispatches = [d for d in run.dispatches if from_s < d.ended_s <= until_s]
    long = [d for d in dispatches if d.tokens >= MIN_TOKENS]
    began = [d for d in dispatches if d.prefill_s > 0.0]
    if not long:
        return None
    engines = _Engines(dispatches)
    beside = [engines.beside(d) for d in long]
    fixed_s, each_s = fitted_line(beside, [d.decode_s / (d.tokens - 1) for d in long])
    iteration_s = fixed_s + each_s * fmean(beside)
    prefill_s, each_prefill_s = fitted_line(
        [engines.prefilled(d) for d in began], [d.prefill_s for d in began]
    )
    trainings = [t for t in run.trainings if from_s < t[0] <= until_s]
    parts = [t for t in run.parts if from_s < t[0] <= until_s]
    updates = [seconds for ended_s, seconds in run.updates if ended_s <= until_s]
    return Rates(
        iteration_s=(fixed_s, each_s),
        prefill_s=(max(0.0, prefill_s - iteration_s), each_prefill_s),
        # A step waits for half an iteration on average; the simulator has that by itself.
        dispatch_s=max(0.0, median(d.queued_s for d in began) - iteration_s / 2.0),
        training_s=fitted_line([tokens for _, tokens, _ in trainings], [t[2] for t in trainings]),
        part_s=fitted_line([t[1] for t in parts], [t[2] for t in parts]) if parts else (0.0, 0.0),
        update_s=fmean(updates) if updates else 0.0,
        start_s=fmean(run.starts) if run.starts else None,
    )


class _Engines:
    """Steps on engines over time."""

    def __init__(self, dispatches: Sequence[ObservedDispatch]) -> None:
        self._of: dict[EngineId, tuple[Times, Times]] = {}
        """Begin and end of each engine's."""
        for engine in dict.fromkeys(d.engine for d in dispatches):
            mine = [d for d in dispatches if d.engine == engine]
            self._of[engine] = (
                np.array([d.scheduled_s for d in mine]),
                np.array([d.ended_s for d in mine]),
            )

    def beside(self, one: ObservedDispatch) -> float:
        """Mean number of steps on the engine while one decoded, itself included."""
        begin, end = self._of[one.engine]
        length_s = max(one.decode_s, 1e-9)
        shared = np.minimum(end, one.ended_s) - np.maximum(begin, one.ended_s - length_s)
        return float(np.maximum(shared, 0.0).sum()) / length_s

    def prefilled(self, one: ObservedDispatch) -> int:
        """Steps in prefill in the same iteration, itself included."""
        begin, _ = self._of[one.engine]
        return int((np.abs(begin - one.scheduled_s) < SAME_ITERATION_S).sum())


def fitted_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least squares with an intercept and a slope that are not below 0."""
    if len(x) < 2 or max(x) - min(x) < 1e-9:
        return fmean(y), 0.0
    slope, intercept = (float(v) for v in np.polyfit(x, y, 1))
    if slope < 0.0:
        return fmean(y), 0.0
    if intercept < 0.0:
        return 0.0, float(np.dot(x, y) / np.dot(x, x))
    return intercept, slope


# -- the simulated loop -------------------------------------------------------------------------


def _simulated(setup: TrainSetup, run: ObservedRun, rates: Rates) -> list[float]:
    """Ends of the trainings of a simulated loop, in seconds."""
    scripts = _Scripts(run)
    core = _Timed(setup)
    fixed_s, token_s = rates.training_s
    part_fixed_s, part_token_s = rates.part_s
    world = LoopWorld(
        script=scripts.script,
        train_s=lambda tokens, pool_trains: fixed_s + token_s * sum(tokens),
        accumulate_s=lambda tokens, pool_trains: part_fixed_s + part_token_s * sum(tokens),
        update_s=rates.update_s,
        pause_s=rates.update_s,
    )
    LoopSimulation(core, _cluster(setup, run, rates), world).run()
    return core.trained_s


class _Scripts:
    """What the samples of the run did."""

    def __init__(self, run: ObservedRun) -> None:
        self._known = {
            (t.group, t.sample): tuple(t.steps) for t in run.trajectories.values() if t.steps
        }
        if not self._known:
            raise StuckError("no trajectory of the run made a step")
        self._last = next(reversed(self._known.values()))
        """For samples that the run never started: the simulated loop may be ahead at its end."""

    def script(self, group: GroupId, sample: int) -> TrajectoryScript:
        """The script of a sample."""
        return TrajectoryScript(
            id=f"{group}/{sample}",
            group=group,
            task="",
            arrival_s=0.0,
            steps=self._known.get((group, sample), self._last),
            truncated=False,
        )


class _Timed:
    """A loop's core that keeps when each batch was trained."""

    def __init__(self, setup: TrainSetup) -> None:
        run = setup.run
        policy = make_policy(run.config, run.context)
        limit = run.config.cluster.restart_limit
        self._core = setup.core(Controller(policy, run.context.disaggregation, limit))
        self.trained_s: list[float] = []

    @property
    def deadline_s(self) -> float | None:
        return self._core.deadline_s

    @property
    def over(self) -> bool:
        return self._core.over

    def handle(self, event: Event) -> Sequence[Command]:
        if isinstance(event, Trained):
            self.trained_s.append(event.time_s)
        return self._core.handle(event)


def _cluster(setup: TrainSetup, run: ObservedRun, rates: Rates) -> SimulationConfig:
    """The engines of the run, as the rates describe them."""
    cluster, settings = setup.run.config.cluster, setup.engines
    fixed_s, each_s = rates.iteration_s
    least_s, sizes = 1e-6, cluster.max_running + SPARE_SLOTS + 1
    table = LatencyTable(
        model="",
        gpu=cluster.gpu,
        tp=cluster.tp,
        base_s=[max(least_s, fixed_s + each_s * b) for b in range(sizes)],
        per_context_s=[0.0] * sizes,
        prefill_tokens=(0.0, 1.0, 2.0),
        prefill_knots_s=(0.0, rates.prefill_s[0], rates.prefill_s[0]),
        prefill_pair_s=0.0,
        host_per_prefill_s=rates.prefill_s[1],
        kv_capacity_tokens=run.kv_tokens,
        kv_bytes_per_token=1,
    )
    return replace(
        setup.run.simulation,
        table=lambda shape: table,
        moves_by="prefill",
        max_batched_tokens=settings.max_batched_tokens,
        block_size=settings.block_tokens or 32,
        dispatch_s=rates.dispatch_s,
        engine_start_s=rates.start_s or setup.run.simulation.engine_start_s,
        engine_start_s_at={},
        faults=tuple(run.faults),
    )
