"""Progressive prediction without training: revised at every step from all observations."""

import math
from dataclasses import dataclass, field

from mypy_extensions import mypyc_attr

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import GroupId, TrajectoryId
from heddle_core.parts.predictor.step_lengths import RunningMean, StepLengths
from heddle_core.policy import TrajectoryView

_LEAST_TOKENS = 1.0  # a trajectory that has not ended makes one more


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

    State: one small record for each unfinished trajectory and each group.
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
        """Remember whether the latest call failed."""
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
