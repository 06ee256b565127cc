"""Any engine, where all share a store of KV: a step then loads its context wherever it runs."""

from heddle_core.ids import EngineId
from heddle_core.parts.placement.one_by_one import OneByOne
from heddle_core.parts.placement.sticky import pinned
from heddle_core.policy import PolicyContext, TrajectoryView, View


class SharedKv(OneByOne):
    """Every step goes to the fewest steps in flight where engines share a store of KV.

    Without one (`cluster.host_kv`), where another engine would prefill the context, a trajectory
    stays where it first ran.
    """

    def __init__(self, context: PolicyContext) -> None:
        costs = context.cost.by_shape.values()
        self._shared = all(cost.load_s is not None for cost in costs)

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the least loaded engine; without a store, the home if it accepts work."""
        home = None if self._shared else pinned(t, view)
        return home or view.fewest_in_flight().id
