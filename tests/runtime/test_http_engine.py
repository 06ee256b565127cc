"""What servers behind URLs do wrong: faults and lies, each with its end, and no other is harmed."""

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="aiohttp is not installed; pip install 'heddle-rl[serve]'")

from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import EngineRefusedError, StepRequest, StepResult
from heddle_runtime.generation import Generation, GenerationEnd, Refusal
from heddle_runtime.vllm_http.endpoint import UrlError, base_of
from heddle_runtime.vllm_http.engine import MOST_CUTS, MOST_FAULTS, HttpEngine
from heddle_runtime.vllm_http.launcher import HttpLauncher
from heddle_runtime.vllm_http.probe import GATEWAY_HEADER, ProbeError
from heddle_runtime.vllm_http.settings import HttpSettings
from heddle_runtime.vllm_http.step import HttpStep
from heddle_runtime.vllm_http.stream import EventReader, ProtocolError
from tests.rollout.contract import LONG_OUTPUT, Recorder, grown, ids, request, until
from tests.runtime.counting_process import next_token
from tests.runtime.fake_vllm import MODEL, FakeVllm

SETTINGS = HttpSettings(
    sample_s=0.02,
    health_s=0.1,
    retry_s=0.02,
    answer_limit_s=10.0,
    silence_limit_s=60.0,
    abort_limit_s=0.5,
    start_limit_s=2.0,
)
PROMPT, OUTPUT = 100, 60


IMPATIENT = msgspec.structs.replace(SETTINGS, answer_limit_s=1.0, silence_s=2.0)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


class Setup:
    """A launcher, and servers that are registered."""

    def __init__(self, settings: HttpSettings) -> None:
        self.launcher = HttpLauncher(settings)
        self.recorder = Recorder()
        self.servers: list[FakeVllm] = []
        self._started = 0

    async def serve(self, **options: Any) -> FakeVllm:
        server = await FakeVllm(**options).start()
        self.servers.append(server)
        return server

    async def begin(self) -> HttpEngine:
        self._started += 1
        name = EngineId(f"e{self._started}")
        spec = EngineSpec(engine=name, shape=EngineShape("cpu", 1), max_running=8)
        engine = self.launcher.start(spec, self.recorder)
        await self.recorder.take("ready", unless=lambda _: True)
        return engine


@asynccontextmanager
async def setup(settings: HttpSettings = SETTINGS) -> AsyncIterator[Setup]:
    made = Setup(settings)
    try:
        yield made
    finally:
        await made.launcher.close()
        for server in made.servers:
            await server.close()


@asynccontextmanager
async def one(settings: HttpSettings = SETTINGS) -> AsyncIterator[tuple[Setup, FakeVllm]]:
    async with setup(settings) as made:
        server = await made.serve()
        await made.launcher.add(server.url)
        yield made, server


def alone(context: list[int], count: int = OUTPUT) -> list[int]:
    """The tokens of an undisturbed step."""
    tokens = list(context)
    for _ in range(count):
        tokens.append(next_token(tokens, MODEL))
    return tokens[len(context) :]


async def whole(made: Setup, engine: HttpEngine, step: StepRequest) -> tuple[list[int], int]:
    """Dispatch a step until it is whole; its tokens, and how many dispatches broke off."""
    context, broken = list(step.prompt_ids), 0
    while True:
        left = step.prompt_tokens + step.max_tokens - len(context)
        again = request(step.trajectory, context, left)
        engine.start(msgspec.structs.replace(again, payload=step.payload))
        end = await made.recorder.end_of(step.trajectory)
        assert end.error == ""
        context = grown(context, end)
        if end.finished:
            return context[step.prompt_tokens :], broken
        broken += 1


def test_steps_of_a_trajectory_are_in_one_trace_of_an_engine():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            for name in ("a", "b", "a"):
                await whole(made, engine, request(name, ids(name, PROMPT), 8))
            assert all(re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", t) for t in server.traces)
            first, other, second = (trace.split("-")[1:3] for trace in server.traces)
            assert first[0] == second[0] != other[0]
            assert first[1] != second[1]

    run(main)


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut_after", "end_after", "error_after"])
def test_a_stream_that_breaks_off_is_resumed_and_no_token_is_made_twice(fault):
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            step = request("cut", ids("cut", PROMPT), OUTPUT)
            setattr(server, fault, 20)
            engine.start(step)
            first = await made.recorder.end_of("cut")
            assert (first.finished, first.error) == (False, "")
            assert 0 < first.tokens <= 20
            setattr(server, fault, None)
            left = OUTPUT - first.tokens
            engine.start(request("cut", grown(step.prompt_ids, first), left))
            second = await made.recorder.end_of("cut")
            assert [*first.output_ids, *second.output_ids] == alone(list(step.prompt_ids))
            assert made.recorder.reports == []

    run(main)


@pytest.mark.parametrize("dies", [False, True])
def test_a_step_whose_tokens_have_all_come_has_ended_whatever_comes_then(dies):
    async def main() -> None:
        unwatched = msgspec.structs.replace(SETTINGS, health_s=60.0)
        async with one(unwatched) as (made, server):
            engine = await made.begin()
            server.cuts_at_end = True
            step = request("whole", ids("whole", PROMPT), OUTPUT, exact=False)
            payload = Generation(sampling={"temperature": 0.0, "ignore_eos": True})
            if dies:
                server.health = 503
            engine.start(msgspec.structs.replace(step, payload=payload))
            end = await made.recorder.end_of("whole")
            assert (end.finished, end.error, end.extras.finish_reason) == (True, "", "length")
            assert list(end.output_ids) == alone(list(step.prompt_ids))
            assert made.recorder.reports == []

    run(main)


def test_a_step_that_cannot_be_resumed_begins_again_when_its_stream_breaks_off():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            step = request("again", ids("again", PROMPT), OUTPUT)
            server.cut_after = 20
            engine.start(msgspec.structs.replace(step, resumable=False))
            end = await made.recorder.end_of("again")
            assert (end.finished, end.tokens, end.output_ids) == (False, 0, ())

    run(main)


def test_a_step_whose_streams_all_break_off_ends_with_an_error_and_the_engine_stays():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.cut_after = 0
            before = len(server.seen)
            engine.start(request("never", ids("never", PROMPT), OUTPUT))
            end = await made.recorder.end_of("never")
            assert (end.finished, end.tokens) == (True, 0)
            assert f"engines broke off {MOST_CUTS} times" in end.error
            assert isinstance(end.extras, Refusal)
            assert end.extras.status == 502
            assert len([b for b in server.seen[before:] if b.get("stream")]) == MOST_CUTS
            server.cut_after = None
            engine.start(request("next", ids("next", PROMPT), OUTPUT))
            assert (await made.recorder.end_of("next")).tokens == OUTPUT
            assert made.recorder.reports == []

    run(main)


def test_many_streams_that_break_off_at_once_go_on_at_an_engine_that_stays():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.cut_after, server.cuts = 20, 6
            steps = [request(f"at once {i}", ids(f"at once {i}", PROMPT), OUTPUT) for i in range(6)]
            done = await asyncio.gather(*(whole(made, engine, step) for step in steps))
            for step, (tokens, _) in zip(steps, done, strict=True):
                assert tokens == alone(list(step.prompt_ids))
            assert sum(broken for _, broken in done) == 6
            assert made.recorder.reports == []

    run(main)


def test_a_step_that_brings_nothing_for_long_is_cut_and_runs_again():
    async def main() -> None:
        async with one(msgspec.structs.replace(SETTINGS, silence_limit_s=0.5)) as (made, server):
            engine = await made.begin()
            server.stall_after = 16
            engine.start(request("stalled", ids("stalled", PROMPT), OUTPUT))
            end = await made.recorder.end_of("stalled")
            assert not end.finished
            assert list(end.output_ids) == alone(ids("stalled", PROMPT))[: end.tokens]

    run(main)


def test_a_server_that_answers_nothing_any_more_has_failed():
    async def main() -> None:
        async with one(IMPATIENT) as (made, server):
            engine = await made.begin()
            engine.start(request("silent", ids("silent", PROMPT), LONG_OUTPUT))
            await until(lambda: server.generated > 8)
            server.silent = True
            reason, salvaged = await made.recorder.take("failed")
            assert reason.startswith(f"{server.url}: streams and calls brought nothing for")
            assert salvaged["silent"].tokens > 0
            got = list(salvaged["silent"].output_ids)
            assert got == alone(ids("silent", PROMPT), len(got))

    run(main)


def test_a_server_whose_calls_are_slow_while_its_streams_go_on_has_not_failed():
    async def main() -> None:
        async with one(IMPATIENT) as (made, server):
            engine = await made.begin()
            server.slow_health = True
            engine.start(request("slow", ids("slow", PROMPT), 1500))
            assert (await made.recorder.end_of("slow")).tokens == 1500
            reason, _ = await made.recorder.take("failed")
            assert "no call was answered for" in reason

    run(main)


def test_a_server_that_says_it_is_ill_has_failed():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.health = 503
            reason, _ = await made.recorder.take("failed")
            assert "/health says 503" in reason
            with pytest.raises(EngineRefusedError, match="503"):
                engine.start(request("late", ids("late", PROMPT), OUTPUT))

    run(main)


@pytest.mark.parametrize(
    ("status", "told"),
    [*((s, s) for s in (404, 408, 500, 502)), *((s, 502) for s in (307, 401, 403, 405))],
)
def test_a_fault_of_a_step_is_tried_twice_and_what_no_client_can_mend_is_told_as_502(status, told):
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.generate_status = status
            before = len(server.seen)
            step = request("hit", ids("hit", PROMPT), OUTPUT)
            engine.start(msgspec.structs.replace(step, payload=Generation()))
            end = await made.recorder.end_of("hit")
            assert (end.finished, end.tokens) == (True, 0)
            assert f"temperature of {status}" in end.error
            assert isinstance(end.extras, Refusal)
            assert (end.extras.status, end.extras.in_stream) == (told, False)
            assert len([b for b in server.seen[before:] if b.get("stream")]) == MOST_FAULTS
            server.generate_status = 200
            engine.start(request("good", ids("good", PROMPT), OUTPUT))
            assert (await made.recorder.end_of("good")).error == ""
            assert made.recorder.reports == []

    run(main)


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_a_step_that_a_server_refuses_ends_with_what_it_says(status):
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.generate_status = status
            before = len(server.seen)
            for n in range(5):
                step = request(f"bad {n}", ids("bad", PROMPT), OUTPUT)
                engine.start(msgspec.structs.replace(step, payload=Generation()))
                end = await made.recorder.end_of(f"bad {n}")
                assert (end.finished, end.tokens) == (True, 0)
                assert end.error == f"temperature of {status}"
                said = {"error": {"message": f"temperature of {status}"}}
                assert end.extras == Refusal(status=status, body=said)
            assert len(server.seen) - before == 5
            server.generate_status = 200
            engine.start(request("good", ids("good", PROMPT), OUTPUT))
            assert (await made.recorder.end_of("good")).error == ""
            assert made.recorder.reports == []

    run(main)


# -- lies -----------------------------------------------------------------------------------------


LIES = (*("more", "fewer", "usage", "ids", "html", "events", "reason", "late", "logprobs", "junk"),)


@pytest.mark.parametrize("lie", LIES)
def test_a_step_at_a_server_that_lies_is_whole_and_no_other_is_harmed(lie):
    async def main() -> None:
        async with setup() as made:
            for _ in range(2):
                await made.launcher.add((await made.serve()).url)
            liar, honest = await made.begin(), await made.begin()
            assert liar.facts is not None
            (server,) = [each for each in made.servers if each.url == liar.facts.url]
            server.lie = lie
            honest.start(request("honest", ids("honest", PROMPT), OUTPUT))
            step = request("liar", ids("liar", PROMPT), OUTPUT)
            payload = Generation(sampling={"temperature": 0.0, "logprobs": 0})
            tokens, _ = await whole(made, liar, msgspec.structs.replace(step, payload=payload))
            assert tokens == alone(list(step.prompt_ids))
            end = await made.recorder.end_of("honest")
            assert list(end.output_ids) == alone(ids("honest", PROMPT))
            server.lie = ""
            liar.start(request("next", ids("next", PROMPT), OUTPUT))
            end = await made.recorder.end_of("next")
            assert list(end.output_ids) == alone(ids("next", PROMPT))
            assert made.recorder.reports == []

    run(main)


def choice(ids: list[int], finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "token_ids": ids, "finish_reason": finish, **fields}]}


def entries(*ids: int, logprob: Any = -0.5) -> dict[str, Any]:
    return {"content": [{"token_id": i, "logprob": logprob} for i in ids]}


@pytest.mark.parametrize(
    ("events", "sampling", "message", "kept"),
    [
        ([choice([5]), choice([6, 7, 8, 9])], {}, "was to have 4 tokens at most", 1),
        ([choice([5, 6, 7], "length")], {}, "ended with 'length' after 3 of 4 tokens", 3),
        ([choice([5, -6])], {}, "sent token ids for liar that are none", 0),
        ([choice([5, 1 << 31])], {}, "sent token ids for liar that are none", 0),
        ([choice([5]) | {"usage": {"completion_tokens": 2}}], {}, "it counted 2 tokens", 0),
        ([choice([5, 6, 7, 8], "because")], {}, "'because', which is no end", 4),
        ([choice([5], "stop"), choice([6])], {}, "sent more of liar after its end", 1),
        ([choice([5])], {"logprobs": 0}, "the log-probs of liar are not those of its tokens", 0),
        ([choice([5], logprobs=entries(6))], {}, "are not those of its tokens", 0),
        ([choice([5], logprobs=entries(5, logprob="x"))], {}, "are no numbers", 0),
        (["<html>"], {}, "its answer is not that of /inference/v1/generate", 0),
        ([choice(["a"])], {}, "its answer is not that of /inference/v1/generate", 0),  # type: ignore[list-item]
    ],
)
def test_what_cannot_be_true_is_named_and_not_kept(events, sampling, message, kept):
    taken = request("liar", [1, 2, 3], 4, exact=False)
    payload = Generation(sampling={"temperature": 0.0, **sampling})
    step = HttpStep(msgspec.structs.replace(taken, payload=payload), "id", HttpSettings())
    *before, last = [msgspec.json.encode(event) for event in events]
    for event in before:
        step.take(event)
    with pytest.raises(ProtocolError, match=message):
        step.take(last)
    assert len(step.made) == kept


def test_a_step_ends_with_an_error_also_by_a_defect_of_ours(monkeypatch):
    async def main() -> None:
        async with one() as (made, _):
            engine = await made.begin()
            defects: list[str] = []
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, about: defects.append(str(about["exception"])))

            def defect(step: HttpStep, chunk: object) -> None:
                raise RuntimeError("a defect")

            with monkeypatch.context() as patched:
                patched.setattr(HttpStep, "take", defect)
                engine.start(request("hit", ids("hit", PROMPT), OUTPUT))
                end = await made.recorder.end_of("hit")
            assert (end.finished, end.error) == (True, "RuntimeError: a defect")
            engine.start(request("next", ids("next", PROMPT), OUTPUT))
            assert (await made.recorder.end_of("next")).error == ""
            assert defects == ["a defect"]

    run(main)


# -- aborts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "refused", "ignored"])
def test_an_abort_ends_a_step_with_its_tokens_whatever_the_server_does_with_it(how):
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.lost_aborts = {"lost": 1, "ignored": 1000}.get(how, 0)
            server.abort_status = 404 if how == "refused" else 200
            came: list[int] = []
            step = request("cut", ids("cut", PROMPT), LONG_OUTPUT)
            payload = Generation(sampling={"temperature": 0.0}, on_tokens=came.extend)
            engine.start(msgspec.structs.replace(step, payload=payload))
            await until(lambda: bool(came))
            engine.abort(TrajectoryId("cut"))
            end = await made.recorder.end_of("cut")
            assert (end.finished, end.extras.finish_reason) == (False, "abort")
            assert list(end.output_ids) == alone(ids("cut", PROMPT), end.tokens) == came
            await until(lambda: server.running == 0)

    run(main)


def test_an_abort_that_overtakes_its_step_is_not_lost():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            engine.start(request("early", ids("early", PROMPT), LONG_OUTPUT))
            engine.abort(TrajectoryId("early"))
            end = await made.recorder.end_of("early")
            assert not end.finished
            assert end.tokens < LONG_OUTPUT
            await until(lambda: server.running == 0)

    run(main)


def test_an_abort_by_another_keeps_the_tokens_and_is_no_fault():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.aborts_at = 5
            step = request("others", ids("others", PROMPT), OUTPUT)
            tokens, ends = await whole(made, engine, step)
            assert (tokens, ends) == (alone(list(step.prompt_ids)), OUTPUT // 5 - 1)
            assert made.recorder.reports == []

    run(main)


def test_a_step_that_is_always_aborted_at_once_ends_with_an_error_and_the_engine_stays():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            server.aborts_at = 0
            engine.start(request("none", ids("none", PROMPT), OUTPUT))
            end = await made.recorder.end_of("none")
            assert (end.finished, end.tokens) == (True, 0)
            assert "none was aborted by another before its first token" in end.error
            assert made.recorder.reports == []

    run(main)


def test_a_killed_engine_leaves_no_request_at_the_server():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            engine.start(request("left", ids("left", PROMPT), LONG_OUTPUT))
            await until(lambda: server.running == 1)
            engine.kill()
            await until(lambda: server.running == 0)

    run(main)


# -- what a client asks for -----------------------------------------------------------------------


def test_sampling_reaches_the_server_and_its_end_comes_back():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            sampling = {"temperature": 0.7, "stop": ["x"], "logprobs": 1, "n": 1, "output_kind": 2}
            step = request("client", ids("client", PROMPT), OUTPUT, exact=False)
            payload = Generation(
                sampling=sampling, cache_salt="s", features={"reasoning_ended": True, "other": 1}
            )
            engine.start(msgspec.structs.replace(step, payload=payload))
            end = await made.recorder.end_of("client")
            sent = server.seen[-1]
            assert sent["sampling_params"] == {
                "temperature": 0.7,
                "stop": ["x"],
                "logprobs": 1,
                "detokenize": True,
                "max_tokens": OUTPUT,
                "stream_interval": 8,
            }
            assert (sent["cache_salt"], sent["reasoning_ended"]) == ("s", True)
            assert "other" not in sent
            assert isinstance(end.extras, GenerationEnd)
            assert end.extras.finish_reason == "length"
            assert [entry["token_id"] for entry in end.extras.logprobs] == list(end.output_ids)
            assert end.output_logprobs == (-0.5,) * OUTPUT
            assert end.extras.weight_versions == ({"version": "v7", "start": 0, "end": 1},)

    run(main)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temprature": 1.0}, "sampling has temprature: known are"),
        ({"n": 4}, "n must be 1"),
        ({"extra_args": {"kv_transfer_params": {}}}, "which only engines set"),
    ],
)
def test_sampling_that_the_server_would_ignore_is_refused(sampling, message):
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            step = request("client", ids("client", PROMPT), OUTPUT)
            before = len(server.seen)
            with pytest.raises(EngineRefusedError, match=message):
                engine.start(msgspec.structs.replace(step, payload=Generation(sampling=sampling)))
            await asyncio.sleep(0.1)
            assert len(server.seen) == before

    run(main)


def test_a_failing_reader_of_tokens_harms_no_step():
    async def main() -> None:
        failures = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: failures.append(context)
        )
        async with one() as (made, _):
            engine = await made.begin()

            def fail(tokens: Any) -> None:
                raise RuntimeError("a defect")

            step = request("read", ids("read", PROMPT), OUTPUT)
            payload = Generation(sampling={"temperature": 0.0}, on_tokens=fail)
            engine.start(msgspec.structs.replace(step, payload=payload))
            assert (await made.recorder.end_of("read")).tokens == OUTPUT
        assert {str(context["exception"]) for context in failures} == {"a defect"}

    run(main)


def test_kv_of_a_salt_is_moved_under_it():
    async def main() -> None:
        async with setup() as made:
            for _ in range(2):
                await made.launcher.add((await made.serve()).url)
            source, target = await made.begin(), await made.begin()
            step = request("salted", ids("salted", PROMPT), OUTPUT)
            payload = Generation(sampling={"temperature": 0.0}, cache_salt="s")
            source.start(msgspec.structs.replace(step, payload=payload))
            context = grown(step.prompt_ids, await made.recorder.end_of("salted"))
            assert source.export_kv(TrajectoryId("salted"), context)
            _, handle = await made.recorder.take("exported")
            target.import_kv(TrajectoryId("salted"), GroupId("g"), context, handle)
            _, placed = await made.recorder.take("placed")
            assert placed == ("kv", len(context) // 32 * 32)
            step = request("salted", [*context, 300], 4)
            for salt, found in (("", 0), ("s", placed.tokens)):
                payload = Generation(sampling={"temperature": 0.0}, cache_salt=salt)
                target.start(msgspec.structs.replace(step, payload=payload))
                end: StepResult = await made.recorder.end_of("salted")
                assert end.cached_tokens == found

    run(main)


def test_there_is_nothing_to_export_of_an_empty_context_or_a_forgotten_trajectory():
    async def main() -> None:
        async with setup() as made:
            await made.launcher.add((await made.serve()).url)
            engine, name = await made.begin(), TrajectoryId("here")
            step = request("here", ids("here", PROMPT), OUTPUT)
            engine.start(step)
            context = grown(step.prompt_ids, await made.recorder.end_of("here"))
            assert not engine.export_kv(name, ())
            assert engine.export_kv(name, context)
            await made.recorder.take("exported")
            engine.forget(name)
            assert not engine.export_kv(name, context)

    run(main)


# -- registration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["counting", "of-another-name"])
def test_servers_of_one_model_may_name_it_or_find_it_differently(model: str):
    async def main() -> None:
        async with setup() as made:
            await made.launcher.add((await made.serve()).url)
            other = await made.serve(model=model)
            other.root = "/elsewhere" if model == MODEL else f"/models/{MODEL}"
            assert (await made.launcher.add(other.url)).model == model

    run(main)


def test_a_registered_server_says_what_it_lacks():
    async def main() -> None:
        async with setup() as made:
            full = await made.launcher.add((await made.serve()).url + "/v1/")
            assert full.lacks == ()
            assert (full.scheduling, full.max_running, full.model) == ("priority", 16, MODEL)
            assert (full.kv_capacity_tokens, full.block_tokens) == (64_000, 32)
            poor = await made.serve(kv=False)
            poor.cached_details = poor.dev_mode = poor.prefix_caching = False
            facts = await made.launcher.add(poor.url)
            assert facts.line == (
                f"{poor.url}: vLLM 0.32.0, model {MODEL}, 64,000 tokens of KV, context 64,032; "
                "no prefix caching: each step prefills its whole context; "
                "no KV connector: a move is a prefill on the target; "
                "no --enable-prompt-tokens-details: prefix hits are recorded as 0 tokens; "
                "no dev mode: its TP degree, queue, scheduling and KV lease cannot be read"
            )

    run(main)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"health": 503}, "/health says 503"),
        ({"version": None}, "is not vLLM"),
        ({"owner": "heddle"}, "is not vLLM"),
        ({"metrics": False}, "start it without --disable-log-stats"),
        ({"blocks": "None"}, "start it without --disable-log-stats"),
        ({"blocks": 0}, "start it without --disable-log-stats"),
        ({"scale_out": False}, "start vllm serve with --enable-scale-out"),
        ({"generate_status": 400}, "says 400: temperature of 400"),
        ({"key": "secret"}, "it refuses the key \\(401\\); give its api_key"),
        ({"silent": True}, "/health did not answer in 1 s"),
        ({"headers": {GATEWAY_HEADER: "1"}}, "is a Heddle gateway, not an engine"),
        ({"model": "other"}, "serves other, and .* serves counting"),
    ],
)
def test_a_server_that_cannot_be_an_engine_is_refused(changes, message):
    async def main() -> None:
        async with one(IMPATIENT) as (made, _):
            server = await made.serve()
            for name, value in changes.items():
                setattr(server, name, value)
            with pytest.raises(ProbeError, match=message):
                await made.launcher.add(server.url)
            server.silent = False
            assert len(made.launcher.registered) == 1

    run(main)


def test_a_url_at_which_nothing_listens_is_refused():
    async def main() -> None:
        async with one() as (made, server):
            server.die()
            await asyncio.sleep(0.01)  # until its listener is closed too
            with pytest.raises(ProbeError, match="/health cannot be reached: "):
                await made.launcher.add(server.url)

    run(main)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://a",
        "http://u:p@h",
        "http://u:p/w@h",
        "http://u:8000/u:p@h",
        "http://u:p?w@h",
        "http://u:p@w@h",
        "http:/u:p@h",
        "http://u:p\nw@h",
        "http://h?x=1",
        "http://h/\n",
        "http://h:70000",
        "http://h:0",
        "http://:8000",
    ],
)
def test_what_is_no_url_is_refused_and_its_password_is_not_shown(url):
    async def main() -> None:
        async with setup() as made:
            with pytest.raises(UrlError, match="write http://host:port") as caught:
                await made.launcher.add(url)
            assert "u:p" not in str(caught.value)

    run(main)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("HTTP://LocalHost:080/v1/", "http://localhost"),
        ("http://localhost:", "http://localhost"),
        ("https://H:443/A/", "https://h/A"),
        ("https://h:80", "https://h:80"),
        ("http://[::A]:80", "http://[::a]"),
        ("http://[::a]:8000/v1", "http://[::a]:8000"),
        ("http://h/av1/v1//v1/", "http://h/av1"),
    ],
)
def test_a_url_is_the_same_however_it_is_written(url, base):
    assert base_of(url) == base_of(base) == base


def test_a_key_is_sent_to_its_server_and_shown_to_nobody():
    async def main() -> None:
        async with setup() as made:
            server = await made.serve(key="secret")
            facts = await made.launcher.add(server.url, api_key="secret")
            assert "secret" not in facts.line
            engine = await made.begin()
            engine.start(request("keyed", ids("keyed", PROMPT), OUTPUT))
            assert (await made.recorder.end_of("keyed")).error == ""
            assert set(server.keys) == {"Bearer secret"}
            server.key = "changed"
            engine.start(request("refused", ids("refused", PROMPT), OUTPUT))
            end = await made.recorder.end_of("refused")
            assert "says 401" in end.error
            assert end.extras.status == 502  # it is no fault of the client's
            assert "secret" not in str(end)
            assert made.recorder.reports == []

    run(main)


def test_an_engine_takes_the_url_of_its_shape_and_fails_when_there_is_none():
    async def main() -> None:
        settings = msgspec.structs.replace(SETTINGS, start_limit_s=0.2)
        async with setup(settings) as made:
            await made.launcher.add((await made.serve()).url, tp=2)
            spec = EngineSpec(engine=EngineId("x"), shape=EngineShape("cpu", 1), max_running=1)
            made.launcher.start(spec, made.recorder)
            reason, _ = await made.recorder.take("failed")
            assert reason == "no URL is free for an engine cpu x 1; 1 are registered"

    run(main)


def test_an_engine_that_starts_waits_for_a_url_and_skips_those_that_do_not_answer():
    async def main() -> None:
        async with one() as (made, dead):
            dead.die()
            spec = EngineSpec(engine=EngineId("x"), shape=EngineShape("cpu", 1), max_running=1)
            engine = made.launcher.start(spec, made.recorder)
            await asyncio.sleep(0.1)
            server = await made.serve()
            await made.launcher.add(server.url)
            await made.recorder.take("ready")
            assert engine.facts is not None
            assert engine.facts.url == server.url

    run(main)


def test_the_engine_of_a_removed_url_fails_and_hands_its_steps_over():
    async def main() -> None:
        async with one() as (made, server):
            engine = await made.begin()
            engine.start(request("moved", ids("moved", PROMPT), LONG_OUTPUT))
            await until(lambda: server.generated > 20)
            made.launcher.remove(server.url + "/")
            reason, salvaged = await made.recorder.take("failed")
            assert reason == f"{server.url} was removed"
            assert salvaged["moved"].tokens > 0
            assert made.launcher.registered == ()
            with pytest.raises(KeyError):
                made.launcher.remove(server.url)

    run(main)


def test_a_url_is_free_again_after_its_engine():
    async def main() -> None:
        async with one() as (made, _):
            first = await made.begin()
            first.stop()
            await made.recorder.take("stopped")
            second = await made.begin()
            second.start(request("second", ids("second", PROMPT), OUTPUT))
            assert (await made.recorder.end_of("second")).finished

    run(main)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream_interval": 0}, "stream_interval is 0"),
        ({"silence_limit_s": 0.0}, "silence_limit_s is 0.0"),
        ({"kv_margin_s": 30.0}, "kv_margin_s is 30.0"),
        ({"sampling": {"heat": 1}}, "sampling has heat"),
    ],
)
def test_settings_out_of_range_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        HttpSettings(**changes)


# -- the stream -----------------------------------------------------------------------------------


@given(
    st.lists(st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"").strip()), max_size=8),
    st.lists(st.integers(1, 30), min_size=1),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)
def test_events_are_the_same_however_their_bytes_are_cut(events, sizes, end):
    whole = b"".join(b": comment" + end + b"data: " + event + end for event in events)
    reader, found, at = EventReader(), [], 0
    for size in itertools.cycle(sizes):
        if at >= len(whole):
            break
        found += reader.feed(whole[at : at + size])
        at += size
    assert found == events


def test_prefill_ends_with_the_first_token_and_decode_begins(monkeypatch: pytest.MonkeyPatch):
    now_s = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    step = HttpStep(request("t", [1, 2, 3], 8), "id", HttpSettings())
    for at_s, tokens in ((11.0, []), (12.0, [5]), (15.0, [6, 7])):
        now_s[0] = at_s
        step.take(msgspec.json.encode({"choices": [{"token_ids": tokens}]}))
    now_s[0] = 20.0
    result = step.result(finished=False)
    assert (result.prefill_s, result.decode_s) == (2.0, 8.0)
    assert result.output_ids == (5, 6, 7)
