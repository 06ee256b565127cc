"""Starts engines on nodes that were reserved; implements `Launcher`."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from heddle_core.ids import EngineShape
from heddle_runtime.nodes.connections import Address, Listener, new_id, new_token
from heddle_runtime.nodes.remote import RemoteNode
from heddle_runtime.process.child import HANG_S
from heddle_runtime.vllm.engine import VllmEngine
from heddle_runtime.vllm.launcher import EngineLauncher
from heddle_runtime.vllm.settings import VllmSettings

AGAIN_S = 1.0
"""Seconds until a node that is lost is looked for again."""


class ReservedNode(Protocol):
    """Cores or GPUs of one node that are ours for the run."""

    @property
    def name(self) -> str:
        """Of the node, for messages."""
        ...

    @property
    def size(self) -> int:
        """Cores or GPUs."""
        ...

    async def find(self) -> tuple[str, ...]:
        """Wait until there is a node, another one if the first has died; return its GPUs' ids."""
        ...

    async def run_agent(self, address: Address, token: bytes, connection: bytes) -> None:
        """Run `heddle_runtime.nodes.agent.run_agent` there, to its end."""


class NodeLauncher(EngineLauncher):
    """Starts engines on reserved nodes. A node that dies is replaced where another is found."""

    def __init__(
        self,
        settings: VllmSettings,
        nodes: Sequence[ReservedNode],
        *,
        host: str,
        log_dir: Path,
        start_limit_s: float = 600.0,
        module: str = "heddle_runtime.vllm.process",
        simulated: Callable[[EngineShape], dict[str, Any]] | None = None,
    ) -> None:
        """Agents and engines connect to `host`, an address of this machine.

        The end of each engine's output goes to `log_dir`/<engine>.log. `module` runs in an engine's
        process; `simulated` describes engines that keep time only.
        """
        log_dir.mkdir(parents=True, exist_ok=True)
        self._start_limit_s = start_limit_s
        self._token = new_token()
        self._listener = Listener(host, self._token)
        self._nodes = [
            RemoteNode(
                node.name,
                node.size,
                settings,
                self._listener,
                log_dir=log_dir,
                start_limit_s=start_limit_s,
                module=module,
                simulated=simulated,
                changed=self._launch_next,
            )
            for node in nodes
        ]
        super().__init__(settings, self._nodes)
        self._loop = asyncio.get_running_loop()
        self._limits: dict[VllmEngine, asyncio.TimerHandle] = {}
        """Of engines that wait for a node."""
        self._keepers = [
            self._loop.create_task(self._keep(reserved, node))
            for reserved, node in zip(nodes, self._nodes, strict=True)
        ]

    async def close(self) -> None:
        """End every engine, also on nodes that do not answer; then the agents."""
        try:
            async with asyncio.timeout(2 * HANG_S):
                await super().close()
        except TimeoutError:
            for node in self._nodes:
                node.disconnect()
            await super().close()
        for limit in self._limits.values():
            limit.cancel()
        for node in self._nodes:
            node.disconnect()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.wait(self._keepers)
        self._listener.close()

    async def _keep(self, reserved: ReservedNode, node: RemoteNode) -> None:
        """Have an agent on the node, or on the one that takes its place, until `close`."""
        while True:
            node.devices = await reserved.find()
            node.name = reserved.name
            connection = new_id()
            joined: asyncio.Future[socket.socket] = self._loop.create_future()
            self._listener.expect(connection, joined.set_result)
            agent = self._loop.create_task(
                reserved.run_agent(self._listener.address, self._token, connection)
            )
            try:
                both: list[asyncio.Future[Any]] = [joined, agent]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if joined.done():
                    node.connect(joined.result())
                    await node.until_lost()
            finally:
                self._listener.forget(connection)
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(HANG_S):
                        await agent
            await asyncio.sleep(AGAIN_S)

    def _not_placed(self, engine: VllmEngine) -> None:
        """Wait while something may become free; else end an engine that fits no node."""
        wanted = engine.spec.shape.gpus
        reason = f"no node has {wanted} free, as TP {engine.spec.shape.tp} needs on one node"
        others = [each for each in self._engines.values() if each.ending]
        if others or not all(node.connected for node in self._nodes):
            if engine not in self._limits:
                limit = self._loop.call_later(self._start_limit_s, engine.refuse, reason)
                self._limits[engine] = limit
        else:
            self._queue.remove(engine)
            engine.refuse(reason)

    def _changed(self, engine: VllmEngine) -> None:
        limit = self._limits.pop(engine, None)
        if limit is not None:
            limit.cancel()
        super()._changed(engine)
