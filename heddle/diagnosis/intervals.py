"""Requests of a trajectory cut into intervals, one for each part that passed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from heddle.runs.journal_columns import Bools, Floats, Ints
from heddle_trace.columns import Codes
from heddle_trace.observed.columns import ObservedSteps
from heddle_trace.observed.schema import TIMES

MOVED, AGAIN = "prefill_moved", "prefill_again"
"""Prefill of a context that another engine had, and that the same engine had dropped."""
PARTS: Final = (*(name.removesuffix("_s") for name in TIMES), MOVED, AGAIN)
QUEUE, LLM = PARTS.index("queue"), PARTS.index("llm")
COMPUTING: Final = ("prefill", "decode", "llm", "lost", MOVED, AGAIN)
"""Parts in which an engine has a request."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Parts of requests. None overlaps another of its trajectory."""

    trajectory: Codes
    part: Codes
    """Codes into `PARTS`."""
    engine: Codes
    start_s: Floats
    end_s: Floats

    def of(self, kept: Bools | Ints) -> "Intervals":
        """Some of them, or all in another order."""
        if kept.dtype == bool and kept.all():
            return self
        return Intervals(
            *(
                getattr(self, name)[kept]
                for name in ("trajectory", "part", "engine", "start_s", "end_s")
            )
        )

    @property
    def computing(self) -> Bools:
        """Whether an engine computes in each."""
        found: Bools = np.isin(PARTS, COMPUTING)[self.part]
        return found


def intervals(seen: ObservedSteps) -> Intervals:
    """Cut the requests: their parts pass one after the other."""
    trajectory = seen.column("trajectory_id").ints
    order = np.lexsort((seen.column("start_s").values, trajectory))
    trajectory = trajectory[order]
    at_s = _not_before(trajectory, *(seen.column(n).values[order] for n in ("start_s", "end_s")))
    engine = seen.column("engine").ints[order]
    moved, again = _repeated(seen, order, trajectory, engine)
    # By start: searches for places in a step then touch memory in order.
    place = np.argsort(at_s, kind="stable")
    order, at_s, moved, again = order[place], at_s[place], moved[place], again[place]
    of, by = trajectory[place].astype(np.int32), engine[place].astype(np.int32)
    found: list[tuple[Codes, Codes, Codes, Floats, Floats]] = []
    for code, name in enumerate(TIMES):
        seconds = seen.seconds(name)[order] if name in seen.requests else None
        if seconds is None:
            continue
        shares: list[tuple[int, Any]] = [(code, 1.0)]
        if name == "prefill_s":
            shares = [(PARTS.index(MOVED), moved), (PARTS.index(AGAIN), again)]
            shares.append((code, 1.0 - moved - again))
        for part, share in shares:
            end_s = at_s + seconds * share
            real = end_s > at_s
            codes = np.full(int(real.sum()), part, np.int32)
            found.append((of[real], codes, by[real], at_s[real], end_s[real]))
            at_s = end_s
    if not found:
        nothing, none = np.zeros(0, np.int32), np.zeros(0)
        return Intervals(nothing, nothing, nothing, none, none)
    columns: list[Any] = [list(column) for column in zip(*found, strict=True)]
    found.clear()
    return Intervals(*(np.concatenate(columns.pop(0)) for _ in range(len(columns))))


def _not_before(trajectory: Ints, start_s: Floats, end_s: Floats) -> Floats:
    """Starts, none before the end of a request of the same trajectory."""
    if not len(start_s):
        return start_s
    span_s = float(end_s.max() - start_s.min()) + 1.0
    reach = np.maximum.accumulate(end_s + trajectory * span_s)
    first = np.append(True, trajectory[1:] != trajectory[:-1])
    before = np.append(-np.inf, reach[:-1]) - trajectory * span_s
    return np.where(first, start_s, np.maximum(start_s, before))


def _repeated(
    seen: ObservedSteps, order: Ints, trajectory: Ints, engine: Ints
) -> tuple[Floats, Floats]:
    """Shares of each prefill that another engine, or the same one, had computed before."""
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


def spans(found: Sequence[Floats], trajectory: Ints) -> tuple[Ints, Floats, Floats]:
    """Trajectories with the start of their first and the end of their last request."""
    start_s, end_s = found
    codes = np.unique(trajectory)
    first, last = np.full(len(codes), np.inf), np.full(len(codes), -np.inf)
    at = np.searchsorted(codes, trajectory)
    np.minimum.at(first, at, start_s)
    np.maximum.at(last, at, end_s)
    return codes, first, last


def requests_over_time(seen: ObservedSteps) -> tuple[Floats, dict[str, tuple[Floats, Floats]]]:
    """Times of samples of engines, and by engine the requests that run and wait from each on."""
    name, at_s = seen.engines["engine"], seen.engines["time_s"].values
    times = np.unique(at_s)
    found = {}
    for engine, own in name.occurring().items():
        order = own[np.argsort(at_s[own], kind="stable")]
        place = np.searchsorted(at_s[order], times, side="right") - 1
        running, waiting = (
            np.where(place >= 0, seen.engines[key].values[order][place], 0.0)
            for key in ("running", "waiting")
        )
        found[engine] = (running, waiting)
    return times, found
