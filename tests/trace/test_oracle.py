import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, TrajectoryId
from heddle_trace import (
    MissingRules,
    StepScript,
    Trace,
    TraceError,
    TrajectoryScript,
    complete,
    synth,
)
from heddle_trace.oracle import NoisyOracle, Oracle, PaperQuality, mean_left
from tests.core.policy_fakes import trajectory


def script(name, outputs):
    steps = tuple(StepScript(10, 0, tokens, "sandbox", 0.5, True, 5) for tokens in outputs)
    return TrajectoryScript(name, "g", "coding", 0.0, steps, False)


outputs = st.lists(st.integers(1, 5_000), min_size=1, max_size=10)


@given(outputs=outputs, kept=st.integers(0, 4_999))
def test_the_oracle_knows_at_every_step_what_is_left_also_in_the_middle_of_one(outputs, kept):
    oracle = Oracle([script("a", outputs)])
    t = trajectory("a")
    for step, tokens in enumerate(outputs):
        t.step = step
        assert oracle.remaining_tokens(t) == sum(outputs[step:])
        made = t.output_tokens
        t.output_tokens = made + min(kept, tokens)  # preempted, its tokens kept
        assert oracle.remaining_tokens(t) == sum(outputs[step:]) - min(kept, tokens)
        t.output_tokens = made + tokens
    assert oracle.remaining_tokens(t) == 0


def test_an_oracle_never_says_less_than_nothing():
    t = trajectory("a", output_tokens=11)
    assert Oracle([script("a", [10])]).remaining_tokens(t) == 0
    assert NoisyOracle([script("a", [10])], sigma=1.0, seed=0).remaining_tokens(t) == 0


def test_an_oracle_names_the_trajectory_it_has_no_script_for():
    with pytest.raises(TraceError, match=r"'b'.*scripts"):
        Oracle([script("a", [10])]).remaining_tokens(trajectory("b"))


def noisy(sigma, seed, names=tuple(f"t{i}" for i in range(400))):
    return NoisyOracle([script(name, [1_000] * 5) for name in names], sigma=sigma, seed=seed)


def test_without_noise_the_noisy_oracle_is_exact():
    t = trajectory("t3", step=2, output_tokens=2_000)
    assert noisy(0.0, 1).remaining_tokens(t) == 3_000


@given(order=st.permutations(range(12)), seed=st.integers(0, 5))
def test_an_error_belongs_to_its_step_whatever_is_predicted_before(order, seed):
    def drawn(which):
        oracle = noisy(0.5, seed, ("t0", "t1", "t2", "t3"))
        ts = {i: trajectory(f"t{i % 4}", step=i // 4) for i in which}
        return {i: oracle.remaining_tokens(t) for i, t in ts.items()}

    assert drawn(order) == drawn(range(12))


def test_errors_are_log_normal_and_differ_by_step_trajectory_and_seed():
    def logs(seed):
        oracle = noisy(0.5, seed)
        return [
            math.log(oracle.remaining_tokens(trajectory(f"t{i}", step=step)) / 5_000)
            for i in range(400)
            for step in range(5)
        ]

    first, second = logs(1), logs(2)
    mean = sum(first) / len(first)
    spread = math.sqrt(sum((x - mean) ** 2 for x in first) / len(first))
    # 2,000 draws: standard errors 0.011 of the mean and 0.008 of the deviation.
    assert abs(mean) < 0.05
    assert abs(spread - 0.5) < 0.04
    assert len({round(x, 12) for x in first}) == len(first)
    assert first != second
    product = sum(a * b for a, b in zip(first, second, strict=True)) / len(first)
    assert abs(product) < 0.03  # the seeds are independent


@given(sigma=st.floats(0, 10), seed=st.integers(0, 2**63), step=st.integers(0, 10**6))
def test_estimates_are_finite_and_never_negative(sigma, seed, step):
    estimate = noisy(sigma, seed, ("t0",)).remaining_tokens(trajectory("t0", step=step))
    assert math.isfinite(estimate)
    assert estimate >= 0


@pytest.mark.parametrize("sigma", [-0.1, 10.5, math.nan, math.inf])
def test_a_sigma_that_makes_no_sense_is_refused(sigma):
    with pytest.raises(ValueError, match="sigma"):
        NoisyOracle([], sigma=sigma, seed=0)


def test_oracles_learn_nothing_and_take_no_time():
    oracle = Oracle([script("a", [10, 20])])
    t = trajectory("a")
    before = oracle.remaining_tokens(t)
    step = StepFinished(
        time_s=0.0,
        trajectory=TrajectoryId("a"),
        step=0,
        engine=EngineId("e0"),
        output_tokens=10,
        reason="tool_call",
    )
    tool = ToolReturned(
        time_s=1.0,
        trajectory=TrajectoryId("a"),
        step=0,
        tool="sandbox",
        ok=True,
        observation_tokens=5,
        context_tokens=25,
    )
    oracle.observe_step(t, step)
    oracle.observe_tool(t, tool)
    oracle.observe_finish(t)
    assert oracle.remaining_tokens(t) == before
    assert not oracle.served


# -- the published quality ---------------------------------------------------------------------


def quality(scripts, steps, seed=0):
    """Recall of the longest fifth and Pearson's correlation of predicted and true totals.

    Of the trajectories that have more than `steps` steps, after so many.
    """
    part = PaperQuality(scripts, seed=seed)
    predicted, true = [], []
    for script in scripts:
        if len(script.steps) <= steps:
            continue
        t = trajectory(script.id, group=script.group)
        for number, made in enumerate(script.steps[:steps]):
            t.output_tokens += made.output_tokens
            part.observe_step(t, finished(t.id, number, made.output_tokens))
            t.step += 1
        predicted.append(t.output_tokens + part.remaining_tokens(t))
        true.append(sum(step.output_tokens for step in script.steps))
        part.observe_finish(t)
    count = len(true) // 5
    longest = [np.argsort(totals, kind="stable")[-count:].tolist() for totals in (predicted, true)]
    recall = sum(i in longest[0] for i in longest[1]) / count
    return recall, float(np.corrcoef(predicted, true)[0, 1])


def finished(name, step, tokens):
    return StepFinished(
        time_s=0.0,
        trajectory=TrajectoryId(name),
        step=step,
        engine=EngineId("e0"),
        output_tokens=tokens,
        reason="tool_call",
    )


def rollout_of(workload, count=1_600, seed=101):
    scripts, _ = complete(
        Trace("t", synth(workload, count, seed), ""), rules=MissingRules(), seed=0
    )
    return scripts


@pytest.mark.parametrize("workload", ["coding", "search", "math"])
def test_paper_quality_has_the_published_quality(workload):
    scripts = rollout_of(workload)
    (recall_0, pearson_0), (recall_1, pearson_1), (recall_2, pearson_2) = (
        quality(scripts, steps) for steps in (0, 1, 2)
    )
    # On arrival the prompt alone: far better than chance (0.2 and 0), far from good.
    assert 0.3 < recall_0 < 0.65
    assert 0.3 < pearson_0 < 0.7
    assert recall_0 < recall_1
    assert pearson_0 < pearson_1
    # Figure 13 of the paper: recall above 0.8 and Pearson above 0.7 after step 2.
    assert recall_2 > 0.7
    assert pearson_2 > 0.7


def test_paper_quality_repeats_and_differs_by_seed():
    scripts = rollout_of("math", 64)
    assert quality(scripts, 1) == quality(scripts, 1)
    t = trajectory(scripts[0].id, group=scripts[0].group)
    estimates = {PaperQuality(scripts, seed=seed).remaining_tokens(t) for seed in range(5)}
    assert len(estimates) == 5


def test_samples_of_a_prompt_look_alike_on_arrival():
    scripts = rollout_of("math", 64)
    part = PaperQuality(scripts, seed=0)
    by_group = {}
    for script in scripts:
        estimate = part.remaining_tokens(trajectory(script.id, group=script.group))
        by_group.setdefault(script.group, set()).add(estimate)
    assert len(by_group) > 1
    assert all(len(estimates) == 1 for estimates in by_group.values())
    assert len(set.union(*by_group.values())) == len(by_group)


def test_paper_quality_names_the_trajectory_it_has_no_script_for():
    part = PaperQuality([script("a", [10])], seed=0)
    with pytest.raises(TraceError, match=r"'b'.*scripts"):
        part.remaining_tokens(trajectory("b"))


@pytest.mark.parametrize(
    "scripts", [[], [script("a", [10])], [script("a", [10, 3]), script("b", [9])]]
)
def test_paper_quality_of_few_scripts_is_finite(scripts):
    part = PaperQuality(scripts, seed=0)
    for one in scripts:
        t = trajectory(one.id)
        assert part.remaining_tokens(t) >= 1.0
        part.observe_step(t, finished(one.id, 0, 10))
        t.output_tokens = 10**6
        assert 1.0 <= part.remaining_tokens(t) < 10**9
        part.observe_finish(t)
        assert not part._observed


@given(
    mean=st.floats(0.0, 12.0), sigma=st.floats(0.05, 2.0), made=st.floats(0.0, 10.0).map(math.exp)
)
def test_the_mean_left_is_that_of_the_truncated_log_normal(mean, sigma, made):
    found = mean_left(mean, sigma, made)
    above = (mean - math.log(made)) / sigma
    assume(above > -30.0)
    if above < -5.5:
        # Mills' ratio is right to a few parts in a hundred so far out.
        assert found > 0.0
        return
    z = np.linspace(max(-above, -12.0), max(-above, 0.0) + 12.0, 200_001)
    density = np.exp((min(above, 0.0) ** 2 - z**2) / 2)
    left = np.exp(mean + sigma * z) - made
    expected = float((density * left).sum() / density.sum())
    assert found == pytest.approx(max(expected, 1.0), rel=2e-2, abs=1e-3)
