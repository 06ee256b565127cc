"""Libra's dynamic program over (GPUs, trajectories), as a third solver to compare with.

Over trajectories sorted longest first (Libra, arXiv 2606.03077, global resource planner),

    dp[0][0] = 0, dp[0][i > 0] = infinity
    dp[g][i] = min(dp[g - 1][i], min over tp <= g, k <= i of max(dp[g - tp][k], end_tp(k, i)))

is the least makespan of the first `i` trajectories on `g` GPUs: the same optimum as the exact joint
planner's by a table instead of a search on the makespan.
"""

from collections.abc import Mapping

import numpy as np

from heddle_core.estimate.group_cost import FloatArray, IntArray, SegmentCost
from heddle_core.ids import EngineShape
from heddle_core.solve.group_plan import GroupPlan, one_class, shapes_that_fit
from heddle_core.solve.presorted import cross


def libra_dp(
    costs: Mapping[EngineShape, SegmentCost], cuts: IntArray, pools: Mapping[str, int]
) -> GroupPlan:
    """Least makespan with groups that begin and end at `cuts`, on the GPUs of `pools`.

    O(gpus * degrees * u log u) time and O(gpus * u) memory for `u` cuts. `bound_s` is proven for
    plans on the same cuts. Raises ValueError when no shape fits, or there are several GPU classes.
    """
    gpus = one_class(pools, costs)
    of_degree = {shape.gpus: shape for shape in shapes_that_fit(costs, gpus)}
    degrees = list(of_degree)
    units = len(cuts) - 1
    here = np.arange(units + 1, dtype=np.int32)
    rows: list[FloatArray] = [np.where(here == 0, 0.0, np.inf)]
    starts: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    used: list[np.ndarray[tuple[int], np.dtype[np.int16]]] = []
    for g in range(1, gpus + 1):
        row = rows[-1].copy()
        start, degree = here.copy(), np.zeros(units + 1, dtype=np.int16)
        for tp in degrees:
            if tp > g:
                break
            tried, k = cross(rows[-tp], costs[of_degree[tp]], cuts)
            better = tried < row
            row[better], start[better], degree[better] = tried[better], k[better], tp
        rows.append(row)
        if len(rows) > degrees[-1]:
            rows.pop(0)
        starts.append(start)
        used.append(degree)
    shapes: list[EngineShape] = []
    bounds = [int(cuts[units])]
    g, i = gpus, units
    while g and i:
        tp = int(used[g - 1][i])
        if tp:
            i = int(starts[g - 1][i])
            shapes.append(of_degree[tp])
            bounds.append(int(cuts[i]))
        g -= tp or 1
    makespan_s = float(rows[-1][units])
    return GroupPlan(
        shapes=tuple(reversed(shapes)),
        bounds=tuple(reversed(bounds)),
        makespan_s=makespan_s,
        bound_s=makespan_s,
    )
