"""Any mix of parts in any scenario: drawn at random, the invariants checked after every event."""

from random import Random

import pytest

from campaigns.faults.any_mix import any_policy, any_scenario, any_scripts
from campaigns.faults.scenario import play, policy_of
from heddle_core import Controller, first_divergence


@pytest.mark.parametrize("case", range(60))
def test_any_mix_of_parts_in_any_scenario(case: int) -> None:
    rng = Random(f"any-mix/{case}")
    name, scenario = any_policy(rng), any_scenario(rng)
    scripts = any_scripts(rng, scenario)
    played = play(name, scenario, scripts=scripts)
    played.books.closed()
    for script in scripts:
        if script.id not in played.books.cancelled:
            assert played.books.made[script.id] == sum(s.output_tokens for s in script.steps)
    fresh = Controller(policy_of(name, scenario))
    assert first_divergence(played.entries, fresh.handle) is None
