from dataclasses import replace

import pytest

from heddle_core.estimate.cost import FillingCost
from tests.core.ledgers import policy_context, step_cost


def test_an_iteration_is_affine_in_batch_and_context():
    cost = step_cost(1)
    assert cost.iteration_s(0, 0) == cost.t0_s == 0.02
    assert cost.iteration_s(10, 5_000) == pytest.approx(0.02 + 10 * 2e-4 + 5_000 * 4e-8)


def test_with_experts_the_first_sequences_add_more():
    filling = FillingCost(t0_s=0.01, fill_s=1e-3, knee=8, t1_s=1e-4, t2_s=3e-8)
    cost = replace(step_cost(1), filling=filling)
    assert cost.iteration_s(4, 5_000) == pytest.approx(0.01 + 4 * 1.1e-3 + 5_000 * 3e-8)
    assert cost.iteration_s(100, 5_000) == pytest.approx(0.01 + 8e-3 + 100 * 1e-4 + 5_000 * 3e-8)
    for batch in (0, 3.5, 8, 20, 300):
        planes = (cost.below_knee, cost.beyond_knee)
        least = min(plane.iteration_s(batch, 9_000) for plane in planes)
        assert cost.iteration_s(batch, 9_000) == pytest.approx(least)


def test_a_dense_model_has_one_plane():
    cost = step_cost(2)
    assert cost.below_knee is cost.beyond_knee is cost


def test_a_transfer_has_a_fixed_part_and_one_for_each_token():
    cost = policy_context(transfer_fixed_s=0.5).cost
    assert cost.transfer_s(0) == 0.5
    assert cost.transfer_s(1_000_000) == pytest.approx(1.5)
