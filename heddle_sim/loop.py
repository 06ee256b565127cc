"""Runs an RL loop in simulated time: environments, rewards, a trainer and weight updates."""

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from simpy.core import EmptySchedule

from heddle_core.events import EngineReady
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.loop.commands import (
    AnyCommand,
    AssignGpus,
    StartTrajectory,
    Train,
    UpdateWeights,
)
from heddle_core.loop.events import AnyEvent
from heddle_rollout.agents import Agent
from heddle_rollout.clock import Clock
from heddle_rollout.core import Core
from heddle_rollout.driver import Driver, StuckError
from heddle_rollout.loop_driver import (
    LoopCore,
    LoopDriver,
    LoopServices,
    OnAssigned,
    OnScored,
    OnStarted,
    OnTrained,
    OnUpdated,
)
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_rollout.services import ChargedSolver, CoreEstimates
from heddle_sim.clock import SimEnvironment
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimLauncher
from heddle_trace.schema import TrajectoryScript


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """A service with a number of places: environments, or rewards.

    Raises:
        ValueError: no place, or times and rates out of range.
    """

    seconds: float = 0.0
    """Of one call."""
    spread_s: float = 0.0
    """Standard deviation of a normal distribution around it, cut at 0."""
    capacity: int | None = None
    """Calls at once; None: any number, as of a serverless service."""
    cold_start_s: float = 0.0
    """Added to every call of a service without limit."""
    failure_rate: float = 0.0
    """Share of calls that fail."""

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(
                f"a service needs a capacity of 1 or more, or none for no limit: {self.capacity}"
            )
        if not (self.seconds >= 0.0 and self.spread_s >= 0.0 and self.cold_start_s >= 0.0):
            raise ValueError("times of a service must be 0 s or more")
        if not 0.0 <= self.failure_rate < 1.0:
            raise ValueError(f"a failure rate is from 0 to below 1, not {self.failure_rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopWorld:
    """What the simulated loop has besides a rollout cluster; every time in seconds."""

    script: Callable[[GroupId, int], TrajectoryScript]
    """Sample of a prompt, by its number."""
    train_s: Callable[[Sequence[int]], float]
    """Training time of a batch, by the tokens of its trajectories."""
    update_s: float
    """From the end of training until engines have new weights."""
    pause_s: float
    """The part of it during which they generate nothing."""
    to_training_s: float = 0.0
    """Colocated: engines fall asleep, the trainer's state comes to the GPUs."""
    to_rollout_s: float = 0.0
    """Colocated: the way back."""
    environments: ServiceConfig = ServiceConfig()
    rewards: ServiceConfig = ServiceConfig()
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.pause_s <= self.update_s:
            raise ValueError(
                f"engines pause for 0 s to the whole update, {self.update_s} s, not {self.pause_s}"
            )


class _Service:
    """Calls with a capacity, in order of their requests."""

    def __init__(self, name: str, config: ServiceConfig, clock: Clock, seed: int) -> None:
        self._name, self._config, self._clock, self._seed = name, config, clock, seed
        self._running = 0
        self._waiting: deque[tuple[TrajectoryId, Callable[[TrajectoryId, bool], None]]] = deque()

    def call(self, trajectory: TrajectoryId, then: Callable[[TrajectoryId, bool], None]) -> None:
        """Call the service for a trajectory; `then` gets whether that succeeded."""
        capacity = self._config.capacity
        if capacity is not None and self._running >= capacity:
            self._waiting.append((trajectory, then))
        else:
            self._begin(trajectory, then)

    def _begin(self, trajectory: TrajectoryId, then: Callable[[TrajectoryId, bool], None]) -> None:
        config = self._config
        self._running += 1
        seconds, ok = config.seconds, True
        if config.spread_s or config.failure_rate:
            rng = self._rng(trajectory)
            seconds = max(0.0, seconds + config.spread_s * float(rng.standard_normal()))
            ok = float(rng.random()) >= config.failure_rate
        if config.capacity is None:
            seconds += config.cold_start_s
        self._clock.call_after(seconds, self._end, trajectory, then, ok)

    def _end(
        self, trajectory: TrajectoryId, then: Callable[[TrajectoryId, bool], None], ok: bool
    ) -> None:
        self._running -= 1
        if self._waiting:
            self._begin(*self._waiting.popleft())
        then(trajectory, ok)

    def _rng(self, trajectory: TrajectoryId) -> np.random.Generator:
        """Draws of a trajectory: the same under every regime."""
        digest = hashlib.sha256(f"{self._seed}/{self._name}/{trajectory}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little"))


class SimulatedServices:
    """What a loop has besides its rollouts, on any clock, with a launcher of simulated engines.

    Implements the protocols of `heddle_rollout.loop_driver`.
    """

    def __init__(self, launcher: SimLauncher, world: LoopWorld, clock: Clock) -> None:
        self._launcher, self._world, self._clock = launcher, world, clock
        self._environments = _Service("environment", world.environments, clock, world.seed)
        self._rewards = _Service("reward", world.rewards, clock, world.seed)
        self.training = False
        """Whether the trainer has the engines' GPUs."""

    @property
    def services(self) -> LoopServices:
        """For a `LoopDriver`."""
        return LoopServices(environments=self, rewards=self, trainer=self, updates=self, gpus=self)

    # -- environments, rewards, training ----------------------------------------------------------

    def start(self, command: StartTrajectory, then: OnStarted) -> None:
        """See `Environments`."""
        self._environments.call(
            command.trajectory, lambda _, ok: then(command, self._agent(command) if ok else None)
        )

    def _agent(self, command: StartTrajectory) -> ScriptedAgent:
        script = self._world.script(command.group, command.sample)
        return ScriptedAgent(
            script,
            self._clock,
            first_arrival_s=script.arrival_s,
            id_=command.trajectory,
            group=command.group,
        )

    def score(self, start: StartTrajectory, agent: Agent, then: OnScored) -> None:
        """See `Rewards`."""
        self._rewards.call(
            start.trajectory, lambda trajectory, ok: then(trajectory, 0.0 if ok else None)
        )

    def train(self, command: Train, agents: Sequence[Agent], then: OnTrained) -> None:
        """See `Trainer`."""
        tokens = [cast(ScriptedAgent, agent).last_context_tokens for agent in agents]
        self._clock.call_after(self._world.train_s(tokens), then, command.batch)

    # -- GPUs and weights -------------------------------------------------------------------------

    def assign(self, command: AssignGpus, driver: Driver, then: OnAssigned) -> None:
        """See `GpuSwitch`."""
        if command.role == "training":
            self.training = True
            for name in driver.engines:
                driver.abort_running(name)
                self.pause(name)
            self._clock.call_after(self._world.to_training_s, then, command)
        else:
            self._clock.call_after(self._world.to_rollout_s, self._resume, command, driver, then)

    def pause(self, name: EngineId) -> None:
        """Let an engine generate nothing."""
        engine = self._launcher.engine(name)
        if engine is not None:
            engine.pause()

    def _resume(self, command: AssignGpus, driver: Driver, then: OnAssigned) -> None:
        self.training = False
        for name in driver.engines:
            engine = self._launcher.engine(name)
            if engine is not None:
                engine.flush_kv()
                engine.resume()
        then(command)

    def update(self, command: UpdateWeights, driver: Driver, then: OnUpdated) -> None:
        """See `WeightUpdates`."""
        delay_s = self._world.update_s - self._world.pause_s
        self._clock.call_after(delay_s, self._pause_for_update, command, driver, then)

    def _pause_for_update(self, command: UpdateWeights, driver: Driver, then: OnUpdated) -> None:
        engine = self._launcher.engine(command.engine)
        if engine is None:
            return  # EngineFailed or EngineStopped has ended the command
        if command.mode == "interrupt":
            driver.abort_running(command.engine)
        engine.pause()
        self._clock.call_after(self._world.pause_s, self._update_done, command, then)

    def _update_done(self, command: UpdateWeights, then: OnUpdated) -> None:
        engine = self._launcher.engine(command.engine)
        if engine is None:
            return
        if not command.keep_kv:
            engine.flush_kv()
        engine.resume()
        then(command)


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
        self._core = core
        self._stop: list[object] = []
        self._errors: list[BaseException] = []
        self.env = SimEnvironment()
        self.clock = clock = self.env.calendar
        self.launcher = SimLauncher(config, clock)
        self._services = SimulatedServices(self.launcher, world, clock)
        self._loop = LoopDriver(
            core, clock, self._services.services, on_over=lambda: self._stop.append(None)
        )
        self.driver = Driver(
            # Its events and commands are more than a rollout's; `carry_out` has the rest.
            cast(Core, self),
            self.launcher,
            clock,
            predictions=CoreEstimates(clock, config.prediction_s),
            solver=ChargedSolver(clock, config.planning_s),
            tool_capacity=config.tool_capacity,
            report_interval_s=config.report_interval_s,
            report_delay_s=config.report_delay_s,
            on_idle=self._loop.end_if_over,
            on_error=self._failed,
            on_lost=on_lost,
            carry_out=self._loop.carry_out,
        )
        self._loop.attach(self.driver)

    @property
    def deadline_s(self) -> float | None:
        """That of the loop's core; see `Core`."""
        return self._core.deadline_s

    def handle(self, event: AnyEvent) -> Sequence[AnyCommand]:
        """Hand an event to the loop's core; see `Core`."""
        commands = self._core.handle(event)
        if self._services.training and isinstance(event, EngineReady):
            self._services.pause(event.engine)
        return commands

    def run(self) -> None:
        """Let time pass until the loop is over.

        Raises:
            StuckError: nothing is left to happen before that.
        """
        self._loop.start()
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
