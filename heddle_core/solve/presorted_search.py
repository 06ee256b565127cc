"""Exact placement without a table: search on the makespan, fill engines greedily.

For engines in a fixed order, fill each in turn with the longest prefix of the remaining
trajectories that it ends within ``C``. The makespan ``C`` is feasible exactly when this places all
of them: by monotone cost, a fill that has placed more so far can still place at least as much. So
``reach`` engine by engine decides one ``C``, and bisection finds the least. The result equals the
presorted DP's for any monotone cost, size-only or not.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from heddle_core.estimate.group_cost import FloatArray, IntArray, SegmentCost
from heddle_core.solve.presorted_dp import Partition


def search_partition(
    costs: Sequence[SegmentCost],
    trajectories: int,
    *,
    tolerance: float = 1e-9,
    factors: Sequence[float] = (),
) -> Partition:
    """Least makespan of `trajectories`, longest first, on engines `costs` in that order.

    With `factors`, one for each engine, groups end that many times as late as `costs` has it. The
    answer is within a share `tolerance` of the optimum. Raises ValueError without engines or when
    no finite makespan is enough.
    """
    if not costs:
        raise ValueError("placement needs at least one engine")
    if not trajectories:
        return Partition(sizes=(0,) * len(costs), makespan_s=0.0)
    engines = _Engines(costs, factors or (1.0,) * len(costs))
    low = engines.least_s()
    bounds = engines.fill(trajectories, low)
    limit = low
    while bounds[-1] < trajectories:
        low, limit = limit, 2 * limit
        if not np.isfinite(limit):
            raise ValueError("no finite makespan holds every trajectory")
        bounds = engines.fill(trajectories, limit)
    high = engines.makespan_s(bounds)
    while high - low > tolerance * high:
        limit = (low + high) / 2
        tried = engines.fill(trajectories, limit)
        if tried[-1] < trajectories:
            low = limit
        else:
            bounds, high = tried, min(engines.makespan_s(tried), limit)
    sizes = tuple(b - a for a, b in pairwise(bounds))
    return Partition(sizes=sizes, makespan_s=engines.makespan_s(bounds))


class _Engines:
    """Engines in order; those of one cost are estimated together, since there may be thousands."""

    def __init__(self, costs: Sequence[SegmentCost], factors: Sequence[float]) -> None:
        self._each = list(zip(costs, factors, strict=True))
        members: dict[int, list[int]] = {}
        for number, cost in enumerate(costs):
            members.setdefault(id(cost), []).append(number)
        self._alike: list[tuple[SegmentCost, IntArray, FloatArray]] = [
            (costs[mine[0]], np.array(mine), np.array([factors[number] for number in mine]))
            for mine in members.values()
        ]

    def least_s(self) -> float:
        """End of the longest trajectory alone, on the quickest engine."""
        head = np.array([0])
        return min(
            float((factor * cost.end_s(head, head + 1)).min()) for cost, _, factor in self._alike
        )

    def fill(self, trajectories: int, limit_s: float) -> list[int]:
        """Greedy fill within `limit_s`: bounds of the groups, one more than engines."""
        bounds = [0]
        at = 0
        for cost, factor in self._each:
            if at < trajectories:
                at = cost.reach(at, limit_s / factor)
            bounds.append(at)
        return bounds

    def makespan_s(self, bounds: Sequence[int]) -> float:
        """Latest estimated end over the groups between `bounds`."""
        edges = np.asarray(bounds, dtype=np.int64)
        return max(
            float((factor * cost.end_s(edges[mine], edges[mine + 1])).max())
            for cost, mine, factor in self._alike
        )
