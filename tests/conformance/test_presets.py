"""Every preset in the same storm: invariants after every event, nothing lost, replay exact."""

import pytest

from campaigns.faults.scenario import Played, Scenario, controller_of, play
from heddle_core import first_divergence
from heddle_core.commands import Dispatch, Migrate
from heddle_core.events import EngineFailed, EngineReady
from heddle_core.ids import EngineId
from heddle_core.presets import PRESETS
from tests.in_turn import in_turn

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


@pytest.mark.parametrize(("name", "workload"), in_turn([*PRESETS, *MIXED], [*SCENARIOS]))
def test_a_storm_loses_nothing_breaks_nothing_and_replays(name: str, workload: str) -> None:
    scenario = SCENARIOS[workload]
    played = play(name, scenario)
    played.books.closed()
    nothing_lost(played)
    assert len(played.events(EngineFailed)) >= 3, "the storm missed"
    assert len(played.events(EngineReady)) > len(played.events(EngineFailed))
    fresh = controller_of(name, scenario)
    assert first_divergence(played.entries, fresh.handle) is None


ROLES_STORM = (
    (0.0, EngineId("p1")),
    (4.0, EngineId("e1")),
    (4.0, EngineId("p0")),
    (9.0, EngineId("e0")),
    (9.5, EngineId("e0+1")),
    (12.0, EngineId("p0")),
    (12.5, EngineId("p1")),
    (30.0, EngineId("p0+1")),
    (55.0, EngineId("e2")),
)


@pytest.mark.parametrize(
    ("name", "threshold_tokens"), in_turn([*PRESETS, *MIXED], [0, 500], every=2)
)
def test_roles_in_a_storm_lose_nothing_break_nothing_and_replay(
    name: str, threshold_tokens: int
) -> None:
    scenario = Scenario(
        faults=ROLES_STORM, prefill_gpus=2, threshold_tokens=threshold_tokens, slots=3
    )
    played = play(name, scenario)
    played.books.closed()
    nothing_lost(played)
    failed = [e.engine for e in played.events(EngineFailed) if isinstance(e, EngineFailed)]
    assert len(failed) >= 3, "the storm missed"
    assert any(engine.startswith("p") for engine in failed), "no prefill engine failed"
    copies = [c for c in played.commands(Migrate) if isinstance(c, Migrate) and c.copy]
    assert len(copies) > 50, "no KV was handed over"
    steps = [c for c in played.commands(Dispatch) if isinstance(c, Dispatch)]
    assert {c.max_tokens for c in steps if c.engine.startswith("p")} == {1}
    fresh = controller_of(name, scenario)
    assert first_divergence(played.entries, fresh.handle) is None
