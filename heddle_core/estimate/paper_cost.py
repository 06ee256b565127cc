"""The published cost estimate: a group ends after ``L * T * F(g)``; no context, no KV capacity.

`L` is the output length of the longest member, `T` the time per token alone, ``F(g)`` the slowdown
when `g` members run together (Heddle, arXiv 2603.28101, section on presorted placement). ``T * F``
comes from a curve of seconds per token against batch size. There are two readings of `F`:

* `paper_costs`, *by size*: all members are as long as the longest, ``T * F(g) = tpot(g)``; an upper
  bound, for which the exchange argument and the exact fast path hold exactly.
* `simulated_paper_costs`, *simulated*: the group runs to its end on that curve, and the batch
  shrinks as members end. The paper computes `F` from a small simulation of the group.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import (
    FloatArray,
    IntArray,
    SegmentCost,
    Work,
    context_costs,
    suffix_max,
    work_of,
)
from heddle_core.ids import EngineShape

_UNLIMITED_TOKENS: Final = 2**62
"""KV capacity of engines in the published cost, which has none."""


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


def seconds_per_token(
    cost: StepCost, batch: int, *, context_tokens: float, max_running: int
) -> float:
    """One point of `tpot_by_batch`, at `batch` of at least 1."""
    inside = min(batch, max_running)
    tpot_s = cost.t0_s + inside * (cost.t1_s + cost.t2_s * context_tokens)
    return tpot_s * max(1.0, batch / max_running)


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

    def reaches(self, starts: IntArray, limit_s: float) -> IntArray:
        """`reach` of many starts."""
        per_token = limit_s / self.lengths[np.minimum(starts, len(self.lengths) - 1)]
        members = np.searchsorted(self.tpot, per_token, side="right") - 1
        return starts + np.minimum(members, np.maximum(len(self.lengths) - starts, 0))


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


def mean_decoded_context(work: Work) -> float:
    """Tokens of context of a sequence, the mean over all tokens that `work` decodes; 0 for none."""
    if not len(work):
        return 0.0
    return float(np.average(work.mean_context_tokens(), weights=work.output_tokens))


def paper_costs(
    work: Work, by_shape: Mapping[EngineShape, StepCost], *, max_running: int
) -> dict[EngineShape, SegmentCost]:
    """By-size segment cost for every shape; `work` by descending output.

    The curve is taken at the mean context of decoded tokens.
    """
    context_tokens = mean_decoded_context(work)
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


def simulated_paper_costs(
    work: Work, by_shape: Mapping[EngineShape, StepCost], *, max_running: int
) -> dict[EngineShape, SegmentCost]:
    """Segment cost for every shape from a simulation of the group; `work` by descending output.

    On the published curve, ``t0 + batch * t1``, no simulation is needed: every decoded token takes
    `t1` of everybody's time, whenever it is decoded, and there are as many iterations as the
    longest member has tokens, or as the tokens of all fill `max_running` slots. So a group ends
    after ``t0 * max(L, S / max_running) + t1 * S``, where `S` is the sum of its tokens. It is the
    context-aware cost of work without contexts, prefill and tools on engines with unlimited KV.
    """
    context_tokens = mean_decoded_context(work)
    return context_costs(
        work_of(work.output_tokens),
        {
            shape: replace(
                cost,
                t1_s=cost.t1_s + cost.t2_s * context_tokens,
                t2_s=0.0,
                prefill_s=0.0,
                kv_capacity_tokens=_UNLIMITED_TOKENS,
            )
            for shape, cost in by_shape.items()
        },
        max_running=max_running,
    )
