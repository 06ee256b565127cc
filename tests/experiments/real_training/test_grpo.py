"""The maths of GRPO, against cases computed by hand."""

import math

import pytest

from experiments.real_training.grpo import group_advantages, policy_loss


def test_advantages_are_normalised_within_a_group():
    rewards = [1.0, 0.0, 0.5, 0.5, 7.0]
    groups = ["a", "a", "b", "b", "c"]
    # Group a: mean 0.5, deviation of a sample sqrt(0.5); b has no spread; c has one member.
    expected = [0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5), 0.0, 0.0, 0.0]
    assert group_advantages(rewards, groups) == pytest.approx(expected, abs=1e-5)


def test_the_loss_of_two_trajectories_is_what_it_is_by_hand():
    torch = pytest.importorskip("torch")
    # Ratios: 1.5 and 1.0 for advantage 2, 0.5 and a masked one for advantage -1.
    new = torch.tensor([[math.log(1.5), 0.0], [math.log(0.5), 3.0]], requires_grad=True)
    old = torch.zeros(2, 2)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    found = policy_loss(new, old, torch.tensor([2.0, -1.0]), mask, clip=0.2)
    # min(1.5 x 2, 1.2 x 2) + 1 x 2 + min(0.5 x -1, 0.8 x -1)
    assert float(found.loss.detach()) == pytest.approx(-(2.4 + 2.0 - 0.8))
    assert float(found.clipped) == 2.0
    assert float(found.gap) == pytest.approx(math.log(1.5) + math.log(2.0))
    found.loss.backward()
    # Where the clip holds, no gradient; elsewhere minus advantage times ratio.
    assert new.grad.tolist() == [[0.0, pytest.approx(-2.0)], [0.0, 0.0]]


def test_a_ratio_beyond_the_clip_keeps_its_gradient_where_that_brings_it_back():
    torch = pytest.importorskip("torch")
    # A good token that has become less likely, and a bad one that has become more likely.
    new = torch.tensor([[math.log(0.5)], [math.log(1.5)]], requires_grad=True)
    found = policy_loss(
        new, torch.zeros(2, 1), torch.tensor([2.0, -1.0]), torch.ones(2, 1), clip=0.2
    )
    assert float(found.loss.detach()) == pytest.approx(-(0.5 * 2.0 - 1.5))
    assert float(found.clipped) == 0.0
    found.loss.backward()
    assert new.grad.flatten().tolist() == pytest.approx([-1.0, 1.5])
