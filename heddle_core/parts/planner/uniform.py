"""Engines of one shape, chosen by the lengths of history, to be widened as trajectories end."""

from collections.abc import Sequence

from heddle_core.estimate.equal_progress import equal_progress_s
from heddle_core.ids import EngineId
from heddle_core.parts.planner.searched import SearchedPlan
from heddle_core.plans import EngineSpec, PlanProblem, ResourcePlan
from heddle_core.policy import PolicyContext, TrajectoryView
from heddle_core.solve.group_plan import one_class
from heddle_core.solve.tail import first_search_at

_TIE = 0.03
"""Of makespans this near to the least, that of the widest shape is taken: some trajectory may be
longer than any in history, and decodes fastest there."""


class UniformStart:
    """The shape whose engines end first if all trajectories advance alike.

    A mix of shapes is cut for lengths, by ranks. Where ranks are wrong, long trajectories are held
    on narrow engines and short ones crowd the wide ones: on synthetic math such a mix loses to the
    best uniform shape. So the mix of the `portfolio` is taken only where predictions vary as
    lengths did. `TailConsolidation` widens the engines later, when it is seen who is long.
    """

    needs_all = True

    def __init__(self, context: PolicyContext) -> None:
        self._context = context
        self._mixed = SearchedPlan(context, solver="portfolio")

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        """Return engines of one shape, or the portfolio's problem."""
        context = self._context
        history = context.history
        if history is None or not ts or history.lengths_known(remaining):
            return self._mixed.plan(ts, remaining)
        by_shape = {shape: context.cost.by_shape[shape] for shape in context.shape_choices}
        gpus = one_class(context.pools, by_shape)
        makespans_s = equal_progress_s(
            history,
            by_shape,
            gpus=gpus,
            trajectories=len(ts),
            prompt_tokens=sum(t.context_tokens for t in ts) / len(ts),
            max_running=context.max_running,
            start_s=context.start_s(max(by_shape, key=lambda shape: shape.tp)),
            widened_at=first_search_at(gpus),
        )
        if not makespans_s:
            return self._mixed.plan(ts, remaining)
        limit_s = (1.0 + _TIE) * min(makespans_s.values())
        near = (shape for shape in makespans_s if makespans_s[shape] <= limit_s)
        shape = max(near, key=lambda shape: shape.tp)
        return ResourcePlan(
            engines=tuple(
                EngineSpec(engine=EngineId(f"e{i}"), shape=shape, max_running=context.max_running)
                for i in range(gpus // shape.tp)
            ),
            estimated_makespan_s=makespans_s[shape],
        )
