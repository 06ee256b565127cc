"""`Balance` as it was before it searched: every call compares all engines. The oracle of a test."""

import numpy as np

from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.policy import PolicyContext, TrajectoryView, View


class ScanningBalance:
    """The same decisions, by arrays over all engines."""

    def __init__(self, context: PolicyContext, *, min_gain_s: float, margin: float) -> None:
        self._context, self._min_gain_s, self._margin = context, min_gain_s, margin
        self._names: list[EngineId] = []
        self._counted_s = -5.0
        self._share: dict[TrajectoryId, tuple[int, float, float]] = {}
        self._known: bool | None = None
        history = context.history
        self._appended = history.appended_per_output if history else 0.0
        self._tool_s = history.tool_s_per_output if history else 0.0

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        if view.now_s - self._counted_s >= 5.0 or self._names != [e.id for e in view.engines]:
            self._start_over(view)
        if t.home not in self._names:
            return None
        home = self._names.index(t.home)
        self.finished(t)
        output, context = max(remaining_tokens, 1.0), float(t.context_tokens)
        own_full, own_work, solo = self._estimated(output, context, np.arange(len(self._names)))
        ends = np.maximum(self._full + own_full, self._work + solo)
        ends = np.maximum(ends, self._work + own_work + self._longest)
        tool_s = t.tool_s / t.step if t.step else 0.0
        price_s = self._context.cost.transfer_s(t.context_tokens) - tool_s
        end_at_home = float(ends[home])
        if price_s > 0.0:
            ends += price_s
            ends[home] = end_at_home
        best = int(ends.argmin())
        gain_s = end_at_home - float(ends[best])
        moves = best != home and gain_s > max(self._min_gain_s, self._margin * end_at_home)
        at = best if moves else home
        self._share[t.id] = (at, float(own_full[at]), float(own_work[at]))
        self._full[at] += own_full[at]
        self._work[at] += own_work[at]
        return self._names[best] if moves else None

    def finished(self, t: TrajectoryView) -> None:
        share = self._share.pop(t.id, None)
        if share is not None:
            self._full[share[0]] -= share[1]
            self._work[share[0]] -= share[2]

    def _estimated(self, output, context_tokens, at):
        appended = self._appended * output
        context = context_tokens + 0.5 * (output + appended)
        work = output * (self._t1[at] + self._t2[at] * context) + self._prefill[at] * appended
        pace = np.maximum(context / self._kv[at], 1.0 / self._context.max_running)
        solo = self._t0[at] * output + work + self._tool_s * output
        return self._t0[at] * output * pace + work, work, solo

    def _start_over(self, view: View) -> None:
        engines = view.engines
        self._counted_s = view.now_s
        self._names = [e.id for e in engines]
        costs = [self._context.cost.by_shape[e.shape] for e in engines]
        self._t0 = np.array([c.t0_s for c in costs])
        self._t1 = np.array([c.t1_s for c in costs])
        self._t2 = np.array([c.t2_s for c in costs])
        self._prefill = np.array([c.prefill_s for c in costs])
        self._kv = np.array([float(e.kv_capacity_tokens) for e in engines])
        self._full, self._work = np.zeros(len(engines)), np.zeros(len(engines))
        self._longest = np.full(len(engines), -np.inf)
        if self._known is None:
            totals = [t.output_tokens + t.remaining_tokens for t in view.trajectories.values()]
            history = self._context.history
            self._known = history is not None and history.lengths_known(totals)
        self._share = {}
        for t in view.trajectories.values():
            if t.home not in self._names:
                continue
            home, left = self._names.index(t.home), t.remaining_tokens
            if t.phase in ("running", "preempting"):
                e = engines[home]
                tpot_s = costs[home].iteration_s(max(e.running_steps, 1), e.estimated_kv_tokens)
                left = max(left - (view.now_s - t.dispatched_s) / tpot_s, 0.25 * left)
            one = np.array([home])
            full, work, _ = self._estimated(
                np.array([max(left, 1.0)]), np.array([float(t.context_tokens)]), one
            )
            self._share[t.id] = (home, float(full[0]), float(work[0]))
            if self._known:
                alone_s = max(left, 1.0) * (self._t0[home] + self._tool_s)
                self._longest[home] = max(self._longest[home], alone_s)
            self._full[home] += full[0]
            self._work[home] += work[0]
