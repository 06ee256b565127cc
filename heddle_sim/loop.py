"""Runs an RL loop in simulated time: environments, rewards, a trainer and weight updates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from heddle_core.commands import (
    AccumulateGradients,
    AssignGpus,
    Command,
    StartTrajectory,
    Train,
    UpdateWeights,
)
from heddle_core.events import EngineReady, Event, TrajectoryFinished
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.loop.hybrid import HYBRID
from heddle_rollout.agents import Agent
from heddle_rollout.clock import Clock
from heddle_rollout.driver import Driver
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
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimLauncher
from heddle_sim.rollout import World
from heddle_sim.services import ServiceConfig, ServicePool
from heddle_trace.schema import TrajectoryScript


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopWorld:
    """What the simulated loop has besides a rollout cluster; every time in seconds."""

    script: Callable[[GroupId, int], TrajectoryScript]
    """Sample of a prompt, by its number."""
    train_s: Callable[[Sequence[int], bool], float]
    """Training time of a batch, or of its last part, by the tokens of its trajectories, and
    whether the hybrid pool trains too."""
    update_s: float
    """From the end of training until engines have new weights."""
    pause_s: float
    """The part of it during which they generate nothing."""
    to_training_s: float = 0.0
    """Until GPUs that both sides may have can train: their engines have ended or sleep."""
    to_rollout_s: float = 0.0
    """The way back."""
    switch_failure_rate: float = 0.0
    """Share of the moves of a hybrid pool that fail, so that its GPUs return to where they were."""
    switch_timeout_s: float = 0.0
    """Until such a failure is noticed."""
    environments: ServiceConfig = field(default_factory=ServiceConfig)
    """Their start."""
    alive: int | None = None
    """Environments at once, from the request of their start until their trajectory has ended; None:
    no limit."""
    rewards: ServiceConfig = field(default_factory=ServiceConfig)
    accumulate_s: Callable[[Sequence[int], bool], float] | None = None
    """Time of the gradients of another part, likewise; None: no regime asks for them."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.pause_s <= self.update_s:
            raise ValueError(
                f"engines pause for 0 s to the whole update, {self.update_s} s, not {self.pause_s}"
            )


class SimulatedServices:
    """What a loop has besides its rollouts, on any clock, with a launcher of simulated engines.

    Implements the protocols of `heddle_rollout.loop_driver`.
    """

    def __init__(self, launcher: SimLauncher, world: LoopWorld, clock: Clock) -> None:
        self._launcher, self._world, self._clock = launcher, world, clock
        self.environments = ServicePool("environment", world.environments, clock, world.seed)
        self.rewards = ServicePool("reward", world.rewards, clock, world.seed)
        alive = ServiceConfig(capacity=world.alive)
        self.alive = None if world.alive is None else ServicePool("alive", alive, clock, world.seed)
        """Environments from their start to the end of their trajectory; None: no limit."""
        self.training = False
        """Whether the trainer has the GPUs of all engines."""
        self._hybrid_trains = True
        """Whether the trainer has those of the hybrid pool."""
        self._switches = 0
        """Moves of the hybrid pool that were asked for."""
        switch = ServiceConfig(
            failure_rate=world.switch_failure_rate, timeout_s=world.switch_timeout_s
        )
        self._switch = ServicePool("switch", switch, clock, world.seed)

    @property
    def services(self) -> LoopServices:
        """For a `LoopDriver`."""
        return LoopServices(
            environments=self, rewards=self, trainer=self, updates=self, parts=self, gpus=self
        )

    # -- environments, rewards, training ----------------------------------------------------------

    def start(self, command: StartTrajectory, then: OnStarted) -> None:
        if self.alive is None:
            self._start(command, then)
        else:
            self.alive.acquire(command.trajectory, 0, lambda _: self._start(command, then))

    def _start(self, command: StartTrajectory, then: OnStarted) -> None:
        script = self._world.script(command.group, command.sample)

        def started(trajectory: TrajectoryId, ok: bool) -> None:
            if not ok:
                self.ended(trajectory)
            then(command, self._agent(command, script) if ok else None)

        self.environments.call(command.trajectory, started, script.env_start_s or 0.0)

    def _agent(self, command: StartTrajectory, script: TrajectoryScript) -> ScriptedAgent:
        return ScriptedAgent(
            script,
            self._clock,
            first_arrival_s=script.arrival_s,
            id_=command.trajectory,
            group=command.group,
        )

    def ended(self, trajectory: TrajectoryId) -> None:
        """Let go of an environment."""
        if self.alive is not None:
            self.alive.release(trajectory)

    def score(self, start: StartTrajectory, agent: Agent, then: OnScored) -> None:
        script = self._world.script(start.group, start.sample)
        reward = script.reward or 0.0

        def scored(trajectory: TrajectoryId, ok: bool) -> None:
            then(trajectory, reward if ok else None)

        self.rewards.call(start.trajectory, scored, script.reward_s or 0.0)

    def accumulate(
        self, command: AccumulateGradients, agents: Sequence[Agent], then: OnTrained
    ) -> None:
        accumulate_s = self._world.accumulate_s
        assert accumulate_s is not None, "this world has no time of gradients by part"
        seconds = accumulate_s(_tokens(agents), self._hybrid_trains)
        self._clock.call_after(seconds, then, command.batch)

    def train(self, command: Train, agents: Sequence[Agent], then: OnTrained) -> None:
        seconds = self._world.train_s(_tokens(agents), self._hybrid_trains)
        self._clock.call_after(seconds, then, command.batch)

    # -- GPUs and weights -------------------------------------------------------------------------

    def assign(self, command: AssignGpus, driver: Driver, then: OnAssigned) -> None:
        to_training = command.role == "training"
        seconds = self._world.to_training_s if to_training else self._world.to_rollout_s
        ok = True
        if command.pool == "hybrid":
            self._hybrid_trains = False
            seconds, ok = self._switch.drawn(TrajectoryId("hybrid"), self._switches, seconds)
            self._switches += 1
        elif to_training:
            self.training = True
            for name in driver.engines:
                driver.abort_running(name)
                self.pause(name)
        self._clock.call_after(seconds, self._assigned, command, ok, driver, then)

    def _assigned(self, command: AssignGpus, ok: bool, driver: Driver, then: OnAssigned) -> None:
        if command.pool == "hybrid":
            self._hybrid_trains = (command.role == "training") == ok
        elif command.role == "rollout":
            self.training = False
            for name in driver.engines:
                engine = self._launcher.engine(name)
                if engine is not None:
                    engine.flush_kv()
                    engine.resume()
        then(command, ok)

    def pause(self, name: EngineId) -> None:
        """Let an engine generate nothing."""
        engine = self._launcher.engine(name)
        if engine is not None:
            engine.pause()

    def update(self, command: UpdateWeights, driver: Driver, then: OnUpdated) -> None:
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
        engine.take_weights(command.version)
        engine.resume()
        then(command)


class LoopSimulation(World):
    """An RL loop in simulated time, on a simulated cluster."""

    def __init__(
        self,
        core: LoopCore,
        config: SimulationConfig,
        world: LoopWorld,
        *,
        on_tokens_lost: Callable[[TrajectoryId, int], None] = lambda trajectory, tokens: None,
        launcher: Callable[..., SimLauncher] = SimLauncher,
    ) -> None:
        """`on_tokens_lost` is called with the tokens of a step whose trajectory was cancelled."""
        super().__init__(config, partial(launcher, loaded=HYBRID))
        self._core = core
        self.services = SimulatedServices(self.launcher, world, self.clock)
        self._loop = LoopDriver(core, self.clock, self.services.services, on_over=self.stop)
        self.driver = self.driver_of(
            self,
            on_idle=self._loop.end_if_over,
            on_tokens_lost=on_tokens_lost,
            handlers=self._loop.handlers,
        )
        self._loop.attach(self.driver)

    @property
    def deadline_s(self) -> float | None:
        """That of the loop's core; see `Core`."""
        return self._core.deadline_s

    def handle(self, event: Event) -> Sequence[Command]:
        """Hand an event to the loop's core; see `Core`."""
        commands = self._core.handle(event)
        if isinstance(event, TrajectoryFinished):
            self.services.ended(event.trajectory)
        elif self.services.training and isinstance(event, EngineReady):
            self.services.pause(event.engine)
        return commands

    def run(self) -> None:
        """Let time pass until the loop is over.

        Raises:
            StuckError: nothing is left to happen before that.
        """
        self._loop.start()
        self.launcher.schedule_faults()
        self.run_while(lambda: not self._core.over, lambda: "the loop is not over")


def _tokens(agents: Sequence[Agent]) -> list[int]:
    """Tokens of the last context of trajectories, output included."""
    return [cast(ScriptedAgent, agent).last_context_tokens for agent in agents]
