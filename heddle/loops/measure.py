"""Figures of an RL loop, from its journal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev

import numpy as np

from heddle.loops.data import DataSet
from heddle.loops.staleness import Ages, StalenessFigures
from heddle.runs.journal_columns import Journal, Rows
from heddle.runs.loop_batches import BatchFigures, LoopColumns, loop_columns
from heddle_core.ids import GroupId, TrajectoryId


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A sample of a prompt that was trained."""

    trajectory: TrajectoryId
    group: GroupId
    number: int


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
    """Output tokens of them, without those that an over-long filter masks."""
    training_s: float
    """In training, over the whole loop."""
    staleness: tuple[tuple[int, int], ...]
    """Staleness and number of trained trajectories, of the steps in `step_s`."""
    wasted_tokens: int
    """Output tokens of trajectories that were discarded before the last batch was trained."""
    mean_trained_tokens: float
    """Output tokens of a trained trajectory, of the steps in `step_s`."""
    mean_started_tokens: float
    """Output tokens that as many trajectories would make as were trained or discarded in these
    steps, in the order of their starts."""
    all_trained_tokens: int
    """Output tokens of all trained trajectories, over the whole loop."""
    masked_tokens: int
    """Those of them that an over-long filter masks."""
    length_distance: float
    """Kolmogorov-Smirnov distance of the output tokens of trained trajectories to those of the
    started ones: largest difference of the shares that are no longer than a length."""
    failed_starts: int
    """Environments that did not start, over the whole loop."""
    gpu_switches: int
    """Moves of a hybrid pool's GPUs between rollout and training, over the whole loop."""
    failed_switches: int
    """Of these, those after which the GPUs were where they had been."""
    batches: tuple[BatchFigures, ...]
    """Every step, the first ones too."""
    first_measured: int
    """Steps that `step_s` leaves out."""
    services: ServiceFigures
    ages: StalenessFigures

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
        """Of a trained trajectory, of the steps in `step_s`."""
        return sum(s * n for s, n in self.staleness) / sum(n for _, n in self.staleness)

    @property
    def batch_spread(self) -> float:
        """Standard deviation of a batch's mean output tokens, over their mean."""
        means = [batch.tokens / batch.trajectories for batch in self.batches]
        return pstdev(means) / fmean(means)

    @property
    def longest_over_mean(self) -> float:
        """Output tokens of a batch's longest trajectory over its mean; mean of the batches."""
        return fmean(batch.longest_over_mean for batch in self.batches)

    @property
    def reward_spread(self) -> float | None:
        """Standard deviation of a batch's mean reward; None without rewards."""
        known = [batch.mean_reward for batch in self.batches if batch.mean_reward is not None]
        return pstdev(known) if known else None

    @property
    def mean_split(self) -> dict[str, float]:
        """Seconds of a measured step by what the trainer did or waited for; their sum is a step."""
        measured = self.batches[self.first_measured :]
        return {
            "rollout": fmean(batch.rollout_s for batch in measured),
            "reward": fmean(batch.reward_s for batch in measured),
            "training": fmean(batch.training_s for batch in measured),
            "update": fmean(batch.update_s for batch in measured),
        }


def loop_figures(
    journal: Journal,
    data: DataSet,
    services: Callable[[Sequence[TrainedSample]], ServiceFigures],
    *,
    first: int,
    trainer_lends: bool,
    trainer_waits: bool,
    lost: Mapping[int, int],
    masks: bool,
) -> tuple[LoopFigures, list[TrainedSample]]:
    """Cut the journal of a loop that is over into figures; with every trained sample, in order.

    Times leave out the steps before `first`; see `heddle.runs.loop_batches.loop_columns` for
    `trainer_lends`, `trainer_waits` and `lost`. With `masks` those that were truncated are masked.
    """
    columns = loop_columns(
        journal, trainer_lends=trainer_lends, trainer_waits=trainer_waits, lost=lost
    )
    begun, groups = journal.of("StartTrajectory"), journal.words("group")
    samples = [
        (GroupId(groups[group]), number)
        for group, number in zip(
            begun.codes("group").tolist(), begun.ints("sample").tolist(), strict=True
        )
    ]
    sample_of = dict(zip(begun.codes("trajectory").tolist(), samples, strict=True))
    parts, batches = columns.trainings, columns.batches
    members = np.concatenate(parts["members"])
    later_parts = np.flatnonzero(parts["batch"] >= first)
    measured = np.concatenate([parts["members"][part] for part in later_parts])
    trained = [
        TrainedSample(TrajectoryId(journal.trajectories[code]), *sample_of[code])
        for code in members.tolist()
    ]
    moves, pools = journal.of("GpusAssigned"), list(journal.words("pool"))
    ok = moves.ints("ok")[moves.codes("pool") == pools.index("hybrid")]
    later, tokens = batches[first:], columns.tokens[members]
    masked = np.where(_truncated(journal), columns.tokens, 0) if masks else columns.tokens * 0
    wasted = np.searchsorted(columns.wasted, columns.trained[[first - 1, -1]])
    before, ended_by = wasted + np.array([len(members) - len(measured), len(members)])
    # Output tokens in order of the starts, of as many as have ended.
    ended = [data.output_tokens(*sample) for sample in samples[:ended_by]]
    stale = np.concatenate([parts["staleness"][part] for part in later_parts])
    versions, numbers = np.unique(stale, return_counts=True)
    figures = LoopFigures(
        steps=len(batches),
        duration_s=batches[-1].end_s,
        step_s=tuple(b.end_s - a.end_s for a, b in pairwise(batches[first - 1 :])),
        trained_trajectories=sum(batch.trajectories for batch in later),
        trained_tokens=sum(batch.tokens for batch in later) - int(masked[measured].sum()),
        training_s=float(np.cumsum(parts["ended_s"] - parts["began_s"])[-1]),
        staleness=tuple(zip(versions.tolist(), numbers.tolist(), strict=True)),
        wasted_tokens=sum(batch.wasted_tokens for batch in batches),
        mean_trained_tokens=float(columns.tokens[measured].mean()),
        mean_started_tokens=fmean(ended[before:]),
        all_trained_tokens=int(tokens.sum()),
        masked_tokens=int(masked[members].sum()),
        length_distance=distance(tokens.tolist(), ended),
        failed_starts=len(journal.of("StartFailed")),
        gpu_switches=len(ok),
        failed_switches=int((ok == 0).sum()),
        batches=batches,
        first_measured=first,
        services=services(trained),
        ages=_ages(journal, columns, first),
    )
    return figures, trained


def _ages(journal: Journal, columns: LoopColumns, first: int) -> StalenessFigures:
    """Of the batches from `first` on."""
    parts, batches = columns.trainings, columns.batches
    begin_s, end_s = batches[first - 1].end_s, batches[-1].end_s
    own = np.flatnonzero(parts["batch"] >= first).tolist()
    last = [np.flatnonzero(parts["batch"] == b.batch)[-1] for b in batches[first:]]
    members, queued = (np.concatenate([parts[k][at] for at in own]) for k in ("members", "queued"))
    stale = np.concatenate([parts["staleness"][at] for at in own])
    begun, ended = journal.of("StartTrajectory"), journal.of("TrajectoryFinished")
    gone = journal.of("StartFailed")

    def under_way_s(rows: Rows) -> float:
        """From their time on, within the measured batches."""
        return float((end_s - np.clip(rows.floats("time_s"), begin_s, end_s)).sum())

    since_s, until_s = np.zeros((2, len(journal.trajectories) + 1))
    group = np.zeros(len(since_s), np.int64)
    since_s[begun.codes("trajectory")] = begun.floats("time_s")
    until_s[ended.codes("trajectory")] = ended.floats("time_s")
    group[begun.codes("trajectory")] = begun.codes("group")
    _, of = np.unique(group[members], return_inverse=True)
    longest, first_s, last_s = (np.full(of.max() + 1, each) for each in (0.0, np.inf, 0.0))
    np.maximum.at(longest, of, columns.tokens[members])
    np.minimum.at(first_s, of, since_s[members])
    np.maximum.at(last_s, of, until_s[members])
    at = np.searchsorted(columns.updated_s, first_s, side="right")
    known = np.flatnonzero((at > 0) & (at < len(columns.updated_s)))
    before_s, after_s = columns.updated_s[at[known] - 1], columns.updated_s[at[known]]
    held_s = sum(float(parts["ended_s"][at] - parts["began_s"][at]) for at in last)
    held_s += sum(batch.update_s for batch in batches[first:])
    scored = journal.of("Scored").floats("time_s")
    return StalenessFigures(
        simulated=Ages(generating=float((stale - queued).mean()), queued=float(queued.mean())),
        in_flight=(under_way_s(begun) - under_way_s(ended) - under_way_s(gone)) / (end_s - begin_s),
        held=min(1.0, held_s / (end_s - begin_s)),
        waits=sum(b.rollout_s + b.reward_s for b in batches[first:]) / (end_s - begin_s),
        made=float(((scored > begin_s) & (scored <= end_s)).sum()) / len(members),
        tail=float(longest.mean() / columns.tokens[members].mean()),
        phase=float(((first_s[known] - before_s) / (after_s - before_s)).mean()),
        tail_s=float((last_s - first_s).mean() / (until_s - since_s)[members].mean()),
    )


def _truncated(journal: Journal) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether a limit cut a trajectory off, by its code."""
    ends, outcomes = journal.of("TrajectoryFinished"), list(journal.words("outcome"))
    cut = [code for code, outcome in enumerate(outcomes) if outcome == "truncated"]
    found = np.zeros(len(journal.trajectories) + 1, np.bool_)  # The last answers to code -1.
    found[ends.codes("trajectory")[np.isin(ends.codes("outcome"), cut)]] = True
    return found


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Kolmogorov-Smirnov distance of two samples, from 0 to 1."""
    first, second = np.sort(np.asarray(one)), np.sort(np.asarray(other))
    at = np.concatenate([first, second])
    shares = (np.searchsorted(each, at, side="right") / len(each) for each in (first, second))
    return float(np.abs(np.subtract(*shares)).max())
