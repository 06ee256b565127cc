"""Predicts the later steps of a training run, with rates that are fitted on its earlier ones.

The simulator runs the whole loop again: the same regime and policy, the same trajectories with the
lengths and tool times that they had, and rates of engines and trainer fitted on the first half of
the steps. The second half is compared. So what is predicted is time, not lengths.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, cast

import numpy as np

from heddle.setup import make_policy
from heddle.train.setup import TrainSetup
from heddle_core.commands import StartEngine
from heddle_core.controller import Controller
from heddle_core.defaults import SPARE_SLOTS
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    StepFinished,
    StepPreempted,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
)
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.journal import Entry
from heddle_core.loop.commands import AnyCommand, StartTrajectory, Train, UpdateWeights
from heddle_core.loop.events import AnyEvent, EngineUpdated, Trained
from heddle_rollout.driver import StuckError
from heddle_sim.config import SimulationConfig
from heddle_sim.latency import LatencyTable
from heddle_sim.loop import LoopSimulation, LoopWorld
from heddle_trace.schema import StepScript, TrajectoryScript

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

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        first, rates = self.fitted_steps, self.rates
        return {
            "fitted_steps": first,
            "measured_s": list(self.measured_s),
            "predicted_s": list(self.predicted_s),
            "later_measured_s": fmean(self.measured_s[first:]),
            "later_predicted_s": fmean(self.predicted_s[first:]),
            "error_pct": self.error_pct,
            "rates": {
                "iteration_s": list(rates.iteration_s),
                "prefill_s": list(rates.prefill_s),
                "dispatch_s": rates.dispatch_s,
                "training_s": list(rates.training_s),
                "update_s": rates.update_s,
                "engine_start_s": rates.start_s,
            },
        }


def predict(setup: TrainSetup, entries: Iterable[Entry]) -> Prediction | None:
    """Fit a run's rates and simulate it; None: it has fewer than `LEAST_STEPS` steps.

    Raises:
        StuckError: the simulated loop cannot go on.
    """
    seen = _Seen()
    for entry in entries:
        seen.take(cast(AnyEvent, entry.event), cast(Sequence[AnyCommand], entry.commands))
    if len(seen.trained_s) < LEAST_STEPS:
        return None
    first = len(seen.trained_s) // 2
    # The first step has the engines' first iterations, which are slower.
    rates = _fit(seen, seen.trained_s[0], seen.trained_s[first - 1])
    simulated = _simulated(setup, seen, rates)
    return Prediction(
        fitted_steps=first,
        measured_s=_differences(seen.trained_s),
        predicted_s=_differences(simulated),
        rates=rates,
    )


def _differences(times_s: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(d) for d in np.diff(np.asarray([0.0, *times_s])))


# -- what a journal shows ---------------------------------------------------------------------


@dataclass(slots=True)
class _Trajectory:
    group: GroupId
    sample: int
    prompt_tokens: int = 0
    steps: list[StepScript] = field(default_factory=list)
    context: int = 0
    """Tokens before the current step."""
    made: int = 0
    """Tokens of it, of dispatches that did not finish it."""
    tool_began_s: float = 0.0

    def end_step(self, output: int) -> None:
        """The current step made `output` more tokens, and is over."""
        output = max(1, output + self.made)
        shared = 0 if not self.steps else self.context - 2
        self.steps.append(
            StepScript(
                prompt_tokens=self.context,
                shared_tokens=max(0, shared),
                output_tokens=output,
                tool=None,
                tool_s=0.0,
                tool_ok=None,
                tool_tokens=0,
            )
        )
        self.made = 0

    @property
    def tokens(self) -> int:
        """Of the whole context."""
        return self.context + self.steps[-1].output_tokens if self.steps else self.prompt_tokens


@dataclass(frozen=True, slots=True)
class _Decoded:
    """A dispatch that ended."""

    ended_s: float
    began_s: float
    engine: EngineId
    tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float


@dataclass(slots=True)
class _Seen:
    """A run's trajectories, dispatches, trainings and updates, from its journal."""

    trajectories: dict[TrajectoryId, _Trajectory] = field(default_factory=dict)
    decoded: list[_Decoded] = field(default_factory=list)
    trained_s: list[float] = field(default_factory=list)
    trainings: list[tuple[float, int, float]] = field(default_factory=list)
    """End, tokens and seconds of each."""
    updates: list[tuple[float, float]] = field(default_factory=list)
    """End and seconds of each engine's."""
    starts: list[float] = field(default_factory=list)
    """Seconds of starts while the run was under way."""
    faults: list[tuple[float, EngineId]] = field(default_factory=list)
    kv_tokens: int = 0
    _training: tuple[float, int] = (0.0, 0)
    _updating: dict[EngineId, float] = field(default_factory=dict)
    _starting: dict[EngineId, float] = field(default_factory=dict)

    def take(self, event: AnyEvent, commands: Sequence[AnyCommand]) -> None:
        """Take an event and its commands."""
        match event:
            case TrajectoryArrived():
                known = self.trajectories[event.trajectory]
                known.prompt_tokens = known.context = event.prompt_tokens
            case StepFinished() | StepPreempted():
                self._ended(event)
            case ToolStarted():
                self.trajectories[event.trajectory].tool_began_s = event.time_s
            case ToolReturned():
                self._returned(event)
            case EngineFailed():
                self.faults.append((event.time_s, event.engine))
                for trajectory, tokens in event.salvaged:
                    self.trajectories[trajectory].made += tokens
            case EngineReady():
                self.kv_tokens = event.kv_capacity_tokens
                began_s = self._starting.pop(event.engine, event.time_s)
                if event.time_s > began_s:
                    self.starts.append(event.time_s - began_s)
            case EngineUpdated():
                began_s = self._updating.pop(event.engine, event.time_s)
                self.updates.append((event.time_s, event.time_s - began_s))
            case Trained():
                began_s, tokens = self._training
                self.trained_s.append(event.time_s)
                self.trainings.append((event.time_s, tokens, event.time_s - began_s))
            case _:
                pass
        self._take_commands(event.time_s, commands)

    def _take_commands(self, time_s: float, commands: Sequence[AnyCommand]) -> None:
        for command in commands:
            match command:
                case StartTrajectory():
                    self.trajectories[command.trajectory] = _Trajectory(
                        command.group, command.sample
                    )
                case Train():
                    tokens = sum(self.trajectories[t].tokens for t in command.trajectories)
                    self._training = time_s, tokens
                case UpdateWeights():
                    self._updating[command.engine] = time_s
                case StartEngine():
                    self._starting[command.engine] = time_s
                case _:
                    pass

    def _ended(self, event: StepFinished | StepPreempted) -> None:
        seconds = event.queued_s + event.prefill_s + event.decode_s
        self.decoded.append(
            _Decoded(
                event.time_s,
                event.time_s - seconds,
                event.engine,
                event.output_tokens,
                event.queued_s,
                event.prefill_s,
                event.decode_s,
            )
        )
        trajectory = self.trajectories[event.trajectory]
        if isinstance(event, StepFinished):
            trajectory.end_step(event.output_tokens)
        else:
            trajectory.made += event.output_tokens

    def _returned(self, event: ToolReturned) -> None:
        trajectory = self.trajectories[event.trajectory]
        last = trajectory.steps[-1]
        trajectory.steps[-1] = replace(
            last,
            tool=event.tool,
            tool_s=event.time_s - trajectory.tool_began_s,
            tool_ok=event.ok,
            tool_tokens=event.observation_tokens,
        )
        trajectory.context = event.context_tokens


# -- rates --------------------------------------------------------------------------------------


def _fit(seen: _Seen, from_s: float, until_s: float) -> Rates:
    """Fit rates on what ended in this time."""
    decoded = [d for d in seen.decoded if from_s < d.ended_s <= until_s]
    long = [d for d in decoded if d.tokens >= MIN_TOKENS]
    fixed, each = fitted_line(
        [_beside(d, decoded) for d in long], [d.decode_s / (d.tokens - 1) for d in long]
    )
    iteration_s = fixed + each * fmean(_beside(d, decoded) for d in long)
    began = [d for d in decoded if d.prefill_s > 0.0]
    prefill_s, each_prefill_s = fitted_line(
        [_prefilled(d, began) for d in began], [d.prefill_s for d in began]
    )
    trainings = [t for t in seen.trainings if from_s < t[0] <= until_s]
    updates = [seconds for ended_s, seconds in seen.updates if ended_s <= until_s]
    return Rates(
        iteration_s=(fixed, each),
        prefill_s=(max(0.0, prefill_s - iteration_s), each_prefill_s),
        # A step waits for half an iteration on average; the simulator has that by itself.
        dispatch_s=max(0.0, median(d.queued_s for d in began) - iteration_s / 2.0),
        training_s=fitted_line(
            [tokens for _, tokens, _ in trainings], [s for _, _, s in trainings]
        ),
        update_s=fmean(updates) if updates else 0.0,
        start_s=fmean(seen.starts) if seen.starts else None,
    )


def _beside(one: _Decoded, all_: Sequence[_Decoded]) -> float:
    """Mean number of steps on the engine while one decoded, itself included."""
    begin_s = one.ended_s - one.decode_s
    length_s = max(one.decode_s, 1e-9)
    shared_s = sum(
        max(0.0, min(one.ended_s, d.ended_s) - max(begin_s, d.began_s + d.queued_s))
        for d in all_
        if d.engine == one.engine
    )
    return shared_s / length_s


def _prefilled(one: _Decoded, all_: Sequence[_Decoded]) -> int:
    """Steps in prefill in the same iteration, itself included."""
    at_s = one.began_s + one.queued_s
    return sum(
        d.engine == one.engine and abs(d.began_s + d.queued_s - at_s) < SAME_ITERATION_S
        for d in all_
    )


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


def _simulated(setup: TrainSetup, seen: _Seen, rates: Rates) -> list[float]:
    """Ends of the trainings of a simulated loop, in seconds."""
    scripts = _Scripts(seen)
    core = _Timed(setup)
    fixed_s, token_s = rates.training_s
    world = LoopWorld(
        script=scripts.script,
        train_s=lambda tokens: fixed_s + token_s * sum(tokens),
        update_s=rates.update_s,
        pause_s=rates.update_s,
    )
    LoopSimulation(core, _cluster(setup, seen, rates), world).run()
    return core.trained_s


class _Scripts:
    """What the samples of the run did."""

    def __init__(self, seen: _Seen) -> None:
        self._known = {
            (t.group, t.sample): tuple(t.steps) for t in seen.trajectories.values() if t.steps
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
        self._core = setup.core(Controller(policy))
        self.trained_s: list[float] = []

    @property
    def deadline_s(self) -> float | None:
        return self._core.deadline_s

    @property
    def over(self) -> bool:
        return self._core.over

    def handle(self, event: AnyEvent) -> Sequence[AnyCommand]:
        if isinstance(event, Trained):
            self.trained_s.append(event.time_s)
        return self._core.handle(event)


def _cluster(setup: TrainSetup, seen: _Seen, rates: Rates) -> SimulationConfig:
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
        kv_capacity_tokens=seen.kv_tokens,
        kv_bytes_per_token=1,
    )
    return replace(
        setup.run.simulation,
        table=lambda gpu, tp: table,
        moves_by="prefill",
        max_batched_tokens=settings.max_batched_tokens,
        block_size=settings.block_tokens or 32,
        dispatch_s=rates.dispatch_s,
        engine_start_s=rates.start_s or setup.run.simulation.engine_start_s,
        engine_start_s_at={},
        faults=tuple(seen.faults),
    )
