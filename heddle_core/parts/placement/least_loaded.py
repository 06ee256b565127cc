"""Fewest steps in flight, chosen anew for every step: only load counts, not the KV prefix."""

from heddle_core.ids import EngineId
from heddle_core.parts.placement.one_by_one import OneByOne
from heddle_core.policy import TrajectoryView, View


def least_loaded(view: View) -> EngineId:
    """Return the engine with the fewest steps queued or running, the first of equals.

    A plain loop on purpose: this runs once per step over every engine, and a list or a key function
    would be slower.
    """
    engines = view.engines
    best = engines[0]
    fewest = best.in_flight
    for engine in engines:
        if engine.in_flight < fewest:
            best, fewest = engine, engine.in_flight
    return best.id


class LeastLoaded(OneByOne):
    """Every step goes to the engine with the fewest steps in flight: slime in the Heddle paper."""

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the least loaded engine, wherever the trajectory's KV prefix is."""
        return least_loaded(view)
