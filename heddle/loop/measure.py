"""Figures of an RL loop, from its events and commands as they pass."""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from heddle.loop.steps import StepClock, StepTime
from heddle_core.events import EngineFailed, StepFinished, StepPreempted, TrajectoryFinished
from heddle_core.ids import GroupId, TrajectoryId
from heddle_core.loop.commands import (
    AccumulateGradients,
    AnyCommand,
    Discard,
    StartTrajectory,
    Train,
)
from heddle_core.loop.events import (
    AnyEvent,
    GpusAssigned,
    GradientsAccumulated,
    StartFailed,
    Trained,
)


@dataclass(slots=True)
class _Running:
    version: int
    group: GroupId
    number: int
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSample:
    """A sample of a prompt that was trained."""

    trajectory: TrajectoryId
    group: GroupId
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    clock: StepTime
    trajectories: int
    tokens: int
    """Output tokens of them."""
    mean_staleness: float
    most_staleness: int
    wasted_tokens: int
    """Output tokens of trajectories that were discarded in this step."""

    def plain(self) -> dict[str, float | int]:
        """As JSON; times in seconds."""
        clock = self.clock
        return {
            "batch": clock.batch,
            "end_s": clock.end_s,
            "step_s": clock.seconds,
            "rollout_s": clock.rollout_s,
            "reward_s": clock.reward_s,
            "training_s": clock.train_s,
            "update_s": clock.update_s,
            "trajectories": self.trajectories,
            "tokens": self.tokens,
            "mean_staleness": self.mean_staleness,
            "most_staleness": self.most_staleness,
            "wasted_tokens": self.wasted_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFigures:
    """Use of the services of a loop."""

    reward_busy: float | None
    """Share of the reward service's places in use; None where it is elastic."""
    rewards_s: float
    """Seconds that the rewards of the trained trajectories need, over its places; 0 if elastic."""
    mean_rewards: float
    """Rewards that are computed at once, over the whole loop."""
    mean_starts: float
    """Environments that start at once."""
    environment_busy: float | None
    """Share of the environments that may be alive which are; None without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFigures:
    """What a loop reached. Times are seconds; those of steps leave out the first ones."""

    steps: int
    duration_s: float
    """Until the last batch was trained."""
    step_s: tuple[float, ...]
    """Between the ends of two trainings."""
    trained_trajectories: int
    """Of the steps in `step_s`."""
    trained_tokens: int
    """Output tokens of them."""
    training_s: float
    """In training, over the whole loop."""
    staleness: tuple[tuple[int, int], ...]
    """Staleness and number of trained trajectories, over the whole loop."""
    wasted_tokens: int
    """Output tokens of trajectories that were discarded before the last batch was trained."""
    mean_trained_tokens: float
    """Output tokens of a trained trajectory, over the whole loop."""
    mean_started_tokens: float
    """Output tokens that as many trajectories would make as were trained or discarded, in the order
    of their starts."""
    all_trained_tokens: int
    """Output tokens of all trained trajectories, over the whole loop."""
    length_distance: float
    """Kolmogorov-Smirnov distance of the output tokens of trained trajectories to those of the
    started ones: largest difference of the shares that are no longer than a length."""
    failed_starts: int
    """Environments that did not start, over the whole loop."""
    gpu_switches: int
    """Moves of a hybrid pool's GPUs between rollout and training, over the whole loop."""
    failed_switches: int
    """Of these, those after which the GPUs were where they had been."""
    split: tuple[StepFigures, ...]
    """Every step, the first ones too."""
    first_measured: int
    """Steps that `step_s` leaves out."""
    services: ServiceFigures

    @property
    def mean_step_s(self) -> float:
        return fmean(self.step_s)

    @property
    def samples_per_s(self) -> float:
        """Trained trajectories a second."""
        return self.trained_trajectories / sum(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Trained output tokens a second."""
        return self.trained_tokens / sum(self.step_s)

    @property
    def mean_staleness(self) -> float:
        """Of a trained trajectory."""
        return sum(s * n for s, n in self.staleness) / sum(n for _, n in self.staleness)

    @property
    def mean_split(self) -> dict[str, float]:
        """Seconds of a measured step by what the trainer did or waited for; their sum is a step."""
        steps = [step.clock for step in self.split[self.first_measured :]]
        return {
            "rollout": fmean(step.rollout_s for step in steps),
            "reward": fmean(step.reward_s for step in steps),
            "training": fmean(step.train_s for step in steps),
            "update": fmean(step.update_s for step in steps),
        }


_SELDOM = frozenset(
    (
        TrajectoryFinished,
        EngineFailed,
        GpusAssigned,
        GradientsAccumulated,
        Trained,
        StartFailed,
    )
)
_COUNTED = frozenset((StartTrajectory, Discard, Train, AccumulateGradients))
"""Every event of a loop passes here: one look-up rules most of them out."""


class LoopMeasure:
    """Takes every event with its commands; holds unfinished trajectories, and lengths."""

    def __init__(
        self, output_tokens: Callable[[GroupId, int], int], *, trainer_lends: bool = False
    ) -> None:
        """`output_tokens` has those of a sample of a prompt, all steps together. See `StepClock`
        for `trainer_lends`.
        """
        self._output_tokens = output_tokens
        self._started = array("q")
        """Output tokens of every trajectory, in order of the starts."""
        self._ended = 0
        """Trajectories that were trained or discarded before the last batch was trained."""
        self._wasted = 0
        self._running: dict[TrajectoryId, _Running] = {}
        self._trained_at: list[float] = []
        self._train_began_s = 0.0
        self._training_s = 0.0
        self._batches: list[tuple[int, int]] = []
        """Trajectories and output tokens of each batch."""
        self._part = (0, 0)
        """The same of the batch in collection, as far as the trainer has it."""
        self._staleness: Counter[int] = Counter()
        self.trained: list[TrainedSample] = []
        """Every trained sample, in order."""
        self._trained_lengths = array("q")
        self._clock = StepClock(trainer_lends=trainer_lends)
        self._split: list[StepFigures] = []
        self._staleness_of_batch: list[int] = []
        self._wasted_tokens = self._wasted_before_end = 0
        self._failed_starts = self._switches = self._failed_switches = 0

    def lost(self, trajectory: TrajectoryId, tokens: int) -> None:
        """Count the tokens of a step whose trajectory was cancelled."""
        self._wasted_tokens += tokens

    def take(self, event: AnyEvent, commands: Sequence[AnyCommand], version: int) -> None:
        """Count an event and its commands; `version` is the loop's after both."""
        self._clock.take(event, commands)
        kind = type(event)
        if kind is StepFinished or kind is StepPreempted:
            running = self._running.get(event.trajectory)  # type: ignore[union-attr]
            if running is not None:
                running.tokens += event.output_tokens  # type: ignore[union-attr]
        elif kind not in _SELDOM:
            pass
        elif isinstance(event, TrajectoryFinished):
            if event.outcome in ("failed", "cancelled"):
                self._waste(event.trajectory)
        elif isinstance(event, EngineFailed):
            for trajectory, tokens in event.salvaged:
                if trajectory in self._running:
                    self._running[trajectory].tokens += tokens
        elif isinstance(event, Trained):
            self._trained_at.append(event.time_s)
            self._training_s += event.time_s - self._train_began_s
            self._end_step()
            self._wasted_before_end = self._wasted_tokens
            self._ended = sum(n for n, _ in self._batches) + self._wasted
        elif isinstance(event, GradientsAccumulated):
            self._training_s += event.time_s - self._train_began_s
        elif isinstance(event, StartFailed):
            self._failed_starts += 1
            self._waste(event.trajectory)
        elif isinstance(event, GpusAssigned) and event.pool == "hybrid":
            self._switches += 1
            self._failed_switches += not event.ok
        for command in commands:
            if type(command) in _COUNTED:
                self._count_command(command, event.time_s, version)

    def _end_step(self) -> None:
        stale = self._staleness_of_batch
        trajectories, tokens = self._batches[-1]
        self._split.append(
            StepFigures(
                clock=self._clock.steps.pop(),
                trajectories=trajectories,
                tokens=tokens,
                mean_staleness=fmean(stale),
                most_staleness=max(stale),
                wasted_tokens=self._wasted_tokens - self._wasted_before_end,
            )
        )
        self._staleness_of_batch = []

    def _count_command(self, command: AnyCommand, time_s: float, version: int) -> None:
        if isinstance(command, StartTrajectory):
            self._running[command.trajectory] = _Running(version, command.group, command.sample)
            self._started.append(self._output_tokens(command.group, command.sample))
        elif isinstance(command, Discard):
            self._waste(command.trajectory)
        elif isinstance(command, AccumulateGradients):
            self._take_part(command, time_s, version)
        elif isinstance(command, Train):
            self._take_part(command, time_s, version)
            self._batches.append(self._part)
            self._part = 0, 0

    def _take_part(self, command: AccumulateGradients | Train, time_s: float, version: int) -> None:
        self._train_began_s = time_s
        trained = [self._running.pop(each) for each in command.trajectories]
        number, tokens = self._part
        self._part = number + len(trained), tokens + sum(t.tokens for t in trained)
        stale = [version - t.version for t in trained]
        self._staleness_of_batch += stale
        self._staleness.update(stale)
        self._trained_lengths.extend(t.tokens for t in trained)
        self.trained.extend(
            TrainedSample(trajectory=trajectory, group=t.group, number=t.number)
            for trajectory, t in zip(command.trajectories, trained, strict=True)
        )

    def _waste(self, trajectory: TrajectoryId) -> None:
        running = self._running.pop(trajectory, None)
        if running is not None:
            self._wasted_tokens += running.tokens
            self._wasted += 1

    def figures(self, *, first: int, services: ServiceFigures) -> LoopFigures:
        """Return the figures of a loop that is over; times leave out the steps before `first`."""
        at = self._trained_at
        later = self._batches[first:]
        everything = sum(n for n, _ in self._batches)
        return LoopFigures(
            steps=len(at),
            duration_s=at[-1],
            step_s=tuple(b - a for a, b in pairwise(at[first - 1 :])),
            trained_trajectories=sum(n for n, _ in later),
            trained_tokens=sum(tokens for _, tokens in later),
            training_s=self._training_s,
            staleness=tuple(sorted(self._staleness.items())),
            wasted_tokens=self._wasted_before_end,
            mean_trained_tokens=sum(tokens for _, tokens in self._batches) / everything,
            mean_started_tokens=sum(self._started[: self._ended]) / self._ended,
            all_trained_tokens=sum(tokens for _, tokens in self._batches),
            length_distance=distance(self._trained_lengths, self._started[: self._ended]),
            failed_starts=self._failed_starts,
            gpu_switches=self._switches,
            failed_switches=self._failed_switches,
            split=tuple(self._split),
            first_measured=first,
            services=services,
        )


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Kolmogorov-Smirnov distance of two samples, from 0 to 1."""
    first, second = np.sort(np.asarray(one)), np.sort(np.asarray(other))
    at = np.concatenate([first, second])
    shares = (np.searchsorted(each, at, side="right") / len(each) for each in (first, second))
    return float(np.abs(np.subtract(*shares)).max())
