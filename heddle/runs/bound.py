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
  for all, to make the bound largest.

A minimum of lines is concave, so between knots its chord lies below it: sums over contexts are
taken from chords and stay lower bounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heddle.runs.demand import (
    Demand,
    demand,
    knots,
    prefill_alone_s,
    prefill_gpu_s,
    running_sums,
)
from heddle.runs.tables import Floats
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


def lower_bound(
    scripts: Sequence[TrajectoryScript],
    tables: Sequence[LatencyTable],
    *,
    gpus: int,
    max_running: int,
    tool_capacity: int | None = None,
) -> Bound:
    """Bound the makespan of `scripts` on `gpus`; one table for each TP degree that is allowed."""
    assert scripts, "a trace has at least one trajectory"
    assert tables, "a profile has at least one TP degree"
    work = demand(scripts)
    solo = _solo_s(work, tables, max_running)
    capacity = max(float(_gpu_s(work, tables, max_running, weight)) / gpus for weight in WEIGHTS)
    tools = float(work.tool_s.sum()) / tool_capacity if tool_capacity else 0.0
    return Bound(
        makespan_s=max(solo, capacity, tools), solo_s=solo, capacity_s=capacity, tools_s=tools
    )


def _solo_s(work: Demand, tables: Sequence[LatencyTable], max_running: int) -> float:
    """Largest of arrival plus time alone, over trajectories."""
    base, slope = [], []
    for table in tables:
        base.append(_column(table.base_s, max_running)[1:])
        slope.append(_column(table.per_context_s, max_running)[1:])
    decode = _sums(np.concatenate(base), np.concatenate(slope), work.largest_context)
    seconds = decode[work.last] - decode[work.prompt] + prefill_alone_s(work, tables) + work.tool_s
    return float((work.arrival_s + work.per_trajectory(seconds)).max())


def _gpu_s(work: Demand, tables: Sequence[LatencyTable], max_running: int, weight: float) -> float:
    """GPU-seconds of all tokens at their cheapest."""
    base, slope = [], []
    for table in tables:
        b = _column(table.base_s, max_running)[1:]
        batch = np.arange(1, len(b) + 1)
        base.append(table.gpus * weight * b / batch)
        per_context = _column(table.per_context_s, max_running)[1:]
        slope.append(table.gpus * (per_context + (1.0 - weight) * b / table.kv_capacity_tokens))
    decode = _sums(np.concatenate(base), np.concatenate(slope), work.largest_context)
    tokens = float((decode[work.last] - decode[work.prompt]).sum())
    return tokens + prefill_gpu_s(work, tables)


def _column(values: Sequence[float], max_running: int) -> Floats:
    """Batch sizes 0 to `max_running`, or as far as the table goes."""
    return np.asarray(values[: max_running + 1], np.float64)


def _sums(base: Floats, slope: Floats, limit: int) -> Floats:
    """Running sums over c = 0..limit of a value at most ``min(base + slope * c)``."""
    at = knots(limit)
    lowest = np.full(len(at), np.inf)
    for b, s in zip(base, slope, strict=True):
        np.minimum(lowest, b + s * at, out=lowest)
    return running_sums(at, lowest)
