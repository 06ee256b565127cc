"""The uniform plan: every engine has the same TP degree, for the whole run."""

from collections.abc import Sequence

from heddle_core.ids import EngineId
from heddle_core.plan.problem import EngineSpec, PlanProblem, ResourcePlan
from heddle_core.policy import Setting, TrajectoryView


class FixedPlan:
    """``gpus // tp`` engines named e0, e1, ... of `setting.tp` GPUs each.

    Raises ValueError when the GPUs do not divide into engines, since the rest would idle unseen.
    """

    needs_all = False

    def __init__(self, setting: Setting) -> None:
        if setting.tp < 1 or setting.gpus < setting.tp or setting.gpus % setting.tp:
            raise ValueError(
                f"{setting.gpus} GPUs do not divide into engines of {setting.tp}; "
                "choose a TP degree that divides the number of GPUs"
            )
        self._plan = ResourcePlan(
            engines=tuple(
                EngineSpec(
                    engine=EngineId(f"e{i}"),
                    tp=setting.tp,
                    gpu=setting.gpu,
                    max_running=setting.max_running,
                )
                for i in range(setting.gpus // setting.tp)
            )
        )

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        """Return the same plan whoever runs; placement is left to the placement part."""
        return self._plan
