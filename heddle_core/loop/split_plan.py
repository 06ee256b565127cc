"""The side of a hybrid pool as a plan has it, from the times of earlier steps.

Libra plans the split of the GPUs between rollout and training again every few steps, and when the
engines are full or the sides differ (arXiv 2606.03077 and its release, August 2026).
"""

from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeAlias

Side: TypeAlias = Literal["rollout", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCounts:
    """GPUs of a loop, without those of rewards."""

    rollout: int
    """That always generate."""
    training: int
    """That always train; none where the hybrid pool is the trainer's own."""
    hybrid: int
    """That change sides."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What a rule sees when a batch was trained and the engines have its weights."""

    ready: int
    """Complete groups."""
    train_s: float
    """Seconds of training of the last batch."""
    rollout_s: float
    """Seconds in which the rollout makes a batch: the mean time of its groups from start to end,
    over the batches in flight."""
    pressure: float
    """Trajectories in flight over the slots of the engines that are the rollout's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPlan:
    """When the split is planned, and what a plan must gain to count."""

    interval: int = 10
    """Steps between two plans."""
    warm_up: int = 1
    """First steps that are not recorded."""
    history: int = 8
    """Newest steps that a plan takes the mean of; there is none before as many."""
    most_pressure: float = 0.85
    """Trajectories in flight over slots from which a plan is made at once."""
    most_ratio: float = 1.25
    """Rollout over training time from which a plan is made at once."""
    cooldown: int = 1
    """Steps after a plan without another."""
    cooldown_of_interval: bool = True
    """Whether that holds for plans of the interval too."""
    least_gain: float = 0.05
    """Share of a step that a plan must save."""
    reconfiguration_s: float = 15.0
    """Seconds that a change of sides costs, paid within an interval."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"plan_interval must be 1 step or more, not {self.interval}")
        if not 0.0 <= self.least_gain < 1.0:
            raise ValueError(f"min_gain must be from 0 to below 1, not {self.least_gain:g}")


class SplitPlanner:
    """Estimates a step with the pool on each side, from the newest steps.

    Rollout and training take the GPU-seconds that they took, over the GPUs that they would have. A
    step takes as long as the longer of the two.
    """

    def __init__(self, parameters: SplitPlan, gpus: GpuCounts) -> None:
        self._parameters, self._gpus = parameters, gpus
        self._history: deque[tuple[float, float]] = deque(maxlen=parameters.history)
        """GPU-seconds of rollout and of training."""
        self._steps = 0
        self._planned_at = -parameters.cooldown - 1
        """The last plan's step."""
        self._training = False
        """Whether the last plan has the pool in training."""

    def wants_training(self, side: Side, step: StepEnd) -> bool:
        """Whether the pool trains in the newest plan; `side` is where it was in `step`."""
        self._steps += 1
        if self._steps > self._parameters.warm_up:
            rollout, training = self._gpus_of(side)
            self._history.append((step.rollout_s * rollout, step.train_s * training))
        if self._is_due(step):
            self._planned_at = self._steps
            self._training = self._plan(side) == "training"
        return self._training

    def estimated_s(self, side: Side) -> float:
        """Seconds of a step with the pool on `side`."""
        rollout, training = self._gpus_of(side)
        generate_gpu_s, train_gpu_s = map(fmean, zip(*self._history, strict=True))
        return max(generate_gpu_s / rollout, train_gpu_s / training)

    def _gpus_of(self, side: Side) -> tuple[int, int]:
        """Those that generate, and those that train."""
        gpus = self._gpus
        if side == "rollout":
            return gpus.rollout + gpus.hybrid, gpus.training
        return gpus.rollout, gpus.training + gpus.hybrid

    def _is_due(self, step: StepEnd) -> bool:
        p = self._parameters
        if len(self._history) < p.history:
            return False
        rests = self._steps - self._planned_at <= p.cooldown
        if self._steps % p.interval == 0:
            return not (rests and p.cooldown_of_interval)
        presses = step.pressure >= p.most_pressure
        return not rests and (presses or step.rollout_s >= p.most_ratio * step.train_s)

    def _plan(self, side: Side) -> Side:
        """The side that saves enough against staying on `side`."""
        p, other = self._parameters, _other(side)
        stay_s = self.estimated_s(side)
        move_s = self.estimated_s(other) + p.reconfiguration_s / p.interval
        gain = 1.0 - move_s / stay_s if stay_s > 0.0 else 0.0
        return other if gain > 0.0 and gain >= p.least_gain else side


def _other(side: Side) -> Side:
    return "training" if side == "rollout" else "rollout"
