"""The journal cut into dispatches, steps and trajectories, with numpy, never row by row.

Everything here follows from events and commands alone, so a run in the simulator and one on real
engines are measured by the same code. Definitions: docs/run-directory.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from heddle.runs.arrow_arrays import number_array, word_array
from heddle.runs.journal_columns import Bools as Bools
from heddle.runs.journal_columns import Floats as Floats
from heddle.runs.journal_columns import Ints as Ints
from heddle.runs.journal_columns import Journal, Rows

Columns: TypeAlias = dict[str, Any]

NEVER = np.nan
"""A time that was not reached when the journal ended."""


MEASURED = (
    *("TrajectoryArrived", "StepFinished", "StepPreempted", "ToolStarted", "ToolReturned"),
    *("TrajectoryFinished", "MigrationFinished", "EngineReady", "EngineStopped", "EngineFailed"),
    *("Predicted", "Dispatch", "Predict", "StartTrajectory", "StartFailed", "Discard"),
    *("AccumulateGradients", "GradientsAccumulated", "Train", "Trained", "UpdateWeights"),
    *("EngineUpdated", "AssignGpus", "GpusAssigned"),
)
"""Events and commands that figures are made from."""


@dataclass(frozen=True, slots=True)
class Dispatches:
    """One item per dispatch, ordered by (trajectory, step, time); `first` marks a step's first."""

    trajectory: Ints
    step: Ints
    engine: Ints
    dispatched_s: Floats
    runnable_s: Floats
    ended_s: Floats
    """`NEVER` when the journal ends before."""
    first: Bools
    finished: Bools
    preempted: Bools
    lost: Bools
    """Ended by the failure of its engine."""
    context_tokens: Ints
    """Tokens of its prompt: the step's, and those kept from its earlier dispatches."""
    output_tokens: Ints
    cached_tokens: Ints
    recomputes: Ints
    engine_queued_s: Floats
    prefill_s: Floats
    decode_s: Floats
    reason: Ints

    def part(self, index: Ints) -> "Dispatches":
        """Those at these places."""
        return Dispatches(*(getattr(self, field.name)[index] for field in fields(self)))


def dispatches(journal: Journal) -> Dispatches:
    """Join each dispatch with the event that ended it."""
    begun = _by_step(journal.of("Dispatch"))
    ends = _by_step(journal.of("StepFinished", "StepPreempted"))
    trajectory, step, seq = begun.codes("trajectory"), begun.ints("step"), begun.seq
    end_step = ends.ints("step")
    span = int(max(step.max(initial=0), end_step.max(initial=0))) + 1
    end_key = ends.codes("trajectory") * span + end_step
    end, found = _pair(trajectory * span + step, seq, end_key, ends.seq, journal.rows)

    def of_end(values: Any, none: float) -> Any:
        if found.all():
            return values[end]
        return np.where(found, values[end], none) if len(values) else np.full(len(found), none)

    first = np.ones(len(step), bool)
    first[1:] = (step[1:] != step[:-1]) | (trajectory[1:] != trajectory[:-1])
    ended_s = of_end(ends.floats("time_s"), NEVER)
    output = of_end(ends.ints("output_tokens"), 0)
    reason = of_end(ends.codes("reason"), -1)
    # Only a step that ended by itself has a reason.
    finished = found & (reason >= 0)
    engine = begun.codes("engine")
    lost = _lost_to_failures(journal, seq, trajectory, engine, found, ended_s, output)
    _end_with_trajectories(journal, trajectory, ended_s)
    runnable_s, context = _ready(journal, trajectory, step)
    if not first.all():
        runnable_s = np.where(first, runnable_s, np.append(NEVER, ended_s[:-1]))
        context = context + _sum_before(output, first)
    return Dispatches(
        trajectory=trajectory,
        step=step,
        engine=engine,
        dispatched_s=begun.floats("time_s"),
        runnable_s=runnable_s,
        ended_s=ended_s,
        first=first,
        finished=finished,
        preempted=found & ~finished,
        lost=lost,
        context_tokens=context,
        output_tokens=output,
        cached_tokens=of_end(ends.ints("cached_tokens"), 0),
        recomputes=of_end(ends.ints("recomputes"), 0),
        engine_queued_s=of_end(ends.floats("queued_s"), 0.0),
        prefill_s=of_end(ends.floats("prefill_s"), 0.0),
        decode_s=of_end(ends.floats("decode_s"), 0.0),
        reason=reason,
    )


def _by_step(rows: Rows) -> Rows:
    """Rows by trajectory and step, and those of one step in order. Numpy sorts 16 bits by radix."""
    trajectory = rows.codes("trajectory")
    halves = trajectory.astype(np.uint16), (trajectory >> 16).astype(np.uint16)
    return rows.part(np.lexsort((rows.column("step"), *halves)))


def _pair(key: Ints, seq: Ints, end_key: Ints, end_seq: Ints, total: int) -> tuple[Any, Bools]:
    """For each dispatch the first end of the same step before its next dispatch, if there is one.

    Both are in order of key, one for each step, and of `seq`, which is below `total`.
    """
    if not len(end_seq):
        return np.zeros(len(seq), np.int64), np.zeros(len(seq), bool)
    alternate = np.array_equal(key, end_key) and bool((seq < end_seq).all())
    if alternate and ((key[1:] != key[:-1]) | (end_seq[:-1] < seq[1:])).all():
        return slice(None), np.ones(len(seq), bool)
    width = total + 1
    mine, place = key * width + seq, end_key * width + end_seq
    limit = (key + 1) * width
    limit[:-1] = np.minimum(limit[:-1], mine[1:])
    at = np.searchsorted(place, mine)
    safe = np.minimum(at, len(place) - 1)
    return safe, (at < len(place)) & (place[safe] < limit)


def _end_with_trajectories(journal: Journal, trajectory: Ints, ended_s: Floats) -> None:
    """A trajectory that is cancelled takes its running step with it."""
    finished = journal.of("TrajectoryFinished")
    open_ = np.flatnonzero(np.isnan(ended_s))
    if not len(open_) or not len(finished):
        return
    codes = finished.codes("trajectory")
    at = np.full(int(max(trajectory.max(), codes.max())) + 1, NEVER)
    at[codes] = finished.floats("time_s")
    ended_s[open_] = at[trajectory[open_]]


def _lost_to_failures(
    journal: Journal,
    seq: Ints,
    trajectory: Ints,
    engine: Ints,
    found: Bools,
    ended_s: Floats,
    output: Ints,
) -> Bools:
    """Mark dispatches that ended with their engine; fill in when, and the tokens saved."""
    lost = np.zeros(len(seq), bool)
    failures = journal.of("EngineFailed")
    if not len(failures):
        return lost
    code_of = {name: code for code, name in enumerate(journal.trajectories)}
    for row, name, time_s, payload in zip(
        failures.seq,
        failures.codes("engine"),
        failures.floats("time_s"),
        failures.payloads(),
        strict=True,
    ):
        gone = np.flatnonzero((engine == name) & (seq < row) & ~found & ~lost)
        lost[gone] = True
        ended_s[gone] = time_s
        for member, tokens in payload["salvaged"]:
            output[gone[trajectory[gone] == code_of.get(member, -1)]] = tokens
    return lost


class _Places:
    """A place for each step up to the last of its trajectory, of sorted ones; one for others."""

    def __init__(self, trajectories: int, trajectory: Ints, step: Ints) -> None:
        self._steps = np.zeros(trajectories, np.int64)
        self._steps[trajectory] = step + 1  # the last of each counts
        self._begin = np.cumsum(self._steps) - self._steps
        self.count = int(self._steps.sum()) + 1
        self.own = self._begin[trajectory] + step
        """Those of the steps that it is made of."""

    def of(self, trajectory: Ints, step: Ints) -> Ints:
        place = self._begin[trajectory] + step
        place[step >= self._steps[trajectory]] = self.count - 1
        return place


def _ready(journal: Journal, trajectory: Ints, step: Ints) -> tuple[Floats, Ints]:
    """When each (trajectory, step) became runnable, and the tokens of its prompt then."""
    places = _Places(len(journal.trajectories), trajectory, step)
    ready_s, context = np.full(places.count, NEVER), np.zeros(places.count, np.int64)
    arrived, returned = journal.of("TrajectoryArrived"), journal.of("ToolReturned")
    place = places.of(arrived.codes("trajectory"), np.zeros(len(arrived), np.int64))
    ready_s[place] = arrived.floats("time_s")
    context[place] = arrived.ints("prompt_tokens")
    place = places.of(returned.codes("trajectory"), returned.ints("step") + 1)
    ready_s[place] = returned.floats("time_s")
    context[place] = returned.ints("context_tokens")
    return ready_s[places.own], context[places.own]


def _sum_before(values: Ints, first: Bools) -> Ints:
    """Sum of `values` over earlier items of the same run; runs begin where `first`."""
    before = np.concatenate(([0], np.cumsum(values)[:-1]))
    return np.asarray(before - before[np.flatnonzero(first)][np.cumsum(first) - 1], np.int64)


def step_columns(journal: Journal, d: Dispatches) -> Columns:
    """One item per step that was dispatched, ordered by (arrival, step); may be those of `d`."""
    once = bool(d.first.all())
    start: Any = slice(None) if once else np.flatnonzero(d.first)
    last: Any = start if once else np.append(start[1:], len(d.first)) - 1

    def total(values: Any) -> Any:
        return values if once else np.add.reduceat(values, start)

    tool = _tools(journal, d.trajectory[start], d.step[start])
    return {
        "trajectory": d.trajectory[start],
        "step": d.step[start],
        "engine": d.engine[last],
        "runnable_s": d.runnable_s[start],
        "dispatched_s": d.dispatched_s[start],
        "ended_s": d.ended_s[last],
        "finished": d.finished[last],
        "dispatches": total(np.ones(len(d.first), np.int64)),
        "preemptions": total(d.preempted.astype(np.int64)),
        "losses": total(d.lost.astype(np.int64)),
        "recomputes": total(d.recomputes),
        "queueing_s": total(d.dispatched_s - d.runnable_s),
        "engine_queued_s": total(d.engine_queued_s),
        "prefill_s": total(d.prefill_s),
        "decode_s": total(d.decode_s),
        "prompt_tokens": d.context_tokens[start],
        "output_tokens": total(d.output_tokens),
        "cached_tokens": total(d.cached_tokens),
        "reason": d.reason[last],
        **tool,
    }


def _tools(journal: Journal, trajectory: Ints, step: Ints) -> Columns:
    """Tool, seconds and added tokens of each step; a last tool ends with its trajectory."""
    started, returned = journal.of("ToolStarted"), journal.of("ToolReturned")
    places = _Places(len(journal.trajectories), trajectory, step)
    began_s, ended_s = np.full(places.count, NEVER), np.full(places.count, NEVER)
    name, added = np.full(places.count, -1, np.int64), np.zeros(places.count, np.int64)
    owner = started.codes("trajectory")
    place = places.of(owner, started.ints("step"))
    began_s[place] = started.floats("time_s")
    name[place] = started.codes("tool")
    finished = journal.of("TrajectoryFinished")
    closed_s = np.full(len(journal.trajectories), NEVER)
    closed_s[finished.codes("trajectory")] = finished.floats("time_s")
    ended_s[place] = closed_s[owner]
    place = places.of(returned.codes("trajectory"), returned.ints("step"))
    ended_s[place] = returned.floats("time_s")
    added[place] = returned.ints("observation_tokens")
    own = places.own
    tool_s = np.nan_to_num((ended_s - began_s)[own], nan=0.0)
    return {"tool": name[own], "tool_s": tool_s, "observation_tokens": added[own]}


def trajectory_columns(journal: Journal, steps: Columns) -> Columns:
    """One item per trajectory, in order of arrival."""
    arrived, finished = journal.of("TrajectoryArrived"), journal.of("TrajectoryFinished")
    n = len(arrived)
    trajectory = steps["trajectory"]
    finished_s = np.full(n, NEVER)
    outcome = np.full(n, -1, np.int64)
    place = finished.codes("trajectory")
    finished_s[place] = finished.floats("time_s")
    outcome[place] = finished.codes("outcome")
    moves = journal.of("MigrationFinished")
    moved = moves.codes("trajectory")[moves.ints("ok") == 1]

    def total(name: str) -> Floats:
        return np.asarray(np.bincount(trajectory, weights=steps[name], minlength=n), np.float64)

    def count(name: str) -> Ints:
        return total(name).astype(np.int64)

    return {
        "trajectory": np.arange(n),
        "group": arrived.codes("group"),
        "task": arrived.codes("task"),
        "arrived_s": arrived.floats("time_s"),
        "finished_s": finished_s,
        "outcome": outcome,
        "steps": np.bincount(trajectory, minlength=n),
        "prompt_tokens": arrived.ints("prompt_tokens"),
        **{name: count(name) for name in ("output_tokens", "cached_tokens")},
        **{name: total(name) for name in ("queueing_s", "engine_queued_s", "prefill_s")},
        **{name: total(name) for name in ("decode_s", "tool_s")},
        **{name: count(name) for name in ("preemptions", "recomputes")},
        "migrations": np.bincount(moved, minlength=n),
    }


_WORDS = ("trajectory", "engine", "reason", "tool", "group", "task", "outcome")


def to_arrow(journal: Journal, columns: Columns) -> pa.Table:
    """Turn codes back into words, and `NEVER` into null."""
    arrays: list[Any] = []
    for name, values in columns.items():
        if name in _WORDS:
            codes = number_array(values.astype(np.int32), values >= 0)
            words = word_array(journal.words(name))
            arrays.append(pa.DictionaryArray.from_arrays(codes, words))
        elif values.dtype.kind == "i":
            arrays.append(number_array(values.astype(np.int64)))
        else:
            arrays.append(number_array(values, ~np.isnan(values)))
    return pa.table(arrays, names=list(columns))


def engine_facts(journal: Journal) -> Mapping[str, Any]:
    """For each engine that was ready: its code, GPU class and TP degree, these for people, whether
    it only prefills, and when it lived."""
    ready, gone = journal.of("EngineReady"), journal.of("EngineStopped", "EngineFailed")
    code, tps = ready.codes("engine"), ready.ints("tp")
    words = journal.words("gpu")
    classes = [words[k] if k >= 0 else "" for k in ready.codes("gpu").tolist()]
    until = dict(zip(gone.codes("engine").tolist(), gone.floats("time_s"), strict=True))
    return {
        "engine": code,
        "kind": list(zip(classes, tps.tolist(), strict=True)),
        "tp": tps,
        "label": shape_labels(classes, tps.tolist()),
        "prefills_only": np.array(
            [word == "prefill" for word in _words(journal, ready, "role")], np.bool_
        ),
        "ready_s": ready.floats("time_s"),
        "gone_s": np.array([until.get(c, np.inf) for c in code.tolist()], np.float64),
    }


def shape_labels(classes: Sequence[str], tps: Sequence[int]) -> list[str]:
    """TP degrees of engines for people, with their GPU class where there are several."""
    several = len(set(classes)) > 1
    return [
        f"{gpu} TP {tp}" if several else f"TP {tp}" for gpu, tp in zip(classes, tps, strict=True)
    ]


def _words(journal: Journal, rows: Rows, column: str) -> list[str]:
    """Words of a column; "" where there is none."""
    words = ["", *journal.words(column)]
    return [words[code + 1] for code in rows.codes(column).tolist()]


def union_s(start: Floats, end: Floats) -> float:
    """Seconds covered by at least one of the intervals; `start` ascending."""
    if not len(start):
        return 0.0
    reach = np.maximum.accumulate(end)
    begin = np.maximum(start, np.concatenate(([start[0]], reach[:-1])))
    return float(np.maximum(reach - begin, 0.0).sum())
