"""Engines behind URLs at real `vllm serve` processes: the contract, and equal tokens.

Tokens are compared in float32 and greedily, as in `test_vllm_tokens`; what is compared with is the
same process, asked directly.
"""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed; pip install 'heddle-rl[serve]'")

import aiohttp

from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.engines import StepRequest
from heddle_runtime.generation import Generation, GenerationEnd, Rendered
from heddle_runtime.vllm_http.connections import Connections
from heddle_runtime.vllm_http.endpoint import Endpoint
from heddle_runtime.vllm_http.metrics import read_iterations, read_sample
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS
from heddle_runtime.vllm_http.rendering import HttpRenderer
from tests.rollout.contract import ATTEMPTS, Bench, EngineContract, grown, ids, request
from tests.runtime.vllm_serve import (
    OUTPUT,
    PROMPT,
    VllmServe,
    cut,
    direct,
    get,
    heard_of,
    needs_serve,
    post,
    rest,
    serve_bench,
)

pytestmark = needs_serve


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Bench, list[VllmServe]]]:
    with serve_bench(tmp_path_factory.mktemp("serve"), stream_interval=2) as served:
        yield served


@pytest.fixture(scope="module")
def bench(served: tuple[Bench, list[VllmServe]]) -> Bench:
    return served[0]


@pytest.fixture(scope="module")
def url(served: tuple[Bench, list[VllmServe]]) -> str:
    return served[1][0].url


def test_steps_under_preemption_make_the_tokens_of_the_server_itself(bench, url):
    async def main() -> None:
        engine = await bench.engine()
        draw = random.Random(5)
        for attempt in range(ATTEMPTS):
            names = [f"preempted{attempt}-{i}" for i in range(4)]
            expected = {name: await direct(url, ids(name, PROMPT)) for name in names}
            context = {name: ids(name, PROMPT) for name in names}
            running = dict.fromkeys(names)
            cuts = 0
            for name in names:
                engine.start(request(name, context[name], OUTPUT))
            while running:
                await asyncio.sleep(0.05)
                victim = draw.choice(list(running))
                engine.abort(TrajectoryId(victim))
                end = await bench.recorder.end_of(victim)
                context[victim] = grown(context[victim], end)
                cuts += not end.finished
                left = PROMPT + OUTPUT - len(context[victim])
                if left:
                    engine.start(request(victim, context[victim], left))
                else:
                    del running[victim]
            assert context == expected
            if cuts > len(names):
                return
        pytest.fail("steps ended before they could be aborted, in every attempt")

    bench.run(main())


def test_a_move_by_prefill_makes_no_difference(bench, url):
    async def main() -> None:
        one, other = await bench.engine(0), await bench.engine(1)
        assert not one.capabilities.export_kv
        expected = await direct(url, ids("prefilled", PROMPT))
        context = await cut(bench, one, "prefilled", ids("prefilled", PROMPT))
        name = TrajectoryId("prefilled")
        assert not one.export_kv(name, context)
        other.import_kv(name, GroupId("g"), context, None)
        _, placed = await bench.recorder.take("placed")
        assert placed == ("prefill", len(context) // 32 * 32)
        assert await rest(bench, other, "prefilled", context) == expected

    bench.run(main())


def test_a_prefill_takes_kv_with_each_chunk_and_is_counted_with_its_first_token(url):
    async def counters(session: aiohttp.ClientSession) -> tuple[Any, int]:
        async with session.get(url + "/metrics") as answer:
            text = await answer.text()
        return read_iterations(text), read_sample(text, 100_000).kv_used_tokens

    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            (iterations, tokens), _ = before, _ = await counters(session)
            step = asyncio.create_task(direct(url, ids("chunks", 8000), 1))
            seen = set()
            while not step.done():
                seen.add(await counters(session))
            await step
            assert len({taken for counted, taken in seen if counted == before}) > 2
            assert {counted for counted, _ in seen} <= {before, (iterations + 1, tokens + 8001)}

    asyncio.run(main())


CLIENT = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2}


def of_client(name: str, rendered: Rendered, **sampling: Any) -> StepRequest:
    made = request(name, rendered.prompt_ids, rendered.max_tokens or 1, exact=False)
    chosen = rendered.sampling | sampling
    return msgspec.structs.replace(made, payload=Generation(sampling=chosen))


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stop", [None, "<|unused1070|>"])
def test_a_response_made_of_a_step_is_that_of_the_server_itself(bench, url, endpoint, stop):
    async def main() -> None:
        engine = await bench.engine(0)
        model = (await get(url, "/v1/models"))["data"][0]["id"]
        body: dict[str, Any] = {"model": model, "max_tokens": 12, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "skip_special_tokens": False}
        if stop is not None:
            body["stop"] = [stop]
        if endpoint == CHAT:
            body |= {"messages": [{"role": "user", "content": "hi"}]}
            body |= {"logprobs": True, "top_logprobs": 2}
        else:
            body |= {"prompt": "<user>hi<assistant>", "logprobs": 2}
        expected = await post(url, endpoint, body)
        async with Connections() as session:
            renderer = HttpRenderer(Endpoint(url, session))
            rendered = await renderer.render(endpoint, body)
            engine.start(of_client(f"{endpoint} {stop}", rendered))
            end = await bench.recorder.end_of(f"{endpoint} {stop}")
            assert isinstance(end.extras, GenerationEnd)
            made = await renderer.derender(endpoint, body, rendered, end.output_ids, end.extras)
        if stop is not None:
            assert expected["choices"][0]["stop_reason"] == stop
        for response in (made, expected):
            for name in ("id", "created", "system_fingerprint", "usage"):
                response.pop(name, None)
        assert made == expected

    bench.run(main())


def test_tokens_are_reported_as_they_come_and_an_end_has_its_weights(bench):
    async def main() -> None:
        engine = await bench.engine(0)
        came: list[list[int]] = []
        step = request("reported", ids("reported", PROMPT), OUTPUT, exact=False)
        payload = Generation(sampling=CLIENT, on_tokens=lambda new: came.append(list(new)))
        engine.start(msgspec.structs.replace(step, payload=payload))
        end = await bench.recorder.end_of("reported")
        assert [token for new in came for token in new] == list(end.output_ids)
        assert len(came) > OUTPUT // 4
        assert [entry["token_id"] for entry in end.extras.logprobs] == list(end.output_ids)
        assert end.extras.weight_versions == ({"version": "default", "start": 0, "end": OUTPUT},)
        assert len(end.output_logprobs) == OUTPUT

    bench.run(main())


# Before the contract, whose first test starts a third engine: it takes the server that is killed
# here, when its owner has started it again.
def test_a_server_that_is_killed_loses_no_token_that_came(bench, url, served):
    async def main() -> None:
        survivor, victim = await bench.engine(0), await bench.engine(1)
        names = [f"rescued{i}" for i in range(3)]
        survivors = survivor.facts.url
        expected = {name: await direct(survivors, ids(name, PROMPT)) for name in names}
        for name in names:
            victim.start(request(name, ids(name, PROMPT), OUTPUT))
        for name in names:
            await heard_of(victim, name)
        bench._engines.remove(victim)
        bench.fail(victim)
        reason, salvaged = await bench.recorder.take("failed")
        assert reason.startswith(victim.facts.url)
        ended = {t.what.trajectory: t.what for t in bench.recorder.reports if t.kind == "ended"}
        bench.recorder.reports.clear()
        for name in names:
            end = salvaged.get(name) or ended[name]
            assert end.tokens > 0
            context = grown(ids(name, PROMPT), end)
            assert await rest(bench, survivor, name, context) == expected[name]

    bench.run(main())


class TestServedEngine(EngineContract):
    pass
