"""Tasks to the GPU class that the user tagged them with: RollArt's rule."""

from heddle_core.ids import EngineId
from heddle_core.parts.placement.one_by_one import OneByOne
from heddle_core.parts.placement.sticky import pinned
from heddle_core.policy import PolicyContext, TrajectoryView, View


class TaggedAffinity(OneByOne):
    """A known trajectory stays; a new one goes to the GPU class of its task's tag.

    RollArt's hardware affinity (arXiv 2512.22560). The class is full when each of its engines has
    as many unfinished trajectories as slots. A trajectory whose class is full, or whose task has no
    tag, goes to the others; where all are full, to its own class. Among engines: the fewest
    unfinished trajectories for each slot, the first of equals.
    """

    def __init__(self, context: PolicyContext) -> None:
        """Take the tags of the context.

        Raises:
            ValueError: a tag names a class without a pool.
        """
        self._tags = context.tags
        for task, gpu in context.tags.items():
            if gpu not in context.pools:
                raise ValueError(
                    f"task {task!r} is tagged with the GPU class {gpu!r}, which has no pool; "
                    f"pools are of {', '.join(context.pools)}"
                )

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the home, or an engine of the tagged class, or of another while that is full."""
        home = pinned(t, view)
        if home is not None:
            return home
        tag = self._tags.get(t.task)
        mine = [e for e in view.engines if tag in (None, e.shape.gpu)]
        others = [e for e in view.engines if tag not in (None, e.shape.gpu)]
        for engines in (mine, others):
            free = [e for e in engines if e.sessions < e.max_running]
            if free:
                return min(free, key=lambda e: e.sessions / e.max_running).id
        return min(mine or others, key=lambda e: e.sessions / e.max_running).id
