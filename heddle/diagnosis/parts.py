"""A measured step as the sum of its parts.

Each second of a step goes to what the trainer does then, if it works; else it is shared evenly by
the trajectories that have not ended, by what each is in. When few of them are left, it goes to the
wait for the longest. The share of a trajectory that waits while no engine has a request is a part
of its own. What nothing accounts for is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from heddle.diagnosis.intervals import PARTS, QUEUE, Intervals, intervals, spans
from heddle.reports.curves import time_within
from heddle.runs.journal_columns import Bools, Floats, Ints
from heddle.runs.tables import union_s
from heddle_trace.observed.columns import Observed

TAIL: Final = 32
"""A step waits for the longest when no more than one of so many trajectories is left."""
LEAST: Final = 8
"""Trajectories of a step below which none is the longest."""
PHASES: Final = ("training", "update", "reward", "other")
"""Of a trainer; the first of them that is under way takes the time."""
BINS: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measured step, in seconds of its source's clock."""

    label: int | None
    start_s: float
    end_s: float
    parts: dict[str, float]
    """Seconds by part; they sum to the step. Those of nothing are not there."""
    trajectories: int
    longest: int
    """Trajectories that are left in the part `tail`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A trajectory of those that ended last, from the start of its step to its own end."""

    trajectory: str
    lasts_s: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """An engine during all steps."""

    engine: str
    busy_s: float
    idle_waiting_s: float
    """Without a request although a trajectory waited for an engine."""
    mean_batch: float
    """While it was busy."""
    batch: tuple[float, ...]
    """Requests in each of `BINS` equal times."""


@dataclass(frozen=True, slots=True)
class _Window:
    label: int | None
    start_s: float
    end_s: float


def windows(seen: Observed, start_s: Floats, end_s: Floats) -> list[_Window]:
    """The measured steps: as recorded, by the number of the step, or all of the source."""
    steps = [phase for phase in seen.phases if phase.phase == "step"]
    if steps:
        return [_Window(each.rl_step, each.start_s, each.end_s) for each in steps]
    ends: dict[int, list[float]] = {}
    for phase in seen.phases:
        if phase.rl_step is not None and phase.phase != "other":
            ends.setdefault(phase.rl_step, []).append(phase.end_s)
    label = seen.column("rl_step").values
    if not ends:
        for each in np.unique(label[label >= 0]).tolist():
            ends[each] = [float(end_s[label == each].max())]
    begin_s = min([*start_s[:1], *(p.start_s for p in seen.phases), start_s.min(initial=np.inf)])
    if not ends:
        return [_Window(None, begin_s, max([*(p.end_s for p in seen.phases), *end_s.tolist()]))]
    found = []
    for each, last in sorted(ends.items()):
        found.append(_Window(each, begin_s, max(last)))
        begin_s = max(last)
    return found


def diagnose(seen: Observed) -> tuple[list[Step], list[Path], list[EngineTime]]:
    """Parts of each step, the trajectories that ended last, and the engines."""
    start_s, end_s = (seen.column(name).values for name in ("start_s", "end_s"))
    cut = intervals(seen)
    codes, first_s, last_s = spans((start_s, end_s), seen.column("trajectory_id").ints)
    names = seen.column("trajectory_id").words
    if seen.header.clock == "trajectory":
        return _alone(cut, codes, first_s, last_s, names)
    steps, paths = [], []
    for window in windows(seen, start_s, end_s):
        here = (last_s > window.start_s) & (first_s < window.end_s)
        steps.append(_step(window, cut, first_s[here], last_s[here], seen))
        ended = codes[here][np.argsort(-last_s[here], kind="stable")[:5]]
        paths += [_path(window, code, cut, names[code]) for code in ended.tolist()]
    return steps, sorted(paths, key=lambda path: -path.lasts_s)[:5], _engines(seen, cut, steps)


def _alone(
    cut: Intervals, codes: Ints, first_s: Floats, last_s: Floats, names: Sequence[str]
) -> tuple[list[Step], list[Path], list[EngineTime]]:
    """Trajectories that were measured by themselves: their times are added up."""
    total_s = float((last_s - first_s).sum())
    order = np.argsort(first_s - last_s, kind="stable")[:5]
    paths = [
        _path(_Window(None, first_s[at], last_s[at]), int(codes[at]), cut, names[codes[at]])
        for at in order.tolist()
    ]
    parts = _rest(_sums(cut.part, cut.end_s - cut.start_s), total_s)
    step = Step(
        label=None, start_s=0.0, end_s=total_s, parts=parts, trajectories=len(codes), longest=0
    )
    return [step], paths, []


def _sums(part: Ints, seconds: Floats) -> dict[str, float]:
    found = np.bincount(part, weights=seconds, minlength=len(PARTS)).tolist()
    return {name: value for name, value in zip(PARTS, found, strict=True) if value > 0.0}


def _rest(parts: dict[str, float], total_s: float) -> dict[str, float]:
    rest_s = total_s - sum(parts.values())
    return {**parts, "unaccounted": 0.0 if abs(rest_s) < 1e-9 * total_s else rest_s}


def _path(window: _Window, code: int, cut: Intervals, name: str) -> Path:
    own = cut.of((cut.trajectory == code) & (cut.start_s < window.end_s))
    seconds = np.maximum(own.end_s - np.maximum(own.start_s, window.start_s), 0.0)
    lasts_s = float(own.end_s.max(initial=window.start_s)) - window.start_s
    late_s = max(0.0, float(own.start_s.min(initial=np.inf)) - window.start_s) if lasts_s else 0.0
    parts = {**({"arrival": late_s} if late_s else {}), **_sums(own.part, seconds)}
    return Path(trajectory=name, lasts_s=lasts_s, parts=_rest(parts, lasts_s))


def _step(window: _Window, cut: Intervals, first_s: Floats, last_s: Floats, seen: Observed) -> Step:
    begin_s, end_s = window.start_s, window.end_s
    cut = cut.of((cut.end_s > begin_s) & (cut.start_s < end_s))
    phases = [p for p in seen.phases if p.phase in PHASES]
    busy = cut.computing
    marks = [first_s, last_s, cut.start_s[busy], cut.end_s[busy]]
    marks.append(np.array([at for p in phases for at in (p.start_s, p.end_s)]))
    edges = np.unique(np.clip(np.concatenate([*marks, [begin_s, end_s]]), begin_s, end_s))
    length = np.diff(edges)

    def under_way(start_s: Floats, stop_s: Floats) -> Ints:
        change = np.bincount(np.searchsorted(edges, start_s), minlength=len(edges))
        change -= np.bincount(np.searchsorted(edges, stop_s), minlength=len(edges))
        return np.cumsum(change)[:-1]

    def clipped(start_s: Floats, stop_s: Floats) -> tuple[Floats, Floats]:
        return np.clip(start_s, begin_s, end_s), np.clip(stop_s, begin_s, end_s)

    parts: dict[str, float] = {}
    free = np.ones(len(length), bool)
    for name in PHASES:
        own = [(p.start_s, p.end_s) for p in phases if p.phase == name]
        if own:
            starts, stops = clipped(*(np.array(column) for column in zip(*own, strict=True)))
            now = free & (under_way(starts, stops) > 0)
            parts[name] = float(length[now].sum())
            free &= ~now
    active = under_way(*clipped(first_s, last_s))
    share = np.divide(1.0, active, out=np.zeros(len(length)), where=free & (active > 0))
    longest = max(1, len(last_s) // TAIL) if len(last_s) >= LEAST else 0
    tail = np.zeros(len(length), bool)
    if longest:
        since_s = np.sort(last_s)[len(last_s) - longest - 1]
        tail = free & (active > 0) & (edges[:-1] >= since_s)
    asked = under_way(*clipped(cut.start_s[busy], cut.end_s[busy])) > 0

    def within(where: Bools, own: Intervals) -> Floats:
        passed = np.append(0.0, np.cumsum(length * share * where))
        ends = (np.interp(at, edges, passed) for at in clipped(own.start_s, own.end_s))
        before, after = ends
        return np.asarray(after - before, np.float64)

    waiting = cut.of(cut.part == QUEUE)
    parts["stalled"] = float(within(~asked, waiting).sum())
    parts["tail"] = float(length[tail].sum()) - float(within(tail & ~asked, waiting).sum())
    whole = _sums(cut.part, within(~tail, cut))
    whole["queue"] = float(within(~tail & asked, waiting).sum())
    parts["idle"] = float(length[free & (active == 0)].sum())
    found = {name: value for name, value in {**whole, **parts}.items() if value > 0.0}
    return Step(
        label=window.label,
        start_s=begin_s,
        end_s=end_s,
        parts=_rest(found, end_s - begin_s),
        trajectories=len(last_s),
        longest=longest,
    )


def _engines(seen: Observed, cut: Intervals, steps: Sequence[Step]) -> list[EngineTime]:
    """Times of the engines that requests name, over all steps."""
    begin_s, end_s = steps[0].start_s, steps[-1].end_s
    edges = np.linspace(begin_s, end_s, BINS + 1)
    waiting = cut.of(cut.part == QUEUE)
    found = []
    for code, name in enumerate(seen.column("engine").words):
        own = cut.of((cut.engine == code) & cut.computing)
        alone_s = _covered(own.start_s, own.end_s)
        both = np.concatenate([own.start_s, waiting.start_s])
        either_s = _covered(both, np.concatenate([own.end_s, waiting.end_s]))
        running_s = np.diff(time_within(edges, own.start_s, own.end_s))
        found.append(
            EngineTime(
                engine=name,
                busy_s=alone_s,
                idle_waiting_s=either_s - alone_s,
                mean_batch=float(running_s.sum()) / alone_s if alone_s else 0.0,
                batch=tuple((running_s / max(edges[1] - edges[0], 1e-9)).round(2).tolist()),
            )
        )
    return found


def _covered(start_s: Floats, end_s: Floats) -> float:
    order = np.argsort(start_s)
    return union_s(start_s[order], end_s[order])
