"""The seconds of each RL step, split by what the trainer did or waited for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from heddle_core.events import EngineFailed, EngineStopped, TrajectoryFinished
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.loop.commands import (
    AccumulateGradients,
    AnyCommand,
    AssignGpus,
    Discard,
    Train,
    UpdateWeights,
)
from heddle_core.loop.events import (
    AnyEvent,
    EngineUpdated,
    GpusAssigned,
    GradientsAccumulated,
    Trained,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One RL step, from the end of the training before it to the end of its own."""

    batch: int
    begin_s: float
    end_s: float
    train_s: float
    """In training."""
    update_s: float
    """In a weight update, and in moving GPUs between rollout and training."""
    reward_s: float
    """Waiting although every trajectory of the batch was generated: for rewards."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def rollout_s(self) -> float:
        """The rest: waiting for trajectories."""
        return self.seconds - self.train_s - self.update_s - self.reward_s


class StepClock:
    """Takes every event with its commands; knows the steps that have ended."""

    def __init__(self, *, trainer_lends: bool = False) -> None:
        """`trainer_lends`: the trainer cannot train while a hybrid pool is with the rollout. The
        time until it is back then counts as waiting for trajectories.
        """
        self._trainer_lends = trainer_lends
        self.steps: list[StepTime] = []
        self._generated: dict[TrajectoryId, float] = {}
        """When each trajectory ended that is neither trained nor discarded."""
        self._updating: dict[EngineId, None] = {}
        self._since_s: float | None = None
        """Since when the time counts as update."""
        self._begin_s = self._update_s = self._reward_s = self._train_s = 0.0
        self._train_began_s = 0.0
        self._free_s = 0.0
        """Since when the trainer could train: the end of the last weight update, or of the last
        part of this batch, or the return of its GPUs."""
        self._batch: tuple[float, float] | None = None
        """When the batch was complete, and the last update before; None where GPUs do not move."""
        self._on: dict[type, Callable[[Any], None]] = {
            TrajectoryFinished: self._on_finished,
            EngineUpdated: self._on_engine,
            EngineFailed: self._on_engine,
            EngineStopped: self._on_engine,
            GpusAssigned: self._on_assigned,
            GradientsAccumulated: self._on_accumulated,
            Trained: self._end_step,
        }
        self._begin: dict[type, Callable[[Any, float], None]] = {
            UpdateWeights: self._begin_update,
            AccumulateGradients: self._begin_training,
            AssignGpus: self._begin_move,
            Train: self._begin_training,
            Discard: self._discard,
        }

    def take(self, event: AnyEvent, commands: Sequence[AnyCommand]) -> None:
        """Read an event and its commands."""
        react = self._on.get(type(event))
        if react is not None:
            react(event)
        for command in commands:
            begin = self._begin.get(type(command))
            if begin is not None:
                begin(command, event.time_s)

    def _on_finished(self, event: TrajectoryFinished) -> None:
        if event.outcome in ("completed", "truncated"):
            self._generated[event.trajectory] = event.time_s

    def _on_engine(self, event: EngineUpdated | EngineFailed | EngineStopped) -> None:
        if self._updating.pop(event.engine, 0) is None and not self._updating:
            self._end_update(event.time_s)

    def _on_assigned(self, event: GpusAssigned) -> None:
        if event.pool == "all":
            self._end_update(event.time_s)
        elif self._trainer_lends and event.role == "training":
            self._free_s = event.time_s

    def _on_accumulated(self, event: GradientsAccumulated) -> None:
        self._train_s += event.time_s - self._train_began_s
        self._free_s = event.time_s

    def _begin_update(self, command: UpdateWeights, time_s: float) -> None:
        self._updating[command.engine] = None
        self._since_s = time_s

    def _begin_move(self, command: AssignGpus, time_s: float) -> None:
        if command.pool == "hybrid":
            return  # the rollout goes on, and so may the trainer
        self._since_s = time_s
        if command.role == "training":
            self._batch = time_s, self._free_s

    def _discard(self, command: Discard, time_s: float) -> None:
        self._generated.pop(command.trajectory, None)

    def _end_update(self, time_s: float) -> None:
        if self._since_s is not None:
            self._update_s += time_s - self._since_s
            self._since_s, self._free_s = None, time_s

    def _begin_training(self, command: AccumulateGradients | Train, time_s: float) -> None:
        self._train_began_s = time_s
        generated_s = max(self._generated.pop(each) for each in command.trajectories)
        # Where GPUs move to training, the batch was complete before that.
        batch_s, updated_s = (time_s, self._free_s) if self._batch is None else self._batch
        self._reward_s = max(0.0, batch_s - max(generated_s, self._begin_s, updated_s))

    def _end_step(self, event: Trained) -> None:
        self.steps.append(
            StepTime(
                batch=event.batch,
                begin_s=self._begin_s,
                end_s=event.time_s,
                train_s=self._train_s + event.time_s - self._train_began_s,
                update_s=self._update_s,
                reward_s=self._reward_s,
            )
        )
        self._begin_s, self._update_s, self._batch = event.time_s, 0.0, None
        self._train_s = 0.0
