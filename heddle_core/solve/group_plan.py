"""A plan as numbers: a TP degree and a contiguous group for each engine, and how good it can be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from heddle_core.estimate.group_cost import SegmentCost


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Engine `e` has ``tps[e]`` GPUs and the sorted trajectories ``bounds[e]:bounds[e + 1]``."""

    tps: tuple[int, ...]
    bounds: tuple[int, ...]
    makespan_s: float
    bound_s: float = 0.0
    """Proven: no contiguous plan of the same costs and GPUs ends earlier. 0 where nothing is."""

    def sizes(self) -> tuple[int, ...]:
        """Members of each group."""
        return tuple(b - a for a, b in pairwise(self.bounds))

    def tp_mix(self) -> dict[int, int]:
        """Engines of each TP degree, largest degree first."""
        return {tp: self.tps.count(tp) for tp in sorted(set(self.tps), reverse=True)}


def ends_s(
    costs: Mapping[int, SegmentCost], tps: Sequence[int], bounds: Sequence[int]
) -> tuple[float, ...]:
    """Believed end of every group."""
    edges, degrees = np.asarray(bounds, dtype=np.int64), np.asarray(tps, dtype=np.int64)
    ends = np.zeros(len(degrees))
    for tp, cost in costs.items():
        mine = np.flatnonzero(degrees == tp)
        if len(mine):
            ends[mine] = cost.end_s(edges[mine], edges[mine + 1])
    return tuple(ends.tolist())
