"""The planner of `heddle`: one shape or two by history, the portfolio where lengths are known."""

from dataclasses import replace

import numpy as np
import pytest

from heddle_core.estimate.cost import CostModel, StepCost
from heddle_core.ids import GroupId
from heddle_core.parts.planner import EqualProgressPlan
from heddle_core.plans import ResourcePlan
from heddle_core.solve.joint import JointProblem
from tests.core.ledgers import add_trajectory, history, ledger_of, policy_context
from tests.core.shapes import h100


def planned(remaining, *, gpus=8, tps=(1, 2, 4, 8), past=None, **changes):
    ledger = ledger_of()
    for i, tokens in enumerate(remaining):
        add_trajectory(ledger, f"t{i}", remaining_tokens=tokens, context_tokens=200)
    context = replace(policy_context(gpus=gpus, tps=tps, history=past), **changes)
    return EqualProgressPlan(context).plan(list(ledger.trajectories.values()), remaining)


def test_equal_predictions_give_engines_of_one_shape_and_no_homes():
    plan = planned([500.0] * 40, past=history())
    assert isinstance(plan, ResourcePlan)
    assert len({engine.shape for engine in plan.engines}) == 1
    assert sum(engine.shape.tp for engine in plan.engines) == 8
    assert plan.homes == ()
    assert plan.estimated_makespan_s > 0.0
    plan.check()


def test_the_shape_is_that_of_the_least_estimate():
    # A token on two GPUs costs more than half of what it costs on one: many trajectories keep all
    # engines full, and few want the least time for a token.
    narrow = StepCost(t0_s=0.010, t1_s=0.0010, t2_s=0.0, prefill_s=0.0, kv_capacity_tokens=10**9)
    wide = replace(narrow, t0_s=0.006, t1_s=0.0009)
    cost = CostModel(
        by_shape={h100(1): narrow, h100(2): wide}, transfer_fixed_s=0.0, transfer_s_per_token=0.0
    )
    few, many = (
        planned(
            [500.0] * n, tps=(1, 2), past=history(), cost=cost, max_running=512, engine_start_s=60.0
        )
        for n in (2, 4_000)
    )
    assert [e.shape for e in few.engines] == [h100(2)] * 4
    assert [e.shape for e in many.engines] == [h100(1)] * 8


def test_known_lengths_are_planned_by_the_portfolio():
    lengths = list(history().output_quantiles)
    plan = planned(lengths, past=history())
    assert isinstance(plan, JointProblem)
    assert plan.solver == "portfolio"


def test_without_trajectories_the_portfolio_plans():
    assert isinstance(planned([], past=history()), JointProblem)
    assert isinstance(planned([]), JointProblem)


def test_without_history_equal_predictions_give_one_shape_and_no_estimate():
    plan = planned([500.0] * 40)
    assert isinstance(plan, ResourcePlan)
    assert len({engine.shape for engine in plan.engines}) == 1
    assert plan.estimated_makespan_s is None


def test_without_history_known_lengths_are_planned_by_the_portfolio():
    assert isinstance(planned([100.0, 500.0, 2_500.0]), JointProblem)


def test_without_history_the_shape_is_the_least_bad_for_short_and_long_outputs():
    # Wide engines decode faster and prefill no faster for their GPUs: long prompts want narrow
    # engines whatever the outputs are, and few trajectories wide ones.
    narrow = StepCost(t0_s=0.010, t1_s=1e-5, t2_s=0.0, prefill_s=1e-4, kv_capacity_tokens=10**9)
    wide = replace(narrow, t0_s=0.006)
    cost = CostModel(
        by_shape={h100(1): narrow, h100(2): wide}, transfer_fixed_s=0.0, transfer_s_per_token=0.0
    )
    few, many = (
        planned([500.0] * n, tps=(1, 2), cost=cost, max_running=512, engine_start_s=600.0)
        for n in (2, 4_000)
    )
    assert {e.shape for e in few.engines} == {h100(2)}
    assert {e.shape for e in many.engines} == {h100(1)}


def test_one_very_long_trajectory_gets_a_wide_engine_beside_narrow_ones():
    narrow = StepCost(t0_s=0.010, t1_s=0.0010, t2_s=0.0, prefill_s=0.0, kv_capacity_tokens=10**9)
    wide = replace(narrow, t0_s=0.002, t1_s=0.0009)
    cost = CostModel(
        by_shape={h100(1): narrow, h100(4): wide}, transfer_fixed_s=0.0, transfer_s_per_token=0.0
    )
    lengths = tuple(100.0 + i for i in range(256))
    past = replace(history(), output_quantiles=lengths, longest_output_tokens=20_000.0)
    few_steps, many_steps = past, replace(past, step_output_tokens=20.0)
    slow_moves = replace(cost, transfer_fixed_s=1.0)

    def of(past, cost):
        return planned(
            [500.0] * 4_000,
            tps=(1, 4),
            past=past,
            cost=cost,
            max_running=512,
            engine_start_s=600.0,
        )

    # The long one gets there by moves: it needs steps for them, and tools that hide them.
    for each in (of(few_steps, cost), of(many_steps, slow_moves)):
        assert len({e.shape for e in each.engines}) == 1
    plan = of(many_steps, cost)
    assert [e.shape for e in plan.engines] == [h100(4)] + [h100(1)] * 4
    assert [e.engine for e in plan.engines] == [f"e{i}" for i in range(5)]
    assert plan.homes == ()


def test_where_no_degree_fits_the_gpus_the_portfolio_plans():
    assert isinstance(planned([500.0] * 4, gpus=1, tps=(2, 4), past=history()), JointProblem)


def test_gpus_that_a_degree_does_not_divide_get_narrower_engines():
    for past in (history(), None):
        plan = planned([500.0] * 8, gpus=13, past=past)
        assert [e.shape.tp for e in plan.engines] == [8, 4, 1]
    # GPUs that no shape fits stay without an engine.
    plan = planned([500.0] * 8, gpus=9, tps=(2, 4), past=history())
    assert sum(e.shape.tp for e in plan.engines) == 8


def test_one_trajectory_needs_no_search():
    assert isinstance(planned([500.0], past=history()), ResourcePlan)


@pytest.mark.parametrize(("between", "within"), [(1.0, 0.1), (0.7, 0.7), (0.05, 1.0)])
def test_a_history_of_some_prompts_has_the_lengths_of_their_next_samples(between, within):
    generator = np.random.default_rng(5)
    means = 7.0 + between * generator.standard_normal((80, 1))
    lengths = np.exp(means + within * generator.standard_normal((80, 408)))
    earlier, later = np.round(lengths[:, :8]), lengths[:, 8:]
    past = replace(
        history(),
        output_quantiles=tuple(np.quantile(earlier, (np.arange(50) + 0.5) / 50).tolist()),
        group_totals={GroupId(str(i)): own.astype(int).tolist() for i, own in enumerate(earlier)},
        longest_output_tokens=float(earlier.max()),
    )
    # Prompts that stand together because their samples were short, in the middle, or long.
    for own in np.array_split(np.argsort(earlier.mean(axis=1)), 4):
        found = past.of_prompts([GroupId(str(i)) for i in own])
        assert len(found.output_quantiles) == 50
        assert found.longest_output_tokens <= past.longest_output_tokens
        for at in (0.5, 0.9):
            expected = np.quantile(later[own], at)
            assert np.quantile(found.output_quantiles, at) == pytest.approx(expected, rel=0.2)
    # Where one of the prompts is not known, all count.
    assert past.of_prompts([GroupId("0"), GroupId("new")]) is past
    assert past.of_prompts([]) is past


@pytest.mark.parametrize(
    "samples",
    [[[9]], [[0], [0]], [[5, 5]] * 3, [[5, 5], [9, 9]], [[1], [40]], [[10**18, 1], [10**15, 7, 2]]],
)
@pytest.mark.parametrize("quantiles", [None, (5.0,) * 8, (0.0,), (3.0, 900.0)])
def test_a_history_of_some_prompts_has_finite_lengths_whatever_its_samples(samples, quantiles):
    every = [n for own in samples for n in own]
    past = replace(
        history(),
        output_quantiles=quantiles or tuple(np.quantile(every, (np.arange(9) + 0.5) / 9).tolist()),
        group_totals={GroupId(str(i)): own for i, own in enumerate(samples)},
        longest_output_tokens=float(max(every)),
    )
    found = past.of_prompts([GroupId("0")])
    lengths = np.array(found.output_quantiles)
    assert np.isfinite([*lengths, *found.tool_s_beyond, *found.appended_beyond]).all()
    assert len(lengths) == len(past.output_quantiles)
    assert (np.diff(lengths) >= 0.0).all()


def test_engines_change_between_rollouts_where_that_pays():
    narrow = StepCost(t0_s=0.010, t1_s=0.0010, t2_s=0.0, prefill_s=0.0, kv_capacity_tokens=10**9)
    wide = replace(narrow, t0_s=0.006, t1_s=0.0009)
    cost = CostModel(
        by_shape={h100(1): narrow, h100(2): wide}, transfer_fixed_s=0.0, transfer_s_per_token=0.0
    )

    def second(start_s: float) -> int:
        context = replace(
            policy_context(gpus=8, tps=(1, 2), history=history()),
            cost=cost,
            max_running=512,
            engine_start_s=start_s,
        )
        plan = EqualProgressPlan(context)
        for count in (4_000, 2):
            ledger = ledger_of()
            for i in range(count):
                add_trajectory(ledger, f"t{i}", remaining_tokens=500.0, context_tokens=200)
            made = plan.plan(list(ledger.trajectories.values()), [500.0] * count)
        return len(made.engines)

    assert second(start_s=0.1) == 4
    assert second(start_s=1e6) == 8
