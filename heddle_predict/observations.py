"""What a learned predictor knows of each trajectory: its features and its estimate by survival.

One record for each unfinished trajectory, so that an event costs one look-up.
"""

import math
from dataclasses import dataclass

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import TrajectoryId
from heddle_core.parts.predictor import ProgressivePredictor, TrajectoryProgress
from heddle_core.policy import TrajectoryView
from heddle_predict.features import Features, Own
from heddle_predict.model import Vocabulary


@dataclass(slots=True)
class Observed:
    """What is known of one unfinished trajectory."""

    own: Own
    rule: ProgressivePredictor
    """That of its task."""
    progress: TrajectoryProgress
    correction: float | None = None
    """The model's quantile relative to survival, as of the latest generation."""


PRIOR_WEIGHT = 100.0
"""Ended trajectories that a prior counts as much as."""


class Observations:
    """Observes a run; keeps features, and a `ProgressivePredictor` for each task.

    That has the task's levels as its prior. Its estimate is an input of learned models, and their
    quantiles are relative to it: a correction of 0 leaves the estimate as it is.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._features = Features(vocabulary)
        self._rules: dict[str, ProgressivePredictor] = {}
        self._observed: dict[TrajectoryId, Observed] = {}

    def __len__(self) -> int:
        return len(self._observed)

    def of(self, t: TrajectoryView) -> Observed:
        observed = self._observed.get(t.id)
        if observed is None:
            observed = self._observed[t.id] = self._begin(t)
        return observed

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> Observed:
        observed = self.of(t)
        observed.rule.learn_step(observed.progress, t, event)
        self._features.learn_step(observed.own, t)
        return observed

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> Observed:
        observed = self.of(t)
        observed.rule.learn_tool(observed.progress, event)
        self._features.learn_tool(observed.own, t, event)
        return observed

    def observe_finish(self, t: TrajectoryView) -> None:
        observed = self._observed.pop(t.id, None)
        if observed is None:
            observed = self._begin(t)
        observed.rule.learn_end(observed.progress, t)
        self._features.learn_end(observed.own, t)

    def log_survival(self, observed: Observed, t: TrajectoryView) -> float:
        """Logarithm of the rest that survival expects."""
        return math.log(observed.rule.rest_of(observed.progress, t))

    def row(self, observed: Observed, t: TrajectoryView, log_survival: float) -> list[float]:
        return self._features.row(observed.own, t, log_survival)

    def _begin(self, t: TrajectoryView) -> Observed:
        rule = self._rules.get(t.task)
        if rule is None:
            levels = self._vocabulary.tasks.get(t.task, self._vocabulary.anywhere)
            rule = self._rules[t.task] = ProgressivePredictor(
                typical_tokens=max(levels.total_tokens, 1.0), typical_weight=PRIOR_WEIGHT
            )
        return Observed(self._features.begin(t), rule, rule.begin(t))
