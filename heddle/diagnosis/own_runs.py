"""Measured steps of a run of our own, from its journal."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from heddle.config_error import require
from heddle.runs import Run, RunError, load_run
from heddle.runs.comparison_folder import shown_runs
from heddle.runs.files import MANIFEST
from heddle.runs.journal_columns import Floats, Journal
from heddle.runs.loop_record import LoopRecord, loop_record
from heddle.runs.tables import (
    MEASURED,
    Columns,
    dispatches,
    step_columns,
    trajectory_columns,
)
from heddle_trace.importers.notes import Notes
from heddle_trace.observed.columns import ObservedSteps, observed
from heddle_trace.observed.core import ParsedObservation
from heddle_trace.observed.schema import (
    SCHEMA,
    Observation,
    ObservedHeader,
    ObservedRequest,
    Phase,
    PhaseName,
)


def own_run(sources: Sequence[str], what: str) -> Run | None:
    """The only run that is named, to be `what`; None where none is.

    Raises:
        ConfigError: there are several.
        RunError: as of `_run_of`.
    """
    runs = [_run_of(Path(source)) for source in sources]
    require(len(runs) == 1 or not any(runs), f"name one RUN: each is {what} by itself")
    return runs[0]


def _run_of(path: Path) -> Run | None:
    """The run of a folder; None where it is no folder of runs.

    Raises:
        RunError: it is the folder of several, or is damaged.
    """
    if (path / MANIFEST).is_file():
        return load_run(path, unfinished=True)
    runs = shown_runs(path) if path.is_dir() else []
    if len(runs) == 1:
        return load_run(runs[0], unfinished=True)
    if runs or (path.is_dir() and any(path.glob(f"*/*/{MANIFEST}"))):
        listed = ", ".join(str(run) for run in runs[:3]) or f"`heddle runs --in {path}` lists them"
        raise RunError(f"{path}: holds several runs: name one ({listed})")
    return None


def observed_run(run: Run) -> ObservedSteps:
    """Read the journal of a run.

    Raises:
        RunError: it is damaged, or nothing had arrived when it broke off.
    """
    journal = run.columns()
    if not journal.trajectories:
        raise RunError(f"{run.path}: its journal holds no trajectory yet: there is nothing to show")
    return observed_journal(journal, f"heddle run {run.path.name}")


def observed_journal(journal: Journal, source: str) -> ObservedSteps:
    """Read a journal with one trajectory at least; what its end cuts off ends with it."""
    header = ObservedHeader(schema=SCHEMA, source=source, clock="shared")
    seen = (ParsedObservation(source, each) for each in _observations(journal))
    return observed(header, seen, Notes())


def _observations(journal: Journal) -> Iterator[Observation]:
    loop = loop_record(journal)
    kinds = [journal.of(name) for name in MEASURED]
    last_s = max(float(rows.floats("time_s").max()) for rows in kinds if len(rows))
    yield from _requests(journal, loop, last_s)
    if loop is not None:
        yield from _phases("training", loop.trainings, last_s)
        yield from _phases("update", loop.updates, last_s)


def _phases(name: PhaseName, part: Columns, broke_off_s: float) -> Iterator[Phase]:
    ended = np.where(np.isnan(part["ended_s"]), broke_off_s, part["ended_s"]).tolist()
    labels = part["batch"].tolist() if "batch" in part else [None] * len(ended)
    for label, start_s, end_s in zip(labels, part["began_s"].tolist(), ended, strict=True):
        yield Phase(phase=name, start_s=start_s, end_s=end_s, rl_step=label)


def _requests(
    journal: Journal, loop: LoopRecord | None, last_s: float
) -> Iterator[ObservedRequest]:
    """A request a dispatch; the last of a step has its tool, the last of all its reward."""
    d = dispatches(journal)
    steps = step_columns(journal, d)
    t = trajectory_columns(journal, steps)
    names, groups = journal.trajectories, journal.words("group")
    engines, tools = journal.words("engine"), journal.words("tool")
    batches = _batches(loop)
    started_s = _times(journal, "StartTrajectory", len(names))
    scored_s = _times(journal, "Scored", len(names))
    ended_s = np.where(np.isnan(d.ended_s), last_s, d.ended_s)
    ok = _ok(journal)
    last = np.append(d.first[1:], True)
    of_step = np.cumsum(d.first) - 1
    first_of = np.append(True, d.trajectory[1:] != d.trajectory[:-1])
    last_of = np.append(first_of[1:], True)
    env_s = np.where(first_of, np.nan_to_num(t["arrived_s"] - started_s)[d.trajectory], 0.0)
    reward_s = np.where(last_of, np.nan_to_num(scored_s - t["finished_s"])[d.trajectory], 0.0)
    tool_s = np.where(last, steps["tool_s"][of_step], 0.0)
    lost_s = np.where(d.lost, ended_s - d.dispatched_s, 0.0)
    queue_s = np.maximum(d.dispatched_s - d.runnable_s, 0.0) + d.engine_queued_s
    columns = (
        *(d.trajectory, d.step, d.runnable_s - env_s, ended_s + tool_s + reward_s),
        *(env_s, queue_s, d.prefill_s, d.decode_s, lost_s, tool_s, reward_s),
        *(d.engine, steps["tool"][of_step], d.context_tokens, d.cached_tokens, d.output_tokens),
    )
    group = [groups[code] for code in t["group"].tolist()]
    for row in zip(*(column.tolist() for column in columns), strict=True):
        own, step, start_s, end_s, env, queue, prefill, decode, lost, tool, reward, *rest = row
        engine, name, given, cached, made = rest
        yield ObservedRequest(
            trajectory_id=names[own],
            step=step,
            group_id=group[own],
            rl_step=batches.get(own),
            start_s=start_s,
            end_s=end_s,
            env_start_s=env or None,
            queue_s=queue,
            prefill_s=prefill,
            decode_s=decode,
            lost_s=lost or None,
            tool_s=tool or None,
            reward_s=reward or None,
            tool=(tools[name] or None) if tool and name >= 0 else None,
            tool_ok=ok.get((own, step)) if tool else None,
            engine=engines[engine],
            input_tokens=given,
            cached_tokens=cached,
            output_tokens=made,
        )


def _ok(journal: Journal) -> dict[tuple[int, int], bool]:
    """Whether tools succeeded, by trajectory and step, of those that say it."""
    rows = journal.of("ToolReturned")
    columns = (rows.codes("trajectory"), rows.ints("step"), rows.ints("ok"))
    said = zip(*(column.tolist() for column in columns), strict=True)
    return {(own, step): ok == 1 for own, step, ok in said if ok >= 0}


def _batches(loop: LoopRecord | None) -> dict[int, int]:
    """The batch in which each trajectory was trained, by its code."""
    if loop is None:
        return {}
    parts = loop.trainings
    return {
        code: batch
        for batch, members in zip(parts["batch"].tolist(), parts["members"], strict=True)
        for code in members.tolist()
    }


def _times(journal: Journal, name: str, count: int) -> Floats:
    """When each trajectory had this event or command last; NaN of those that had none."""
    rows = journal.of(name)
    times, codes = np.full(count, np.nan), rows.codes("trajectory")
    times[codes[codes >= 0]] = rows.floats("time_s")[codes >= 0]
    return times
