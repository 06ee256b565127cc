"""A portfolio is judged by simulation, and refinement never makes its best worse."""

import numpy as np
import pytest

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import context_costs, longest_first, work_of
from heddle_core.estimate.simulate_group import simulate_group
from heddle_core.solve.group_plan import GroupPlan
from heddle_core.solve.portfolio import Candidate, portfolio, refine, simulate_plan
from tests.core.shapes import h100, h100s

BY_SHAPE = {
    h100(1): StepCost(
        t0_s=0.011, t1_s=5e-5, t2_s=4.7e-8, prefill_s=4e-5, kv_capacity_tokens=259_000
    ),
    h100(4): StepCost(
        t0_s=0.0043, t1_s=5e-5, t2_s=1.2e-8, prefill_s=1e-5, kv_capacity_tokens=1_550_000
    ),
}


def test_the_best_candidate_comes_first_and_its_end_is_the_simulations() -> None:
    output = np.minimum(np.random.default_rng(0).lognormal(7.8, 1.1, 200), 40_000)
    work = work_of(output, context_tokens=500, tool_s=5.0)
    found = portfolio(work, BY_SHAPE, h100s(8), max_running=50)
    ends = {candidate.name: candidate.simulated_s for candidate in found}
    assert list(ends.values()) == sorted(ends.values())
    assert {"exact-context", "level-context"} < set(ends)
    refined = [name for name in ends if name.endswith("-refined")]
    assert len(refined) == 2
    assert all(ends[name] <= ends[name.removesuffix("-refined")] for name in refined)
    best = found[0]
    assert sorted(best.order.tolist()) == list(range(200))
    assert sum(shape.tp for shape in best.plan.shapes) <= 8
    assert best.plan.bounds[-1] == 200
    again = simulate_plan(work.take(best.order), BY_SHAPE, best.plan, max_running=50)
    assert max(again) == pytest.approx(best.simulated_s)


def test_refinement_brings_a_badly_cut_plan_forward() -> None:
    output = np.minimum(np.random.default_rng(1).lognormal(8.2, 1.1, 300), 40_000)
    work = work_of(output, appended_tokens=0.5 * output, tool_s=5.0)
    order = longest_first(work, BY_SHAPE[h100(1)])
    costs = context_costs(work.take(order), BY_SHAPE, max_running=50)
    plan = GroupPlan(
        shapes=(h100(4), h100(4), h100(1), h100(1)), bounds=(0, 150, 160, 290, 300), makespan_s=0.0
    )
    ends = simulate_plan(work.take(order), BY_SHAPE, plan, max_running=50)
    bad = Candidate(name="bad", order=order, plan=plan, ends_s=ends)
    better = refine(bad, work, BY_SHAPE, costs, max_running=50, rounds=3)
    assert better.name == "bad-refined"
    assert better.plan.shapes == plan.shapes
    assert better.plan.bounds[-1] == 300
    assert better.simulated_s < 0.8 * bad.simulated_s


def test_degrees_too_large_for_the_gpus_are_left_out() -> None:
    found = portfolio(work_of([300.0, 200.0]), BY_SHAPE, h100s(2), max_running=4)
    assert all(set(candidate.plan.shapes) == {h100(1)} for candidate in found)
    assert "uniform-tp4" not in {candidate.name for candidate in found}


def test_one_engine_leaves_no_choice_but_its_degree() -> None:
    work = work_of([50.0, 400.0, 100.0])
    best = portfolio(work, {h100(1): BY_SHAPE[h100(1)]}, h100s(1), max_running=4)[0]
    assert best.order.tolist() == [1, 2, 0]
    assert best.plan.shapes == (h100(1),)
    expected = simulate_group(work.take(best.order), BY_SHAPE[h100(1)], max_running=4).end_s
    assert best.simulated_s == expected
