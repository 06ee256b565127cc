"""The exact joint planner: the mix of TP degrees and the contiguous groups, in one search.

For a makespan ``C``, let ``end(i, tp, C)`` be how far an engine of degree `tp` gets that starts at
the i-th longest trajectory and ends within ``C``. How far `g` GPUs get at best is

    far[0] = 0
    far[g] = max(far[g - 1], max over tp of end(far[g - tp], tp, C))

because ``end`` does not fall with `i` (a segment never ends after one that holds it): getting
further with fewer GPUs is never a loss. ``C`` is feasible when ``far[gpus]`` is all of them, and
bisection finds the least. Annealing over the mix, with a placement inside, searches the same space.
`class_budgets` has the table for GPUs of several classes.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite, prod
from typing import Final, Protocol

import numpy as np

from heddle_core.estimate.group_cost import SegmentCost
from heddle_core.ids import EngineShape
from heddle_core.solve.class_budgets import (
    MOST_STATES,
    Groups,
    OneAfterAnother,
    TwoBudgets,
)
from heddle_core.solve.group_plan import (
    GroupPlan,
    check_classes,
    ends_s,
    shapes_of,
    shapes_that_fit,
)

_SEVERAL_TOLERANCE: Final = 1e-4
"""Least tolerance with several classes, whose tables take longer."""


class _Within(Protocol):
    """Finds a plan within a makespan."""

    def plan(self, first: int, trajectories: int, limit_s: float) -> Groups | None:
        """Return shapes and bounds, or None."""
        ...


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
    `tolerance` of its `bound_s`, below which the model admits no contiguous plan; with several
    classes the share is at least 1e-4, and with more than two nothing is proven. GPUs without
    benefit stay unused. Raises ValueError when no shape fits, or no finite makespan is enough.
    """
    check_classes(pools, costs)
    planned = {
        gpu: gpus
        for gpu, gpus in pools.items()
        if any(shape.gpus <= gpus for shape in shapes_of(gpu, costs))
    }
    usable = {
        shape: costs[shape]
        for gpu, gpus in (planned or pools).items()
        for shape in shapes_that_fit(shapes_of(gpu, costs), gpus)
    }
    if first >= trajectories:
        return GroupPlan(shapes=(), bounds=(first,), makespan_s=0.0)
    head = np.array([first])
    solo_s = min(float(cost.end_s(head, head + 1)[0]) for cost in usable.values())
    if len(planned) > 1:
        tolerance = max(tolerance, _SEVERAL_TOLERANCE)
    plan = _bisected(
        OneAfterAnother(usable, planned), usable, first, trajectories, solo_s, tolerance
    )
    if len(planned) == 1:
        return plan
    if len(planned) > 2 or prod(gpus + 1 for gpus in planned.values()) > MOST_STATES:
        return replace(plan, bound_s=0.0)
    two = TwoBudgets(usable, planned)
    return _bisected(two, usable, first, trajectories, solo_s, tolerance, known=plan)


def _bisected(
    search: _Within,
    costs: Mapping[EngineShape, SegmentCost],
    first: int,
    trajectories: int,
    solo_s: float,
    tolerance: float,
    *,
    known: GroupPlan | None = None,
) -> GroupPlan:
    """The least makespan at which `search` finds a plan, no more than that of a `known` one."""
    low = limit = solo_s
    if known is not None:
        best, high = (known.shapes, known.bounds), known.makespan_s
    else:
        found = search.plan(first, trajectories, limit)
        while found is None:
            low, limit = limit, 2 * limit
            if not isfinite(limit):
                raise ValueError("no finite makespan holds every trajectory")
            found = search.plan(first, trajectories, limit)
        best, high = found, max(ends_s(costs, *found))
    while high - low > tolerance * high:
        limit = (low + high) / 2
        found = search.plan(first, trajectories, limit)
        if found is None:
            low = limit
        else:
            best, high = found, min(limit, max(ends_s(costs, *found)))
    makespan_s = max(ends_s(costs, *best))
    return GroupPlan(
        shapes=best[0], bounds=best[1], makespan_s=makespan_s, bound_s=min(low, makespan_s)
    )


def level_plan(
    costs: Mapping[EngineShape, SegmentCost],
    trajectories: int,
    pools: Mapping[str, int],
    *,
    rounds: int = 8,
    tolerance: float = 1e-6,
    known: GroupPlan | None = None,
    idle_only: bool = False,
) -> GroupPlan:
    """`exact_plan`, then the groups after the bottleneck made as early as their GPUs allow.

    One long trajectory often fixes the makespan. An exact plan then fills every other engine up to
    it, without reserve for a wrong prediction. Each round keeps the first group and solves the rest
    on the remaining GPUs, so the makespan stays optimal while later groups end earlier. `known` is
    the exact plan where it was made before; `tolerance` is then of the rounds alone. `idle_only`:
    no more rounds once all GPUs are used.
    """
    plan = known or exact_plan(costs, trajectories, pools, tolerance=tolerance)
    shapes, bounds = list(plan.shapes[:1]), list(plan.bounds[:2])
    rest, left = plan, dict(pools)
    for _ in range(rounds):
        used = sum(shape.gpus for shape in rest.shapes)
        if len(rest.shapes) < 2 or (idle_only and used == sum(left.values())):
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
