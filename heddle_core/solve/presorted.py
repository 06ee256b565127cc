"""Presorted placement: which contiguous groups of the sorted trajectories go to which engine.

With trajectories sorted longest first, engines in a fixed order and ``end_j(k, i)`` the estimated
end of the group ``[k, i)`` on engine `j` (Heddle, arXiv 2603.28101: ``L_{k+1} * T * F(i - k)``),

    dp[i][1] = end_1(0, i)
    dp[i][j] = min over k <= i of max(dp[k][j - 1], end_j(k, i))

and ``dp[n][m]`` is the least makespan. Empty groups are allowed and end at 0. The i-th group of the
result belongs to the i-th engine given, so unequal engines are given largest first.

`search_partition` finds the same without a table: it fills each engine in turn with the longest
prefix of the remaining trajectories that it ends within ``C``. The makespan ``C`` is feasible
exactly when this places all of them: by monotone cost, a fill that has placed more so far can still
place at least as much. So ``reach`` engine by engine decides one ``C``, and bisection finds the
least. The result equals the recurrence's for any monotone cost, size-only or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from heddle_core.estimate.group_cost import FloatArray, IntArray, SegmentCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Contiguous groups of the sorted trajectories, one per engine, in the order of engines."""

    sizes: tuple[int, ...]
    makespan_s: float


def aggregate_short(lengths: FloatArray, *, below: float, unit: int) -> IntArray:
    """Positions where a group may begin or end, when short trajectories move in units.

    `lengths` descends. Those of at least `below` stand alone, the others in units of `unit`, the
    last of which may be smaller. Returns ascending cuts from 0 to ``len(lengths)``.
    """
    count = len(lengths)
    alone = int(np.searchsorted(-lengths, -below, side="right"))
    cuts = np.concatenate((np.arange(alone), np.arange(alone, count, unit), [count]))
    return cuts.astype(np.int64)


def every_cut(count: int) -> IntArray:
    """Cuts that aggregate nothing."""
    return np.arange(count + 1, dtype=np.int64)


def presorted_dp(costs: Sequence[SegmentCost], cuts: IntArray) -> Partition:
    """Solve the recurrence for engines `costs`, groups beginning and ending at `cuts`.

    ``dp[k][j - 1]`` rises and ``end_j(k, i)`` falls with `k`, so that the least maximum is where
    they cross: O(u m log u) for `u` cuts. Raises ValueError without engines.
    """
    if not costs:
        raise ValueError("placement needs at least one engine")
    units = len(cuts) - 1
    best = costs[0].end_s(np.zeros(units + 1, dtype=np.int64), cuts)
    choices: list[IntArray] = []
    for cost in costs[1:]:
        best, choice = cross(best, cost, cuts)
        choices.append(choice)
    stop, sizes = units, []
    for choice in reversed(choices):
        start = int(choice[stop])
        sizes.append(int(cuts[stop] - cuts[start]))
        stop = start
    sizes.append(int(cuts[stop]))
    return Partition(sizes=tuple(reversed(sizes)), makespan_s=float(best[units]))


def cross(best: FloatArray, cost: SegmentCost, cuts: IntArray) -> tuple[FloatArray, IntArray]:
    """One column of the recurrence: for every `i`, the least max(best[k], end(k, i)) and its `k`.

    All `i` bisect together for the first `k` at which `best` is no longer below; the minimum is
    there or just before.
    """
    units = len(cuts) - 1
    low = np.zeros(units + 1, dtype=np.int64)
    high = np.arange(units + 1, dtype=np.int64)
    for _ in range(units.bit_length()):
        middle = (low + high) >> 1
        met = best[middle] >= cost.end_s(cuts[middle], cuts)
        high = np.where(met, middle, high)
        low = np.where(met, low, np.minimum(middle + 1, high))
    before = np.maximum(high - 1, 0)
    at_before = np.maximum(best[before], cost.end_s(cuts[before], cuts))
    at_high = np.maximum(best[high], cost.end_s(cuts[high], cuts))
    earlier = at_before <= at_high
    return np.where(earlier, at_before, at_high), np.where(earlier, before, high)


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
