"""Posterior: a calibrated distribution of what is left, at any time of a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from heddle_core.estimate.group_cost import FloatArray
from heddle_core.estimate.history import History
from heddle_core.estimate.length_scores import LengthScores
from heddle_core.estimate.posterior import LengthPosterior, LengthPrior, between_share
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.policy import TrajectoryView

_LEAST_TOKENS = 1.0  # a trajectory that has not ended makes one more
_MORE = 0.5
"""Between the tokens made and one more: a length is a whole number above them."""
_UNKNOWN = LengthPrior(level_sd=2.0, spread_sd=0.4)
"""Without a history the level is a guess."""

_MEAN_OF = tuple((i + 0.5) / 20 for i in range(20))
"""Levels of the quantiles whose mean is the estimate. Beyond the last one, 0.975, a distribution is
mostly an assumption."""

_PACE_WEIGHT = 0.1
"""Of the latest step in the pace of its engine."""
_EVENTS, _GROWTH = 16, 0.05
"""Level and spreads are computed anew after so many observations, and this share of all so far."""
_GROUPS = 512
"""Groups that are kept: the latest ones, and all with unfinished trajectories."""


@dataclass(slots=True)
class _Group:
    ended: FloatArray
    """Evidence of the trajectories that have ended."""
    unfinished: dict[TrajectoryId, TrajectoryView] = field(default_factory=dict)


class PosteriorPredictor:
    """Two levels of lengths, between prompts and within, with running trajectories censored.

    `heddle_core.estimate.posterior` has the model; its lengths are distributed as history's. Every
    unfinished trajectory counts with the tokens made so far, those of its running step included:
    otherwise the ones that ended, which count in full, make all others seem short. Tokens of a
    running step are estimated as the seconds since its dispatch times the pace of its engine, a
    moving average over finished steps. The time is that of the latest event.

    State: a vector of 245 numbers for each of the latest 512 groups.
    """

    served = False

    def __init__(self, history: History | None = None) -> None:
        """Start from the lengths of earlier rollouts.

        The share of the variance between prompts is history's, where it has totals by prompt, and
        a half otherwise: recorded traces have 0.24 to 0.66.
        """
        self._scores = LengthScores(history.output_quantiles if history else ())
        prior = _UNKNOWN
        if history is not None:
            totals = history.group_totals.values()
            known = [self._scores.scores(np.maximum(np.array(each), 1.0)) for each in totals]
            prior = LengthPrior(between_share=between_share(known))
        self._posterior = LengthPosterior(prior)
        self._groups: dict[GroupId, _Group] = {}
        self._answered: set[TrajectoryId] = set()
        """Trajectories whose latest step was their last one, and that are not finished yet."""
        self._now_s = 0.0
        self._pace: dict[EngineId, float] = {}
        """Tokens per second of a step since its dispatch."""
        self._any_pace = 0.0
        self._observed = self._learned = 0

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Learn the pace of an engine, and whether this step was the last."""
        self._of(t)
        self._now_s = event.time_s
        self._observed += 1
        if event.reason != "tool_call":
            self._answered.add(t.id)
        seconds = event.time_s - t.dispatched_s
        if seconds > 0.0:
            pace = event.output_tokens / seconds
            before = self._pace.get(event.engine, self._any_pace or pace)
            self._pace[event.engine] = before + _PACE_WEIGHT * (pace - before)
            self._any_pace += _PACE_WEIGHT * (pace - self._any_pace) if self._any_pace else pace

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Keep the time."""
        self._of(t)
        self._now_s = event.time_s

    def observe_finish(self, t: TrajectoryView) -> None:
        """Count an ended length in full; one that was cut off by the driver stays censored."""
        group = self._of(t)
        del group.unfinished[t.id]
        self._observed += 1
        answered = t.id in self._answered
        self._answered.discard(t.id)
        if answered:
            total = np.array([max(t.output_tokens, 1.0)])
            group.ended += self._posterior.ended(float(self._scores.scores(total)[0]))
        elif t.output_tokens > 0:
            group.ended += self._posterior.running(self._score(t.output_tokens))[0]

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the mean of what is left, but for the outermost tail; at least one token."""
        return sum(self.remaining_quantiles(t, _MEAN_OF)) / len(_MEAN_OF)

    def remaining_quantiles(
        self, t: TrajectoryView, levels: Sequence[float], *, running_tokens: float | None = None
    ) -> list[float]:
        """Return quantiles of the tokens that `t` still has to make, each at least 1.

        `levels` are probabilities from 0 to below 1; one quantile each, in their order.
        `running_tokens` are those that its running step has made, estimated where they are not
        given. They are made: the quantiles do not contain them.
        """
        group = self._of(t)
        if self._observed >= self._learned + _EVENTS + _GROWTH * self._learned:
            self._learn()
        running = self.running_tokens(t) if running_tokens is None else running_tokens
        made = t.output_tokens + running
        score = float(self._score(made)[0])
        found = self._posterior.quantiles(self._evidence(group, apart_from=t), score, levels)
        rest = self._scores.tokens(found) - made
        return [max(tokens, _LEAST_TOKENS) for tokens in rest.tolist()]

    def running_tokens(self, t: TrajectoryView) -> float:
        """Estimate the tokens of the running step of `t`; 0 where none runs."""
        if t.phase not in ("running", "preempting") or t.home is None:
            return 0.0
        pace = self._pace.get(t.home, self._any_pace)
        return max(self._now_s - t.dispatched_s, 0.0) * pace

    def _of(self, t: TrajectoryView) -> _Group:
        group = self._groups.get(t.group)
        if group is None:
            if len(self._groups) >= _GROUPS:
                self._forget()
            group = self._groups[t.group] = _Group(self._posterior.nothing())
        group.unfinished[t.id] = t
        return group

    def _forget(self) -> None:
        """Drop the oldest group without an unfinished trajectory, if there is one."""
        name = next((name for name, group in self._groups.items() if not group.unfinished), None)
        if name is not None:
            del self._groups[name]

    def _learn(self) -> None:
        self._learned = self._observed
        self._posterior.learn(np.array([self._evidence(g) for g in self._groups.values()]))

    def _evidence(self, group: _Group, apart_from: TrajectoryView | None = None) -> FloatArray:
        """Evidence of a group, of one of its trajectories excepted."""
        made = [
            t.output_tokens + self.running_tokens(t) + _MORE
            for t in group.unfinished.values()
            if apart_from is None or t.id != apart_from.id
        ]
        if not made:
            return group.ended
        running = self._posterior.running(self._scores.scores(np.array(made)))
        return np.asarray(group.ended + running.sum(axis=0))

    def _score(self, made: float) -> FloatArray:
        return self._scores.scores(np.array([made + _MORE]))
