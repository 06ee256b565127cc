"""Runs a training loop on an event loop: a driver with a trainer, and their end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from experiments.real_training.trainer import TrainedAgent
from heddle_core.commands import StartTrajectory, UpdateWeights
from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.agents import Agent
from heddle_rollout.clock import Clock
from heddle_rollout.driver import Driver
from heddle_rollout.engines import Launcher
from heddle_rollout.loop_driver import (
    LoopCore,
    LoopDriver,
    LoopServices,
    OnScored,
    OnStarted,
    OnUpdated,
)
from heddle_rollout.services import Predictions, Solver


class TrainingRun:
    """A loop on engines; made inside a running event loop."""

    def __init__(
        self,
        core: LoopCore,
        launcher: Launcher,
        clock: Clock,
        services: LoopServices,
        *,
        predictions: Predictions | None = None,
        solver: Solver | None = None,
        tool_capacity: int | None = None,
        report_interval_s: float,
        report_delay_s: float = 0.0,
        on_tokens_lost: Callable[[TrajectoryId, int], None] = lambda trajectory, tokens: None,
    ) -> None:
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = LoopDriver(core, clock, services, on_over=self._end)
        self.driver = Driver(
            core,
            launcher,
            clock,
            predictions=predictions,
            solver=solver,
            tool_capacity=tool_capacity,
            report_interval_s=report_interval_s,
            report_delay_s=report_delay_s,
            on_idle=self._loop.end_if_over,
            on_error=self.fail,
            on_tokens_lost=on_tokens_lost,
            handlers=self._loop.handlers,
            expects_agents=self._loop.expects_agents,
        )
        self._loop.attach(self.driver)

    async def run(self) -> None:
        """Return when the loop is over. Engines and trainer are left as they are.

        Raises:
            StuckError: no event can follow, and trajectories are unfinished.
            TrainerFailedError: the trainer cannot go on.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        try:
            self._loop.start()
            await self._over
        finally:
            self.driver.close()
            loop.set_exception_handler(None)

    def fail(self, error: BaseException) -> None:
        """End the run with an error; the first one counts."""
        if not self._over.done():
            self._over.set_exception(error)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run after a failed callback, which asyncio would only log."""
        loop.default_exception_handler(context)
        if "handle" in context:
            self.driver.service_failed(context["exception"])


@dataclass(frozen=True, slots=True)
class TaskEnvironments:
    """Environments that start at once, in this process; implements `Environments`."""

    clock: Clock
    make: Callable[[TrajectoryId, GroupId], Agent]

    def start(self, command: StartTrajectory, then: OnStarted) -> None:
        agent = self.make(command.trajectory, command.group)
        self.clock.call_after(0.0, then, command, agent)


@dataclass(frozen=True, slots=True)
class OwnRewards:
    """Rewards that agents compute themselves; implements `Rewards`."""

    clock: Clock

    def score(self, start: StartTrajectory, agent: Agent, then: OnScored) -> None:
        reward = cast(TrainedAgent, agent).reward
        self.clock.call_after(0.0, then, agent.id, reward)


@dataclass(frozen=True, slots=True)
class WeightPush:
    """Lets engines load the trainer's newest checkpoint; implements `WeightUpdates`."""

    weights: Callable[[], Path]

    def update(self, command: UpdateWeights, driver: Driver, then: OnUpdated) -> None:
        if command.mode == "interrupt" and command.engine in driver.engines:
            driver.abort_running(command.engine)
        driver.update_engine(
            command.engine,
            command.version,
            str(self.weights()),
            keep_kv=command.keep_kv,
            then=partial(then, command),
        )
