"""What pages and files show of runs that are too large to show whole."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np

from heddle.runs import Run
from heddle.runs.arrow_arrays import number_array, numbers_of
from heddle.runs.journal_columns import smallest
from heddle.runs.record import Record
from heddle.runs.tables import Bools, Floats, Ints

MAX_DISPATCHES = 200_000
"""Dispatches on a page, of all its runs together; a run within its part is shown whole."""

MAX_ENGINES = 256
"""Engines that are drawn; beyond, rows are thinner than two pixels."""

LAST = 1_000
"""Trajectories of a sample that end last: a rollout waits for them."""

DRAWN = 3_000
"""Trajectories of a sample that are drawn at random, about as many; fewer if they are long."""

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Sample:
    """Trajectories and engines of one run that are shown."""

    trajectories: Bools
    """Of each trajectory: whether it is shown, with all its dispatches."""
    at_random: Bools
    """Of each trajectory: whether it stands for the others; all of them in a run shown whole."""
    engines: Ints
    """Engines that are drawn, as numbers in the order of their start; all that ran there is shown.
    """
    note: str | None
    """What is left out; None for a run shown whole."""

    @property
    def whole(self) -> bool:
        """Whether all trajectories are shown."""
        return bool(self.trajectories.all())


@dataclass(frozen=True, slots=True)
class Choice:
    """The trajectories that every run of a page shows, by name, where a run is sampled."""

    last: dict[str, None]
    """Those that end last in any of the runs."""
    each: int
    """How many of these are of one run."""
    share: float
    """Of all trajectories, to be drawn by their names: the same ones in every run."""

    def draws(self, names: Sequence[str]) -> Bools:
        """Whether each trajectory is one of those drawn at random."""
        hashes = (crc32(name.encode(errors="surrogatepass")) for name in names)
        return np.fromiter(hashes, np.int64, len(names)) < self.share * 2**32


def choose(runs: Sequence[Run], most: int) -> Choice | None:
    """Choose what finished runs of one trace show if one has more than `most` dispatches."""
    finished = [run for run in runs if run.status == "finished"]
    if not any(run.summary["dispatches"] > most for run in finished):
        return None
    found = []
    for run in finished:
        table = run.trajectories
        both: Any = [table.column(c).combine_chunks() for c in ("finished_s", "steps")]
        ends, steps = (np.asarray(numbers_of(c, np.nan), np.float64) for c in both)
        last = _last(ends, steps, most // len(finished))
        names = table.column("trajectory").take(number_array(last)).to_pylist()
        found.append(Choice(dict.fromkeys(map(str, names)), len(last), _share(steps, most)))
    return Choice(
        last={name: None for choice in found for name in choice.last},
        each=max(choice.each for choice in found),
        share=min(choice.share for choice in found),
    )


def sample(record: Record, choice: Choice | None, most: int) -> Sample:
    """Choose what is shown of a run in at most about `most` dispatches; all of it if it fits.

    Besides the trajectories of `choice`, those that ran on some engines, so that all of what ran
    there is shown. The engine that ends last is the first of these; the others are spread evenly.
    Without a choice for all runs, this one's own.
    """
    d, names = record.dispatches, record.journal.trajectories
    engines = record.engines["engine"]
    order = _spread(len(engines), _ends_last(record))
    if len(d.trajectory) <= most:
        everyone = np.ones(len(names), np.bool_)
        drawn = np.sort(np.fromiter(islice(order, MAX_ENGINES), np.int64))
        left = f"{len(drawn):,} of {len(engines):,} engines are drawn, spread evenly"
        return Sample(everyone, everyone, drawn, left if len(drawn) < len(engines) else None)
    count = np.bincount(d.trajectory, minlength=len(names))
    ends = np.nan_to_num(record.trajectories["finished_s"], nan=np.inf)
    own = _last(ends, count, most)
    if choice is None:
        choice = Choice({names[place]: None for place in own}, len(own), _share(count, most))
    at_random = choice.draws(names)
    chosen = at_random | np.fromiter((name in choice.last for name in names), np.bool_, len(names))
    chosen[own] = True
    whole = _whole_engines(record, count, chosen, order, most)
    also = (
        f", and all that ran on the {len(whole):,} of {len(engines):,} engines that are drawn"
        if len(whole)
        else "; no engine is drawn, since too much ran on each"
    )
    note = (
        f"{int(chosen.sum()):,} of {len(chosen):,} trajectories are shown: the {choice.each:,} "
        f"that end last in each run, {int(at_random.sum()):,} drawn by their names{also}"
    )
    return Sample(chosen, at_random, whole, note)


@dataclass(frozen=True, slots=True)
class ShownEngines:
    """Engines of one run that are shown, with what ran there."""

    engines: Ints
    """Numbers in the order of their start."""
    note: str | None
    """What is left out; None for all engines."""


def sample_engines(record: Record, most: int = MAX_DISPATCHES) -> ShownEngines:
    """Choose engines on which at most `most` dispatches ran; all of them if they fit."""
    codes = record.engines["engine"]
    if len(record.dispatches.engine) <= most:
        return ShownEngines(np.arange(len(codes)), None)
    count = np.bincount(record.dispatches.engine, minlength=int(codes.max(initial=-1)) + 1)
    order = np.fromiter(_spread(len(codes), _ends_last(record)), np.int64)
    shown = np.sort(order[np.cumsum(count[codes[order]]) <= most])
    note = f"{len(shown):,} of {len(codes):,} engines are shown, spread evenly"
    return ShownEngines(shown, note)


def _last(ends: Floats, steps: Floats | Ints, most: int) -> Ints:
    """Places of those that end last, in at most a quarter of the dispatches."""
    places = np.argsort(-ends, kind="stable")[:LAST]
    return places[: max(1, int((np.cumsum(steps[places]) <= most / 4).sum()))]


def _share(steps: Floats | Ints, most: int) -> float:
    """The share to draw at random, for at most about a quarter of the dispatches."""
    return min(DRAWN / len(steps), most / 4 / max(float(steps.sum()), 1.0), 1.0)


def _whole_engines(
    record: Record, count: Ints, chosen: Bools, order: Iterable[int], most: int
) -> Ints:
    """Engines whose trajectories fit as well; adds these to `chosen`."""
    d, codes = record.dispatches, record.engines["engine"]
    left = most - int(count[chosen].sum())
    by_engine = np.argsort(d.engine.astype(smallest(d.engine)), kind="stable")
    begin, end = (np.searchsorted(d.engine[by_engine], codes, side) for side in ("left", "right"))
    whole: list[int] = []
    for engine in islice(order, MAX_ENGINES):
        own = np.unique(d.trajectory[by_engine[begin[engine] : end[engine]]])
        left -= int(count[own][~chosen[own]].sum())
        if left < 0:
            break
        chosen[own] = True
        whole.append(engine)
    return np.array(sorted(whole), np.int64)


def _ends_last(record: Record) -> int:
    """The engine on which the last step ends, as a number in the order of start."""
    d = record.dispatches
    if not len(d.engine):
        return 0
    last = d.engine[int(np.argmax(np.nan_to_num(d.ended_s, nan=np.inf)))]
    return int(np.argmax(record.engines["engine"] == last))


def _spread(count: int, first: int) -> Iterator[int]:
    """Numbers below `count`, `first` first: however many are taken, they are spread evenly."""
    if count:
        yield first
        at = np.argsort(np.argsort((np.arange(count) * _GOLDEN) % 1.0))
        yield from (int(engine) for engine in at if engine != first)
