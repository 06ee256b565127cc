"""The published cost estimate: a group ends after ``L * T * F(g)``; no context, no KV capacity.

`L` is the output length of the longest member, `T` the time per token alone, ``F(g)`` the slowdown
when `g` members run together (Heddle, arXiv 2603.28101, section on presorted placement). ``T * F``
comes from a curve of seconds per token against batch size. Two readings of `F` are kept:

* *by size*: all members are as long as the longest, ``T * F(g) = tpot(g)``; an upper bound, for
  which the exchange argument and the exact fast path hold exactly;
* *simulated*: members start together and leave when done, so the longest of ``L_1 >= ... >= L_g``
  ends after ``sum over b of tpot(b) * (L_b - L_{b+1})`` with ``L_{g+1} = 0``.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import (
    ContextCost,
    FloatArray,
    IntArray,
    SegmentCost,
    Work,
    context_cost,
    suffix_max,
    work_of,
)
from heddle_core.ids import EngineShape


def tpot_by_batch(
    cost: StepCost, *, batches: int, context_tokens: float, max_running: int
) -> FloatArray:
    """Seconds per token at batch 0 to `batches`, index 0 being 0; shape ``(batches + 1,)``.

    `context_tokens` is the context per sequence at which the curve is taken. Beyond `max_running`
    members run in waves, so a token takes as many times longer as there are waves.
    """
    batch = np.arange(batches + 1, dtype=np.float64)
    inside = np.minimum(batch, max_running)
    tpot = cost.t0_s + inside * (cost.t1_s + cost.t2_s * context_tokens)
    tpot *= np.maximum(1.0, batch / max_running)
    tpot[0] = 0.0
    return tpot


def group_end_s(lengths: FloatArray, tpot: FloatArray) -> float:
    """Seconds until the longest of `lengths` (descending) ends; all start together, none waits."""
    if not len(lengths):
        return 0.0
    tokens_at_batch = lengths - np.append(lengths[1:], 0.0)
    return float(tokens_at_batch @ tpot[1 : len(lengths) + 1])


def group_slowdown(lengths: FloatArray, tpot: FloatArray) -> float:
    """``F`` of one actual group: end of the longest over its end alone; `lengths` descending."""
    if not len(lengths):
        return 1.0
    return group_end_s(lengths, tpot) / float(lengths[0] * tpot[1])


def slowdown_by_size(tpot: FloatArray) -> FloatArray:
    """``F(g)`` with all members as long as the longest; index 0 is 1."""
    slowdown: FloatArray = tpot / tpot[1]
    slowdown[0] = 1.0
    return slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCost:
    """Segment cost ``lengths[start] * tpot[stop - start]``; build with `size_cost`."""

    lengths: FloatArray
    tpot: FloatArray
    tpot_list: "array[float]"

    def end_s(self, start: IntArray, stop: IntArray) -> FloatArray:
        """Seconds until each segment has ended."""
        begin = np.minimum(start, len(self.lengths) - 1)
        end: FloatArray = self.lengths[begin] * self.tpot[np.maximum(stop - start, 0)]
        return end

    def reach(self, start: int, limit_s: float) -> int:
        """Largest `stop` within `limit_s`: bisection on the curve."""
        left = len(self.lengths) - start
        if left <= 0:
            return start
        per_token = limit_s / float(self.lengths[start])
        return start + bisect_right(self.tpot_list, per_token, 1, left + 1) - 1


def size_cost(lengths: FloatArray, tpot: FloatArray) -> SizeCost:
    """Build the by-size cost of `lengths` (descending) from a curve of at least as many batches.

    Raises ValueError when the curve falls anywhere or is too short.
    """
    if len(tpot) <= len(lengths):
        raise ValueError(f"curve ends at batch {len(tpot) - 1}, groups may hold {len(lengths)}")
    if np.any(np.diff(tpot[1:]) < 0) or np.any(tpot[1:] <= 0):
        raise ValueError("seconds per token must be positive and not fall with the batch")
    curve = np.append(0.0, tpot[1 : len(lengths) + 1])
    return SizeCost(lengths=suffix_max(lengths), tpot=curve, tpot_list=array("d", curve.tobytes()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCost:
    """Segment cost looked up in a matrix ``ends[start, stop]`` of shape ``(n + 1, n + 1)``."""

    ends: FloatArray

    def end_s(self, start: IntArray, stop: IntArray) -> FloatArray:
        """Seconds until each segment has ended."""
        found: FloatArray = self.ends[start, stop]
        return found

    def reach(self, start: int, limit_s: float) -> int:
        """Largest `stop` within `limit_s`."""
        return start + int(np.searchsorted(self.ends[start, start:], limit_s, side="right")) - 1


def simulated_table(lengths: FloatArray, tpot: FloatArray, cuts: IntArray) -> TableCost:
    """Simulated reading of `F` for every group that begins and ends at one of `cuts`.

    Segments of the result count in cuts: unit ``u`` is ``lengths[cuts[u]:cuts[u + 1]]``. Memory is
    quadratic in the number of cuts; for a straight curve `simulated_cost` needs none of it.
    """
    units = len(cuts) - 1
    ends = np.zeros((units + 1, units + 1))
    tokens_at_batch = lengths - np.append(lengths[1:], 0.0)
    after = np.append(lengths, 0.0)
    for u in range(units):
        first = int(cuts[u])
        size = cuts[u + 1 :] - first
        total = np.cumsum(tokens_at_batch[first:] * tpot[1 : len(lengths) - first + 1])
        # Trajectories behind the segment would have kept the batch larger: none does.
        ends[u, u + 1 :] = total[size - 1] + tpot[size] * after[cuts[u + 1 :]]
    return TableCost(ends=ends)


def simulated_cost(
    lengths: FloatArray, cost: StepCost, *, context_tokens: float, max_running: int
) -> ContextCost:
    """Simulated reading of `F` on the straight curve of `cost`, for any segment in O(1)."""
    flat = StepCost(
        t0_s=cost.t0_s,
        t1_s=cost.t1_s + cost.t2_s * context_tokens,
        t2_s=0.0,
        prefill_s=0.0,
        kv_capacity_tokens=2**62,
    )
    return context_cost(work_of(lengths), flat, max_running=max_running)


def paper_costs(
    work: Work,
    by_shape: Mapping[EngineShape, StepCost],
    *,
    max_running: int,
    context_tokens: float | None = None,
) -> dict[EngineShape, SegmentCost]:
    """By-size segment cost for every shape; `work` by descending output.

    The curve is taken at `context_tokens` per sequence, by default the mean over decoded tokens.
    """
    if context_tokens is None:
        context_tokens = (
            float(np.average(work.mean_context_tokens(), weights=work.output_tokens))
            if len(work)
            else 0.0
        )
    costs: dict[EngineShape, SegmentCost] = {}
    for shape in sorted(by_shape):
        tpot = tpot_by_batch(
            by_shape[shape],
            batches=len(work),
            context_tokens=context_tokens,
            max_running=max_running,
        )
        costs[shape] = size_cost(work.output_tokens, tpot)
    return costs
