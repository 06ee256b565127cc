import pytest

from tests.core.ledgers import policy_context, step_cost


def test_an_iteration_is_affine_in_batch_and_context():
    cost = step_cost(1)
    assert cost.iteration_s(0, 0) == cost.t0_s == 0.02
    assert cost.iteration_s(10, 5_000) == pytest.approx(0.02 + 10 * 2e-4 + 5_000 * 4e-8)


def test_a_transfer_has_a_fixed_part_and_one_for_each_token():
    cost = policy_context(transfer_fixed_s=0.5).cost
    assert cost.transfer_s(0) == 0.5
    assert cost.transfer_s(1_000_000) == pytest.approx(1.5)
