"""A lower bound on the makespan of a trace on a cluster, whatever the policy.

Two arguments, each with every free choice made in favour of a shorter makespan, so that no run of
the simulator can beat either (docs/run-directory.md spells them out):

- *solo*: no trajectory ends before its arrival plus its tools plus its own prefill and decode at
  the best TP degree for every single token, in the best batch, with a perfect prefix cache.
- *capacity*: an iteration of `b` sequences with `c` tokens of context in all costs
  ``tp * (base[b] + per_context[b] * c)`` GPU-seconds. Share it out: to a sequence with context
  `c_i` goes ``tp * (base[b] * (w / b + (1 - w) * c_i / kv) + per_context[b] * c_i)`` for any fixed
  weight `w` in 0..1. Since ``c <= kv``, the KV capacity, the shares add up to at most the cost. So
  a token at context `c_i` costs at least the minimum of these lines over TP degrees and batch
  sizes, and the work of all tokens, divided by the GPUs, bounds the makespan. `w` is chosen, once
  for all, to make the bound largest. With GPUs of several classes, the GPU-seconds of each class
  are a budget with a Lagrange multiplier: the least sum of multiplier times GPU-seconds over all
  tokens, divided by the sum of multiplier times GPUs, bounds the makespan for any positive
  multipliers.

A minimum of lines is concave, so between knots its chord lies below it: sums over contexts are
taken from chords and stay lower bounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from heddle.runs.demand import (
    Demand,
    Multipliers,
    demand,
    knots,
    prefill_alone_s,
    prefill_gpu_s,
    running_sums,
)
from heddle.runs.tables import Floats, Ints
from heddle_sim.latency import LatencyTable
from heddle_trace.schema import TrajectoryScript

WEIGHTS = (1.0, 0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds that no policy can beat; `makespan_s` is the largest of the others."""

    makespan_s: float
    solo_s: float
    capacity_s: float
    tools_s: float
    """Tool seconds over the tool capacity; 0 when tools are not limited."""
    multipliers: Multipliers
    """Of the GPU budget of each class, at which `capacity_s` is largest."""

    def seconds(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if name.endswith("_s")}


def lower_bound(
    scripts: Sequence[TrajectoryScript],
    tables: Sequence[LatencyTable],
    *,
    pools: Mapping[str, int],
    max_running: int,
    tool_capacity: int | None = None,
) -> Bound:
    """Bound the makespan of `scripts` on the GPUs of `pools`; one table for each allowed shape."""
    assert scripts, "a trace has at least one trajectory"
    assert tables, "a profile has at least one TP degree"
    work = demand(scripts, tables[0].drafting)
    solo = float(_alone_s(work, tables, max_running).max())
    capacity, multipliers = _capacity_bound(work, tables, pools, max_running)
    tools = float(work.tool_s.sum()) / tool_capacity if tool_capacity else 0.0
    return Bound(
        makespan_s=max(solo, capacity, tools),
        solo_s=solo,
        capacity_s=capacity,
        tools_s=tools,
        multipliers=multipliers,
    )


def alone_s(
    scripts: Sequence[TrajectoryScript], tables: Sequence[LatencyTable], *, max_running: int
) -> Floats:
    """Arrival plus the least time alone of each trajectory, in seconds."""
    return _alone_s(demand(scripts, tables[0].drafting), tables, max_running)


def _alone_s(work: Demand, tables: Sequence[LatencyTable], max_running: int) -> Floats:
    base, slope = [], []
    for table in tables:
        for each in _per_token(table, max_running):
            base.append(each.base_s - each.early * each.per_context_s)
            slope.append(each.per_context_s)
    decode = _sums(np.concatenate(base), np.concatenate(slope), work.largest_context)
    seconds = work.decoded(decode) + prefill_alone_s(work, tables) + work.tool_s
    return work.arrival_s + work.per_trajectory(seconds)


def _capacity_bound(
    work: Demand, tables: Sequence[LatencyTable], pools: Mapping[str, int], max_running: int
) -> tuple[float, Multipliers]:
    """The capacity bound in seconds, and the multipliers of the classes at which it is largest.

    They are searched at the first weight, and again at the weight that is best with them.
    """
    at = knots(work.largest_context)
    known = {gpu: [t for t in tables if t.gpu == gpu] for gpu in pools}
    lowest = [
        {gpu: _gpu_s(mine, max_running, weight, at) for gpu, mine in known.items() if mine}
        for weight in WEIGHTS
    ]

    def bound_s(weight: int, multipliers: Multipliers) -> float:
        lines = [multipliers[gpu] * line for gpu, line in lowest[weight].items()]
        decode = running_sums(at, np.min(lines, axis=0))
        tokens = float(work.decoded(decode).sum())
        weighted = tokens + prefill_gpu_s(work, tables, multipliers)
        return weighted / sum(multipliers[gpu] * pools[gpu] for gpu in lowest[weight])

    multipliers = _largest(partial(bound_s, 0), dict.fromkeys(pools, 1.0), _FURTHEST)
    each = [bound_s(weight, multipliers) for weight in range(len(WEIGHTS))]
    best = int(np.argmax(each))
    if best and len(pools) > 1:
        multipliers = _largest(partial(bound_s, best), multipliers, 2.0)
    return bound_s(best, multipliers), multipliers


_FURTHEST = 64.0
"""The multiplier of a class is at most so many times that of the first, or as many times less."""

_GOLDEN = 0.5 * (5.0**0.5 - 1.0)
_EXACTLY = 0.01
"""The interval of the logarithm of a multiplier at which its search ends."""


def _largest(
    bound_s: Callable[[Multipliers], float], begin: Multipliers, apart: float
) -> Multipliers:
    """The multipliers of the largest bound, those of all classes but the first one after another.

    The least weighted sum is concave in them, so that the bound has one maximum along each.
    Each is at most `apart` times the one to begin with, or as many times less.
    """
    best = dict(begin)
    best_s = bound_s(best) if len(best) > 1 else 0.0
    for gpu in list(best)[1:]:
        at = partial(_with, best, gpu)
        middle = float(np.log(best[gpu]))
        low, high = middle - float(np.log(apart)), middle + float(np.log(apart))
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        left_s, right_s = bound_s(at(left)), bound_s(at(right))
        while high - low > _EXACTLY:
            if left_s >= right_s:
                high, right, right_s = right, left, left_s
                left = high - _GOLDEN * (high - low)
                left_s = bound_s(at(left))
            else:
                low, left, left_s = left, right, right_s
                right = low + _GOLDEN * (high - low)
                right_s = bound_s(at(right))
        if max(left_s, right_s) > best_s:
            best_s = max(left_s, right_s)
            best = at(left if left_s >= right_s else right)
    return best


def _with(multipliers: Multipliers, gpu: str, logarithm: float) -> dict[str, float]:
    """The same multipliers but for one class, whose logarithm is given."""
    return {**multipliers, gpu: float(np.exp(logarithm))}


def _gpu_s(tables: Sequence[LatencyTable], max_running: int, weight: float, at: Ints) -> Floats:
    """Fewest GPU-seconds of a token at each context of `at`, on engines of these tables."""
    base, slope = [], []
    for table in tables:
        for each in _per_token(table, max_running):
            batch = np.arange(1, len(each.base_s) + 1)
            kv = (1.0 - weight) * each.base_s / table.kv_capacity_tokens
            per_context = table.gpus * (each.per_context_s + kv)
            base.append(table.gpus * weight * each.base_s / batch - each.early * per_context)
            slope.append(per_context)
    return _lowest(np.concatenate(base), np.concatenate(slope), at)


@dataclass(frozen=True, slots=True)
class _PerToken:
    """Seconds of an iteration by batch size, over the tokens that a sequence advances in it."""

    base_s: Floats
    per_context_s: Floats
    early: float
    """Tokens by which the context of an iteration is at most less than that of what it makes, in
    the mean."""


def _per_token(table: LatencyTable, max_running: int) -> list[_PerToken]:
    """For batches of 1 to `max_running` sequences, and for each number of drafts."""
    return [
        _PerToken(
            np.asarray(each.base_s, np.float64) / each.tokens,
            np.asarray(each.per_context_s, np.float64) / each.tokens,
            each.drafts / 2.0,
        )
        for each in table.decoding(max_running)
    ]


def _sums(base: Floats, slope: Floats, limit: int) -> Floats:
    """Running sums over c = 0..limit of a value at most ``min(base + slope * c)``."""
    at = knots(limit)
    return running_sums(at, _lowest(base, slope, at))


def _lowest(base: Floats, slope: Floats, at: Ints) -> Floats:
    """``min(base + slope * c)`` at contexts `at`."""
    lowest = np.full(len(at), np.inf)
    for b, s in zip(base, slope, strict=True):
        np.minimum(lowest, b + s * at, out=lowest)
    return lowest
