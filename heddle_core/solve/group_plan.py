"""A plan as numbers: a shape and a contiguous group for each engine, and a bound on all plans."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from heddle_core.estimate.group_cost import SegmentCost
from heddle_core.ids import EngineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Engine `e` has ``shapes[e]`` and the sorted trajectories ``bounds[e]:bounds[e + 1]``."""

    shapes: tuple[EngineShape, ...]
    bounds: tuple[int, ...]
    makespan_s: float
    bound_s: float = 0.0
    """Proven: no contiguous plan of the same costs and GPUs ends earlier. 0 where nothing is."""

    def sizes(self) -> tuple[int, ...]:
        """Members of each group."""
        return tuple(b - a for a, b in pairwise(self.bounds))


def ends_s(
    costs: Mapping[EngineShape, SegmentCost], shapes: Sequence[EngineShape], bounds: Sequence[int]
) -> tuple[float, ...]:
    """Estimated end of every group."""
    edges = np.asarray(bounds, dtype=np.int64)
    number = {shape: k for k, shape in enumerate(costs)}
    kinds = np.array([number[shape] for shape in shapes], dtype=np.int64)
    ends = np.zeros(len(kinds))
    for k, cost in enumerate(costs.values()):
        mine = np.flatnonzero(kinds == k)
        if len(mine):
            ends[mine] = cost.end_s(edges[mine], edges[mine + 1])
    return tuple(ends.tolist())


def one_class(pools: Mapping[str, int], shapes: Collection[EngineShape]) -> int:
    """Return the GPUs of the only class.

    Raises:
        ValueError: there are several GPU classes, or engines that run only part of a step.
    """
    check_classes(pools, shapes)
    if len(pools) != 1:
        raise ValueError(
            f"this solver plans GPUs of one class, not of {', '.join(pools)}; "
            "give pools and shapes of one class"
        )
    return next(iter(pools.values()))


def check_classes(pools: Mapping[str, int], shapes: Collection[EngineShape]) -> None:
    """Refuse shapes that no pool has GPUs for, and engines that run only part of a step.

    Raises:
        ValueError: there are some.
    """
    strange = sorted({shape.gpu for shape in shapes if shape.gpu not in pools})
    if strange:
        raise ValueError(
            f"shapes of the GPU classes {', '.join(strange)} have no pool; pools are of "
            f"{', '.join(pools) or 'none'}"
        )
    roles = {shape.role for shape in shapes}
    if len(roles) > 1 or "prefill" in roles:
        raise ValueError(
            "a plan can have engines that all decode or all do both, not of the roles "
            f"{', '.join(sorted(roles))}; give prefill engines by `Disaggregation`"
        )


def shapes_of(gpu: str, shapes: Iterable[EngineShape]) -> list[EngineShape]:
    """Return the shapes of a GPU class, in order."""
    return sorted(shape for shape in shapes if shape.gpu == gpu)


def shapes_that_fit(shapes: Iterable[EngineShape], gpus: int) -> tuple[EngineShape, ...]:
    """Return those with at most `gpus` GPUs, ascending.

    Raises:
        ValueError: there are none.
    """
    known = sorted(shapes, key=lambda shape: (shape.gpus, shape))
    fitting = tuple(shape for shape in known if shape.gpus <= gpus)
    if not fitting:
        raise ValueError(f"no TP degree of {[shape.tp for shape in known]} fits on {gpus} GPUs")
    return fitting
