"""When engines die: on a schedule, or at random with a mean time between failures."""

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heapreplace
from random import Random

from heddle_core.ids import EngineId


def scheduled(faults: Iterable[tuple[float, EngineId]]) -> Iterator[tuple[float, EngineId]]:
    """Yield the given (time_s, engine) in order of time, equal times as given.

    Raises:
        ValueError: a time that is negative or not a number.
    """
    faults = list(faults)
    for time_s, engine in faults:
        if not 0.0 <= time_s < math.inf:
            raise ValueError(f"engine {engine} cannot fail at {time_s} s")
    yield from sorted(faults, key=lambda fault: fault[0])


def at_random(
    engines: Sequence[EngineId], mtbf_s: float, *, seed: int
) -> Iterator[tuple[float, EngineId]]:
    """Yield (time_s, engine) in order of time, without end.

    Each engine fails after exponential times of mean `mtbf_s`, drawn from a stream of its own:
    another engine more or less moves nobody's failures.

    Raises:
        ValueError: a mean time that is not above 0.
    """
    if not 0.0 < mtbf_s < math.inf:
        raise ValueError(f"the mean time between failures must be above 0 s, not {mtbf_s}")
    streams = [Random(f"{seed}/fault/{engine}") for engine in engines]
    following = [(stream.expovariate(1.0 / mtbf_s), i) for i, stream in enumerate(streams)]
    heapify(following)
    while following:
        time_s, i = following[0]
        yield time_s, engines[i]
        heapreplace(following, (time_s + streams[i].expovariate(1.0 / mtbf_s), i))
