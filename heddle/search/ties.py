"""Which of several times, by draw or seed, are as good as the best."""

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from heddle.comparison.estimates import estimate
from heddle.comparison.tuning import Variant

SAME: Final = 0.01
"""A candidate that is this near to the best is as good: other prompts differ by more."""
TIE: Final = 0.03
"""One that is this near ties with the best where draws do not tell them apart."""

T = TypeVar("T")


def ties_of(ranked: Mapping[T, Sequence[float]]) -> tuple[list[T], list[T]]:
    """Of times by draw or seed, those of the best first: see `heddle.search.race.Race.ties`."""
    (best, mine), *rest = ranked.items()
    same, doubtful = [best], []
    for each, times in rest:
        more = estimate([a / b - 1.0 for a, b in zip(times, mine, strict=True)])
        if more.mean <= SAME:
            same.append(each)
        elif more.mean <= TIE and (more.ci95 is None or more.mean <= more.ci95):
            doubtful.append(each)
    return same, doubtful


def is_slower(times: Sequence[float], least: Sequence[float]) -> bool:
    """Whether times are over `SAME` longer than others of the same draws, and significantly so."""
    more = estimate([a / b - 1.0 for a, b in zip(times, least, strict=True)])
    return more.mean > SAME and more.ci95 is not None and more.mean > more.ci95


def name_of(candidate: Variant) -> str:
    """A candidate in words."""
    cluster = candidate.cluster
    engines = "its own engines" if candidate.planned else f"TP {cluster.tps}"
    name = f"{candidate.full_policy} with {engines}, {cluster.running} slots"
    if not candidate.regime:
        return name
    packed = f", epochs {candidate.epoch_plan}" if candidate.epoch_plan else ""
    return f"{candidate.regime}, {cluster.gpus} + {candidate.train_gpus} GPUs, {name}{packed}"
