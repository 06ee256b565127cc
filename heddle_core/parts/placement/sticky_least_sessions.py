"""Pin a trajectory where it first ran, counting those in a tool as load too."""

from heddle_core.ids import EngineId
from heddle_core.parts.placement.one_by_one import OneByOne
from heddle_core.parts.placement.sticky import pinned
from heddle_core.policy import TrajectoryView, View


class StickyLeastSessions(OneByOne):
    """A known trajectory stays; a new one goes to the engine with the fewest unfinished ones.

    Steps in flight leave out trajectories in a tool, which return. SkyRL since June 2026 and
    prime-rl since September 2026 (`sticky_least_loaded`) count them.
    """

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the pinned engine, or the one with the fewest sessions, the first of equals."""
        home = pinned(t, view)
        if home is not None:
            return home
        engines = view.engines
        best = engines[0]
        fewest = best.sessions
        for engine in engines:
            if engine.sessions < fewest:
                best, fewest = engine, engine.sessions
        return best.id
