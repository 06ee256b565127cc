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
from typing import Any

import numpy as np

from heddle.runs.tables import Floats, Ints
from heddle_sim.latency import LatencyTable
from heddle_trace.columns import by_code
from heddle_trace.schema import TrajectoryScript
from heddle_trace.scripts import Scripts

WEIGHTS = (1.0, 0.75, 0.5, 0.25, 0.0)
KNOTS = 1024
"""Knots of the chords; with this many the sum is within 0.01 % of the exact one."""


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
    work = _work(scripts)
    limit = int(work.last.max(initial=1))
    solo = _solo_s(work, tables, max_running, limit)
    capacity = max(
        float(_gpu_s(work, tables, max_running, limit, weight)) / gpus for weight in WEIGHTS
    )
    tools = float(work.tool_s.sum()) / tool_capacity if tool_capacity else 0.0
    return Bound(
        makespan_s=max(solo, capacity, tools), solo_s=solo, capacity_s=capacity, tools_s=tools
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """All steps of all trajectories as columns."""

    trajectory: Ints
    arrival_s: Floats
    """By trajectory, from the first arrival on."""
    prompt: Ints
    last: Ints
    """Context at which the last decode iteration attends."""
    new: Ints
    """Prompt tokens that must be prefilled by this step itself."""
    pairs: Floats
    tool_s: Floats
    shared_new: Ints
    """`new`, with the prompt of a group counted once: siblings may find it in a prefix cache."""
    shared_pairs: Floats


def _work(scripts: Sequence[TrajectoryScript]) -> _Work:
    columns = Scripts.of(scripts)
    count = columns.steps
    first = np.cumsum(count) - count
    prompt, shared, output = (
        columns.column(name).astype(np.int64)
        for name in ("prompt_tokens", "shared_tokens", "output_tokens")
    )
    arrival = columns.arrival_s
    # A rewritten history that shares nothing may happen to be the group's prompt: count it as free.
    is_first = np.zeros(len(prompt), bool)
    is_first[first] = True
    new = np.where((shared == 0) & ~is_first, 0, prompt - shared)
    own, shared_new = new.copy(), new.copy()
    for members in by_code(columns.groups):
        rows = first[members]
        shared_new[rows] = 0
        shared_new[rows[np.argmax(new[rows])]] = new[rows].max()
        own[rows[arrival[members] > arrival[members].min()]] = 0
    return _Work(
        trajectory=np.repeat(np.arange(len(columns)), count),
        arrival_s=arrival - arrival.min(),
        prompt=prompt,
        last=prompt + output - 1,
        new=own,
        pairs=own * (shared + own / 2.0),
        tool_s=columns.column("tool_s"),
        shared_new=shared_new,
        shared_pairs=shared_new * (shared + shared_new / 2.0),
    )


def _solo_s(work: _Work, tables: Sequence[LatencyTable], max_running: int, limit: int) -> float:
    """Largest of arrival plus time alone, over trajectories."""
    base, slope = [], []
    for table in tables:
        base.append(_column(table.base_s, max_running)[1:])
        slope.append(_column(table.per_context_s, max_running)[1:])
    decode = _sums(np.concatenate(base), np.concatenate(slope), limit)
    # A prefill is at least one iteration, whatever else is in its batch.
    iteration = min(min(table.base_s) for table in tables)
    seconds = (
        decode[work.last]
        - decode[work.prompt]
        + iteration
        + work.new * min(_per_token_s(table) for table in tables)
        + work.pairs * min(table.prefill_pair_s for table in tables)
        + min(table.host_per_prefill_s for table in tables)
        + work.tool_s
    )
    alone = np.bincount(work.trajectory, weights=seconds)
    return float((work.arrival_s + alone).max())


def _gpu_s(
    work: _Work, tables: Sequence[LatencyTable], max_running: int, limit: int, weight: float
) -> float:
    """GPU-seconds of all tokens at their cheapest."""
    base, slope = [], []
    for table in tables:
        b = _column(table.base_s, max_running)[1:]
        batch = np.arange(1, len(b) + 1)
        base.append(table.tp * weight * b / batch)
        per_context = _column(table.per_context_s, max_running)[1:]
        slope.append(table.tp * (per_context + (1.0 - weight) * b / table.kv_capacity_tokens))
    decode = _sums(np.concatenate(base), np.concatenate(slope), limit)
    prefill = work.shared_new.sum() * min(t.tp * _per_token_s(t) for t in tables)
    prefill += work.shared_pairs.sum() * min(t.tp * t.prefill_pair_s for t in tables)
    prefill += len(work.prompt) * min(t.tp * t.host_per_prefill_s for t in tables)
    return float((decode[work.last] - decode[work.prompt]).sum() + prefill)


def _column(values: Sequence[float], max_running: int) -> Floats:
    """Batch sizes 0 to `max_running`, or as far as the table goes."""
    return np.asarray(values[: max_running + 1], np.float64)


def _sums(base: Floats, slope: Floats, limit: int) -> Floats:
    """Running sums over c = 0..limit of a value at most ``min(base + slope * c)``."""
    knots = np.unique(np.append(np.geomspace(1, limit, KNOTS).astype(np.int64), [0, limit]))
    lowest = np.full(len(knots), np.inf)
    for b, s in zip(base, slope, strict=True):
        np.minimum(lowest, b + s * knots, out=lowest)
    sums: Any = np.cumsum(np.interp(np.arange(limit + 1), knots, lowest))
    return np.asarray(sums, np.float64)


def _per_token_s(table: LatencyTable) -> float:
    """Fewest seconds per token that prefilling adds to an iteration of any size."""
    x = np.asarray(table.prefill_tokens, np.float64)
    y = np.asarray(table.prefill_knots_s, np.float64)
    last = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return float(min((y[1:] / x[1:]).min(), last))
