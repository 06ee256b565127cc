"""The figures of each batch of an RL loop, from its journal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType

import numpy as np

from heddle.runs.journal_columns import Journal, Rows
from heddle.runs.loop_record import trainings, updates
from heddle.runs.tables import Bools, Columns, Floats, Ints

OF_BATCHES = (
    *("TrajectoryArrived", "TrajectoryFinished", "Scored", "StepFinished", "StepPreempted"),
    *("EngineFailed", "EngineStopped", "EngineUpdated", "UpdateWeights"),
    *("StartTrajectory", "StartFailed", "Discard", "AssignGpus", "GpusAssigned"),
    *("AccumulateGradients", "GradientsAccumulated", "Train", "Trained"),
)
"""Events and commands that figures of a loop are made from."""
_NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """One batch, from the end of the training before it to the end of its own."""

    batch: int
    end_s: float
    step_s: float
    """All of its time; the next four are parts of it."""
    rollout_s: float
    """The rest: waiting for trajectories."""
    reward_s: float
    """Waiting although what is trained next was generated: for rewards."""
    training_s: float
    update_s: float
    """In a weight update, and in moving GPUs between rollout and training."""
    trajectories: int
    tokens: int
    """Output tokens of them."""
    longest_over_mean: float
    """Output tokens of the longest of them, over the mean."""
    mean_reward: float | None
    """None: no trajectory of the loop has one but 0."""
    mean_staleness: float
    """Weight updates between the start of a trajectory and its training."""
    most_staleness: int
    wasted_tokens: int
    """Output tokens of trajectories that were discarded meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopColumns:
    """What figures of a loop are made from."""

    batches: tuple[BatchFigures, ...]
    trainings: Columns
    """See `heddle.runs.loop_record.trainings`."""
    updated_s: Floats
    """When all engines had each version, ascending."""
    tokens: Ints
    """Output tokens of each trajectory."""
    wasted: Ints
    """Rows in which a trajectory was lost to training, ascending."""
    trained: Ints
    """Rows in which a batch was trained."""


def loop_columns(
    journal: Journal,
    *,
    trainer_lends: bool = False,
    trainer_waits: bool = True,
    lost: Mapping[int, int] = _NOTHING,
) -> LoopColumns:
    """Cut the journal of a loop into batches.

    `trainer_lends`: the trainer cannot train while a hybrid pool is with the rollout. The time
    until it is back then counts as waiting for trajectories. `trainer_waits`: for the engines, in
    an update, so that its time is a part of the step. `lost` are tokens of steps whose
    trajectory was cancelled, by the number of batches that were trained before.
    """
    trained = journal.of("Trained")
    changed = updates(journal)
    parts = trainings(journal, changed)
    wasted_seq, of = _wasted(journal)
    tokens = _tokens(journal, dict(zip(of.tolist(), wasted_seq.tolist(), strict=True)))
    wasted = np.where(of >= 0, tokens[of], 0)
    rewards = _rewards(journal)
    times = _Times(journal, parts, changed, trainer_lends=trainer_lends, waits=trainer_waits)
    batches: list[BatchFigures] = []
    begin_s, begin_seq, wasted_before = 0.0, -1, 0
    for number, (batch, end_s, end_seq) in enumerate(
        zip(
            trained.ints("batch").tolist(),
            trained.floats("time_s").tolist(),
            trained.seq.tolist(),
            strict=True,
        )
    ):
        mine = np.flatnonzero(parts["batch"] == batch).tolist()
        members = np.concatenate([parts["members"][at] for at in mine])
        stale = np.concatenate([parts["staleness"][at] for at in mine]).tolist()
        training_s = times.training_s(mine)
        update_s = times.update_s(begin_seq, end_seq)
        reward_s = 0.0
        for at in mine:
            reward_s += times.reward_s(at, begin_s, begin_seq)
        wasted_so_far = int(wasted[wasted_seq < end_seq].sum())
        wasted_so_far += sum(lost.get(before, 0) for before in range(number + 1))
        step_s = end_s - begin_s
        batches.append(
            BatchFigures(
                batch=batch,
                end_s=end_s,
                step_s=step_s,
                rollout_s=step_s - training_s - update_s - reward_s,
                reward_s=reward_s,
                training_s=training_s,
                update_s=update_s,
                trajectories=len(members),
                tokens=int(tokens[members].sum()),
                longest_over_mean=float(tokens[members].max() / max(tokens[members].mean(), 1.0)),
                mean_reward=None if rewards is None else float(rewards[members].mean()),
                mean_staleness=fmean(stale),
                most_staleness=max(stale),
                wasted_tokens=wasted_so_far - wasted_before,
            )
        )
        begin_s, begin_seq, wasted_before = end_s, end_seq, wasted_so_far
    return LoopColumns(
        batches=tuple(batches),
        trainings=parts,
        updated_s=_updated_s(changed),
        tokens=tokens,
        wasted=wasted_seq,
        trained=trained.seq,
    )


def _updated_s(changed: Columns) -> Floats:
    versions = np.unique(changed["version"]).tolist()
    ends_s = [changed["ended_s"][changed["version"] == version].max() for version in versions]
    return np.array(ends_s, np.float64)


def _tokens(journal: Journal, wasted: Mapping[int, int]) -> Ints:
    """Output tokens by trajectory, those saved from failed engines too; the last is of none.

    `wasted` has the row in which a trajectory was lost to training.
    """
    found = np.zeros(len(journal.trajectories) + 1, np.int64)
    ended, failed = journal.of("StepFinished", "StepPreempted"), journal.of("EngineFailed")
    np.add.at(found, ended.codes("trajectory"), ended.ints("output_tokens"))
    code_of = {name: code for code, name in enumerate(journal.trajectories)}
    for row, payload in zip(failed.seq.tolist(), failed.payloads(), strict=True):
        for trajectory, tokens in payload["salvaged"]:
            code = code_of[trajectory]
            if row < wasted.get(code, journal.rows):
                found[code] += tokens
    return found


def _rewards(journal: Journal) -> Floats | None:
    """Rewards by trajectory, 0 where none was computed; None where all are 0."""
    scored = journal.of("Scored")
    found = np.zeros(len(journal.trajectories) + 1)
    found[scored.codes("trajectory")] = np.nan_to_num(scored.floats("reward"))
    return found if found.any() else None


def _wasted(journal: Journal) -> tuple[Ints, Ints]:
    """Rows in which trajectories were lost to training, and these."""
    ended = journal.of("TrajectoryFinished")
    lost = [code for code, word in enumerate(journal.words("outcome")) if word in _LOST]
    rows = [
        journal.of("Discard", "StartFailed"),
        ended.part(np.flatnonzero(np.isin(ended.codes("outcome"), lost))),
    ]
    seq = np.concatenate([each.seq for each in rows])
    order = np.argsort(seq)
    return seq[order], np.concatenate([each.codes("trajectory") for each in rows])[order]


_LOST = ("failed", "cancelled")


class _Times:
    """What the trainer did, and what it waited for."""

    def __init__(
        self,
        journal: Journal,
        parts: Columns,
        updates: Columns,
        *,
        trainer_lends: bool,
        waits: bool,
    ) -> None:
        self._parts = parts
        self._began_s: list[float] = parts["began_s"].tolist()
        self._ended_s: list[float] = parts["ended_s"].tolist()
        self._generated_s = np.zeros(len(journal.trajectories) + 1)
        finished = journal.of("TrajectoryFinished")
        self._generated_s[finished.codes("trajectory")] = finished.floats("time_s")
        begun, ended = journal.of("AssignGpus"), journal.of("GpusAssigned")
        self._to_training = begun.part(_with(journal, begun, pool="all", role="training"))
        begun = begun.part(_with(journal, begun, pool="all"))
        moves = ended.part(_with(journal, ended, pool="all"))
        # Updates of all engines that are waited for, and moves of all GPUs, by their end.
        seq, since_s = [moves.seq], [begun.floats("time_s")[: len(moves)]]
        until_s = [moves.floats("time_s")]
        for version in np.unique(updates["version"]).tolist() if waits else ():
            mine = np.flatnonzero(updates["version"] == version)
            last = mine[[int(updates["ended_seq"][mine].argmax())]]
            if updates["ended_seq"][last] < journal.rows:
                seq.append(updates["ended_seq"][last])
                since_s.append(updates["began_s"][last])
                until_s.append(updates["ended_s"][last])
        order = np.argsort(np.concatenate(seq))
        self._gap_seq, self._since_s, self._until_s = (
            np.concatenate(each)[order] for each in (seq, since_s, until_s)
        )
        # When the trainer could train again: after these, after a part of a batch, and when its
        # GPUs have returned.
        rows = [journal.of("GradientsAccumulated")]
        if trainer_lends:
            rows.append(ended.part(_with(journal, ended, pool="hybrid", role="training")))
        free_seq = np.concatenate([self._gap_seq, *(each.seq for each in rows)])
        free_s = np.concatenate([self._until_s, *(each.floats("time_s") for each in rows)])
        order = np.argsort(free_seq)
        self._free_seq, self._free_s = free_seq[order], np.append(free_s[order], 0.0)

    def training_s(self, parts: Sequence[int]) -> float:
        *others, last = parts
        seconds = 0.0
        for at in others:
            seconds += self._ended_s[at] - self._began_s[at]
        return seconds + self._ended_s[last] - self._began_s[last]

    def update_s(self, after: int, until: int) -> float:
        """Of updates and moves that end in these rows."""
        first, end = np.searchsorted(self._gap_seq, [after, until])
        seconds = 0.0
        for gap_s in (self._until_s - self._since_s)[first:end].tolist():
            seconds += gap_s
        return seconds

    def reward_s(self, part: int, begin_s: float, begin_seq: int) -> float:
        """Of a batch that began at a time and in a row, before this part of it was trained."""
        batch_s, row = self._began_s[part], int(self._parts["seq"][part])
        # Where GPUs move to training, the batch was complete before that.
        move = int(np.searchsorted(self._to_training.seq, row)) - 1
        if move >= 0 and self._to_training.seq[move] > begin_seq:
            batch_s = float(self._to_training.floats("time_s")[move])
            row = int(self._to_training.seq[move])
        free_s = float(self._free_s[int(np.searchsorted(self._free_seq, row)) - 1])
        generated_s = float(self._generated_s[self._parts["members"][part]].max())
        return max(0.0, batch_s - max(generated_s, begin_s, free_s))


def _with(journal: Journal, rows: Rows, **words: str) -> Ints:
    """Places of rows that have these words in these columns."""
    found: Bools = np.ones(len(rows), np.bool_)
    for column, word in words.items():
        known = list(journal.words(column))
        found &= rows.codes(column) == (known.index(word) if word in known else -2)
    return np.flatnonzero(found)
