"""Carries out the commands of an RL loop, simulated or real, on top of the driver of its rollouts.

A `Driver` runs the rollouts. What a loop has besides is behind small protocols: environments,
rewards, a trainer, weight updates, and GPUs that change hands. None of them may call back from
inside the call that began the work.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from heddle_core.commands import (
    AccumulateGradients,
    AssignGpus,
    Cancel,
    CloseRollout,
    Discard,
    OpenRollout,
    Score,
    StartTrajectory,
    Train,
    UpdateWeights,
)
from heddle_core.events import (
    EngineUpdated,
    Event,
    GpusAssigned,
    GradientsAccumulated,
    LoopStarted,
    Scored,
    StartFailed,
    Trained,
)
from heddle_core.ids import TrajectoryId
from heddle_rollout.agents import Agent
from heddle_rollout.clock import Clock
from heddle_rollout.core import Core
from heddle_rollout.driver import Driver

OnStarted: TypeAlias = Callable[[StartTrajectory, Agent | None], None]
"""Gets the agent in its environment; None: that did not start."""
OnScored: TypeAlias = Callable[[TrajectoryId, float | None], None]
"""Gets the reward; None: the service failed."""
OnTrained: TypeAlias = Callable[[int], None]
"""Gets the number of the batch."""
OnUpdated: TypeAlias = Callable[[UpdateWeights], None]
OnAssigned: TypeAlias = Callable[[AssignGpus, bool], None]
"""Gets whether the GPUs have changed sides."""


class LoopCore(Core, Protocol):
    """The core of a loop; implemented by `heddle_core.loop.controller.LoopController`."""

    @property
    def over(self) -> bool:
        """Whether the loop has ended."""
        ...


class Environments(Protocol):
    """Starts the environments of trajectories."""

    def start(self, command: StartTrajectory, then: OnStarted) -> None:
        """Start one, with an agent in it. Ends in one call of `then`."""


class Rewards(Protocol):
    """Computes rewards."""

    def score(self, start: StartTrajectory, agent: Agent, then: OnScored) -> None:
        """Score the finished trajectory that `start` began. Ends in one call of `then`."""


class Trainer(Protocol):
    """Trains the model."""

    def train(self, command: Train, agents: Sequence[Agent], then: OnTrained) -> None:
        """Train on the rest of a batch. Ends in one call of `then`."""


class Accumulation(Protocol):
    """Computes gradients of parts of a batch, before the trainer trains on its rest."""

    def accumulate(
        self, command: AccumulateGradients, agents: Sequence[Agent], then: OnTrained
    ) -> None:
        """Add the gradients of a part. Ends in one call of `then`."""


class WeightUpdates(Protocol):
    """Brings the trainer's weights to engines."""

    def update(self, command: UpdateWeights, driver: Driver, then: OnUpdated) -> None:
        """Update an engine. Ends in one call of `then`, or in the end of the engine."""


class GpuSwitch(Protocol):
    """Moves GPUs between rollout and training."""

    def assign(self, command: AssignGpus, driver: Driver, then: OnAssigned) -> None:
        """Let those of `command.pool` work for `command.role`. Ends in one call of `then`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopServices:
    """What a loop has besides a rollout cluster."""

    environments: Environments
    rewards: Rewards
    trainer: Trainer
    updates: WeightUpdates
    parts: Accumulation | None = None
    """None: the trainer takes whole batches only."""
    gpus: GpuSwitch | None = None
    """None: engines and trainer have GPUs of their own."""


class LoopDriver:
    """Carries out the commands of a loop. `attach` the driver of its rollouts, made with
    `handlers`, before `start`.
    """

    def __init__(
        self,
        core: LoopCore,
        clock: Clock,
        services: LoopServices,
        *,
        on_over: Callable[[], None],
    ) -> None:
        """`on_over` is called when the loop has ended, and may be called more than once."""
        self._core, self._clock, self._services = core, clock, services
        self._on_over = on_over
        self._started_as: dict[TrajectoryId, tuple[StartTrajectory, Agent]] = {}
        """Trajectories that run, or whose reward or batch is due."""
        self._driver: Driver | None = None
        self._pending = 0
        """Starts, rewards, trainings and moves of GPUs under way."""

    def expects_agents(self) -> bool:
        """Whether a service will answer, so that a loop in which nothing runs goes on."""
        return self._pending > 0

    @property
    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """What executes the loop's commands, by their class."""
        return {
            AccumulateGradients: self._accumulate,
            AssignGpus: self._assign_gpus,
            Cancel: self._cancel,
            CloseRollout: lambda command: self.driver.close_rollout(command.rollout),
            Discard: self._discard,
            OpenRollout: self._open_rollout,
            Score: self._score,
            StartTrajectory: self._start_trajectory,
            Train: self._train,
            UpdateWeights: self._update_weights,
        }

    def attach(self, driver: Driver) -> None:
        """Take the driver of the rollouts."""
        self._driver = driver

    @property
    def driver(self) -> Driver:
        """That of the rollouts."""
        assert self._driver is not None, "attach a driver first"
        return self._driver

    def start(self) -> None:
        """Begin the loop. Called once."""
        self.driver.start()
        self._deliver(LoopStarted(time_s=self._clock.now_s))

    def end_if_over(self) -> None:
        """Report the end of the loop if it has ended; the driver's `on_idle`."""
        if self._core.over:
            self._on_over()

    def _deliver(self, event: Event) -> None:
        self.driver.deliver(event)
        self.end_if_over()

    # -- commands ---------------------------------------------------------------------------------

    def _open_rollout(self, command: OpenRollout) -> None:
        self.driver.open_rollout(
            command.rollout,
            trajectories=command.trajectories,
            weights_version=command.weights_version,
        )

    def _start_trajectory(self, command: StartTrajectory) -> None:
        self._pending += 1
        self._services.environments.start(command, self._started)

    def _started(self, command: StartTrajectory, agent: Agent | None) -> None:
        self._pending -= 1
        if agent is None:
            self._deliver(
                StartFailed(
                    time_s=self._clock.now_s,
                    trajectory=command.trajectory,
                    reason="its environment did not start",
                )
            )
            return
        self._started_as[command.trajectory] = command, agent
        self.driver.admit(agent, command.rollout)

    def _score(self, command: Score) -> None:
        self._pending += 1
        self._services.rewards.score(*self._started_as[command.trajectory], self._scored)

    def _scored(self, trajectory: TrajectoryId, reward: float | None) -> None:
        self._pending -= 1
        self._deliver(Scored(time_s=self._clock.now_s, trajectory=trajectory, reward=reward))

    def _cancel(self, command: Cancel) -> None:
        self._started_as.pop(command.trajectory, None)
        self.driver.cancel(command)

    def _discard(self, command: Discard) -> None:
        self._started_as.pop(command.trajectory, None)

    def _accumulate(self, command: AccumulateGradients) -> None:
        assert self._services.parts is not None, "this trainer takes whole batches only"
        agents = self._taken(command.trajectories)
        self._pending += 1
        self._services.parts.accumulate(command, agents, self._accumulated)

    def _accumulated(self, batch: int) -> None:
        self._pending -= 1
        self._deliver(GradientsAccumulated(time_s=self._clock.now_s, batch=batch))

    def _train(self, command: Train) -> None:
        agents = self._taken(command.trajectories)
        self._pending += 1
        self._services.trainer.train(command, agents, self._trained)

    def _taken(self, trajectories: Sequence[TrajectoryId]) -> list[Agent]:
        """Agents whose trajectories leave for the trainer."""
        return [self._started_as.pop(each)[1] for each in trajectories]

    def _trained(self, batch: int) -> None:
        self._pending -= 1
        self._deliver(Trained(time_s=self._clock.now_s, batch=batch))

    def _assign_gpus(self, command: AssignGpus) -> None:
        assert self._services.gpus is not None, "GPUs that change sides need a switch"
        self._pending += 1
        self._services.gpus.assign(command, self.driver, self._assigned)

    def _assigned(self, command: AssignGpus, ok: bool) -> None:
        self._pending -= 1
        self._deliver(
            GpusAssigned(time_s=self._clock.now_s, role=command.role, pool=command.pool, ok=ok)
        )

    def _update_weights(self, command: UpdateWeights) -> None:
        self._services.updates.update(command, self.driver, self._updated)

    def _updated(self, command: UpdateWeights) -> None:
        self._deliver(
            EngineUpdated(time_s=self._clock.now_s, engine=command.engine, version=command.version)
        )
