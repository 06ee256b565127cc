"""The page about a diagnosis: what it says, and what trajectories and engines did over time."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from heddle.diagnosis.intervals import PARTS, Requests, requests, spans
from heddle.diagnosis.remedies import Remedy
from heddle.diagnosis.verdict import WORDS, Diagnosis
from heddle.reports.curves import mean_within
from heddle.reports.page.columns import tick
from heddle.reports.page.html import SHARED, filled, packed
from heddle.runs.journal_columns import Floats, Ints
from heddle_trace.observed.columns import ObservedSteps

SCHEMA: Final = "heddle.diagnosis.page/1"
LONGEST: Final = 60
"""Trajectories that are drawn because they take longest."""
DRAWN: Final = 140
"""Trajectories of the others that are drawn, at random."""
MOST: Final = 150_000
"""Intervals of a page: it stays below some megabytes."""
TIMES: Final = 1040
"""Equal times in which trajectories are counted: twice as many as are drawn."""
PHASES: Final = 2_000


def page(found: Diagnosis, seen: ObservedSteps, remedies: Sequence[Remedy], why_none: str) -> bytes:
    """Make the page; `found` is of `seen`."""
    begin_s, end_s = found.steps[0].start_s, found.steps[-1].end_s
    cut = requests(seen)
    codes, first_s, last_s = spans(seen)
    zero_s = np.zeros(int(codes.max(initial=-1)) + 1)
    zero_s[codes] = first_s if found.alone else begin_s
    if found.alone:
        begin_s, end_s = 0.0, float((last_s - first_s).max())
    rows = _drawn(cut, codes, last_s - first_s)
    rows = rows[np.lexsort((last_s[rows], (first_s - zero_s[codes])[rows]))]
    words = seen.column("trajectory_id").words
    head = {
        "schema": SCHEMA,
        "trace": found.source,
        "meanings": {name: f"It {found.words(name)}." for name in WORDS},
        **found.plain(remedies, why_none),
        "alone": found.alone,
        "begin_s": begin_s,
        "end_s": end_s - begin_s,
        "trajectories": len(codes),
        "names": [words[code] for code in codes[rows].tolist()],
        "longest_drawn": min(LONGEST, len(codes)),
        "did": {} if found.alone else _did(cut, begin_s, end_s),
        "phases": [
            (each.phase, each.start_s - begin_s, each.end_s - begin_s)
            for each in seen.phases[:PHASES]
            if each.phase != "step"
        ],
        "kinds": PARTS,
        "tick_s": tick(end_s - begin_s),
        "runs": [{}],
    }
    columns = _columns(cut, codes[rows], zero_s, head["tick_s"])
    title = f"Where the time went: {found.source}"
    return filled("diagnosis", title, (*SHARED, "diagnosis"), packed(head, [columns]))


def _drawn(cut: Requests, codes: Ints, lasts_s: Floats) -> Ints:
    """Places of the trajectories that are drawn: the longest, and some at random."""
    order = np.argsort(-lasts_s, kind="stable")
    others = np.random.default_rng(0).permutation(order[LONGEST:])[:DRAWN]
    chosen = np.concatenate([order[:LONGEST], others])
    size = int(codes.max(initial=-1)) + 1
    count = np.sum([np.bincount(each.trajectory, None, size) for each in cut.blocks()], axis=0)
    fit = np.cumsum(count[codes[chosen]]) <= MOST
    return chosen[: max(1, int(fit.sum()))]


def _did(cut: Requests, begin_s: float, end_s: float) -> dict[str, list[float]]:
    """How many trajectories were in each part, on average in `TIMES` equal times."""
    edges = np.linspace(begin_s, max(end_s, begin_s + 1e-9), TIMES + 1)
    total = np.zeros((len(PARTS), TIMES))
    for each in cut.blocks():
        for code in np.unique(each.part):
            own = each.of(each.part == code)
            total[code] += mean_within(edges, own.start_s, own.end_s)
    rows = zip(PARTS, total.round(2), strict=True)
    return {name: mean.tolist() for name, mean in rows if mean.any()}


def _columns(
    cut: Requests, codes: Ints, zero_s: Floats, tick_s: float
) -> Mapping[str, Mapping[str, Any]]:
    place = np.full(len(zero_s), -1)
    place[codes] = np.arange(len(codes))
    own = cut.of(place[cut.values("trajectory_id")] >= 0).intervals()
    own = own.of(np.lexsort((own.start_s, place[own.trajectory])))
    times = [
        np.maximum(np.rint((each - zero_s[own.trajectory]) / tick_s), 0).astype(np.uint32)
        for each in (own.start_s, own.end_s)
    ]
    return {
        "intervals": {
            "row": place[own.trajectory].astype(np.uint16),
            "part": own.part.astype(np.uint8),
            "start": times[0],
            "end": times[1],
        }
    }
