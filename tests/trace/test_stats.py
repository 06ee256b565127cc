import json
from dataclasses import asdict
from pathlib import Path

import pytest

from heddle_trace import describe, read_trace
from tests.trace.builders import call, record, step, trace
from tests.trace.targets import measured, signals

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
RECORDED = (
    "tbench_mini",
    "tau2_retail",
    "hotpotqa_react",
    "tau_airline",
    "cc_weka",
    "mint",
    "mooncake_conversation",
)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_traces_give_their_published_statistics(name):
    stated = SHARED / f"{name}.stats.json"
    if not stated.exists():
        pytest.skip(f"recorded traces are not at {SHARED}")
    published = json.loads(stated.read_text())["development"]
    found = describe(read_trace(SHARED / f"{name}.jsonl.gz"))

    assert found.trajectories == published["trajectories"]
    groups = found.groups
    assert groups.groups == published["groups"]
    assert {"min": groups.size_min, "p50": groups.size_p50, "max": groups.size_max} == (
        published["group_size"]
    )
    for key, values in {
        "steps": found.steps,
        "output_tokens_per_trajectory": found.output_tokens,
        "output_tokens_per_step": found.output_tokens_per_step,
        "prompt_tokens": found.prompt_tokens,
        "tool_tokens_per_step": found.tool_tokens,
        "tool_s": found.tool_s,
        "user_s": found.user_s,
        "tool_s_per_trajectory": found.tool_s_per_trajectory,
    }.items():
        for quantile, value in (published.get(key) or {}).items():
            if value is None:
                assert getattr(values, quantile) is None
            else:
                assert getattr(values, quantile) == pytest.approx(value, abs=0.051), (key, quantile)
    assert found.output_max_over_median == pytest.approx(
        published["output_max_over_median"], abs=0.051
    )
    if published["tool_ok_rate"] is not None:
        assert found.tool_ok_share == pytest.approx(published["tool_ok_rate"], abs=0.0005)
    share = (published.get("total_output_variance") or {}).get("within_share")
    if share is None:
        assert groups.within_share is None
    else:
        assert groups.within_share == pytest.approx(share, abs=0.0005)


def test_a_hand_counted_trace():
    found = describe(
        trace(
            record(call(10, tool_s=1.0), call(20, tool_s=3.0, tool_ok=False), step(30)),
            record(call(40, tool="user", tool_s=100.0), trajectory_id="b", truncated=True),
            record(step(8), trajectory_id="c", group_id="h", prompt_tokens=200),
        )
    )
    assert (found.trajectories, found.truncated, found.total_steps) == (3, 1, 5)
    assert found.total_output_tokens == 108
    assert (found.groups.groups, found.groups.size_min, found.groups.size_max) == (2, 1, 2)
    assert found.groups.within_variance == 100.0  # 60 and 40 around 50
    assert found.groups.within_share == 1.0
    assert (found.tool_s.n, found.tool_s.mean, found.user_s.max) == (2, 2.0, 100.0)
    assert (found.tool_s_per_trajectory.n, found.tool_s_per_trajectory.max) == (2, 100.0)
    assert [(t.tool, t.calls) for t in found.tools] == [("bash", 2), ("user", 1)]
    assert found.tools[0].ok_share == 0.5
    assert found.max_context_tokens == 208
    assert found.output_max_over_median == 1.5


def test_gaps_are_left_out_and_counted():
    found = describe(
        trace(
            record(call(10, tool_s=None, tool_tokens=None), call(None), prompt_tokens=None),
            record(call(50), trajectory_id="b"),
        )
    )
    assert found.output_tokens.n == 1  # a part of a total is not a total
    assert found.total_output_tokens == 60
    assert (found.tool_s.n, found.tool_tokens.n, found.prompt_tokens.n) == (2, 2, 1)
    assert found.tools[0].missing == 1
    assert found.gaps == {
        "tool_s": 1,
        "tool_tokens": 1,
        "prompt_tokens": 1,
        "output_tokens": 1,
    }


def test_nothing_recorded_is_none_and_never_nan():
    found = describe(trace(record(call(None, tool_s=None, tool_tokens=None, tool_ok=None))))
    assert found.tool_s.mean is None
    assert found.output_max_over_median is None
    assert found.tool_ok_share is None
    assert found.groups.within_share is None
    assert "NaN" not in json.dumps(asdict(found))
    assert measured([record()])["seen_correlation"] is None


def signalled(i, group):
    """The first tool's payload decides what follows."""
    follows = step(10 * 2 ** (i % 8))
    return record(
        call(10, tool_tokens=2 ** (i % 8)), follows, trajectory_id=f"{i}", group_id=f"{group}"
    )


def test_signals_see_what_is_there_and_only_that():
    seen, group = signals([signalled(i, i % 8) for i in range(80)], 1)
    assert seen > 0.95
    assert group == pytest.approx(1.0)
    _, mixed = signals([signalled(i, i % 5) for i in range(80)], 1)
    assert mixed < 0.1
    assert signals([signalled(i, 0) for i in range(80)], 2) == (None, None)
