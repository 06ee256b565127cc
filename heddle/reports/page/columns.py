"""A run's data on the page: columns of integers, and the words that codes stand for.

Times are ticks since the first arrival of the run, so that they fit into 32 bits and compress.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heddle.reports.curves import Curve, at_least, completion, thin, under_way
from heddle.runs.compatibility import upgraded
from heddle.runs.record import Record
from heddle.runs.tables import Floats, Ints

TICK_S = 1e-4
MAX_TICKS = 2**32 - 2
NONE = 2**32 - 1
"""A time that was not reached, and the code of no value."""

OPEN, PREEMPTED, LOST = 1, 2, 4
"""Flags of a dispatch: still going on at the end; ended by a preemption; by its engine's failure.
"""


@dataclass(frozen=True, slots=True)
class Columns:
    """A run, made ready for a page."""

    facts: Mapping[str, Any]
    """What goes as JSON."""
    columns: Mapping[str, Mapping[str, Any]]
    """Table, column, values: arrays of 8, 16 or 32 bits."""


def columns(record: Record, names: Mapping[str, int]) -> Columns:
    """Columns of a run; `names` numbers the trajectories of all runs on the page."""
    tick_s = tick(record.end_s - record.start_s)
    own = np.array([names[name] for name in record.journal.trajectories], np.uint32)
    place = np.zeros(len(record.journal.words("engine")) + 1, np.int64)
    place[record.engines["engine"]] = np.arange(len(record.engines["engine"]))

    def ticks(time_s: Floats) -> Any:
        return _whole((time_s - record.start_s) / tick_s)

    return Columns(
        facts={
            "tick_s": tick_s,
            "end_s": record.end_s - record.start_s,
            "note": record.note,
            "engines": _engines(record),
            "tools": [*record.journal.words("tool")],
            "outcomes": [*record.journal.words("outcome")],
            "groups": [*record.journal.words("group")],
            "plan": _plan(record, names),
            "curves": _curves(record),
        },
        columns={
            "dispatches": _dispatches(record, ticks, place),
            "trajectories": {"name": own, **_trajectories(record, ticks, place)},
            "migrations": _migrations(record, ticks, place),
            "reports": _reports(record, ticks, place),
        },
    )


def tick(lasts_s: float) -> float:
    """Seconds of a tick: as fine as 32 bits allow for a run that lasts so long."""
    tick_s = TICK_S
    while lasts_s / tick_s > MAX_TICKS:
        tick_s *= 10.0
    return tick_s


def _whole(values: Floats) -> Any:
    """Round to 32 bits; what is not there yet becomes `NONE`."""
    known = np.where(np.isnan(values), NONE, np.rint(values))
    return np.clip(known, 0, NONE).astype(np.uint32)


def _code(values: Ints) -> Any:
    return np.where(values < 0, NONE, values).astype(np.uint32)


def _dispatches(record: Record, ticks: Any, place: Ints) -> dict[str, Any]:
    d, steps = record.dispatches, record.steps
    tool = steps["tool"][np.cumsum(d.first) - 1]
    flags = OPEN * np.isnan(d.ended_s) + PREEMPTED * d.preempted + LOST * d.lost
    tick_s = tick(record.end_s - record.start_s)
    return {
        # In order of trajectory and step; a trajectory's are together.
        "trajectory": d.trajectory.astype(np.uint32),
        "step": d.step.astype(np.uint16),
        "engine": place[d.engine].astype(np.uint16),
        "slot": record.slot.astype(np.uint16),
        "runnable": ticks(d.runnable_s),
        "dispatched": ticks(d.dispatched_s),
        "ended": ticks(np.where(np.isnan(d.ended_s), record.end_s, d.ended_s)),
        "queued": _whole(d.engine_queued_s / tick_s),
        "prefill": _whole(d.prefill_s / tick_s),
        "context": d.context_tokens.astype(np.uint32),
        "cached": d.cached_tokens.astype(np.uint32),
        "output": d.output_tokens.astype(np.uint32),
        "recomputes": np.minimum(d.recomputes, 255).astype(np.uint8),
        "flags": flags.astype(np.uint8),
        "tool": _code(tool),
    }


def _trajectories(record: Record, ticks: Any, place: Ints) -> dict[str, Any]:
    t, d = record.trajectories, record.dispatches
    tick_s = tick(record.end_s - record.start_s)
    home = np.full(len(t["trajectory"]), NONE, np.uint32)
    home[d.trajectory] = place[d.engine]  # the last of each counts
    waited = t["queueing_s"] + t["engine_queued_s"]
    return {
        "arrived": ticks(t["arrived_s"]),
        "pending": ticks(record.waiting_since_s),
        "finished": ticks(t["finished_s"]),
        "outcome": _code(t["outcome"]),
        "group": _code(t["group"]),
        "home": home,
        "waited": _whole(np.nan_to_num(waited) / tick_s),
        "prefill": _whole(t["prefill_s"] / tick_s),
        "decode": _whole(t["decode_s"] / tick_s),
        "tool": _whole(t["tool_s"] / tick_s),
        **{
            name: t[f"{name}{unit}"].astype(np.uint32)
            for name, unit in (("steps", ""), ("prompt", "_tokens"), ("output", "_tokens"))
        },
        **{name: t[name].astype(np.uint32) for name in ("preemptions", "recomputes", "migrations")},
    }


def _migrations(record: Record, ticks: Any, place: Ints) -> dict[str, Any]:
    m = record.migrations
    return {
        "trajectory": m["trajectory"].astype(np.uint32),
        "source": place[m["source"]].astype(np.uint16),
        "target": place[m["target"]].astype(np.uint16),
        "began": ticks(m["began_s"]),
        "ended": ticks(m["ended_s"]),
        "kv": m["kv_tokens"].astype(np.uint32),
        "ok": m["ok"].astype(np.uint8),
    }


def _reports(record: Record, ticks: Any, place: Ints) -> dict[str, Any]:
    r = record.reports
    return {
        "engine": place[r["engine"]].astype(np.uint16),
        "time": ticks(r["time_s"]),
        "kv": r["kv_used_tokens"].astype(np.uint32),
    }


def _engines(record: Record) -> list[dict[str, Any]]:
    e = record.engines
    facts = zip(
        e["name"],
        e["tp"].tolist(),
        e["ready_s"].tolist(),
        e["gone_s"].tolist(),
        e["kv_capacity_tokens"].tolist(),
        e["failed"],
        strict=True,
    )
    return [
        {
            "name": name,
            "tp": tp,
            "ready_s": max(ready_s - record.start_s, 0.0),
            "gone_s": gone_s - record.start_s if np.isfinite(gone_s) else None,
            "kv_capacity_tokens": kv,
            "failed": failed,
        }
        for name, tp, ready_s, gone_s, kv, failed in facts
    ]


def _plan(record: Record, names: Mapping[str, int]) -> dict[str, Any] | None:
    """The first plan that was solved; None when the policy plans nothing."""
    solved = record.journal.of("PlanSolved")
    if not len(solved):
        return None
    plan = upgraded("resource_plan", solved.payloads()[0]["resource_plan"])
    return {
        "solved_s": float(solved.floats("time_s")[0]) - record.start_s,
        "estimated_makespan_s": plan["estimated_makespan_s"],
        "homes": {
            engine: [names[member] for member in members] for engine, members in plan["homes"]
        },
    }


def _curves(record: Record) -> dict[str, Any]:
    """Curves that are drawn over each other for all runs."""
    t, d, steps = record.trajectories, record.dispatches, record.steps
    begun_s = d.dispatched_s + d.engine_queued_s
    waiting = begun_s > d.runnable_s
    left_s = record.waiting_since_s[~np.isnan(record.waiting_since_s)]
    from_s = np.concatenate((d.runnable_s[waiting], left_s)) - record.start_s
    until_s = np.append(begun_s[waiting], np.full(len(left_s), np.nan)) - record.start_s
    delay_s = steps["queueing_s"] + steps["engine_queued_s"]
    found: Mapping[str, Curve] = {
        "completion": completion(t["arrived_s"], t["finished_s"]),
        "active": _from_zero(
            under_way(t["arrived_s"] - record.start_s, t["finished_s"] - record.start_s)
        ),
        "waiting": _from_zero(under_way(from_s, until_s)),
        "queueing": at_least(delay_s[~np.isnan(delay_s)]),
    }
    return {
        name: {"x": np.round(x, 4).tolist(), "y": np.round(y, 6).tolist()}
        for name, (x, y) in found.items()
    }


def _from_zero(curve: Curve) -> Curve:
    x, y = thin(*curve) if len(curve[0]) else curve
    return (x, y) if len(x) and x[0] <= 0.0 else (np.append(0.0, x), np.append(0.0, y))


def names_of(records: Sequence[Record]) -> dict[str, int]:
    """Number the trajectories of all runs, in order of first sight."""
    seen: dict[str, int] = {}
    for record in records:
        for name in record.journal.trajectories:
            seen.setdefault(name, len(seen))
    return seen
