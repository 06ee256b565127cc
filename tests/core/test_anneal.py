"""Annealing: moves conserve GPUs, the schedule is as published, equal seeds give equal plans."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_core.estimate.group_cost import SegmentCost
from heddle_core.estimate.paper_cost import SizeCost, size_cost
from heddle_core.ids import EngineShape
from heddle_core.solve.anneal import (
    anneal_plan,
    merge,
    move,
    random_degrees,
    redistribute,
    split,
)
from heddle_core.solve.exact import exact_plan
from heddle_core.solve.presorted import Partition, every_cut, presorted_dp, search_partition
from tests.core.shapes import h100, h100s

DEGREES = (1, 2, 4, 8)


def small_costs() -> dict[EngineShape, SizeCost]:
    rng = np.random.default_rng(0)
    lengths = np.sort(np.minimum(rng.lognormal(7, 1.2, 120), 40_000))[::-1]
    batch = np.arange(121.0)
    return {h100(tp): size_cost(lengths, 0.01 / tp**0.6 + 2e-4 * batch / tp**0.8) for tp in DEGREES}


@given(gpus=st.integers(1, 40), seed=st.integers(0, 99))
def test_every_move_conserves_gpus_and_keeps_degrees_allowed_and_sorted(
    gpus: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    state = random_degrees(DEGREES, gpus, rng)
    for _ in range(20):
        assert sum(state) == gpus
        assert set(state) <= set(DEGREES)
        assert list(state) == sorted(state, reverse=True)
        state = move(state, DEGREES, rng)


def test_split_merge_and_redistribute_do_what_they_say() -> None:
    rng = np.random.default_rng(0)
    assert split((4,), DEGREES, rng) == (2, 2)
    assert merge((2, 2), DEGREES, rng) == (4,)
    assert redistribute((4, 1, 1), DEGREES, rng) == (2, 2, 2)
    assert redistribute((3, 1), (1, 2, 3), rng) == (2, 2)


def test_moves_that_a_state_does_not_allow_are_none_and_a_stuck_state_stays() -> None:
    rng = np.random.default_rng(0)
    assert split((1, 1), DEGREES, rng) is None
    assert merge((8,), DEGREES, rng) is None
    assert redistribute((8,), DEGREES, rng) is None
    assert redistribute((1, 1), DEGREES, rng) is None
    assert move((8,), (8,), rng) == (8,)


def test_equal_seeds_give_equal_plans() -> None:
    costs = small_costs()
    one = anneal_plan(costs, 120, h100s(16), seed=5)
    assert one == anneal_plan(costs, 120, h100s(16), seed=5)


def test_the_schedule_makes_131_evaluations_after_the_first() -> None:
    costs = small_costs()
    asked: list[int] = []

    def place(engines: Sequence[SegmentCost]) -> Partition:
        asked.append(len(engines))
        return search_partition(engines, 120, tolerance=1e-6)

    anneal_plan(costs, 120, h100s(16), seed=0, place=place)
    assert len(asked) == 1 + 131


def test_with_the_presorted_dp_it_comes_near_the_optimum_and_not_below() -> None:
    costs = small_costs()
    cuts = every_cut(120)
    exact = exact_plan(costs, 120, h100s(16))
    found = [
        anneal_plan(
            costs, 120, h100s(16), seed=seed, place=lambda engines: presorted_dp(engines, cuts)
        )
        for seed in range(3)
    ]
    for plan in found:
        assert sum(shape.tp for shape in plan.shapes) == 16
        assert plan.makespan_s >= exact.bound_s
    assert min(plan.makespan_s for plan in found) <= 1.1 * exact.makespan_s


@pytest.mark.parametrize(("cooling", "stop_ratio"), [(1.0, 0.5), (0.9, 0.0)])
def test_a_schedule_that_never_ends_is_refused(cooling: float, stop_ratio: float) -> None:
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        anneal_plan(small_costs(), 120, h100s(16), seed=0, cooling=cooling, stop_ratio=stop_ratio)
