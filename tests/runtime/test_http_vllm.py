"""Engines behind URLs at real `vllm serve` processes: the contract, and equal tokens.

Tokens are compared in float32 and greedily, as in `test_vllm_tokens`; what is compared with is the
same process, asked directly.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed; pip install 'heddle[serve]'")

import aiohttp

from heddle_core.ids import GroupId, TrajectoryId
from heddle_rollout.engines import EngineClient, KvPlaced, StepRequest
from heddle_runtime.generation import Generation, GenerationEnd, Rendered
from heddle_runtime.vllm_http.endpoint import Endpoint
from heddle_runtime.vllm_http.engine import HttpEngine
from heddle_runtime.vllm_http.rendering import CHAT, COMPLETIONS, HttpRenderer
from tests.rollout.contract import ATTEMPTS, Bench, EngineContract, grown, ids, request, until
from tests.runtime.vllm_bench import needs_nixl
from tests.runtime.vllm_serve import VllmServe, needs_serve, serve_bench

pytestmark = needs_serve

PROMPT, OUTPUT = 400, 200


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


async def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """Ask a server directly."""
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as response:
        content = await response.json()
        assert response.status == 200, content
        return content


async def direct(url: str, context: Sequence[int], output: int = OUTPUT) -> list[int]:
    """What a server makes of a context when asked for completions, by nothing of ours."""
    models = await aiohttp_get(url, "/v1/models")
    answer = await post(
        url,
        "/v1/completions",
        {
            "model": models["data"][0]["id"],
            "prompt": list(context),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    tokens = answer["choices"][0]["token_ids"]
    assert len(tokens) == output
    return [*context, *tokens]


async def aiohttp_get(url: str, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(url + path) as response:
        return await response.json()


async def heard_of(engine: EngineClient, name: str) -> None:
    """Wait until a step has made tokens, or has ended."""
    assert isinstance(engine, HttpEngine)

    def heard() -> bool:
        step = engine._steps.get(TrajectoryId(name))
        return step is None or bool(step.made)

    await until(heard)


async def rest(bench: Bench, engine: EngineClient, name: str, context: Sequence[int]) -> list[int]:
    left = PROMPT + OUTPUT - len(context)
    if left == 0:
        return list(context)
    engine.start(request(name, context, left, shared=len(context)))
    return grown(context, await bench.recorder.end_of(name))


async def cut(bench: Bench, engine: EngineClient, name: str, context: Sequence[int]) -> list[int]:
    engine.start(request(name, context, PROMPT + OUTPUT - len(context)))
    await heard_of(engine, name)
    engine.abort(TrajectoryId(name))
    return grown(context, await bench.recorder.end_of(name))


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


@needs_nixl
def test_kv_moved_between_servers_makes_no_difference(bench, url):
    async def main() -> None:
        one, other = await bench.engine(0), await bench.engine(1)
        assert one.capabilities.export_kv
        expected = await direct(url, ids("traveller", PROMPT))
        context = await cut(bench, one, "traveller", ids("traveller", PROMPT))
        name = TrajectoryId("traveller")
        assert one.export_kv(name, context)
        _, handle = await bench.recorder.take("exported")
        other.import_kv(name, GroupId("g"), context, handle)
        _, placed = await bench.recorder.take("placed")
        assert placed == ("kv", len(context) // 32 * 32)
        assert await rest(bench, other, "traveller", context) == expected

    bench.run(main())


@needs_nixl
def test_a_handle_that_is_nearly_over_or_whose_source_is_unknown_costs_a_prefill(bench, url):
    async def main() -> None:
        one, other = await bench.engine(0), await bench.engine(1)
        expected = await direct(url, ids("late", PROMPT))
        context = await cut(bench, one, "late", ids("late", PROMPT))
        name = TrajectoryId("late")
        one.export_kv(name, context)
        _, handle = await bench.recorder.take("exported")
        late = msgspec.structs.replace(handle, expires_s=bench.loop.time() + 4.0)
        gone = {**handle.params["kv"], "remote_port": 9, "remote_engine_id": "gone"}
        lost = msgspec.structs.replace(handle, params={"kv": gone, "salt": ""})
        for each in (late, lost):
            other.import_kv(name, GroupId("g"), context, each)
            _, placed = await bench.recorder.take("placed")
            assert isinstance(placed, KvPlaced)
            assert placed.way == "prefill"
        assert await rest(bench, other, "late", context) == expected

    bench.run(main())


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
        model = (await aiohttp_get(url, "/v1/models"))["data"][0]["id"]
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
        async with aiohttp.ClientSession() as session:
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
