"""The plan that is told: the same engines for the whole run, usually of one TP degree."""

from collections.abc import Sequence

from heddle_core.ids import EngineId, EngineShape
from heddle_core.plans import EngineSpec, PlanProblem, ResourcePlan
from heddle_core.policy import Setting, TrajectoryView


class FixedPlan:
    """Engines e0, e1, ... of `setting.tp` GPUs each, or of the degrees in `setting.mix`.

    Raises ValueError unless they use all GPUs, since the rest would idle unseen.
    """

    needs_all = False

    def __init__(self, setting: Setting) -> None:
        tps = setting.mix or (setting.tp,) * (setting.gpus // max(setting.tp, 1))
        if setting.mix and sum(tps) != setting.gpus:
            raise ValueError(
                f"engines of TP {', '.join(map(str, tps))} use {sum(tps)} GPUs, "
                f"not the {setting.gpus} that there are"
            )
        if setting.tp < 1 or not tps or sum(tps) != setting.gpus:
            raise ValueError(
                f"{setting.gpus} GPUs do not divide into engines of {setting.tp}; "
                "choose a TP degree that divides the number of GPUs"
            )
        self._plan = ResourcePlan(
            engines=tuple(
                EngineSpec(
                    engine=EngineId(f"e{i}"),
                    shape=EngineShape(setting.gpu, tp),
                    max_running=setting.max_running,
                )
                for i, tp in enumerate(tps)
            )
        )

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        """Return the same plan whoever runs; placement is left to the placement part."""
        return self._plan
