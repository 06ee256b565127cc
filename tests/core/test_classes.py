"""Plans over GPUs of several classes: against every plan there is, and against one class."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_core.estimate.cost import CostModel, StepCost
from heddle_core.estimate.group_cost import SegmentCost, Work, context_costs, work_of
from heddle_core.estimate.paper_cost import size_cost
from heddle_core.ids import EngineShape
from heddle_core.parts.placement.presorted import Presorted
from heddle_core.parts.planner import EqualProgressPlan, FixedPlan, SearchedPlan, SharesPlan
from heddle_core.plans import ResourcePlan
from heddle_core.policy import PolicyContext
from heddle_core.solve import class_budgets, exact
from heddle_core.solve.class_shares import class_shares
from heddle_core.solve.exact import exact_plan
from heddle_core.solve.group_plan import ends_s
from heddle_core.solve.joint import JointProblem, Solver
from heddle_core.solve.portfolio import portfolio
from tests.core.ledgers import add_engine, add_trajectory, history, ledger_of
from tests.core.shapes import h100
from tests.core.test_exact import BY_SHAPE as OF_H100
from tests.core.test_exact import drawn


def h20(tp: int) -> EngineShape:
    return EngineShape("h20", tp)


TWO_CLASSES = OF_H100 | {
    h20(tp): replace(cost, t0_s=0.8 * cost.t0_s, prefill_s=6 * cost.prefill_s, t1_s=2 * cost.t1_s)
    for tp, cost in ((shape.tp, cost) for shape, cost in OF_H100.items())
}
NARROW = {shape: cost for shape, cost in TWO_CLASSES.items() if shape.tp <= 2}


def mixes(shapes: list[EngineShape], pools: Mapping[str, int]) -> Iterator[tuple[EngineShape, ...]]:
    """Every multiset of shapes that fits into the pools."""
    for engines in range(1, sum(pools.values()) + 1):
        for mix in combinations_with_replacement(shapes, engines):
            used = {gpu: sum(s.gpus for s in mix if s.gpu == gpu) for gpu in pools}
            if all(used[gpu] <= gpus for gpu, gpus in pools.items()):
                yield mix


def brute_s(
    costs: Mapping[EngineShape, SegmentCost], count: int, pools: Mapping[str, int]
) -> float:
    """Least makespan over every mix, every order of its engines, every contiguous cut."""
    best = np.inf
    for mix in mixes(sorted(costs), pools):
        for shapes in set(permutations(mix)):
            for inner in combinations_with_replacement(range(count + 1), len(shapes) - 1):
                best = min(best, max(ends_s(costs, shapes, (0, *inner, count))))
    return best


def check(shapes: tuple[EngineShape, ...], pools: Mapping[str, int]) -> None:
    for gpu, gpus in pools.items():
        assert sum(shape.gpus for shape in shapes if shape.gpu == gpu) <= gpus


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 5),
    pools=st.sampled_from([{"h100": 1, "h20": 1}, {"h100": 2, "h20": 1}, {"h20": 2, "h100": 2}]),
)
def test_no_contiguous_plan_of_two_classes_is_better(seed, count, pools):
    costs = context_costs(drawn(seed, count), NARROW, max_running=2)
    plan = exact_plan(costs, count, pools)
    least_s = brute_s(costs, count, pools)
    check(plan.shapes, pools)
    assert plan.bounds[0] == 0
    assert plan.bounds[-1] == count
    assert plan.makespan_s == pytest.approx(max(ends_s(costs, plan.shapes, plan.bounds)))
    assert least_s <= plan.makespan_s * (1 + 1e-9)
    assert plan.makespan_s <= least_s * (1 + 2e-4)
    assert plan.bound_s <= least_s * (1 + 1e-9)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 60), rows=st.integers(1, 7))
@settings(max_examples=30)
def test_two_names_of_one_class_plan_as_one_class_does(seed, count, rows):
    work = drawn(seed, count)
    one = exact_plan(context_costs(work, OF_H100, max_running=8), count, {"h100": 8})
    named = {EngineShape("other", s.tp): cost for s, cost in OF_H100.items() if s.tp <= 4}
    both = {s: cost for s, cost in OF_H100.items() if s.tp <= 4} | named
    two = exact_plan(
        context_costs(work, both, max_running=8), count, {"h100": rows, "other": 8 - rows}
    )
    # Engines of 8 GPUs, and those that would lie in both pools, are not there.
    assert two.makespan_s >= one.bound_s * (1 - 1e-9)
    ones = {s: cost for s, cost in both.items() if s.tp == 1}
    single = context_costs(work, {h100(1): OF_H100[h100(1)]}, max_running=8)
    assert exact_plan(
        context_costs(work, ones, max_running=8), count, {"h100": rows, "other": 8 - rows}
    ).makespan_s == pytest.approx(exact_plan(single, count, {"h100": 8}).makespan_s, rel=2e-4)


def test_a_plan_of_two_classes_by_hand():
    # By size: a group ends after its longest member times the curve. One trajectory of 100 tokens
    # and four of 10; a token takes 1 s on "h20" whatever the batch, and 2 s for each on "h100".
    lengths = np.array([100.0, 10.0, 10.0, 10.0, 10.0])
    costs = {
        h20(1): size_cost(lengths, np.array([0.0, 1.0, 1.5, 2.0, 2.5, 3.0])),
        h100(1): size_cost(lengths, np.array([0.0, 2.0, 4.0, 6.0, 8.0, 10.0])),
    }
    plan = exact_plan(costs, 5, {"h100": 1, "h20": 1})
    # The long one alone on the h20 ends after 100 s, the others on the h100 after 10 * 8 s.
    assert plan.shapes == (h20(1), h100(1))
    assert plan.bounds == (0, 1, 5)
    assert plan.makespan_s == pytest.approx(100.0)
    slow = {h100(1): costs[h100(1)]}
    assert exact_plan(slow, 5, {"h100": 2}).makespan_s == pytest.approx(200.0)


def test_a_narrow_engine_may_stand_behind_those_of_another_class():
    # Within 10 s: 100 tokens on two h100, 50 on an h20, 10 on the third h100, one each.
    lengths = np.array([100.0, 50.0, 10.0])

    def curve(token_s: float) -> SegmentCost:
        return size_cost(lengths, token_s * np.array([0.0, 1.0, 9.0, 99.0]))

    costs = {h100(1): curve(1.0), h100(2): curve(0.1), h20(1): curve(0.2)}
    plan = exact_plan(costs, 3, {"h100": 3, "h20": 1})
    assert plan.shapes == (h100(2), h20(1), h100(1))
    assert plan.makespan_s == pytest.approx(10.0, rel=2e-4)
    idle = exact_plan(costs, 1, {"h100": 3, "h20": 1})
    assert idle.shapes == (h100(2),)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 4), share=st.floats(0.3, 1.5), data=st.data()
)
def test_the_table_finds_a_plan_exactly_where_there_is_one(seed, count, share, data):
    pools = data.draw(st.sampled_from([{"h100": 1, "h20": 2}, {"h20": 1, "h100": 2}]))
    costs = context_costs(drawn(seed, count), NARROW, max_running=2)
    least_s = brute_s(costs, count, pools)
    limit_s = least_s * (share + 1e-9)
    found = class_budgets.TwoBudgets(costs, pools).plan(0, count, limit_s)
    assert (found is not None) == (share >= 1.0)
    if found is not None:
        check(found[0], pools)
        assert found[1][0] == 0
        assert found[1][-1] == count
        assert max(ends_s(costs, *found)) <= limit_s * (1 + 1e-9)


def test_a_class_that_is_no_good_takes_nothing():
    slow = replace(OF_H100[h100(1)], t0_s=100.0, t1_s=100.0)
    by_shape, pools = {h100(1): OF_H100[h100(1)], h20(1): slow}, {"h100": 1, "h20": 1}
    work = drawn(5, 8)
    shares = class_shares(work, by_shape, pools, max_running=4, known_s=1e9)
    assert len(shares["h20"]) == 0
    assert portfolio(work, by_shape, pools, max_running=4)[0].plan.bounds[-1] == 8


def test_little_kv_leaves_each_class_its_roomiest_shapes():
    tight = {s: replace(c, kv_capacity_tokens=10 * s.tp) for s, c in TWO_CLASSES.items()}
    roomy = {s: c if s.gpu == "h100" else tight[s] for s, c in TWO_CLASSES.items()}
    context = replace(
        two_classes(past=True),
        cost=CostModel(by_shape=roomy, transfer_fixed_s=0.1, transfer_s_per_token=1e-6),
    )
    ledger = ledger_of()
    add_trajectory(ledger, "a", remaining_tokens=0.0, context_tokens=100)
    plans = SearchedPlan(context, solver="anneal", least_full_slots=0.25)
    known = plans.plan(list(ledger.trajectories.values()), [500.0]).by_shape
    assert {s for s in known if s.gpu == "h20"} == {h20(8)}
    assert {s for s in known if s.gpu == "h100"} == {s for s in TWO_CLASSES if s.gpu == "h100"}


def test_presorted_gives_the_longest_to_the_quickest_engine_of_all_classes():
    ledger = ledger_of()
    for number, shape in enumerate((h100(2), h20(1), h20(2))):
        add_engine(ledger, f"e{number}", shape.tp).shape = shape
    for i in range(30):
        add_trajectory(ledger, f"t{i}", remaining_tokens=100.0 + 50 * i, context_tokens=200)
    ts = list(ledger.trajectories.values())
    context = replace(two_classes(past=False), max_running=16)
    homes = Presorted(context).assign(ts, [100.0 + 50 * i for i in range(30)], ledger)
    assert homes[-1] == "e2", "a token alone takes the least time on two H20"
    assert len(dict.fromkeys(homes)) == 3


def opposed(count: int) -> Work:
    """As many that prefill much as that decode much, which the order of lengths mixes."""
    number = np.arange(count)
    much = number % 2 == 0
    return work_of(
        np.where(much, 20.0, 300.0 + number),
        context_tokens=np.where(much, 59_000.0 + 160.0 * number, 100.0),
    )


def test_giving_each_class_its_own_kind_may_beat_every_contiguous_plan():
    prefills = StepCost(
        t0_s=1e-3, t1_s=0.02, t2_s=0.0, prefill_s=1e-4, kv_capacity_tokens=10_000_000
    )
    decodes = replace(prefills, t1_s=1e-4, prefill_s=3e-3)
    by_shape, pools = {h100(1): prefills, h20(1): decodes}, {"h100": 1, "h20": 1}
    work = opposed(12)
    costs = context_costs(work, by_shape, max_running=64)
    contiguous = exact_plan(costs, len(work), pools)
    shares = class_shares(work, by_shape, pools, max_running=64, known_s=contiguous.makespan_s)
    assert sorted(np.concatenate(list(shares.values())).tolist()) == list(range(12))
    assert set(shares["h100"].tolist()) == {0, 2, 4, 6, 8, 10}
    apart = max(
        exact_plan(
            context_costs(work.take(index), {shape: by_shape[shape]}, max_running=64),
            len(index),
            {shape.gpu: 1},
        ).makespan_s
        for shape, index in ((h100(1), shares["h100"]), (h20(1), shares["h20"]))
    )
    assert apart < 0.7 * contiguous.bound_s
    best = portfolio(work, by_shape, pools, max_running=64)[0]
    assert best.name == "by-class"


@given(seed=st.integers(0, 10**6), limit_s=st.floats(1.0, 5e3))
def test_reaches_is_reach_of_each_start(seed, limit_s):
    work = drawn(seed, 40)
    curve = np.linspace(0.01, 0.2, 41)
    for cost in (
        *context_costs(work, OF_H100, max_running=4).values(),
        size_cost(np.sort(work.output_tokens)[::-1], np.append(0.0, curve)),
    ):
        starts = np.arange(len(work) + 1)
        assert cost.reaches(starts, limit_s).tolist() == [
            cost.reach(int(s), limit_s) for s in starts
        ]


@pytest.mark.parametrize("pools", [{"h100": 4, "h20": 4, "a100": 4}, {"h100": 4, "h20": 4}])
def test_three_classes_and_large_tables_take_turns(pools, monkeypatch):
    monkeypatch.setattr(exact, "MOST_STATES", 1)
    work = drawn(3, 50)
    by_shape = {
        EngineShape(gpu, s.tp): cost for gpu in pools for s, cost in OF_H100.items() if s.tp <= 4
    }
    costs = context_costs(work, by_shape, max_running=8)
    plan = exact_plan(costs, len(work), pools)
    check(plan.shapes, pools)
    assert plan.bounds[-1] == len(work)
    assert plan.bound_s == 0.0
    alone = exact_plan(
        context_costs(work, {s: c for s, c in OF_H100.items() if s.tp <= 4}, max_running=8),
        len(work),
        {"h100": 4},
    )
    assert plan.makespan_s < alone.makespan_s
    named = [shape.gpu for shape in plan.shapes]
    assert len(dict.fromkeys(named)) == sum(a != b for a, b in pairwise(named)) + 1


def test_up_to_three_classes_every_order_of_them_is_tried():
    base = OF_H100[h100(1)]
    slower = {"a": 1.0, "b": 1.7, "c": 3.0}
    costs = {
        EngineShape(gpu, 1): replace(base, t0_s=by * base.t0_s, t1_s=base.t1_s / by)
        for gpu, by in slower.items()
    }
    by_shape = context_costs(drawn(1, 40), costs, max_running=4)
    limits_s = np.geomspace(1.0, 1e4, 200)
    planned = {
        tuple(
            class_budgets.OneAfterAnother(by_shape, dict.fromkeys(order, 1)).plan(0, 40, limit_s)
            is not None
            for limit_s in limits_s
        )
        for order in permutations(slower)
    }
    assert len(planned) == 1
    assert set(planned.pop()) == {True, False}


def test_more_than_three_classes_try_two_orders():
    pools = dict.fromkeys("abcd", 1)
    costs = {EngineShape(gpu, 1): cost for gpu, cost in product("abcd", [OF_H100[h100(1)]])}
    work = drawn(1, 9)
    turns = class_budgets.OneAfterAnother(context_costs(work, costs, max_running=4), pools)
    assert turns.plan(0, 9, 1e9) is not None
    assert exact_plan(context_costs(work, costs, max_running=4), 9, pools).bounds[-1] == 9


@pytest.mark.parametrize("solver", ["exact", "portfolio", "anneal", "libra-dp"])
def test_every_solver_uses_both_classes_and_homes_all(solver: Solver):
    plan = problem(solver).solve()
    check(tuple(e.shape for e in plan.engines), {"h100": 8, "h20": 6})
    homed = [t for _, ts in plan.homes for t in ts]
    assert sorted(homed) == sorted(f"t{i}" for i in range(120))
    used = {e.shape.gpu for e in plan.engines for name, ts in plan.homes if name == e.engine and ts}
    assert used == {"h100", "h20"}
    for gpu, gpus in (("h100", 8), ("h20", 6)):
        assert sum(e.shape.gpus for e in plan.engines if e.shape.gpu == gpu) == gpus


def problem(solver: Solver, count: int = 120) -> JointProblem:
    context = two_classes(past=True)
    ledger = ledger_of()
    for i in range(count):
        add_trajectory(ledger, f"t{i}", remaining_tokens=0.0, context_tokens=100 + 37 * (i % 11))
    ts = list(ledger.trajectories.values())
    remaining = [300.0 + 91.0 * i for i in range(count)]
    return SearchedPlan(context, solver=solver, assignment="planner").plan(ts, remaining)


def two_classes(*, past: bool) -> PolicyContext:
    return PolicyContext(
        pools={"h100": 8, "h20": 6},
        shape=h100(2),
        other_shapes=(h20(1),),
        shape_choices=tuple(TWO_CLASSES),
        max_running=16,
        cost=CostModel(by_shape=TWO_CLASSES, transfer_fixed_s=0.1, transfer_s_per_token=1e-6),
        history=history() if past else None,
    )


def test_no_trajectory_in_time_gives_engines_of_the_least_shapes():
    plan = problem("portfolio", count=0).solve()
    assert [e.shape for e in plan.engines] == [h100(1)] * 8 + [h20(1)] * 6


@pytest.mark.parametrize("past", [True, False])
def test_equal_progress_gives_each_class_a_shape_of_its_own(past):
    ledger = ledger_of()
    for i in range(60):
        add_trajectory(ledger, f"t{i}", remaining_tokens=500.0, context_tokens=200)
    plan = EqualProgressPlan(two_classes(past=past)).plan(
        list(ledger.trajectories.values()), [500.0] * 60
    )
    assert isinstance(plan, ResourcePlan)
    for gpu, gpus in (("h100", 8), ("h20", 6)):
        assert sum(e.shape.gpus for e in plan.engines if e.shape.gpu == gpu) == gpus


def test_unplanned_engines_have_the_shape_of_their_class():
    plan = FixedPlan(two_classes(past=False)).plan((), ())
    assert isinstance(plan, ResourcePlan)
    assert [e.shape for e in plan.engines] == [h100(2)] * 4 + [h20(1)] * 6


def test_shares_divide_each_class():
    plan = SharesPlan(two_classes(past=False)).plan((), ())
    assert isinstance(plan, ResourcePlan)
    tps = {gpu: [e.shape.tp for e in plan.engines if e.shape.gpu == gpu] for gpu in ("h100", "h20")}
    assert tps == {"h100": [4, 2, 1, 1], "h20": [2, 2, 1, 1]}


def test_a_plan_of_two_classes_uses_gpus_that_an_exact_one_leaves_idle():
    # The longest fixes the makespan, so that an exact plan needs few engines for the others.
    work = work_of([20_000.0, *np.linspace(6_000.0, 1_000.0, 60)], tool_s=2.0)
    pools = {"h100": 12, "h20": 8}
    found = portfolio(work, TWO_CLASSES, pools, max_running=50)
    by_name = {candidate.name: candidate for candidate in found}
    plain, level = by_name["exact-context"], by_name["level-context"]
    used = [sum(shape.gpus for shape in each.plan.shapes) for each in (plain, level)]
    assert used[0] < used[1] <= 20
    for gpu, gpus in pools.items():
        assert sum(shape.gpus for shape in level.plan.shapes if shape.gpu == gpu) <= gpus
    assert sorted(level.order.tolist()) == list(range(61))
    assert level.plan.bounds[-1] == 61
    assert level.plan.makespan_s <= plain.plan.makespan_s * (1 + 1e-2)
    assert np.mean(level.ends_s) < np.mean(plain.ends_s)
    assert found[0].simulated_s == min(candidate.simulated_s for candidate in found)
    # Where an exact plan uses all GPUs there is nothing to level.
    few = portfolio(work, NARROW, {"h100": 1, "h20": 1}, max_running=50)
    assert "level-context" not in {candidate.name for candidate in few}


def test_levelling_may_begin_with_a_known_plan_and_end_with_idle_gpus():
    work = work_of([20_000.0, *np.linspace(6_000.0, 1_000.0, 60)], tool_s=2.0)
    costs = context_costs(work, TWO_CLASSES, max_running=50)
    pools = {"h100": 12, "h20": 8}
    known = exact_plan(costs, len(work), pools)
    assert exact.level_plan(costs, len(work), pools, known=known) == exact.level_plan(
        costs, len(work), pools
    )
    short = exact.level_plan(costs, len(work), pools, rounds=20, known=known, idle_only=True)
    assert sum(shape.gpus for shape in short.shapes) == 20
    assert short.bounds[-1] == len(work)
