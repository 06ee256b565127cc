"""The makespan of a rollout, without a journal, metrics or files."""

from collections.abc import Sequence

from heddle.garbage import seldom_collected
from heddle.policies.errors import policy_errors
from heddle.setup import RunSetup
from heddle.simulation import COLLECT_EVERY
from heddle_core.commands import Command
from heddle_core.events import Event, TrajectoryFinished
from heddle_rollout.core import RecordedCore
from heddle_sim.rollout import simulate_rollout


class PassedError(Exception):
    """A simulation has passed the makespan that it had to beat."""


def simulated_makespan_s(setup: RunSetup, stop_s: float = float("inf")) -> float:
    """Simulate a set-up and return its makespan in seconds; infinite where it passes `stop_s`."""
    return simulated(setup, stop_s)[0]


def simulated(setup: RunSetup, stop_s: float) -> tuple[float, int]:
    """The same, and the most steps that any engine has run at once."""
    end_s = 0.0

    def note(event: Event, _: Sequence[Command]) -> None:
        nonlocal end_s
        if event.time_s > stop_s:
            raise PassedError
        if event.__class__ is TrajectoryFinished:
            end_s = event.time_s

    controller = setup.controller()
    core = RecordedCore(controller, note)
    try:
        with seldom_collected(COLLECT_EVERY), policy_errors(setup.policy):
            simulate_rollout(setup.workload.scripts, core, setup.simulation)
    except PassedError:
        end_s = float("inf")
    return end_s, controller.ledger.most_running
