"""Requests cut into intervals, one for each part that passed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from heddle.reports.curves import mean_within
from heddle.runs.journal_columns import Bools, Floats, Ints
from heddle_trace.columns import Codes, constant
from heddle_trace.importers.clocks import SLACK_S
from heddle_trace.observed.columns import ObservedSteps
from heddle_trace.observed.schema import TIMES

MOVED, AGAIN = "prefill_moved", "prefill_again"
"""Prefill of a context that another engine had, and that the same engine had dropped."""
PARTS: Final = (*(name.removesuffix("_s") for name in TIMES), MOVED, AGAIN)
QUEUE, LLM = (np.isin(PARTS, name) for name in ("queue", "llm"))
"""Whether each part is the one."""
COMPUTING: Final = np.isin(PARTS, ("prefill", "decode", "llm", "lost", MOVED, AGAIN))
"""Whether an engine has a request in each."""
_BLOCK: Final = 1 << 17
"""Requests that are cut at once: memory for intervals does not grow with the log."""


class Intervals(NamedTuple):
    """Parts of requests. None overlaps another of its trajectory."""

    trajectory: Codes
    part: Codes
    """Codes into `PARTS`."""
    start_s: Floats
    end_s: Floats

    def of(self, kept: Bools | Ints) -> "Intervals":
        """Some of them, or all in another order."""
        return Intervals._make(each[kept] for each in self)


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by start, none before the end of another of its trajectory."""

    seen: ObservedSteps
    place: Ints
    """In the columns of `seen`."""
    start_s: Floats
    moved: Floats
    """Shares of prefill that another engine had computed."""
    again: Floats
    """Shares of prefill that the same engine had computed."""

    def of(self, kept: Any) -> "Requests":
        """Some of them, or all in another order."""
        columns = (self.place, self.start_s, self.moved, self.again)
        return Requests(self.seen, *(each[kept] for each in columns))

    def values(self, name: str) -> Any:
        return self.seen.column(name).values[self.place]

    def within(self, start_s: float, end_s: float) -> "Requests":
        """Those that began before an end and had not ended by a start."""
        kept = (self.start_s < end_s) & (self.values("end_s") + SLACK_S > start_s)
        return self if kept.all() else self.of(kept)

    def blocks(self, parts: Bools | None = None) -> Iterator[Intervals]:
        """Some or all parts of some requests after those of others; one block at least."""
        for at in range(0, len(self.place) or 1, _BLOCK):
            own = self.of(slice(at, at + _BLOCK)).intervals()
            yield own if parts is None else own.of(parts[own.part])

    def intervals(self) -> Intervals:
        """Parts of the requests, which pass one after the other."""
        at_s, trajectory = self.start_s, self.values("trajectory_id")
        nothing, none = np.zeros(0, np.int32), np.zeros(0)
        found: list[tuple[Codes, Codes, Floats, Floats]] = [(nothing, nothing, none, none)]
        for code, name in enumerate(TIMES):
            if name not in self.seen.requests:
                continue
            seconds = np.nan_to_num(self.values(name))
            shares: list[tuple[int, Any]] = [(code, 1.0)]
            if name == "prefill_s":
                shares = [(PARTS.index(MOVED), self.moved), (PARTS.index(AGAIN), self.again)]
                shares.append((code, 1.0 - self.moved - self.again))
            for part, share in shares:
                end_s = at_s + seconds * share
                real = end_s > at_s
                codes = np.full(int(real.sum()), part, np.int32)
                found.append((trajectory[real], codes, at_s[real], end_s[real]))
                at_s = end_s
        return Intervals(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def covered(self, parts: Bools) -> tuple[Floats, Floats]:
        """When some request is in one of the parts, as intervals that do not overlap."""
        found = [merged(each.start_s, each.end_s) for each in self.blocks(parts)]
        return merged(*(np.concatenate(times) for times in zip(*found, strict=True)))

    def mean_within(self, edges: Floats, parts: Bools) -> Floats:
        """How many are in one of the parts, on average between each two edges."""
        found = (mean_within(edges, each.start_s, each.end_s) for each in self.blocks(parts))
        return sum(found, np.zeros(len(edges) - 1))


def requests(seen: ObservedSteps) -> Requests:
    """The requests of all trajectories."""
    trajectory = seen.column("trajectory_id").values
    order = np.lexsort((seen.column("start_s").values, trajectory))
    trajectory, engine = (seen.column(n).values[order] for n in ("trajectory_id", "engine"))
    at_s = _not_before(trajectory, *(seen.column(n).values[order] for n in ("start_s", "end_s")))
    moved, again = _repeated(seen, order, trajectory, engine)
    # By start: searches for places in a step then touch memory in order.
    place = np.argsort(at_s, kind="stable")
    return Requests(seen, order, at_s, moved, again).of(place)


def merged(start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """The same times in intervals that do not overlap."""
    order = np.argsort(start_s)
    start_s, reach = start_s[order], np.maximum.accumulate(end_s[order])
    first = np.append(True, start_s[1:] > reach[:-1])[: len(order)]
    return start_s[first], reach[np.append(first[1:], True)[: len(order)]]


def _not_before(trajectory: Codes, start_s: Floats, end_s: Floats) -> Floats:
    """Starts, none before the end of a request of the same trajectory."""
    if not len(start_s):
        return start_s
    span_s = float(end_s.max() - start_s.min()) + 1.0
    reach = np.maximum.accumulate(end_s + trajectory * span_s)
    first = np.append(True, trajectory[1:] != trajectory[:-1])
    before = np.append(-np.inf, reach[:-1]) - trajectory * span_s
    return np.where(first, start_s, np.maximum(start_s, before))


def _repeated(
    seen: ObservedSteps, order: Ints, trajectory: Codes, engine: Codes
) -> tuple[Floats, Floats]:
    """Shares of each prefill that another engine, or the same one, had computed before."""
    if not {"input_tokens", "cached_tokens", "engine"} <= seen.requests.keys():
        return (constant(0.0, len(order), np.float64),) * 2
    given, cached, made = (
        seen.column(name).ints[order] for name in ("input_tokens", "cached_tokens", "output_tokens")
    )
    known = np.zeros(len(order), bool)
    known[1:] = (trajectory[1:] == trajectory[:-1]) & (given[:-1] >= 0) & (made[:-1] >= 0)
    known &= (given > 0) & (cached >= 0) & (cached < given) & (engine >= 0)
    had = np.zeros(len(order))
    had[1:] = (given + made)[:-1]
    share = np.zeros(len(order))
    again = np.maximum(np.minimum(had, given) - cached, 0)
    share[known] = again[known] / (given - cached)[known]
    other = np.zeros(len(order), bool)
    other[1:] = engine[1:] != engine[:-1]
    return np.where(other, share, 0.0), np.where(other, 0.0, share)


def spans(seen: ObservedSteps) -> tuple[Ints, Floats, Floats]:
    """Codes of trajectories, the start of their first and the end of their last request."""
    start_s, end_s = (seen.column(name).values for name in ("start_s", "end_s"))
    trajectory = seen.column("trajectory_id").ints
    codes = np.unique(trajectory)
    first, last = np.full(len(codes), np.inf), np.full(len(codes), -np.inf)
    at = np.searchsorted(codes, trajectory)
    np.minimum.at(first, at, start_s)
    np.maximum.at(last, at, end_s)
    return codes, first, last


def samples(seen: ObservedSteps) -> Iterator[tuple[str, Floats, Floats, Floats]]:
    """Engines, and times from each of which on so many requests of it run and wait.

    The times are from the first sample of any engine to the last of all.
    """
    at_s = seen.engines["time_s"].values
    for name, own in seen.engines["engine"].occurring().items():
        order = own[np.argsort(at_s[own], kind="stable")]
        counts = (seen.engines[key].values[order] for key in ("running", "waiting"))
        running, waiting = (np.concatenate(([0.0], each, each[-1:])) for each in counts)
        yield name, np.concatenate(([at_s.min()], at_s[order], [at_s.max()])), running, waiting


def requests_over_time(seen: ObservedSteps) -> tuple[Floats, Floats, Floats]:
    """Times of samples, and how many requests run and wait on all engines from each on."""
    times = np.unique(seen.engines["time_s"].values)
    change = np.zeros((2, len(times)))
    for _, at_s, *counts in samples(seen):
        place = np.searchsorted(times, at_s)
        for row, count in zip(change, counts, strict=True):
            np.add.at(row, place, np.diff(count, prepend=0.0))
    running, waiting = np.cumsum(change, axis=1).round(9)
    return times, running, waiting
