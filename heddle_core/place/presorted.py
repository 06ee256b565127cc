"""Presorted placement: longest trajectories together, on the widest engines.

Heddle (arXiv 2603.28101): trajectories sorted by predicted length are cut into one contiguous group
per engine, for the least believed makespan. The cut is exact (`presorted_search`); the published
dynamic program (`presorted_dp`) gives the same under the published cost.
"""

from collections.abc import Sequence

import numpy as np

from heddle_core.ids import EngineId
from heddle_core.place.presorted_search import search_partition
from heddle_core.plan.group_cost import context_costs, longest_first, work_of
from heddle_core.plan.paper_cost import paper_costs
from heddle_core.plan.searched import Cost, believed_lengths
from heddle_core.policy import Setting, TrajectoryView, View


class Presorted:
    """Groups for the whole rollout at once; homes stay until migration moves them."""

    needs_all = True

    def __init__(self, setting: Setting, *, cost: Cost = "context") -> None:
        self._setting = setting
        self._cost: Cost = cost

    def assign(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float], view: View
    ) -> Sequence[EngineId]:
        """Cut `ts` into a group per engine, widest engine first."""
        setting, history = self._setting, self._setting.history
        engines = sorted(view.engines, key=lambda e: -e.tp)
        by_tp = {e.tp: setting.cost.by_tp[e.tp] for e in engines}
        output = np.asarray(believed_lengths(history, remaining))
        work = work_of(
            output,
            context_tokens=np.asarray([t.context_tokens for t in ts]),
            appended_tokens=output * (history.appended_per_output if history else 0.0),
            tool_s=output * (history.tool_s_per_output if history else 0.0),
        )
        if self._cost == "context":
            order = longest_first(work, by_tp[min(by_tp)])
            costs = context_costs(work.take(order), by_tp, max_running=setting.max_running)
        else:
            order = np.argsort(-work.output_tokens, kind="stable")
            costs = paper_costs(work.take(order), by_tp, max_running=setting.max_running)
        found = search_partition([costs[e.tp] for e in engines], len(ts), tolerance=1e-3)
        homes = [engines[0].id] * len(ts)
        start = 0
        for engine, size in zip(engines, found.sizes, strict=True):
            for k in order[start : start + size]:
                homes[int(k)] = engine.id
            start += size
        return homes

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Stay at home; without one, join the engine with the fewest unfinished trajectories."""
        home = t.home
        if home is not None and view.engine(home).accepting:
            return home
        return min(view.engines, key=lambda e: e.sessions / e.tp).id

    def finished(self, t: TrajectoryView) -> None:
        """Forget nothing: homes are the ledger's."""
