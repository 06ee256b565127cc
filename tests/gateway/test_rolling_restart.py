"""Engines and the gateway are started again one by one under 200 clients: no step is lost.

Clients do what those of others do: after a 503 or a lost connection they send the same again.
"""

import asyncio
import signal
import socket
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.app.gateways import Gateway, gateway
from tests.gateway.served import NO_AIOHTTP
from tests.patience import PATIENCE_S

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

import aiohttp

from heddle.runs import load_run
from heddle_core.events import EngineJoined, EngineReady, TrajectoryArrived
from tests.gateway.test_engine_urls import expected
from tests.runtime.fake_vllm import FakeVllm

CLIENTS, TOKENS = 200, 12
GENERATE = "/inference/v1/generate"


class Fleet:
    """Engines, the gateway in a process of its own, and what clients saw of them."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self.folder = folder
        self.http: Any = None
        self.engines: list[FakeVllm] = []
        self.ended: list[FakeVllm] = []
        self.served: Gateway | None = None
        self.over = False
        self.seen = Counter[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.request(method, self.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def engine(self, port: int = 0) -> FakeVllm:
        made = FakeVllm()
        made.dev_mode, made.port = False, port
        await made.start()
        return made

    async def start_gateway(self, stack: ExitStack) -> None:
        urls = [word for each in self.engines for word in ("--worker", each.url)]
        state = f"serve.state={self.folder / 'state.db'}"
        # The last --port counts. Without preemption each step is one request of an engine.
        words = ("--port", f"{self.port}", "--policy", "verl", *urls)
        words = (*words, "--set", state, "--set", "serve.drain_s=60")
        opened = gateway(self.folder, *words)
        self.served = await asyncio.to_thread(stack.enter_context, opened)

    async def restart_gateway(self, stack: ExitStack) -> None:
        assert self.served is not None
        self.served.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self.served.process.communicate, timeout=PATIENCE_S)
        assert self.served.process.returncode == 0
        await self.start_gateway(stack)

    async def restart_engine(self, number: int) -> None:
        """As the run book says: drained, gone, started again, registered."""
        old = self.engines[number]
        _, listed = await self.call("GET", "/workers")
        [name] = [each["id"] for each in listed["workers"] if each["url"] == old.url]
        await self.call("DELETE", f"/workers/{name}?drain=true")
        while old.url in [w["url"] for w in (await self.call("GET", "/workers"))[1]["workers"]]:
            await asyncio.sleep(0.02)
        assert not old.running
        await old.close()
        self.ended.append(old)
        self.engines[number] = await self.engine(old.port)
        assert (await self.call("POST", "/workers", {"url": old.url}))[0] == 200

    async def step(self, session: str, ids: list[int]) -> list[int]:
        body = {"token_ids": ids, "sampling_params": {"max_tokens": TOKENS}}
        while True:
            try:
                async with self.http.post(
                    self.url + GENERATE, json=body, headers={"X-Session-ID": session}
                ) as answer:
                    found = await answer.json()
                    self.seen[f"{answer.status}"] += 1
                    if answer.status == 200:
                        made: list[int] = found["choices"][0]["token_ids"]
                        return made
                    assert answer.status == 503, found
                    assert int(answer.headers["Retry-After"]) >= 1
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                self.seen["connection"] += 1
            await asyncio.sleep(0.1)

    async def client(self, number: int, turns: int) -> int:
        """Take turns, `turns` at least, until all has been started again; return how many."""
        ids, taken = [1_000 + number], 0
        while taken < turns or not self.over:
            made = await self.step(f"c_{number}", ids)
            assert made == expected(ids, TOKENS)
            ids, taken = [*ids, *made, 700], taken + 1
        return taken


async def rolled(folder: Path, rounds: int) -> tuple[Fleet, int]:
    """Start engines and gateway again so often; return what was seen, and the steps of clients."""
    fleet = Fleet(folder)
    with ExitStack() as stack:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as fleet.http:
            fleet.engines = [await fleet.engine() for _ in range(3)]
            await fleet.start_gateway(stack)
            clients = [asyncio.create_task(fleet.client(n, 2)) for n in range(CLIENTS)]

            async def moved(steps: int = CLIENTS // 2) -> None:
                before = fleet.seen["200"]
                while fleet.seen["200"] < before + steps and not all(c.done() for c in clients):
                    await asyncio.sleep(0.02)

            for _ in range(rounds):
                await moved()
                for number in range(len(fleet.engines)):
                    await fleet.restart_engine(number)
                    await moved()
                await fleet.restart_gateway(stack)
            await moved()
            fleet.over = True
            steps = sum(await asyncio.gather(*clients))
        assert fleet.served is not None
        await asyncio.to_thread(fleet.served.end)
        for engine in fleet.engines:
            await engine.close()
    return fleet, steps


def check(fleet: Fleet, steps: int) -> None:
    """Each step was answered to its client once, and generated once."""
    assert fleet.seen["200"] == steps
    engines = (*fleet.ended, *fleet.engines)
    bodies = [body for each in engines for body in each.seen]
    # A move of KV has one token, and a step that goes on elsewhere those that it lacks.
    limits = ((b.get("sampling_params", {}).get("max_tokens"), b) for b in bodies)
    whole = {tuple(body["token_ids"]) for limit, body in limits if limit == TOKENS}
    assert len(whole) == steps
    # An engine that is registered may take a step from another that has made no token of it.
    made = ((start, ids) for each in engines for start, ids in each.streamed if ids[start:])
    begun = Counter(tuple(ids[:start]) for start, ids in made)
    assert {begun[prompt] for prompt in whole} == {1}
    for run in (fleet.folder / "runs").iterdir():
        # It takes none from those that were given to the gateway with it.
        events = [entry.event for entry in load_run(run).entries()]
        first = next(n for n, event in enumerate(events) if isinstance(event, TrajectoryArrived))
        given = {e.engine for e in events[:first] if isinstance(e, EngineJoined)}
        assert given <= {e.engine for e in events[:first] if isinstance(e, EngineReady)}


def test_engines_and_gateway_are_started_again_and_no_step_is_lost_or_made_twice(tmp_path: Path):
    check(*asyncio.run(rolled(tmp_path, rounds=1)))


@pytest.mark.soak
def test_engines_and_gateway_are_started_again_ten_times(tmp_path: Path):
    check(*asyncio.run(rolled(tmp_path, rounds=10)))
