"""The gateway over engines by URL: registration, the tokens of undisturbed engines, failures."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from heddle_core.events import EngineFailed, StepPreempted
from heddle_core.ids import EngineId
from tests.gateway.bench import Bench, set_up
from tests.gateway.served import NO_AIOHTTP, run
from tests.runtime.counting_process import next_token

aiohttp = pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

# Both import aiohttp.
from heddle_runtime.vllm_http.launcher import HttpLauncher  # noqa: E402
from tests.runtime.fake_vllm import MODEL, FakeVllm  # noqa: E402

KEY = "engine-key"


def expected(prompt: list[int], tokens: int) -> list[int]:
    context = list(prompt)
    for _ in range(tokens):
        context.append(next_token(context, MODEL))
    return context[len(prompt) :]


class Registered:
    """A gateway that listens, and servers that may be registered at it."""

    def __init__(self, bench: Bench, servers: list[FakeVllm], url: str, http: Any) -> None:
        self.bench, self.servers, self.url, self.http = bench, servers, url, http

    async def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": "Bearer of-the-client"}
        async with self.http.request(method, self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def add(self, url: str) -> tuple[int, Any]:
        return await self("POST", "/workers", {"url": url})

    async def step(self, prompt: list[int], tokens: int, session: str) -> list[int]:
        body = {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": tokens},
            "session_id": session,
        }
        status, answer = await self("POST", "/inference/v1/generate", body)
        assert status == 200, answer
        made: list[int] = answer["choices"][0]["token_ids"]
        return made


@asynccontextmanager
async def registered(*, servers: int, places: int = 2) -> AsyncIterator[Registered]:
    """A gateway with so many places for engines, the first servers registered."""
    from heddle_gateway.app import listening
    from heddle_gateway.engine_urls import RegisteredEngines, RenderingEngines
    from heddle_gateway.front import Front, ServedModel

    running = [await FakeVllm(key=KEY).start() for _ in range(places + 1)]
    launcher = HttpLauncher()
    bench = Bench(set_up(engines=places), launcher=launcher)
    model = ServedModel(context_tokens=1 << 20)
    front = Front(gateway=bench.gateway, model=model)
    front.engine_urls = RegisteredEngines(launcher, places, model, key=KEY)
    front.renderer = front.engine_calls = RenderingEngines(launcher)
    serving = asyncio.create_task(bench.gateway.run())
    try:
        async with (
            listening(front, host="127.0.0.1", port=0) as port,
            aiohttp.ClientSession() as http,
        ):
            found = Registered(bench, running, f"http://127.0.0.1:{port}", http)
            for server in running[:servers]:
                status, answer = await found.add(server.url)
                assert status == 200, answer
            while servers == places and not bench.gateway.ready:
                await asyncio.sleep(0.01)
            yield found
            await bench.gateway.close(1.0)
            await serving
        assert bench.replays()
    finally:
        await launcher.close()
        for server in running:
            await server.close()


def test_tokens_are_those_of_the_engine_also_under_preemption_and_the_death_of_an_engine():
    async def main() -> None:
        async with registered(servers=2) as at:
            prompts = [[300 + n, *range(400, 440)] for n in range(6)]
            steps = [asyncio.create_task(at.step(p, 300, f"s{n}")) for n, p in enumerate(prompts)]
            while sum(server.generated > 40 for server in at.servers) < 2:
                await asyncio.sleep(0.01)
            for engine in list(at.bench.gateway.engines):
                at.bench.gateway.driver.abort_running(EngineId(engine))
            while not at.bench.events(StepPreempted):
                await asyncio.sleep(0.01)
            at.servers[1].die()
            made = await asyncio.gather(*steps)
            assert made == [expected(prompt, 300) for prompt in prompts]
            assert at.bench.events(EngineFailed)

    run(main())


def test_a_stream_of_ids_goes_on_over_the_death_of_its_engine():
    async def main() -> None:
        async with registered(servers=2) as at:
            body = {
                "token_ids": [300, 301],
                "sampling_params": {"max_tokens": 200},
                "stream": True,
            }
            made: list[int] = []
            async with at.http.post(at.url + "/inference/v1/generate", json=body) as answer:
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    made += json.loads(line[6:])["choices"][0]["token_ids"]
                    for server in at.servers:
                        if server.running and 20 < len(made) < 150 and not failed(at):
                            server.die()
            assert failed(at)
            assert made == expected([300, 301], 200)

    def failed(at: Registered) -> bool:
        return bool(at.bench.events(EngineFailed))

    run(main())


def test_engines_register_until_all_places_are_taken_and_work_begins_then():
    async def main() -> None:
        async with registered(servers=1) as at:
            early = asyncio.create_task(at.step([300, 301], 4, "s"))
            await asyncio.sleep(0.1)
            assert not early.done()
            assert (await at.add(at.servers[1].url + "/v1/"))[0] == 200
            assert await early == expected([300, 301], 4)
            assert (await at.add(at.servers[1].url))[0] == 200  # any number of times
            status, refused = await at.add(at.servers[2].url)
            assert (status, refused["error"]["code"]) == (409, "no_place")
            _, listed = await at("GET", "/workers")
            assert listed["urls"] == [server.url for server in at.servers[:2]]
            assert (await at("GET", "/v1/models"))[1]["data"][0]["id"] == MODEL

    run(main())


def test_an_engine_that_is_taken_out_leaves_its_place_to_another():
    async def main() -> None:
        async with registered(servers=2) as at:
            gone = at.servers[0].url
            assert (await at("DELETE", f"/workers/{gone}"))[0] == 200
            assert (await at("DELETE", f"/workers/{gone}"))[0] == 404
            assert (await at.add(at.servers[2].url))[0] == 200
            while len(at.bench.gateway.engines) < 2:
                await asyncio.sleep(0.01)
            before = at.servers[0].generated
            made = await asyncio.gather(*(at.step([300, n], 20, f"s{n}") for n in range(12)))
            assert made == [expected([300, n], 20) for n in range(12)]
            assert at.servers[0].generated == before
            assert at.servers[2].generated > 0

    run(main())


def test_what_is_no_engine_is_not_registered():
    async def main() -> None:
        async with registered(servers=1) as at:
            at.servers[1].version = None
            for url, says in (
                (at.url, "gateway"),
                (at.url.replace("127.0.0.1", "localhost"), "gateway"),
                (at.servers[1].url, "not vLLM"),
                ("http://127.0.0.1:9", "127.0.0.1:9"),
                ("file:///etc/passwd", "not the URL"),
                ("http://user:secret@127.0.0.1:9", "not the URL"),
            ):
                status, refused = await at.add(url)
                assert status == 400, (url, refused)
                assert says in refused["error"]["message"]
                assert "secret" not in refused["error"]["message"]
            status, _ = await at("POST", "/workers", {"url": at.servers[2].url, "tp": 4})
            assert status == 400

    run(main())


def test_keys_of_clients_do_not_reach_engines_nor_theirs_clients():
    async def main() -> None:
        async with registered(servers=2) as at:
            await at.step([300, 301], 4, "s")
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            _, answer = await at("POST", "/v1/chat/completions", chat)
            assert answer["choices"][0]["message"]["content"] == "one STOP two"
            _, listed = await at("GET", "/workers")
            assert KEY not in json.dumps([answer, listed])
            keys = {key for server in at.servers for key in server.keys}
            assert keys == {f"Bearer {KEY}"}

    run(main())


@pytest.mark.parametrize("lie", ["more", "usage", "ids", "html", "reason", "late", "fewer"])
def test_an_engine_that_lies_about_its_tokens_is_left_and_nothing_else_disturbed(lie: str):
    async def main() -> None:
        async with registered(servers=2) as at:
            at.servers[0].lie = lie
            made = await asyncio.gather(*(at.step([300, n], 20, f"s{n}") for n in range(8)))
            assert made == [expected([300, n], 20) for n in range(8)]

    run(main())


def test_a_refusal_of_the_engines_own_is_the_clients():
    async def main() -> None:
        async with registered(servers=2) as at:
            for server in at.servers:
                server.generate_status = 400
            body = {"token_ids": [300], "sampling_params": {"max_tokens": 4}}
            status, refused = await at("POST", "/inference/v1/generate", body)
            assert status == 400
            assert "temperature of 400" in refused["error"]["message"]
            status, refused = await at(
                "POST", "/inference/v1/generate", {**body, "sampling_params": {"temprature": 1}}
            )
            assert (status, refused["error"]["param"]) == (400, "temprature")
            for server in at.servers:
                server.generate_status = 200
            assert await at.step([300], 4, "s") == expected([300], 4)

    run(main())
