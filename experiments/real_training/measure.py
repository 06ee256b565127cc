"""Figures of a training loop, step by step, from its events and commands as they pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from experiments.real_training.messages import TrainMetrics
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.loop.commands import (
    AccumulateGradients,
    AnyCommand,
    StartTrajectory,
    Train,
    UpdateWeights,
)
from heddle_core.loop.events import AnyEvent, EngineUpdated, GradientsAccumulated, Trained


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    step: int
    """From 1."""
    ended_s: float
    """When its batch was trained."""
    seconds: float
    """Since the batch before, or since the loop began."""
    training_s: float
    """From the command to train until its end, with those of the batch's parts."""
    reward: float
    """Mean of the trained trajectories."""
    staleness: float
    """Mean number of weight updates between the start of a trajectory and its training."""
    oldest: int
    """The largest."""
    metrics: TrainMetrics


class TrainMeasure:
    """Takes every event with its commands."""

    def __init__(self, on_step: Callable[[StepFigures], None]) -> None:
        self.steps: list[StepFigures] = []
        self.update_s: list[float] = []
        """From the command to update an engine until the engine generates again."""
        self._on_step = on_step
        self._metrics: dict[int, TrainMetrics] = {}
        self._started: dict[TrajectoryId, int] = {}
        self._staleness: list[int] = []
        """Of the batch in collection, as far as the trainer has it."""
        self._train_began_s = self._parts_s = 0.0
        self._updating: dict[EngineId, float] = {}

    def batch(self, batch: int, metrics: TrainMetrics) -> None:
        """Keep what the trainer reports of a batch, before its `Trained`."""
        self._metrics[batch] = metrics

    def take(self, event: AnyEvent, commands: Sequence[AnyCommand], version: int) -> None:
        """Count an event and its commands; `version` is the loop's after both."""
        if isinstance(event, Trained):
            self._trained(event)
        elif isinstance(event, GradientsAccumulated):
            self._parts_s += event.time_s - self._train_began_s
        elif isinstance(event, EngineUpdated):
            began_s = self._updating.pop(event.engine, None)
            if began_s is not None:
                self.update_s.append(event.time_s - began_s)
        for command in commands:
            match command:
                case StartTrajectory():
                    self._started[command.trajectory] = version
                case AccumulateGradients() | Train():
                    self._train_began_s = event.time_s
                    self._staleness += [
                        version - self._started[trajectory] for trajectory in command.trajectories
                    ]
                case UpdateWeights():
                    self._updating[command.engine] = event.time_s

    def _trained(self, event: Trained) -> None:
        before_s = self.steps[-1].ended_s if self.steps else 0.0
        metrics = self._metrics.pop(event.batch)
        figures = StepFigures(
            step=event.batch + 1,
            ended_s=event.time_s,
            seconds=event.time_s - before_s,
            training_s=self._parts_s + event.time_s - self._train_began_s,
            reward=metrics.reward,
            staleness=fmean(self._staleness),
            oldest=max(self._staleness),
            metrics=metrics,
        )
        self._staleness, self._parts_s = [], 0.0
        self.steps.append(figures)
        self._on_step(figures)
