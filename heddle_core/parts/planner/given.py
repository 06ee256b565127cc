"""No plan: the engines are those of a framework, which starts and stops them itself."""

from collections.abc import Sequence

from heddle_core.plans import PlanProblem, ResourcePlan
from heddle_core.policy import TrajectoryView


class GivenEngines:
    """Plans no engine; each that becomes ready takes its share of unfinished trajectories."""

    needs_all = False

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        """Return a plan without engines."""
        return ResourcePlan(engines=())
