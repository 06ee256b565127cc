"""Fewest steps in flight, chosen anew for every step: only load counts, not the KV prefix."""

from mypy_extensions import mypyc_attr

from heddle_core.ids import EngineId
from heddle_core.parts.placement.one_by_one import OneByOne
from heddle_core.policy import TrajectoryView, View


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastLoaded(OneByOne):
    """Every step goes to the engine with the fewest steps in flight: slime in the Heddle paper."""

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the least loaded engine, wherever the trajectory's KV prefix is."""
        return view.fewest_in_flight().id
