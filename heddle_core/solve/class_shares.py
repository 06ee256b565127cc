"""Which trajectories each GPU class takes, by what they cost there: a share of the work per class.

One class is better than another at some trajectories: those that prefill much, where it computes
quickly, or those that decode much, where it reads memory quickly. On a full engine of a shape, a
trajectory takes ``t0 * o * max(c / KV capacity, 1 / slots) + w`` seconds (`group_cost`), times the
GPUs of the engine, at its cheapest shape. Trajectories are ordered by the ratio of these costs on
two classes, and one cut divides them. Those that alone take longer than a known plan on one class
are the other's. Both sides of a cut are planned, and bisection finds where they end together.

Of more than two classes the first is divided from all others, and these then alike.
"""

from collections.abc import Mapping

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import FloatArray, IntArray, Work, engine_work_s, solo_s
from heddle_core.estimate.ordered import Cost, ordered_costs
from heddle_core.ids import EngineShape
from heddle_core.solve.exact import exact_plan
from heddle_core.solve.group_plan import shapes_of

_TOLERANCE = 1e-2
"""Of the makespans that are compared at a cut."""


def class_shares(
    work: Work,
    by_shape: Mapping[EngineShape, StepCost],
    pools: Mapping[str, int],
    *,
    max_running: int,
    known_s: float,
    cost: Cost = "context",
) -> dict[str, IntArray]:
    """Return positions in `work` for each class; `known_s` is the makespan of another plan.

    Some shape of each class must fit on its GPUs.
    """
    shares: dict[str, IntArray] = {}
    left = np.arange(len(work))
    rest = dict(pools)
    while len(rest) > 1:
        gpu = next(iter(rest))
        one = {gpu: rest.pop(gpu)}
        mine = _cut(
            work.take(left),
            by_shape,
            one,
            rest,
            max_running=max_running,
            known_s=known_s,
            cost=cost,
        )
        shares[gpu] = left[mine]
        left = np.delete(left, mine)
    shares[next(iter(rest))] = left
    return shares


def _cut(
    work: Work,
    by_shape: Mapping[EngineShape, StepCost],
    one: Mapping[str, int],
    rest: Mapping[str, int],
    *,
    max_running: int,
    known_s: float,
    cost: Cost,
) -> IntArray:
    """Positions of the trajectories that the class of `one` takes."""
    sides = [_of_classes(by_shape, pools) for pools in (one, rest)]
    ratio = np.divide(*(_gpu_s(work, side, max_running) for side in sides))
    alone = [np.min([solo_s(work, c) for c in side.values()], axis=0) for side in sides]
    bound = (alone[1] > known_s) & (alone[0] <= known_s)
    barred = (alone[0] > known_s) & ~bound
    order = np.lexsort((ratio, barred, ~bound))

    def end_s(index: IntArray, side: int) -> float:
        if not len(index):
            return 0.0
        _, costs = ordered_costs(work.take(index), sides[side], cost, max_running=max_running)
        pools = (one, rest)[side]
        return exact_plan(costs, len(index), pools, tolerance=_TOLERANCE).makespan_s

    low, high = 0, len(work)
    best, best_s = low, end_s(order, 1)
    while low < high:
        middle = (low + high + 1) // 2
        own_s, others_s = end_s(order[:middle], 0), end_s(order[middle:], 1)
        if max(own_s, others_s) < best_s:
            best, best_s = middle, max(own_s, others_s)
        low, high = (middle, high) if own_s <= others_s else (low, middle - 1)
    return order[:best]


def _of_classes(
    by_shape: Mapping[EngineShape, StepCost], pools: Mapping[str, int]
) -> dict[EngineShape, StepCost]:
    return {
        shape: by_shape[shape]
        for gpu, gpus in pools.items()
        for shape in shapes_of(gpu, by_shape)
        if shape.gpus <= gpus
    }


def _gpu_s(work: Work, costs: Mapping[EngineShape, StepCost], max_running: int) -> FloatArray:
    """GPU-seconds of each trajectory on full engines of its cheapest shape."""
    context = work.mean_context_tokens()
    each = [
        shape.gpus
        * (
            cost.t0_s
            * work.output_tokens
            * np.maximum(context / cost.kv_capacity_tokens, 1.0 / max_running)
            + engine_work_s(work, cost)
        )
        for shape, cost in costs.items()
    ]
    least: FloatArray = np.min(each, axis=0)
    return least
