"""The engine's rules of time one by one, on numbers that fit a sheet of paper."""

from typing import Any

import msgspec
import pytest

from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import EngineRefusedError, StepResult
from tests.sim.one_engine import A, B, Bench, C, table


def values(result: StepResult) -> tuple[Any, ...]:
    """All reports of a simulated engine on a step."""
    *said, output_ids, output_logprobs, extras, error = msgspec.structs.astuple(result)
    assert (output_ids, output_logprobs, extras, error) == ((), (), None, "")
    return tuple(said)


def test_a_lone_step_prefills_then_decodes() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=11)
    bench.run()
    now, result = bench.ends[A]
    # One iteration without decoding, 1 s and 1 s of prefill, yields token 1; ten of 1.1 s follow.
    assert now == pytest.approx(2.0 + 10 * 1.1)
    assert values(result) == (A, 11, True, 0.0, pytest.approx(2.0), pytest.approx(11.0), 0, 0)
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
    now, result = bench.ends[B]
    assert (now, values(result)) == (
        pytest.approx(5.8),
        (B, 1, True, pytest.approx(0.2), pytest.approx(1.6), 0.0, 0, 0),
    )
    assert bench.end_s(A) == pytest.approx(13.0 + 0.5)


def test_a_prompt_beside_a_small_batch_takes_the_least_of_a_prefill() -> None:
    bench = Bench(table(base_s=[3.0] + [1.0 + batch for batch in range(1, 9)]))
    bench.start(A, prompt=100, output=4)
    bench.at(4.5, lambda: bench.start(B, prompt=50, output=2))
    bench.run()
    # A: prefill to 4.0, then 2 s an iteration, to 6.0. The next prefills B: not 2 s and 0.5 s, but
    # 3 s and 0.5 s. Then both decode, 3 s.
    assert bench.end_s(A) == pytest.approx(12.5)
    assert bench.ends[B][1].prefill_s == pytest.approx(3.5)
    assert bench.end_s(B) == pytest.approx(12.5)


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


def test_an_abort_takes_effect_at_the_end_of_the_iteration_and_keeps_tokens_and_kv() -> None:
    bench = Bench()
    bench.start(A, prompt=100, output=40)
    bench.at(4.0, lambda: bench.engine.abort(A))
    bench.run()
    now, result = bench.ends[A]
    assert now == pytest.approx(4.2)
    assert (result.tokens, result.finished) == (3, False)
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


def test_an_abort_of_a_waiting_step_is_reported_at_once_but_not_from_inside() -> None:
    bench = Bench(max_running=1)
    bench.start(A, prompt=100, output=10)
    bench.start(B, prompt=100, output=10)

    def abort() -> None:
        bench.engine.abort(B)
        assert B not in bench.ends

    bench.at(1.5, abort)
    bench.run()
    now, result = bench.ends[B]
    assert (now, values(result)) == (1.5, (B, 0, False, 1.5, 0.0, 0.0, 0, 0))


def test_a_failed_engine_returns_the_tokens_made_and_reports_nothing_more() -> None:
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
    with pytest.raises(EngineRefusedError, match="after it failed"):
        bench.start(A, prompt=1, output=1)


def test_a_prefill_that_takes_no_time_is_still_an_iteration() -> None:
    free = table(base_s=[0.0] + [1.0] * 8, prefill_knots_s=[0.0, 0.0])
    bench = Bench(free)
    bench.start(A, prompt=100, output=3)
    bench.run()
    now, result = bench.ends[A]
    assert (now, values(result)) == (2.0, (A, 3, True, 0.0, 0.0, 2.0, 0, 0))


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
        (15_990, 11, 0, "needs KV for 16001 tokens, the engine holds 16000"),
        (0, 1, 0, "at least one prompt and one output token"),
        (5, 0, 0, "at least one prompt and one output token"),
        (5, 1, 6, "shared_tokens <= prompt_tokens"),
    ],
)
def test_a_step_that_no_engine_can_run_is_refused(
    prompt: int, output: int, shared: int, says: str
) -> None:
    with pytest.raises(EngineRefusedError, match=says):
        Bench().start(A, prompt=prompt, output=output, shared=shared)


def test_a_trajectory_has_one_step_at_a_time() -> None:
    bench = Bench()
    bench.start(A, prompt=10, output=5)
    with pytest.raises(EngineRefusedError, match="has a step here already"):
        bench.start(A, prompt=10, output=5)
    bench.at(2.0, lambda: bench.engine.trajectories() == [A] or pytest.fail("it runs"))
    bench.run()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_running": 9}, "max_running must be 1 to 8"),
        ({"latency": table(per_context_s=[0.0] * 7)}, "max_running must be 1 to 6"),
        ({"latency": table(base_s=[1.0] * 6)}, "max_running must be 1 to 5"),
        ({"max_batched_tokens": 7}, "cannot carry max_running=8"),
        ({"block_size": 0}, "block_size=0"),
        ({"speed": 0.0}, "speed must be above 0"),
        ({"latency": table(base_s=[0.0] * 9)}, "takes no time"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineRefusedError, match=says):
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


def test_sglang_computes_prompts_while_decoding_waits() -> None:
    # A: prompt until 2, then 1.1 a token. B comes at 2.5 and is computed from 3.1 to 5.1.
    bench = Bench(prefill_first=True)
    bench.start(A, 100, 3)
    bench.at(2.5, lambda: bench.start(B, 100, 2))
    bench.run()
    assert bench.end_s(A) == pytest.approx(2 + 1.1 + 2 + 1.2)
    assert bench.end_s(B) == pytest.approx(6.3)
    assert bench.ends[A][1].tokens == 3


def test_sglang_goes_on_with_a_long_prompt_before_it_decodes() -> None:
    bench = Bench(prefill_first=True, max_batched_tokens=100)
    bench.start(A, 100, 2)
    bench.at(0.5, lambda: bench.start(B, 200, 1))
    bench.run()
    assert bench.end_s(B) == pytest.approx(3 * 2)
    assert bench.end_s(A) == pytest.approx(3 * 2 + 1.1)


def test_sglang_admits_where_kv_remains_for_what_steps_may_make() -> None:
    room = {"kv_capacity_tokens": 100 + 100 + 4096}
    together, apart = Bench(table(**room)), Bench(table(**room), prefill_first=True)
    for bench in (together, apart):
        bench.start(A, 100, 3)
        bench.start(B, 100, 3)
        bench.run()
    assert together.end_s(B) == pytest.approx(together.end_s(A))
    assert apart.end_s(B) > apart.end_s(A)
