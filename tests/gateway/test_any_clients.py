"""Clients that do anything, on engines that die: every step ends, nothing is left, it replays."""

from random import Random

import pytest

from campaigns.faults.gateway import GatewayCase, run


@pytest.mark.parametrize("seed", range(12))
def test_every_step_ends_nothing_is_left_and_the_journal_replays(seed: int):
    policy = Random(seed).choice(("heddle", "verl", "seer", "thunderagent"))
    assert run(GatewayCase(policy=policy, seed=seed, clients=40, disturbances=12)) > 200
