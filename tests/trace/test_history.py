"""What a policy may know of earlier rollouts: distributions of complete trajectories."""

from dataclasses import replace

import numpy as np
import pytest

from heddle_core.estimate.history import Levels
from heddle_trace import MissingRules, StepScript, Trace, TrajectoryScript, complete, synth
from heddle_trace.history import history_of


def step(output: int, *, tool_s: float = 0.0, tool_tokens: int = 0) -> StepScript:
    return StepScript(
        prompt_tokens=100,
        shared_tokens=0,
        output_tokens=output,
        tool="sh",
        tool_s=tool_s,
        tool_ok=True,
        tool_tokens=tool_tokens,
    )


def script(name: str, group: str, *steps: StepScript) -> TrajectoryScript:
    return TrajectoryScript(
        id=name, group=group, task="t", arrival_s=0.0, steps=steps, truncated=False
    )


def test_two_trajectories_by_hand():
    past = history_of(
        [
            script("a/0", "a", step(10, tool_s=1.0, tool_tokens=5), step(30, tool_tokens=99)),
            script("a/1", "a", step(60, tool_s=3.0)),
        ]
    )
    assert past.appended_per_output == 5 / 100, "nothing comes after a last step's tool"
    assert past.tool_s_per_output == 4 / 100
    assert past.step_output_tokens == 100 / 3
    assert past.group_totals == {"a": [40, 60]}
    assert past.tasks == {
        "t": Levels(total_tokens=50.0, step_tokens=100 / 3, payload_tokens=5.0, prompt_tokens=100.0)
    }
    quantiles = np.array(past.output_quantiles)
    assert quantiles[0] == pytest.approx(40 + 20 * 0.5 / 256)
    assert np.all(np.diff(quantiles) > 0)
    assert quantiles.mean() == pytest.approx(50.0)


def test_tools_of_longer_trajectories_by_hand():
    past = history_of(
        [
            script("a/0", "a", step(10, tool_s=1.0, tool_tokens=5), step(30)),
            script("a/1", "a", step(60, tool_s=3.0, tool_tokens=12), step(100)),
        ]
    )
    # Of both 200 tokens, of the longer one 160.
    tool_s, appended = past.rates_beyond(np.array([0.0, 39.0, 120.0, 1e9]))
    assert tool_s.tolist() == pytest.approx([4 / 200, 4 / 200, 3 / 160, 3 / 160])
    assert appended.tolist() == pytest.approx([17 / 200, 17 / 200, 12 / 160, 12 / 160])
    same = replace(past, tool_s_beyond=(), appended_beyond=())
    assert same.rates_beyond(np.array([0.0, 1e9]))[0].tolist() == [0.02, 0.02]


def test_quantiles_are_those_of_the_totals_whatever_the_order():
    records = synth("search", 400, 3)
    scripts, _ = complete(Trace("t", records, ""), rules=MissingRules(), seed=0)
    past = history_of(scripts)
    totals = [sum(s.output_tokens for s in script.steps) for script in scripts]
    assert history_of(scripts[::-1]).output_quantiles == past.output_quantiles
    assert list(past.output_quantiles) == sorted(past.output_quantiles)
    assert min(totals) <= past.output_quantiles[0]
    assert past.output_quantiles[-1] <= max(totals)
    assert np.mean(past.output_quantiles) == pytest.approx(np.mean(totals), rel=0.01)
    assert sum(map(sum, past.group_totals.values())) == sum(totals)
    assert len(past.group_totals) == 25


def test_history_gives_its_own_quantiles_without_other_knowledge():
    records = synth("math", 64, 3)
    scripts, _ = complete(Trace("t", records, ""), rules=MissingRules(), seed=0)
    past = history_of(scripts)
    assert past.lengths([5.0] * 256).tolist() == pytest.approx(list(past.output_quantiles))


def test_no_trajectories_are_no_history():
    with pytest.raises(ValueError, match="at least one"):
        history_of([])
