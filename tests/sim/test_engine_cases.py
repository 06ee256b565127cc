"""The engine's rules one by one, on numbers that fit a sheet of paper."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import simpy

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_sim.engine import EngineError, SimEngine, StepResult
from heddle_sim.latency import LatencyTable

A, B, C = TrajectoryId("a"), TrajectoryId("b"), TrajectoryId("c")
G = GroupId("g")


def table(**changes: Any) -> LatencyTable:
    """1 s an iteration, 0.1 s more per decoding sequence, 0.01 s per prompt token."""
    fields: dict[str, Any] = {
        "model": "m",
        "gpu": "g",
        "tp": 1,
        "base_s": [1.0 + 0.1 * batch for batch in range(9)],
        "per_context_s": [0.0] * 9,
        "prefill_tokens": [0.0, 100.0],
        "prefill_knots_s": [0.0, 1.0],
        "prefill_pair_s": 0.0,
        "host_per_prefill_s": 0.0,
        "kv_capacity_tokens": 16_000,
        "kv_bytes_per_token": 1,
    }
    return LatencyTable(**(fields | changes))


class Bench:
    """One engine and what it answered, with the time of each answer."""

    def __init__(self, latency: LatencyTable | None = None, **settings: Any) -> None:
        self.env = simpy.Environment()
        self.ends: dict[TrajectoryId, tuple[float, StepResult]] = {}
        self.on_end: Callable[[StepResult], None] = lambda _: None
        self.engine = SimEngine(
            self.env,
            EngineId("e0"),
            latency or table(),
            on_end=self._ended,
            **({"max_running": 8} | settings),
        )

    def _ended(self, result: StepResult) -> None:
        self.ends[result.trajectory] = (self.env.now, result)
        self.on_end(result)

    def start(
        self, name: TrajectoryId, prompt: int, output: int, shared: int = 0, group: str = ""
    ) -> None:
        """Start a step of a trajectory in a group of its own, or of `group`."""
        self.engine.start(
            name,
            GroupId(group or name),
            prompt_tokens=prompt,
            shared_tokens=shared,
            output_tokens=output,
        )

    def at(self, time_s: float, act: Callable[[], object]) -> None:
        callbacks = self.env.timeout(time_s - self.env.now).callbacks
        assert callbacks is not None
        callbacks.append(lambda _: act())

    def run(self) -> None:
        self.env.run()

    def end_s(self, name: TrajectoryId) -> float:
        return self.ends[name][0]


def test_a_lone_step_prefills_then_decodes() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=11)
    bench.run()
    now, result = bench.ends[A]
    # One iteration without decoding, 1 s and 1 s of prefill, yields token 1; ten of 1.1 s follow.
    assert now == pytest.approx(2.0 + 10 * 1.1)
    assert result == (A, 11, True, 0.0, pytest.approx(2.0), pytest.approx(11.0), 0, 0)
    assert bench.engine.decoded_tokens == 11
    assert bench.engine.busy_s == pytest.approx(13.0)
    assert bench.engine.kv_used_tokens == 0


def test_context_slows_a_leap_by_its_sum() -> None:
    bench = Bench(table(per_context_s=[0.01] * 9))
    bench.start(A, prompt=100, output=4)
    bench.run()
    # Contexts of the three decode iterations: 101, 102, 103.
    assert bench.end_s(A) == pytest.approx(2.0 + 3 * 1.1 + 0.01 * (101 + 102 + 103))


def test_a_step_that_arrives_in_a_leap_joins_after_the_running_iteration() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=11)
    bench.at(4.0, lambda: bench.start(B, prompt=50, output=1))
    bench.run()
    # A's iterations end at 2.0, 3.1, 4.2; B's prefill shares the next: 1.1 s and 0.5 s.
    assert bench.ends[B] == (
        pytest.approx(5.8),
        (B, 1, True, pytest.approx(0.2), pytest.approx(1.6), 0.0, 0, 0),
    )
    assert bench.end_s(A) == pytest.approx(13.0 + 0.5)


def test_a_step_started_on_an_end_joins_the_iteration_of_that_instant() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=1)
    bench.on_end = lambda r: bench.start(B, prompt=100, output=1) if r.trajectory == A else None
    bench.run()
    assert bench.end_s(B) == pytest.approx(4.0)
    assert bench.ends[B][1].queued_s == 0.0


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding() -> None:
    bench = Bench(max_batched_tokens=101)
    bench.start(A, prompt=1, output=5)
    bench.at(0.5, lambda: bench.start(B, prompt=250, output=1))
    bench.run()
    # A: 1.01. Then chunks of 100, 100, 50 beside A's decode token, which counts first.
    assert bench.end_s(B) == pytest.approx(1.01 + 2 * (1.1 + 1.0) + (1.1 + 0.5))
    assert bench.end_s(A) == pytest.approx(1.01 + 2 * 2.1 + 1.6 + 1.1)


def test_the_queue_is_served_in_order_and_one_slot_at_a_time() -> None:
    bench = Bench(max_running=1)
    for name in (A, B, C):
        bench.start(name, prompt=100, output=1)
    assert (bench.engine.waiting, bench.engine.running) == (3, 0)
    bench.run()
    assert [bench.end_s(name) for name in (A, B, C)] == pytest.approx([2.0, 4.0, 6.0])
    assert bench.ends[C][1].queued_s == pytest.approx(4.0)


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


def test_an_abort_takes_effect_at_the_end_of_the_iteration_and_keeps_tokens_and_kv() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=40)
    bench.at(4.0, lambda: bench.engine.abort(A))
    bench.run()
    now, result = bench.ends[A]
    assert now == pytest.approx(4.2)
    assert (result.tokens, result.finished, result.preempted) == (3, False, True)
    bench.start(A, prompt=103, output=37, shared=103)
    bench.run()
    assert bench.ends[A][1].cached_tokens == 96


def test_a_step_that_finishes_at_the_boundary_of_its_abort_has_finished() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=3)
    bench.at(4.0, lambda: bench.engine.abort(A))
    bench.run()
    assert bench.ends[A][1].finished
    bench.engine.abort(A)  # too late: nothing happens
    bench.run()
    assert bench.end_s(A) == pytest.approx(4.2)


def test_an_abort_of_a_waiting_step_is_told_at_once_but_not_from_inside() -> None:
    bench = Bench(max_running=1)
    bench.start(A, prompt=100, output=10)
    bench.start(B, prompt=100, output=10)

    def abort() -> None:
        bench.engine.abort(B)
        assert B not in bench.ends

    bench.at(1.5, abort)
    bench.run()
    assert bench.ends[B] == (1.5, (B, 0, False, 1.5, 0.0, 0.0, 0, 0))


def test_a_failed_engine_names_the_tokens_made_and_says_nothing_more() -> None:
    bench = Bench(max_running=2)
    for name in (A, B, C):
        bench.start(name, prompt=100, output=10)
    lost: list[tuple[TrajectoryId, int]] = []
    bench.at(5.0, lambda: lost.extend(bench.engine.fail()))
    bench.run()
    # 3 s of prefill, then iterations of 1.2 s: the second is not over.
    assert lost == [(A, 2), (B, 2), (C, 0)]
    assert bench.ends == {}
    assert (bench.engine.running, bench.engine.waiting, bench.engine.kv_used_tokens) == (0, 0, 0)
    with pytest.raises(EngineError, match="after it failed"):
        bench.start(A, prompt=1, output=1)


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


def test_a_prefill_that_takes_no_time_is_still_an_iteration() -> None:
    free = table(base_s=[0.0] + [1.0] * 8, prefill_knots_s=[0.0, 0.0])
    bench = Bench(free)
    bench.start(A, prompt=100, output=3)
    bench.run()
    assert bench.ends[A] == (2.0, (A, 3, True, 0.0, 0.0, 2.0, 0, 0))


def test_speed_divides_every_time() -> None:
    bench = Bench(speed=2.0)
    bench.start(A, prompt=100, output=11)
    bench.run()
    assert bench.end_s(A) == pytest.approx(13.0 / 2)


def test_two_engines_end_when_the_slower_share_ends() -> None:
    """Hand-solved makespan: three steps on one engine, one long step on the other."""
    first, second = Bench(), Bench(speed=0.5)
    for name in (A, B, C):
        first.start(name, prompt=100, output=11)
    second.start(A, prompt=100, output=8)
    first.run()
    second.run()
    assert first.end_s(C) == pytest.approx(4.0 + 10 * 1.3)
    assert second.end_s(A) == pytest.approx(2 * (2.0 + 7 * 1.1))
    assert max(first.env.now, second.env.now) == pytest.approx(19.4)


@pytest.mark.parametrize(
    ("prompt", "output", "shared", "says"),
    [
        (15_990, 11, 0, "needs KV for 16001 tokens, the engine has room for 16000"),
        (0, 1, 0, "at least one prompt and one output token"),
        (5, 0, 0, "at least one prompt and one output token"),
        (5, 1, 6, "shared_tokens <= prompt_tokens"),
    ],
)
def test_a_step_that_no_engine_can_run_is_refused(
    prompt: int, output: int, shared: int, says: str
) -> None:
    with pytest.raises(EngineError, match=says):
        Bench().start(A, prompt=prompt, output=output, shared=shared)


def test_a_trajectory_has_one_step_at_a_time() -> None:
    bench = Bench()
    bench.start(A, prompt=10, output=5)
    with pytest.raises(EngineError, match="has a step here already"):
        bench.start(A, prompt=10, output=5)
    bench.at(2.0, lambda: bench.engine.trajectories() == [A] or pytest.fail("it runs"))
    bench.run()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_running": 9}, "max_running must be 1 to 8"),
        ({"max_batched_tokens": 7}, "cannot carry max_running=8"),
        ({"block_size": 0}, "block_size=0"),
        ({"speed": 0.0}, "speed must be above 0"),
        ({"latency": table(base_s=[0.0] * 9)}, "takes no time"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        Bench(**settings)


def test_events_are_counted_per_step_and_not_per_token() -> None:
    bench = Bench(table(kv_capacity_tokens=10_000_000))
    for i in range(8):
        bench.start(TrajectoryId(f"t{i}"), prompt=100, output=1_000_000 + i)
    events = 0
    while bench.env.peek() != float("inf"):
        bench.env.step()
        events += 1
    assert bench.engine.decoded_tokens == 8_000_028
    assert events <= 4 * 8
