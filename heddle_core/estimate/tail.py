"""The last trajectories of a rollout, their homes, and the estimated end of each.

No step waits any more. A trajectory ends when its own work is done; those on the same engine slow
it down until then. With the terms of `heddle_core.estimate.group_cost`: alone, member `i` takes
``solo_i``, of which ``tool_i`` in tools, and it delays each other member by ``w_i``:

    end_i = solo_i + (solo_i - tool_i) * sum over the others j of w_j / max(solo_i, solo_j)

Two members slow each other down while both run, but not during a tool call. A move to another
engine costs the prefill of the context, or its load where engines share a store of KV.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import FloatArray, IntArray, Work, engine_work_s, solo_s
from heddle_core.ids import EngineShape

_LEAST_AT_ONCE, _MOST_AT_ONCE = 4, 64
"""Trajectories whose moves are compared together: twice as many each time that none moves."""

_STEPS = 12
"""Parts of the time that work goes on for; the pace of each engine is constant in each."""

_ROUNDS = 3
"""Passes over all trajectories while moves still gain; most move in the first."""


def last_end_s(ends: FloatArray) -> float:
    """Estimated end of the last of these, with allowance for errors: above the largest of them.

    The more there are, the larger is the allowance. So compare ends of the same trajectories. It is
    their norm of order 4. The maximum would not do: predictions of the remaining tokens err by
    half, so the second or third by estimate may be the last.
    """
    return math.sqrt(math.sqrt(_fourth_power(ends).sum()))


def _fourth_power(values: FloatArray) -> FloatArray:
    squares = values * values
    return squares * squares


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Of all trajectories where they are."""

    powers: FloatArray
    """The fourth, of their ends."""
    total: float
    kv: FloatArray
    """Tokens by engine."""
    full: NDArray[np.bool_]


class TailModel:
    """Trajectories on engines; their estimated ends are kept up to date as homes move.

    Engines are numbers, positions in `shapes`; -1 stands for no home.
    """

    def __init__(
        self,
        work: Work,
        homes: IntArray,
        shapes: Sequence[EngineShape],
        by_shape: Mapping[EngineShape, StepCost],
        *,
        max_running: int,
    ) -> None:
        self.work = work
        self.homes = homes.copy()
        self._origins = homes
        known = sorted(by_shape)
        costs = [by_shape[shape] for shape in known]
        self._row = np.array([known.index(shape) for shape in shapes], dtype=np.int64)
        """Of the tables below, for each engine."""
        self._solo = np.array([solo_s(work, cost) for cost in costs])
        self._own = np.array([engine_work_s(work, cost) for cost in costs])
        self._restore = np.array([cost.restore_s * work.context_tokens for cost in costs])
        self._t0 = np.array([cost.t0_s for cost in costs])
        self._t1 = np.array([cost.t1_s for cost in costs])
        self._t2 = np.array([cost.t2_s for cost in costs])
        self._prefill_s = np.array([cost.prefill_s for cost in costs])
        self._kv = work.context_tokens + work.output_tokens + work.appended_tokens
        self._kv_capacity = np.array([float(by_shape[s].kv_capacity_tokens) for s in shapes])
        self._max_running = max_running
        self._all = np.arange(len(work))
        # Of each trajectory at its home: row of the tables, time alone, and work.
        self._rows = self._row[self.homes]
        self._solo_here = self._solo[self._rows, self._all]
        self._own_here = self._own[self._rows, self._all]
        self.ends = np.zeros(len(work))
        for engine in np.unique(homes[homes >= 0]).tolist():
            self._end_at_home(engine)

    def end_s(self) -> float:
        """Estimated end of the last, with allowance for errors; see `last_end_s`."""
        return last_end_s(self.ends)

    def _end_at_home(self, engine: int) -> None:
        """Set the ends of those whose home it is: `ends_at` of each, to the digit."""
        own = (self.homes == engine).nonzero()[0]
        row = self._row[engine]
        solo = self._solo[row, own]
        shares = self._own[row, own] / np.maximum(solo[:, None], solo)
        np.fill_diagonal(shares, 0.0)
        load = np.cumsum(shares, axis=1)[:, -1]  # in the order of bincount: sum would be pairwise
        away = self._origins[own] != engine
        ends = solo + (solo - self.work.tool_s[own]) * load
        self.ends[own] = ends + np.where(away, self._restore[row, own], 0.0)

    def ends_at(self, i: int) -> FloatArray:
        """Estimated end of `i` on each engine, others where they are."""
        one = self._all[i : i + 1]
        ends: FloatArray = self._ends_at(one, self._longer_s(one))[0]
        return ends

    def _longer_s(self, some: IntArray) -> FloatArray:
        """Of each of `some` where each trajectory is and that one itself, the longer time alone."""
        longer_s: FloatArray = np.maximum(self._solo_here, self._solo.T[some][:, self._rows])
        return longer_s

    def _ends_at(self, some: IntArray, longer_s: FloatArray) -> FloatArray:
        share = self._own_here / longer_s
        share[self._all[: len(some)], some] = 0.0
        load = self._by_engine(self.homes + 1, share, len(self._row) + 1)[:, 1:]
        solo = self._solo.T[some][:, self._row]
        ends: FloatArray = solo + (solo - self.work.tool_s[some, None]) * load
        restore_s: FloatArray = self._restore.T[some][:, self._row]
        origins = self._origins[some]
        placed = (origins >= 0).nonzero()[0]
        restore_s[placed, origins[placed]] = 0.0
        return ends + restore_s

    def _by_engine(self, homes: IntArray, values: FloatArray, engines: int) -> FloatArray:
        """Sum each row of `values`, which has a value for each trajectory, by their homes."""
        count = len(values)
        places = self._all[:count, None] * engines + homes
        sums = np.bincount(places.ravel(), values.ravel(), count * engines)
        return np.asarray(sums.reshape(count, engines), np.float64)

    def move(self, i: int, engine: int) -> None:
        one = self._all[i : i + 1]
        longer_s = self._longer_s(one)
        delays = self._delays(one, longer_s)[0]
        if self.homes[i] >= 0:
            self.ends -= np.where(self.homes == self.homes[i], delays, 0.0)
        self.ends += np.where(self.homes == engine, delays, 0.0)
        self.homes[i] = engine
        self._rows[i] = row = self._row[engine]
        self._solo_here[i], self._own_here[i] = self._solo[row, i], self._own[row, i]
        self.ends[i] = self._ends_at(one, longer_s)[0, engine]

    def assign_unplaced(self) -> None:
        """Give each trajectory without a home the engine where it ends earliest, longest first."""
        homeless = np.flatnonzero(self.homes < 0)
        longest = homeless[np.argsort(-self._solo[0, homeless], kind="stable")]
        for i in longest.tolist():
            self.move(i, int(self.ends_at(i).argmin()))

    def relocate(self, *, least_gain_s: float) -> None:
        """Move homes as long as a move brings the end forward by `least_gain_s`, latest first."""
        for _ in range(_ROUNDS):
            order, held = np.argsort(-self.ends, kind="stable"), self._held()
            moved, tried, at_once = False, 0, _LEAST_AT_ONCE
            while tried < len(order):
                some = order[tried : tried + at_once]
                gains_s, best = self._best_moves(some, held)
                gaining = (gains_s >= least_gain_s).nonzero()[0]
                if len(gaining):
                    first = int(gaining[0])
                    self.move(int(some[first]), int(best[first]))
                    held, moved = self._held(), True
                    tried, at_once = tried + first + 1, _LEAST_AT_ONCE
                else:
                    tried, at_once = tried + at_once, min(2 * at_once, _MOST_AT_ONCE)
            if not moved:
                return

    def after(self, seconds: float) -> Work:
        """What is left of all work `seconds` later, with nobody waiting.

        Contexts that came from other engines are restored first, one after another. Then all
        members of an engine take part in every iteration, but for their time in tools. Work that
        is done has no output left.
        """
        work, engines = self.work, len(self._row)
        output = work.output_tokens
        appended, prefill = work.appended_tokens / output, work.prefill_tokens / output
        tool_s = work.tool_s / output
        row = self._rows
        restore_s = np.where(self.homes != self._origins, self._restore[row, self._all], 0.0)
        restoring_s = np.bincount(self.homes, restore_s, engines)
        step_s = np.maximum(seconds - restoring_s, 0.0)[self.homes] / _STEPS
        left, context = output.copy(), work.context_tokens.copy()
        tau = self._t0[row]
        for _ in range(_STEPS):
            share = np.where(left > 0.0, tau / (tau + tool_s), 0.0)
            load = self._t1[row] + self._t2[row] * context + self._prefill_s[row] * prefill
            tau = self._t0[row] + np.bincount(self.homes, share * load, engines)[self.homes]
            tokens = np.minimum(left, step_s / (tau + tool_s))
            left -= tokens
            context += tokens * (1.0 + appended)
        return replace(
            work,
            output_tokens=left,
            context_tokens=context,
            appended_tokens=appended * left,
            prefill_tokens=prefill * left,
            tool_s=tool_s * left,
        )

    def _delays(self, some: IntArray, longer_s: FloatArray) -> FloatArray:
        """By how much each of `some` delays each other one, if their homes are or were the same."""
        alone_s = self._solo_here - self.work.tool_s
        delays: FloatArray = alone_s * self._own.T[some][:, self._rows] / longer_s
        delays[self._all[: len(some)], some] = 0.0
        return delays

    def _held(self) -> _Held:
        engines = len(self._row)
        powers = _fourth_power(self.ends)
        members = np.bincount(self.homes, minlength=engines)
        return _Held(
            powers=powers,
            total=float(powers.sum()),
            kv=np.asarray(np.bincount(self.homes, self._kv, engines), np.float64),
            full=members >= self._max_running,
        )

    def _best_moves(self, some: IntArray, held: _Held) -> tuple[FloatArray, IntArray]:
        """By how much the end is earlier if one of `some` moves to its best engine, and which."""
        homes, powers, engines = self.homes[some], held.powers, len(self._row)
        longer_s = self._longer_s(some)
        delays = self._delays(some, longer_s)
        left = self.homes == homes[:, None]
        relief = np.where(left, powers - _fourth_power(self.ends - delays), 0.0).sum(axis=1)
        change = self._by_engine(self.homes, _fourth_power(self.ends + delays) - powers, engines)
        change += _fourth_power(self._ends_at(some, longer_s)) - (powers[some] + relief)[:, None]
        kv = held.kv + self._kv[some, None]
        change[(kv > self._kv_capacity) | held.full] = np.inf
        each = self._all[: len(some)]
        change[each, homes] = 0.0
        best = change.argmin(axis=1)
        after = np.maximum(held.total + change[each, best], 0.0)
        return math.sqrt(math.sqrt(held.total)) - np.sqrt(np.sqrt(after)), best
