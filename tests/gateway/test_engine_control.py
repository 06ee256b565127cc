"""Trainers whose only URL is the gateway's: pauses, weight updates, and vime's calls."""

import asyncio
from typing import Any
from urllib.parse import quote

import pytest

from heddle_core.events import EngineReady, WeightsUpdated
from tests.gateway.served import NO_AIOHTTP, run

aiohttp = pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from tests.gateway.test_engine_urls import Registered, expected, registered  # noqa: E402


def calls(at: Registered, path: str) -> list[Any]:
    return [[each[1:] for each in s.calls if each[0] == path] for s in at.servers[:2]]


def versions(at: Registered) -> list[int]:
    return [e.version for e in at.bench.events(WeightsUpdated)]


async def running(at: Registered, prompt: list[int], tokens: int) -> asyncio.Task[list[int]]:
    """A step whose first tokens are made."""
    step = asyncio.create_task(at.step(prompt, tokens, "s"))
    while not any(server.generated > 5 for server in at.servers):
        await asyncio.sleep(0.01)
    return step


def test_a_pause_that_keeps_stops_running_steps_at_their_engines_until_the_end():
    async def main() -> None:
        async with registered(servers=2) as at:
            step = await running(at, [300, 301], 200)
            status, answer = await at("POST", "/pause?mode=keep&clear_cache=false")
            assert status == 200
            assert answer["engines"] == [server.url for server in at.servers[:2]]
            assert calls(at, "/pause") == [[({"mode": "keep", "clear_cache": "false"}, {})]] * 2
            made = -1
            while made != (now := sum(server.generated for server in at.servers)):
                made = now  # what was under way comes first
                await asyncio.sleep(0.1)
            assert made < 200
            assert not step.done()
            held = asyncio.create_task(at.step([400], 4, "t"))
            assert (await at("POST", "/resume"))[0] == 200
            assert await step == expected([300, 301], 200)
            assert await held == expected([400], 4)
            assert versions(at) == []

    run(main())


def test_weights_that_pass_through_are_another_version_at_the_end_of_the_pause():
    async def main() -> None:
        async with registered(servers=2) as at:
            await at("POST", "/pause?mode=keep")
            body = {"update_info": {"names": ["w"], "shapes": [[2]]}}
            for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
                assert (await at("POST", path, body))[0] == 200
                assert calls(at, path) == [[({}, body)]] * 2
            assert versions(at) == []
            await at("POST", "/resume")
            assert versions(at) == [1]
            # Beside a pause at once, and no other weights, only no KV.
            await at("POST", "/reset_prefix_cache", {})
            assert versions(at) == [1, 1]

    run(main())


def test_ranks_of_a_weight_transfer_are_shared_out_over_engines_of_any_size():
    async def main() -> None:
        async with registered(servers=2) as at:
            at.servers[0].world_size, at.servers[1].world_size = 4, 2
            assert (await at("GET", "/get_world_size"))[1] == {"world_size": 6}
            info = {"master_address": "10.0.0.1", "rank_offset": 1, "world_size": 7}
            await at("POST", "/init_weight_transfer_engine", {"init_info": info})
            sent = [each[0][1]["init_info"] for each in calls(at, "/init_weight_transfer_engine")]
            assert sent == [info, {**info, "rank_offset": 5}]

    run(main())


def test_engines_asleep_get_no_step():
    async def main() -> None:
        async with registered(servers=2) as at:
            await at("POST", "/sleep?level=2&tags=weights&tags=kv_cache", {})
            step = asyncio.create_task(at.step([300], 4, "s"))
            await at("POST", "/wake_up?tags=weights", {})
            await asyncio.sleep(0.1)
            assert not step.done()
            await at("POST", "/wake_up?tags=kv_cache", {})
            assert await step == expected([300], 4)
            assert versions(at) == [0]

    run(main())


def test_an_engine_that_cannot_or_will_not_is_named_and_a_pause_goes_without_it():
    async def main() -> None:
        async with registered(servers=2) as at:
            at.servers[0].dev_mode = False
            status, refused = await at("POST", "/update_weights", {})
            assert status == 502
            assert f"{at.servers[0].url} has no /update_weights" in refused["error"]["message"]
            assert "VLLM_SERVER_DEV_MODE=1" in refused["error"]["message"]
            status, answer = await at("POST", "/pause?mode=wait")
            assert (status, answer["engines"]) == (200, [at.servers[1].url])
            at.servers[1].control_status = 409
            status, refused = await at("POST", "/resume")
            assert status == 502
            assert "the workers are busy" in refused["error"]["message"]
            assert (await at("GET", "/heddle/state"))[1]["paused"]
            at.servers[1].control_status = 200
            assert (await at("POST", "/resume"))[0] == 200
            assert await at.step([300], 4, "s") == expected([300], 4)

    run(main())


def test_a_pause_without_engines_begins_and_ends():
    async def main() -> None:
        async with registered(servers=0) as at:
            assert (await at("POST", "/pause?mode=keep"))[0] == 200
            assert (await at("GET", "/heddle/state"))[1]["paused"]
            assert (await at("POST", "/update_weights", {}))[0] == 503
            status, _ = await at("POST", "/resume")
            assert status == 200
            assert not (await at("GET", "/heddle/state"))[1]["paused"]

    run(main())


def idle(load: Any) -> bool:
    """As vime's control reads it: zero in every queue of every rank."""
    queues = [queue for rank in load["inflight"] for queue in rank["queues"]]
    return load["server_load"] == 0 and not any(q["num_requests"] for q in queues) and queues != []


@pytest.mark.parametrize("prefix", ["/workers/", "/remove_worker?url="])
def test_the_calls_that_vime_makes_of_its_router(prefix: str):
    """Registration, samples, an abort at the listed URLs until they are idle, and removal.

    The calls and their order are those of `vllm_rollout.py` and `server_control.py` at 052693a8.
    """

    async def main() -> None:
        async with registered(servers=0, more=2, front_settings={"lists_itself": True}) as at:
            for server in at.servers[:2]:
                body = {"url": server.url, "worker_type": "regular"}
                assert (await at("POST", "/workers", body))[0] == 200
            while len(at.bench.events(EngineReady)) < 2:
                await asyncio.sleep(0.01)
            sampling = {"max_tokens": 8_000, "temperature": 1.0, "top_p": 1.0, "logprobs": 1}
            samples = [
                asyncio.create_task(
                    at(
                        "POST",
                        "/inference/v1/generate",
                        {"model": "counting", "token_ids": [300, n], "sampling_params": sampling},
                    )
                )
                for n in range(12)
            ]
            while (await at("GET", "/load"))[1]["server_load"] < 12:
                await asyncio.sleep(0.01)
            while min(server.generated for server in at.servers[:2]) < 100:
                await asyncio.sleep(0.01)
            _, listed = await at("GET", "/workers")
            [url] = [each["url"] for each in listed["workers"]]
            assert url == at.url
            path = "/load?include_inflight=true&inflight_limit=100"
            _, load = await at("GET", path)
            assert not idle(load)
            queues = {q["name"]: q["num_requests"] for q in load["inflight"][0]["queues"]}
            assert queues == {"running": 8, "waiting": 4}
            async with asyncio.timeout(20.0):
                while not idle((await at("GET", path))[1]):
                    assert (await at("POST", "/abort_requests", {}))[0] == 200
                    await asyncio.sleep(0.02)
            answers = await asyncio.gather(*samples)
            assert sum(bool(answer["choices"][0]["token_ids"]) for _, answer in answers) == 8
            for status, answer in answers:
                [choice] = answer["choices"]
                assert (status, choice["finish_reason"]) == (200, "abort")
                assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            gone = quote(at.servers[0].url, safe="")
            method = "DELETE" if prefix == "/workers/" else "POST"
            assert (await at(method, prefix + gone))[0] == 200
            async with asyncio.timeout(20.0):  # an abort that came too early is sent again
                while (await at("DELETE", f"/workers/{gone}"))[0] != 404:
                    await asyncio.sleep(0.02)

    run(main())
