"""The engine contract on engines behind URLs, at servers without a model."""

import asyncio
import gc
import socket
from collections.abc import Iterator

import pytest

from tests.rollout.contract import Bench, EngineContract, Recorder

pytest.importorskip("aiohttp", reason="aiohttp is not installed; pip install 'heddle-rl[serve]'")

import contextlib

from heddle_runtime.vllm_http.engine import HttpEngine
from heddle_runtime.vllm_http.launcher import HttpLauncher
from heddle_runtime.vllm_http.settings import HttpSettings
from tests.patience import PATIENCE_S
from tests.runtime.fake_vllm import FakeVllm

SERVERS = 6


@pytest.fixture(scope="module", params=["with KV moves", "without"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    loop = asyncio.new_event_loop()
    servers = [FakeVllm(kv=request.param == "with KV moves") for _ in range(SERVERS)]
    settings = HttpSettings(sample_s=0.05, health_s=0.2, retry_s=0.05, answer_limit_s=5.0)

    async def launcher() -> tuple[HttpLauncher, Recorder]:
        made = HttpLauncher(settings)
        for server in servers:
            await server.start()
            await made.add(server.url)
        return made, Recorder()

    made, recorder = loop.run_until_complete(launcher())

    def fail(engine: HttpEngine) -> None:
        assert engine.facts is not None
        (server,) = [server for server in servers if server.url == engine.facts.url]
        server.die()

    async def close() -> None:
        await made.close()
        for server in servers:
            await server.close()

    try:
        yield Bench(
            loop=loop,
            launcher=made,
            recorder=recorder,
            gpu="cpu",
            makes_tokens=True,
            fail=fail,
            weights="",
        )
    finally:
        loop.run_until_complete(close())
        loop.close()


class TestHttpEngine(EngineContract):
    pass


@pytest.mark.parametrize("turns", range(6))
def test_a_server_that_dies_while_it_accepts_leaks_no_socket(turns: int):
    async def main() -> None:
        server = await FakeVllm().start()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            server.die()
            await server.close()
            client.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        gc.collect()  # pytest fails on the warning about a socket that is left open

    asyncio.run(main())
