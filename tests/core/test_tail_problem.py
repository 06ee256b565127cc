"""The tail: what is merged and what moves, when the estimate pays and only then."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_core.solve.tail import TailProblem
from tests.core.ledgers import step_cost
from tests.core.shapes import h100


def problem(
    tps: tuple[int, ...],
    homes: tuple[int, ...],
    left: tuple[float, ...],
    *,
    start_s: float = 10.0,
    widest: int = 8,
) -> TailProblem:
    """Trajectories t0, t1, ... at engines e0, e1, ... with so many tokens left."""
    return TailProblem(
        engines=tuple(
            EngineSpec(engine=EngineId(f"e{k}"), shape=EngineShape("h100", tp), max_running=16)
            for k, tp in enumerate(tps)
        ),
        trajectories=tuple(TrajectoryId(f"t{i}") for i in range(len(homes))),
        homes=homes,
        output_tokens=left,
        context_tokens=(2_000.0,) * len(homes),
        appended_per_output=(0.1,) * len(homes),
        tool_s_per_output=(0.0,) * len(homes),
        by_shape={h100(tp): step_cost(tp) for tp in (1, 2, 4, 8) if tp <= widest},
        start_s=start_s,
        min_gain_s=2.0,
        margin=0.05,
        charged_s=0.2,
    )


EIGHT = (1,) * 8
STRAGGLER = problem((*EIGHT, *EIGHT), (0, 9), (200.0, 20_000.0))


def tps_of(p: TailProblem) -> list[int]:
    return sorted(engine.shape.tp for engine in p.solve().engines)


def test_idle_engines_become_a_wide_one_for_the_straggler():
    plan = STRAGGLER.solve()
    assert sorted(e.shape.tp for e in plan.engines) == [*EIGHT, 8]
    [new] = [e for e in plan.engines if e.shape.tp == 8]
    assert new.engine == "e0", "it is named after the first whose GPUs it gets"
    assert [e.engine for e in plan.engines if e.shape.tp == 1] == [f"e{k}" for k in range(8, 16)]
    assert dict(plan.homes)[new.engine] == ("t1",)


def test_a_wide_engine_does_not_take_the_name_of_one_that_stays():
    again = EngineSpec(engine=EngineId("e8", 1), shape=h100(1), max_running=16)
    plan = replace(STRAGGLER, engines=(again, *STRAGGLER.engines[1:])).solve()
    plan.check()
    [new] = [e for e in plan.engines if e.shape.tp == 8]
    assert new.engine == "e1"
    assert dict(plan.homes)[new.engine] == ("t1",)


def test_the_window_with_the_least_work_is_merged():
    busy = problem((*EIGHT, *EIGHT), (0, 1, 2, 9), (9_000.0, 9_000.0, 9_000.0, 20_000.0))
    [new] = [e for e in busy.solve().engines if e.shape.tp == 8]
    assert new.engine == "e8"


def test_nothing_changes_when_the_start_takes_longer_than_what_is_left():
    plan = replace(STRAGGLER, start_s=1_000.0).solve()
    assert plan.engines == STRAGGLER.engines
    assert plan.homes == ()


@pytest.mark.parametrize(("name", "value"), [("min_gain_s", 1e6), ("margin", 0.99)])
def test_nothing_changes_for_less_than_the_least_gain(name, value):
    assert replace(STRAGGLER, **{name: value}).solve().engines == STRAGGLER.engines


def test_all_engines_become_one_where_the_wait_for_it_pays():
    alone = problem(EIGHT, (0,), (20_000.0,))
    plan = alone.solve()
    assert [(e.engine, e.shape.tp) for e in plan.engines] == [("e0", 8)]
    assert [members for _, members in plan.homes] == [("t0",)]
    assert replace(alone, start_s=1_000.0).solve().engines == alone.engines


def test_engines_become_as_wide_as_it_pays():
    # Eight are left, and a wide engine is no faster for each of them than two of half its degree.
    costs = {h100(1): step_cost(1), h100(2): step_cost(2), h100(4): step_cost(2)}
    narrow = problem((1,) * 4, (0, 0, 1, 1, 2, 2, 3, 3), (20_000.0,) * 8)
    assert tps_of(replace(narrow, by_shape=costs, start_s=1.0)) == [2, 2]


def test_engines_of_the_widest_degree_are_left_alone():
    wide = problem((8, 8), (0, 0), (20_000.0, 20_000.0))
    plan = wide.solve()
    assert plan.engines == wide.engines


def test_nothing_is_merged_for_what_a_move_would_bring_as_well():
    idle_wide = problem((8, *EIGHT), (1,), (20_000.0,))
    assert idle_wide.solve().engines == idle_wide.engines


def test_only_neighbours_are_merged():
    # Side by side, widest first: 4 + 2 + 2 are the first eight GPUs, the eight of TP 1 the others.
    mixed = problem((1, 1, 2, 1, 1, 4, 1, 1, 2, 1, 1), (5,), (40_000.0,))
    new = [e for e in mixed.solve().engines if e.shape.tp == 8]
    kept = [e.engine for e in mixed.solve().engines if e.shape.tp != 8]
    assert [e.engine for e in new] == ["e0"]
    assert kept == ["e2", "e5", "e8"]


def test_gpus_that_do_not_make_a_wide_engine_stay_as_they_are():
    odd = problem((1, 1, 1), (0,), (40_000.0,), widest=2)
    assert tps_of(odd) == [1, 2]
    uneven = problem((6, 6, 4), (2,), (40_000.0,))
    uneven = replace(uneven, by_shape={h100(tp): step_cost(tp) for tp in (4, 6, 8)})
    assert uneven.solve().engines == uneven.engines


def test_a_shape_that_starts_soon_is_taken_where_others_start_late():
    waiting = replace(STRAGGLER, start_s=1_000.0, start_s_by_shape={h100(4): 2.0})
    assert [tp for tp in tps_of(waiting) if tp > 1] == [4]


def test_merging_is_compared_by_the_ends_of_the_same_trajectories():
    """Most end while the wide engine starts, and what is left gains less than the start costs."""
    many = problem((4, 4), (0, 1) * 16, (3_000.0,) * 30 + (6_000.0,) * 2, start_s=60.0)
    assert many.solve().engines == many.engines


@pytest.mark.parametrize("windows", [2, 5, 7])
def test_merging_all_is_tried_for_any_number_of_windows(windows):
    homes = tuple(range(2 * windows))
    crowd = problem((4,) * 2 * windows, homes, (40_000.0,) * 2 * windows, start_s=0.1)
    assert tps_of(crowd) == [8] * windows


@settings(max_examples=60)
@given(
    tps=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=20),
    rows=st.lists(st.tuples(st.integers(0, 19), st.floats(1.0, 40_000.0)), min_size=1, max_size=12),
    start_s=st.floats(0.0, 100.0),
)
def test_any_solution_uses_the_same_gpus_and_homes_are_its_engines(tps, rows, start_s):
    homes = tuple(home % len(tps) for home, _ in rows)
    p = problem(tuple(tps), homes, tuple(left for _, left in rows), start_s=start_s)
    plan = p.solve()
    assert plan == p.solve()
    assert sum(e.shape.tp for e in plan.engines) == sum(tps)
    names = [e.engine for e in plan.engines]
    assert len(dict.fromkeys(names)) == len(names)
    moved = [t for _, ts in plan.homes for t in ts]
    assert len(dict.fromkeys(moved)) == len(moved)
    present = dict(zip(p.trajectories, p.homes, strict=True))
    for engine, members in plan.homes:
        assert engine in names
        for t in members:
            same = p.engines[present[t]]
            assert same.engine != engine or same not in plan.engines, (
                "a trajectory that stays is not moved"
            )
