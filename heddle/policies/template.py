"""The file that `heddle policies new` writes: a whole policy of one's own, to be changed."""

from string import Template
from typing import Final

_TEXT: Final = Template('''"""A policy of your own: $name:policy.

Bases decide as verl and slime do in the Heddle paper; override what is to differ. Views have
only what was observed: docs/policy-attributes.md lists all that a part may read.
"""

from dataclasses import replace

from heddle_core.bases import PlacementBase, SchedulerBase
from heddle_core.ids import EngineId
from heddle_core.policy import Placement, Policy, PolicyContext, Scheduler, TrajectoryView, View
from heddle_core.presets import verl


class ${camel}Placement(PlacementBase):
    """Each step runs where its KV is, unless another engine has much less to do."""

    def __init__(self, most_more: int) -> None:
        self.most_more = most_more

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the engine of the next step of `t`: one of `view.engines`."""
        least = view.fewest_in_flight()
        if t.home is None or not view.engine(t.home).accepting:
            return least.id
        more = view.engine(t.home).in_flight - least.in_flight
        return least.id if more > self.most_more else t.home


class ${camel}Scheduler(SchedulerBase):
    """Trajectories that have generated most go first."""

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return the urgency of the next step of `t`; the largest runs first."""
        return float(t.output_tokens)


def placement(context: PolicyContext) -> Placement:
    """Make the placement: verl+$name:placement."""
    return ${camel}Placement(most_more=context.max_running // 2)


def scheduler(context: PolicyContext) -> Scheduler:
    """Make the scheduler: verl+$name:scheduler."""
    return ${camel}Scheduler()


def policy(context: PolicyContext) -> Policy:
    """Make the whole policy: $name:policy."""
    return replace(verl(context), placement=placement(context), scheduler=scheduler(context))
''')


def policy_source(name: str) -> str:
    """Return the source of a module `name`, an identifier, with a policy and two parts."""
    camel = "".join(word.capitalize() for word in name.split("_")) or "Own"
    return _TEXT.substitute(name=name, camel=camel)
