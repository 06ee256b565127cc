from functools import cache

import numpy as np
import pytest

from heddle_trace import TraceError, synth
from heddle_trace.synth import _mu_of_capped_mean
from heddle_trace.workloads import OUTPUT_LIMIT_TOKENS, WORKLOADS
from tests.trace.targets import measured, targets

ALL = tuple(WORKLOADS)
SEEDS = (1, 2, 11)


@cache
def rollout(workload, seed):
    return synth(workload, 6_400, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("workload", ALL)
def test_the_statistics_meet_their_stated_targets(workload, seed):
    found = measured(rollout(workload, seed))
    aims = targets(workload)
    assert set(aims) == set(found)
    missed = {
        name: (found[name], aim)
        for name, aim in aims.items()
        if found[name] is None or not aim.low <= found[name] <= aim.high
    }
    assert missed == {}


def test_the_workloads_stand_to_each_other_as_described():
    coding, search, math = (measured(rollout(workload, 1)) for workload in ALL)
    assert math["output_mean"] > coding["output_mean"] > 2 * search["output_mean"]
    assert search["steps_mean"] > coding["steps_mean"] > 2 * math["steps_mean"]


def test_a_coding_rollout_of_paper_size_exceeds_twenty_million_tokens():
    tokens = sum(step.output_tokens for record in rollout("coding", 11) for step in record.steps)
    assert tokens >= 20_000_000


def test_failures_and_the_first_payload_foretell_the_length():
    records = rollout("coding", 1)
    totals = np.array([sum(s.output_tokens for s in r.steps) for r in records])
    early = np.array([sum(s.tool_ok is False for s in r.steps[:3]) for r in records])
    payload = np.array([r.steps[0].tool_tokens or 0 for r in records])
    assert totals[early >= 2].mean() > 1.5 * totals[early == 0].mean()
    assert totals[payload > 1_000].mean() > 1.5 * totals[payload < 50].mean()


@pytest.mark.parametrize("workload", ALL)
def test_equal_arguments_give_equal_records_and_seeds_differ(workload):
    assert synth(workload, 48, 3) == synth(workload, 48, 3)
    assert synth(workload, 48, 3) != synth(workload, 48, 4)


def test_outputs_drift_from_the_first_prompt_to_the_last():
    plain, grown = synth("coding", 3_200, 5), synth("coding", 3_200, 5, drift=3.0)
    totals = [
        np.array([sum(s.output_tokens for s in r.steps) for r in rs]) for rs in (plain, grown)
    ]
    early, late = (
        totals[1][part].sum() / totals[0][part].sum() for part in (slice(320), slice(-320, None))
    )
    assert 1.0 <= early < 1.25
    assert 2.2 < late <= 3.0  # the longest are cut at the limit
    assert [r.prompt_tokens for r in plain] == [r.prompt_tokens for r in grown]
    assert "drift 3" in next(iter(grown)).source
    assert synth("coding", 64, 5, drift=1.0) == synth("coding", 64, 5)
    for wrong in (0.0, -1.0, 101.0, float("nan")):
        with pytest.raises(TraceError, match="drift is"):
            synth("coding", 64, 5, drift=wrong)


@pytest.mark.parametrize("workload", ALL)
def test_a_shorter_trace_is_a_prefix_of_a_longer_one(workload):
    assert synth(workload, 40, 5) == synth(workload, 400, 5)[:40]


@pytest.mark.parametrize("workload", ALL)
def test_every_record_is_whole(workload):
    numbers = WORKLOADS[workload]
    cut = 0
    for record in rollout(workload, 1):
        *called, last = record.steps
        assert record.prompt_tokens >= 1
        assert last.tool is None
        assert all(step.output_tokens >= 1 for step in record.steps)
        assert all(step.tool in dict(numbers.tools) for step in called)
        assert all(0.001 <= step.tool_s <= numbers.tool_limit_s for step in called)
        assert all(1 <= step.tool_tokens <= numbers.payload_limit_tokens for step in called)
        assert all(not step.tool_ok for step in called if step.tool_s == numbers.tool_limit_s)
        total = sum(step.output_tokens for step in record.steps)
        assert total <= OUTPUT_LIMIT_TOKENS
        if record.truncated:
            cut += 1
            assert total == OUTPUT_LIMIT_TOKENS
    assert (cut > 0) == (workload != "search")


def test_groups_are_adjacent_share_a_prompt_and_may_end_short():
    records = synth("math", 37, 1, samples_per_group=16)
    assert [r.group_id for r in records] == [f"math-{i // 16:05d}" for i in range(37)]
    assert [r.trajectory_id for r in records[:2]] == ["math-00000/00", "math-00000/01"]
    assert len({r.trajectory_id for r in records}) == 37
    for group in {r.group_id for r in records}:
        assert len({r.prompt_tokens for r in records if r.group_id == group}) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("codin", 10, 1), "did you mean coding"),
        (("chess", 10, 1), "coding, search, math"),
        (("coding", 0, 1), "trajectories is 0"),
        (("coding", 10_000_000, 1), "give 1 to 1,000,000"),
        (("coding", 10, -1), "seed is -1"),
        (("coding", 10, 1, 0), "samples per group is 0"),
    ],
)
def test_requests_that_make_no_sense_are_refused(arguments, says):
    with pytest.raises(TraceError, match=says):
        synth(*arguments)


def test_unknown_targets_are_refused():
    with pytest.raises(TraceError, match="coding, search, math"):
        targets("chess")


@pytest.mark.parametrize(("mean", "sigma", "cap"), [(0.41, 1.8, 30.0), (1.0, 0.5, 100.0)])
def test_the_capped_mean_is_met_by_simulation(mean, sigma, cap):
    mu = _mu_of_capped_mean(mean, sigma, cap)
    drawn = np.exp(mu + sigma * np.random.default_rng(0).standard_normal(400_000))
    assert np.minimum(drawn, cap).mean() == pytest.approx(mean, rel=0.01)
