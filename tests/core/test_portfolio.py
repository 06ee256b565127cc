"""A portfolio is judged by simulation, and refinement never makes its best worse."""

from dataclasses import replace
from itertools import accumulate, pairwise
from unittest.mock import Mock

import numpy as np
import pytest

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import Work, context_costs, longest_first, work_of
from heddle_core.estimate.paper_cost import paper_costs
from heddle_core.estimate.simulate_group import simulate_group
from heddle_core.solve import portfolio as module
from heddle_core.solve.exact import exact_plan, level_plan
from heddle_core.solve.group_plan import GroupPlan, ends_s
from heddle_core.solve.portfolio import Candidate, PlanSimulation, portfolio, uniform_plan
from heddle_core.solve.presorted import search_partition
from tests.core.shapes import h100, h100s

BY_SHAPE = {
    h100(1): StepCost(
        t0_s=0.011, t1_s=5e-5, t2_s=4.7e-8, prefill_s=4e-5, kv_capacity_tokens=259_000
    ),
    h100(4): StepCost(
        t0_s=0.0043, t1_s=5e-5, t2_s=1.2e-8, prefill_s=1e-5, kv_capacity_tokens=1_550_000
    ),
}


def simulated(work: Work, order, plan: GroupPlan, max_running: int = 50) -> tuple[float, ...]:
    """Simulated end of every group."""
    ordered = work.take(order)
    return tuple(
        simulate_group(
            ordered.take(slice(start, stop)), BY_SHAPE[shape], max_running=max_running
        ).end_s
        for shape, (start, stop) in zip(plan.shapes, pairwise(plan.bounds), strict=True)
    )


def thorough(work: Work, gpus: int) -> Candidate:
    """The best candidate when every group of every plan is simulated: the rule written plainly."""
    count, pools = len(work), h100s(gpus)
    by_solo = longest_first(work, BY_SHAPE[h100(1)])
    by_output = np.argsort(-work.output_tokens, kind="stable")
    costs = context_costs(work.take(by_solo), BY_SHAPE, max_running=50)
    published = paper_costs(work.take(by_output), BY_SHAPE, max_running=50)
    plans = {
        "exact-context": (by_solo, exact_plan(costs, count, pools)),
        "level-context": (by_solo, level_plan(costs, count, pools)),
        "exact-paper": (by_output, exact_plan(published, count, pools)),
        "uniform-tp1": (by_solo, uniform_plan(costs, count, pools, h100(1))),
        "uniform-tp4": (by_solo, uniform_plan(costs, count, pools, h100(4))),
    }
    aware = {
        name: context_costs(work.take(order), BY_SHAPE, max_running=50)
        for name, (order, _) in plans.items()
    }
    estimated = {n: max(ends_s(aware[n], p.shapes, p.bounds)) for n, (_, p) in plans.items()}
    tried = [
        Candidate(name=name, order=order, plan=plan, ends_s=simulated(work, order, plan))
        for name, (order, plan) in plans.items()
        if estimated[name] <= 1.5 * min(estimated.values())
    ]
    tried.sort(key=lambda candidate: candidate.simulated_s)
    better = []
    for first in tried[:2]:
        best = now = replace(first, name=f"{first.name}-refined")
        for _ in range(3):
            ends = ends_s(aware[first.name], now.plan.shapes, now.plan.bounds)
            factors = [a / e if e > 0 else 1.0 for a, e in zip(now.ends_s, ends, strict=True)]
            each = [aware[first.name][shape] for shape in now.plan.shapes]
            found = search_partition(each, count, tolerance=1e-4, factors=factors)
            plan = replace(
                now.plan,
                bounds=(0, *accumulate(found.sizes)),
                makespan_s=found.makespan_s,
                bound_s=0.0,
            )
            now = replace(now, plan=plan, ends_s=simulated(work, now.order, plan))
            best = min(best, now, key=lambda candidate: candidate.simulated_s)
        better.append(best)
    return min([*better, *tried], key=lambda candidate: candidate.simulated_s)


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
    assert max(simulated(work, best.order, best.plan)) == best.simulated_s


@pytest.mark.parametrize("seed", range(12))
def test_what_is_not_simulated_would_not_have_been_the_best(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, gpus = int(rng.integers(5, 400)), int(rng.integers(4, 17))
    output = np.minimum(rng.lognormal(7.5, rng.uniform(0.1, 1.4), count), 40_000)
    work = work_of(
        output,
        context_tokens=rng.uniform(10, 4_000, count),
        appended_tokens=rng.uniform(0, 2) * output,
        tool_s=rng.uniform(0, 0.01) * output,
    )
    best, expected = portfolio(work, BY_SHAPE, h100s(gpus), max_running=50)[0], thorough(work, gpus)
    assert best.name == expected.name
    assert best.plan == expected.plan
    assert best.ends_s == expected.ends_s
    assert best.order.tolist() == expected.order.tolist()


def test_refinement_brings_a_badly_cut_plan_forward() -> None:
    output = np.minimum(np.random.default_rng(1).lognormal(8.2, 1.1, 300), 40_000)
    work = work_of(output, appended_tokens=0.5 * output, tool_s=5.0)
    order = longest_first(work, BY_SHAPE[h100(1)])
    simulation = PlanSimulation(work, order, BY_SHAPE, max_running=50)
    plan = GroupPlan(
        shapes=(h100(4), h100(4), h100(1), h100(1)), bounds=(0, 150, 160, 290, 300), makespan_s=0.0
    )
    bad = Candidate(name="bad", order=order, plan=plan, ends_s=simulated(work, order, plan))
    better = simulation.refine(bad, rounds=3)
    assert better.plan.shapes == plan.shapes
    assert better.plan.bounds[-1] == 300
    assert better.simulated_s < 0.8 * bad.simulated_s
    assert better.ends_s == simulated(work, order, better.plan)


def test_a_simulation_stops_at_a_group_that_ends_too_late() -> None:
    work = work_of([400.0, 300.0, 50.0])
    simulation = PlanSimulation(work, np.arange(3), BY_SHAPE, max_running=4)
    plan = GroupPlan(shapes=(h100(1), h100(1)), bounds=(0, 1, 3), makespan_s=0.0)
    ends = simulated(work, np.arange(3), plan, max_running=4)
    assert simulation.ends_s(plan, limit_s=0.99 * max(ends)) is None
    assert simulation.ends_s(plan, limit_s=max(ends)) == ends


def test_of_many_groups_some_are_simulated_and_the_others_interpolated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(2)
    work = work_of(np.minimum(rng.lognormal(7.5, 0.8, 4_000), 30_000), tool_s=3.0)
    order = longest_first(work, BY_SHAPE[h100(1)])
    plan = exact_plan(
        context_costs(work.take(order), BY_SHAPE, max_running=50), len(work), h100s(90)
    )
    assert len(set(plan.shapes)) == 2
    every = np.array(simulated(work, order, plan))
    for most, mean, largest in ((len(plan.shapes) // 3, 0.05, 0.2), (len(plan.shapes), 0.0, 0.0)):
        monkeypatch.setattr(module, "MOST_SIMULATED", most)
        counted = Mock(wraps=simulate_group)
        monkeypatch.setattr(module, "simulate_group", counted)
        found = PlanSimulation(work, order, BY_SHAPE, max_running=50).ends_s(plan)
        assert abs(counted.call_count - most) <= 2
        assert found is not None
        wrong = np.abs(np.array(found) / every - 1.0)
        assert wrong.mean() <= mean
        assert wrong.max() <= largest
        assert (wrong == 0.0).sum() >= counted.call_count


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
