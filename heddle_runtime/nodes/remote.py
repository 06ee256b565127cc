"""The driver's side of a node: what is free there, and the processes of its engines."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from heddle_core.ids import EngineId, EngineShape
from heddle_core.plans import EngineSpec
from heddle_runtime.nodes.connections import Listener, new_id
from heddle_runtime.nodes.messages import Exited, Joined, Kill, Launch, Launched, NodeReport, Used
from heddle_runtime.process.async_channel import AsyncChannel
from heddle_runtime.process.child import HANG_S
from heddle_runtime.process.wire import Channel, Report, WireMessage
from heddle_runtime.vllm.engine import LaunchSpec
from heddle_runtime.vllm.machine import log_of
from heddle_runtime.vllm.settings import VllmSettings


class RemoteNode:
    """A share of a node's cores or GPUs; implements `Machine`."""

    def __init__(
        self,
        name: str,
        size: int,
        settings: VllmSettings,
        listener: Listener,
        *,
        log_dir: Path,
        start_limit_s: float,
        module: str,
        simulated: Callable[[EngineShape], dict[str, Any]] | None,
        changed: Callable[[], None],
    ) -> None:
        """`size`: cores or GPUs. `changed` is called when it has been connected or lost."""
        self.name, self.size = name, size
        self.devices: tuple[str, ...] = ()
        """Its GPUs; empty: cores."""
        self._settings, self._listener, self._module = settings, listener, module
        self._log_dir, self._start_limit_s = log_dir, start_limit_s
        self._simulated, self._changed = simulated, changed
        self._channel: AsyncChannel[NodeReport] | None = None
        self._pid = 0
        self._taken: dict[EngineId, tuple[str, ...]] = {}
        self._processes: dict[str, RemoteProcess] = {}
        self._lost = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether engines can be placed here."""
        return self._pid > 0

    def connect(self, sock: socket.socket) -> None:
        """Take the connection of its agent."""
        self._lost.clear()
        self._channel = AsyncChannel(
            Channel(sock, NodeReport), on_message=self._on_report, on_close=self.disconnect
        )

    def disconnect(self) -> None:
        """Count the node as dead: its engines fail now."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel, self._pid = None, 0
        for process in list(self._processes.values()):
            process.ended(f"node {self.name} died, or its connection broke")
        self._lost.set()
        self._changed()

    async def until_lost(self) -> None:
        """Wait until the connection has ended."""
        await self._lost.wait()

    def place(self, spec: EngineSpec) -> LaunchSpec | None:
        """Reserve cores or GPUs; None while too few are free."""
        wanted = spec.shape.gpus
        taken = [device for devices in self._taken.values() for device in devices]
        places = self.devices or tuple(map(str, range(self.size)))
        free = [place for place in places if place not in taken]
        if not self.connected or len(free) < wanted:
            return None
        self._taken[spec.engine] = tuple(free[:wanted])
        return LaunchSpec(
            open=partial(self._open, spec.engine),
            parent=self._pid,
            log=log_of(self._log_dir, spec.engine),
            start_limit_s=self._start_limit_s,
            simulated=None if self._simulated is None else self._simulated(spec.shape),
        )

    def free(self, engine: EngineId) -> None:
        """Give back the cores or GPUs of an engine that is gone."""
        self._taken.pop(engine, None)

    def send(self, order: WireMessage) -> bool:
        """Send an order; False if the node is lost."""
        if self._channel is None:
            return False
        self._channel.send(order)
        return True

    def drop(self, engine: str) -> None:
        """Forget a process that has ended."""
        self._processes.pop(engine, None)

    def _open(
        self,
        engine: EngineId,
        on_report: Callable[[Report], None],
        on_exit: Callable[[str], None],
    ) -> "RemoteProcess":
        launch = Launch(
            engine=str(engine),  # the wire takes no class derived from it
            module=self._module,
            connection=new_id(),
            settings=self._settings,
            devices=self._taken[engine] if self.devices else (),
        )
        log = log_of(self._log_dir, engine)
        process = RemoteProcess(self, self._listener, launch, log, on_report, on_exit)
        self._processes[engine] = process
        return process

    def _on_report(self, report: NodeReport) -> None:
        match report:
            case Joined(pid=pid):
                self._pid = pid
                self._changed()
            case Launched(engine=engine, pid=pid):
                if engine in self._processes:
                    self._processes[engine].pid = pid
            case Used(engine=engine):
                if engine in self._processes:
                    self._processes[engine].used = report
            case Exited(engine=engine, reason=reason, log=log):
                if engine in self._processes:
                    self._processes[engine].exited(reason, log)


class RemoteProcess:
    """The process of an engine on another machine; implements `EngineProcess`."""

    def __init__(
        self,
        node: RemoteNode,
        listener: Listener,
        launch: Launch,
        log: Path,
        on_report: Callable[[Report], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self.pid: int | None = None
        self.used: Used | None = None
        """The latest report of its node."""
        self._node, self._listener, self._launch, self._log = node, listener, launch, log
        self._on_report, self._on_exit = on_report, on_exit
        self._channel: AsyncChannel[Report] | None = None
        self._to_send: list[WireMessage] = []
        """Kept until it is connected."""
        self._reason: str | None = None
        self._silent = self._over = False
        self._loop = asyncio.get_running_loop()
        listener.expect(launch.connection, self._connected)
        node.send(launch)

    def send(self, message: WireMessage) -> None:
        """Send a message; one to a dead process is lost, since its exit is reported anyway."""
        if self._channel is None:
            self._to_send.append(message)
        else:
            self._channel.send(message)

    def cpu_s(self) -> float:
        """CPU seconds of its group as the node last reported them."""
        return self.used.cpu_s if self.used is not None else 0.0

    def stopped(self) -> bool:
        """Whether a signal or a debugger had stopped a process of its group by then."""
        return self.used is not None and self.used.stopped

    def kill(self, *, silent: bool = False) -> None:
        """End it, and all that it started. `silent`: report nothing more, not even the reason."""
        self._silent = self._silent or silent
        if not self._node.send(Kill(self._launch.engine)):
            self._loop.call_soon(self.ended, "")

    def exited(self, reason: str, log: bytes) -> None:
        """The node reports its end; its last reports may still be under way."""
        if log:
            with contextlib.suppress(OSError):
                self._log.write_bytes(log)
        self._reason = reason
        if self._channel is None or self._channel.over:
            self.ended(reason)
        else:
            self._loop.call_later(HANG_S, self.ended, reason)

    def ended(self, reason: str) -> None:
        """Report its end, once."""
        if self._over:
            return
        self._over = True
        self._listener.forget(self._launch.connection)
        if self._channel is not None:
            self._channel.deliver_rest()
            self._channel.close()
        self._node.drop(self._launch.engine)
        self._on_exit("" if self._silent else reason)

    def _connected(self, sock: socket.socket) -> None:
        self._channel = AsyncChannel(
            Channel(sock, Report), on_message=self._report, on_close=self._closed
        )
        for message in self._to_send:
            self._channel.send(message)
        self._to_send.clear()

    def _report(self, report: Report) -> None:
        if not self._silent:
            self._on_report(report)

    def _closed(self) -> None:
        if self._reason is not None:
            self.ended(self._reason)
        else:
            self._loop.call_later(HANG_S, self._node.send, Kill(self._launch.engine))
