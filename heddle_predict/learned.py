"""The predictor that reads a trained model from a policy's context.

Inference uses numpy alone; torch is for training. `heddle predict fit` makes the models.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from mypy_extensions import mypyc_attr

from heddle_core.estimate.history import Levels
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.parts.table import progressive
from heddle_core.policy import PolicyContext, Predictor, TrajectoryView
from heddle_predict.model import LOG_BOUND
from heddle_predict.models import TreesModel
from heddle_predict.observations import Observations, Observed

_LEAST_TOKENS = 1.0  # a trajectory that has not ended makes one more


@mypyc_attr(allow_interpreted_subclasses=True)
class LearnedPredictor:
    """Estimates by a trained model: one of its quantiles, by default the median.

    The estimate is at least `least_share` of survival's. A trajectory that is predicted short
    waits, and while it waits nothing corrects the estimate. So the model may raise an estimate by
    any factor but never lowers it. docs/prediction.md has figures of other shares.

    The model runs once for each step, when it has been generated and its tool begins. Its quantiles
    are relative to survival, which alone changes with the tool's result, with tokens and with
    siblings that end. (If the model ran after the tool, homes would move on corrections a step old:
    makespans of 512 trajectories on 8 GPUs are then 1 to 5 % longer.)
    """

    served = False

    def __init__(
        self,
        model: TreesModel,
        *,
        levels: Mapping[str, Levels] = MappingProxyType({}),
        quantile: float = 0.5,
        least_share: float = 1.0,
    ) -> None:
        """Use a model, levels of its tasks from newer rollouts, and the quantile to estimate by.

        Raises:
            ValueError: the quantile is not one of the model's, or the share is not from 0 to 1.
        """
        if not 0.0 <= least_share <= 1.0:
            raise ValueError(f"least_share is {least_share}; give 0 to 1")
        if quantile not in model.levels:
            known = ", ".join(f"{level:g}" for level in model.levels)
            raise ValueError(f"quantile {quantile:g} is none of the model's: {known}")
        self._quantile = model.row_quantile(model.levels.index(quantile))
        self._least_share = least_share
        tasks = {task: levels.get(task, old) for task, old in model.vocabulary.tasks.items()}
        vocabulary = replace(model.vocabulary, tasks=tasks)
        self._observations = Observations(vocabulary)
        self._last_row: list[float] = []
        """Samples of one prompt arrive together, and their rows are equal."""
        self._last_correction = 0.0

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        self._observations.observe_step(t, event).correction = None

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        self._observations.observe_tool(t, event)

    def observe_finish(self, t: TrajectoryView) -> None:
        self._observations.observe_finish(t)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        observed = self._observations.of(t)
        survival = self._observations.log_survival(observed, t)
        log = survival + self._correction(observed, t, survival)
        return max(math.exp(log), self._least_share * math.exp(survival), _LEAST_TOKENS)

    def _correction(self, observed: Observed, t: TrajectoryView, survival: float) -> float:
        """The model's quantile, computed once for each step; in between only survival changes."""
        found = observed.correction
        if found is None:
            row = self._observations.row(observed, t, survival)
            if row != self._last_row:
                self._last_correction = min(max(self._quantile(row), -LOG_BOUND), LOG_BOUND)
                self._last_row = row
            found = observed.correction = self._last_correction
        return found


class ByTask:
    """A trained model for its own tasks, a rule for all others."""

    served = False

    def __init__(self, known: Predictor, tasks: Container[str], otherwise: Predictor) -> None:
        """Use one predictor for `tasks` and one for all others; neither may be served."""
        self.inner = known
        self._tasks, self._otherwise = tasks, otherwise

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        self._of(t).observe_step(t, event)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        self._of(t).observe_tool(t, event)

    def observe_finish(self, t: TrajectoryView) -> None:
        self._of(t).observe_finish(t)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        return self._of(t).remaining_tokens(t)

    def _of(self, t: TrajectoryView) -> Predictor:
        return self.inner if t.task in self._tasks else self._otherwise


@dataclass(frozen=True, slots=True)
class LearnedFactory:
    """Makes predictors that read `model`; a policy's context holds one as `learned`."""

    model: TreesModel

    def __call__(self, context: PolicyContext, /, *, quantile: float = 0.5) -> Predictor:
        """Use the model for its tasks and `progressive` for the others.

        Sizes are relative to the levels of a task, from the history or else from the model.

        Raises:
            ValueError: the quantile is not one of the model's.
        """
        levels = context.history.tasks if context.history else {}
        known = LearnedPredictor(self.model, levels=levels, quantile=quantile)
        return ByTask(known, self.model.vocabulary.tasks, progressive(context))
