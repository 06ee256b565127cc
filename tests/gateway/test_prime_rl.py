"""The calls of prime-rl and of the rollout client that it has from verifiers, in their order.

Written from prime-rl's `src/prime_rl/utils/client.py` at 005c286c and from verifiers'
`verifiers/clients/renderer_client.py` at 00482d58. Neither was run: prime-rl needs GPUs.
"""

import asyncio
from typing import Any

import pytest

from heddle_core.events import TrajectoryArrived, TrajectoryFinished, WeightsUpdated
from tests.gateway.served import NO_AIOHTTP, run

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from tests.gateway.test_engine_urls import Registered, expected, registered
from tests.runtime.fake_vllm import MODEL

GENERATE = "/inference/v1/generate"
PAUSE = "/pause?mode=keep&clear_cache=false"


async def turn(at: Registered, session: str, ids: list[int], tokens: int, version: int) -> Any:
    """One turn of a rollout; the session is in a header, the weights' version in the salt."""
    body = {
        "model": MODEL,
        "token_ids": ids,
        "sampling_params": {"temperature": 1.0, "max_tokens": tokens, "logprobs": 1},
        "cache_salt": f"{version}",
        "priority": 0,
    }
    headers = {"X-Session-ID": session}
    async with at.http.post(at.url + GENERATE, json=body, headers=headers) as answer:
        found = await answer.json()
        assert answer.status == 200, found
        [choice] = found["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert all("logprob" in each for each in choice["logprobs"]["content"])
        assert found["request_id"]
        return choice


async def rollout(at: Registered, session: str, *, turns: int, tokens: int) -> None:
    """Each prompt is the tokens so far and those of the environment, never rendered again."""
    ids = [300, len(session)]
    for number in range(turns):
        made = await turn(at, session, ids, tokens, version=number)
        assert made["token_ids"] == expected(ids, tokens)
        assert made["finish_reason"] == "length"
        ids = [*ids, *made["token_ids"], 700 + number]


async def ready(at: Registered) -> None:
    assert (await at("GET", "/health"))[0] == 200
    _, models = await at("GET", "/v1/models")
    assert MODEL in [each["id"] for each in models["data"]]


async def under_way(at: Registered) -> None:
    while not any(server.generated > 30 for server in at.servers[:2]):
        await asyncio.sleep(0.01)


def test_rollouts_go_on_over_an_update_through_the_gateway_and_sessions_end():
    async def main() -> None:
        async with registered(servers=2) as at:
            await ready(at)
            status, _ = await at("POST", "/init_broadcaster", {"host": "h", "rank_offset": 0})
            assert status == 404  # prime-rl then goes on without; see `admin_base_url` below
            names = [f"t{'x' * n}" for n in range(6)]
            going = [asyncio.create_task(rollout(at, n, turns=3, tokens=60)) for n in names]
            await under_way(at)
            assert (await at("POST", PAUSE))[0] == 200
            assert (await at("POST", "/update_weights", {"weight_dir": "/w/step_1"}))[0] == 200
            assert (await at("POST", "/resume"))[0] == 200
            await asyncio.gather(*going)
            for server in at.servers[:2]:
                paths = [(path, body) for path, _, body in server.calls]
                assert ("/update_weights", {"weight_dir": "/w/step_1"}) in paths
            assert [e.version for e in at.bench.events(WeightsUpdated)] == [1]
            assert len(at.bench.events(TrajectoryArrived)) == len(names)
            for name in (*names, names[0]):  # also when a rollout has failed or was cancelled
                assert (await at("POST", f"/finish_session?session_id={name}"))[0] == 200
            assert len(at.bench.events(TrajectoryFinished)) == len(names)

    run(main())


def test_with_admin_base_url_engines_are_paused_beside_the_gateway_and_no_step_is_lost():
    async def main() -> None:
        async with registered(servers=2) as at:
            going = [
                asyncio.create_task(rollout(at, f"s{n}", turns=2, tokens=60)) for n in range(6)
            ]
            await under_way(at)
            key = {"Authorization": f"Bearer {at.servers[0].key}"}
            for path, body in ((PAUSE, None), ("/update_weights", {"weight_dir": "/w"})):
                for server in at.servers[:2]:
                    async with at.http.post(server.url + path, json=body, headers=key) as said:
                        assert said.status == 200
            made = [server.generated for server in at.servers[:2]]
            await asyncio.sleep(0.3)
            assert sum(server.generated for server in at.servers[:2]) <= sum(made) + 6
            for server in at.servers[:2]:
                async with at.http.post(server.url + "/resume", headers=key) as said:
                    assert said.status == 200
            await asyncio.gather(*going)

    run(main())
