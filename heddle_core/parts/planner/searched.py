"""Planners that search: the driver has their problem solved, and the simulator charges the time."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import work_of
from heddle_core.estimate.history import History
from heddle_core.estimate.ordered import Cost
from heddle_core.estimate.paper_cost import mean_decoded_context
from heddle_core.ids import EngineShape
from heddle_core.policy import PolicyContext, TrajectoryView
from heddle_core.solve.joint import JointProblem, Solver

Assignment: TypeAlias = Literal["planner", "placement", "auto", "ranked"]

RANKED: Final = 0.25
"""Log spread of predictions, over that of history's lengths, from which on they rank trajectories.
Predictions from prompts alone spread half as much as lengths do (`paper_quality`: 0.4 to 0.6);
equal predictions do not spread."""

CHARGED_S: Mapping[Solver, float] = {"exact": 0.1, "anneal": 5.0, "portfolio": 2.0, "libra-dp": 0.5}
"""Seconds of solver time that the simulator lets pass: for annealing the paper's (Table 2), for the
rest what `benchmarks/bench_planners.py` took at 6,400 trajectories on 64 GPUs, rounded up."""


class SearchedPlan:
    """Plans once all trajectories of a rollout have arrived, from what is predicted of them."""

    needs_all = True

    def __init__(
        self,
        context: PolicyContext,
        *,
        solver: Solver,
        cost: Cost = "context",
        assignment: Assignment = "auto",
        least_full_slots: float = 0.0,
    ) -> None:
        """Homes come from the plan (`planner`) or from the placement part (`placement`).

        `auto`: from the plan if predictions spread as lengths do. Otherwise groups cut by length
        would put average trajectories on the engines meant for many short ones. `ranked`: from the
        plan unless predictions are ties, whose order is that of arrival.

        Only engines are planned whose KV holds the mean context in at least the share
        `least_full_slots` of their slots; where none of a class does, those with the most KV.
        """
        self._context = context
        self._assignment: Assignment = assignment
        self._solver: Solver = solver
        self._cost: Cost = cost
        self._least_full_slots = least_full_slots

    def plan(self, ts: Sequence[TrajectoryView], remaining: Sequence[float]) -> JointProblem:
        """Return the problem; the driver has it solved."""
        context = self._context
        history = context.history
        lengths = estimated_lengths(history, remaining)
        appended = history.appended_per_output if history else 0.0
        return JointProblem(
            solver=self._solver,
            cost=self._cost,
            trajectories=tuple(t.id for t in ts),
            output_tokens=tuple(lengths),
            context_tokens=tuple(t.context_tokens for t in ts),
            appended_per_output=appended,
            tool_s_per_output=history.tool_s_per_output if history else 0.0,
            by_shape=self._roomy(_mean_context_tokens(ts, lengths, appended)),
            pools=context.pools,
            max_running=context.max_running,
            seed=context.seed,
            homes=self._plan_gives_homes(remaining),
            charged_s=CHARGED_S[self._solver],
        )

    def _plan_gives_homes(self, remaining: Sequence[float]) -> bool:
        history = self._context.history
        match self._assignment:
            case "planner" | "placement":
                return self._assignment == "planner"
            case "auto":
                return history is None or history.predictions_vary(remaining)
            case "ranked":
                if history is None:
                    return len(remaining) < 2 or max(remaining) > min(remaining)
                return history.predictions_vary(remaining, share=RANKED)

    def _roomy(self, context_tokens: float) -> dict[EngineShape, StepCost]:
        """Shapes to choose from, with their costs: those with KV for `least_full_slots`."""
        context = self._context
        costs = {shape: context.cost.by_shape[shape] for shape in context.shape_choices}
        slots_tokens = self._least_full_slots * context.max_running * context_tokens
        least: dict[str, float] = {}
        """Tokens of KV that an engine of a class must have."""
        for shape, cost in costs.items():
            most = max(least.get(shape.gpu, 0.0), float(cost.kv_capacity_tokens))
            least[shape.gpu] = min(slots_tokens, most)
        return {s: cost for s, cost in costs.items() if cost.kv_capacity_tokens >= least[s.gpu]}


def _mean_context_tokens(
    ts: Sequence[TrajectoryView], lengths: Sequence[float], appended_per_output: float
) -> float:
    """Context of a sequence, the mean over all tokens to decode; 0 without trajectories."""
    if not ts:
        return 0.0
    work = work_of(
        lengths,
        context_tokens=[t.context_tokens for t in ts],
        appended_tokens=appended_per_output * np.asarray(lengths),
    )
    return mean_decoded_context(work)


def estimated_lengths(history: History | None, remaining: Sequence[float]) -> list[float]:
    """Output tokens to plan with: predictions, spread as history was where they are means."""
    if history is None:
        return [max(1.0, r) for r in remaining]
    return [float(length) for length in history.lengths(remaining)]
