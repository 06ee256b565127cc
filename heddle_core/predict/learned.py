"""A predictor whose beliefs were learned from earlier rollouts; `heddle predict fit` makes them.

The core reads no files: a model comes in as arrays. Numpy alone computes; torch is for training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.history import History
from heddle_core.ids import TrajectoryId
from heddle_core.policy import TrajectoryView
from heddle_core.predict.features import Features, Levels, Vocabulary
from heddle_core.predict.forest import Forest
from heddle_core.predict.progressive import ProgressivePredictor
from heddle_core.predict.recurrent import Floats, Recurrent

_LEAST_TOKENS = 1.0  # who is asked about has not ended
_FARTHEST = 12.0
"""Bound on the logarithm of the correction: a row unlike any in training must not overflow."""


class Model(Protocol):
    """What was learned: from rows of features to quantiles of what remains."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tasks and tools that it knows, and so the columns of a row."""
        ...

    @property
    def levels(self) -> tuple[float, ...]:
        """Probabilities of its quantiles, rising."""
        ...

    def begun(self) -> Floats:
        """State of a trajectory of which no tool call is known."""
        ...

    def advanced(self, states: Floats, rows: Floats) -> Floats:
        """States, one a line, after a tool call that left each trajectory with its row."""
        ...

    def quantiles(self, states: Floats, rows: Floats) -> Floats:
        """Quantiles of ``log(remaining / survival)``, (rows, levels); see `Features.row`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TreesModel:
    """Two forests: where the logarithm of the remaining tokens lies, and how widely it spreads.

    Quantiles are ``location + exp(log_spread) * errors``, with `errors` the quantiles of the
    standardised errors on groups that the trees had not seen: they cannot cross, and are calibrated
    there.
    """

    vocabulary: Vocabulary
    levels: tuple[float, ...]
    location: Forest
    log_spread: Forest
    errors: Floats

    def begun(self) -> Floats:
        """Trees keep nothing of a trajectory but what its row holds."""
        return np.zeros(0)

    def advanced(self, states: Floats, rows: Floats) -> Floats:
        """Return the states."""
        return states

    def quantiles(self, states: Floats, rows: Floats) -> Floats:
        """See `Model`."""
        spread = np.exp(np.clip(self.log_spread.sums(rows), -_FARTHEST, _FARTHEST))
        return np.asarray(self.location.sums(rows)[:, None] + spread[:, None] * self.errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceModel:
    """A recurrent network over the rows of a trajectory."""

    vocabulary: Vocabulary
    levels: tuple[float, ...]
    network: Recurrent
    shifts: Floats
    """Added to each quantile: what unseen groups showed to be lacking."""

    def begun(self) -> Floats:
        """The network's first state."""
        return self.network.begun()

    def advanced(self, states: Floats, rows: Floats) -> Floats:
        """See `Model`."""
        return self.network.advanced(states, rows)

    def quantiles(self, states: Floats, rows: Floats) -> Floats:
        """See `Model`."""
        return np.asarray(self.network.quantiles(states, rows) + self.shifts)


class Survival:
    """`ProgressivePredictor` for each task on its own, told what is usual there.

    Its estimate is an input of learned models and what their answers are relative to: where a model
    knows nothing better, the estimate stands.
    """

    def __init__(self, vocabulary: Vocabulary, *, weight: float = 100.0) -> None:
        self._vocabulary = vocabulary
        self._weight = weight
        self._tasks: dict[str, ProgressivePredictor] = {}

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Pass it on to the task's."""
        self._of(t).observe_step(t, event)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Pass it on to the task's."""
        self._of(t).observe_tool(t, event)

    def observe_finish(self, t: TrajectoryView) -> None:
        """Pass it on to the task's."""
        self._of(t).observe_finish(t)

    def log_tokens(self, t: TrajectoryView) -> float:
        """Logarithm of the expected rest."""
        return math.log(self._of(t).remaining_tokens(t))

    def _of(self, t: TrajectoryView) -> ProgressivePredictor:
        found = self._tasks.get(t.task)
        if found is None:
            levels = self._vocabulary.tasks.get(t.task, self._vocabulary.anywhere)
            found = self._tasks[t.task] = ProgressivePredictor(
                typical_tokens=max(levels.total_tokens, 1.0), typical_weight=self._weight
            )
        return found


class LearnedPredictor:
    """Estimates by a trained model: one of its quantiles, the median unless another is asked for.

    But never less than `least_share` of what survival alone expects. Who is taken for short waits,
    and while it waits nothing shows that it is not; so an estimate may be raised by as much as the
    model says, and is never lowered. docs/prediction.md has the figures of other shares.

    A task that the model has not met gets its levels from `history`, when there is one, and from
    the steps that it shows.
    """

    served = False

    def __init__(
        self,
        model: Model,
        *,
        history: History | None = None,
        quantile: float = 0.5,
        least_share: float = 1.0,
    ) -> None:
        """Take a model and the quantile to estimate by.

        Raises:
            ValueError: the quantile is not one of the model's, or the share is not from 0 to 1.
        """
        if not 0.0 <= least_share <= 1.0:
            raise ValueError(f"least_share is {least_share}; give 0 to 1")
        if quantile not in model.levels:
            known = ", ".join(f"{level:g}" for level in model.levels)
            raise ValueError(f"quantile {quantile:g} is none of the model's: {known}")
        self._model = model
        self._at = model.levels.index(quantile)
        self._least_share = least_share
        vocabulary = told(model.vocabulary, history)
        self._features = Features(vocabulary)
        self._survival = Survival(vocabulary)
        self._states: dict[TrajectoryId, Floats] = {}
        self._begun = model.begun()

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Learn from a finished generation."""
        self._survival.observe_step(t, event)
        self._features.observe_step(t, event)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Learn from a tool's answer."""
        self._survival.observe_tool(t, event)
        self._features.observe_tool(t, event)
        if self._begun.size:
            state = self._states.get(t.id, self._begun)
            rows = self._row(t)[0]
            self._states[t.id] = self._model.advanced(state[None], rows)[0]

    def observe_finish(self, t: TrajectoryView) -> None:
        """Learn from a trajectory's end."""
        self._survival.observe_finish(t)
        self._features.observe_finish(t)
        self._states.pop(t.id, None)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the quantile that this predictor estimates by, at least one token."""
        logs, survival = self._logs(t)
        return max(math.exp(logs[self._at]), self._least_share * math.exp(survival), _LEAST_TOKENS)

    def remaining_quantiles(self, t: TrajectoryView) -> Sequence[float]:
        """Return all quantiles of the remaining tokens, at the levels of the model."""
        logs, _ = self._logs(t)
        return [float(tokens) for tokens in np.maximum(np.exp(logs), _LEAST_TOKENS)]

    def _logs(self, t: TrajectoryView) -> tuple[Floats, float]:
        rows, survival = self._row(t)
        found = self._model.quantiles(self._states.get(t.id, self._begun)[None], rows)[0]
        return np.clip(found, -_FARTHEST, _FARTHEST) + survival, survival

    def _row(self, t: TrajectoryView) -> tuple[Floats, float]:
        survival = self._survival.log_tokens(t)
        return np.array([self._features.row(t, survival)]), survival


def told(vocabulary: Vocabulary, history: History | None) -> Vocabulary:
    """Return a vocabulary whose strangers have the levels of a history."""
    if history is None:
        return vocabulary
    step_tokens = max(history.step_output_tokens, 1.0)
    anywhere = Levels(
        total_tokens=max(history.mean_output_tokens(), 1.0),
        step_tokens=step_tokens,
        payload_tokens=max(history.appended_per_output * step_tokens, 1.0),
        prompt_tokens=vocabulary.anywhere.prompt_tokens,
    )
    tasks: Mapping[str, Levels] = vocabulary.tasks
    return Vocabulary(tasks=tasks, anywhere=anywhere, tools=vocabulary.tools)
