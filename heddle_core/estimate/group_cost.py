"""Estimated end of a group on one engine, in O(1) for any contiguous segment.

Trajectories are sorted, longest first. A *segment* ``[start, stop)`` of that order is a candidate
group. Every planner here calls the two methods of `SegmentCost` and relies on one property: a
segment that contains another never ends earlier.

The context-aware cost counts work instead of stepping through time. With iterations of
``t0 + t1 * batch + t2 * context`` every decoded token brings ``t1 + t2 * (its context)`` seconds to
every member of the engine, whenever it is decoded, so sums over members replace the schedule:

    w_k       = t1 * o_k + t2 * o_k * (mean context of k) + prefill_s * (prompt tokens of k)
    solo_k    = t0 * o_k + w_k + tool_k
    T         = solo + beta * (1 - rho * solo / T)        longest member, beta = work of the others
    E         = t0 * max(kv_time / kv_capacity, tokens / max_running) + work of all
    end       = max(T, E)

`T` is exact without waiting and tools, when the longest member decodes most. `rho` is the share of
its solo time that the longest member spends in tools, when the others do not delay it. `E` is the
pace of a full engine: each iteration holds at most `kv_capacity` tokens of context and
`max_running` sequences (waves).
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heddle_core.estimate.cost import StepCost
from heddle_core.ids import EngineShape

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]


_NEAR: Final = 1024
"""Members of a group that is looked for near its start first."""


class SegmentCost(Protocol):
    """Estimated end of contiguous groups on an engine of one shape.

    Monotone: nondecreasing in `stop`, nonincreasing in `start`, 0 for an empty segment.
    """

    def end_s(self, start: IntArray, stop: IntArray) -> FloatArray:
        """Seconds until each segment ``[start, stop)`` has ended; arrays of one broadcast shape."""
        ...

    def reach(self, start: int, limit_s: float) -> int:
        """Return the largest `stop` whose segment from `start` ends within `limit_s`."""
        ...

    def reaches(self, starts: IntArray, limit_s: float) -> IntArray:
        """Return `reach` of many starts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Estimated remaining work, one entry per trajectory; five arrays of one length."""

    output_tokens: FloatArray
    """Tokens still to decode, at least 1."""
    context_tokens: FloatArray
    """Tokens of context when the group starts."""
    appended_tokens: FloatArray
    """Tokens that tools will append to the context, spread over the output."""
    prefill_tokens: FloatArray
    """Tokens still to prefill: what is not cached of the context, and what tools append."""
    tool_s: FloatArray
    """Seconds still to spend in tools, spread over the output."""

    def __len__(self) -> int:
        return len(self.output_tokens)

    def take(self, index: IntArray | slice) -> "Work":
        """Return the trajectories at `index`, in that order."""
        return Work(
            output_tokens=self.output_tokens[index],
            context_tokens=self.context_tokens[index],
            appended_tokens=self.appended_tokens[index],
            prefill_tokens=self.prefill_tokens[index],
            tool_s=self.tool_s[index],
        )

    def mean_context_tokens(self) -> FloatArray:
        """Context of each trajectory, averaged over the tokens it decodes."""
        return self.context_tokens + (self.output_tokens + self.appended_tokens) / 2


def work_of(
    output_tokens: ArrayLike,
    *,
    context_tokens: ArrayLike = 0.0,
    appended_tokens: ArrayLike = 0.0,
    prefill_tokens: ArrayLike | None = None,
    tool_s: ArrayLike = 0.0,
) -> Work:
    """Build `Work`; scalars stand for every trajectory.

    Without `prefill_tokens` nothing is cached: context and appended tokens are all prefilled.
    """
    output = np.maximum(np.asarray(output_tokens, dtype=np.float64), 1.0)

    def spread(values: ArrayLike) -> FloatArray:
        return np.broadcast_to(np.asarray(values, dtype=np.float64), output.shape).copy()

    context, appended = spread(context_tokens), spread(appended_tokens)
    prefill = context + appended if prefill_tokens is None else spread(prefill_tokens)
    return Work(
        output_tokens=output,
        context_tokens=context,
        appended_tokens=appended,
        prefill_tokens=prefill,
        tool_s=spread(tool_s),
    )


def engine_work_s(work: Work, cost: StepCost) -> FloatArray:
    """Seconds by which each trajectory delays the others on its engine: ``w_k`` above."""
    per_token = cost.t1_s + cost.t2_s * work.mean_context_tokens()
    return work.output_tokens * per_token + cost.prefill_s * work.prefill_tokens


def solo_s(work: Work, cost: StepCost) -> FloatArray:
    """Seconds each trajectory would take alone on an engine."""
    return cost.t0_s * work.output_tokens + engine_work_s(work, cost) + work.tool_s


def longest_first(work: Work, cost: StepCost) -> IntArray:
    """Order by descending solo time; equal ones keep their order."""
    return np.argsort(-solo_s(work, cost), kind="stable")


def suffix_max(values: FloatArray) -> FloatArray:
    """Running maximum from the end: a nonincreasing array that is nowhere below `values`."""
    result: FloatArray = np.maximum.accumulate(values[::-1])[::-1]
    return result


def _prefix(values: FloatArray) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCost:
    """Segment cost with context growth, KV capacity, slots, prefill and tools.

    Build with `context_cost`. Prefix sums are kept twice: as numpy arrays for many segments at once
    and as `array` for one, since bisection on numpy scalars takes ten times as long.
    """

    solo: FloatArray
    work: FloatArray
    kv: FloatArray
    slots: FloatArray
    tool_share: float
    solo_list: "array[float]"
    work_list: "array[float]"
    kv_list: "array[float]"
    slots_list: "array[float]"

    def end_s(self, start: IntArray, stop: IntArray) -> FloatArray:
        """Seconds until each segment has ended."""
        begin = np.minimum(start, len(self.solo) - 1)
        others = np.maximum(self.work[stop] - self.work[begin + 1], 0.0)
        solo = self.solo[begin]
        both = solo + others
        longest = both
        if self.tool_share:
            hidden = 4.0 * self.tool_share * solo * others
            longest = (both + np.sqrt(np.maximum(both * both - hidden, 0.0))) / 2
        full = np.maximum(self.kv[stop] - self.kv[start], self.slots[stop] - self.slots[start])
        end: FloatArray = np.where(stop > start, np.maximum(longest, full), 0.0)
        return end

    def reach(self, start: int, limit_s: float) -> int:
        """Largest `stop` within `limit_s`: each of the three terms inverted on its prefix sums."""
        solo_list = self.solo_list
        count = len(solo_list)
        if start >= count or solo_list[start] > limit_s:
            return start
        solo, work, kv, slots = solo_list[start], self.work_list, self.kv_list, self.slots_list
        others = limit_s * (limit_s - solo) / (limit_s - self.tool_share * solo)
        most_work = work[start + 1] + others
        # Most groups are far smaller than the whole, whose middle is not in a near cache.
        near = start + _NEAR
        end = near if near < count and work[near] > most_work else count + 1
        stop = bisect_right(work, most_work, start + 1, end)
        stop = bisect_right(kv, kv[start] + limit_s, start, stop)
        return bisect_right(slots, slots[start] + limit_s, start, stop) - 1

    def reaches(self, starts: IntArray, limit_s: float) -> IntArray:
        """`reach` of many starts."""
        begin = np.minimum(starts, len(self.solo) - 1)
        solo = self.solo[begin]
        fits = (starts < len(self.solo)) & (solo <= limit_s)
        solo = np.minimum(solo, limit_s)
        others = limit_s * (limit_s - solo) / (limit_s - self.tool_share * solo)
        stop = np.searchsorted(self.work, self.work[begin + 1] + others, side="right")
        for full in (self.kv, self.slots):
            stop = np.minimum(stop, np.searchsorted(full, full[begin] + limit_s, side="right"))
        return np.where(fits, stop - 1, starts)


def context_cost(work: Work, cost: StepCost, *, max_running: int) -> ContextCost:
    """Segment cost of `work`, sorted longest first, on an engine of estimated `cost`.

    Orders differ between TP degrees. A trajectory counts at least the solo time of every later one,
    which keeps the cost monotone and makes it pessimistic.
    """
    own = engine_work_s(work, cost)
    solo = solo_s(work, cost)
    kv_time = cost.t0_s * work.output_tokens * work.mean_context_tokens() / cost.kv_capacity_tokens
    solo_max = suffix_max(solo)
    prefixes = (
        _prefix(own),
        _prefix(own + kv_time),
        _prefix(own + cost.t0_s * work.output_tokens / max_running),
    )
    # Weighted by solo time: long members come first in a group, and the first is delayed most.
    share = float(work.tool_s.sum() / solo.sum()) if len(work) else 0.0
    return ContextCost(
        solo=solo_max,
        work=prefixes[0],
        kv=prefixes[1],
        slots=prefixes[2],
        tool_share=min(share, 0.99),
        solo_list=array("d", solo_max.tobytes()),
        work_list=array("d", prefixes[0].tobytes()),
        kv_list=array("d", prefixes[1].tobytes()),
        slots_list=array("d", prefixes[2].tobytes()),
    )


def context_costs(
    work: Work, by_shape: Mapping[EngineShape, StepCost], *, max_running: int
) -> dict[EngineShape, SegmentCost]:
    """Context-aware segment cost for every shape of `by_shape`."""
    return {
        shape: context_cost(work, by_shape[shape], max_running=max_running)
        for shape in sorted(by_shape)
    }
