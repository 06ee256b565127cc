"""Equal progress: cases that can be worked out by hand, and what must hold for all."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from heddle_core.estimate.cost import FillingCost, StepCost
from heddle_core.estimate.equal_progress import equal_progress_s
from heddle_core.estimate.history import History
from heddle_core.ids import EngineShape
from tests.core.shapes import h100

COST = StepCost(t0_s=0.01, t1_s=0.001, t2_s=0.0, prefill_s=0.0, kv_capacity_tokens=10**9)
PAST = History(
    output_quantiles=(1000.0,), appended_per_output=0.0, tool_s_per_output=0.0, step_output_tokens=1
)


def ends_s(
    history: History = PAST,
    by_shape: dict[EngineShape, StepCost] | None = None,
    *,
    gpus: int = 1,
    trajectories: int = 1,
    max_running: int = 100,
    start_s: float = 0.0,
    widened_at: int = 0,
) -> dict[EngineShape, float]:
    costs = by_shape or {h100(1): COST}
    shapes = [shape for shape in costs if gpus % shape.tp == 0]
    (ends,) = equal_progress_s(
        history,
        costs,
        [{shape: gpus // shape.tp} for shape in shapes],
        widened={shapes[-1]: gpus // shapes[-1].tp},
        trajectories=trajectories,
        prompt_tokens=100.0,
        prefilled_tokens=100.0 * trajectories,
        max_running=max_running,
        start_s=start_s,
        widened_at=widened_at,
    )
    return dict(zip(shapes, ends, strict=True))


def test_equal_trajectories_decode_in_one_batch():
    # On the way to the median, which is the only quantile, three quarters are left on average.
    assert ends_s(trajectories=20)[h100(1)] == pytest.approx(1000 * (0.01 + 15 * 0.001))


def test_more_than_the_slots_wait():
    full = 1000 * (0.01 + 5 * 0.001)
    assert ends_s(trajectories=20, max_running=5)[h100(1)] == pytest.approx(full * 15 / 5)


def test_a_tool_takes_its_time_and_leaves_the_batch_to_others():
    slow = replace(PAST, tool_s_per_output=0.02)
    found = ends_s(slow, trajectories=2)[h100(1)]
    assert 1000 * (0.01 + 0.02) < found < 1000 * (0.01 + 1 * 0.001 + 0.02)


def test_each_step_adds_the_time_of_its_prefill():
    steps = replace(PAST, step_output_tokens=50)
    found = ends_s(steps, {h100(1): replace(COST, per_prefill_s=0.1)}, trajectories=20)
    assert found[h100(1)] == pytest.approx(1000 * (0.01 + 15 * (0.001 + 0.1 / 50)))


@pytest.mark.parametrize("trajectories", [4, 20, 80])
def test_a_model_with_experts_has_the_pace_of_its_batch(trajectories):
    filling = FillingCost(t0_s=0.004, fill_s=0.002, knee=10, t1_s=0.0005, t2_s=0.0)
    batch = trajectories * 0.75
    pace = 0.004 + 0.002 * min(batch, 10) + 0.0005 * batch
    found = ends_s(by_shape={h100(1): replace(COST, filling=filling)}, trajectories=trajectories)
    assert found[h100(1)] == pytest.approx(1000 * pace)


def test_the_shape_is_the_best_one_beyond_the_knee():
    # By their planes the narrow engines are better, in large batches the wide one.
    narrow = replace(COST, t0_s=0.01, t1_s=0.001)
    wide = replace(COST, t0_s=0.01, t1_s=0.0006)
    full = {
        h100(1): FillingCost(t0_s=0.005, fill_s=0.0015, knee=8, t1_s=0.0009, t2_s=0.0),
        h100(2): FillingCost(t0_s=0.005, fill_s=0.0005, knee=8, t1_s=0.0004, t2_s=0.0),
    }
    planes = {h100(1): narrow, h100(2): wide}
    by_plane = ends_s(by_shape=planes, gpus=2, trajectories=80)
    filled = {shape: replace(cost, filling=full[shape]) for shape, cost in planes.items()}
    found = ends_s(by_shape=filled, gpus=2, trajectories=80)
    assert by_plane[h100(1)] < by_plane[h100(2)]
    assert found[h100(1)] > found[h100(2)]


def test_engines_become_wider_when_it_pays():
    wide = replace(COST, t0_s=0.001)
    by_shape = {h100(1): COST, h100(2): wide}
    kept = ends_s(by_shape=by_shape, gpus=2, trajectories=2)
    assert kept[h100(1)] > kept[h100(2)]
    free = ends_s(by_shape=by_shape, gpus=2, trajectories=2, widened_at=2)
    assert free[h100(1)] == pytest.approx(free[h100(2)])
    dear = ends_s(by_shape=by_shape, gpus=2, trajectories=2, widened_at=2, start_s=1e6)
    assert dear == kept


def mixed_s(mix, by_shape, *, trajectories, history=PAST, max_running=100):
    ((end_s,),) = equal_progress_s(
        history,
        by_shape,
        [mix],
        widened=mix,
        trajectories=trajectories,
        prompt_tokens=100.0,
        prefilled_tokens=100.0 * trajectories,
        max_running=max_running,
        start_s=0.0,
        widened_at=0,
    )
    return end_s


def test_each_quantile_of_the_longest_has_the_makespan_that_it_has_alone():
    history = replace(
        PAST,
        output_quantiles=tuple(100.0 * 1.2**i for i in range(20)),
        tool_s_beyond=tuple(0.001 * i for i in range(20)),
        longest_output_tokens=1e5,
        trajectories=500,
    )
    by_shape = {h100(1): COST, h100(2): replace(COST, t0_s=0.004)}

    def makespans_s(*longest_at: float) -> list[list[float]]:
        return equal_progress_s(
            history,
            by_shape,
            [{h100(1): 4}, {h100(2): 1, h100(1): 2}],
            widened={h100(2): 2},
            trajectories=200,
            prompt_tokens=100.0,
            prefilled_tokens=20_000.0,
            max_running=100,
            start_s=1.0,
            widened_at=8,
            longest_at=longest_at,
        )

    one, two, three = found = makespans_s(0.2, 0.5, 0.8)
    assert found == [*makespans_s(0.2), *makespans_s(0.5), *makespans_s(0.8)]
    assert all(a < b < c for a, b, c in zip(one, two, three, strict=True))


def test_few_trajectories_are_on_the_wide_engine_of_a_mix():
    wide = replace(COST, t0_s=0.001)
    by_shape = {h100(1): COST, h100(2): wide}
    # One of two, which has half of the way before it on average, and never less than one.
    alone = mixed_s({h100(2): 1, h100(1): 2}, by_shape, trajectories=1)
    assert alone == pytest.approx(1000 * (0.001 + 1 * 0.001), rel=1e-6)


@pytest.mark.parametrize("trajectories", [4, 40, 400])
def test_the_batches_of_a_mix_make_the_most_tokens_a_second(trajectories):
    wide = replace(COST, t0_s=0.006, t1_s=0.0006)
    left = trajectories * 0.75
    most = max(
        batch / (0.006 + batch * 0.0006) + 2 * other / (0.01 + other * 0.001)
        for batch in (left * i / 2000 for i in range(2001))
        if batch <= 100 and (other := min((left - batch) / 2, 100)) >= 0
    )
    found = mixed_s(
        {h100(2): 1, h100(1): 2}, {h100(1): COST, h100(2): wide}, trajectories=trajectories
    )
    assert found == pytest.approx(1000 * left / most, rel=1e-4)


def test_equal_shapes_make_a_mix_of_one():
    by_shape = {h100(1): COST, h100(2): COST}
    mix = mixed_s({h100(2): 2, h100(1): 4}, by_shape, trajectories=50)
    single = mixed_s({h100(1): 6}, by_shape, trajectories=50)
    assert mix == pytest.approx(single)


def test_few_of_many_trajectories_are_as_long_as_the_longest():
    lengths = tuple(100.0 * 1.01**i for i in range(256))
    past = replace(PAST, output_quantiles=lengths, longest_output_tokens=10 * lengths[-1])
    unknown, known = past, replace(past, trajectories=10_000)
    # The longest of 1,000 is shorter than that of 10,000, and that of more no longer.
    assert ends_s(known, trajectories=1_000)[h100(1)] < ends_s(unknown, trajectories=1_000)[h100(1)]
    same = (ends_s(each, trajectories=10_000)[h100(1)] for each in (known, unknown))
    assert next(same) == pytest.approx(next(same))
    fewer = replace(past, trajectories=3)
    assert (
        ends_s(fewer, trajectories=1_000)[h100(1)] >= ends_s(unknown, trajectories=1_000)[h100(1)]
    )


def test_the_longest_of_many_is_beyond_the_quantiles_of_history():
    lengths = tuple(100.0 * 1.01**i for i in range(256))
    short = replace(PAST, output_quantiles=lengths)
    long = replace(short, longest_output_tokens=10 * lengths[-1])
    assert ends_s(long, trajectories=10_000)[h100(1)] > ends_s(short, trajectories=10_000)[h100(1)]
    # Of few trajectories none is to be expected there.
    assert ends_s(long, trajectories=100) == ends_s(short, trajectories=100)


@given(
    lengths=st.lists(st.floats(1.0, 1e5), min_size=1, max_size=60),
    trajectories=st.integers(1, 10_000),
    gpus=st.integers(1, 16),
    kv=st.integers(1_000, 10**7),
)
def test_less_of_anything_never_ends_earlier(lengths, trajectories, gpus, kv):
    past = replace(PAST, output_quantiles=tuple(sorted(lengths)), appended_per_output=0.5)
    cost = replace(COST, t2_s=1e-8, prefill_s=1e-5, kv_capacity_tokens=kv)
    found = ends_s(past, {h100(1): cost}, gpus=gpus, trajectories=trajectories)[h100(1)]
    more = ends_s(past, {h100(1): cost}, gpus=gpus, trajectories=trajectories + 100)[h100(1)]
    slots = ends_s(past, {h100(1): cost}, gpus=gpus, trajectories=trajectories, max_running=50)[
        h100(1)
    ]
    room = replace(cost, kv_capacity_tokens=2 * kv)
    roomy = ends_s(past, {h100(1): room}, gpus=gpus, trajectories=trajectories)[h100(1)]
    assert 0.0 < roomy <= found * (1 + 1e-9)
    assert found <= more * (1 + 1e-9)
    assert found <= slots * (1 + 1e-9)
