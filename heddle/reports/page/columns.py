"""A run's data on the page: columns of integers, and the words that codes stand for.

Times are ticks since the first arrival of the run, so that they fit into 32 bits and compress.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heddle.reports.curves import Curve, at_least, completion, from_zero, under_way
from heddle.reports.page.overall import activity, lengths, plan
from heddle.reports.page.training import training, training_columns
from heddle.reports.sample import Sample
from heddle.runs.record import Record, slots
from heddle.runs.tables import Dispatches, Floats, Ints

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
    start_s: float
    end_s: float
    note: str | None
    """As of the `Record`."""


def columns(record: Record, shown: Sample, names: dict[str, int]) -> Columns:
    """Columns of what is shown of a run; adds its trajectories to `names`, which numbers them."""
    tick_s = tick(record.end_s - record.start_s)
    place = np.zeros(len(record.journal.words("engine")) + 1, np.int64)
    place[record.engines["engine"]] = np.arange(len(record.engines["engine"]))

    def ticks(time_s: Floats) -> Any:
        return _whole((time_s - record.start_s) / tick_s)

    rows = np.flatnonzero(shown.trajectories)
    listed = record.journal.trajectories
    own = [names.setdefault(listed[row], len(names)) for row in rows.tolist()]
    group, groups = _words(record.trajectories["group"][rows], record.journal.words("group"))
    return Columns(
        facts={
            "tick_s": tick_s,
            "end_s": record.end_s - record.start_s,
            "note": record.note,
            "trajectories_in_all": len(listed),
            "sample": shown.note,
            "engines": _engines(record),
            "drawn": shown.engines.tolist(),
            "fleet": _fleet(record),
            "tools": [*record.journal.words("tool")],
            "outcomes": [*record.journal.words("outcome")],
            "groups": groups,
            "plan": plan(record),
            "lengths": lengths(record, shown.engines, place),
            "curves": _curves(record),
            "activity": None if shown.whole else activity(record),
            "training": training(record),
        },
        columns={
            "dispatches": _dispatches(record, shown, ticks, place),
            "trajectories": {
                "name": np.array(own, np.uint32),
                "at_random": shown.at_random[rows].astype(np.uint8),
                "group": group,
                **_trajectories(record, rows, ticks, place),
            },
            "migrations": _migrations(record, shown, ticks, place),
            "reports": _reports(record, shown, ticks, place),
            **(
                training_columns(record.loop, ticks, place, record.end_s)
                if record.loop is not None
                else {}
            ),
        },
        start_s=record.start_s,
        end_s=record.end_s,
        note=record.note,
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


def _words(codes: Ints, words: Sequence[str]) -> tuple[Any, list[str]]:
    """Codes of the words that occur, and these words."""
    found, places = np.unique(codes, return_inverse=True)
    return _code(np.where(codes < 0, -1, places)), [words[code] for code in found if code >= 0]


def _dispatches(record: Record, shown: Sample, ticks: Any, place: Ints) -> dict[str, Any]:
    own = np.flatnonzero(shown.trajectories[record.dispatches.trajectory])
    tool = record.steps["tool"][np.cumsum(record.dispatches.first)[own] - 1]
    d = record.dispatches.part(own)
    flags = OPEN * np.isnan(d.ended_s) + PREEMPTED * d.preempted + LOST * d.lost
    tick_s = tick(record.end_s - record.start_s)
    return {
        # In order of trajectory and step; a trajectory's are together.
        "trajectory": _row(shown)[d.trajectory],
        "step": d.step.astype(np.uint16),
        "engine": place[d.engine].astype(np.uint16),
        "slot": _slots(d, record.engines["engine"][shown.engines]).astype(np.uint16),
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


def _slots(d: Dispatches, drawn: Ints) -> Ints:
    """The slots of dispatches on engines that are drawn, of which all that ran is shown."""
    there = np.flatnonzero(np.isin(d.engine, drawn))
    found = np.zeros(len(d.engine), np.int64)
    found[there] = slots(d.engine[there], d.dispatched_s[there], d.ended_s[there])
    return found


def _row(shown: Sample) -> Any:
    """The row on the page of each trajectory that is shown."""
    return (np.cumsum(shown.trajectories) - 1).astype(np.uint32)


def _trajectories(record: Record, rows: Ints, ticks: Any, place: Ints) -> dict[str, Any]:
    d = record.dispatches
    t = {name: values[rows] for name, values in record.trajectories.items()}
    tick_s = tick(record.end_s - record.start_s)
    home = np.full(len(record.journal.trajectories), NONE, np.uint32)
    home[d.trajectory] = place[d.engine]  # the last of each counts
    waited = t["queueing_s"] + t["engine_queued_s"]
    return {
        "arrived": ticks(t["arrived_s"]),
        "pending": ticks(record.waiting_since_s[rows]),
        "finished": ticks(t["finished_s"]),
        "outcome": _code(t["outcome"]),
        "home": home[rows],
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


def _migrations(record: Record, shown: Sample, ticks: Any, place: Ints) -> dict[str, Any]:
    own = shown.trajectories[record.migrations["trajectory"]]
    m = {name: values[own] for name, values in record.migrations.items()}
    return {
        "trajectory": _row(shown)[m["trajectory"]],
        "source": place[m["source"]].astype(np.uint16),
        "target": place[m["target"]].astype(np.uint16),
        "began": ticks(m["began_s"]),
        "ended": ticks(m["ended_s"]),
        "kv": m["kv_tokens"].astype(np.uint32),
        "ok": m["ok"].astype(np.uint8),
    }


def _reports(record: Record, shown: Sample, ticks: Any, place: Ints) -> dict[str, Any]:
    engine = place[record.reports["engine"]]
    own = np.isin(engine, shown.engines)
    return {
        "engine": engine[own].astype(np.uint16),
        "time": ticks(record.reports["time_s"][own]),
        "kv": record.reports["kv_used_tokens"][own].astype(np.uint32),
    }


def _engines(record: Record) -> list[dict[str, Any]]:
    e = record.engines
    facts = zip(
        e["name"],
        e["tp"].tolist(),
        e["label"],
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
            "label": label,
            "ready_s": max(ready_s - record.start_s, 0.0),
            "gone_s": gone_s - record.start_s if np.isfinite(gone_s) else None,
            "kv_capacity_tokens": kv,
            "failed": failed,
        }
        for name, tp, label, ready_s, gone_s, kv, failed in facts
    ]


def _fleet(record: Record) -> dict[str, Any]:
    """How many engines of each shape there were, widest first, and how many were restarts.

    A shape is its name for people, and its TP degree.
    """
    e = record.engines
    again = [re.search(r"\+\d+$", name) is not None for name in e["name"]]
    shapes = zip(e["label"], e["tp"].tolist(), strict=True)
    first = Counter(shape for shape, later in zip(shapes, again, strict=True) if not later)
    widest = sorted(first.items(), key=lambda each: -each[0][1])
    return {"of": [[*shape, count] for shape, count in widest], "again": sum(again)}


def _curves(record: Record) -> dict[str, Any]:
    """Curves that are drawn over each other for all runs."""
    t, d, steps = record.trajectories, record.dispatches, record.steps
    arrived_s, finished_s = (t[name] - record.start_s for name in ("arrived_s", "finished_s"))
    begun_s = d.dispatched_s + d.engine_queued_s
    waiting = begun_s > d.runnable_s
    left_s = record.waiting_since_s[~np.isnan(record.waiting_since_s)]
    from_s = np.concatenate((d.runnable_s[waiting], left_s)) - record.start_s
    until_s = np.append(begun_s[waiting], np.full(len(left_s), np.nan)) - record.start_s
    delay_s = steps["queueing_s"] + steps["engine_queued_s"]
    found: Mapping[str, Curve] = {
        "completion": completion(t["arrived_s"], t["finished_s"]),
        "active": from_zero(under_way(arrived_s, finished_s, thinned=True)),
        "waiting": from_zero(under_way(from_s, until_s, thinned=True)),
        "queueing": at_least(delay_s[~np.isnan(delay_s)]),
    }
    return {
        name: {"x": np.round(x, 4).tolist(), "y": np.round(y, 6).tolist()}
        for name, (x, y) in found.items()
    }
