"""KV in host memory: what is stored, when it is loaded, and that it never loses a step."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_core.ids import TrajectoryId
from heddle_sim.host_kv import HostKv, HostLink
from tests.sim.one_engine import A, B, Bench, C, table
from tests.sim.test_engine_twin import Player, scenario, sim_engine

NAMES = st.sampled_from([A, B, C])


@given(
    capacity=st.integers(0, 20),
    ops=st.lists(st.tuples(st.sampled_from(["put", "trim"]), NAMES, st.integers(0, 25))),
)
def test_it_never_holds_more_than_its_room_and_counts_what_it_holds(capacity, ops) -> None:
    host = HostKv(capacity)
    for op, name, blocks in ops:
        before = host.held(name)
        getattr(host, op)(name, blocks)
        if op == "put":
            assert host.held(name) == min(blocks, capacity)
        else:
            assert host.held(name) == min(before, blocks)
        assert host.used == sum(map(host.held, (A, B, C))) <= capacity
    host.clear()
    assert host.used == host.held(A) == 0


def test_the_least_recently_stored_gives_way_tail_first() -> None:
    host = HostKv(10)
    for name, blocks in ((A, 4), (B, 4), (A, 5), (C, 3)):
        host.put(name, blocks)
    assert [host.held(name) for name in (A, B, C)] == [5, 2, 3]


def bench(host: HostKv | None, *, blocks: int = 10, **settings) -> Bench:
    """Blocks of 16 tokens; a load takes 0.5 s and 0.1 s for each block."""
    return Bench(
        table(kv_capacity_tokens=16 * blocks),
        host=host and HostLink(host, 0.5, 0.1),
        **settings,
    )


def evicted(host: HostKv | None) -> Bench:
    """An engine that has evicted the six blocks of A's context."""
    made = bench(host)
    made.start(A, prompt=100, output=1)
    made.run()
    made.start(B, prompt=159, output=1)
    made.run()
    assert made.engine.export_kv(A) == 0
    return made


def test_an_evicted_context_is_loaded_and_not_prefilled() -> None:
    for host, cached, seconds in ((None, 0, 2.2), (HostKv(99), 96, 0.5 + 0.6 + 1.24)):
        made = evicted(host)
        began, prefilled = made.env.now, made.engine.prefilled_tokens
        made.start(A, prompt=120, output=1, shared=100)
        made.run()
        assert made.ends[A][1].cached_tokens == cached
        assert made.engine.prefilled_tokens - prefilled == 120 - cached
        assert made.end_s(A) - began == pytest.approx(seconds)


def test_only_blocks_that_are_missing_are_loaded() -> None:
    made = bench(HostKv(99))
    made.start(A, prompt=100, output=1)
    made.run()
    made.start(B, prompt=96, output=1)  # four of ten blocks stay with A
    made.run()
    assert made.engine.export_kv(A) == 64
    began = made.env.now
    made.start(A, prompt=120, output=1, shared=100)
    made.run()
    assert made.end_s(A) - began == pytest.approx(0.5 + 0.2 + 1.24)


def test_a_context_that_is_here_is_not_loaded() -> None:
    made = bench(HostKv(99))
    made.start(A, prompt=100, output=1)
    made.run()
    began = made.env.now
    made.start(A, prompt=120, output=1, shared=100)
    made.run()
    assert made.end_s(A) - began == pytest.approx(1.24)


def test_a_rewritten_context_is_loaded_as_far_as_it_was_kept() -> None:
    made = evicted(HostKv(99))
    made.start(A, prompt=120, output=1, shared=50)
    made.run()
    assert made.ends[A][1].cached_tokens == 48


def test_one_load_at_a_time_and_others_run_meanwhile() -> None:
    host = HostKv(99)
    host.put(A, 6)
    host.put(B, 6)
    made = bench(host, blocks=40)
    made.start(C, prompt=16, output=20)
    made.start(A, prompt=100, output=1, shared=96)
    made.start(B, prompt=100, output=1, shared=96)
    made.run()
    # A is there after 1.1 s, B after 2.2 s; each joins the iteration that begins next.
    assert made.ends[A][1].queued_s == pytest.approx(1.16)
    assert made.ends[B][1].queued_s == pytest.approx(1.16 + 1.1 + 0.04)
    assert made.ends[C][1].recomputes == 0


def test_a_step_that_the_engine_preempted_gets_its_kv_back() -> None:
    found = {}
    for host in (None, HostKv(99)):
        made = bench(host, blocks=4)
        made.start(A, prompt=16, output=40)
        made.start(B, prompt=16, output=40)
        made.run()
        assert made.ends[B][1].recomputes == 1
        assert made.ends[B][1].tokens == 40
        found[host is not None] = made.engine.prefilled_tokens
    assert found == {False: 16 + 16 + 33, True: 16 + 16 + 1}


def test_a_step_that_is_aborted_while_it_loads_ends_at_once_and_frees_its_blocks() -> None:
    made = evicted(HostKv(99))
    began = made.env.now
    made.start(A, prompt=120, output=1, shared=100)
    made.at(began + 0.3, lambda: made.engine.abort(A))
    made.at(began + 0.4, lambda: made.start(A, prompt=120, output=1, shared=100))
    made.at(began + 0.35, lambda: seen.append(made.engine.waiting))
    seen: list[int] = []
    made.run()
    assert made.ends[A][1].finished
    assert made.engine.kv_used_tokens == 0
    assert made.engine.waiting == 0
    assert seen == [1], "its blocks are taken until the load has ended"


def test_new_weights_void_what_is_stored_and_what_is_on_the_way() -> None:
    host = HostKv(99)
    made = evicted(host)
    began = made.env.now
    made.start(A, prompt=120, output=1, shared=100)
    made.at(began + 0.3, made.engine.flush_kv)
    made.run()
    assert made.ends[A][1].cached_tokens == 0
    assert made.engine.kv_used_tokens == 0


def test_a_failure_while_a_context_loads_reports_its_step_once() -> None:
    made = evicted(HostKv(99))
    began = made.env.now
    del made.ends[A]
    made.start(A, prompt=120, output=1, shared=100)
    made.at(began + 0.3, lambda: lost.extend(made.engine.fail()))
    lost: list[tuple[TrajectoryId, int]] = []
    made.run()
    assert lost == [(A, 0)]
    assert A not in made.ends


def test_a_store_that_engines_share_outlives_them() -> None:
    host = HostKv(99)
    first, second = bench(host), bench(host)
    first.start(A, prompt=100, output=50)
    first.at(30.0, first.engine.fail)
    first.run()
    made = host.held(A)
    assert made > 6, "what the running step had made is stored too"
    second.start(A, prompt=130, output=1, shared=130)
    second.run()
    assert second.ends[A][1].cached_tokens == 16 * min(made, 8)


def test_without_prefix_caching_nothing_is_loaded() -> None:
    host = HostKv(99)
    host.put(A, 6)
    made = bench(host, prefix_caching=False)
    made.start(A, prompt=100, output=1, shared=96)
    made.run()
    assert made.ends[A][1].cached_tokens == 0


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    trajectories=st.integers(1, 14),
    tight=st.sampled_from((0.0, 0.3, 3.0)),
    disturbances=st.sampled_from((0, 3, 25)),
    blocks=st.sampled_from((1, 40, 10_000)),
)
def test_every_step_ends_once_and_no_block_is_lost(
    seed: int, trajectories: int, tight: float, disturbances: int, blocks: int
) -> None:
    case = replace(scenario(seed, trajectories, tight, disturbances), prefix_caching=True)
    host = HostKv(blocks)
    link = HostLink(host, 0.003, 0.0007)
    player = Player(partial(sim_engine, host=link), case)
    batch = player.engine._batch
    assert batch.used_blocks == batch.running_steps == link.loading == 0
    assert not batch.waiting
    assert host.used <= blocks
    finished = [end.trajectory for _, end in player.ends if end.finished]
    if not player.dead:
        steps = {f"t{i}": len(steps) for i, (_, _, steps) in enumerate(case.trajectories)}
        assert {name: finished.count(name) for name in steps} == steps


def test_the_scenarios_load() -> None:
    """The property above is empty where no context is ever loaded."""
    saved = 0
    for seed in range(30):
        case = replace(scenario(seed, 12, 0.3, 3), prefix_caching=True)
        without = Player(sim_engine, case).engine.prefilled_tokens
        link = HostLink(HostKv(10_000), 0.0, 1e-5)
        saved += without - Player(partial(sim_engine, host=link), case).engine.prefilled_tokens
    assert saved > 1_000
