"""Invariant 6, by behaviour: what lies ahead of the events changes no decision.

Two rollouts whose scripts differ only in what one trajectory does from some step on have equal
journals until that step ends in one of them. With an oracle they have not: the comparison can fail.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from campaigns.faults.scenario import Played, Scenario, play, scripts_of
from heddle.policy_inputs import oracles
from heddle_core.events import StepFinished
from heddle_core.presets import PRESETS
from heddle_trace import TrajectoryScript

SCENARIO = Scenario(trajectories=32, seed=11, faults=((20.0, "e1"),))
CHANGED = 2
"""The step, counted from 0, from which on one trajectory does something else."""


def two_futures() -> tuple[Sequence[TrajectoryScript], Sequence[TrajectoryScript], str]:
    """Equal but for one trajectory, which works three times as much from step `CHANGED` on."""
    scripts = scripts_of(SCENARIO.workload, SCENARIO.trajectories, SCENARIO.seed)
    which = next(i for i, s in enumerate(scripts) if len(s.steps) >= CHANGED + 3)
    one = scripts[which]
    more = replace(
        one,
        steps=tuple(
            s if i < CHANGED else replace(s, output_tokens=3 * s.output_tokens, tool_s=9 * s.tool_s)
            for i, s in enumerate(one.steps)
        ),
    )
    return scripts, (*scripts[:which], more, *scripts[which + 1 :]), one.id


def delivered_s(played: Played, name: str) -> float:
    """Time at which the changed step's end was delivered."""
    return next(
        e.time_s
        for e in played.events(StepFinished)
        if isinstance(e, StepFinished) and (e.trajectory, e.step) == (name, CHANGED)
    )


def both(name: str, *, oracle: bool = False) -> tuple[Played, Played, float]:
    first, second, changed = two_futures()
    played = [
        play(
            name,
            SCENARIO,
            scripts=scripts,
            extra=oracles(name, scripts, seed=0) if oracle else {},
        )
        for scripts in (first, second)
    ]
    return played[0], played[1], min(delivered_s(p, changed) for p in played)


@pytest.mark.parametrize(
    "name", [*PRESETS, "verl+lpt+group+headroom", "heddle-paper+history", "heddle+posterior"]
)
def test_what_lies_ahead_changes_no_decision(name):
    first, second, until_s = both(name)
    before = [e for e in first.entries if e.event.time_s < until_s]
    assert len(before) > 50
    assert before == [e for e in second.entries if e.event.time_s < until_s]
    assert first.entries != second.entries, "the futures were to differ"


@pytest.mark.parametrize(
    "name",
    ["heddle+oracle", "heddle-paper+oracle", "verl+lpt+oracle", "heddle-paper+paper_quality"],
)
def test_an_oracle_is_found_out(name):
    first, second, until_s = both(name, oracle=True)
    before = [e for e in first.entries if e.event.time_s < until_s]
    assert before != [e for e in second.entries if e.event.time_s < until_s]
