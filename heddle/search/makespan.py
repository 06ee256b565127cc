"""The makespan of a rollout, without a journal, metrics or files."""

from collections.abc import Sequence

from heddle.garbage import seldom_collected
from heddle.policies.errors import policy_errors
from heddle.setup import RunSetup
from heddle.simulation import COLLECT_EVERY
from heddle_core.commands import Command
from heddle_core.events import Event, TrajectoryFinished
from heddle_core.journal import Sink
from heddle_rollout.core import RecordedCore
from heddle_sim.rollout import simulate_rollout


class PassedError(Exception):
    """A simulation has passed the makespan that it had to beat."""


def simulated_makespan_s(setup: RunSetup, stop_s: float = float("inf")) -> float:
    """Simulate a set-up and return its makespan in seconds; infinite where it passes `stop_s`."""
    end_s = 0.0

    def note(event: Event, _: Sequence[Command]) -> None:
        nonlocal end_s
        if event.time_s > stop_s:
            raise PassedError
        if event.__class__ is TrajectoryFinished:
            end_s = event.time_s

    try:
        _simulate(setup, note)
    except PassedError:
        return float("inf")
    return end_s


def simulated_ends_s(setup: RunSetup) -> list[float]:
    """Simulate a set-up and return when the last trajectory of each group ends, in seconds."""
    ends_s: dict[str, float] = {}
    group_of = {script.id: script.group for script in setup.workload.scripts}

    def note(event: Event, _: Sequence[Command]) -> None:
        if isinstance(event, TrajectoryFinished):
            ends_s[group_of[event.trajectory]] = event.time_s

    _simulate(setup, note)
    return list(ends_s.values())


def _simulate(setup: RunSetup, note: Sink) -> None:
    core = RecordedCore(setup.controller(), note)
    with seldom_collected(COLLECT_EVERY), policy_errors(setup.policy):
        simulate_rollout(setup.workload.scripts, core, setup.simulation)
