"""Services of a rollout besides engines: predictions, searches for plans, places for tool calls.

Predictions and searches answer by a call of their `ServiceListener`, once for each request and
never from inside the request.
"""

from collections.abc import Callable
from typing import Protocol

from heddle_core.commands import Predict, SolvePlan
from heddle_core.ids import TrajectoryId
from heddle_core.plans import ResourcePlan
from heddle_rollout.clock import Clock


class ServiceListener(Protocol):
    """Receives the answers of services; the driver."""

    def predicted(self, command: Predict, remaining_tokens: float | None) -> None:
        """Answer of a prediction service. None: it failed, and the last estimate holds."""

    def plan_solved(self, command: SolvePlan, plan: ResourcePlan) -> None:
        """Answer of a solver."""

    def service_failed(self, error: BaseException) -> None:
        """A service has a defect, which ends the run with this error."""


class Predictions(Protocol):
    """A prediction service."""

    def predict(self, command: Predict, listener: ServiceListener) -> None:
        """Predict a trajectory's remaining tokens. Ends in `predicted` or `service_failed`."""


class Solver(Protocol):
    """Searches for resource plans."""

    def solve(self, command: SolvePlan, listener: ServiceListener) -> None:
        """Search for a plan. Ends in `plan_solved` or `service_failed`."""


class CoreEstimates:
    """Returns the core's own estimate after `prediction_s`, the latency of a service."""

    def __init__(self, clock: Clock, prediction_s: float = 0.0) -> None:
        self._clock, self._prediction_s = clock, prediction_s

    def predict(self, command: Predict, listener: ServiceListener) -> None:
        self._clock.call_after(self._prediction_s, listener.predicted, command, command.estimate)


class ChargedSolver:
    """Searches in place, after the seconds that the problem charges, or `planning_s` if given."""

    def __init__(self, clock: Clock, planning_s: float | None = None) -> None:
        self._clock, self._planning_s = clock, planning_s

    def solve(self, command: SolvePlan, listener: ServiceListener) -> None:
        given_s = self._planning_s
        seconds = command.problem.charged_s if given_s is None else given_s
        self._clock.call_after(seconds, self._search, command, listener)

    def _search(self, command: SolvePlan, listener: ServiceListener) -> None:
        listener.plan_solved(command, command.problem.solve())


class CallPool(Protocol):
    """Places for calls of some tools; implemented by `heddle_sim.services.ServicePool`."""

    def acquire(self, trajectory: TrajectoryId, call: int, then: Callable[[float], None]) -> None:
        """Take a place, at once or when one is free; `then` gets the seconds until the call begins.

        `call` is the number of the call in its trajectory.
        """

    def release(self, trajectory: TrajectoryId) -> None:
        """Give the place back, or stop waiting for one; nothing without either."""
