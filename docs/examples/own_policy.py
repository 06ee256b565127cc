"""A policy of one's own: samples of a prompt live together, and those furthest on go first."""

from collections.abc import Sequence
from dataclasses import replace

from heddle_core.ids import EngineId, GroupId
from heddle_core.policy import Placement, Policy, PolicyContext, TrajectoryView, View
from heddle_core.presets import verl


class GroupHome:
    """Placement: the first sample of a prompt chooses the emptiest engine, its siblings follow."""

    needs_all = False  # True: `assign` gets all trajectories of the rollout at once

    def __init__(self) -> None:
        self._homes: dict[GroupId, EngineId] = {}

    def assign(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float], view: View
    ) -> Sequence[EngineId]:
        """Homes for all at once; not asked for while `needs_all` is False."""
        return [self.place(t, view) for t in ts]

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """The home of one step that can run: the group's, if that engine still takes work."""
        home = self._homes.get(t.group)
        if home is None or not view.engine(home).accepting:
            home = self._homes[t.group] = min(view.engines, key=lambda e: e.sessions).id
        return home

    def finished(self, t: TrajectoryView) -> None:
        """Nothing to forget: homes are kept by group."""


class FurthestFirst:
    """Scheduler: a queue is ordered by the number of steps done."""

    preemptive = False

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Larger goes first; ties go by arrival in the queue."""
        return float(t.step)


def group_home(context: PolicyContext) -> Placement:
    """A part, to be put into any preset: verl+own_policy:group_home."""
    return GroupHome()


def policy(context: PolicyContext) -> Policy:
    """A whole policy, here from the parts of another: own_policy:policy."""
    return replace(verl(context), placement=GroupHome(), scheduler=FurthestFirst())
