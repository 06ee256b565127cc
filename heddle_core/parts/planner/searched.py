"""Planners that search: the driver has their problem solved, and the simulator charges the time."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from heddle_core.estimate.history import History
from heddle_core.estimate.ordered import Cost
from heddle_core.policy import PolicyContext, TrajectoryView
from heddle_core.solve.joint import JointProblem, Solver

Assignment: TypeAlias = Literal["planner", "placement", "auto"]

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
    ) -> None:
        """Homes come from the plan (`planner`) or from the placement part (`placement`).

        `auto`: from the plan if predictions distinguish trajectories. Otherwise groups cut by
        length would put average trajectories on the engines meant for many short ones.
        """
        self._context = context
        self._assignment: Assignment = assignment
        self._solver: Solver = solver
        self._cost: Cost = cost

    def plan(self, ts: Sequence[TrajectoryView], remaining: Sequence[float]) -> JointProblem:
        """Return the problem; the driver has it solved."""
        context = self._context
        history = context.history
        return JointProblem(
            solver=self._solver,
            cost=self._cost,
            trajectories=tuple(t.id for t in ts),
            output_tokens=tuple(estimated_lengths(history, remaining)),
            context_tokens=tuple(t.context_tokens for t in ts),
            appended_per_output=history.appended_per_output if history else 0.0,
            tool_s_per_output=history.tool_s_per_output if history else 0.0,
            by_shape={shape: context.cost.by_shape[shape] for shape in context.shape_choices},
            pools=context.pools,
            max_running=context.max_running,
            seed=context.seed,
            homes=self._assignment == "planner"
            or (
                self._assignment == "auto"
                and (history is None or history.predictions_vary(remaining))
            ),
            charged_s=CHARGED_S[self._solver],
        )


def estimated_lengths(history: History | None, remaining: Sequence[float]) -> list[float]:
    """Output tokens to plan with: predictions, spread as history was where they are means."""
    if history is None:
        return [max(1.0, r) for r in remaining]
    return [float(length) for length in history.lengths(remaining)]
