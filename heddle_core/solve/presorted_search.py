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

from heddle_core.estimate.group_cost import SegmentCost
from heddle_core.solve.presorted_dp import Partition


def search_partition(
    costs: Sequence[SegmentCost], trajectories: int, *, tolerance: float = 1e-9
) -> Partition:
    """Least makespan of `trajectories`, longest first, on engines `costs` in that order.

    The answer is within a share `tolerance` of the optimum. Raises ValueError without engines or
    when no finite makespan is enough.
    """
    if not costs:
        raise ValueError("placement needs at least one engine")
    if not trajectories:
        return Partition(sizes=(0,) * len(costs), makespan_s=0.0)
    low = min(float(c.end_s(np.array([0]), np.array([1]))[0]) for c in _distinct(costs))
    bounds = fill(costs, trajectories, low)
    limit = low
    while bounds[-1] < trajectories:
        low, limit = limit, 2 * limit
        if not np.isfinite(limit):
            raise ValueError("no finite makespan holds every trajectory")
        bounds = fill(costs, trajectories, limit)
    high = makespan_s(costs, bounds)
    while high - low > tolerance * high:
        limit = (low + high) / 2
        tried = fill(costs, trajectories, limit)
        if tried[-1] < trajectories:
            low = limit
        else:
            bounds, high = tried, min(makespan_s(costs, tried), limit)
    sizes = tuple(b - a for a, b in pairwise(bounds))
    return Partition(sizes=sizes, makespan_s=makespan_s(costs, bounds))


def fill(costs: Sequence[SegmentCost], trajectories: int, limit_s: float) -> list[int]:
    """Greedy fill within `limit_s`: bounds of the groups, ``len(costs) + 1`` of them."""
    bounds = [0]
    at = 0
    for cost in costs:
        if at < trajectories:
            at = cost.reach(at, limit_s)
        bounds.append(at)
    return bounds


def makespan_s(costs: Sequence[SegmentCost], bounds: Sequence[int]) -> float:
    """Latest estimated end over the groups between `bounds`, one per engine of `costs`."""
    edges = np.asarray(bounds, dtype=np.int64)
    latest = 0.0
    for cost in _distinct(costs):
        mine = np.array([i for i, c in enumerate(costs) if c is cost])
        latest = max(latest, float(cost.end_s(edges[mine], edges[mine + 1]).max()))
    return latest


def _distinct(costs: Sequence[SegmentCost]) -> list[SegmentCost]:
    return list({id(c): c for c in costs}.values())
