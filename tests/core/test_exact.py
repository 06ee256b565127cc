"""The exact joint planner against every plan there is, and against the other solvers."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations_with_replacement, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import (
    SegmentCost,
    Work,
    context_costs,
    longest_first,
    work_of,
)
from heddle_core.estimate.paper_cost import paper_costs, size_cost
from heddle_core.ids import EngineShape
from heddle_core.solve.anneal import anneal_plan
from heddle_core.solve.exact import exact_plan, level_plan
from heddle_core.solve.group_plan import GroupPlan, ends_s
from heddle_core.solve.libra_dp import libra_dp
from heddle_core.solve.portfolio import portfolio
from heddle_core.solve.presorted import every_cut
from tests.core.shapes import h100, h100s

BY_SHAPE = {
    h100(tp): StepCost(
        t0_s=t0_s, t1_s=5e-5, t2_s=4.7e-8 / tp, prefill_s=4e-5 / tp, kv_capacity_tokens=kv_tokens
    )
    for tp, t0_s, kv_tokens in (
        (1, 0.011, 259_000),
        (2, 0.0066, 690_000),
        (4, 0.0043, 1_550_000),
        (8, 0.0032, 3_270_000),
    )
}


def drawn(seed: int, count: int) -> Work:
    rng = np.random.default_rng(seed)
    output = np.minimum(rng.lognormal(7.8, 1.1, count), 40_000)
    work = work_of(
        output,
        context_tokens=500,
        appended_tokens=0.3 * output,
        tool_s=rng.gamma(2.0, 4.0, count),
    )
    return work.take(longest_first(work, BY_SHAPE[h100(1)]))


def mixes(degrees: Sequence[int], gpus: int) -> Iterator[tuple[int, ...]]:
    """Every multiset of degrees that fits on `gpus`."""
    for engines in range(1, gpus // min(degrees) + 1):
        for mix in combinations_with_replacement(degrees, engines):
            if sum(mix) <= gpus:
                yield mix


def brute_plan(costs: Mapping[EngineShape, SegmentCost], count: int, gpus: int) -> float:
    """Least makespan over every mix, every order of its engines, every contiguous cut."""
    best = np.inf
    for mix in mixes(sorted(shape.tp for shape in costs), gpus):
        for tps in set(permutations(mix)):
            shapes = [h100(tp) for tp in tps]
            for inner in combinations_with_replacement(range(count + 1), len(tps) - 1):
                best = min(best, max(ends_s(costs, shapes, (0, *inner, count))))
    return best


def check(plan: GroupPlan, costs: Mapping[EngineShape, SegmentCost], count: int, gpus: int) -> None:
    assert sum(shape.tp for shape in plan.shapes) <= gpus
    assert plan.bounds[0] == 0
    assert plan.bounds[-1] == count
    assert sum(plan.sizes()) == count
    assert plan.makespan_s == pytest.approx(max(ends_s(costs, plan.shapes, plan.bounds)), rel=1e-12)


@settings(max_examples=15)
@given(seed=st.integers(0, 999), count=st.integers(1, 6), gpus=st.integers(1, 5))
@pytest.mark.parametrize("kind", ["context", "paper"])
def test_exact_and_libra_equal_brute_force_over_mixes_orders_and_cuts(
    kind: str, seed: int, count: int, gpus: int
) -> None:
    work = drawn(seed, count)
    estimate = context_costs if kind == "context" else paper_costs
    costs = estimate(work, {h100(tp): BY_SHAPE[h100(tp)] for tp in (1, 2, 4)}, max_running=3)
    expected = brute_plan(costs, count, gpus)
    exact = exact_plan(costs, count, h100s(gpus))
    libra = libra_dp(costs, every_cut(count), h100s(gpus))
    for plan in (exact, libra):
        check(plan, costs, count, gpus)
        assert plan.makespan_s == pytest.approx(expected, rel=2e-6)
        assert plan.bound_s <= expected * (1 + 1e-9)


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    steps=st.lists(st.integers(0, 5), min_size=5, max_size=5),
    gpus=st.integers(1, 4),
)
def test_no_assignment_at_all_beats_the_exact_plan_under_the_by_size_cost(
    lengths: list[int], steps: list[int], gpus: int
) -> None:
    descending = np.array(sorted(lengths, reverse=True), dtype=np.float64)
    curves = {
        1: np.concatenate(([0.0], 8.0 + np.cumsum(steps))),
        2: np.concatenate(([0.0], 5.0 + np.cumsum(steps[::-1]) / 2)),
    }
    costs = {h100(tp): size_cost(descending, tpot) for tp, tpot in curves.items()}
    best = np.inf
    for mix in mixes((1, 2), gpus):
        for owners in product(range(len(mix)), repeat=len(lengths)):
            ends = [0.0]
            for engine, tp in enumerate(mix):
                mine = descending[np.array(owners) == engine]
                if len(mine):
                    ends.append(float(mine[0] * curves[tp][len(mine)]))
            best = min(best, max(ends))
    assert exact_plan(costs, len(lengths), h100s(gpus)).makespan_s == pytest.approx(best, rel=2e-6)


@pytest.mark.parametrize("estimate", [context_costs, paper_costs])
def test_annealing_never_beats_the_exact_plan(estimate: object) -> None:
    work = drawn(1, 6400)
    make = partial(context_costs if estimate is context_costs else paper_costs, work)
    costs = make(BY_SHAPE, max_running=100)
    exact = exact_plan(costs, 6400, h100s(64))
    check(exact, costs, 6400, 64)
    assert exact.makespan_s <= exact.bound_s * (1 + 1e-6)
    for seed in range(2):
        annealed = anneal_plan(costs, 6400, h100s(64), seed=seed, cooling=0.8)
        check(annealed, costs, 6400, 64)
        assert annealed.makespan_s >= exact.bound_s


def test_more_gpus_or_more_degrees_never_hurt() -> None:
    work = drawn(2, 500)
    costs = context_costs(work, BY_SHAPE, max_running=100)
    found = [exact_plan(costs, 500, h100s(gpus)).makespan_s for gpus in (4, 8, 9, 16, 32)]
    assert all(a >= b * (1 - 2e-6) for a, b in pairwise(found))
    alone = {h100(1): costs[h100(1)]}
    assert (
        exact_plan(alone, 500, h100s(16)).makespan_s >= exact_plan(costs, 500, h100s(16)).makespan_s
    )


def test_levelling_keeps_the_makespan_and_brings_later_groups_forward() -> None:
    work = drawn(3, 2000)
    costs = context_costs(work, BY_SHAPE, max_running=100)
    exact = exact_plan(costs, 2000, h100s(64))
    levelled = level_plan(costs, 2000, h100s(64))
    check(levelled, costs, 2000, 64)
    assert levelled.makespan_s == pytest.approx(exact.makespan_s, rel=2e-6)
    assert levelled.bound_s == exact.bound_s
    behind = ends_s(costs, levelled.shapes, levelled.bounds)[8:]
    assert max(behind) <= exact.makespan_s * (1 + 1e-6)


def test_gpus_that_bring_nothing_stay_unused() -> None:
    work = work_of([100.0])
    costs = context_costs(work, BY_SHAPE, max_running=4)
    plan = exact_plan(costs, 1, h100s(64))
    assert plan.shapes == (h100(8),)
    assert plan.makespan_s == plan.bound_s
    assert libra_dp(costs, every_cut(1), h100s(64)).shapes == (h100(8),)
    assert level_plan(costs, 1, h100s(64)).shapes == (h100(8),)


def test_an_empty_rollout_needs_no_engine() -> None:
    costs = context_costs(work_of([]), BY_SHAPE, max_running=4)
    assert exact_plan(costs, 0, h100s(8)).shapes == ()
    assert level_plan(costs, 0, h100s(8)).bounds == (0,)


def test_too_few_gpus_for_any_degree_is_said() -> None:
    costs = {h100(4): context_costs(work_of([1.0]), BY_SHAPE, max_running=4)[h100(4)]}
    with pytest.raises(ValueError, match=r"no TP degree of \[4\] fits on 3 GPUs"):
        exact_plan(costs, 1, h100s(3))
    with pytest.raises(ValueError, match=r"no TP degree of \[4\] fits on 3 GPUs"):
        libra_dp(costs, every_cut(1), h100s(3))
    with pytest.raises(ValueError, match=r"no TP degree of \[4\] fits on 3 GPUs"):
        anneal_plan(costs, 1, h100s(3), seed=0)


def test_no_finite_makespan_is_said() -> None:
    cost = size_cost(np.array([1e308, 1e308]), np.array([0.0, 1.0, 1e10]))
    with pytest.raises(ValueError, match="no finite makespan"):
        exact_plan({h100(1): cost}, 2, h100s(1))


@pytest.mark.parametrize(
    ("pools", "shapes"),
    [
        ({"h100": 4}, [EngineShape("h200", 1)]),
        ({"h100": 4}, [h100(1), EngineShape("h100", 1, "prefill")]),
    ],
)
def test_shapes_without_a_pool_or_with_a_role_are_refused_by_every_solver(pools, shapes) -> None:
    work = work_of([5.0, 3.0])
    by_shape = dict.fromkeys(shapes, BY_SHAPE[h100(1)])
    costs = context_costs(work, by_shape, max_running=4)
    for solve in (
        lambda: exact_plan(costs, 2, pools),
        lambda: level_plan(costs, 2, pools),
        lambda: anneal_plan(costs, 2, pools, seed=0),
        lambda: libra_dp(costs, every_cut(2), pools),
        lambda: portfolio(work, by_shape, pools, max_running=4),
    ):
        with pytest.raises(ValueError, match=r"have no pool|not of the roles"):
            solve()


def test_solvers_of_one_class_refuse_several() -> None:
    work, pools = work_of([5.0, 3.0]), {"h100": 4, "h200": 4}
    costs = context_costs(work, {h100(1): BY_SHAPE[h100(1)]}, max_running=4)
    for solve in (
        lambda: anneal_plan(costs, 2, pools, seed=0),
        lambda: libra_dp(costs, every_cut(2), pools),
    ):
        with pytest.raises(ValueError, match="plans GPUs of one class"):
            solve()
