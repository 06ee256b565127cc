"""Libra's table: same optimum as the search, on all cuts or on some."""

import numpy as np
import pytest

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import SegmentCost, context_costs, longest_first, work_of
from heddle_core.ids import EngineShape
from heddle_core.solve.exact import exact_plan
from heddle_core.solve.group_plan import ends_s
from heddle_core.solve.libra_dp import libra_dp
from heddle_core.solve.presorted import aggregate_short, every_cut
from tests.core.shapes import h100, h100s


def drawn_costs(count: int) -> tuple[np.ndarray, dict[EngineShape, SegmentCost]]:
    by_shape = {
        h100(tp): StepCost(
            t0_s=0.011 / tp**0.6,
            t1_s=5e-5,
            t2_s=4.7e-8 / tp,
            prefill_s=4e-5 / tp,
            kv_capacity_tokens=400_000 * tp - 140_000,
        )
        for tp in (1, 2, 4, 8)
    }
    output = np.minimum(np.random.default_rng(9).lognormal(7.8, 1.1, count), 40_000)
    work = work_of(output, context_tokens=500, tool_s=5.0)
    work = work.take(longest_first(work, by_shape[h100(1)]))
    return work.output_tokens, context_costs(work, by_shape, max_running=100)


@pytest.mark.parametrize("gpus", [1, 7, 24])
def test_it_finds_what_the_exact_planner_finds(gpus: int) -> None:
    _, costs = drawn_costs(400)
    table = libra_dp(costs, every_cut(400), h100s(gpus))
    search = exact_plan(costs, 400, h100s(gpus))
    assert sum(shape.tp for shape in table.shapes) <= gpus
    assert sum(table.sizes()) == 400
    assert max(ends_s(costs, table.shapes, table.bounds)) == pytest.approx(table.makespan_s)
    assert search.bound_s <= table.makespan_s * (1 + 1e-9)
    assert search.makespan_s == pytest.approx(table.makespan_s, rel=2e-6)


def test_aggregated_it_is_never_better_and_hardly_worse() -> None:
    lengths, costs = drawn_costs(1500)
    cuts = aggregate_short(lengths, below=4000, unit=16)
    table = libra_dp(costs, cuts, h100s(32))
    assert set(table.bounds) <= set(cuts.tolist())
    best = exact_plan(costs, 1500, h100s(32))
    assert best.bound_s <= table.makespan_s <= 1.03 * best.makespan_s
