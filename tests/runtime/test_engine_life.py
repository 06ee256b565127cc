"""Whether an engine works is judged by what it brings and counts, and not by one silent stream."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed; pip install 'heddle-rl[serve]'")

from campaigns.faults.answers_scene import in_virtual_time_too
from heddle_runtime.generation import Generation
from heddle_runtime.vllm_http.engine import MOST_MOVES, HttpEngine
from heddle_runtime.vllm_http.life import (
    BAD_HEALTH,
    EXPECTED_SHARE,
    PREFILL_TOKENS,
    WITHOUT_PREFILL,
    EngineLife,
)
from tests.rollout.contract import LONG_OUTPUT, ids, request, until
from tests.runtime.fake_vllm import FakeVllm
from tests.runtime.test_http_engine import (
    OUTPUT,
    PROMPT,
    SETTINGS,
    Setup,
    alone,
    one,
    run,
    setup,
    whole,
)

SILENCE_S = 10.0
QUICK = msgspec.structs.replace(SETTINGS, silence_s=1.0, silence_limit_s=120.0)


def life(now_s: float = 0.0) -> EngineLife:
    return EngineLife(now_s, silence_s=SILENCE_S)


# -- the judgement --------------------------------------------------------------------------------


def test_streams_and_calls_that_bring_nothing_are_a_hang_after_the_silence_and_not_before():
    judged = life()
    assert judged.hung(SILENCE_S - 0.1, streams=True, expected_s=0.0) == ""
    why = judged.hung(SILENCE_S, streams=True, expected_s=0.0)
    assert why == "streams and calls brought nothing for 10 s"


def test_an_engine_without_streams_has_twice_the_silence_to_answer_a_call():
    judged = life()
    assert judged.hung(2 * SILENCE_S - 0.1, streams=False, expected_s=0.0) == ""
    assert "no call was answered for 20 s" in judged.hung(20.0, streams=False, expected_s=0.0)
    judged.answered(15.0)
    assert judged.hung(34.0, streams=False, expected_s=0.0) == ""


def test_a_stream_that_goes_on_says_that_the_engine_works_although_no_call_is_answered():
    judged = life()
    for now_s in range(0, 100, 5):
        judged.brought(float(now_s), 1)
        assert judged.hung(now_s + 4.9, streams=True, expected_s=0.0) == ""


def test_an_engine_whose_calls_are_answered_hangs_where_its_iterations_stand_still():
    for moves in (True, False):
        judged = life()
        for now_s in range(1, 31):
            judged.answered(now_s)
            judged.counted(now_s, 7.0 + now_s * moves, None, 0)
        why = judged.hung(30.0, streams=True, expected_s=0.0)
        assert ("its iterations stand still for 29 s" in why) is not moves


@pytest.mark.parametrize(("grows", "hung"), [(True, False), (False, True)])
def test_used_kv_that_grows_is_work_and_kv_that_clients_free_is_none(grows, hung):
    judged = life()
    for now_s in range(1, 31):
        judged.answered(now_s)
        judged.counted(now_s, 7.0, None, 10_000 + (100 if grows else -100) * now_s)
    assert bool(judged.hung(30.0, streams=True, expected_s=0.0)) is hung


def test_without_a_counter_of_iterations_silence_is_no_hang_as_long_as_calls_are_answered():
    judged = life()
    for now_s in range(1, 200):
        judged.answered(now_s)
        judged.counted(now_s, None, None, 0)
        assert judged.hung(now_s, streams=True, expected_s=0.0) == ""


def test_counters_that_were_read_long_ago_say_nothing_of_now():
    judged = life()
    judged.counted(1.0, 7.0, None, 0)
    judged.answered(60.0)
    assert judged.hung(61.0, streams=True, expected_s=0.0) == ""


def test_what_a_prefill_should_take_is_waited_for_some_times_over():
    judged, expected_s = life(), 30.0
    for now_s in range(1, 200):
        judged.answered(now_s)
        judged.counted(now_s, 7.0, None, 0)
        still_s = now_s - 1.0
        hung = bool(judged.hung(now_s, streams=True, expected_s=expected_s))
        assert hung is (still_s >= EXPECTED_SHARE * expected_s)


def test_a_stream_that_begins_is_not_blamed_for_the_silence_before_it():
    judged = life()
    judged.answered(100.0)
    judged.begun(100.0)
    assert judged.hung(100.0 + SILENCE_S - 0.1, streams=True, expected_s=0.0) == ""


def test_health_takes_an_engine_out_by_answers_in_a_row_only():
    judged = life()
    assert not judged.health(503)
    assert not judged.health(200)
    assert [judged.health(500) for _ in range(BAD_HEALTH)] == [False] * (BAD_HEALTH - 1) + [True]


def test_tokens_beyond_those_of_streams_are_prefill():
    judged = life()
    judged.counted(0.0, 1e6, 1000.0, 0)  # of before: nothing is known of their prefill
    assert judged.prefills()
    judged.brought(20.0, 50)
    judged.counted(20.0, 1e6 + WITHOUT_PREFILL, 1050.0 + PREFILL_TOKENS, 0)  # streams lag a little
    assert (judged.prefills(), judged.prefilled) == (False, 0.0)
    judged.counted(21.0, 1e6 + 20, 1050.0 + PREFILL_TOKENS + 512, 0)
    assert (judged.prefills(), judged.prefilled) == (True, 512.0)


def test_an_engine_prefills_nothing_after_iterations_in_a_row_without_prefill():
    judged = life()
    judged.counted(0.0, 10.0, 0.0, 0)
    judged.counted(1.0, 10.0 + WITHOUT_PREFILL - 1, 0.0, 0)
    assert judged.prefills()
    judged.counted(2.0, 3.0, 0.0, 0)  # it was restarted
    assert judged.prefills()
    judged.counted(3.0, 4.0, 0.0, 0)
    assert not judged.prefills()
    judged.begun(4.0)
    assert judged.prefills()


def test_a_prefill_whose_tokens_are_not_counted_yet_takes_kv():
    judged = life()
    judged.counted(0.0, 10.0, 0.0, 5000)
    judged.brought(1.0, 100)
    judged.counted(1.0, 110.0, 100.0, 5100)
    assert (judged.grows, judged.prefills()) == (False, False)
    judged.brought(2.0, 100)
    judged.counted(2.0, 210.0, 200.0, 5200 + 512)
    assert (judged.grows, judged.prefills()) == (True, True)
    judged.brought(3.0, 100)
    judged.counted(3.0, 310.0, 300.0, 5300 + 512)
    assert (judged.grows, judged.prefills()) == (False, False)
    # What a stream that has ended makes free may hide what a prefill takes.
    judged.left(4000)
    judged.brought(4.0, 100)
    judged.counted(4.0, 410.0, 400.0, 3000)
    assert (judged.grows, judged.prefills()) == (True, True)


def test_it_moves_while_tokens_or_iterations_come_or_kv_is_taken():
    judged = life()
    assert not judged.moves(6.0)
    judged.brought(6.0, 1)
    assert judged.moves(10.0)
    assert not judged.moves(12.0)
    judged.counted(12.0, 1.0, None, 0)
    assert judged.moves(13.0)
    judged.counted(18.0, 1.0, None, 0)
    assert not judged.moves(18.0)
    judged.counted(19.0, 1.0, None, 512)
    assert judged.moves(19.0)


# -- engines --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def computing(server: FakeVllm, tokens: int, kv_tokens: int = 0) -> AsyncIterator[None]:
    """Compute what no stream shows: each iteration counts so many tokens and takes so much KV."""

    async def compute() -> None:
        while True:
            server.iterations += bool(tokens)
            server.iteration_tokens += tokens
            server.kv_tokens += kv_tokens
            await asyncio.sleep(0.02)

    task = asyncio.create_task(compute())
    try:
        yield
    finally:
        task.cancel()


async def two(made: Setup) -> tuple[HttpEngine, FakeVllm, HttpEngine, FakeVllm]:
    """Two engines, each with its server."""
    servers = [await made.serve() for _ in range(2)]
    for server in servers:
        await made.launcher.add(server.url)
    first, second = await made.begin(), await made.begin()
    by_url = {server.url: server for server in servers}
    assert first.facts is not None
    assert second.facts is not None
    return first, by_url[first.facts.url], second, by_url[second.facts.url]


def streamed(server: FakeVllm) -> int:
    """Generations that were asked for as streams."""
    return sum(bool(body.get("stream")) for body in server.seen)


def test_an_engine_that_stands_still_while_its_calls_are_answered_has_failed():
    async def main() -> None:
        async with one(QUICK) as (made, server):
            engine = await made.begin()
            payload = Generation()
            step = request("hung", ids("hung", PROMPT), LONG_OUTPUT)
            engine.start(msgspec.structs.replace(step, payload=payload))
            await until(lambda: server.generated > 20)
            server.frozen = True
            reason, salvaged = await made.recorder.take("failed")
            assert "its streams are silent and its iterations stand still" in reason
            got = list(salvaged["hung"].output_ids)
            assert got
            assert got == alone(ids("hung", PROMPT), len(got))
            # The step does not come back to it, should it seem well while the step still runs.
            assert payload.attempts.moved_from == [server.url]

    run(main)


@pytest.mark.parametrize("decoded", [0, 1])
def test_a_long_prefill_is_neither_moved_nor_a_fault(decoded: int):
    async def main() -> None:
        async with setup(QUICK) as made:
            engine, server, _, other = await two(made)
            step = request("long", ids("long", 20_000), OUTPUT)
            server.stall_after = 0
            async with computing(server, decoded, kv_tokens=decoded + 64):
                engine.start(msgspec.structs.replace(step, payload=Generation()))
                await asyncio.sleep(5 * QUICK.silence_s)
                assert (server.running, streamed(server), streamed(other)) == (1, 1, 0)
                server.stall_after = None
                end = await made.recorder.end_of("long")
            assert list(end.output_ids) == alone(list(step.prompt_ids))
            assert (streamed(server), streamed(other)) == (1, 0)
            assert made.recorder.reports == []

    in_virtual_time_too(main())


def test_a_step_that_stops_while_its_engine_computes_is_moved_once_with_its_tokens():
    async def main() -> None:
        async with setup(QUICK) as made:
            engine, server, _, other = await two(made)
            server.stall_after, other.stall_after = 20, 10
            payload = Generation(sampling={"temperature": 0.0})
            step = request("late", ids("late", PROMPT), OUTPUT)
            async with computing(server, 1), computing(other, 1):
                going = asyncio.create_task(
                    whole(made, engine, msgspec.structs.replace(step, payload=payload))
                )
                await until(lambda: other.running == 1)
                assert payload.attempts.moved_from == [server.url]
                await asyncio.sleep(4 * QUICK.silence_s)
                assert (server.running, other.running) == (0, 1)
                other.stall_after = None
                tokens, broken = await going
            assert (tokens, broken) == (alone(list(step.prompt_ids)), 1)
            assert (streamed(server), streamed(other)) == (1, 1)
            # It went on with what it had, and was not made anew.
            assert len(other.seen[-1]["token_ids"]) > PROMPT
            assert made.recorder.reports == []

    run(main)


def test_a_step_whose_events_are_longer_apart_than_the_silence_is_not_moved():
    async def main() -> None:
        async with setup(QUICK) as made:
            engine, server, _, other = await two(made)
            server.token_s = 2.0 * QUICK.silence_s / SETTINGS.stream_interval
            step = request("slow", ids("slow", PROMPT), 20)
            engine.start(msgspec.structs.replace(step, payload=Generation()))
            end = await made.recorder.end_of("slow")
            assert list(end.output_ids) == alone(list(step.prompt_ids), 20)
            assert (streamed(server), streamed(other)) == (1, 0)

    in_virtual_time_too(main())


def test_a_step_that_stops_at_one_engine_after_the_other_is_moved_twice():
    async def main() -> None:
        async with setup(QUICK) as made:
            servers = [await made.serve() for _ in range(4)]
            for server in servers:
                await made.launcher.add(server.url)
                server.stall_after = 5
            engine, *_ = [await made.begin() for _ in servers]
            payload = Generation(sampling={"temperature": 0.0})
            step = request("late", ids("late", PROMPT), OUTPUT)
            async with contextlib.AsyncExitStack() as stack:
                for server in servers:
                    await stack.enter_async_context(computing(server, 1))
                going = asyncio.create_task(
                    whole(made, engine, msgspec.structs.replace(step, payload=payload))
                )
                await until(lambda: len(payload.attempts.moved_from) == MOST_MOVES)
                await asyncio.sleep(4 * QUICK.silence_s)
                visited = [server for server in servers if streamed(server)]
                assert [streamed(server) for server in visited] == [1] * (MOST_MOVES + 1)
                assert {server.url for server in visited if not server.running} == set(
                    payload.attempts.moved_from
                )
                for server in servers:
                    server.stall_after = None
                tokens, broken = await going
            assert (tokens, broken) == (alone(list(step.prompt_ids)), MOST_MOVES)
            assert made.recorder.reports == []

    run(main)


@pytest.mark.parametrize("why_not", ["", "too soon", "two ranks", "it takes KV"])
def test_a_step_that_a_later_one_overtakes_is_moved(why_not: str):
    async def main() -> None:
        async with setup(QUICK) as made:
            for _ in range(2):
                server = await made.serve()
                server.ranks = 1 + (why_not == "two ranks")
                await made.launcher.add(server.url)
            engine, _ = [await made.begin() for _ in made.servers]
            assert engine.facts is not None
            server, other = sorted(made.servers, key=lambda each: each.url != engine.facts.url)
            server.stall_over = PROMPT
            payload = Generation()
            step = request("late", ids("late", 20_000), OUTPUT)
            # It computes all the time, and no iteration ends.
            async with computing(server, 0, kv_tokens=64 if why_not == "it takes KV" else 1):
                engine.start(msgspec.structs.replace(step, payload=payload))
                await asyncio.sleep(QUICK.silence_s * (0.4 if why_not == "too soon" else 0.6))
                engine.start(request("later", ids("later", PROMPT), WITHOUT_PREFILL // 2))
                await made.recorder.end_of("later")
                await asyncio.sleep(2 * QUICK.silence_s)
                server.stall_over = 1 << 30
                end = await made.recorder.end_of("late")
            assert list(end.output_ids) == alone(list(step.prompt_ids))
            assert payload.attempts.moved_from == ([] if why_not else [server.url])
            assert streamed(other) == (not why_not)
            assert made.recorder.reports == []

    in_virtual_time_too(main())


def test_a_process_that_stood_still_holds_its_own_silence_against_no_engine():
    async def main() -> None:
        async with one(QUICK) as (made, server):
            engine = await made.begin()
            server.stall_after = 0
            engine.start(request("on", ids("on", PROMPT), OUTPUT))
            await until(lambda: streamed(server) == 1)
            time.sleep(3 * QUICK.silence_s)
            server.stall_after = None
            end = await made.recorder.end_of("on")
            assert list(end.output_ids) == alone(ids("on", PROMPT))
            assert made.recorder.reports == []

    run(main)


def test_a_step_is_not_moved_where_there_is_no_other_engine():
    async def main() -> None:
        async with one(QUICK) as (made, server):
            engine = await made.begin()
            server.stall_after = 20
            async with computing(server, 1):
                engine.start(request("alone", ids("alone", PROMPT), OUTPUT))
                await asyncio.sleep(4 * QUICK.silence_s)
                assert (server.running, streamed(server)) == (1, 1)
                server.stall_after = None
                end = await made.recorder.end_of("alone")
            assert list(end.output_ids) == alone(ids("alone", PROMPT))
            assert made.recorder.reports == []

    run(main)
