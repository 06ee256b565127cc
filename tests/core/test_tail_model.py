"""The model of the tail: ends by the formula, kept up to date; no move makes them later."""

from copy import deepcopy
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given, settings

from heddle_core.estimate.group_cost import Work, work_of
from heddle_core.estimate.tail import TailModel
from tests.core.ledgers import step_cost
from tests.core.shapes import h100

BY_SHAPE = {h100(tp): step_cost(tp) for tp in (1, 2, 4)}


def tail_of(work: Work, homes: list[int], tps: list[int], *, max_running: int = 16) -> TailModel:
    shapes = [h100(tp) for tp in tps]
    at = np.array(homes, dtype=np.int64)
    return TailModel(work, at, shapes, BY_SHAPE, max_running=max_running)


def terms(work: Work, i: int, tp: int) -> tuple[float, float, float]:
    """Solo time, work and price of a move of one trajectory: written apart."""
    cost = BY_SHAPE[h100(tp)]
    output, appended = float(work.output_tokens[i]), float(work.appended_tokens[i])
    mean_context = float(work.context_tokens[i]) + (output + appended) / 2
    own = output * (cost.t1_s + cost.t2_s * mean_context)
    own += cost.prefill_s * float(work.prefill_tokens[i])
    solo = cost.t0_s * output + own + float(work.tool_s[i])
    return solo, own, cost.prefill_s * float(work.context_tokens[i])


def end_s(work: Work, homes: list[int], origins: list[int], tps: list[int], i: int) -> float:
    home = homes[i]
    solo, _, price = terms(work, i, tps[home])
    load = 0.0
    for j, other in enumerate(homes):
        if j != i and other == home:
            solo_j, own_j, _ = terms(work, j, tps[home])
            load += own_j / max(solo, solo_j)
    moved = home != origins[i]
    return solo + (solo - float(work.tool_s[i])) * load + (price if moved else 0.0)


WORKS = st.lists(
    st.tuples(
        st.floats(1.0, 20_000.0),
        st.floats(0.0, 20_000.0),
        st.floats(0.0, 3_000.0),
        st.floats(0.0, 60.0),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=8,
)
TPS = [1, 2, 4, 1]


def drawn(rows) -> tuple[Work, list[int]]:
    output, context, appended, tool_s, homes = map(list, zip(*rows, strict=True))
    work = work_of(
        output,
        context_tokens=np.array(context),
        appended_tokens=np.array(appended),
        prefill_tokens=np.array(appended),
        tool_s=np.array(tool_s),
    )
    return work, homes


@settings(max_examples=80)
@given(rows=WORKS, moves=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=12))
def test_ends_are_those_of_the_formula_however_homes_have_moved(rows, moves):
    work, homes = drawn(rows)
    crowd = tail_of(work, homes, TPS)
    origins = list(homes)
    for i, engine in [(i % len(homes), engine) for i, engine in moves]:
        crowd.move(i, engine)
        homes[i] = engine
    expected = [end_s(work, homes, origins, TPS, i) for i in range(len(homes))]
    assert crowd.homes.tolist() == homes
    assert crowd.ends == pytest.approx(expected, rel=1e-6)
    for i in range(len(homes)):
        there = [
            end_s(work, [*homes[:i], e, *homes[i + 1 :]], origins, TPS, i) for e in range(len(TPS))
        ]
        assert crowd.ends_at(i) == pytest.approx(there, rel=1e-6)


@settings(max_examples=80)
@given(rows=WORKS, least=st.floats(0.01, 5.0))
def test_moves_bring_the_end_forward_and_come_to_rest(rows, least):
    work, homes = drawn(rows)
    crowd = tail_of(work, homes, TPS)
    before = crowd.end_s()
    crowd.relocate(least_gain_s=least)
    moved = int((crowd.homes != np.array(homes)).sum())
    assert crowd.end_s() <= before - (least if moved else 0.0) + 1e-6
    assert crowd.end_s() >= crowd.ends.max() * (1 - 1e-9)


def one_at_a_time(crowd: TailModel, least: float, engines: int, most: int) -> list[int] | None:
    """Homes after `relocate`, each move tried alone; None where rounding could decide."""
    work = crowd.work
    kv = work.context_tokens + work.output_tokens + work.appended_tokens
    limit = [BY_SHAPE[shape].kv_capacity_tokens for shape in map(h100, engines_of(engines))]
    for _ in range(3):
        before = crowd.homes.tolist()
        for i in np.argsort(-crowd.ends, kind="stable").tolist():
            now_s, gains = crowd.end_s(), np.zeros(engines)
            for e in range(engines):
                here = crowd.homes == e
                if e == crowd.homes[i]:
                    continue
                if here.sum() >= most or kv[here].sum() + kv[i] > limit[e]:
                    gains[e] = -np.inf
                    continue
                tried = deepcopy(crowd)
                tried.move(i, e)
                gains[e] = now_s - tried.end_s()
            near = gains >= gains.max() - 1e-11 * now_s
            if abs(gains.max() - least) < 1e-11 * now_s:
                return None
            if gains.max() >= least:
                if near.sum() > 1:
                    return None
                crowd.move(i, int(gains.argmax()))
        if crowd.homes.tolist() == before:
            break
    homes: list[int] = crowd.homes.tolist()
    return homes


def engines_of(count: int) -> list[int]:
    """Tensor parallelism of so many engines, of one shape or of several."""
    return [1, 2, 4, 1, 2][:count]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 12, 13, 40, 64, 65, 75]),
    engines=st.integers(1, 5),
    alike=st.booleans(),
    most=st.sampled_from([1, 3, 16, 200]),
    scale=st.sampled_from([1.0, 1e3, 1e6]),
)
def test_moves_tried_together_are_those_tried_one_at_a_time(
    seed, count, engines, alike, most, scale
):
    draw = np.random.default_rng(seed)
    output = np.full(count, 700.0) if alike else draw.lognormal(7.0, 1.0, count)
    work = work_of(
        output.tolist(),
        context_tokens=np.full(count, 100.0) if alike else draw.uniform(0, 9_000, count),
        tool_s=np.zeros(count) if alike else draw.exponential(9.0, count) * scale,
    )
    homes = draw.integers(0, engines, count).tolist()
    tps = engines_of(engines)
    least = float(draw.uniform(0.001, 0.3))
    expected = one_at_a_time(tail_of(work, homes, tps), least, engines, most)
    assume(expected is not None)
    crowd = tail_of(work, homes, tps, max_running=most)
    crowd.relocate(least_gain_s=least)
    assert crowd.homes.tolist() == expected


@settings(max_examples=40)
@given(rows=WORKS)
def test_kv_and_slots_of_an_engine_are_respected(rows):
    work, _ = drawn(rows)
    homes = [2] * len(work)
    crowd = tail_of(work, homes, [1, 2, 4], max_running=2)
    crowd.relocate(least_gain_s=0.01)
    for e, tp in ((0, 1), (1, 2)):
        here = crowd.homes == e
        assert here.sum() <= 2
        kv = work.context_tokens + work.output_tokens + work.appended_tokens
        assert kv[here].sum() <= BY_SHAPE[h100(tp)].kv_capacity_tokens


def test_the_longest_moves_from_a_full_engine_to_an_idle_wide_one():
    work = work_of([8_000.0, 500.0, 500.0], context_tokens=np.full(3, 1_000.0))
    crowd = tail_of(work, [0, 0, 0], [1, 4])
    crowd.relocate(least_gain_s=0.5)
    assert crowd.homes[0] == 1


def test_a_trajectory_without_a_home_gets_the_one_where_it_ends_earliest():
    work = work_of([4_000.0, 4_000.0, 100.0])
    crowd = tail_of(work, [0, -1, -1], [1, 1])
    crowd.assign_unplaced()
    assert crowd.homes.tolist() == [0, 1, crowd.homes[2]]
    assert (crowd.homes >= 0).all()


def test_what_is_left_later_is_what_was_there_less_what_was_done_alone():
    work = work_of(
        [1_000.0, 100.0],
        context_tokens=np.array([500.0, 500.0]),
        prefill_tokens=0.0,
        tool_s=np.array([4.0, 0.4]),
    )
    crowd = tail_of(work, [0, 1], [1, 1])
    half_s = float(crowd.ends[0]) / 2
    left = crowd.after(half_s)
    assert left.output_tokens[0] == pytest.approx(500.0, rel=0.02)
    assert left.context_tokens[0] == pytest.approx(1_500.0 - left.output_tokens[0])
    assert left.tool_s[0] == pytest.approx(left.output_tokens[0] * 0.004)
    assert left.output_tokens[1] == 0.0
    assert crowd.after(0.0).output_tokens.tolist() == work.output_tokens.tolist()


def test_a_crowd_gets_as_far_as_its_common_iterations_allow():
    work = work_of([1_000.0] * 9 + [5.0], context_tokens=0.0, prefill_tokens=0.0)
    crowd = tail_of(work, [0] * 10, [1])
    cost = BY_SHAPE[h100(1)]
    # Nine of them run for 400 iterations: contexts are 200 tokens on average.
    iteration_s = cost.t0_s + 9 * (cost.t1_s + cost.t2_s * 200.0)
    left = crowd.after(400 * iteration_s)
    assert left.output_tokens[:9] == pytest.approx([600.0] * 9, rel=0.01)
    assert left.output_tokens[9] == 0.0


def test_contexts_from_elsewhere_are_restored_before_anything_is_made():
    work = work_of([1_000.0, 1_000.0], context_tokens=np.full(2, 10_000.0), prefill_tokens=0.0)
    crowd = tail_of(work, [0, 1], [1, 1])
    crowd.move(1, 0)
    restore_s = BY_SHAPE[h100(1)].prefill_s * 10_000.0
    assert crowd.after(restore_s).output_tokens.tolist() == [1_000.0, 1_000.0]
    assert crowd.after(restore_s + 1.0).output_tokens[0] < 1_000.0


def test_a_store_that_engines_share_makes_moves_cheaper():
    by_shape = {s: replace(cost, load_s=cost.prefill_s / 10) for s, cost in BY_SHAPE.items()}
    slow = {s: replace(cost, load_s=cost.prefill_s * 10) for s, cost in BY_SHAPE.items()}
    work = work_of([1_000.0], context_tokens=np.array([10_000.0]), prefill_tokens=0.0)
    at = np.array([0], dtype=np.int64)
    shapes = [h100(1), h100(1)]
    price_s = BY_SHAPE[h100(1)].prefill_s * 10_000.0
    for costs, factor in ((BY_SHAPE, 1.0), (by_shape, 0.1), (slow, 1.0)):
        ends = TailModel(work, at, shapes, costs, max_running=16).ends_at(0)
        assert ends[1] - ends[0] == pytest.approx(factor * price_s)
