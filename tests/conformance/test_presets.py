"""Every preset in the same storm: invariants after every event, nothing lost, replay exact."""

import pytest

from heddle_core import Controller, first_divergence
from heddle_core.events import EngineFailed, EngineReady
from heddle_core.presets import PRESETS
from tests.conformance.scenario import Played, Scenario, play, policy_of

MIXED = (
    "slime+progressive_priority+progressive+follow_rank",
    "verl+lpt+history+balance+headroom",
    "heddle+progressive",
    "heddle+exact+served",
    "heddle+exact+awaited",
    "heddle-paper+served+follow_rank+headroom",
    "verl+progressive+follow_rank_earlier+awaited+sticky_group",
    "heddle-paper+libra-dp+group",
    "slime-2026+autellix+headroom",
    "heddle+consistent_hash+round_robin",
    "heddle+fixed+consolidate",
    "verl+progressive+consolidate",
)
SCENARIOS = {
    "coding": Scenario(),
    "search": Scenario(workload="search", tool_capacity=4),
    "math": Scenario(workload="math", with_history=True),
}


def nothing_lost(played: Played) -> None:
    """Every trajectory has made exactly its script's tokens, in exactly its script's steps."""
    assert not played.books.cancelled
    assert {t: played.books.made[t] for t in played.books.arrived} == {
        s.id: sum(step.output_tokens for step in s.steps) for s in played.scripts
    }
    assert {t: played.books.steps[t] for t in played.books.arrived} == {
        s.id: len(s.steps) for s in played.scripts
    }


@pytest.mark.parametrize("workload", SCENARIOS)
@pytest.mark.parametrize("name", [*PRESETS, *MIXED])
def test_a_storm_loses_nothing_breaks_nothing_and_replays(name: str, workload: str) -> None:
    scenario = SCENARIOS[workload]
    played = play(name, scenario)
    played.books.closed()
    nothing_lost(played)
    assert len(played.events(EngineFailed)) >= 3, "the storm missed"
    assert len(played.events(EngineReady)) > len(played.events(EngineFailed))
    fresh = Controller(policy_of(name, scenario))
    assert first_divergence(played.entries, fresh.handle) is None
