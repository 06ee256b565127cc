"""Pin all samples of a prompt where the first of them was placed."""

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.parts.placement.one_by_one import OneByOne
from heddle_core.parts.placement.sticky import pinned
from heddle_core.policy import TrajectoryView, View


class StickyGroup(OneByOne):
    """A known trajectory stays on its engine, a new sample joins the others of its prompt.

    Affinity by KV prefix with the prompt in the prefix: samples of a prompt share it. The first
    sample of a prompt goes to the fewest steps in flight, the first of equals. When all arrive at
    once, that deals prompts to the engines in turn. A prompt is forgotten when its last placed
    sample has finished, or when its engine accepts no more work.
    """

    def __init__(self) -> None:
        self._engines: dict[GroupId, EngineId] = {}
        self._placed: dict[GroupId, dict[TrajectoryId, None]] = {}
        """Unfinished samples of each prompt that were placed here."""

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the pinned engine, else that of the prompt, else the least loaded one."""
        home = pinned(t, view)
        if home is not None:
            return home
        engine = self._engines.get(t.group)
        if engine is None or not view.engine(engine).accepting:
            engine = self._engines[t.group] = view.fewest_in_flight().id
        self._placed.setdefault(t.group, {})[t.id] = None
        return engine

    def finished(self, t: TrajectoryView) -> None:
        """Forget the trajectory, and its prompt with the last sample."""
        placed = self._placed.get(t.group)
        if placed is None:
            return
        placed.pop(t.id, None)
        if not placed:
            del self._placed[t.group], self._engines[t.group]
