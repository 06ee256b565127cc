"""A measured step as the sum of its parts.

Each second of a step goes to what the trainer does then, if it works; else it is shared evenly by
the trajectories that have not ended, by what each is in. When few of them are left, it goes to the
wait for the longest. The share of a trajectory that waits while no engine has a request is a part
of its own. What nothing accounts for is shown.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from heddle.diagnosis.intervals import (
    COMPUTING,
    LLM,
    PARTS,
    QUEUE,
    Intervals,
    Requests,
    merged,
    requests,
    requests_over_time,
    spans,
)
from heddle.runs.journal_columns import Bools, Floats, Ints
from heddle_trace.errors import TraceError
from heddle_trace.importers.clocks import SLACK_S
from heddle_trace.observed.columns import ObservedSteps

TAIL: Final = 32
"""A step waits for the longest when no more than one of so many trajectories is left."""
LEAST: Final = 8
"""Trajectories of a step below which none is the longest."""
PHASES: Final = ("training", "update", "reward", "other")
"""Of a trainer; the first of them that is under way takes the time."""
BINS: Final = 100
AVERAGES: Final = ("env_start", "llm", "tool", "rollout", "tail")
"""Of rollouts whose trajectories were not recorded one by one."""
_SEVERAL: Final = (
    "two runs are in these logs, or clocks of hosts differ: diagnose one run at a time"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measured step, in seconds of its source's clock."""

    label: int | None = None
    start_s: float
    end_s: float
    parts: dict[str, float]
    """Seconds by part; they sum to the step. Those of nothing are not there."""
    trajectories: int = 0
    longest: int = 0
    """Trajectories that are left in the part `tail`."""
    tail: tuple[float, float] | None = None
    """When the first and the last second of it passed."""
    running_over: int = 0
    """Trajectories that go on in the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """A trajectory of those that ended last, from the start of its step to its own end."""

    trajectory: str
    lasts_s: float
    parts: dict[str, float]
    intervals: tuple[tuple[str, float, float], ...]
    """Its parts in order, each with start and end in seconds since the start of the step."""


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
    waiting: tuple[float, ...]
    """Requests that wait for it, or for any and then come to it, in each."""

    @staticmethod
    def of(name: str, busy_s: float, idle_s: float, edges: Floats, *means: Floats) -> "EngineTime":
        """`means` are of requests that run and that wait, between each two edges."""
        batch, waiting = (tuple(each.round(2).tolist()) for each in means)
        mean_batch = float(means[0] @ np.diff(edges)) / busy_s if busy_s else 0.0
        return EngineTime(
            engine=name,
            busy_s=busy_s,
            idle_waiting_s=idle_s,
            mean_batch=mean_batch,
            batch=batch,
            waiting=waiting,
        )


@dataclass(frozen=True, slots=True)
class _Window:
    label: int | None
    start_s: float
    end_s: float


def windows(seen: ObservedSteps, start_s: Floats, end_s: Floats) -> list[_Window]:
    """The measured steps: as recorded, by the number of the step, or all of the source.

    Raises:
        TraceError: a step ends before the one before it.
    """
    steps = sorted((p for p in seen.phases if p.phase == "step"), key=lambda each: each.start_s)
    for before, after in pairwise(steps):
        if after.start_s < before.end_s - SLACK_S:
            raise TraceError(
                f"a step begins {before.end_s - after.start_s:,.1f} s before the one before it has "
                f"ended: {_SEVERAL}"
            )
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
        if max(last) < begin_s:
            raise TraceError(f"step {each} ends before the step before it: {_SEVERAL}")
        found.append(_Window(each, begin_s, max(last)))
        begin_s = max(last)
    return found


def diagnose(seen: ObservedSteps) -> tuple[list[Step], list[CriticalPath], list[EngineTime]]:
    """Parts of each step, the trajectories that ended last, and the engines."""
    start_s, end_s = (seen.column(name).values for name in ("start_s", "end_s"))
    if seen.engines and seen.count:
        at_s = seen.engines["time_s"].values
        apart_s = max(at_s.min() - end_s.max(), start_s.min() - at_s.max())
        if apart_s > SLACK_S:
            raise TraceError(f"metrics and requests are {apart_s:,.0f} s apart: {_SEVERAL}")
    cut = requests(seen)
    codes, first_s, last_s = spans(seen)
    names = seen.column("trajectory_id").words
    if seen.header.clock == "trajectory":
        return _alone(cut, codes, first_s, last_s, names)
    steps, paths = [], []
    for window in windows(seen, start_s, end_s):
        here = (last_s > window.start_s) & (first_s < window.end_s)
        own = cut.within(window.start_s, window.end_s)
        steps.append(_step(window, own, first_s[here], last_s[here], seen))
        ended = codes[here][np.argsort(-last_s[here], kind="stable")[:5]]
        paths += [_path(window, code, own, names[code]) for code in ended.tolist()]
    return steps, sorted(paths, key=lambda path: -path.lasts_s)[:5], _engines(seen, cut, steps)


def _alone(
    cut: Requests, codes: Ints, first_s: Floats, last_s: Floats, names: Sequence[str]
) -> tuple[list[Step], list[CriticalPath], list[EngineTime]]:
    """Trajectories that were measured by themselves: their times are added up."""
    total_s = float((last_s - first_s).sum())
    order = np.argsort(first_s - last_s, kind="stable")[:5]
    paths = [
        _path(_Window(None, first_s[at], last_s[at]), int(codes[at]), cut, names[codes[at]])
        for at in order.tolist()
    ]
    parts = _accounted(_sums(cut.blocks()), total_s)
    return [Step(start_s=0.0, end_s=total_s, parts=parts, trajectories=len(codes))], paths, []


def _sums(found: Iterable[Intervals]) -> dict[str, float]:
    rows = [np.bincount(own.part, own.end_s - own.start_s, len(PARTS)) for own in found]
    return _named(np.sum(rows, axis=0))


def _named(seconds: Floats) -> dict[str, float]:
    found = zip(PARTS, seconds.tolist(), strict=True)
    return {name: value for name, value in found if value > 0.0}


def _accounted(parts: dict[str, float], total_s: float) -> dict[str, float]:
    rest_s = total_s - sum(parts.values())
    return {**parts, "unaccounted": 0.0 if abs(rest_s) < 1e-9 * total_s else rest_s}


def _path(window: _Window, code: int, cut: Requests, name: str) -> CriticalPath:
    own = cut.of(cut.values("trajectory_id") == code).intervals()
    own = own.of((own.end_s > window.start_s) & (own.start_s < window.end_s))
    own = own.of(np.argsort(own.start_s, kind="stable"))
    own = own._replace(start_s=np.maximum(own.start_s, window.start_s))
    lasts_s = float(own.end_s.max(initial=window.start_s)) - window.start_s
    late_s = max(0.0, float(own.start_s.min(initial=np.inf)) - window.start_s) if lasts_s else 0.0
    parts = {**({"arrival": late_s} if late_s else {}), **_sums([own])}
    times = ((each - window.start_s).round(6).tolist() for each in (own.start_s, own.end_s))
    return CriticalPath(
        trajectory=name,
        lasts_s=lasts_s,
        parts=_accounted(parts, lasts_s),
        intervals=tuple(zip((PARTS[part] for part in own.part.tolist()), *times, strict=True)),
    )


class _Grid:
    """Times of a step between which nothing begins or ends."""

    def __init__(self, window: _Window, marks: Sequence[Floats]) -> None:
        ends = self._ends = (window.start_s, window.end_s)
        every = np.concatenate([*marks, ends])
        np.clip(every, *ends, out=every).sort()
        self.edges = every[np.append(True, every[1:] != every[:-1])]
        self.length = np.diff(self.edges)

    def under_way(self, start_s: Floats, end_s: Floats) -> Ints:
        """How many of the intervals hold each time."""
        change = np.zeros(len(self.edges), np.int64)
        for times, sign in ((start_s, 1), (end_s, -1)):
            place = np.searchsorted(self.edges, np.clip(times, *self._ends))
            change += sign * np.bincount(place, minlength=len(change))
        return np.cumsum(change)[:-1]

    def sums(self, cut: Requests, *weights: Floats) -> Floats:
        """Seconds of requests by weight and part, weighted by the time in which they pass."""
        passed = [np.append(0.0, np.cumsum(self.length * weight)) for weight in weights]
        total = np.zeros((len(weights), len(PARTS)))
        for own in cut.blocks():
            start, end = (np.clip(times, *self._ends) for times in (own.start_s, own.end_s))
            for row, each in zip(total, passed, strict=True):
                seconds = np.interp(end, self.edges, each) - np.interp(start, self.edges, each)
                row += np.bincount(own.part, seconds, len(PARTS))
        return total

    def sum(self, where: Bools) -> float:
        return float(self.length[where].sum())


def _step(
    window: _Window, cut: Requests, first_s: Floats, last_s: Floats, seen: ObservedSteps
) -> Step:
    busy = cut.covered(COMPUTING)
    marks = [first_s, last_s, *busy]
    marks.append(np.array([at for p in seen.phases for at in (p.start_s, p.end_s)]))
    marks += [seen.engines["time_s"].values] if seen.engines else []
    grid = _Grid(window, marks)
    parts, free = _trainer(grid, seen)
    active = grid.under_way(first_s, last_s)
    free_active = free & (active > 0)
    share = np.divide(1.0, active, out=np.zeros(len(active)), where=free_active)
    longest = max(1, len(last_s) // TAIL) if len(last_s) >= LEAST else 0
    since_s = np.sort(last_s)[len(last_s) - longest - 1] if longest else np.inf
    tail = free_active & (grid.edges[:-1] >= since_s)
    at = np.flatnonzero(tail)
    serving, waits = _serving(grid, busy, seen)
    weights = (share * ~tail, share * (~tail & serving), share * ~serving)
    any_s, served_s, idle_s, tail_s = grid.sums(cut, *weights, share * (tail & ~serving))
    parts["stalled"] = float(idle_s[waits].sum())
    parts["tail"] = parts.get("tail", 0.0) + grid.sum(tail) - float(tail_s[waits].sum())
    parts["idle"] = grid.sum(free & (active == 0)) if seen.count else 0.0
    parts |= _named(np.where(waits, served_s, any_s))
    found = {name: value for name, value in parts.items() if value > 0.0}
    return Step(
        label=window.label,
        start_s=window.start_s,
        end_s=window.end_s,
        parts=_accounted(found, window.end_s - window.start_s),
        trajectories=len(last_s),
        longest=longest,
        tail=(float(grid.edges[at[0]]), float(grid.edges[at[-1] + 1])) if len(at) else None,
        running_over=int((last_s > window.end_s + SLACK_S).sum()),
    )


def _trainer(grid: _Grid, seen: ObservedSteps) -> tuple[dict[str, float], Bools]:
    """Seconds of each phase, and the times in which none is under way."""
    parts: dict[str, float] = {}
    free = np.ones(len(grid.length), bool)
    for name in PHASES if seen.count else (*PHASES, *AVERAGES):
        own = np.array([(p.start_s, p.end_s) for p in seen.phases if p.phase == name])
        if len(own):
            now = free & (grid.under_way(own[:, 0], own[:, 1]) > 0)
            parts[name] = grid.sum(now)
            free &= ~now
    return parts, free


def _serving(grid: _Grid, busy: tuple[Floats, Floats], seen: ObservedSteps) -> tuple[Bools, Bools]:
    """Times in which some engine has a request, and the parts in which one waits for it.

    Where engines were sampled they say it; a request that none of them has waits, too.
    """
    serving = grid.under_way(*busy) > 0
    if not seen.engines:
        return serving, QUEUE
    times, running, _ = requests_over_time(seen)
    at = np.searchsorted(times, grid.edges[:-1], side="right") - 1
    known = (at >= 0) & (at < len(times) - 1)
    return np.where(known, running[at] > 0, serving), QUEUE | LLM


def _engines(seen: ObservedSteps, cut: Requests, steps: Sequence[Step]) -> list[EngineTime]:
    """Times of the engines that requests name, over all steps."""
    edges = np.linspace(steps[0].start_s, steps[-1].end_s, BINS + 1)
    waited = cut.covered(QUEUE)
    found = []
    for code, name in enumerate(seen.column("engine").words):
        own = cut.of(cut.values("engine") == code)
        busy = own.covered(COMPUTING)
        either = merged(*(np.concatenate(times) for times in zip(busy, waited, strict=True)))
        alone_s, either_s = (float((end - start).sum()) for start, end in (busy, either))
        means = (own.mean_within(edges, parts) for parts in (COMPUTING, QUEUE))
        found.append(EngineTime.of(name, alone_s, either_s - alone_s, edges, *means))
    return found
