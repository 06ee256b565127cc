"""Sessions of a gateway, without HTTP and in virtual time: identity, retries, lanes, ends."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from campaigns.faults.gateway_bench import Bench, in_virtual_time, prompt, set_up
from heddle_core.events import (
    StepFinished,
    StepPreempted,
    ToolReturned,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, RolloutId
from heddle_gateway.errors import ApiError
from heddle_gateway.identity import UniqueNames
from heddle_gateway.openai_api import has_reply
from heddle_gateway.sessions import SessionLimits
from heddle_runtime.generation import GenerationEnd

Play = Callable[[Bench], Awaitable[None]]


def play(main: Play, **options: object) -> Bench:
    """Run a scene on a fresh gateway; its journal must replay."""
    made: list[Bench] = []

    async def scene() -> None:
        bench = Bench(**options)  # type: ignore[arg-type]
        made.append(bench)
        async with bench.running():
            await main(bench)

    in_virtual_time(scene())
    assert made[0].replays()
    return made[0]


def outcomes(bench: Bench) -> dict[str, str]:
    return {e.trajectory: e.outcome for e in bench.events(TrajectoryFinished)}


def test_the_steps_of_a_session_are_one_trajectory_and_its_client_is_the_tool():
    async def main(bench: Bench) -> None:
        context = await bench.step("s/1", prompt(1))
        await asyncio.sleep(3.0)
        context = await bench.step("s/1", [*context, *prompt(2, 40)], 16)
        assert bench.gateway.sessions.finish("s/1")
        assert not bench.gateway.sessions.finish("s/1")  # any number of times
        assert len(context) == 100 + 8 + 40 + 16

    bench = play(main, mean_tokens=100_000)
    [arrived] = bench.events(TrajectoryArrived)
    assert (arrived.trajectory, arrived.prompt_tokens) == ("s/1", 100)
    assert [e.output_tokens for e in bench.events(StepFinished)] == [8, 16]
    [tool] = bench.events(ToolReturned)
    assert (tool.observation_tokens, tool.context_tokens, tool.ok) == (40, 148, None)
    finished = bench.events(StepFinished)
    assert tool.time_s - finished[0].time_s == pytest.approx(3.0, abs=0.01)
    assert outcomes(bench) == {"s/1": "completed"}


def test_a_retry_attaches_to_the_step_under_way_and_later_gets_the_kept_answer():
    async def main(bench: Bench) -> None:
        first = bench.submit("s", prompt(1))
        assert bench.submit("s", prompt(1)) is first
        assert first.clients == 2
        await first.answer()
        bench.gateway.sessions.release(first, delivered=False)
        bench.gateway.sessions.release(first, delivered=False)
        await asyncio.sleep(50.0)
        again = bench.submit("s", prompt(1))
        assert again is first
        assert (again.prompt_tokens, len(again.prompt_ids), again.relay) == (
            len(prompt(1)),
            0,
            None,
        )
        bench.gateway.sessions.release(again, delivered=True)
        await asyncio.sleep(60.0)
        fresh = bench.submit("s", prompt(1))
        assert fresh is not first
        await fresh.answer()
        bench.gateway.sessions.release(fresh, delivered=True)

    assert len(play(main).events(StepFinished)) == 2


def test_a_request_with_other_sampling_is_no_retry():
    async def main(bench: Bench) -> None:
        first = bench.submit("s", prompt(1))
        other = bench.submit("s", prompt(1), sampling={"temperature": 0.5})
        assert other is not first
        await asyncio.gather(first.answer(), other.answer())

    bench = play(main)
    assert [e.trajectory for e in bench.events(TrajectoryArrived)] == ["s", "s~1"]


def test_parallel_requests_of_a_session_are_trajectories_of_their_own_and_keep_to_them():
    async def main(bench: Bench) -> None:
        a, b = bench.submit("s", prompt(1)), bench.submit("s", prompt(2))
        await asyncio.gather(a.answer(), b.answer())
        for step in (a, b):
            bench.gateway.sessions.release(step, delivered=True)
        await bench.step("s", [*prompt(2), *b.output_ids, *prompt(3, 20)])
        await bench.step("s", [*prompt(1), *a.output_ids, *prompt(3, 20)])
        bench.gateway.sessions.finish("s")

    bench = play(main)
    assert [e.trajectory for e in bench.events(StepFinished)][2:] == ["s~1", "s"]
    assert outcomes(bench) == {"s": "completed", "s~1": "completed"}
    assert all(e.observation_tokens == 20 for e in bench.events(ToolReturned))


def test_a_session_that_comes_again_after_its_end_is_another_trajectory():
    async def main(bench: Bench) -> None:
        for seed in range(3):
            await bench.step("7_0", prompt(seed))
            bench.gateway.sessions.finish("7_0")

    bench = play(main)
    arrived = bench.events(TrajectoryArrived)
    assert [e.trajectory for e in arrived] == ["7_0", "7_0#2", "7_0#3"]
    assert {e.group for e in arrived} == {"7"}


def test_a_finished_session_that_repeats_its_prompt_gets_no_kept_answer():
    async def main(bench: Bench) -> None:
        for _ in range(2):
            await bench.step("7_0", prompt(1))
            bench.gateway.sessions.finish("7_0")

    assert len(play(main).events(StepFinished)) == 2


def test_a_name_is_given_once_also_where_it_may_have_been_used():
    names = UniqueNames()
    assert [names.of(each) for each in ("a", "b", "a", "b", "a")] == ["a", "b", "a#2", "b#3", "a#4"]
    names._bits = bytearray(b"\xff") * len(names._bits)
    assert [names.of(each) for each in ("c", "c", "d")] == ["c#5", "c#6", "d#7"]


def test_names_made_of_ids_are_never_those_of_other_sessions():
    async def main(bench: Bench) -> None:
        for session in ("a", "a", "a#2", "a~1", "../../x", "é\n\x00"):
            await bench.step(session, prompt(1))
            bench.gateway.sessions.finish(session)

    bench = play(main, limits=SessionLimits(keep_answer_s=0.0))
    names = [e.trajectory for e in bench.events(TrajectoryArrived)]
    assert names == ["a", "a#2", "a%232", "a%7E1", "../../x", "%C3%A9%0A%00"]


def test_an_id_like_the_name_of_a_session_without_one_is_another_session():
    async def main(bench: Bench) -> None:
        sessions = bench.gateway.sessions
        await bench.step("anon~1", prompt(1))
        await bench.step("", prompt(2))
        assert len(sessions) == 2
        assert sessions.finish("anon~1")
        await asyncio.sleep(1.0)
        assert not sessions.finish("anon~1")
        await bench.step("anon~1", prompt(3))
        await asyncio.sleep(70.0)
        assert len(sessions) == 0

    bench = play(main, limits=SessionLimits(idle_s=60.0))
    assert outcomes(bench) == {
        "anon%7E1": "completed",
        "anon~1": "cancelled",
        "anon%7E1#2": "cancelled",
    }


def test_a_client_that_goes_frees_the_engine_after_the_grace_and_one_that_returns_keeps_it():
    async def main(bench: Bench) -> None:
        stays = bench.submit("stays", prompt(1), 2000)
        bench.gateway.sessions.release(stays, delivered=False)
        goes = bench.submit("goes", prompt(2), 2000)
        bench.gateway.sessions.release(goes, delivered=False)
        await asyncio.sleep(1.5)
        assert bench.submit("stays", prompt(1), 2000) is stays
        await asyncio.sleep(1.5)
        assert goes.cancelled
        assert not stays.over
        await stays.answer()

    bench = play(main, mean_tokens=100_000)
    assert outcomes(bench)["goes"] == "cancelled"
    assert [e.trajectory for e in bench.events(StepFinished)] == ["stays"]


def test_tokens_of_a_cancelled_step_are_kept_for_its_retry():
    async def main(bench: Bench) -> None:
        lost = bench.submit("s", prompt(1), 2000)
        await asyncio.sleep(0.1)
        lost.take([5, 6, 7])  # as an engine reports them while it runs
        bench.gateway.sessions.release(lost, delivered=False)
        await asyncio.sleep(3.0)
        assert lost.cancelled
        again = bench.submit("s", prompt(1), 2000)
        assert list(again.output_ids) == [5, 6]  # the last one could have been the end
        await again.answer()
        assert list(again.output_ids[:2]) == [5, 6]
        assert len(again.output_ids) == 2000

    bench = play(main, mean_tokens=100_000)
    assert [e.prompt_tokens for e in bench.events(TrajectoryArrived)] == [100, 102]
    assert [e.output_tokens for e in bench.events(StepFinished)] == [1998]


def test_a_step_with_log_probs_or_a_seed_begins_anew_after_it_was_cancelled():
    async def main(bench: Bench) -> None:
        for name, sampling in (("a", {"logprobs": 0}), ("b", {"seed": 3})):
            lost = bench.submit(name, prompt(1), 2000, sampling=sampling)
            await asyncio.sleep(0.1)
            lost.take([5, 6, 7])
            bench.gateway.sessions.release(lost, delivered=False)
        await asyncio.sleep(3.0)
        for name, sampling in (("a", {"logprobs": 0}), ("b", {"seed": 3})):
            assert not bench.submit(name, prompt(1), 2000, sampling=sampling).output_ids

    play(main, mean_tokens=100_000)


def test_an_idle_session_is_cancelled_and_a_late_request_opens_it_again():
    async def main(bench: Bench) -> None:
        context = await bench.step("s", prompt(1))
        await asyncio.sleep(40.0)
        context = await bench.step("s", [*context, 5])
        await asyncio.sleep(61.0)
        await bench.step("s", [*context, 5])

    bench = play(main, limits=SessionLimits(idle_s=60.0))
    assert [e.trajectory for e in bench.events(TrajectoryArrived)] == ["s", "s#2"]
    assert outcomes(bench)["s"] == "cancelled"


def test_sessions_do_not_age_during_a_pause_and_no_step_begins():
    async def main(bench: Bench) -> None:
        context = await bench.step("s", prompt(1))
        bench.gateway.pause()
        held = bench.submit("t", prompt(2))
        await asyncio.sleep(100.0)
        assert not held.over
        bench.gateway.resume()
        await held.answer()
        await bench.step("s", [*context, 5])

    bench = play(main, limits=SessionLimits(idle_s=60.0))
    assert [e.trajectory for e in bench.events(TrajectoryArrived)] == ["s", "t"]
    assert bench.events(StepFinished)[1].time_s > 100.0


def test_finishing_a_session_ends_its_running_step_as_aborted():
    async def main(bench: Bench) -> None:
        step = bench.submit("s", prompt(1), 2000)
        await asyncio.sleep(1.0)
        bench.gateway.sessions.finish("s")
        assert (await step.answer()).finish_reason == "abort"
        again = bench.submit("s", prompt(1), 20)
        assert again is not step
        await again.answer()

    bench = play(main, mean_tokens=100_000)
    assert outcomes(bench)["s"] == "cancelled"


def test_an_aborted_step_is_not_kept_for_the_same_request():
    async def main(bench: Bench) -> None:
        step = bench.submit("s", prompt(1), 20)
        assert bench.gateway.abort_all("abort_requests") == 1
        assert (await step.answer()).finish_reason == "abort"
        assert (await bench.end("s", prompt(1), 20)).finish_reason == "length"

    play(main, mean_tokens=100_000)


def test_a_session_ends_with_the_answer_of_its_final_request():
    async def main(bench: Bench) -> None:
        await bench.step("s", prompt(1), final=True)
        await asyncio.sleep(0.0)
        assert not len(bench.gateway.sessions)

    assert outcomes(play(main)) == {"s": "completed"}


def test_a_prompt_that_no_engine_holds_is_refused():
    async def main(bench: Bench) -> None:
        step = bench.submit("s", prompt(1, 400_000))
        with pytest.raises(ApiError) as refused:
            await step.answer()
        assert refused.value.status == 400
        assert refused.value.error["code"] == "context_length_exceeded"

    play(main)


def test_a_preempted_step_goes_on_and_its_client_sees_one_answer():
    async def main(bench: Bench) -> None:
        step = bench.submit("s", prompt(1), 500)
        undisturbed = bench.submit("s", prompt(1), 500)
        assert undisturbed is step
        await asyncio.sleep(1.0)
        bench.gateway.driver.abort_running(EngineId(step.engine))
        await step.answer()
        assert len(step.output_ids) == 500
        assert step.dispatches == 2

    bench = play(main, mean_tokens=100_000)
    assert len(bench.events(StepPreempted)) == 1


def test_the_death_of_an_engine_is_invisible_and_the_third_in_one_prefill_an_error():
    async def main(bench: Bench) -> None:
        once = bench.submit("once", prompt(1), 600)
        await asyncio.sleep(1.0)
        bench.launcher.fail(EngineId(once.engine))
        await once.answer()
        assert len(once.output_ids) == 600
        thrice = bench.submit("thrice", prompt(2), 100_000)
        for _ in range(3):
            while not bench.gateway.driver.computes:
                await asyncio.sleep(0.001)
            bench.launcher.fail(EngineId(thrice.engine))
            await asyncio.sleep(0.0)
        with pytest.raises(ApiError, match="3 engines died"):
            await thrice.answer()

    bench = play(main, mean_tokens=10_000_000)
    assert outcomes(bench)["thrice"] == "cancelled"


def test_engines_that_die_in_its_decode_are_not_held_against_a_step_so_soon():
    async def main(bench: Bench) -> None:
        often = bench.submit("often", prompt(2), 30_000)
        while not often.over:
            await asyncio.sleep(1.0)
            if bench.gateway.driver.computes:
                bench.launcher.fail(EngineId(often.engine))
        with pytest.raises(ApiError, match="engines died"):
            await often.answer()
        assert often.engine_deaths == 8 or often.deaths_in_prefill == 3
        assert often.engine_deaths > 3

    play(main, mean_tokens=10_000_000, setup=set_up(engines=4))


def test_steps_without_any_engine_are_held_and_then_refused():
    async def main(bench: Bench) -> None:
        await bench.step("first", prompt(0))
        for name in ("e0", "e1"):
            bench.launcher.fail(EngineId(name))
        step = bench.submit("s", prompt(1))
        await asyncio.sleep(2.0)
        assert not step.over
        with pytest.raises(ApiError, match="no engine for 5 s"):
            await step.answer()

    play(main, engine_wait_s=5.0)


def test_rollouts_of_the_client_take_the_sessions_that_begin_in_them():
    async def main(bench: Bench) -> None:
        gateway = bench.gateway
        gateway.open_rollout(RolloutId("r1"), trajectories=2, weights_version=3)
        await asyncio.gather(*(bench.step(f"a_{n}", prompt(n)) for n in range(3)))
        gateway.open_rollout(RolloutId("r2"))
        await bench.step("b", prompt(9))
        gateway.close_rollout(RolloutId("r2"))
        await bench.step("c", prompt(10))

    bench = play(main)
    assert [e.rollout for e in bench.events(TrajectoryArrived)] == [
        *("r1", "r1", "rollout"),
        *("r2", "rollout"),
    ]


def test_the_end_of_the_gateway_refuses_what_waits_so_that_it_can_be_sent_again():
    async def main(bench: Bench) -> None:
        step = bench.submit("s", prompt(1), 2000)
        await asyncio.sleep(1.0)
        await bench.gateway.close(1.0)
        with pytest.raises(ApiError) as refused:
            await step.answer()
        assert refused.value.status == 503
        with pytest.raises(ApiError, match="ending"):
            bench.submit("s", prompt(1))

    assert outcomes(play(main, mean_tokens=100_000)) == {"s": "cancelled"}


def test_log_probs_that_do_not_match_the_tokens_are_an_error_not_an_answer():
    async def main(bench: Bench) -> None:
        step = bench.submit("s", prompt(1), 8, sampling={"logprobs": 0})
        step.logprobs.append({"token_id": 1})
        with pytest.raises(ApiError, match="9 log-probs for 8 tokens"):
            await step.answer()

    play(main, mean_tokens=100_000)


# -- no session id -----------------------------------------------------------------------------


def test_requests_without_an_id_go_on_with_the_trajectory_whose_context_they_extend():
    async def main(bench: Bench) -> None:
        contexts = [prompt(n) for n in range(6)]
        for _ in range(4):
            made = await asyncio.gather(*(bench.step("", c) for c in contexts))
            contexts = [[*c, *prompt(50 + n, 30)] for n, c in enumerate(made)]

    bench = play(main)
    assert len(bench.events(TrajectoryArrived)) == 6
    assert len(bench.events(StepFinished)) == 24
    assert all(e.observation_tokens == 30 for e in bench.events(ToolReturned))


def test_samples_of_one_prompt_without_ids_stay_apart_and_are_a_group():
    async def main(bench: Bench) -> None:
        contexts = [prompt(1)] * 8
        made = await asyncio.gather(*(bench.step("", c, 40) for c in contexts))
        late = await bench.step("", prompt(1), 40)  # a sample more, after the others have ended
        for context in (*made, late):
            await bench.step("", [*context, 4, 17, 17], 40)

    bench = play(main, mean_tokens=100_000)
    arrived = bench.events(TrajectoryArrived)
    assert len(arrived) == 9
    assert len({e.group for e in arrived}) == 1
    steps = [e.trajectory for e in bench.events(StepFinished)]
    assert all(steps.count(t.trajectory) == 2 for t in arrived)


def test_tasks_that_share_long_instructions_are_not_taken_for_one():
    async def main(bench: Bench) -> None:
        system = prompt(1, 3000)
        for n in range(5):
            await bench.step("", [*system, *prompt(n + 10, 20)], has_reply=False)
            await bench.step("", [*system, *prompt(n + 30, 200)])

    assert len(play(main).events(TrajectoryArrived)) == 10


@pytest.mark.parametrize("has_reply", [True, None])
def test_a_reply_that_comes_back_changed_still_continues_its_trajectory(has_reply: bool | None):
    async def main(bench: Bench) -> None:
        made = await bench.step("", prompt(1), 64)
        changed = [*made[:140], 9, *made[141:], *prompt(2, 50)]
        await bench.step("", changed, has_reply=has_reply)

    bench = play(main, mean_tokens=100_000)
    assert len(bench.events(TrajectoryArrived)) == 1
    [tool] = bench.events(ToolReturned)
    assert tool.context_tokens == 214


def test_messages_say_whether_a_model_has_replied():
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}

    def replied(path: str, messages: object) -> bool | None:
        return has_reply(path, {"messages": msgspec.Raw(msgspec.json.encode(messages))})

    assert replied("/v1/chat/completions", [system, user]) is False
    for role in ("assistant", "tool", "function"):
        told = [user, {"role": role, "content": "c"}, user]
        assert replied("/v1/chat/completions", told) is True
        assert replied("/inference/v1/generate", told) is None
    for none in ("a", ["a"], {}):
        assert replied("/v1/chat/completions", none) is None
    assert has_reply("/v1/chat/completions", {"messages": []}) is None


def test_a_compacted_history_continues_its_trajectory_if_nothing_else_began_so():
    async def main(bench: Bench) -> None:
        for seed in (1, 1, 2):
            await bench.step("", prompt(seed), 64)
        await bench.step("", [*prompt(2), *prompt(7, 60)], has_reply=True)
        await bench.step("", [*prompt(1), *prompt(8, 60)], has_reply=True)  # which of the two?

    bench = play(main, mean_tokens=100_000)
    assert len(bench.events(TrajectoryArrived)) == 4
    [tool] = bench.events(ToolReturned)
    assert (tool.observation_tokens, tool.context_tokens) == (60, 160)


def test_without_an_id_only_a_lost_request_is_repeated():
    async def main(bench: Bench) -> None:
        lost, sample = bench.submit("", prompt(1), 500), bench.submit("", prompt(1), 500)
        assert sample is not lost
        bench.gateway.sessions.release(lost, delivered=False)
        assert bench.submit("", prompt(1), 500) is lost
        await asyncio.gather(lost.answer(), sample.answer())
        bench.gateway.sessions.release(lost, delivered=True)
        assert bench.submit("", prompt(1), 500) is not lost

    play(main)


def test_what_ends_is_forgotten():
    async def main(bench: Bench) -> None:
        sessions = bench.gateway.sessions
        await asyncio.gather(*(bench.step(f"s_{n}", prompt(n)) for n in range(40)))
        await asyncio.gather(*(bench.step("", prompt(n + 100)) for n in range(40)))
        assert (len(sessions), sessions.trajectories, sessions.idle) == (80, 80, 80)
        await asyncio.sleep(40.0)
        assert (len(sessions), sessions.trajectories, sessions.idle) == (0, 0, 0)
        for held in ("_sessions", "_of", "_groups", "_idle", "_answers", "_steps", "_agents"):
            assert not getattr(sessions, held), held
        assert not len(sessions._continuations)
        assert not bench.gateway.driver._trajectories

    play(main, limits=SessionLimits(idle_s=10.0, keep_answer_s=20.0))


@pytest.mark.parametrize("policy", ["verl", "heddle", "seer", "thunderagent", "continuum"])
def test_policies_run_many_sessions_and_every_journal_replays(policy: str):
    async def agent(bench: Bench, n: int) -> None:
        context = prompt(n, 50 + 13 * n)
        for step in range(1 + n % 5):
            await asyncio.sleep(0.3 * (n % 7))
            context = [*await bench.step(f"g{n // 4}_{n % 4}", context, 400), *prompt(step, 20)]
        if n % 3:
            bench.gateway.sessions.finish(f"g{n // 4}_{n % 4}")

    async def main(bench: Bench) -> None:
        await asyncio.gather(*(agent(bench, n) for n in range(32)))

    bench = play(main, setup=set_up(policy, slots=3), mean_tokens=100)
    finished = outcomes(bench)
    assert len(finished) == 32
    assert sum(how == "completed" for how in finished.values()) == 21
    assert len(bench.events(StepFinished)) == sum(1 + n % 5 for n in range(32))


def test_the_end_of_a_step_is_reported_as_the_engine_says_it():
    async def main(bench: Bench) -> None:
        assert (await bench.end("s", prompt(1), 5)).finish_reason == "length"
        end = await bench.end("t", prompt(1), 50_000)
        assert end == GenerationEnd(finish_reason="stop")

    play(main, mean_tokens=20)


def test_a_defect_of_the_sessions_ends_the_run_and_not_only_their_ends():
    async def scene() -> None:
        bench = Bench()
        serving = asyncio.get_running_loop().create_task(bench.gateway.run())
        await asyncio.sleep(1.0)
        step = bench.submit("s", prompt(1), 2000)
        bench.gateway.sessions.sweep = None  # type: ignore[method-assign, assignment]
        with pytest.raises(TypeError):
            await serving
        with pytest.raises(ApiError, match="the gateway has failed"):
            await step.answer()
        assert not bench.gateway.ready

    in_virtual_time(scene())
