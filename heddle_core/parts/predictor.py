"""Predictors: how many tokens a trajectory still has to make."""

import math
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from mypy_extensions import mypyc_attr

from heddle_core.estimate.group_cost import FloatArray
from heddle_core.estimate.history import History
from heddle_core.estimate.posterior import LengthPosterior, LengthPrior, LengthScores, between_share
from heddle_core.estimate.state_tree import StateTree
from heddle_core.estimate.step_lengths import RunningMean, StepLengths
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.policy import Predictor, TrajectoryView

_LEAST_TOKENS: Final = 1.0  # a trajectory that has not ended makes one more


@mypyc_attr(allow_interpreted_subclasses=True)
class NoPrediction:
    """Learns nothing: every trajectory has 0 tokens left."""

    served = False

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Ignore it."""

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Ignore it."""

    def observe_finish(self, t: TrajectoryView) -> None:
        """Ignore it."""

    def remaining_tokens(self, t: TrajectoryView) -> float:
        return 0.0


@mypyc_attr(allow_interpreted_subclasses=True)
class GroupPredictor(NoPrediction):
    """Estimates a total by the longest finished sibling (Seer, arXiv 2511.14617).

    Until a sibling has ended, the total is `unknown_tokens`, usually the output limit: an unknown
    group counts as long. A trajectory that has made more than its longest finished sibling gets
    `floor_tokens`, since the rule gives no estimate there.
    """

    def __init__(self, *, unknown_tokens: float = 40_960.0, floor_tokens: float = 1.0) -> None:
        self._unknown_tokens = unknown_tokens
        self._floor_tokens = floor_tokens
        self._longest_tokens: dict[GroupId, int] = {}

    def observe_finish(self, t: TrajectoryView) -> None:
        """Keep the group's longest total."""
        longest = self._longest_tokens.get(t.group, 0)
        self._longest_tokens[t.group] = max(longest, t.output_tokens)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        total = self._longest_tokens.get(t.group, self._unknown_tokens)
        return max(float(total - t.output_tokens), self._floor_tokens)


@mypyc_attr(allow_interpreted_subclasses=True)
class HistoryPredictor(NoPrediction):
    """Estimates from the totals of a group's earlier samples and of those that end in this run.

    The estimate is the mean residual of the group's known totals: of those longer than the output
    of `t` so far, the mean of the rest. A trajectory longer than all of them is expected to need
    their mean once more. Without a known total the group falls back to the mean total of its task,
    then to the mean of all tasks, then to `unknown_tokens`; minus the output so far, at least
    `floor_tokens`.
    """

    def __init__(
        self,
        totals: Mapping[GroupId, Sequence[int]],
        *,
        task_totals: Mapping[str, Sequence[int]] | None = None,
        unknown_tokens: float = 0.0,
        floor_tokens: float = 1.0,
    ) -> None:
        """Take output tokens per trajectory, by group and, where groups do not recur, by task."""
        self._groups = {group: sorted(made) for group, made in totals.items() if made}
        self._tasks = {task: (len(made), sum(made)) for task, made in (task_totals or {}).items()}
        known = [*totals.values(), *(task_totals or {}).values()]
        self._all = (sum(map(len, known)), sum(map(sum, known)))
        self._unknown_tokens = unknown_tokens
        self._floor_tokens = floor_tokens

    def observe_finish(self, t: TrajectoryView) -> None:
        """Add the total to its group, its task and all."""
        made = t.output_tokens
        insort(self._groups.setdefault(t.group, []), made)
        count, tokens = self._tasks.get(t.task, (0, 0))
        self._tasks[t.task] = (count + 1, tokens + made)
        self._all = (self._all[0] + 1, self._all[1] + made)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the mean residual of the group, or the task's mean minus the output so far."""
        made = t.output_tokens
        group = self._groups.get(t.group)
        if group is not None:
            longer = group[bisect_right(group, made) :]
            left = sum(longer) / len(longer) - made if longer else sum(group) / len(group)
            return max(left, self._floor_tokens)
        count, tokens = self._tasks.get(t.task, (0, 0))
        if not count:
            count, tokens = self._all
        mean = tokens / count if count else self._unknown_tokens
        return max(mean - made, self._floor_tokens)


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixTreePredictor(NoPrediction):
    """Estimates by trajectories with the same tool results (Libra, arXiv 2606.03077).

    The estimate is the mean of `StateTree` at the longest known prefix of the trajectory's own
    sequence of tool results, minus the output since; before any trajectory has ended it is
    `unknown_tokens`. This is Libra's estimate alone: its buckets (placement `buckets`) move
    trajectories when mean and 90th percentile agree.
    """

    def __init__(
        self, *, medium_tokens: int = 500, large_tokens: int = 5_000, unknown_tokens: float = 0.0
    ) -> None:
        self._tree = StateTree(medium_tokens=medium_tokens, large_tokens=large_tokens)
        self._unknown_tokens = unknown_tokens

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        self._tree.advance(event, t.output_tokens)

    def observe_finish(self, t: TrajectoryView) -> None:
        """Add its remaining length at every state that it passed."""
        self._tree.end(t.id, t.group, t.output_tokens)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the mean at the deepest known state, minus the output since."""
        node, made = self._tree.deepest(t.id, t.group)
        mean = node.mean if node.visits else self._unknown_tokens
        return max(mean - (t.output_tokens - made), _LEAST_TOKENS)


_TASK_GROUPS = 4_096
"""Groups of a task that are kept, the latest ones."""


@dataclass(slots=True)
class _Survival:
    """Endings, and the exposure that led to them: running trajectories add exposure alone."""

    ended: int = 0
    exposure: float = 0.0


@dataclass(slots=True)
class _Group(_Survival):
    lengths: RunningMean = field(default_factory=RunningMean)


@dataclass(slots=True)
class _Task(_Survival):
    lengths: StepLengths = field(default_factory=StepLengths)
    groups: dict[GroupId, _Group] = field(default_factory=dict)


@dataclass(slots=True)
class TrajectoryProgress:
    """What is known of one unfinished trajectory."""

    task: _Task
    group: _Group
    exposure: float = 0.0
    lengths: RunningMean = field(default_factory=RunningMean)
    call_failed: bool = False


@mypyc_attr(allow_interpreted_subclasses=True)
class ProgressivePredictor:
    """Weibull survival in tokens with a gamma effect for each group, corrected by step length.

    A trajectory that has made `m` tokens has the exposure ``h = (m / typical_tokens) ** shape``.
    Trajectories of group `g` end at the rate ``w_g * rate`` per unit of exposure, with `w_g` drawn
    from a gamma distribution of mean 1 and shape `group_shape`. The gamma is conjugate: siblings
    that ended count as endings and exposure, siblings that run on (censored: they show only that
    they are not shorter) as exposure alone::

        rate   = (typical_weight + ended) / (typical_weight + exposure)          of the task
        ahead  = (group_shape / rate + exposure_g) / (group_shape + ended_g)     1 / (w_g * rate)
        total  = typical_tokens * (h + ahead) ** (1 / shape)

    In `exposure_g` siblings that run count only `running_weight`: their progress in a given time
    depends on their speed more than on their length. The rest, ``total - m``, is then multiplied by
    ``exp(step_pull * d)``, where `d` is by how much the logarithm of this trajectory's step lengths
    exceeds the mean, shrunk over group and task. First generations are left out of `d`: they are
    plans, and in recorded traces uncorrelated with a trajectory's length. A failed call must be
    repeated: one typical step is added while the failed call is the latest. docs/prediction.md has
    the reasons, the figures, and the alternatives.

    State: one small record for each unfinished trajectory and each of a task's latest groups.
    """

    served = False

    def __init__(
        self,
        *,
        shape: float = 2.0,
        group_shape: float = 1.0,
        running_weight: float = 0.3,
        step_pull: float = 0.5,
        typical_tokens: float = 3_000.0,
        typical_weight: float = 10.0,
    ) -> None:
        """Set the prior. The default shapes mean log totals that deviate by 0.64 within a group
        and by as much between groups.

        `typical_tokens` is the total assumed before anything has ended, with the weight of
        `typical_weight` endings; an earlier rollout of the workload gives a better value.

        Raises:
            ValueError: one of them is out of range.
        """
        if not 0.25 <= shape <= 10.0:
            raise ValueError(f"shape is {shape}; give 0.25 to 10")
        if not (group_shape > 0.0 and typical_tokens >= 1.0 and typical_weight > 0.0):
            raise ValueError("give group_shape > 0, typical_tokens >= 1 and typical_weight > 0")
        if not 0.0 <= running_weight <= 1.0:
            raise ValueError(f"running_weight is {running_weight}; give 0 to 1")
        self._shape = shape
        self._group_shape = group_shape
        self._running_weight = running_weight
        self._step_pull = step_pull
        self._typical_tokens = typical_tokens
        self._typical_weight = typical_weight
        self._tasks: dict[str, _Task] = {}
        self._known: dict[TrajectoryId, TrajectoryProgress] = {}

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Learn a step's length and the progress of `t`."""
        self.learn_step(self._of(t), t, event)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        self.learn_tool(self._of(t), event)

    def observe_finish(self, t: TrajectoryView) -> None:
        """Count an ending; a trajectory that never ran does not count."""
        self.learn_end(self._of(t), t)
        del self._known[t.id]

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the expected rest, at least one token."""
        return self.rest_of(self._of(t), t)

    def _of(self, t: TrajectoryView) -> TrajectoryProgress:
        known = self._known.get(t.id)
        if known is None:
            known = self._known[t.id] = self.begin(t)
        return known

    # -- the same for a caller that keeps what is known of each trajectory itself ----------------

    def begin(self, t: TrajectoryView) -> TrajectoryProgress:
        """Return what is known of a trajectory that was not observed yet."""
        task = self._tasks.get(t.task)
        if task is None:
            task = self._tasks[t.task] = _Task()
        group = task.groups.get(t.group)
        if group is None:
            if len(task.groups) >= _TASK_GROUPS:
                del task.groups[next(iter(task.groups))]
            group = task.groups[t.group] = _Group()
        return TrajectoryProgress(task, group)

    def learn_step(self, known: TrajectoryProgress, t: TrajectoryView, event: StepFinished) -> None:
        if event.step > 0:
            known.task.lengths.add(known.lengths, known.group.lengths, event.output_tokens)
        self._expose(known, t)

    def learn_tool(self, known: TrajectoryProgress, event: ToolReturned) -> None:
        known.call_failed = event.ok is False

    def learn_end(self, known: TrajectoryProgress, t: TrajectoryView) -> None:
        if t.output_tokens > 0:
            self._expose(known, t)
            known.group.exposure += (1.0 - self._running_weight) * known.exposure
            known.task.ended += 1
            known.group.ended += 1

    def rest_of(self, known: TrajectoryProgress, t: TrajectoryView) -> float:
        task, group = known.task, known.group
        weight, group_shape = self._typical_weight, self._group_shape
        per_ending = (weight + task.exposure) / (weight + task.ended)
        ahead = (group_shape * per_ending + group.exposure) / (group_shape + group.ended)
        made = t.output_tokens / self._typical_tokens
        total = math.pow(math.pow(made, self._shape) + ahead, 1.0 / self._shape)
        deviation = task.lengths.deviation(known.lengths, group.lengths)
        rest = (total - made) * self._typical_tokens * math.exp(self._step_pull * deviation)
        if known.call_failed:
            rest += task.lengths.typical_tokens(deviation)
        return rest if rest > _LEAST_TOKENS else _LEAST_TOKENS

    def _expose(self, known: TrajectoryProgress, t: TrajectoryView) -> None:
        exposure = math.pow(t.output_tokens / self._typical_tokens, self._shape)
        more = exposure - known.exposure
        known.exposure = exposure
        known.task.exposure += more
        known.group.exposure += self._running_weight * more


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
class _GroupEvidence:
    ended: FloatArray
    """Evidence of the trajectories that have ended."""
    unfinished: dict[TrajectoryId, TrajectoryView] = field(default_factory=dict)


@mypyc_attr(allow_interpreted_subclasses=True)
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
        self._groups: dict[GroupId, _GroupEvidence] = {}
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

    def _of(self, t: TrajectoryView) -> _GroupEvidence:
        group = self._groups.get(t.group)
        if group is None:
            if len(self._groups) >= _GROUPS:
                self._forget()
            group = self._groups[t.group] = _GroupEvidence(self._posterior.nothing())
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

    def _evidence(
        self, group: _GroupEvidence, apart_from: TrajectoryView | None = None
    ) -> FloatArray:
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


@mypyc_attr(allow_interpreted_subclasses=True)
class Served:
    """The same estimates as `inner`, requested by `Predict` and delivered by `Predicted`.

    The controller requests one when a tool starts. The driver charges the latency of the service,
    which overlaps with the tool. Until `Predicted`, the last estimate minus the output since is
    valid. When the tool returns first, `awaited` decides: the next step waits for the prediction,
    which can then migrate it, or the step is queued at once and a late prediction only reorders
    the queue.
    """

    served = True

    def __init__(self, inner: Predictor, *, awaited: bool = False) -> None:
        self.inner = inner
        self.awaited = awaited

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        self.inner.observe_step(t, event)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        self.inner.observe_tool(t, event)

    def observe_finish(self, t: TrajectoryView) -> None:
        self.inner.observe_finish(t)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        return self.inner.remaining_tokens(t)
