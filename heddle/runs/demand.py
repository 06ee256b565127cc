"""What a trace demands of a cluster, whatever the policy: columns over all its steps.

Every free choice is made in favour of a shorter makespan: prefix caches are perfect, and siblings
share the prompt of their group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TypeAlias

import numpy as np

from heddle.runs.tables import Floats, Ints
from heddle_sim.drafts import ONE, Drafting, draw_of
from heddle_sim.latency import LatencyTable
from heddle_trace.schema import TrajectoryScript
from heddle_trace.table import Scripts

Multipliers: TypeAlias = Mapping[str, float]
"""Lagrange multipliers of the GPU budgets: weight of a GPU-second of each class; of one class 1."""

KNOTS = 1024
"""Knots of `running_sums`; with this many the sum is within 0.01 % of the exact one."""


@dataclass(frozen=True, slots=True)
class Demand:
    """All steps of all trajectories as columns; trajectories in their order, one after another."""

    trajectory: Ints
    """By step, the number of its trajectory."""
    arrival_s: Floats
    """By trajectory, from the first arrival on."""
    prompt: Ints
    last: Ints
    """Context at which the last decode iteration attends."""
    new: Ints
    """Prompt tokens that must be prefilled by this step itself."""
    pairs: Floats
    """(query, key) pairs of `new`."""
    tool_s: Floats
    shared_new: Ints
    """`new`, with the prompt of a group counted once: siblings may find it in a prefix cache."""
    shared_pairs: Floats
    pace: Floats
    """By step: iterations that it takes, over those of a step whose drafts are accepted as in the
    mean. 1 without drafts."""

    def decoded(self, sums: Floats) -> Floats:
        """By step, the sum over its decoded tokens of what `sums` adds up over contexts."""
        decoded: Floats = (sums[self.last] - sums[self.prompt]) * self.pace
        return decoded

    @property
    def largest_context(self) -> int:
        """The largest context at which a token is decoded; at least 1."""
        return int(self.last.max(initial=1))

    def per_trajectory(self, of_steps: Floats) -> Floats:
        """Sum a column of steps over each trajectory."""
        count = len(self.arrival_s)
        return np.bincount(self.trajectory, weights=of_steps, minlength=count).astype(np.float64)


def demand(scripts: Sequence[TrajectoryScript], drafting: Drafting | None = None) -> Demand:
    """Put the steps of `scripts` into columns; engines draft as `drafting`, or not at all."""
    columns = Scripts.of(scripts)
    count, first = columns.counts, columns.first
    prompt, shared, output = (
        columns.step(name).ints for name in ("prompt_tokens", "shared_tokens", "output_tokens")
    )
    arrival = columns.trajectory("arrival_s").values
    # A rewritten history that shares nothing may happen to be the group's prompt: count it as free.
    is_first = np.zeros(len(prompt), bool)
    is_first[first] = True
    new = np.where((shared == 0) & ~is_first, 0, prompt - shared)
    own, shared_new = new.copy(), new.copy()
    for members in columns.trajectory("group").occurring().values():
        rows = first[members]
        shared_new[rows] = 0
        shared_new[rows[np.argmax(new[rows])]] = new[rows].max()
        own[rows[arrival[members] > arrival[members].min()]] = 0
    return Demand(
        trajectory=np.repeat(np.arange(len(columns)), count),
        arrival_s=arrival - arrival.min(),
        prompt=prompt,
        last=prompt + output - 1,
        new=own,
        pairs=own * (shared + own / 2.0),
        tool_s=columns.step("tool_s").values,
        shared_new=shared_new,
        shared_pairs=shared_new * (shared + shared_new / 2.0),
        pace=np.ones(len(prompt)) if drafting is None else _paces(scripts, drafting),
    )


def _paces(scripts: Sequence[TrajectoryScript], drafting: Drafting) -> Floats:
    """By step, its iterations over those in the mean: the least over numbers of drafts."""
    means = {drafts: ONE * drafting.mean_tokens(drafts) for drafts in set(drafting.drafts[1:])}
    return np.array(
        [
            min(
                mean / drafting.rate(drafts, step.output_tokens, draw)
                for drafts, mean in means.items()
            )
            for script in scripts
            for step in script.steps
            for draw in (draw_of(script.id, step.prompt_tokens + step.output_tokens),)
        ]
    )


def prefill_alone_s(work: Demand, tables: Sequence[LatencyTable]) -> Floats:
    """Fewest seconds that the prefill of each step takes, with an engine of its own."""
    # A prefill is at least one iteration, whatever else is in its batch.
    iteration = min(min(table.base_s) for table in tables)
    seconds: Floats = (
        iteration
        + work.new * min(_per_token_s(table) for table in tables)
        + work.pairs * min(table.prefill_pair_s for table in tables)
        + min(table.host_per_prefill_s for table in tables)
    )
    return seconds


def prefill_gpu_s(work: Demand, tables: Sequence[LatencyTable], multipliers: Multipliers) -> float:
    """Fewest GPU-seconds of the prefill of all steps, those of each class times its multiplier."""
    weights = [multipliers[table.gpu] * table.gpus for table in tables]
    seconds = work.shared_new.sum() * min(map(mul, weights, map(_per_token_s, tables)))
    seconds += work.shared_pairs.sum() * min(map(mul, weights, (t.prefill_pair_s for t in tables)))
    seconds += len(work.prompt) * min(map(mul, weights, (t.host_per_prefill_s for t in tables)))
    return float(seconds)


def knots(limit: int, count: int = KNOTS) -> Ints:
    """About `count` contexts from 0 to `limit` tokens, dense where contexts are short."""
    spaced = np.geomspace(1, limit, count).astype(np.int64)
    return np.unique(np.append(spaced, [0, limit]))


def running_sums(at: Ints, values: Floats) -> Floats:
    """Sums over contexts from 0 to each one up to the last knot, of `values` at the knots `at`.

    Values between knots are taken from the chord.
    """
    sums: Floats = np.cumsum(np.interp(np.arange(at[-1] + 1), at, values))
    return sums


def _per_token_s(table: LatencyTable) -> float:
    """Fewest seconds per token that prefilling adds to an iteration of any size."""
    x = np.asarray(table.prefill_tokens, np.float64)
    y = np.asarray(table.prefill_knots_s, np.float64)
    last = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return float(min((y[1:] / x[1:]).min(), last))
