"""Pin a trajectory where it first ran: the KV prefix decides, load only at the first step."""

from mypy_extensions import mypyc_attr

from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.parts.placement.one_by_one import OneByOne
from heddle_core.policy import TrajectoryView, View


def pinned(t: TrajectoryView, view: View) -> EngineId | None:
    """Return `t`'s home while it accepts work.

    The pin *is* the home, not a second table, so that a migration moves the pin.
    """
    home = t.home
    if home is not None and view.engine(home).accepting:
        return home
    return None


@mypyc_attr(allow_interpreted_subclasses=True)
class Sticky(OneByOne):
    """A known trajectory stays on its engine; a new one goes to the fewest steps in flight.

    As in verl's balancer: a least-recently-used table of at most `capacity` trajectories, first of
    equals on a miss, no rebalancing. A trajectory evicted from a full table counts as new.
    `capacity=None` never forgets an unfinished trajectory.
    """

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity of the pin table is {capacity}; give at least 1")
        self._capacity = capacity
        self._recent: dict[TrajectoryId, None] = {}

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the pinned engine, or the least loaded one without a pin."""
        capacity = self._capacity
        if capacity is None:
            return pinned(t, view) or view.fewest_in_flight().id
        recent = self._recent
        known = t.id in recent
        if known:
            del recent[t.id]
        recent[t.id] = None
        if len(recent) > capacity:
            del recent[next(iter(recent))]
        return (pinned(t, view) if known else None) or view.fewest_in_flight().id

    def finished(self, t: TrajectoryView) -> None:
        """Drop the pin."""
        self._recent.pop(t.id, None)
