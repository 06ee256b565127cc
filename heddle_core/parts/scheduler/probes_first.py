"""Seer's order: one probe of each group first, then groups that are estimated to be long."""

from typing import Final

from heddle_core.ids import GroupId, RolloutId, TrajectoryId
from heddle_core.policy import TrajectoryView

_PROBES_FIRST: Final = 1e9  # more tokens than any trajectory makes
_OPEN_ROLLOUTS: Final = 8


class ProbesFirst:
    """Probes by output so far, the least first; others by estimated total, the longest first.

    The probe of a group is the first of its trajectories that can run (Seer, arXiv 2511.14617).
    Probes go before all others, so that the lengths of groups become known early. Meant for the
    predictor `group`, which takes an unknown group for a long one. It never evicts: an order
    changes at the end of a step, or of a chunk of it.

    Probes are forgotten with the eighth rollout after theirs.
    """

    preemptive = False

    def __init__(self) -> None:
        self._probes: dict[RolloutId, dict[GroupId, TrajectoryId]] = {}

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return the estimated total; of a probe, what puts it before all others."""
        probes = self._probes.get(t.rollout)
        if probes is None:
            probes = self._probes[t.rollout] = {}
            if len(self._probes) > _OPEN_ROLLOUTS:
                del self._probes[next(iter(self._probes))]
        if probes.setdefault(t.group, t.id) == t.id:
            return _PROBES_FIRST - t.output_tokens
        return t.output_tokens + remaining_tokens
