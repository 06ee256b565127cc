"""Pinned while the engines are even, least loaded once they are not."""

from heddle_core.ids import EngineId
from heddle_core.parts.placement.one_by_one import OneByOne
from heddle_core.parts.placement.sticky import pinned
from heddle_core.policy import TrajectoryView, View


class HybridRatio(OneByOne):
    """Least loaded while the largest load exceeds `ratio` times the smallest, else pinned.

    The literal reading of verl* in the Heddle paper (arXiv 2603.28101, baselines: skew as max/min,
    with 32 as its example). Load is steps in flight. A smallest load of 0 counts as 1: otherwise
    the ratio would be infinite, and every idle engine would switch the pin off. New trajectories,
    and those without an engine, go to the least loaded one.
    """

    def __init__(self, ratio: float = 32.0) -> None:
        if not ratio >= 1.0:
            raise ValueError(f"ratio of largest to smallest load is {ratio}; give at least 1")
        self._ratio = ratio

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the home unless there is none or the loads are skewed."""
        engines = view.engines
        best = engines[0]
        fewest = most = best.in_flight
        for engine in engines:
            load = engine.in_flight
            if load < fewest:
                best, fewest = engine, load
            elif load > most:
                most = load
        if most > self._ratio * max(fewest, 1):
            return best.id
        return pinned(t, view) or best.id
