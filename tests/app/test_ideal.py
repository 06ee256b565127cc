"""Fluid optimum and equal progress: worked out by hand, and in the right order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.runs import ideal
from heddle.runs.bound import lower_bound
from heddle.runs.ideal import Ideal, ideal_makespans
from heddle_sim.latency import LatencyTable
from heddle_trace.schema import TrajectoryScript
from tests.app.test_bound import plain, script, scripts, tables


def free_prefill(tp: int = 1, kv_tokens: int = 10**9) -> LatencyTable:
    """10 ms for an iteration at TP 1, 5 ms at TP 4; prefill costs an iteration of its own only."""
    return replace(plain(tp, kv_tokens), prefill_knots_s=(0.0, 0.0, 0.0))


def ideals(
    work: list[TrajectoryScript],
    made: list[LatencyTable],
    *,
    gpus: int,
    max_running: int = 16,
    tool_capacity: int | None = None,
) -> Ideal:
    bound = lower_bound(
        work, made, pools={"g": gpus}, max_running=max_running, tool_capacity=tool_capacity
    )
    return ideal_makespans(work, made, pools={"g": gpus}, max_running=max_running, bound=bound)


def test_equal_trajectories_fill_batches_and_wait_for_slots():
    # 64 x 100 tokens in batches of 16 on one GPU: 400 iterations of 10 ms.
    many = [script(str(i), (1, 0, 101, 0.0)) for i in range(64)]
    found = ideals(many, [free_prefill()], gpus=1)
    assert found.fluid_s == pytest.approx(4.0, rel=1e-3)
    # Everyone's own prefill is an iteration more, which is hidden in no other work.
    assert found.equal_progress_s == pytest.approx(4.0 + 0.010, rel=1e-3)


def test_one_trajectory_alone_takes_the_fastest_engine_and_its_tools():
    one = [script("a", (1, 0, 1001, 3.0))]
    found = ideals(one, [free_prefill(1), free_prefill(4)], gpus=4)
    alone = 1000 * 0.005 + 0.005 + 3.0
    assert found.fluid_s == pytest.approx(alone, rel=1e-3)
    assert found.equal_progress_s == pytest.approx(alone, rel=1e-3)


def test_fluid_pays_for_the_pace_of_the_long_one_and_equal_progress_cannot():
    """One of 2,000 tokens and 64 of 1,000 on 5 GPUs, one sequence an engine.

    TP 1 takes 10 ms and 0.010 GPU-seconds a token, TP 4 5 ms and 0.020. All at TP 1 is 660
    GPU-seconds, so at least 132 s. By then the long one has ended at TP 1 too: 20 s. With equal
    progress, the first 1,000 tokens of all take 650 GPU-seconds, 130 s; the last 1,000 of one
    alone take 5 s at TP 4.
    """
    work = [script("long", (1, 0, 2001, 0.0))]
    work += [script(str(i), (1, 0, 1001, 0.0)) for i in range(64)]
    found = ideals(work, [free_prefill(1), free_prefill(4)], gpus=5, max_running=1)
    assert found.fluid_s == pytest.approx(132.0, rel=1e-3)
    assert found.equal_progress_s == pytest.approx(135.0, rel=1e-3)


def test_a_faster_pace_than_the_cheapest_is_a_mixture_of_two():
    """Four of 1,000 tokens on 4 GPUs, one sequence an engine: 40 GPU-seconds at TP 1, in 10 s.

    A pace between costs in proportion: with m seconds, each token has m ms, and costs
    0.010 + (0.010 - m / 1000) * 2 GPU-seconds. 4 * 1000 of them exceed 4 * m for every m below 10.
    With 8 GPUs: 4000 * (0.030 - m / 500) = 8 * m, so m = 7.5.
    """
    work = [script(str(i), (1, 0, 1001, 0.0)) for i in range(4)]
    made = [free_prefill(1), free_prefill(4)]
    assert ideals(work, made, gpus=4, max_running=1).fluid_s == pytest.approx(10.0, rel=2e-3)
    assert ideals(work, made, gpus=8, max_running=1).fluid_s == pytest.approx(7.5, rel=2e-3)


def test_kv_limits_the_batch():
    # Contexts of about 2,000 tokens, KV for two of them: batches of 2, not 16.
    work = [script(str(i), (1950, 0, 101, 0.0)) for i in range(8)]
    found = ideals(work, [free_prefill(kv_tokens=4000)], gpus=1)
    assert found.fluid_s == pytest.approx(8 * 100 * 0.010 / 2, rel=0.01)
    assert found.equal_progress_s == pytest.approx(8 * 100 * 0.010 / 2, rel=0.01)


def test_trajectories_in_tools_leave_their_slot_to_others():
    # Two in one slot. Each makes 100 tokens in 1 s and spends 1 s in tools.
    work = [script(str(i), (1, 0, 101, 1.0)) for i in range(2)]
    found = ideals(work, [free_prefill()], gpus=1, max_running=1)
    assert found.equal_progress_s == pytest.approx(2.0, rel=0.02)


def test_prefill_counts_in_both():
    work = [script(str(i), (1000, 0, 2, 0.0)) for i in range(8)]
    found = ideals(work, [plain()], gpus=1)
    assert found.fluid_s >= 8.0
    assert found.equal_progress_s >= 8.0


def test_a_late_arrival_has_less_time():
    late = script("a", (1, 0, 1001, 0.0), at=50.0)
    work = [script("b", (1, 0, 2, 0.0)), late]
    found = ideals(work, [free_prefill()], gpus=4)
    assert found.fluid_s == pytest.approx(60.0, rel=1e-3)
    assert found.equal_progress_s == pytest.approx(60.0, rel=1e-3)


def test_steps_of_one_token_have_nothing_to_decode():
    work = [script(str(i), (5, 0, 1, 2.0)) for i in range(3)]
    found = ideals(work, [free_prefill()], gpus=1)
    assert found.fluid_s == pytest.approx(2.010)
    assert found.equal_progress_s == pytest.approx(2.010)


def test_limited_tools_hold_for_both():
    work = [script(str(i), (1, 0, 1, 30.0)) for i in range(10)]
    found = ideals(work, [free_prefill()], gpus=8, tool_capacity=2)
    assert (found.fluid_s, found.equal_progress_s) == (pytest.approx(150), pytest.approx(150))


@settings(max_examples=60)
@given(data=st.data(), work=scripts(), slots=st.integers(1, 8))
def test_neither_is_below_the_bound_nor_grows_with_the_cluster(
    data: st.DataObject, work: list[TrajectoryScript], slots: int
):
    made = [data.draw(tables(n)) for n in (1, 2)]
    small, large = (ideals(work, made, gpus=gpus, max_running=slots) for gpus in (2, 4))
    bound = lower_bound(work, made, pools={"g": 2}, max_running=slots)
    assert small.fluid_s >= max(bound.solo_s, bound.capacity_s)
    assert small.equal_progress_s >= bound.makespan_s
    assert large.fluid_s <= small.fluid_s * 1.001
    assert large.equal_progress_s <= small.equal_progress_s * 1.001


@settings(max_examples=40)
@given(data=st.data(), work=scripts())
def test_more_work_and_fewer_slots_never_end_earlier(
    data: st.DataObject, work: list[TrajectoryScript]
):
    made = [data.draw(tables(n)) for n in (1, 2)]
    whole = ideals(work, made, gpus=2, max_running=8)
    assert ideals(work, made, gpus=2, max_running=2).fluid_s >= whole.fluid_s * 0.999
    # Whole groups: without one that has prefilled their common prompt, the others end later.
    groups = {each.group for each in work[: len(work) // 2 + 1]}
    some = [each for each in work if each.group in groups]
    fewer = ideals(some, made, gpus=2, max_running=8)
    assert fewer.fluid_s <= whole.fluid_s * 1.001


def test_a_sample_stands_for_a_large_trace(monkeypatch: pytest.MonkeyPatch):
    draw = np.random.default_rng(3)
    lengths = np.minimum(draw.lognormal(6.0, 1.0, 600), 8000).astype(int) + 2
    work = [script(str(i), (100, 0, int(n), 0.0)) for i, n in enumerate(lengths)]
    made = [free_prefill(1, 40_000), free_prefill(4, 200_000)]
    whole = ideals(work, made, gpus=8)
    monkeypatch.setattr(ideal, "SAMPLE", 100)
    monkeypatch.setattr(ideal, "LEVELS", 100)
    sampled = ideals(work, made, gpus=8)
    assert sampled != whole
    assert sampled.fluid_s == pytest.approx(whole.fluid_s, rel=0.02)
    assert sampled.equal_progress_s == pytest.approx(whole.equal_progress_s, rel=0.03)
