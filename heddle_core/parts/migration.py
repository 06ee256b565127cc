"""Migrations: when a home moves while a tool runs."""

import math
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import numpy as np
from mypy_extensions import mypyc_attr

from heddle_core.estimate.arrival_waves import ArrivalWaves
from heddle_core.estimate.group_cost import FloatArray, IntArray
from heddle_core.estimate.ordered import longest_to
from heddle_core.estimate.paper_cost import seconds_per_token
from heddle_core.estimate.shape_load import EngineSums
from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.policy import EngineView, PolicyContext, TrajectoryView, View
from heddle_core.sorted_numbers import SortedNumbers
from heddle_core.trajectory import Trajectory


@mypyc_attr(allow_interpreted_subclasses=True)
class Never:
    """Every trajectory keeps its home until its next step is placed."""

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        return None

    def finished(self, t: TrajectoryView) -> None:
        """Forget nothing: nothing was kept."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Carry(Never):
    """Homes never move while a tool runs; when it has returned, KV follows the placement.

    Libra's choice between migration and recomputation (arXiv 2606.03077): the estimated transfer of
    the context against its estimated prefill on the new engine.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._cost = context.cost

    def carries_kv(self, t: TrajectoryView, target: EngineView, view: View) -> bool:
        """Whether the transfer of the context takes less time than its prefill on `target`."""
        tokens = t.context_tokens
        restore_s = self._cost.by_shape[target.shape].restore_s
        return self._cost.transfer_s(tokens) < restore_s * tokens


_COUNT_AGAIN_S = 5.0
"""Age at which the sums are computed again: estimates arrive at tool calls, and long generations
make them stale. On math (14B, 64 H100) stale sums cost up to 15 % of the makespan."""

_AT_ONCE = 1_000
"""Trajectories read together: they stay in a near cache from one value to the next."""

_LEAST_LEFT = 0.25
"""Least share of its estimate that a running step keeps: it has not ended."""


@dataclass(slots=True)
class _Share:
    """Share of a trajectory in the sums of its engine."""

    counts: int = -1
    """Number of the sums that it is part of; of older ones, `Balance._rows` has it."""
    engine: int = -1
    full_s: float = 0.0
    work_s: float = 0.0


@mypyc_attr(allow_interpreted_subclasses=True)
class Balance:
    """To where a trajectory would end earliest, by estimated work on every engine.

    Plans are inexact: cost estimates are coarse and predictions are revised. This part balances the
    remaining work during tool calls. It keeps the two sums of `EngineSums` for every engine over
    its unfinished trajectories. One moves when another engine's end, the unhidden part of the
    transfer included, is earlier by a margin.

    Where predictions vary as lengths did, an arrival also pays for its delay of the longest
    trajectory of an engine: then that is known, and the plan may have given it an engine of its
    own.
    """

    def __init__(
        self, context: PolicyContext, *, min_gain_s: float = 2.0, margin: float = 0.05
    ) -> None:
        """Move for at least `min_gain_s` and for at least a share `margin` of the end at home."""
        self._context = context
        self._min_gain_s, self._margin = min_gain_s, margin
        self._names: list[EngineId] = []
        self._number: dict[EngineId | None, int] = {}
        """Position of each engine in the order in which they became ready."""
        self._shapes: list[EngineSums] = []
        self._members: list[list[int]] = []
        """Numbers of the engines of each of `_shapes`, ascending."""
        self._place: list[tuple[int, int]] = []
        """Of each engine: its shape, and its position among the engines of that shape."""
        self._counts = 0
        """How often the sums were computed."""
        self._counted_s = -_COUNT_AGAIN_S
        self._shares: dict[TrajectoryId, _Share] = {}
        self._rows: dict[TrajectoryId, int] = {}
        """Rows below of trajectories whose share has not changed since the sums were computed."""
        self._row_engine: IntArray = np.zeros(0, dtype=np.int64)
        self._row_full: FloatArray = np.zeros(0)
        self._row_work: FloatArray = np.zeros(0)
        self._known: bool | None = None
        """Whether lengths are known well enough to protect an engine's longest trajectory."""
        history = context.history
        self._appended = history.appended_per_output if history else 0.0
        self._tool_s = history.tool_s_per_output if history else 0.0

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        """Return the engine to move to, or None to stay."""
        engines = view.engines
        # Engines join at the end, and ids are never used twice: the last and their number suffice.
        known = self._names
        if len(known) != len(engines) or known[-1] != engines[-1].id:
            self._lay_out(engines)
            self._count_again(view)
        elif view.now_s - self._counted_s >= _COUNT_AGAIN_S:
            self._count_again(view)
        home = self._number.get(t.home, -1)
        if home < 0:
            return None
        output, context = max(remaining_tokens, 1.0), float(t.context_tokens)
        shape, at = self._place[home]
        sums = self._shapes[shape]
        full_s, work_s = self._without(t.id, home)
        own_full_s, own_work_s, solo_s = sums.own(output, context, at)
        delayed_s = work_s + own_work_s + sums.longest_s(at)
        end_at_home_s = max(full_s + own_full_s, work_s + solo_s, delayed_s)
        least_gain_s = max(self._min_gain_s, self._margin * end_at_home_s)
        price_s = self._context.cost.transfer_s(t.context_tokens) - _mean_tool_s(t)
        before_s = math.nextafter(end_at_home_s - least_gain_s, math.inf)
        # The end at home is not before that, even less with its share and the price.
        end_s, best = self._earliest(output, context, max(price_s, 0.0), before_s)
        if best < 0 or end_at_home_s - end_s <= least_gain_s:
            sums.put(at, full_s + own_full_s, work_s + own_work_s)
            self._keep_share(t.id, home, own_full_s, own_work_s)
            return None
        sums.put(at, full_s, work_s)
        shape, at = self._place[best]
        sums = self._shapes[shape]
        full_s, work_s = sums.sums(at)
        own_full_s, own_work_s, _ = sums.own(output, context, at)
        sums.put(at, full_s + own_full_s, work_s + own_work_s)
        self._keep_share(t.id, best, own_full_s, own_work_s)
        return self._names[best]

    def finished(self, t: TrajectoryView) -> None:
        engine, full_s, work_s = self._pop_share(t.id)
        if engine >= 0:
            self._subtract(engine, full_s, work_s)
        self._shares.pop(t.id, None)

    def _earliest(
        self, output: float, context_tokens: float, price_s: float, before_s: float
    ) -> tuple[float, int]:
        """Earliest end before `before_s`, and the first engine with it; -1 if there is none."""
        end_s, best = before_s, -1
        for sums, members in zip(self._shapes, self._members, strict=True):
            # Of equal ends, that on the engine with the lowest number counts.
            until_s = end_s if best < 0 else math.nextafter(end_s, math.inf)
            found_s, at = sums.earliest(output, context_tokens, price_s, until_s)
            if at >= 0 and (best < 0 or found_s < end_s or members[at] < best):
                end_s, best = found_s, members[at]
        return end_s, best

    def _without(self, trajectory: TrajectoryId, home: int) -> tuple[float, float]:
        """Return the sums of `home` without a trajectory, whose share is forgotten."""
        engine, share_full_s, share_work_s = self._pop_share(trajectory)
        shape, at = self._place[home]
        full_s, work_s = self._shapes[shape].sums(at)
        if engine == home:
            return full_s - share_full_s, work_s - share_work_s
        if engine >= 0:
            self._subtract(engine, share_full_s, share_work_s)
        return full_s, work_s

    def _keep_share(
        self, trajectory: TrajectoryId, engine: int, full_s: float, work_s: float
    ) -> None:
        share = self._shares.get(trajectory)
        if share is None:
            share = self._shares[trajectory] = _Share()
        share.counts, share.engine = self._counts, engine
        share.full_s, share.work_s = full_s, work_s

    def _pop_share(self, trajectory: TrajectoryId) -> tuple[int, float, float]:
        """Forget the engine and share of a trajectory, and return them; -1 for no engine."""
        share = self._shares.get(trajectory)
        if share is not None and share.counts == self._counts:
            share.counts = -1
            return share.engine, share.full_s, share.work_s
        row = self._rows.pop(trajectory, -1)
        engine = self._row_engine.item(row) if row >= 0 else len(self._names)
        if engine == len(self._names):
            return -1, 0.0, 0.0
        return engine, self._row_full.item(row), self._row_work.item(row)

    def _subtract(self, engine: int, share_full_s: float, share_work_s: float) -> None:
        shape, at = self._place[engine]
        full_s, work_s = self._shapes[shape].sums(at)
        self._shapes[shape].put(at, full_s - share_full_s, work_s - share_work_s)

    def _lay_out(self, engines: Sequence[EngineView]) -> None:
        """Number the engines, and list them by shape."""
        self._names = [e.id for e in engines]
        self._number = {name: number for number, name in enumerate(self._names)}
        by_shape: dict[EngineShape, list[int]] = {}
        self._place = []
        order: dict[EngineShape, int] = {}
        for number, e in enumerate(engines):
            members = by_shape.setdefault(e.shape, [])
            self._place.append((order.setdefault(e.shape, len(order)), len(members)))
            members.append(number)
        self._members = list(by_shape.values())
        self._shapes = [
            EngineSums(
                self._context.cost.by_shape[shape],
                [float(engines[number].kv_capacity_tokens) for number in members],
                max_running=self._context.max_running,
                appended_per_output=self._appended,
                tool_s_per_output=self._tool_s,
            )
            for shape, members in by_shape.items()
        ]
        costs = [self._context.cost.by_shape[e.shape] for e in engines]
        # One more, for trajectories without an engine.
        costs.append(costs[-1])
        self._t0 = np.array([c.t0_s for c in costs])
        self._t1 = np.array([c.t1_s for c in costs])
        self._t2 = np.array([c.t2_s for c in costs])
        self._prefill = np.array([c.prefill_s for c in costs])
        self._kv = np.array([*(float(e.kv_capacity_tokens) for e in engines), math.inf])

    def _count_again(self, view: View) -> None:
        """Compute the sums again from all unfinished trajectories and their running steps."""
        engines, now_s = view.engines, view.now_s
        self._counted_s = now_s
        by_shape = self._context.cost.by_shape
        tpot_s = [
            by_shape[e.shape].iteration_s(max(e.running_steps, 1), e.estimated_kv_tokens)
            for e in engines
        ]
        tpot_s.append(math.inf)
        none = len(engines)
        number = self._number
        ts = cast("list[Trajectory]", list(view.trajectories.values()))  # read faster, compiled
        at, running = np.zeros(len(ts), np.int64), np.zeros(len(ts), np.bool_)
        left, context, dispatched_s = (np.zeros(len(ts)) for _ in range(3))
        for first in range(0, len(ts), _AT_ONCE):
            some, part = ts[first : first + _AT_ONCE], slice(first, first + _AT_ONCE)
            at[part] = _ints([number.get(t.home, none) for t in some])
            left[part] = _floats([t.remaining_tokens for t in some])
            context[part] = _ints([t.context_tokens for t in some])
            dispatched_s[part] = _floats([t.dispatched_s for t in some])
            running[part] = [t.phase in ("running", "preempting") for t in some]
        made = (now_s - dispatched_s) / np.array(tpot_s)[at]
        left = np.where(running, np.maximum(left - made, _LEAST_LEFT * left), left)
        full, work = self._estimated(np.maximum(left, 1.0), context, at)
        self._counts += 1
        self._rows = dict(zip(view.trajectories, range(len(ts)), strict=True))
        self._row_engine, self._row_full, self._row_work = at, full, work
        full_s = np.bincount(at, full, none + 1).astype(np.float64)
        work_s = np.bincount(at, work, none + 1).astype(np.float64)
        longest_s = np.full(none + 1, -math.inf)
        if self._lengths_known(ts):
            np.maximum.at(longest_s, at, np.maximum(left, 1.0) * (self._t0[at] + self._tool_s))
        for sums, members in zip(self._shapes, self._members, strict=True):
            sums.replace(full_s[members], work_s[members], longest_s[members])

    def _lengths_known(self, ts: Sequence[TrajectoryView]) -> bool:
        """Whether predictions varied as lengths do, when they were first looked at."""
        if self._known is None:
            history = self._context.history
            totals = [t.output_tokens + t.remaining_tokens for t in ts]
            self._known = history is not None and history.lengths_known(totals)
        return self._known

    def _estimated(
        self, output: FloatArray, context_tokens: FloatArray, at: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Shares of trajectories in the two sums of engines `at`: `EngineSums.own` for arrays."""
        appended = self._appended * output
        context = context_tokens + 0.5 * (output + appended)
        work = output * (self._t1[at] + self._t2[at] * context) + self._prefill[at] * appended
        pace = np.maximum(context / self._kv[at], 1.0 / self._context.max_running)
        return self._t0[at] * output * pace + work, work


def _floats(values: list[float]) -> FloatArray:
    """An array of numbers; to pack them takes a fifth of the time of `numpy.array`."""
    return np.frombuffer(struct.pack(f"{len(values)}d", *values), np.float64)


def _ints(values: list[int]) -> IntArray:
    return np.frombuffer(struct.pack(f"{len(values)}q", *values), np.int64)


def _mean_tool_s(t: TrajectoryView) -> float:
    """Mean seconds of its tool calls so far: the estimate for this one."""
    return t.tool_s / t.step if t.step else 0.0


@mypyc_attr(allow_interpreted_subclasses=True)
class BalanceBatches:
    """`Balance` while most unfinished trajectories came in one wave, else homes stay.

    Where others arrive all the time, new ones fill an engine that has fallen idle, without a move
    (`ArrivalWaves`).
    """

    def __init__(self, context: PolicyContext) -> None:
        self._waves = ArrivalWaves()
        self._ends = 0
        self.inner = Balance(context)

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        """Return the engine to move to, or None to stay."""
        self._waves.arrived(self._ends + view.unfinished)
        return self.inner.target(t, remaining_tokens, view) if self._waves.batch else None

    def finished(self, t: TrajectoryView) -> None:
        """Count the end of a trajectory, and forget it."""
        self._ends += 1
        self._waves.ended(t.arrival)
        self.inner.finished(t)


@mypyc_attr(allow_interpreted_subclasses=True)
class FollowRank:
    """Heddle (arXiv 2603.28101): the rank falls into a group, and its engine is the new home.

    Group sizes are those at the first call, scaled by the share of trajectories that is left
    (``s_i * n / n_0``). Trajectories are ranked by predicted total length. Ranked by remaining
    tokens, running ones would fall below waiting ones at every step, and progress alone would move
    them to other engines.

    With a `context`, a rank is followed only to where the trajectory would end earlier. That
    departs from the paper. A predictor that hedges raises the total of every trajectory that goes
    on, so survivors rank above those not predicted again, and all follow their ranks to the widest
    engine.
    """

    def __init__(self, context: PolicyContext | None = None) -> None:
        self._context = context
        self._value: dict[TrajectoryId, float] = {}
        self._ranking = SortedNumbers()
        self._engines: list[EngineId] = []
        """Widest first."""
        self._newest: EngineId | None = None
        self._edges: list[int] = []

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        """Return the engine whose group contains the rank of `t`, None if that is its home."""
        engines = view.engines
        # Engines join at the end, and ids are never used twice: the last and their number suffice.
        if len(self._engines) != len(engines) or self._newest != engines[-1].id:
            self._form_groups(view)
        value = t.output_tokens + remaining_tokens
        self._forget(t.id)
        longer = self._ranking.above(value)
        self._value[t.id] = value
        self._ranking.add(value)
        rank = longer * self._edges[-1] / len(self._ranking)
        found = self._engines[min(bisect_right(self._edges, rank), len(self._engines) - 1)]
        if found == t.home or not self._earlier(t, remaining_tokens, found, view):
            return None
        return found

    def finished(self, t: TrajectoryView) -> None:
        """Take a finished trajectory out of the ranking."""
        self._forget(t.id)

    def _earlier(
        self, t: TrajectoryView, remaining_tokens: float, found: EngineId, view: View
    ) -> bool:
        """Whether `t` would end earlier there, after the transfer that its tool does not hide."""
        context = self._context
        if context is None or t.home is None:
            return True
        home, there = view.engine(t.home), view.engine(found)
        # The mean tool call so far stands for this one, which is over when a prediction is awaited.
        hidden_s = t.tool_s / t.step if t.step and t.phase == "tool" else 0.0
        price_s = max(context.cost.transfer_s(t.context_tokens) - hidden_s, 0.0)
        stay_s = self._end_s(t, remaining_tokens, home, home.sessions)
        return self._end_s(t, remaining_tokens, there, there.sessions + 1) + price_s < stay_s

    def _end_s(
        self, t: TrajectoryView, remaining_tokens: float, engine: EngineView, members: int
    ) -> float:
        """``L * T * F(g)`` with the trajectory's own remaining tokens for `L`."""
        assert self._context is not None
        return remaining_tokens * seconds_per_token(
            self._context.cost.by_shape[engine.shape],
            members,
            context_tokens=t.context_tokens + remaining_tokens / 2,
            max_running=engine.max_running,
        )

    def _form_groups(self, view: View) -> None:
        """Read the groups from the homes, widest engine first."""
        shapes = dict.fromkeys(e.shape for e in view.engines)
        costs = self._context.cost.by_shape if self._context is not None else {}
        key = longest_to(shapes, costs)
        engines = sorted(view.engines, key=lambda e: key(e.shape) if costs else -e.shape.gpus)
        self._engines = [e.id for e in engines]
        self._newest = view.engines[-1].id
        self._edges = list(accumulate(e.sessions for e in engines))
        self._value = {
            other.id: other.output_tokens + other.remaining_tokens
            for other in view.trajectories.values()
        }
        self._ranking = SortedNumbers(self._value.values())

    def _forget(self, trajectory: TrajectoryId) -> None:
        value = self._value.pop(trajectory, None)
        if value is not None:
            self._ranking.remove(value)
