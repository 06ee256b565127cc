"""A given plan: the same engines for the whole run, usually of one shape."""

from collections.abc import Mapping, Sequence

from heddle_core.ids import EngineId
from heddle_core.plans import EngineSpec, PlanProblem, ResourcePlan
from heddle_core.policy import PolicyContext, TrajectoryView


class FixedPlan:
    """Engines e0, e1, ... of one shape in each pool, or of the shapes in `context.mix`.

    Raises ValueError unless they use all GPUs, since the rest would idle unseen.
    """

    needs_all = False

    def __init__(self, context: PolicyContext) -> None:
        pools, shape = dict(context.pools), context.shape
        shapes = context.mix or context.uniform
        used = {gpu: sum(s.gpus for s in shapes if s.gpu == gpu) for gpu in pools}
        known = all(s.gpu in pools for s in shapes)
        if context.mix and (used != pools or not known):
            raise ValueError(
                f"engines of {', '.join(map(str, shapes))} use {_counts(used)}, "
                f"not the {_counts(pools)} that there are"
            )
        if shape.gpus < 1 or used != pools or not known:
            raise ValueError(
                f"{_counts(pools)} do not divide into engines of "
                f"{', '.join(map(str, (shape, *context.other_shapes)))}; "
                "choose a TP degree that divides the number of GPUs"
            )
        self._plan = ResourcePlan(
            engines=tuple(
                EngineSpec(engine=EngineId(f"e{i}"), shape=engine, max_running=context.max_running)
                for i, engine in enumerate(shapes)
            )
        )

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        """Return the same plan for any trajectories; homes are left to the placement part."""
        return self._plan


def _counts(pools: Mapping[str, int]) -> str:
    return " and ".join(f"{gpus} {gpu} GPUs" for gpu, gpus in pools.items())
