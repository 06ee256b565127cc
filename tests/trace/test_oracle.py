import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, TrajectoryId
from heddle_trace import StepScript, TraceError, TrajectoryScript
from heddle_trace.oracle import NoisyOracle, Oracle
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
