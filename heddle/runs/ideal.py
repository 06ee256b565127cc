"""Two makespans to compare with beside the proven bound; nothing proves either of them.

Both divide engines and iterations as if they were fluid, and count prefill as the bound does, with
perfect prefix caches. A batch of `b` sequences with contexts of `c` tokens takes
``tpot = base[b] + per_context[b] * b * c`` seconds for a token of each, and
``tp * tpot / b`` GPU-seconds per token. `b` is at most `max_running`, and ``b * c`` at most the KV
capacity.

*Fluid*: the optimum of a clairvoyant schedule whose only limits are rates. Every trajectory has the
makespan less its arrival, tools and own prefill for its tokens. A faster pace takes more
GPU-seconds: at each context, mixtures of TP degrees and batch sizes form a convex curve of
GPU-seconds against seconds per token. The optimum is the least makespan that the GPU-seconds of
the cluster suffice for. It is optimistic: engines are fractional, moves and recomputes cost
nothing, and no GPU waits. It is no bound: it takes the mates of a sequence to have contexts of the
same length, and a long context beside short ones may cost less. It is at least the proven bound.
With GPUs of several classes, GPU-seconds count by the multipliers at which the proven bound is
largest.

*Equal progress*: all trajectories have made equally many tokens at any time, and all GPUs form
engines of the TP degree that is best for those that are left, at once and for nothing. No knowledge
of lengths is used. It is no bound, since a good guess of lengths beats it. A real policy may not
reach it either: engines are fractional, and every engine has the mean context. With GPUs of
several classes, each class takes as many trajectories as it can advance at the common pace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from heddle.runs.bound import Bound
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

CONTEXTS = 128
"""Contexts at which the curves of `fluid` are computed."""
TIME_MULTIPLIERS = np.append(np.geomspace(1e4, 1e-3, 63), 0.0)
"""Of seconds, in the sum with GPU-seconds that a pace minimises: from the fastest pace to the one
with the fewest GPU-seconds."""
BATCHES = 96
"""Batch sizes that are tried; sizes between them are mixtures."""
SAMPLE = 8192
"""Trajectories of which curves are computed: the longest half of them, and a sample of the rest."""
LEVELS = 4096
"""Amounts of progress at which the number of trajectories left changes."""
GROWTH = 257
"""Amounts of progress at which contexts change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """Makespans in seconds that nothing proves; the module says what they leave out."""

    fluid_s: float
    """Of a clairvoyant fluid schedule."""
    equal_progress_s: float
    """Of all trajectories advancing alike, with free re-shaping of all engines."""


def ideal_makespans(
    scripts: Sequence[TrajectoryScript],
    tables: Sequence[LatencyTable],
    *,
    pools: Mapping[str, int],
    max_running: int,
    bound: Bound,
) -> Ideal:
    """Compute both for `scripts` on the GPUs of `pools`; one table for each allowed shape.

    `bound` is the proven bound of the same trace and cluster; neither result is below it.
    """
    work = demand(scripts, tables[0].drafting)
    multipliers = bound.multipliers
    alike_s = _equal_progress_s(work, tables, pools, max_running, multipliers)
    return Ideal(
        fluid_s=_fluid_s(work, tables, pools, max_running, multipliers, bound.makespan_s),
        equal_progress_s=max(alike_s, bound.makespan_s),
    )


def _fluid_s(
    work: Demand,
    tables: Sequence[LatencyTable],
    pools: Mapping[str, int],
    max_running: int,
    multipliers: Multipliers,
    least_s: float,
) -> float:
    prefill = prefill_gpu_s(work, tables, multipliers)
    per_s = sum(multipliers[gpu] * gpus for gpu, gpus in pools.items())
    taken = work.per_trajectory(prefill_alone_s(work, tables) + work.tool_s) + work.arrival_s
    chosen, weight = _sample(work.per_trajectory((work.last - work.prompt).astype(np.float64)))
    seconds, gpu_s = _curves(work, chosen, tables, max_running, multipliers)
    taken = taken[chosen]

    def suffices(makespan_s: float) -> bool:
        spent = _at(seconds, gpu_s, makespan_s - taken) @ weight
        return bool(spent + prefill <= per_s * makespan_s)

    low = high = least_s
    while not suffices(high):
        low, high = high, 2.0 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _sample(tokens: Floats) -> tuple[Ints, Floats]:
    """Numbers of trajectories that stand for all, and how many each stands for."""
    order = np.argsort(-tokens, kind="stable")
    half = SAMPLE // 2
    if len(order) <= SAMPLE:
        return order, np.ones(len(order))
    rest = len(order) - half
    # The middle of each of `half` equal parts of the others.
    chosen = half + ((np.arange(half) + 0.5) * rest / half).astype(np.int64)
    return np.append(order[:half], order[chosen]), np.repeat([1.0, rest / half], half)


def _curves(
    work: Demand,
    chosen: Ints,
    tables: Sequence[LatencyTable],
    max_running: int,
    multipliers: Multipliers,
) -> tuple[Floats, Floats]:
    """Seconds and GPU-seconds of the chosen trajectories' tokens; (time multiplier, chosen)."""
    at = knots(work.largest_context, CONTEXTS)
    tpot, gpu_s = _paces(tables, max_running, at.astype(np.float64), multipliers)
    place = np.full(len(work.arrival_s), -1)
    place[chosen] = np.arange(len(chosen))
    mine = place[work.trajectory]
    rows = mine >= 0
    mine = mine[rows]

    def summed(values: Floats) -> Floats:
        decoded = work.decoded(running_sums(at, values))[rows]
        found = np.bincount(mine, weights=decoded, minlength=len(chosen))
        return found.astype(np.float64)

    curves = np.empty((2, len(TIME_MULTIPLIERS), len(chosen)))
    each = np.arange(len(at))
    for k, multiplier in enumerate(TIME_MULTIPLIERS):
        best = np.argmin(gpu_s + multiplier * tpot, axis=0)
        curves[0, k] = summed(tpot[best, each])
        curves[1, k] = summed(gpu_s[best, each])
    return curves[0], curves[1]


def _paces(
    tables: Sequence[LatencyTable], max_running: int, context: Floats, multipliers: Multipliers
) -> tuple[Floats, Floats]:
    """Seconds and GPU-seconds per token, of each shape and batch size at each context."""
    pairs = [_engine(table, max_running, context) for table in tables]
    tpot = np.concatenate([tpot for tpot, _ in pairs])
    gpu_s = np.concatenate(
        [
            multipliers[table.gpu] * table.gpus * tpot / batch
            for table, (tpot, batch) in zip(tables, pairs, strict=True)
        ]
    )
    return tpot, gpu_s


def _engine(table: LatencyTable, max_running: int, context: Floats) -> tuple[Floats, Floats]:
    """Seconds per token and batch of an engine, by batch size and context.

    Where KV does not hold a batch, the largest that it holds stands in its place, fractions of a
    sequence included.
    """
    largest = min(max_running, len(table.base_s) - 1)
    sizes = np.unique(np.geomspace(1, largest, BATCHES).round())
    held = np.maximum(table.kv_capacity_tokens / np.maximum(context, 1.0), 1.0)
    batch = np.minimum(sizes[:, None], held)
    base_s, per_context_s = table.token_s(largest)
    known = np.arange(1, largest + 1)
    base = np.interp(batch, known, base_s)
    per_context = np.interp(batch, known, per_context_s)
    return base + per_context * batch * context, batch


def _at(seconds: Floats, gpu_s: Floats, given_s: Floats) -> Floats:
    """GPU-seconds of each trajectory when its tokens get `given_s`: `seconds` ascends by row."""
    below = np.clip((seconds <= given_s).sum(axis=0) - 1, 0, len(seconds) - 2)
    each = np.arange(seconds.shape[1])
    left, right = seconds[below, each], seconds[below + 1, each]
    share = np.clip((given_s - left) / np.maximum(right - left, 1e-12), 0.0, 1.0)
    spent: Floats = gpu_s[below, each] * (1.0 - share) + gpu_s[below + 1, each] * share
    return spent


def _equal_progress_s(
    work: Demand,
    tables: Sequence[LatencyTable],
    pools: Mapping[str, int],
    max_running: int,
    multipliers: Multipliers,
) -> float:
    tokens = work.per_trajectory((work.last - work.prompt).astype(np.float64))
    tools = work.per_trajectory(work.tool_s)
    own_prefill = work.per_trajectory(prefill_alone_s(work, tables))
    order = np.argsort(tokens, kind="stable")
    made = tokens[order]
    progress = _levels(made)
    gained = np.diff(progress, prepend=0.0)
    left, context, tool_s = _left(work, order, made, progress, tools)
    paces = [_ClassPace(gpus, left, tool_s) for gpus in pools.values()]
    for table in tables:
        paces[list(pools).index(table.gpu)].add(table, *_engine(table, max_running, context))
    pace = _common_pace(paces)
    decode_s = np.interp(made, progress, np.cumsum(gained * pace))
    prefill_s = prefill_gpu_s(work, tables, multipliers)
    prefill_s /= sum(multipliers[gpu] * gpus for gpu, gpus in pools.items())
    prefill = np.maximum(prefill_s, own_prefill[order])
    return float((work.arrival_s[order] + decode_s + tools[order] + prefill).max())


class _ClassPace:
    """Seconds per token of trajectories on the GPUs of one class, by amount of progress."""

    def __init__(self, gpus: int, left: Floats, tool_s: Floats) -> None:
        self.left = left
        """Trajectories, by amount of progress."""
        self._gpus, self._tool_s = gpus, tool_s
        self._engines: list[tuple[LatencyTable, Floats, Floats]] = []

    def add(self, table: LatencyTable, tpot: Floats, batch: Floats) -> None:
        """Allow engines of a shape: their seconds per token by batch size and progress."""
        self._engines.append((table, tpot, batch))

    def alone_s(self) -> Floats:
        """The least, if all that are left are here."""
        pace = np.full(len(self.left), np.inf)
        for table, tpot, batch in self._engines:
            # By Little's law: as many are in flight as there are slots, the others in their tools.
            full = self.left * tpot * table.gpus / (self._gpus * batch) - self._tool_s
            pace = np.minimum(pace, np.maximum(tpot, full).min(axis=0))
        return pace

    def held(self, pace_s: Floats) -> Floats:
        """Trajectories that can advance at a pace here."""
        held = np.zeros(len(self.left))
        for table, tpot, batch in self._engines:
            slots = self._gpus * batch / (table.gpus * tpot)
            most = np.where(tpot <= pace_s, slots, 0.0).max(axis=0)
            np.maximum(held, most * (pace_s + self._tool_s), out=held)
        return held


_HALVINGS = 24
"""Of the interval that holds the common pace of several classes."""


def _common_pace(classes: Sequence[_ClassPace]) -> Floats:
    """The least seconds per token at which the classes together advance all that are left."""
    high: Floats = np.min([each.alone_s() for each in classes], axis=0)
    if len(classes) == 1:
        return high
    left, low = classes[0].left, np.zeros(len(high))
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        enough = np.sum([each.held(middle) for each in classes], axis=0) >= left
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high


def _left(
    work: Demand, order: Ints, made: Floats, progress: Floats, tools: Floats
) -> tuple[Floats, Floats, Floats]:
    """What is left when each makes the tokens up to `progress` from the amount before it.

    How many trajectories, their mean context in tokens, and their mean tool seconds per token.
    Contexts grow evenly from the first prompt to the end. `made` are the tokens in ascending order.
    """
    steps = np.bincount(work.trajectory, minlength=len(order))
    stop = np.cumsum(steps)
    begin = work.prompt[stop - steps][order].astype(np.float64)
    end = work.last[stop - 1][order].astype(np.float64)
    per_token = np.maximum(made, 1.0)
    ended = np.searchsorted(made, progress, side="left")
    left = (len(order) - ended).astype(np.float64)

    def mean(values: Floats) -> Floats:
        found: Floats = np.cumsum(values[::-1])[::-1][ended] / left
        return found

    half_way = progress - np.diff(progress, prepend=0.0) / 2.0
    context = mean(begin) + mean((end - begin) / per_token) * half_way
    return left, context, mean(tools[order] / per_token)


def _levels(made: Floats) -> Floats:
    """Amounts of progress up to the most, of tokens made in ascending order.

    Those at which a trajectory ends, of a large trace half of `LEVELS` evenly and the last ones;
    between them some more, while contexts grow.
    """
    if len(made) > LEVELS:
        half = LEVELS // 2
        evenly = np.linspace(0, len(made) - half - 1, half).astype(np.int64)
        made = np.append(made[evenly], made[-half:])
    return np.unique(np.append(made, np.linspace(0.0, made[-1], GROWTH)))
