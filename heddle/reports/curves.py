"""Curves that figures and pages draw, as x and y: one definition for whatever draws them."""

from typing import Any, TypeAlias

import numpy as np

from heddle.runs.tables import Floats

Curve: TypeAlias = tuple[Floats, Floats]

MAX_POINTS = 2000
"""Points of one curve: more than a figure has pixels only makes the file slow to draw."""


def thin(*columns: Any) -> tuple[Any, ...]:
    """Leave `MAX_POINTS` of each column, the first and the last among them."""
    n = len(columns[0])
    keep = np.unique(np.linspace(0, n - 1, min(n, MAX_POINTS)).astype(int))
    return tuple(column[keep] for column in columns)


def completion(arrived_s: Floats, finished_s: Floats) -> Curve:
    """Seconds since the first arrival, and the share of trajectories that have finished by then.

    Trajectories without an end (NaN) count among all, and never finish.
    """
    done = np.sort(finished_s[~np.isnan(finished_s)] - arrived_s.min())
    share = np.arange(1, len(done) + 1) / len(arrived_s)
    times, share = thin(np.append(0.0, done), np.append(0.0, share))
    return times, share


def under_way(from_s: Floats, until_s: Floats, *, thinned: bool = False) -> Curve:
    """Times in seconds, ascending, and how many of the intervals hold each; NaN never ends.

    All that happens at one instant is one point; the curve would else show its order. Thinned
    points are counted alone.
    """
    from_s, until_s = np.sort(from_s), np.sort(until_s[~np.isnan(until_s)])
    times = np.sort(np.concatenate((from_s, until_s)), kind="stable")  # merges the two
    times = times[np.append(times[1:] != times[:-1], True)] if len(times) else times
    if thinned and len(times):
        (times,) = thin(times)
    begun, ended = (np.searchsorted(each, times, "right") for each in (from_s, until_s))
    return times, (begun - ended).astype(np.float64)


def from_zero(curve: Curve) -> Curve:
    """A thinned curve that begins at time 0, with 0 where the first point is later."""
    x, y = thin(*curve) if len(curve[0]) else curve
    return (x, y) if len(x) and x[0] <= 0.0 else (np.append(0.0, x), np.append(0.0, y))


def at_least(delay_s: Floats) -> Curve:
    """Delays in seconds, ascending, and the share of them that are at least this long.

    Thinned on a logarithmic scale: the rare long delays are what the curve is for.
    """
    delay_s = np.sort(delay_s)
    share = 1.0 - np.arange(len(delay_s)) / max(len(delay_s), 1)
    rank = len(delay_s) - np.unique(np.geomspace(1, max(len(delay_s), 1), MAX_POINTS).astype(int))
    rank = rank[::-1][: len(delay_s)]
    return delay_s[rank], share[rank]


def mean_within(edges: Floats, begin: Floats, end: Floats, weight: Floats | None = None) -> Floats:
    """How many of the intervals hold a time, on average between each two edges."""
    lasts_s = np.maximum(np.diff(edges), 1e-9)
    return np.maximum(np.diff(time_within(edges, begin, end, weight)) / lasts_s, 0.0)


def time_within(edges: Floats, begin: Floats, end: Floats, weight: Floats | None = None) -> Floats:
    """The time in the intervals before each edge, all added up, each times its weight (1).

    Intervals that end before they begin count as none.
    """
    # Unix times are too large to be added up.
    edges, begin, end = (each - edges[0] for each in (edges, begin, end))
    real = end > begin
    weights = np.ones(int(real.sum())) if weight is None else weight[real]
    return _time_since(edges, begin[real], weights) - _time_since(edges, end[real], weights)


def _time_since(edges: Floats, times: Floats, weight: Floats) -> Floats:
    """The sum over `times` of the time from each of them to each edge, if it is past."""
    at = _places(edges, times)
    total = np.cumsum(np.bincount(at, weights=weight, minlength=len(edges))[: len(edges)])
    moments = np.cumsum(np.bincount(at, weights=weight * times, minlength=len(edges))[: len(edges)])
    return np.asarray(edges * total - moments, np.float64)


def _places(edges: Floats, times: Floats) -> Any:
    """What `np.searchsorted` gives, at once where edges from 0 on are equally far apart."""
    last = len(edges) - 1
    if edges[-1] >= 1e-9:
        at = np.clip(times * (last / edges[-1]), 0, last).astype(np.int64)
        at += edges[at] < times
        around = np.concatenate(([-np.inf], edges, [np.inf]))
        if ((around[at] < times) & (times <= around[at + 1])).all():
            return at
    return np.searchsorted(edges, times)
