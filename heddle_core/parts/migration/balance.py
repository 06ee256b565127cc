"""Migration to where a trajectory would end earliest, by estimated work on every engine.

Plans are inexact: cost estimates are coarse and predictions are revised. This part balances the
remaining work during tool calls. It keeps two sums for every engine over its unfinished
trajectories, with the terms of `heddle_core.estimate.group_cost`:

    full_e = sum of t0 * o_k * max(mean context / KV capacity, 1 / slots) + w_k    (a full engine)
    work_e = sum of w_k                     (the delay of one that runs all the time by the others)

A trajectory ends on `e` at about ``max(full_e, solo + work_e)``; it moves when another engine's
end, the unhidden part of the transfer included, is earlier by a margin.
"""

from array import array

import numpy as np

from heddle_core.estimate.group_cost import FloatArray, IntArray
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.policy import PolicyContext, TrajectoryView, View

_COUNT_AGAIN_S = 5.0
"""Age at which the sums are computed again: estimates arrive at tool calls, and long generations
make them stale. On math (14B, 64 H100) stale sums cost up to 15 % of the makespan."""

_LEAST_LEFT = 0.25
"""Least share of its estimate that a running step keeps: it has not ended."""


class Balance:
    """The migration part; estimates each engine's work from the estimates at tool calls."""

    def __init__(
        self, context: PolicyContext, *, min_gain_s: float = 2.0, margin: float = 0.05
    ) -> None:
        """Move for at least `min_gain_s` and for at least a share `margin` of the end at home."""
        self._context = context
        self._min_gain_s, self._margin = min_gain_s, margin
        self._names: list[EngineId] = []
        self._index: dict[EngineId, int] = {}
        self._counted_s = -_COUNT_AGAIN_S
        self._share: dict[TrajectoryId, tuple[int, float, float]] = {}
        """By trajectory: its engine, and its share of the engine's two sums."""
        self._full: FloatArray = np.zeros(0)
        self._work: FloatArray = np.zeros(0)
        history = context.history
        self._appended = history.appended_per_output if history else 0.0
        self._tool_s = history.tool_s_per_output if history else 0.0

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        """Return the engine to move to, or None to stay."""
        if (
            view.now_s - self._counted_s >= _COUNT_AGAIN_S
            or len(self._names) != len(view.engines)
            or any(e.id not in self._index for e in view.engines)
        ):
            self._start_over(view)
        home = self._index.get(t.home) if t.home is not None else None
        if home is None:
            return None
        self._drop(t.id)
        own_full, own_work, solo = self._estimated(
            np.array([max(remaining_tokens, 1.0)]), np.array([float(t.context_tokens)]), slice(None)
        )
        full, work = self._full + own_full, self._work + solo
        ends = np.maximum(full, work)
        price_s = self._context.cost.transfer_s(t.context_tokens) - self._mean_tool_s(t)
        end_at_home = float(ends[home])
        if price_s > 0.0:
            ends += price_s
            ends[home] = end_at_home
        best = int(ends.argmin())
        gain_s = end_at_home - float(ends[best])
        moves = best != home and gain_s > max(self._min_gain_s, self._margin * end_at_home)
        self._add(t.id, best if moves else home, own_full, own_work)
        return self._names[best] if moves else None

    def finished(self, t: TrajectoryView) -> None:
        """Remove a finished trajectory from the sums."""
        self._drop(t.id)

    def _estimated(
        self, output: FloatArray, context_tokens: FloatArray, at: IntArray | slice
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Shares of trajectories in the two sums of engines `at`, and their solo times there."""
        appended = self._appended * output
        context = context_tokens + 0.5 * (output + appended)
        work = output * (self._t1[at] + self._t2[at] * context) + self._prefill[at] * appended
        pace = np.maximum(context / self._kv[at], 1.0 / self._context.max_running)
        solo = self._t0[at] * output + work + self._tool_s * output
        return self._t0[at] * output * pace + work, work, solo

    def _start_over(self, view: View) -> None:
        """Compute the sums again from all unfinished trajectories and their running steps."""
        engines = view.engines
        self._counted_s = view.now_s
        self._names = [e.id for e in engines]
        self._index = {name: i for i, name in enumerate(self._names)}
        costs = [self._context.cost.by_shape[e.shape] for e in engines]
        self._t0 = np.array([c.t0_s for c in costs])
        self._t1 = np.array([c.t1_s for c in costs])
        self._t2 = np.array([c.t2_s for c in costs])
        self._prefill = np.array([c.prefill_s for c in costs])
        self._kv = np.array([float(e.kv_capacity_tokens) for e in engines])
        tpot_s = [
            c.iteration_s(max(e.running_steps, 1), e.estimated_kv_tokens)
            for c, e in zip(costs, engines, strict=True)
        ]
        ids: list[TrajectoryId] = []
        homes, left, contexts = array("q"), array("d"), array("d")
        for t in view.trajectories.values():
            home = self._index.get(t.home) if t.home is not None else None
            if home is None:
                continue
            remaining = t.remaining_tokens
            if t.phase in ("running", "preempting"):
                made = (view.now_s - t.dispatched_s) / tpot_s[home]
                remaining = max(remaining - made, _LEAST_LEFT * remaining)
            ids.append(t.id)
            homes.append(home)
            left.append(max(remaining, 1.0))
            contexts.append(t.context_tokens)
        at = np.array(homes, dtype=np.int64)
        full, work, _ = self._estimated(np.array(left), np.array(contexts), at)
        self._full = np.bincount(at, full, len(engines)).astype(np.float64)
        self._work = np.bincount(at, work, len(engines)).astype(np.float64)
        shares = zip(homes, full.tolist(), work.tolist(), strict=True)
        self._share = dict(zip(ids, shares, strict=True))

    def _add(
        self, trajectory: TrajectoryId, engine: int, full: FloatArray, work: FloatArray
    ) -> None:
        share = (engine, float(full[engine]), float(work[engine]))
        self._share[trajectory] = share
        self._full[engine] += share[1]
        self._work[engine] += share[2]

    def _drop(self, trajectory: TrajectoryId) -> None:
        share = self._share.pop(trajectory, None)
        if share is not None:
            self._full[share[0]] -= share[1]
            self._work[share[0]] -= share[2]

    def _mean_tool_s(self, t: TrajectoryView) -> float:
        """Mean seconds of its tool calls so far: the estimate for this one."""
        return t.tool_s / t.step if t.step else 0.0
