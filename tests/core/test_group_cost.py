"""Estimated ends of groups: closed forms against simulation, and what every cost must keep."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import (
    SegmentCost,
    Work,
    context_cost,
    context_costs,
    longest_first,
    solo_s,
    work_of,
)
from heddle_core.estimate.paper_cost import (
    mean_decoded_context,
    paper_costs,
    seconds_per_token,
    simulated_paper_costs,
    size_cost,
    tpot_by_batch,
)
from heddle_core.estimate.simulate_group import simulate_group

COST = StepCost(t0_s=0.011, t1_s=5e-5, t2_s=4.7e-8, prefill_s=4e-5, kv_capacity_tokens=259_000)
ROOMY = replace(COST, kv_capacity_tokens=10**9)


def drawn(seed: int, count: int, *, tools: float = 1.0, cost: StepCost = COST) -> Work:
    """A long-tailed rollout, longest first."""
    rng = np.random.default_rng(seed)
    output = np.minimum(rng.lognormal(7.8, 1.1, count), 40_000)
    work = work_of(
        output,
        context_tokens=rng.integers(200, 800, count),
        appended_tokens=0.3 * output,
        tool_s=tools * rng.gamma(2.0, 4.0, count),
    )
    return work.take(longest_first(work, cost))


def end_of(cost: SegmentCost, start: int, stop: int) -> float:
    return float(cost.end_s(np.array([start]), np.array([stop]))[0])


def test_two_members_by_hand() -> None:
    # 10 and 4 tokens, no context: 10 iterations of 1 s, 0.5 s for each of 14 tokens, and contexts
    # that average 5 and 2 tokens: 0.1 * (10 * 5 + 4 * 2).
    cost = StepCost(t0_s=1.0, t1_s=0.5, t2_s=0.1, prefill_s=0.0, kv_capacity_tokens=10**6)
    work = work_of([10, 4])
    closed = context_cost(work, cost, max_running=10)
    assert end_of(closed, 0, 2) == pytest.approx(10 + 7 + 5.8)
    assert simulate_group(work, cost, max_running=10).end_s == pytest.approx(22.8)


@settings(max_examples=25)
@given(seed=st.integers(0, 999), count=st.integers(1, 120), grain=st.sampled_from([0.01, 0.2]))
def test_closed_form_is_exact_without_waiting_and_tools(
    seed: int, count: int, grain: float
) -> None:
    work = drawn(seed, count, tools=0.0, cost=ROOMY)
    # All decode in step, so the last to end is who has most to decode, wherever it stands.
    assume(work.output_tokens[0] == work.output_tokens.max())
    closed = context_cost(work, ROOMY, max_running=1000)
    simulated = simulate_group(work, ROOMY, max_running=1000, grain=grain)
    assert not simulated.waited
    assert end_of(closed, 0, count) == pytest.approx(simulated.end_s, rel=1e-9)


@pytest.mark.parametrize(
    ("start", "stop", "tools", "error"),
    [(0, 40, 0.0, 0.08), (50, 200, 0.0, 0.08), (0, 100, 1.0, 0.08), (200, 500, 10.0, 0.12)],
)
def test_closed_form_stays_near_the_simulation_when_members_wait_or_use_tools(
    start: int, stop: int, tools: float, error: float
) -> None:
    work = drawn(7, 600, tools=tools)
    closed = end_of(context_cost(work, COST, max_running=100), start, stop)
    group = work.take(slice(start, stop))
    simulated = simulate_group(group, COST, max_running=100, grain=0.02)
    assert simulated.waited
    assert closed == pytest.approx(simulated.end_s, rel=error)


def test_a_coarse_simulation_stays_near_a_fine_one() -> None:
    work = drawn(11, 300)
    fine = simulate_group(work, COST, max_running=100, grain=0.005).end_s
    assert simulate_group(work, COST, max_running=100).end_s == pytest.approx(fine, rel=0.05)


def test_one_alone_takes_its_solo_time_in_every_cost() -> None:
    work = drawn(2, 1)
    alone = float(solo_s(work, COST)[0])
    assert end_of(context_cost(work, COST, max_running=1), 0, 1) == pytest.approx(alone)
    # The simulation's mean field counts its own load by its share of time outside tools.
    assert simulate_group(work, COST, max_running=1).end_s == pytest.approx(alone, rel=3e-3)


def test_a_member_larger_than_the_kv_capacity_runs_alone_and_ends() -> None:
    small = replace(COST, kv_capacity_tokens=1000)
    work = work_of([5000, 4000], context_tokens=1200)
    simulated = simulate_group(work, small, max_running=8)
    assert simulated.waited
    assert simulated.end_s == pytest.approx(solo_s(work, small).sum(), rel=1e-6)


def test_context_growth_makes_long_groups_later_than_a_batch_only_estimate() -> None:
    work = drawn(4, 400, tools=0.0)
    tpot = tpot_by_batch(COST, batches=400, context_tokens=500, max_running=100)
    by_size = size_cost(work.output_tokens, tpot)
    aware = context_cost(work, COST, max_running=100)
    assert end_of(aware, 0, 100) > 1.5 * end_of(by_size, 0, 100)


@settings(max_examples=20)
@given(seed=st.integers(0, 999), count=st.integers(1, 120), max_running=st.sampled_from([16, 1000]))
def test_the_published_cost_of_a_simulated_group_is_its_simulation(
    seed: int, count: int, max_running: int
) -> None:
    output = np.sort(drawn(seed, count).output_tokens)[::-1]
    work = work_of(output, context_tokens=400)
    closed = simulated_paper_costs(work, {1: COST}, max_running=max_running)[1]
    context = mean_decoded_context(work)
    batch_only = replace(ROOMY, t1_s=COST.t1_s + COST.t2_s * context, t2_s=0.0, prefill_s=0.0)
    simulated = simulate_group(work_of(output), batch_only, max_running=max_running, grain=0.01)
    # Beyond the slots the closed form is the end under preemption, which is the earliest.
    assert end_of(closed, 0, count) <= simulated.end_s * (1 + 1e-9)
    assert end_of(closed, 0, count) >= simulated.end_s * (0.8 if simulated.waited else 1 - 1e-9)
    by_size = paper_costs(work, {1: COST}, max_running=max_running)[1]
    assert end_of(closed, 0, count) <= end_of(by_size, 0, count) * (1 + 1e-9)
    assert end_of(closed, 0, 1) == pytest.approx(end_of(by_size, 0, 1))


@given(batch=st.integers(1, 60), context=st.floats(0, 30_000), max_running=st.integers(1, 40))
def test_a_point_of_the_curve_is_that_of_the_curve(
    batch: int, context: float, max_running: int
) -> None:
    curve = tpot_by_batch(COST, batches=60, context_tokens=context, max_running=max_running)
    point = seconds_per_token(COST, batch, context_tokens=context, max_running=max_running)
    assert point == pytest.approx(float(curve[batch]), rel=1e-12)


def costs_of(work: Work) -> dict[str, SegmentCost]:
    lengths = np.sort(work.output_tokens)[::-1]
    tpot = tpot_by_batch(COST, batches=len(work), context_tokens=900, max_running=16)
    context = context_costs(work, {1: COST, 8: ROOMY}, max_running=16)
    return {
        "context": context[1],
        "context, other order": context[8],
        "by size": size_cost(lengths, tpot),
        "simulated": simulated_paper_costs(work_of(lengths), {1: COST}, max_running=16)[1],
    }


@settings(max_examples=20)
@given(seed=st.integers(0, 999), count=st.integers(1, 40), tools=st.sampled_from([0.0, 1.0, 50.0]))
def test_every_cost_is_monotone_in_the_segment_and_reach_inverts_it(
    seed: int, count: int, tools: float
) -> None:
    work = drawn(seed, count, tools=tools)
    starts, stops = np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij")
    for name, cost in costs_of(work).items():
        ends = np.where(stops >= starts, cost.end_s(starts, stops), 0.0)
        slack = 1e-9 * ends.max()
        assert np.all(np.diff(ends, axis=1) >= -slack), name
        assert np.all(np.diff(ends, axis=0) <= slack), name
        assert np.all(ends[np.arange(count + 1), np.arange(count + 1)] == 0), name
        assert cost.reach(count, 1.0) == count, name
        for start in range(0, count, 5):
            for share in (0.1, 0.5, 0.9, 2.0):
                limit = share * ends[start, count]
                stop = cost.reach(start, limit)
                assert start <= stop <= count, name
                assert ends[start, stop] <= limit * (1 + 1e-9), name
                assert stop == count or ends[start, stop + 1] >= limit * (1 - 1e-9), name


@pytest.mark.parametrize("share", [1e-4, 0.01, 0.3, 0.45, 0.9, 1.1])
def test_reach_is_the_same_for_groups_smaller_and_larger_than_it_expects(share: float) -> None:
    work = drawn(5, 3_000, tools=5.0)
    work = work.take(longest_first(work, COST))
    cost = context_cost(work, COST, max_running=64)
    stops = np.arange(3_001)
    for start in (0, 1, 500, 1_975, 1_976, 2_990):
        ends = cost.end_s(np.full(3_001, start), stops)
        limit = max(share * ends[-1], float(cost.solo[start]))
        assert cost.reach(start, limit) == stops[ends <= limit * (1 + 1e-12)].max()


def test_beyond_the_slots_members_take_turns() -> None:
    tpot = tpot_by_batch(COST, batches=8, context_tokens=0, max_running=4)
    assert tpot[8] == pytest.approx(2 * tpot[4])


def test_a_curve_that_falls_or_ends_early_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive and not fall"):
        size_cost(np.array([3.0, 2.0]), np.array([0.0, 2.0, 1.0]))
    with pytest.raises(ValueError, match="curve ends at batch 1"):
        size_cost(np.array([3.0, 2.0]), np.array([0.0, 2.0]))


def test_a_grain_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="grain"):
        simulate_group(work_of([1.0]), COST, max_running=1, grain=0.0)


def test_an_empty_group_ends_at_once() -> None:
    assert simulate_group(work_of([]), COST, max_running=1).end_s == 0.0
    assert len(context_cost(work_of([]), COST, max_running=1).solo) == 0
    assert paper_costs(work_of([]), {1: COST}, max_running=1)[1].reach(0, 1.0) == 0
