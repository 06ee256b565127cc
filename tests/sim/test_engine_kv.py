"""What the engine keeps, finds again, shares and gives up of its KV, on hand-solved cases."""

import numpy as np
import pytest

from heddle_core.ids import TrajectoryId
from tests.sim.one_engine import A, B, Bench, C, G, table


def test_the_next_step_of_a_trajectory_finds_whole_blocks_of_its_context() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=11)
    bench.run()
    # 110 tokens have KV: six whole blocks. 20 new ones make 131, of which 96 are cached.
    assert bench.engine.export_kv(A) == 96
    bench.start(A, prompt=131, output=1, shared=111)
    bench.run()
    assert bench.ends[A][1].cached_tokens == 96
    assert bench.ends[A][1].prefill_s == pytest.approx(1.35)


def test_a_wholly_cached_prompt_still_computes_its_last_block() -> None:
    bench = Bench()
    bench.start(A, prompt=128, output=1)
    bench.run()
    bench.start(A, prompt=128, output=1, shared=128)
    bench.run()
    assert bench.ends[A][1].cached_tokens == 112


def test_kv_that_is_computed_again_is_not_cached_twice() -> None:
    bench = Bench()
    for shared in (0, 16):
        bench.start(A, prompt=16, output=1, shared=shared)
        bench.run()
    assert bench.ends[A][1].cached_tokens == 0
    assert bench.engine.kv_cached_tokens == bench.engine.export_kv(A) == 16


def test_a_blocked_queue_is_looked_at_again_when_cached_kv_goes() -> None:
    bench = Bench(table(kv_capacity_tokens=16 * 8), max_batched_tokens=33)
    bench.start(B, prompt=48, output=1)
    bench.run()
    began = bench.env.now
    bench.start(A, prompt=50, output=10)
    bench.at(began + 6.0, lambda: bench.start(B, prompt=112, output=1, shared=49))
    # A holds four blocks. With three cached, B's next chunk needs five; without them, two.
    bench.at(began + 7.0, lambda: bench.engine.release(B))
    bench.run()
    boundaries = began + 1.33 + 1.17 + 1.1 * np.arange(10)
    assert began + bench.ends[B][1].queued_s + 6.0 == pytest.approx(
        boundaries[np.searchsorted(boundaries, began + 7.0)]
    )


def test_a_rewritten_context_hits_only_what_it_kept() -> None:
    bench = Bench()
    bench.start(A, prompt=160, output=33)
    bench.run()
    assert bench.engine.export_kv(A) == 192
    bench.start(A, prompt=160, output=1, shared=70)
    assert bench.engine.export_kv(A) == 64
    bench.run()
    assert bench.ends[A][1].cached_tokens == 64


def test_without_prefix_caching_every_prompt_is_prefilled() -> None:
    bench = Bench(prefix_caching=False)
    for shared in (0, 100):
        bench.start(A, prompt=100, output=1, shared=shared)
        bench.run()
    assert bench.ends[A][1].cached_tokens == 0
    assert bench.engine.prefilled_tokens == 200
    assert bench.engine.import_kv(A, G, 64) == 0


def test_siblings_share_the_prompt_of_their_group_in_time_not_in_memory() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=2, group=G)
    bench.start(B, prompt=100, output=2, group=G)
    bench.start(C, prompt=100, output=2)
    bench.at(0.1, lambda: used.append(bench.engine.kv_used_tokens))
    used: list[int] = []
    bench.run()
    assert [bench.ends[name][1].cached_tokens for name in (A, B, C)] == [0, 96, 0]
    assert bench.engine.cached_tokens == 96
    assert used == [3 * 112]


def test_a_sibling_whose_kv_has_gone_shares_nothing() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=1, group=G)
    bench.run()
    bench.engine.release(A)
    bench.start(B, prompt=100, output=1, group=G)
    bench.run()
    assert bench.ends[B][1].cached_tokens == 0


def test_the_least_recently_used_gives_way_tail_first() -> None:
    bench = Bench(table(kv_capacity_tokens=16 * 10))
    bench.start(A, prompt=64, output=1)
    bench.run()
    bench.start(B, prompt=64, output=1)
    bench.run()
    bench.start(C, prompt=40, output=9)
    bench.at(bench.env.now + 1.0, lambda: seen.append(bench.engine.kv_used_tokens))
    seen: list[int] = []
    bench.run()
    # 4 + 4 blocks cached; C takes 3: one of A's goes, its tail.
    assert seen == [48]
    assert [bench.engine.export_kv(name) for name in (A, B, C)] == [48, 64, 48]


def test_the_last_admitted_loses_its_kv_when_none_is_left_and_keeps_its_tokens() -> None:
    bench = Bench(table(kv_capacity_tokens=16 * 4))
    bench.start(A, prompt=16, output=40)
    bench.start(B, prompt=16, output=40)
    bench.run()
    first, second = bench.ends[A][1], bench.ends[B][1]
    assert (first.tokens, first.recomputes) == (40, 0)
    assert (second.tokens, second.recomputes) == (40, 1)
    assert bench.engine.preemptions == 1
    # Both have a token after 1.32 s; 16 iterations of 1.2 s fill two blocks each. A makes its other
    # 23 tokens alone, in four blocks, to which B's cached KV gives way. Then B prefills the 33
    # tokens that it has, which yields its 18th token, and makes the last 22.
    alone_s = 1.32 + 16 * 1.2 + 23 * 1.1
    assert bench.end_s(A) == pytest.approx(alone_s)
    assert bench.end_s(B) == pytest.approx(alone_s + 1.33 + 22 * 1.1)


def test_several_give_way_in_one_iteration_the_last_admitted_first() -> None:
    bench = Bench(table(kv_capacity_tokens=16 * 6))
    names = [TrajectoryId(f"t{number}") for number in range(6)]
    for name in names:
        bench.start(name, prompt=15, output=10)
    bench.run()
    # After two tokens each has a full block, and none is free: three give way to the other three.
    assert bench.engine.preemptions == 3
    assert [bench.ends[name][1].recomputes for name in names] == [0, 0, 0, 1, 1, 1]
    first_s = 1.9 + 1.6 + 8 * 1.3
    again_s = first_s + 1.51 + 7 * 1.3  # 17 tokens of each are prefilled, which yields its third
    assert [bench.end_s(name) for name in names] == pytest.approx([first_s] * 3 + [again_s] * 3)


def test_migrated_kv_is_found_and_never_displaces_running_steps() -> None:
    bench = Bench(table(kv_capacity_tokens=16 * 12))
    bench.start(A, prompt=100, output=60)
    bench.at(3.0, lambda: placed.append(bench.engine.import_kv(B, G, 1000)))
    bench.at(3.5, lambda: placed.append(bench.engine.import_kv(A, G, 1000)))
    placed: list[int] = []
    bench.run()
    assert placed == [16 * 5, 0]
    # A grew to 10 blocks meanwhile: two of B's five are left.
    assert bench.engine.export_kv(B) == 32


def test_new_weights_void_cached_kv_and_that_of_steps_begun_before() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=2)
    bench.run()
    bench.start(B, prompt=200, output=5)
    bench.at(bench.env.now + 0.5, bench.engine.flush_kv)
    bench.run()
    assert bench.ends[B][1].recomputes == 0
    assert (bench.engine.export_kv(A), bench.engine.export_kv(B)) == (0, 0)
