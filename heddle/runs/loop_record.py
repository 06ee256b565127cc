"""Batches, trainings, weight updates, rewards and starts of an RL loop, from its journal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heddle.runs import files
from heddle.runs.directory import Run
from heddle.runs.journal_columns import Journal, Rows
from heddle.runs.tables import NEVER, Columns, Floats, Ints


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """An RL loop. Times are the journal's; `NEVER` ends what was under way when it broke off."""

    trainings: Columns
    """By beginning, several of a batch where its parts are trained: `batch`, `began_s`, `ended_s`,
    `trajectories`, `version`, the mean and the most staleness of its trajectories, and how much of
    it they spent `queued`, in complete groups."""
    updates: Columns
    """By beginning: `engine` as a code, `version`, `began_s`, `ended_s`, and whether the engine was
    `updated` and not lost."""
    moves: Columns
    """Of GPUs between rollout and training: `role` as a word, `began_s`, `ended_s`."""
    rewards: tuple[Floats, Floats]
    """When rewards were due, and when they were computed; each ascending."""
    starts: tuple[Floats, Floats]
    """The same of environments."""


def loop_record(journal: Journal) -> LoopRecord | None:
    """Cut the journal of a loop; None for a rollout."""
    if not len(journal.of("LoopStarted")):
        return None
    found = updates(journal)
    return LoopRecord(
        trainings=trainings(journal, found),
        updates=found,
        moves=_moves(journal),
        rewards=_intervals(journal.of("Score"), journal.of("Scored")),
        starts=_intervals(
            journal.of("StartTrajectory"), journal.of("TrajectoryArrived", "StartFailed")
        ),
    )


def loop_steps(run: Run) -> Sequence[Mapping[str, Any]]:
    """Figures of each RL step; none of a rollout, and of a loop that did not finish."""
    path = run.path / files.RL_STEPS
    steps: list[Mapping[str, Any]] = files.read_json(path)["steps"] if path.exists() else []
    return steps


def _intervals(begun: Rows, ended: Rows) -> tuple[Floats, Floats]:
    """Beginnings and ends; which belong together does not matter for how many are under way."""
    return np.sort(begun.floats("time_s")), np.sort(ended.floats("time_s"))


def updates(journal: Journal) -> Columns:
    """Each update with the report of its engine, or the end of its engine."""
    begun = journal.of("UpdateWeights")
    ended = journal.of("EngineUpdated", "EngineFailed", "EngineStopped")
    ended_s, ended_seq = np.full(len(begun), NEVER), np.full(len(begun), journal.rows)
    engine, end_engine = begun.codes("engine"), ended.codes("engine")
    for code in np.unique(engine).tolist():
        mine, its = np.flatnonzero(engine == code), np.flatnonzero(end_engine == code)
        at = np.searchsorted(ended.seq[its], begun.seq[mine])
        known = at < len(its)
        ended_s[mine[known]] = ended.floats("time_s")[its[at[known]]]
        ended_seq[mine[known]] = ended.seq[its[at[known]]]
    return {
        "engine": engine,
        "version": begun.ints("version"),
        "began_s": begun.floats("time_s"),
        "ended_s": ended_s,
        "ended_seq": ended_seq,
        "updated": np.isin(ended_seq, journal.of("EngineUpdated").seq),
    }


def trainings(journal: Journal, updates: Columns) -> Columns:
    """Each training of a batch, or of a part of one; `members` are codes of its trajectories."""
    begun = journal.of("AccumulateGradients", "Train")
    ended = journal.of("GradientsAccumulated", "Trained")
    ended_s = np.full(len(begun), NEVER)
    ended_s[: len(ended)] = ended.floats("time_s")
    # A version holds from the end of the last engine's update on.
    versions = np.unique(updates["version"])
    since = np.array([updates["ended_seq"][updates["version"] == v].max() for v in versions], int)

    def version_at(seq: Ints) -> Ints:
        return np.searchsorted(np.maximum.accumulate(since), seq, side="right")

    started = journal.of("StartTrajectory")
    at_start = np.zeros(len(journal.trajectories) + 1, np.int64)  # the last is of no trajectory
    at_start[started.codes("trajectory")] = version_at(started.seq)
    code_of = {name: code for code, name in enumerate(journal.trajectories)}
    version = version_at(begun.seq)
    members = [np.array([code_of[t] for t in p["trajectories"]]) for p in begun.payloads()]
    stale = [v - at_start[each] for v, each in zip(version.tolist(), members, strict=True)]
    complete = _complete(journal, members)
    queued = [v - version_at(complete[each]) for v, each in zip(version, members, strict=True)]
    return {
        "seq": begun.seq,
        "batch": begun.ints("batch"),
        "began_s": begun.floats("time_s"),
        "ended_s": ended_s,
        "members": members,
        "staleness": stale,
        "queued": queued,
        "trajectories": np.array([len(each) for each in members], np.int64),
        "version": version,
        "mean_staleness": np.array([each.mean() for each in stale], np.float64),
        "most_staleness": np.array([each.max() for each in stale], np.int64),
    }


def _complete(journal: Journal, members: Sequence[Ints]) -> Ints:
    """Row of the last reward of each trained trajectory's group, by trajectory."""
    scored, started = journal.of("Scored"), journal.of("StartTrajectory")
    row, group = np.zeros((2, len(journal.trajectories) + 1), np.int64)
    # More groups than trajectories: those whose environments all failed have none.
    last = np.zeros(len(journal.words("group")) + 1, np.int64)
    row[scored.codes("trajectory")] = scored.seq
    group[started.codes("trajectory")] = started.codes("group")
    trained = np.concatenate([last[:0], *members])
    np.maximum.at(last, group[trained], row[trained])
    return last[group]


def _moves(journal: Journal) -> Columns:
    begun, ended = journal.of("AssignGpus"), journal.of("GpusAssigned")
    ended_s = np.full(len(begun), NEVER)
    ended_s[: len(ended)] = ended.floats("time_s")
    words = journal.words("role")
    return {
        "role": [words[code] for code in begun.codes("role").tolist()],
        "began_s": begun.floats("time_s"),
        "ended_s": ended_s,
    }
