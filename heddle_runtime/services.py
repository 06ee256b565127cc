"""What a rollout asks for besides engines and tools: predictions, and plans that take long."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from heddle_core.commands import Predict, SolvePlan
from heddle_core.plans import ResourcePlan
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
