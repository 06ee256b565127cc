"""Runs an RL loop in simulated time: environments, rewards, a trainer and weight updates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from simpy.core import EmptySchedule

from heddle_core.commands import Cancel
from heddle_core.events import EngineReady, TrajectoryFinished
from heddle_core.ids import GroupId, TrajectoryId
from heddle_core.loop.commands import (
    AccumulateGradients,
    AnyCommand,
    AssignGpus,
    CloseRollout,
    Discard,
    OpenRollout,
    Score,
    StartTrajectory,
    Train,
    UpdateWeights,
)
from heddle_core.loop.events import (
    AnyEvent,
    EngineUpdated,
    GpusAssigned,
    GradientsAccumulated,
    LoopStarted,
    Scored,
    StartFailed,
    Trained,
)
from heddle_core.loop.hybrid import HYBRID
from heddle_rollout.core import Core
from heddle_rollout.driver import Driver, StuckError
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_rollout.services import ChargedSolver, CoreEstimates
from heddle_sim.clock import SimEnvironment
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimLauncher
from heddle_sim.services import ServiceConfig, ServicePool
from heddle_trace.schema import TrajectoryScript


class LoopCore(Protocol):
    """Turns events into commands; implemented by `heddle_core.loop.controller.LoopController`."""

    @property
    def deadline_s(self) -> float | None:
        """See `Core`."""
        ...

    @property
    def over(self) -> bool:
        """Whether the loop has ended."""
        ...

    def handle(self, event: AnyEvent) -> Sequence[AnyCommand]:
        """See `Core`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopWorld:
    """What the simulated loop has besides a rollout cluster; every time in seconds."""

    script: Callable[[GroupId, int], TrajectoryScript]
    """Sample of a prompt, by its number."""
    train_s: Callable[[Sequence[int], bool], float]
    """Training time of a batch, or of its last part, by the tokens of its trajectories, and
    whether the hybrid pool trains too."""
    accumulate_s: Callable[[Sequence[int], bool], float]
    """Time of the gradients of another part, likewise."""
    update_s: float
    """From the end of training until engines have new weights."""
    pause_s: float
    """The part of it during which they generate nothing."""
    to_training_s: float = 0.0
    """Until GPUs that both sides may have can train: their engines have ended or sleep."""
    to_rollout_s: float = 0.0
    """The way back."""
    environments: ServiceConfig = field(default_factory=ServiceConfig)
    """Their start."""
    alive: int | None = None
    """Environments at once, from the request of their start until their trajectory has ended; None:
    no limit."""
    rewards: ServiceConfig = field(default_factory=ServiceConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.pause_s <= self.update_s:
            raise ValueError(
                f"engines pause for 0 s to the whole update, {self.update_s} s, not {self.pause_s}"
            )


class LoopSimulation:
    """An RL loop in simulated time, on a simulated cluster."""

    def __init__(
        self,
        core: LoopCore,
        config: SimulationConfig,
        world: LoopWorld,
        *,
        on_lost: Callable[[TrajectoryId, int], None] = lambda trajectory, tokens: None,
    ) -> None:
        """`on_lost` is called with the tokens of a step whose trajectory was cancelled."""
        self._core, self._world = core, world
        self._training = False
        """Whether the trainer has the GPUs of all engines."""
        self._hybrid_trains = True
        """Whether the trainer has those of the hybrid pool."""
        self._stop: list[object] = []
        self._errors: list[BaseException] = []
        self.env = SimEnvironment()
        self.clock = clock = self.env.calendar
        self.launcher = SimLauncher(config, clock, loaded=HYBRID)
        self.environments = ServicePool("environment", world.environments, clock, world.seed)
        self.rewards = ServicePool("reward", world.rewards, clock, world.seed)
        alive = ServiceConfig(capacity=world.alive)
        self.alive = None if world.alive is None else ServicePool("alive", alive, clock, world.seed)
        self._starts: dict[TrajectoryId, StartTrajectory] = {}
        """Trajectories whose environment starts, runs, or whose reward or batch is due."""
        self.driver = Driver(
            # Its events and commands are more than a rollout's; `carry_out` has the rest.
            cast(Core, self),
            self.launcher,
            clock,
            predictions=CoreEstimates(clock, config.prediction_s),
            solver=ChargedSolver(clock, config.planning_s),
            tool_capacity=config.tool_capacity,
            tool_pools=config.tool_pools(clock),
            report_interval_s=config.report_interval_s,
            report_delay_s=config.report_delay_s,
            on_idle=self._stop_if_over,
            on_error=self._failed,
            on_lost=on_lost,
            carry_out=self._carry_out(),
        )

    @property
    def deadline_s(self) -> float | None:
        """That of the loop's core; see `Core`."""
        return self._core.deadline_s

    def handle(self, event: AnyEvent) -> Sequence[AnyCommand]:
        """Hand an event to the loop's core; see `Core`."""
        commands = self._core.handle(event)
        if self.alive is not None and isinstance(event, TrajectoryFinished):
            self.alive.release(event.trajectory)
        if self._training and isinstance(event, EngineReady):
            engine = self.launcher.engine(event.engine)
            if engine is not None:
                engine.pause()
        return commands

    def run(self) -> None:
        """Let time pass until the loop is over.

        Raises:
            StuckError: nothing is left to happen before that.
        """
        self.driver.start()
        self._deliver(LoopStarted(time_s=self.clock.now_s))
        self.launcher.schedule_faults()
        try:
            while not self._core.over and not self._errors:
                self._stop.clear()
                self.env.run_until(self._stop)
        except EmptySchedule:
            raise StuckError(
                f"nothing is left to happen at {self.clock.now_s:.1f} s, and the loop is not over"
            ) from None
        if self._errors:
            raise self._errors[0]

    def _failed(self, error: BaseException) -> None:
        self._errors.append(error)
        self._stop.append(error)

    def _deliver(self, event: AnyEvent) -> None:
        self.driver.deliver(cast(Any, event))
        self._stop_if_over()

    def _stop_if_over(self) -> None:
        if self._core.over:
            self._stop.append(None)

    # -- commands ---------------------------------------------------------------------------------

    def _carry_out(self) -> dict[type, Callable[[Any], None]]:
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

    def _open_rollout(self, command: OpenRollout) -> None:
        self.driver.open_rollout(
            command.rollout,
            trajectories=command.trajectories,
            weights_version=command.weights_version,
        )

    def _start_trajectory(self, command: StartTrajectory) -> None:
        self._starts[command.trajectory] = command
        if self.alive is None:
            self._start_environment(command)
        else:
            self.alive.acquire(command.trajectory, 0, lambda _: self._start_environment(command))

    def _start_environment(self, command: StartTrajectory) -> None:
        recorded_s = self._script(command).env_start_s or 0.0
        self.environments.call(command.trajectory, self._started, recorded_s)

    def _script(self, start: StartTrajectory) -> TrajectoryScript:
        return self._world.script(start.group, start.sample)

    def _started(self, trajectory: TrajectoryId, ok: bool) -> None:
        command = self._starts[trajectory]
        if not ok:
            del self._starts[trajectory]
            if self.alive is not None:
                self.alive.release(trajectory)
            self._deliver(
                StartFailed(
                    time_s=self.clock.now_s,
                    trajectory=trajectory,
                    reason="its environment did not start",
                )
            )
            return
        script = self._script(command)
        agent = ScriptedAgent(
            script,
            self.clock,
            first_arrival_s=script.arrival_s,
            id_=trajectory,
            group=command.group,
        )
        self.driver.admit(agent, command.rollout)

    def _score(self, command: Score) -> None:
        recorded_s = self._script(self._starts[command.trajectory]).reward_s or 0.0
        self.rewards.call(command.trajectory, self._scored, recorded_s)

    def _scored(self, trajectory: TrajectoryId, ok: bool) -> None:
        start = self._starts.get(trajectory)  # None: it was discarded meanwhile
        recorded = None if start is None else self._script(start).reward
        reward = (0.0 if recorded is None else recorded) if ok else None
        self._deliver(Scored(time_s=self.clock.now_s, trajectory=trajectory, reward=reward))

    def _cancel(self, command: Cancel) -> None:
        self._starts.pop(command.trajectory, None)
        self.driver.cancel(command)

    def _discard(self, command: Discard) -> None:
        self._starts.pop(command.trajectory, None)

    def _accumulate(self, command: AccumulateGradients) -> None:
        seconds = self._world.accumulate_s(self._taken(command.trajectories), self._hybrid_trains)
        self.clock.call_after(seconds, self._accumulated, command.batch)

    def _accumulated(self, batch: int) -> None:
        self._deliver(GradientsAccumulated(time_s=self.clock.now_s, batch=batch))

    def _train(self, command: Train) -> None:
        seconds = self._world.train_s(self._taken(command.trajectories), self._hybrid_trains)
        self.clock.call_after(seconds, self._trained, command.batch)

    def _taken(self, trajectories: Sequence[TrajectoryId]) -> list[int]:
        """Tokens of trajectories that leave for the trainer."""
        return [self._tokens(self._starts.pop(each)) for each in trajectories]

    def _tokens(self, start: StartTrajectory) -> int:
        """Tokens of a trajectory's last context, output included."""
        last = self._script(start).steps[-1]
        return last.prompt_tokens + last.output_tokens

    def _trained(self, batch: int) -> None:
        self._deliver(Trained(time_s=self.clock.now_s, batch=batch))

    def _assign_gpus(self, command: AssignGpus) -> None:
        to_training = command.role == "training"
        if command.pool == "hybrid":
            self._hybrid_trains = False
        elif to_training:
            self._training = True
            for name in self.driver.engines:
                self.driver.abort_running(name)
                engine = self.launcher.engine(name)
                assert engine is not None
                engine.pause()
        seconds = self._world.to_training_s if to_training else self._world.to_rollout_s
        self.clock.call_after(seconds, self._assigned, command)

    def _assigned(self, command: AssignGpus) -> None:
        if command.pool == "hybrid":
            self._hybrid_trains = command.role == "training"
        elif command.role == "rollout":
            self._training = False
            for name in self.driver.engines:
                engine = self.launcher.engine(name)
                if engine is not None:
                    engine.flush_kv()
                    engine.resume()
        self._deliver(GpusAssigned(time_s=self.clock.now_s, role=command.role, pool=command.pool))

    def _update_weights(self, command: UpdateWeights) -> None:
        delay_s = self._world.update_s - self._world.pause_s
        self.clock.call_after(delay_s, self._pause, command)

    def _pause(self, command: UpdateWeights) -> None:
        engine = self.launcher.engine(command.engine)
        if engine is None:
            return  # EngineFailed or EngineStopped has ended the command
        if command.mode == "interrupt":
            self.driver.abort_running(command.engine)
        engine.pause()
        self.clock.call_after(self._world.pause_s, self._updated, command)

    def _updated(self, command: UpdateWeights) -> None:
        engine = self.launcher.engine(command.engine)
        if engine is None:
            return
        if not command.keep_kv:
            engine.flush_kv()
        engine.resume()
        self._deliver(
            EngineUpdated(time_s=self.clock.now_s, engine=command.engine, version=command.version)
        )
