"""The exact joint planner: the mix of TP degrees and the contiguous groups, in one search.

For a makespan ``C``, let ``end(i, tp, C)`` be how far an engine of degree `tp` gets that starts at
the i-th longest trajectory and ends within ``C``. How far `g` GPUs get at best is

    far[0] = 0
    far[g] = max(far[g - 1], max over tp of end(far[g - tp], tp, C))

because ``end`` does not fall with `i` (a segment never ends after one that holds it): getting
further with fewer GPUs is never a loss. ``C`` is feasible when ``far[gpus]`` is all of them, and
bisection finds the least. Annealing over the mix, with a placement inside, searches the same space.
"""

from collections.abc import Callable, Mapping
from math import isfinite

import numpy as np

from heddle_core.estimate.group_cost import SegmentCost
from heddle_core.ids import EngineShape
from heddle_core.solve.group_plan import GroupPlan, ends_s, one_class, shapes_that_fit


def exact_plan(
    costs: Mapping[EngineShape, SegmentCost],
    trajectories: int,
    pools: Mapping[str, int],
    *,
    first: int = 0,
    tolerance: float = 1e-6,
) -> GroupPlan:
    """Least makespan of the sorted trajectories ``first:trajectories`` on the GPUs of `pools`.

    `costs` holds one segment cost per allowed shape. The plan's makespan is within a share
    `tolerance` of its `bound_s`, below which the model admits no contiguous plan. GPUs without
    benefit stay unused. Raises ValueError when no shape fits, there are several GPU classes, or no
    finite makespan is enough.
    """
    gpus = one_class(pools, costs)
    usable = {shape: costs[shape] for shape in shapes_that_fit(costs, gpus)}
    if first >= trajectories:
        return GroupPlan(shapes=(), bounds=(first,), makespan_s=0.0)
    reaches = {shape: cost.reach for shape, cost in usable.items()}
    head = np.array([first])
    low = min(float(cost.end_s(head, head + 1)[0]) for cost in usable.values())
    limit = low
    found = _furthest(reaches, first, trajectories, gpus, limit)
    while found is None:
        low, limit = limit, 2 * limit
        if not isfinite(limit):
            raise ValueError("no finite makespan holds every trajectory")
        found = _furthest(reaches, first, trajectories, gpus, limit)
    best, high = found, max(ends_s(usable, *found))
    while high - low > tolerance * high:
        limit = (low + high) / 2
        found = _furthest(reaches, first, trajectories, gpus, limit)
        if found is None:
            low = limit
        else:
            best, high = found, min(limit, max(ends_s(usable, *found)))
    makespan_s = max(ends_s(usable, *best))
    return GroupPlan(
        shapes=best[0], bounds=best[1], makespan_s=makespan_s, bound_s=min(low, makespan_s)
    )


def _furthest(
    reaches: Mapping[EngineShape, Callable[[int, float], int]],
    first: int,
    trajectories: int,
    gpus: int,
    limit_s: float,
) -> tuple[tuple[EngineShape, ...], tuple[int, ...]] | None:
    """Shapes and bounds of a plan within `limit_s`, or None; the `far` table of the module."""
    far, used = [first], list[EngineShape | None]([None])
    shapes = [(shape.gpus, shape, reach) for shape, reach in reaches.items()]
    for g in range(1, gpus + 1):
        furthest, chosen = far[g - 1], None
        for tp, shape, reach in shapes:
            if tp > g:
                break
            stop = reach(far[g - tp], limit_s)
            if stop > furthest:
                furthest, chosen = stop, shape
        far.append(furthest)
        used.append(chosen)
        if furthest >= trajectories:
            return _trace(far, used, g)
    return None


def _trace(
    far: list[int], used: list[EngineShape | None], g: int
) -> tuple[tuple[EngineShape, ...], tuple[int, ...]]:
    shapes: list[EngineShape] = []
    bounds: list[int] = [far[g]]
    while g:
        shape = used[g]
        # No GPU is idle in between: a plan from far[g] = far[g - 1] was found one GPU earlier.
        assert shape is not None
        shapes.append(shape)
        g -= shape.gpus
        bounds.append(far[g])
    return tuple(reversed(shapes)), tuple(reversed(bounds))


def level_plan(
    costs: Mapping[EngineShape, SegmentCost],
    trajectories: int,
    pools: Mapping[str, int],
    *,
    rounds: int = 8,
    tolerance: float = 1e-6,
) -> GroupPlan:
    """`exact_plan`, then the groups after the bottleneck made as early as their GPUs allow.

    One long trajectory often fixes the makespan. An exact plan then fills every other engine up to
    it, without reserve for a wrong prediction. Each round keeps the first group and solves the rest
    on the remaining GPUs, so the makespan stays optimal while later groups end earlier.
    """
    plan = exact_plan(costs, trajectories, pools, tolerance=tolerance)
    shapes, bounds = list(plan.shapes[:1]), list(plan.bounds[:2])
    rest, left = plan, dict(pools)
    for _ in range(rounds):
        if len(rest.shapes) < 2:
            break
        left[rest.shapes[0].gpu] -= rest.shapes[0].gpus
        rest = exact_plan(costs, trajectories, left, first=bounds[-1], tolerance=tolerance)
        shapes.append(rest.shapes[0])
        bounds.append(rest.bounds[1])
    shapes.extend(rest.shapes[1:])
    bounds.extend(rest.bounds[2:])
    ends = ends_s(costs, shapes, bounds)
    return GroupPlan(
        shapes=tuple(shapes),
        bounds=tuple(bounds),
        makespan_s=max(ends, default=0.0),
        bound_s=plan.bound_s,
    )
