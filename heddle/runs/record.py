"""Steps, engines and migrations of a run, from its journal, for pages and exports.

A finished run's tables hold the same figures. A journal that broke off has no tables, so pages and
exports read this instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np

from heddle.runs import Run, RunError
from heddle.runs.journal_columns import Journal, Rows
from heddle.runs.journal_schema import EVENTS
from heddle.runs.loop_record import LoopRecord, loop_record
from heddle.runs.tables import (
    NEVER,
    Columns,
    Dispatches,
    Floats,
    Ints,
    dispatches,
    engine_facts,
    step_columns,
    trajectory_columns,
)

MOMENT_S = 1e-6


@dataclass(frozen=True)
class Record:
    """One run. Times are the journal's; the rollout lasts from `start_s` to `end_s`."""

    run: Run
    journal: Journal
    dispatches: Dispatches
    steps: Columns
    trajectories: Columns
    waiting_since_s: Floats
    """Of each trajectory: since when it waits, where a journal broke off before its dispatch."""
    engines: Mapping[str, Any]
    """See `heddle.runs.tables.engine_facts`; `name`, `kv_capacity_tokens` and `failed` beside."""
    migrations: Columns
    reports: Columns
    loop: LoopRecord | None
    """Of an RL loop alone."""
    start_s: float
    """The first arrival; the beginning of a loop."""
    end_s: float
    """The last finish, or the last entry of a loop, or of a journal that broke off."""
    note: str | None
    """Why there is no more of it; None for a finished run."""

    @cached_property
    def slot(self) -> Ints:
        """Of each dispatch: the lowest slot of its engine that was free."""
        d = self.dispatches
        return slots(d.engine, d.dispatched_s, d.ended_s)


def record(run: Run) -> Record:
    """Read and cut the journal of a run.

    Raises:
        RunError: it is damaged, or nothing had arrived when it broke off.
    """
    journal = run.columns()
    d = dispatches(journal)
    steps = step_columns(journal, d)
    trajectories = trajectory_columns(journal, steps)
    if not len(trajectories["trajectory"]):
        raise RunError(f"{run.path}: its journal holds no trajectory yet: there is nothing to show")
    loop = loop_record(journal)
    open_ends = bool(np.isnan(trajectories["finished_s"]).any())
    whole = not (open_ends or loop)
    start_s = float(trajectories["arrived_s"].min())
    return Record(
        run=run,
        journal=journal,
        dispatches=d,
        steps=steps,
        trajectories=trajectories,
        waiting_since_s=_waiting_since(journal, d, trajectories),
        engines=_engines(journal),
        migrations=_migrations(journal),
        reports=_reports(journal),
        loop=loop,
        start_s=float(journal.of("LoopStarted").floats("time_s")[0]) if loop else start_s,
        end_s=float(trajectories["finished_s"].max()) if whole else _last_s(journal),
        note=run.unfinished,
    )


def _last_s(journal: Journal) -> float:
    """The time of the last event."""
    of_events = (journal.of(event.__name__) for event in EVENTS)
    ends = ((int(rows.seq[-1]), float(rows.floats("time_s")[-1])) for rows in of_events if rows)
    return max(ends)[1]


def slots(engine: Ints, from_s: Floats, until_s: Floats) -> Ints:
    """Give each interval the lowest slot of its engine that is free when it begins.

    An interval lasts a microsecond at least, so that none hides another, and NaN never ends.
    """
    until_s = np.maximum(np.where(np.isnan(until_s), np.inf, until_s), from_s + MOMENT_S)
    slot = np.zeros(len(engine), np.int64)
    busy: dict[int, list[tuple[float, int]]] = {}
    free: dict[int, list[int]] = {}
    order = np.lexsort((from_s, engine))
    for i, code, begin, end in zip(
        order.tolist(),
        engine[order].tolist(),
        from_s[order].tolist(),
        until_s[order].tolist(),
        strict=True,
    ):
        running, idle = busy.setdefault(code, []), free.setdefault(code, [])
        while running and running[0][0] <= begin:
            heappush(idle, heappop(running)[1])
        # Slots are numbered without gaps: with none idle, all below this number are taken.
        mine = heappop(idle) if idle else len(running)
        heappush(running, (end, mine))
        slot[i] = mine
    return slot


def _waiting_since(journal: Journal, d: Dispatches, trajectories: Columns) -> Floats:
    """Since when a trajectory is runnable that is neither dispatched again nor finished."""
    since_s = np.array(trajectories["arrived_s"], np.float64)
    step = np.full(len(since_s), -1, np.int64)
    # Dispatches are in order of trajectory and time, so the last of each is what stays.
    step[d.trajectory] = d.step
    since_s[d.trajectory] = np.where(d.preempted | d.lost, d.ended_s, NEVER)
    returned = journal.of("ToolReturned")
    trajectory = returned.codes("trajectory")
    last = returned.ints("step") == step[trajectory]
    since_s[trajectory[last]] = returned.floats("time_s")[last]
    return np.where(np.isnan(trajectories["finished_s"]), since_s, NEVER)


def _engines(journal: Journal) -> Mapping[str, Any]:
    facts = engine_facts(journal)
    words = journal.words("engine")
    failed = set(journal.of("EngineFailed").codes("engine").tolist())
    codes = facts["engine"].tolist()
    return {
        **facts,
        "name": [words[code] for code in codes],
        "kv_capacity_tokens": journal.of("EngineReady").ints("kv_capacity_tokens"),
        "failed": [code in failed for code in codes],
    }


def _migrations(journal: Journal) -> Columns:
    """One item per migration, by trajectory and time; `NEVER` ends one that was under way."""
    begun, ended = journal.of("Migrate"), journal.of("MigrationFinished")
    begun = begun.part(np.argsort(begun.codes("trajectory"), kind="stable"))
    ended = ended.part(np.argsort(ended.codes("trajectory"), kind="stable"))
    # A trajectory has one migration at a time, so its n-th end belongs to its n-th beginning.
    at = _matches(begun.codes("trajectory"), ended.codes("trajectory"))
    ended_s, ok = np.full(len(begun), NEVER), np.zeros(len(begun), bool)
    kv_tokens = np.zeros(len(begun), np.int64)
    ended_s[at], ok[at] = ended.floats("time_s"), ended.ints("ok") == 1
    kv_tokens[at] = ended.ints("kv_tokens")
    return {
        "trajectory": begun.codes("trajectory"),
        "source": _as_engines(journal, "source", begun),
        "target": _as_engines(journal, "target", begun),
        "began_s": begun.floats("time_s"),
        "ended_s": ended_s,
        "ok": ok,
        "kv_tokens": kv_tokens,
    }


def _as_engines(journal: Journal, column: str, rows: Rows) -> Ints:
    """Codes of a column that names engines, as codes of the column `engine`."""
    code_of = {name: code for code, name in enumerate(journal.words("engine"))}
    codes = np.array([code_of.get(name, -1) for name in journal.words(column)], np.int64)
    return codes[rows.codes(column)] if len(rows) else np.zeros(0, np.int64)


def _matches(begun: Ints, ended: Ints) -> Ints:
    """Place, in the sorted `begun`, of the n-th of each value for the n-th of it in `ended`."""
    nth = np.arange(len(ended)) - np.searchsorted(ended, ended)
    return np.asarray(np.searchsorted(begun, ended) + nth, np.int64)


def _reports(journal: Journal) -> Columns:
    """Reports of engines, in order of time."""
    rows = journal.of("EngineReported")
    return {
        "engine": rows.codes("engine"),
        "time_s": rows.floats("time_s"),
        "running": rows.ints("running"),
        "waiting": rows.ints("waiting"),
        "kv_used_tokens": rows.ints("kv_used_tokens"),
    }
