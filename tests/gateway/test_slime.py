"""The calls of slime at its router, in their order: which of them the gateway answers.

Written from slime's source: what samples send and how a rollout is ended from
`slime/rollout/sglang_rollout.py` at 3c9aa092, what engines send when they come and go from
`slime/backends/sglang_utils/sglang_engine.py` at 03b32d8b. slime was not run: it needs GPUs. Its
engines are SGLang, which the gateway refuses: its training ends at the first call, with a message.
"""

import asyncio
from typing import Any
from urllib.parse import quote

import pytest

from tests.gateway.served import NO_AIOHTTP, run

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from tests.gateway.test_engine_urls import Registered, expected, registered

LISTS = pytest.mark.parametrize("old", [True, False], ids=["slime's router", "sglang-router"])
ITSELF = {"lists_itself": True}
ALL = {"abort_all": True}


async def join(at: Registered, url: str, *, old: bool) -> tuple[int, Any]:
    """As an engine does when it has started."""
    if old:
        return await at("POST", f"/add_worker?url={url}")
    return await at("POST", "/workers", {"url": url, "worker_type": "regular"})


async def urls(at: Registered, *, old: bool) -> list[str]:
    """Where a rollout that has enough samples aborts the rest."""
    if old:
        found: list[str] = (await at("GET", "/list_workers"))[1]["urls"]
        return found
    return [each["url"] for each in (await at("GET", "/workers"))[1]["workers"]]


@LISTS
def test_its_engines_are_refused_when_they_come(old: bool):
    async def main() -> None:
        async with registered(servers=1) as at:
            sglang = at.servers[1]
            sglang.version, sglang.owner = None, "sglang"
            status, refused = await join(at, sglang.url, old=old)
            assert status == 400
            assert "not vLLM" in refused["error"]["message"]
            assert sglang.url not in await urls(at, old=old)

    run(main())


def test_its_samples_are_refused_in_an_answer_that_its_log_has():
    async def main() -> None:
        async with registered(servers=1) as at:
            body = {
                "input_ids": [300, 301],
                "sampling_params": {"temperature": 1.0, "max_new_tokens": 8, "no_stop_trim": True},
                "return_logprob": True,
            }
            made = at.servers[0].generated  # by the probe
            status, refused = await at("POST", "/generate", body)
            assert status == 404
            assert refused == {"detail": "Not Found"}
            assert at.servers[0].generated == made

    run(main())


@LISTS
def test_the_rest_of_a_rollout_is_aborted_where_the_list_says_and_partial_samples_go_on(old: bool):
    async def main() -> None:
        async with registered(servers=2, front_settings=ITSELF) as at:
            going = [asyncio.create_task(at.step([300, n], 4_000, f"s{n}")) for n in range(4)]
            while not all(server.generated > 30 for server in at.servers[:2]):
                await asyncio.sleep(0.01)
            listed = await urls(at, old=old)
            assert listed == [at.url]
            for url in listed:
                status, _ = await at("POST", f"{url}/abort_request".removeprefix(at.url), ALL)
                assert status == 200
            for n, partial in enumerate(await asyncio.gather(*going)):
                assert 0 < len(partial) < 4_000
                assert partial == expected([300, n], len(partial))
                rest = await at.step([300, n, *partial], 5, f"s{n}")
                assert [*partial, *rest] == expected([300, n], len(partial) + 5)

    run(main())


@pytest.mark.parametrize("by", ["remove_worker", "url", "id"])
def test_engines_that_leave_are_taken_out_as_each_release_of_the_router_has_it(by: str):
    async def main() -> None:
        async with registered(servers=1) as at:
            url = at.servers[1].url
            assert (await join(at, url, old=by == "remove_worker"))[0] == 200
            await at.until(ready=2)
            if by == "remove_worker":
                status, _ = await at("POST", f"/remove_worker?url={url}")
            elif by == "url":
                status, _ = await at("DELETE", f"/workers/{quote(url, safe='')}")
            else:
                _, answer = await at("GET", "/workers")
                (name,) = [each["id"] for each in answer["workers"] if each["url"] == url]
                status, _ = await at("DELETE", f"/workers/{name}")
            assert status == 200
            await at.until(ready=1)
            assert await urls(at, old=False) == [at.servers[0].url]

    run(main())
