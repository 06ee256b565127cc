"""The makespan of a rollout, without a journal, metrics or files."""

import math

from heddle.memory import many_objects
from heddle.policies.errors import policy_errors
from heddle.setup import RunSetup
from heddle_core.journal import Sink
from heddle_rollout.core import RecordedCore
from heddle_sim.rollout import simulate_rollout


def simulated(
    setup: RunSetup, stop_s: float = math.inf, sink: Sink | None = None
) -> tuple[float, int]:
    """The makespan of a set-up in seconds, infinite where it passes `stop_s`, and the most steps
    that any engine has run at once. Events and commands go to a `sink`."""
    controller = setup.controller()
    core = controller if sink is None else RecordedCore(controller, sink)
    with many_objects(), policy_errors(setup.policy):
        ended = simulate_rollout(setup.workload.scripts, core, setup.simulation, stop_s=stop_s)
    ledger = controller.ledger
    return ledger.ended_s if ended else math.inf, ledger.most_running
