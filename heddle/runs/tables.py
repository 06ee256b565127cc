"""The journal cut into dispatches, steps and trajectories, with numpy, never row by row.

Everything here follows from events and commands alone, so a run in the simulator and one on real
engines are measured by the same code. Definitions: docs/run-directory.md.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Bools: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Columns: TypeAlias = dict[str, Any]

NEVER = np.nan
"""A time that was not reached when the journal ended."""


class Journal:
    """Columns of a journal as numpy arrays, by event or command name.

    Words (ids, names) are codes into `words(column)`; -1 where a row has none. Codes of
    trajectories count from 0 in order of arrival.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table.unify_dictionaries()
        self._cache: dict[str, Any] = {}
        self.rows: int = self._table.num_rows
        names, codes = self._dictionary("name")
        self._rows_of = {name: np.flatnonzero(codes == i) for i, name in enumerate(names)}
        self.trajectories, self._rank = self._arrival_order()

    def rows_of(self, *names: str) -> Ints:
        """Row numbers, which are also `seq`, of these events or commands, ascending."""
        parts = [self._rows_of.get(name, np.zeros(0, np.int64)) for name in names]
        return np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0]

    def floats(self, column: str, rows: Ints) -> Floats:
        """Values of a number column; 0 where there is none."""
        return np.asarray(self._numbers(column)[rows], np.float64)

    def ints(self, column: str, rows: Ints) -> Ints:
        """Values of an integer column; 0 where there is none."""
        return np.asarray(self._numbers(column)[rows], np.int64)

    def codes(self, column: str, rows: Ints) -> Ints:
        """Codes of a word column."""
        codes = self._dictionary(column)[1][rows]
        return self._rank[codes] if column == "trajectory" else codes

    def words(self, column: str) -> list[str]:
        """The words that codes of this column stand for."""
        return self.trajectories if column == "trajectory" else self._dictionary(column)[0]

    def payloads(self, rows: Ints) -> list[Any]:
        """Decoded JSON payloads of rows."""
        texts = self._table.column("payload").take(rows).to_pylist()
        return [json.loads(text or "{}") for text in texts]

    def _numbers(self, column: str) -> Any:
        if column not in self._cache:
            values: Any = self._table.column(column).combine_chunks()
            if values.null_count:
                values = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
            self._cache[column] = values.to_numpy(zero_copy_only=False)
        return self._cache[column]

    def _dictionary(self, column: str) -> tuple[list[str], Ints]:
        if column not in self._cache:
            array: Any = self._table.column(column).combine_chunks()
            if isinstance(array, pa.ChunkedArray):  # a table without rows has no chunk to give
                array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
            codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
            self._cache[column] = (array.dictionary.to_pylist(), codes)
        found: tuple[list[str], Ints] = self._cache[column]
        return found

    def _arrival_order(self) -> tuple[list[str], Ints]:
        words, codes = self._dictionary("trajectory")
        arrived = codes[self.rows_of("TrajectoryArrived")]
        rank = np.full(len(words) + 1, -1, np.int64)  # the last answers to code -1
        rank[arrived] = np.arange(len(arrived))
        return [words[code] for code in arrived.tolist()], rank


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
    priority: Floats


def dispatches(journal: Journal) -> Dispatches:
    """Join each dispatch with the event that ended it."""
    rows = journal.rows_of("Dispatch")
    ends = journal.rows_of("StepFinished", "StepPreempted")
    steps = journal.ints("step", rows)
    span = int(max(steps.max(initial=0), journal.ints("step", ends).max(initial=0))) + 1
    key = journal.codes("trajectory", rows) * span + steps
    order = np.lexsort((rows, key))
    rows, key = rows[order], key[order]
    end, found = _pair(
        rows,
        key,
        ends,
        journal.codes("trajectory", ends) * span + journal.ints("step", ends),
        journal.rows,
    )
    first = np.ones(len(rows), bool)
    first[1:] = key[1:] != key[:-1]
    ended_s = np.where(found, journal.floats("time_s", end), NEVER)
    output = np.where(found, journal.ints("output_tokens", end), 0)
    engine = journal.codes("engine", rows)
    lost = _lost_to_failures(journal, rows, engine, found, ended_s, output)
    trajectory, step = key // span, key % span
    runnable_s, context = _ready(journal, trajectory, step, span)
    runnable_s = np.where(first, runnable_s, _before(ended_s, NEVER))
    context = context + _sum_before(output, first)

    def of_end(column: str) -> Any:
        return np.where(found, journal.floats(column, end), 0.0)

    return Dispatches(
        trajectory=trajectory,
        step=step,
        engine=engine,
        dispatched_s=journal.floats("time_s", rows),
        runnable_s=runnable_s,
        ended_s=ended_s,
        first=first,
        finished=found & np.isin(end, journal.rows_of("StepFinished")),
        preempted=found & np.isin(end, journal.rows_of("StepPreempted")),
        lost=lost,
        context_tokens=context,
        output_tokens=output,
        cached_tokens=of_end("cached_tokens").astype(np.int64),
        recomputes=of_end("recomputes").astype(np.int64),
        engine_queued_s=of_end("queued_s"),
        prefill_s=of_end("prefill_s"),
        decode_s=of_end("decode_s"),
        reason=np.where(found, journal.codes("reason", end), -1),
        priority=journal.floats("priority", rows),
    )


def _pair(rows: Ints, key: Ints, ends: Ints, end_key: Ints, total: int) -> tuple[Ints, Bools]:
    """For each dispatch the row of the first end of the same step before its next dispatch."""
    width = total + 1
    order = np.lexsort((ends, end_key))
    place = (end_key * width + ends)[order]
    mine = key * width + rows
    limit = (key + 1) * width
    limit[:-1] = np.minimum(limit[:-1], mine[1:])
    at = np.searchsorted(place, mine)
    if not len(ends):
        return np.zeros(len(rows), np.int64), np.zeros(len(rows), bool)
    safe = np.minimum(at, len(ends) - 1)
    found = (at < len(ends)) & (place[safe] < limit)
    return ends[order][safe], found


def _lost_to_failures(
    journal: Journal, rows: Ints, engine: Ints, found: Bools, ended_s: Floats, output: Ints
) -> Bools:
    """Mark dispatches that ended with their engine; fill in when, and the tokens saved."""
    lost = np.zeros(len(rows), bool)
    failures = journal.rows_of("EngineFailed")
    if not len(failures):
        return lost
    trajectory = journal.codes("trajectory", rows)
    code_of = {name: code for code, name in enumerate(journal.trajectories)}
    names = journal.codes("engine", failures)
    times = journal.floats("time_s", failures)
    for row, name, time_s, payload in zip(
        failures, names, times, journal.payloads(failures), strict=True
    ):
        gone = (engine == name) & (rows < row) & ~found & ~lost
        lost |= gone
        ended_s[gone] = time_s
        for member, tokens in payload["salvaged"]:
            output[gone & (trajectory == code_of[member])] = tokens
    return lost


def _ready(journal: Journal, trajectory: Ints, step: Ints, span: int) -> tuple[Floats, Ints]:
    """When each (trajectory, step) became runnable, and the tokens of its prompt then."""
    ready_s = np.full(len(journal.trajectories) * span + 1, NEVER)
    context = np.zeros(len(ready_s), np.int64)
    arrived = journal.rows_of("TrajectoryArrived")
    place = journal.codes("trajectory", arrived) * span
    ready_s[place] = journal.floats("time_s", arrived)
    context[place] = journal.ints("prompt_tokens", arrived)
    returned = journal.rows_of("ToolReturned")
    step_after = journal.ints("step", returned) + 1
    place = journal.codes("trajectory", returned) * span + step_after
    place = np.where(step_after < span, place, len(ready_s) - 1)  # returned, never dispatched again
    ready_s[place] = journal.floats("time_s", returned)
    context[place] = journal.ints("context_tokens", returned)
    mine = trajectory * span + step
    return ready_s[mine], context[mine]


def _before(values: Floats, none: float) -> Floats:
    return np.concatenate(([none], values[:-1])) if len(values) else values


def _sum_before(values: Ints, first: Bools) -> Ints:
    """Sum of `values` over earlier items of the same run; runs begin where `first`."""
    if not len(values):
        return values
    before = np.concatenate(([0], np.cumsum(values)[:-1]))
    return np.asarray(before - before[np.flatnonzero(first)][np.cumsum(first) - 1], np.int64)


def step_columns(journal: Journal, d: Dispatches) -> Columns:
    """One item per step that was dispatched, ordered by (arrival, step)."""
    start = np.flatnonzero(d.first)
    last = np.append(start[1:], len(d.first)) - 1 if len(start) else start

    def total(values: Any) -> Any:
        return np.add.reduceat(values, start) if len(start) else values[:0]

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
    started, returned = journal.rows_of("ToolStarted"), journal.rows_of("ToolReturned")
    span = int(max(step.max(initial=0), journal.ints("step", started).max(initial=0))) + 1
    size = len(journal.trajectories) * span
    began_s, ended_s = np.full(size, NEVER), np.full(size, NEVER)
    name, added = np.full(size, -1, np.int64), np.zeros(size, np.int64)
    place = journal.codes("trajectory", started) * span + journal.ints("step", started)
    began_s[place] = journal.floats("time_s", started)
    name[place] = journal.codes("tool", started)
    finished = journal.rows_of("TrajectoryFinished")
    closed_s = np.full(len(journal.trajectories), NEVER)
    closed_s[journal.codes("trajectory", finished)] = journal.floats("time_s", finished)
    ended_s[place] = closed_s[journal.codes("trajectory", started)]
    place = journal.codes("trajectory", returned) * span + journal.ints("step", returned)
    ended_s[place] = journal.floats("time_s", returned)
    added[place] = journal.ints("observation_tokens", returned)
    mine = trajectory * span + step
    tool_s = np.nan_to_num(ended_s - began_s, nan=0.0)[mine]
    return {"tool": name[mine], "tool_s": tool_s, "observation_tokens": added[mine]}


def trajectory_columns(journal: Journal, steps: Columns) -> Columns:
    """One item per trajectory, in order of arrival."""
    arrived, finished = journal.rows_of("TrajectoryArrived"), journal.rows_of("TrajectoryFinished")
    n = len(arrived)
    trajectory = steps["trajectory"]
    finished_s = np.full(n, NEVER)
    outcome = np.full(n, -1, np.int64)
    place = journal.codes("trajectory", finished)
    finished_s[place] = journal.floats("time_s", finished)
    outcome[place] = journal.codes("outcome", finished)
    moved = journal.rows_of("MigrationFinished")
    moved = moved[journal.ints("ok", moved) == 1]

    def total(name: str) -> Floats:
        return np.asarray(np.bincount(trajectory, weights=steps[name], minlength=n), np.float64)

    def count(name: str) -> Ints:
        return total(name).astype(np.int64)

    return {
        "trajectory": np.arange(n),
        "group": journal.codes("group", arrived),
        "task": journal.codes("task", arrived),
        "arrived_s": journal.floats("time_s", arrived),
        "finished_s": finished_s,
        "outcome": outcome,
        "steps": np.bincount(trajectory, minlength=n),
        "prompt_tokens": journal.ints("prompt_tokens", arrived),
        "output_tokens": count("output_tokens"),
        "cached_tokens": count("cached_tokens"),
        "queueing_s": total("queueing_s"),
        "engine_queued_s": total("engine_queued_s"),
        "prefill_s": total("prefill_s"),
        "decode_s": total("decode_s"),
        "tool_s": total("tool_s"),
        "preemptions": count("preemptions"),
        "recomputes": count("recomputes"),
        "migrations": np.bincount(journal.codes("trajectory", moved), minlength=n),
    }


_WORDS = ("trajectory", "engine", "reason", "tool", "group", "task", "outcome")


def to_arrow(journal: Journal, columns: Columns) -> pa.Table:
    """Turn codes back into words, and `NEVER` into null."""
    arrays: list[Any] = []
    for name, values in columns.items():
        if name in _WORDS:
            codes: Any = pa.array(values.astype(np.int32), mask=values < 0)
            words = pa.array(journal.words(name), pa.string())
            arrays.append(pa.DictionaryArray.from_arrays(codes, words))
        else:
            arrays.append(pa.array(values, from_pandas=True))
    return pa.table(arrays, names=list(columns))


def engine_facts(journal: Journal) -> Mapping[str, Any]:
    """For each engine that was ready: its code, TP degree, and from when to when it lived."""
    ready = journal.rows_of("EngineReady")
    gone = journal.rows_of("EngineStopped", "EngineFailed")
    code = journal.codes("engine", ready)
    until = dict(
        zip(journal.codes("engine", gone).tolist(), journal.floats("time_s", gone), strict=True)
    )
    return {
        "engine": code,
        "tp": journal.ints("tp", ready),
        "ready_s": journal.floats("time_s", ready),
        "gone_s": np.array([until.get(c, np.inf) for c in code.tolist()], np.float64),
    }


def union_s(start: Floats, end: Floats) -> float:
    """Seconds covered by at least one of the intervals; `start` ascending."""
    if not len(start):
        return 0.0
    reach = np.maximum.accumulate(end)
    begin = np.maximum(start, np.concatenate(([start[0]], reach[:-1])))
    return float(np.maximum(reach - begin, 0.0).sum())


def names(journal: Journal, column: str, codes: Sequence[int]) -> list[str]:
    """Words for codes of a column."""
    words = journal.words(column)
    return [words[code] for code in codes]
