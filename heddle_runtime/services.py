"""What a rollout asks for besides engines and tools: predictions, and plans that take long."""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import TypeAlias

from heddle_core.commands import Predict, SolvePlan
from heddle_core.plans import PlanProblem, ResourcePlan
from heddle_runtime.clock import RunClock

Predictions: TypeAlias = Callable[[Predict], Awaitable[float | None]]
"""A prediction service. When it cannot tell, its answer is None and the last estimate holds."""
Solver: TypeAlias = Callable[[SolvePlan], Awaitable[ResourcePlan]]


def own_estimates(clock: RunClock, seconds: float) -> Predictions:
    """Return a service that gives the core's own estimate back after `seconds`."""

    async def predict(command: Predict) -> float | None:
        await clock.sleep(seconds)
        return command.estimate

    return predict


def charged_solver(clock: RunClock) -> Solver:
    """Return a solver that takes as long as the problem says, as the simulator's does."""

    async def solve(command: SolvePlan) -> ResourcePlan:
        await clock.sleep(command.problem.charged_s)
        return command.problem.solve()

    return solve


class WorkerSolver:
    """Searches in another process, so that the event loop goes on meanwhile."""

    def __init__(self) -> None:
        # Spawned, not forked: a copy of a process whose libraries run threads may hang.
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_tie)

    async def __call__(self, command: SolvePlan) -> ResourcePlan:
        """Search for a plan."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _solve, command.problem)

    def close(self) -> None:
        """End the other process."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _tie() -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to Heddle; and end when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_heddle, daemon=True).start()


def _end_with_heddle() -> None:
    heddle = parent_process()
    if heddle is not None:
        heddle.join()
        os._exit(1)


def _solve(problem: PlanProblem) -> ResourcePlan:
    return problem.solve()
