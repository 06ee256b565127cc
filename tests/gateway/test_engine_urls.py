"""The gateway over engines by URL: registration, the tokens of undisturbed engines, failures."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from campaigns.faults.gateway_bench import Bench, set_up
from heddle_core.events import (
    EngineFailed,
    EngineJoined,
    EngineReady,
    EngineRecalled,
    EngineStopped,
    StepPreempted,
)
from heddle_core.ids import EngineId
from tests.gateway.served import NO_AIOHTTP, run
from tests.patience import PATIENCE_S
from tests.runtime.counting_process import next_token

aiohttp = pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

# These import aiohttp.
from heddle.gateway.reload import Reload  # noqa: E402
from heddle_gateway import engine_urls, http_server, rendering  # noqa: E402
from heddle_runtime.generation import RenderError  # noqa: E402
from heddle_runtime.vllm_http.launcher import HttpLauncher  # noqa: E402
from heddle_runtime.vllm_http.settings import HttpSettings  # noqa: E402
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
        self.front: Any = None
        self.engines: Any = None
        """The engines as the gateway registers them."""

    async def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": "Bearer of-the-client"}
        async with self.http.request(method, self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    async def add(self, url: str, **options: Any) -> tuple[int, Any]:
        return await self("POST", "/workers", {"url": url, **options})

    async def listed(self) -> list[tuple[str, str]]:
        _, answer = await self("GET", "/workers")
        return [(each["id"], each["state"]) for each in answer["workers"]]

    async def until(self, *, ready: int) -> None:
        """Wait until so many engines are ready."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.bench.gateway.engines) != ready:
                await asyncio.sleep(0.01)

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
async def registered(
    *,
    servers: int,
    more: int = 1,
    policy: str = "heddle",
    front_settings: dict[str, Any] | None = None,
    gpus: tuple[str, ...] = (),
    **options: Any,
) -> AsyncIterator[Registered]:
    """A gateway to which engines by URL come; the first servers are registered."""
    from heddle_gateway.app import listening
    from heddle_gateway.engine_urls import RegisteredEngines
    from heddle_gateway.front import Front, FrontSettings
    from heddle_gateway.openai_api import ServedModel
    from heddle_gateway.rendering import RenderingEngines

    running = [await FakeVllm(key=KEY).start() for _ in range(servers + more)]
    launcher = HttpLauncher(options.pop("settings", None))
    setup = set_up(f"{policy}+given+keep_engines", engines=8, tps=(1, 2, 4, 8), gpus=gpus)
    bench = Bench(setup, launcher=launcher, **options)
    model = ServedModel(context_tokens=1 << 20)
    front = Front(
        gateway=bench.gateway, model=model, settings=FrontSettings(**(front_settings or {}))
    )
    front.engine_urls = front.control = RegisteredEngines(
        launcher,
        bench.gateway,
        model,
        shapes=list(setup.context.cost.by_shape),
        max_running=setup.context.max_running,
        key=KEY,
        keyed=[server.url for server in running],
    )
    rendering = RenderingEngines(launcher)
    front.renderer = rendering
    front.engine_facts = rendering.facts
    serving = asyncio.create_task(bench.gateway.run())
    try:
        async with (
            listening(front, host="127.0.0.1", port=0) as port,
            aiohttp.ClientSession() as http,
        ):
            found = Registered(bench, running, f"http://127.0.0.1:{port}", http)
            found.front, found.engines = front, front.engine_urls
            for server in running[:servers]:
                status, answer = await found.add(server.url)
                assert status == 200, answer
            await found.until(ready=servers)
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


def test_steps_wait_for_the_first_engine_and_others_join_while_steps_run():
    async def main() -> None:
        async with registered(servers=0, more=2) as at:
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            said = asyncio.create_task(at("POST", "/v1/chat/completions", chat))
            early = [asyncio.create_task(at.step([300, n], 60, f"s{n}")) for n in range(12)]
            await asyncio.sleep(0.1)
            assert not any(waiting.done() for waiting in (said, *early))
            assert (await at("GET", "/health"))[0] == 503
            status, added = await at.add(at.servers[0].url + "/v1/")
            assert (status, added["id"], added["tp"]) == (200, "e0", 1)
            async with asyncio.timeout(PATIENCE_S):
                while at.servers[0].generated < 10:
                    await asyncio.sleep(0.01)
            assert (await at.add(at.servers[1].url))[1]["id"] == "e1"
            assert (await at.add(at.servers[0].url))[1]["id"] == "e0"  # any number of times
            assert await asyncio.gather(*early) == [expected([300, n], 60) for n in range(12)]
            assert at.servers[1].generated > 0
            assert (await said)[0] == 200
            assert await at.listed() == [("e0", "ready"), ("e1", "ready")]
            assert (await at("GET", "/v1/models"))[1]["data"][0]["id"] == MODEL

    run(main())


def test_engines_of_any_tp_degree_join_as_they_say_or_as_is_given():
    async def main() -> None:
        async with registered(servers=0, more=4) as at:
            said, given, contradicted, unknown = at.servers
            said.dev_mode, said.tp = True, 4
            contradicted.dev_mode, contradicted.tp = True, 2
            assert (await at.add(said.url))[1]["tp"] == 4
            assert (await at.add(given.url, tp=2, max_running=3))[1]["max_running"] == 3
            for url, options, param in (
                (contradicted.url, {"tp": 8}, "url"),
                (unknown.url, {"tp": 3}, "tp"),
                (unknown.url, {"tp": "2"}, "tp"),
                (unknown.url, {"tp": True}, "tp"),
                (unknown.url, {"gpu": "tpu"}, "gpu"),
                (unknown.url, {"gpu": ["h100"]}, "gpu"),
                (unknown.url, {"max_running": 0}, "max_running"),
                (unknown.url, {"api_key": 7}, "api_key"),
                (given.url, {"tp": 1}, "tp"),
            ):
                status, refused = await at.add(url, **options)
                assert (status, refused["error"]["param"]) == (400, param), refused
            await at.until(ready=2)
            joined = [(e.engine, e.shape.tp, e.max_running) for e in at.bench.events(EngineJoined)]
            assert joined == [("e0", 4, 4), ("e1", 2, 3)]
            assert len(await at.listed()) == 2
            made = await asyncio.gather(*(at.step([300, n], 20, f"s{n}") for n in range(12)))
            assert made == [expected([300, n], 20) for n in range(12)]
            assert all(server.generated for server in (said, given))

    run(main())


def test_engines_of_several_gpu_types_join_as_is_given():
    async def main() -> None:
        async with registered(servers=0, more=3, gpus=("h100", "l40s")) as at:
            first, second, third = (server.url for server in at.servers)
            assert (await at.add(first))[1]["gpu"] == "h100"
            assert (await at.add(second, gpu="L40S", tp=2))[1]["gpu"] == "l40s"
            assert (await at.add(second))[1]["gpu"] == "l40s"
            for url, gpu in ((third, "a100"), (second, "h100")):
                status, refused = await at.add(url, gpu=gpu)
                assert (status, refused["error"]["param"]) == (400, "gpu"), refused
            await at.until(ready=2)
            shapes = [(e.shape.gpu, e.shape.tp) for e in at.bench.events(EngineJoined)]
            assert shapes == [("h100", 1), ("l40s", 2)]
            made = await asyncio.gather(*(at.step([300, n], 20, f"s{n}") for n in range(12)))
            assert made == [expected([300, n], 20) for n in range(12)]
            assert all(server.generated for server in at.servers[:2])

    run(main())


@pytest.mark.parametrize("drain", [True, False])
def test_an_engine_leaves_after_its_steps_or_at_once_and_no_token_changes(drain: bool):
    async def main() -> None:
        async with registered(servers=2) as at:
            leaves, stays, _ = at.servers
            body = {
                "token_ids": [300, 99],
                "sampling_params": {"max_tokens": 80, "seed": 3},
                "session_id": "seeded",
            }
            tokens = 80
            steps = [asyncio.create_task(at.step([300, n], tokens, f"s{n}")) for n in range(12)]
            # It cannot be resumed: without a drain it begins again elsewhere.
            seeded = asyncio.create_task(at("POST", "/inference/v1/generate", body))
            async with asyncio.timeout(PATIENCE_S):
                while not (leaves.running and stays.running and leaves.generated > 20):
                    await asyncio.sleep(0.005)
            begun = {body["request_id"] for body in leaves.seen if "request_id" in body}
            path = f"/workers/{leaves.url}" if drain else "/workers/e0"
            status, gone = await at("DELETE", f"{path}?drain={str(drain).lower()}")
            assert (status, gone["id"], gone["state"]) == (200, "e0", "leaving")
            if drain:
                assert ("e0", "leaving") in await at.listed()
                assert (await at.add(leaves.url))[1]["error"]["code"] == "leaving"
            made = await asyncio.gather(*steps)
            assert made == [expected([300, n], tokens) for n in range(12)]
            choice = (await seeded)[1]["choices"][0]
            assert choice["token_ids"] == expected([300, 99], tokens)
            await at.until(ready=1)
            assert {b["request_id"] for b in leaves.seen if "request_id" in b} == begun
            assert await at.listed() == [("e1", "ready")]
            [recalled] = at.bench.events(EngineRecalled)
            assert (recalled.engine, recalled.drain) == ("e0", drain)
            assert [e.engine for e in at.bench.events(EngineStopped)] == ["e0"]
            assert not at.bench.events(EngineFailed)
            if drain:
                assert not at.bench.events(StepPreempted)
            assert (await at("DELETE", "/workers/e0"))[0] == 404
            assert (await at.add(leaves.url))[1]["id"] == "e2"  # it may come again
            await at.until(ready=2)

    run(main())


def test_the_last_engine_leaves_and_steps_wait_for_the_next():
    async def main() -> None:
        async with registered(servers=1) as at:
            step = asyncio.create_task(at.step([300, 1], 80, "s"))
            async with asyncio.timeout(PATIENCE_S):
                while at.servers[0].generated < 10:
                    await asyncio.sleep(0.005)
            assert (await at("DELETE", "/workers/e0?drain=true"))[0] == 200
            assert (await at("GET", "/health"))[0] == 503
            assert (await at("DELETE", "/workers/e0"))[0] == 200  # it takes too long
            await at.until(ready=0)
            assert not step.done()
            assert (await at.add(at.servers[1].url))[0] == 200
            assert await step == expected([300, 1], 80)

    run(main())


def test_an_engine_that_leaves_during_a_pause_hands_over_what_was_held_back():
    async def main() -> None:
        async with registered(servers=2) as at:
            await at("POST", "/pause?mode=keep")
            probed = at.servers[0].generated
            steps = [asyncio.create_task(at.step([300, n], 20, f"s{n}")) for n in range(6)]
            async with asyncio.timeout(PATIENCE_S):
                while at.bench.gateway.dispatches < 6:
                    await asyncio.sleep(0.005)
            assert (await at("DELETE", "/workers/e0?drain=true"))[0] == 200
            await at.until(ready=1)
            await at("POST", "/resume")
            assert await asyncio.gather(*steps) == [expected([300, n], 20) for n in range(6)]
            assert at.servers[0].generated == probed

    run(main())


def test_an_engine_comes_back_by_itself_and_may_be_taken_out_while_it_is_away():
    async def main() -> None:
        async with registered(servers=2, settings=HttpSettings(retry_s=0.05, health_s=0.05)) as at:
            for server in at.servers[:2]:
                server.die()
            await at.until(ready=0)
            assert await at.listed() == [("e0", "starting"), ("e1", "starting")]
            assert (await at("DELETE", "/workers/e1"))[0] == 200
            assert await at.listed() == [("e0", "starting")]
            await at.servers[0].start()
            await at.until(ready=1)
            assert await at.step([300, 1], 5, "s") == expected([300, 1], 5)
            assert [e.engine for e in at.bench.events(EngineReady)] == ["e0", "e1", "e0+1"]

    run(main())


def test_an_engine_that_fails_again_and_again_is_given_up_and_that_is_said():
    async def main() -> None:
        notes: list[str] = []
        settings = HttpSettings(retry_s=0.01, start_limit_s=0.02, health_s=0.02)
        async with registered(servers=1, settings=settings, on_note=notes.append) as at:
            at.servers[0].die()
            async with asyncio.timeout(PATIENCE_S):
                while not notes:
                    await asyncio.sleep(0.01)
            assert "engine e0 is given up" in notes[0]
            assert "cluster.restarts" in notes[0]
            assert await at.listed() == []
            assert len(at.bench.events(EngineFailed)) == 4
            async with at.http.get(at.url + "/metrics") as answer:
                assert "heddle_engines_given_up_total 1" in await answer.text()

    run(main())


def test_what_takes_an_engine_out_is_checked():
    async def main() -> None:
        async with registered(servers=1) as at:
            status, refused = await at("DELETE", "/workers/e0?drain=perhaps")
            assert (status, refused["error"]["param"]) == (400, "drain")
            for name in ("e9", "..%2F..%2Fetc", "http://127.0.0.1:9", "%00"):
                assert (await at("DELETE", f"/workers/{name}"))[0] == 404
            assert await at.listed() == [("e0", "ready")]

    run(main())


def test_an_engine_that_is_given_by_two_names_is_one():
    async def main() -> None:
        async with registered(servers=1, more=1) as at:
            one, other = (server.url for server in at.servers)
            assert (await at.add(one.upper() + "/V1/".lower()))[0] == 200
            same = one.replace("127.0.0.1", "localhost")
            status, refused = await at.add(same, api_key=KEY)
            assert (status, refused["error"]["param"]) == (400, "url")
            assert f"{same} is the engine of {one}" in refused["error"]["message"]
            [(url, _)] = await at.engines.expect([(other, {}), (same, {})], lambda note: None)
            assert url == same
            await at.until(ready=2)
            assert [each["url"] for each in at.engines.registered()] == [one, other]
            at.servers[0].began_s += 0.25  # it was started again
            assert (await at.add(one))[0] == 200

    run(main())


def test_an_engine_that_was_started_again_unseen_is_known_by_one_name_in_the_end():
    async def main() -> None:
        settings = HttpSettings(
            retry_s=0.01, start_limit_s=0.02, health_s=0.02, sample_s=0.02, silence_s=0.2
        )
        async with registered(servers=1, settings=settings) as at:
            url = at.servers[0].url
            same = url.replace("127.0.0.1", "localhost")
            at.servers[0].began_s += 0.25
            status, added = await at.add(same, api_key=KEY)
            assert status == 200, added
            await at.until(ready=2)
            async with asyncio.timeout(PATIENCE_S):
                for n in range(10_000):
                    assert await at.step([300, n], 20, f"s{n}") == expected([300, n], 20)
                    if len(at.engines.registered()) == 1:
                        break
            assert [each["url"] for each in at.engines.registered()] == [same]
            [failed, *_] = at.bench.events(EngineFailed)
            assert (failed.engine, failed.reason) == ("e0", f"{url} was started again")

    run(main())


def test_a_second_url_of_an_engine_that_was_down_at_the_start_is_given_up(monkeypatch):
    monkeypatch.setattr(engine_urls, "EXPECT_S", 0.02)

    async def main() -> None:
        notes: list[str] = []
        async with registered(servers=0, more=2) as at:
            late, wrong = at.servers
            same = late.url.replace("127.0.0.1", "localhost")
            for server in at.servers:
                server.die()
            await asyncio.sleep(0.01)  # until their listeners are closed too
            given = [(late.url, {}), (same, {}), (wrong.url, {"tp": 3})]
            assert await at.engines.expect(given, notes.append) == []
            for server in at.servers:
                await server.start()
            async with asyncio.timeout(PATIENCE_S):
                while any(each["state"] == "expected" for each in at.engines.registered()):
                    await asyncio.sleep(0.01)
            [(_, state)] = await at.listed()
            assert state == "ready"
            ended = [note for note in notes if note.endswith("It is not tried again")]
            assert len(ended) == 2
            assert sum(" is the engine of " in note for note in ended) == 1
            assert sum("tp is 3" in note for note in ended) == 1
            asked = [len(server.keys) for server in at.servers]
            await asyncio.sleep(0.1)
            assert [len(server.keys) for server in at.servers][1:] == asked[1:]

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

    run(main())


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("blocks", 10**30),
        ("blocks", "inf"),
        ("max_context", 10**30),
        ("max_context", True),
        ("max_running", -5),
        ("max_running", 0),
        ("max_running", True),
        ("tp", -1),
        ("tp", True),
        ("tp", 10**30),
    ],
)
def test_sizes_that_no_engine_has_are_refused_or_not_believed(said: str, value: Any):
    async def main() -> None:
        async with registered(servers=1) as at:
            liar = at.servers[1]
            setattr(liar, said, value)
            status, answer = await at.add(liar.url)
            if status == 200:
                assert answer["max_running"] >= 2
                assert answer["tp"] in (1, 2, 4, 8)
                assert answer["kv_capacity_tokens"] < 1 << 40
                await at.until(ready=2)
            else:
                assert status == 400
                assert liar.url in answer["error"]["message"]
            made = await asyncio.gather(*(at.step([300, n], 20, f"s{n}") for n in range(8)))
            assert made == [expected([300, n], 20) for n in range(8)]

    run(main())


def test_a_url_that_answers_nothing_holds_nobody_up():
    async def main() -> None:
        async with registered(servers=1, settings=HttpSettings(answer_limit_s=0.5)) as at:
            at.servers[1].silent = True
            adding = asyncio.create_task(at.add(at.servers[1].url))
            assert await at.step([300, 1], 20, "s") == expected([300, 1], 20)
            status, refused = await adding
            assert (status, refused["error"]["code"]) == (400, "not_an_engine")
            at.servers[1].silent = False

    run(main())


def test_keys_of_clients_do_not_reach_engines_nor_theirs_clients():
    async def main() -> None:
        async with registered(servers=2) as at:
            await at.step([300, 301], 4, "s")
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            _, answer = await at("POST", "/v1/chat/completions", chat)
            assert answer["usage"]["completion_tokens"] == 4
            _, listed = await at("GET", "/workers")
            assert KEY not in json.dumps([answer, listed])
            keys = {key for server in at.servers for key in server.keys}
            assert keys == {f"Bearer {KEY}"}

    run(main())


@pytest.mark.parametrize("lie", ["more", "usage", "ids", "html", "reason", "late", "fewer", "junk"])
def test_an_engine_that_lies_about_its_tokens_harms_no_step_and_stays(lie: str):
    async def main() -> None:
        async with registered(servers=2) as at:
            at.servers[0].lie = lie
            made = await asyncio.gather(*(at.step([300, n], 20, f"s{n}") for n in range(8)))
            assert made == [expected([300, n], 20) for n in range(8)]
            assert await at.listed() == [("e0", "ready"), ("e1", "ready")]
            at.servers[0].lie = ""
            before = at.servers[0].generated
            async with asyncio.timeout(PATIENCE_S):
                while at.servers[0].generated < before + 20:  # steps are there again
                    await asyncio.gather(*(at.step([300, n], 20, f"t{n}") for n in range(8)))
            assert at.bench.events(EngineFailed) == []

    run(main())


def test_the_key_of_engines_goes_to_no_url_that_a_client_registers():
    async def main() -> None:
        async with registered(servers=1) as at:
            other = await FakeVllm(key="").start()
            try:
                status, _ = await at.add(other.url)
                assert status == 200
                assert set(other.keys) == {""}
            finally:
                await other.close()

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


@pytest.mark.parametrize(
    ("answers", "called", "status"),
    [
        ([200, 200], [0], None),
        ([503, 200], [0, 1], None),
        ([503, 503], [0, 1, 1, 0], 503),
        ([400, 200], [0], 400),
        ([502, 200], [0, 1], None),
        ([500, 502], [0, 1], 502),
    ],
)
def test_another_engine_renders_what_the_first_cannot(
    monkeypatch, answers: list[int], called: list[int], status: int | None
):
    asked: list[int] = []

    class Renderer:
        def __init__(self, number: int, *, generates: bool) -> None:
            assert generates
            self.number = number

        async def call(self, path: str, body: dict[str, Any]) -> str:
            asked.append(self.number)
            if answers[self.number] != 200:
                raise RenderError(answers[self.number], {"message": "no"})
            return f"{path} of {self.number}"

    async def at_once() -> None:
        pass

    facts = SimpleNamespace(adapters=())
    every = [
        SimpleNamespace(endpoint=number, url=str(number), facts=facts, engine=None)
        for number in range(len(answers))
    ]
    launcher = SimpleNamespace(registered=every, usable=every, any_registered=at_once)
    monkeypatch.setattr(rendering, "HttpRenderer", Renderer)
    # Where all are busy, they are asked again as long as steps wait for engines.
    engines = rendering.RenderingEngines(launcher, wait_s=0.2)  # type: ignore[arg-type]
    if status is None:
        assert asyncio.run(engines.call("/pooling", {})) == f"/pooling of {called[-1]}"
    else:
        with pytest.raises(RenderError) as refused:
            asyncio.run(engines.call("/pooling", {}))
        assert refused.value.status == status
    assert asked == called


def test_an_engine_that_is_down_at_the_start_joins_as_soon_as_it_answers(monkeypatch):
    monkeypatch.setattr(engine_urls, "EXPECT_S", 0.05)

    async def main() -> None:
        notes: list[str] = []
        async with registered(servers=1, more=2) as at:
            _, late, never = at.servers
            for server in (late, never):
                server.die()
                await asyncio.sleep(0.01)  # until its listener is closed too
                await at.engines.expect([(server.url, {"max_running": 3})], notes.append)
                assert f"{server.url}: /health cannot be reached" in notes[-1]
                assert "It joins when it can be used" in notes[-1]
            _, answer = await at("GET", "/workers")
            assert [(each["url"], each["state"]) for each in answer["workers"][1:]] == [
                (late.url, "expected"),
                (never.url, "expected"),
            ]
            await at.engines.expect([(never.url, {})], lambda note: None)  # named twice
            assert (await at("DELETE", f"/workers/{never.url}"))[0] == 200
            await asyncio.sleep(0.3)
            assert len(notes) == 2  # the same is not said again
            for server in (late, never):
                await server.start()
            await at.until(ready=2)
            async with asyncio.timeout(PATIENCE_S):
                while f"{late.url} has joined" not in notes:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert await at.listed() == [("e0", "ready"), ("e1", "ready")]
            [_, joined] = at.bench.events(EngineJoined)
            assert joined.max_running == 3
            at.engines.close()

    run(main())


def test_an_engine_is_ready_when_it_is_registered_so_that_no_step_moves_there():
    async def main() -> None:
        async with registered(servers=1, more=1, policy="verl") as at:
            await at.engines.expect([(at.servers[1].url, {})], lambda note: None)
            at.servers[1].health = 503  # it would pass no other probe
            at.servers[0].frozen = True
            steps = [asyncio.create_task(at.step([300, n], 12, f"s{n}")) for n in range(4)]
            async with asyncio.timeout(PATIENCE_S):
                while at.bench.gateway.dispatches < 4:
                    await asyncio.sleep(0.005)
            at.servers[1].health = 200
            await at.until(ready=2)
            await asyncio.sleep(0.2)  # for aborts of steps that have no token
            at.servers[0].frozen = False
            assert await asyncio.gather(*steps) == [expected([300, n], 12) for n in range(4)]
            posted = [[b["token_ids"] for b in s.seen if b.get("stream")] for s in at.servers]
            assert sorted([*posted[0], *posted[1]]) == [[300, n] for n in range(4)]
            assert len(posted[0]) == 2

    run(main())


def test_a_step_that_moves_to_an_engine_before_its_first_token_has_each_token_made_once():
    async def main() -> None:
        async with registered(servers=1, more=1, policy="verl") as at:
            first, second = at.servers
            first.frozen = True
            steps = [asyncio.create_task(at.step([300, n], 12, f"s{n}")) for n in range(4)]
            async with asyncio.timeout(PATIENCE_S):
                while first.running < 4:
                    await asyncio.sleep(0.005)
            assert (await at.add(second.url))[0] == 200
            await asyncio.sleep(0.2)  # for the abort
            first.frozen = False
            assert await asyncio.gather(*steps) == [expected([300, n], 12) for n in range(4)]
            moved = [event.trajectory for event in at.bench.events(StepPreempted)]
            assert moved
            posted = [b["token_ids"] for s in at.servers for b in s.seen if b.get("stream")]
            assert len(posted) == 4 + len(moved)
            assert sum(len(ids) - start for s in at.servers for start, ids in s.streamed) == 4 * 12

    run(main())


def test_engines_that_are_silent_at_the_start_are_waited_for_together_and_the_order_is_kept():
    async def main() -> None:
        async with registered(servers=0, more=3) as at:
            first, second, third = at.servers
            first.silent = second.silent = True
            given = [(server.url, {}) for server in at.servers]
            notes: list[str] = []
            task = asyncio.create_task(at.engines.expect(given, notes.append))
            async with asyncio.timeout(0.5 * HttpSettings().answer_limit_s):
                while not third.keys:
                    await asyncio.sleep(0.01)
            first.silent = second.silent = False
            assert await task == []
            assert not notes
            _, answer = await at("GET", "/workers")
            assert answer["urls"] == [first.url, second.url, third.url]

    run(main())


def test_what_no_wait_mends_is_refused_at_the_start():
    async def main() -> None:
        async with registered(servers=0, more=1) as at:
            wrong = [("ftp://x", {}), ("http://[::1", {}), (at.servers[0].url, {"tp": 3})]
            refused = await at.engines.expect(wrong, lambda note: None)
            assert [(url, error.status) for url, error in refused] == [(u, 400) for u, _ in wrong]
            assert await at.listed() == []

    run(main())


def test_the_engine_key_goes_to_the_urls_that_were_given_with_it_and_to_no_other():
    async def main() -> None:
        async with registered(servers=1, more=0) as at:
            stranger, named = await FakeVllm().start(), await FakeVllm().start()
            try:
                assert (await at.add(stranger.url))[0] == 200
                assert (await at.add(named.url, api_key="its-own"))[0] == 200
                await at.until(ready=3)
                await asyncio.gather(*(at.step([300, n], 20, f"s{n}") for n in range(12)))
                assert set(at.servers[0].keys) == {f"Bearer {KEY}"}
                assert set(stranger.keys) == {""}
                assert set(named.keys) == {"Bearer its-own"}
                await at.bench.gateway.close(1.0)
            finally:
                for server in (stranger, named):
                    await server.close()

    run(main())


@pytest.mark.parametrize("size", [1_500_000, 900_000])
def test_bodies_of_steps_that_wait_take_their_bytes_and_have_a_limit(monkeypatch, size: int):
    monkeypatch.setattr(http_server, "RECEIVED_BYTES", 0)
    limit = 2 << 20
    fit = 4 * limit // size

    async def ask(at: Registered, n: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*at.address)
        about = b'{"token_ids":[300,%d],"sampling_params":{"max_tokens":4},"tools":"' % n
        head = b"POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        text = b"x" * (size - 4) + "\U0001f600".encode()  # of wide characters once it is read
        length = len(about) + size + 2
        writer.write(head % length + about + text + b'"}')
        await writer.drain()
        return reader, writer

    async def main() -> None:
        async with registered(servers=0, front_settings={"body_bytes": limit}) as at:
            tracemalloc.start()
            try:
                waiting = [await ask(at, n) for n in range(fit)]
                while (await at("GET", "/load"))[1]["server_load"] < fit:
                    await asyncio.sleep(0.01)
                gc.collect()
                held, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            reader, writer = await ask(at, fit)
            async with asyncio.timeout(PATIENCE_S):
                refused = await reader.readuntil(b"\r\n\r\n")
            for _, each in (*waiting, (reader, writer)):
                each.close()
            assert refused.startswith(b"HTTP/1.1 503")
            assert b"Retry-After: " in refused
            assert held < 1.5 * fit * size

    run(main())


def test_an_engine_whose_url_is_written_another_way_in_the_file_stays():
    async def main() -> None:
        async with registered(servers=0) as at:
            url = at.servers[0].url
            again = Reload(at.front, None, lambda note: None)
            assert await again.take_workers([url]) == []
            said = "is not the URL of an engine: write http://host:port, and its key apart"
            assert await again.take_workers(
                [f"{url.upper()}/v1/", "http://x:0", "http://u:p/a@b?c@h/"]
            ) == [
                f"serve.workers: http://x:0: 'http://x:0' {said}",
                f"serve.workers: http://...@h/: 'http://...@h/' {said}",
            ]
            _, answer = await at("DELETE", "/workers/http:%2F%2Fu:p%2Fa@h")
            assert "'http://...@h'" in answer["error"]["message"]
            await at.until(ready=1)
            same = url.replace("127.0.0.1", "localhost")
            step = asyncio.create_task(at.step([300, 301], 4_000, "s"))
            while at.servers[0].generated < 30:
                await asyncio.sleep(0.01)
            (note,) = await again.take_workers([same])
            assert f"{url} is leaving" in note
            await at("POST", "/abort_requests", {})
            await step
            while await at.listed():
                await asyncio.sleep(0.01)
            assert await again.take_workers([same]) == []
            await at.until(ready=1)

    run(main())


def test_an_engine_that_is_named_again_while_it_leaves_is_registered_by_the_next_reload():
    async def main() -> None:
        async with registered(servers=1) as at:
            url = at.servers[1].url
            again = Reload(at.front, None, lambda note: None)
            assert await again.take_workers([url]) == []
            await at.until(ready=2)
            step = asyncio.create_task(at.step([300, 301], 4_000, "s"))
            other = asyncio.create_task(at.step([302, 303], 4_000, "t"))
            while not all(server.generated > 30 for server in at.servers[:2]):
                await asyncio.sleep(0.01)
            assert await again.take_workers([]) == []
            (note,) = await again.take_workers([url])
            assert "is leaving" in note
            await at("POST", "/abort_requests", {})
            await asyncio.gather(step, other)
            await at.until(ready=1)
            while len(await at.listed()) > 1:
                await asyncio.sleep(0.01)
            assert await again.take_workers([url]) == []
            await at.until(ready=2)

    run(main())
