"""On a node: starts the processes of engines for a driver, and ends them with it."""

import asyncio
import os
import shutil
import socket
import tempfile
from functools import partial
from pathlib import Path

from heddle_core.ids import EngineId
from heddle_runtime.nodes.connections import Address, connect
from heddle_runtime.nodes.messages import Exited, Joined, Kill, Launch, Launched, NodeOrder, Used
from heddle_runtime.process.async_channel import AsyncChannel
from heddle_runtime.process.child import ProcessGroup
from heddle_runtime.process.hang import LOOKS
from heddle_runtime.process.wire import Channel
from heddle_runtime.vllm.machine import log_of, reserved_port
from heddle_runtime.vllm.settings import Platform, environment, installed_vllm

LOG_BYTES = 1 << 16
"""Of an engine's output, what its end reports."""
SOURCES = str(Path(__file__).resolve().parents[2])
"""Where this package is: an agent may have found it by other means than its processes would."""


def run_agent(address: Address, token: bytes, connection: bytes, host: str) -> None:
    """Serve one driver until it is gone. `host`: the address at which engines reach this node.

    Raises:
        OSError: the driver cannot be reached, or refuses the token.
    """

    async def run() -> None:
        sock = await connect(address, token, connection)
        with tempfile.TemporaryDirectory(prefix="heddle-") as folder:
            await NodeAgent(sock, address, token, host, Path(folder)).serve()

    asyncio.run(run())


class NodeAgent:
    """Engines of one node for one driver, inside a running event loop."""

    def __init__(
        self, sock: socket.socket, address: Address, token: bytes, host: str, folder: Path
    ) -> None:
        """`sock` is connected to the driver, at `address`; outputs of engines go into `folder`."""
        self._address, self._token, self._host = address, token, host
        self._folder = folder
        installed = installed_vllm()
        self._platform: Platform = installed.platform if installed is not None else "cpu"
        self._groups: dict[str, ProcessGroup] = {}
        self._launching: dict[str, asyncio.Task[None]] = {}
        self._ports: dict[str, socket.socket] = {}
        self._changed = asyncio.Event()
        self._driver: AsyncChannel[NodeOrder] = AsyncChannel(
            Channel(sock, NodeOrder), on_message=self._execute, on_close=self._changed.set
        )

    async def serve(self) -> None:
        """Execute orders until the driver is gone; then end all engines."""
        self._driver.send(Joined(os.getpid()))
        while not self._driver.over:
            self._changed.clear()
            await self._changed.wait()
        for task in self._launching.values():
            task.cancel()
        for group in self._groups.values():
            group.kill()
        while self._groups:
            self._changed.clear()
            await self._changed.wait()
        self._driver.close()

    def _execute(self, order: NodeOrder) -> None:
        match order:
            case Launch():
                task = asyncio.get_running_loop().create_task(self._launch(order))
                self._launching[order.engine] = task
            case Kill(engine=engine):
                if engine in self._groups:
                    self._groups[engine].kill()
                elif engine in self._launching:
                    self._launching[engine].cancel()

    async def _launch(self, order: Launch) -> None:
        engine = order.engine
        try:
            with await connect(self._address, self._token, order.connection) as sock:
                port = 0
                if order.settings.kv_transfer != "none":
                    held = self._ports[engine] = reserved_port(self._host)
                    port = held.getsockname()[1]
                temporary = self._temporary_of(engine)
                temporary.mkdir(exist_ok=True)
                variables = environment(
                    order.settings,
                    self._platform,
                    kv_port=port,
                    devices=order.devices,
                    temporary=str(temporary),
                    host=self._host,
                )
                paths = [SOURCES, *filter(None, [variables.get("PYTHONPATH")])]
                self._groups[engine] = group = ProcessGroup(
                    order.module,
                    sock,
                    environment={**variables, "PYTHONPATH": os.pathsep.join(paths)},
                    log=log_of(self._folder, EngineId(engine)),
                    on_exit=partial(self._exited, engine),
                )
        except asyncio.CancelledError:
            self._exited(engine, "killed while it started")
        except OSError as error:
            self._exited(engine, f"its process cannot be started: {error}")
        else:
            self._driver.send(Launched(engine, group.pid))
            self._report_use(engine, group, order.settings.hang_s / LOOKS)
        finally:
            del self._launching[engine]

    def _report_use(self, engine: str, group: ProcessGroup, interval_s: float) -> None:
        """Report at an interval what an engine computes: the driver sees whether one has hung."""
        if self._groups.get(engine) is group:
            self._driver.send(Used(engine, group.cpu_s(), group.stopped()))
            asyncio.get_running_loop().call_later(
                interval_s, self._report_use, engine, group, interval_s
            )

    def _exited(self, engine: str, reason: str) -> None:
        self._groups.pop(engine, None)
        shutil.rmtree(self._temporary_of(engine), ignore_errors=True)
        if engine in self._ports:
            self._ports.pop(engine).close()
        self._driver.send(Exited(engine, reason, self._end_of_log(engine)))
        self._changed.set()

    def _temporary_of(self, engine: str) -> Path:
        """The folder of an engine for temporary files: a killed process cannot remove its own."""
        return log_of(self._folder, EngineId(engine)).with_suffix(".tmp")

    def _end_of_log(self, engine: str) -> bytes:
        try:
            with log_of(self._folder, EngineId(engine)).open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
                return log.read()
        except OSError:
            return b""
