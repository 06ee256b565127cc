"""Runs one rollout on an event loop: a driver, its end, and its early end."""

import asyncio
from collections.abc import Sequence
from typing import Any

from heddle_rollout.agents import Agent
from heddle_rollout.core import Core
from heddle_rollout.driver import ROLLOUT, Driver
from heddle_rollout.engines import Launcher
from heddle_runtime.clock import RunClock

DRAIN_S = 5.0
"""Seconds that an interrupted run waits for engines to hand over the tokens of running steps."""


class RolloutRun:
    """One rollout of `agents`; made inside a running event loop."""

    def __init__(
        self,
        agents: Sequence[Agent],
        core: Core,
        launcher: Launcher,
        clock: RunClock,
        **options: Any,
    ) -> None:
        """`options` are those of the driver."""
        self._agents, self._clock = agents, clock
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.driver = Driver(
            core,
            launcher,
            clock,
            on_idle=self._on_idle,
            on_error=self._on_error,
            **options,
        )

    async def run(self) -> None:
        """Return when all trajectories are finished and no tool call runs.

        Engines are left as they are; the launcher ends them.

        Raises:
            StuckError: no event can follow, and trajectories are unfinished.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        self.driver.start()
        self.driver.open_rollout(ROLLOUT, trajectories=len(self._agents))
        for agent in self._agents:
            self.driver.admit(agent)
        try:
            await self._over
        finally:
            self.driver.close()
            loop.set_exception_handler(None)

    async def interrupt(self) -> None:
        """End early: engines hand over tokens of running steps, all trajectories are cancelled."""
        self.driver.interrupt(DRAIN_S * self._clock.speed)
        await asyncio.wait([self._over])

    def _on_idle(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _on_error(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run after a failed callback, which asyncio would only log."""
        loop.default_exception_handler(context)
        if "handle" in context:
            self.driver.service_failed(context["exception"])
