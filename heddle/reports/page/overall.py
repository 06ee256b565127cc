"""What a page says of all trajectories of a run, also of those that it does not show."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from heddle.reports.curves import mean_within
from heddle.runs.record import Record
from heddle.runs.tables import Ints

ACTIVITY_BINS = 2080
"""Four times as many as the page draws: it can be zoomed in on a quarter."""

_SHARES = (0.0, 25.0, 50.0, 75.0, 100.0)


def plan(record: Record) -> dict[str, Any] | None:
    """When the first plan was solved and its estimate; None when the policy plans nothing.

    `of_tail`: for what is left of a rollout, whose first engines were chosen without a search.
    """
    found = _solved(record)
    if found is None:
        return None
    solved_s, content = found
    problem = record.journal.of("SolvePlan").payloads()[0]["problem"]
    return {
        "solved_s": solved_s - record.start_s,
        "estimated_makespan_s": content["estimated_makespan_s"],
        "of_tail": problem["class"].endswith(":TailProblem"),
    }


def lengths(record: Record, engines: Ints, place: Ints) -> dict[str, list[Any]]:
    """Of each of `engines` the output tokens of its trajectories, by two meanings of "its".

    `ended`: the last step ran there. `planned`: the first plan placed them there, if it did so.
    Each item has the number of trajectories, their tokens in all, and the least, quartiles and
    most. `place` has the number of each engine code.
    """
    output = record.trajectories["output_tokens"]
    home = np.full(len(output), -1, np.int64)
    home[record.dispatches.trajectory] = place[record.dispatches.engine]
    order = np.argsort(home, kind="stable")
    begin, end = (np.searchsorted(home[order], engines, side) for side in ("left", "right"))
    found = {
        "ended": [_length(output[order[a:b]]) for a, b in zip(begin, end, strict=True)],
    }
    solved = _solved(record)
    homes = dict(solved[1]["homes"]) if solved is not None else {}
    if homes:
        row = {name: at for at, name in enumerate(record.journal.trajectories)}
        names = [record.engines["name"][engine] for engine in engines.tolist()]
        members = ([row[m] for m in homes.get(name, ()) if m in row] for name in names)
        found["planned"] = [_length(output[own]) for own in members]
    return found


def _length(tokens: Ints) -> list[float] | None:
    if not len(tokens):
        return None
    spread = np.percentile(tokens, _SHARES)
    return [len(tokens), int(tokens.sum()), *(round(float(s), 2) for s in spread)]


def _solved(record: Record) -> tuple[float, Mapping[str, Any]] | None:
    """When the first plan was solved, and what it says."""
    solved = record.journal.of("PlanSolved")
    if not len(solved):
        return None
    return float(solved.floats("time_s")[0]), solved.payloads()[0]["resource_plan"]


def activity(record: Record) -> dict[str, list[float]]:
    """How many trajectories waited, prefilled, decoded or were in a tool: `ACTIVITY_BINS` means."""
    d, t = record.dispatches, record.trajectories
    end_s = record.end_s - record.start_s
    runnable, dispatched, ended = (
        np.where(np.isnan(s), end_s, s - record.start_s)
        for s in (d.runnable_s, d.dispatched_s, d.ended_s)
    )
    began = np.minimum(dispatched + d.engine_queued_s, ended)
    decoding = np.minimum(began + d.prefill_s, ended)
    pending = record.waiting_since_s - record.start_s
    waits = ~np.isnan(pending)
    finished = np.where(np.isnan(t["finished_s"]), end_s, t["finished_s"] - record.start_s)
    # A tool ends when the next step is runnable; the last one with its trajectory.
    until = np.where(waits, pending, finished)[d.trajectory]
    more = d.trajectory[1:] == d.trajectory[:-1]
    until[:-1][more] = runnable[1:][more]
    calls = ~(d.preempted | d.lost | np.isnan(d.ended_s))
    left = np.full(int(waits.sum()), end_s)
    intervals = {
        "waiting": (np.append(runnable, pending[waits]), np.append(began, left)),
        "prefill": (began, decoding),
        "decode": (decoding, ended),
        "tool": (ended[calls], until[calls]),
    }
    edges = np.linspace(0.0, max(end_s, 1e-9), ACTIVITY_BINS + 1)
    return {state: mean_within(edges, *each).round(2).tolist() for state, each in intervals.items()}
