"""A gateway before engines of `mock_vllm` with faults at given times; all in virtual time."""

import asyncio
import logging
import selectors
import time
import traceback
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

import aiohttp

from campaigns.faults.gateway_bench import Bench, set_up
from campaigns.faults.mock_faults import Fault
from campaigns.faults.mock_vllm import MockVllm
from heddle_gateway.app import listening
from heddle_gateway.engine_urls import RegisteredEngines
from heddle_gateway.front import Front
from heddle_gateway.openai_api import ServedModel
from heddle_gateway.rendering import RenderingEngines
from heddle_runtime.virtual_time import VirtualTimeLoop
from heddle_runtime.vllm_http.launcher import HttpLauncher
from heddle_runtime.vllm_http.settings import HttpSettings

T = TypeVar("T")
SLOTS = 256
"""Steps that the policy gives an engine at once."""
READY_S = 60.0


class _Jumping(selectors.DefaultSelector):
    """Never waits for a timer, and has no limit of file numbers."""

    loop: VirtualTimeLoop | None = None

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout and self.loop is not None:
            self.loop.jump()
        return ready


class _ManySockets(VirtualTimeLoop):
    """Virtual time for more sockets than `select` takes."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Jumping()
        asyncio.SelectorEventLoop.__init__(self, selector)
        selector.loop = self


def in_virtual_time_too(main: Coroutine[Any, Any, T]) -> T:
    """Run a scene to its end, with the clock of the process too in virtual time."""
    with asyncio.Runner(loop_factory=_ManySockets) as runner:
        loop = runner.get_loop()
        with patch.object(time, "monotonic", loop.time):
            return runner.run(main)


class Tracebacks(logging.Handler):
    """Keeps the errors that are logged with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        if record.exc_info:
            error = record.exc_info[1]
            frame = traceback.extract_tb(record.exc_info[2])[-1]
            place = f"{frame.filename.rpartition('/')[2]} {frame.name} {frame.lineno}"
            self.found.append(f"{record.name}: {record.getMessage()[:200]}: {error!r}, {place}")


@asynccontextmanager
async def logged() -> AsyncIterator[Tracebacks]:
    """Keep what is logged meanwhile."""
    kept, root = Tracebacks(), logging.getLogger()
    root.addHandler(kept)
    try:
        yield kept
    finally:
        root.removeHandler(kept)


@dataclass(slots=True, eq=False)
class Scene:
    """A gateway, its engines, and a client's connection pool."""

    bench: Bench
    engines: list[MockVllm]
    url: str
    http: aiohttp.ClientSession
    began_s: float
    notes: list[str] = field(default_factory=list)
    ended_s: dict[int, float] = field(default_factory=dict)
    """When the last fault of each engine ended."""

    @property
    def now_s(self) -> float:
        """Seconds from the beginning of the scene."""
        return asyncio.get_running_loop().time() - self.began_s

    async def until(self, at_s: float) -> None:
        """Wait for a moment of the scene."""
        await asyncio.sleep(max(0.0, at_s - self.now_s))

    async def have(self, fault: Fault) -> None:
        """Let an engine have a fault at its time."""
        engine = self.engines[fault.engine]
        await self.until(fault.at_s)
        await engine.begin(fault)
        await self.until(fault.at_s + fault.seconds)
        await engine.end()


@asynccontextmanager
async def scene(engines: Sequence[MockVllm], *, policy: str, relays: bool) -> AsyncIterator[Scene]:
    """Serve, with the engines registered; close everything at the end.

    `relays`: whether engines answer chats and completions themselves, as they do for
    `heddle serve`; otherwise they only generate and render.
    """
    for engine in engines:
        await engine.start()
    notes: list[str] = []
    launcher = HttpLauncher(HttpSettings())
    setup = set_up(f"{policy}+given+keep_engines", engines=8, slots=SLOTS, tps=(1, 2, 4, 8))
    bench = Bench(setup, launcher=launcher, on_note=notes.append)
    model = ServedModel(context_tokens=1 << 20)
    front = Front(gateway=bench.gateway, model=model)
    front.engine_urls = front.control = RegisteredEngines(
        launcher,
        bench.gateway,
        model,
        shapes=list(setup.context.cost.by_shape),
        max_running=setup.context.max_running,
    )
    rendering = RenderingEngines(launcher)
    front.renderer = rendering
    if relays:
        front.engine_facts = rendering.facts
    serving = asyncio.create_task(bench.gateway.run())
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with (
            listening(front, host="127.0.0.1", port=0) as port,
            aiohttp.ClientSession(connector=connector) as http,
        ):
            for engine in engines:
                await front.engine_urls.add(engine.url, {})
            async with asyncio.timeout(READY_S):
                while len(bench.gateway.engines) < len(engines):
                    await asyncio.sleep(0.01)
            began_s = asyncio.get_running_loop().time()
            yield Scene(bench, list(engines), f"http://127.0.0.1:{port}", http, began_s, notes)
            await bench.gateway.close(1.0)
            await serving
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        await launcher.close()
        for engine in engines:
            await engine.close()
