"""A `vllm launch render` process for engines that make only token ids, such as Heddle's own."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from heddle_runtime.process.child import HANG_S, group_members
from heddle_runtime.vllm.command import PARENT
from heddle_runtime.vllm.settings import OFFLINE
from heddle_runtime.vllm_http.connections import Connections
from heddle_runtime.vllm_http.endpoint import Endpoint, UnreachableError
from heddle_runtime.vllm_http.rendering import HttpRenderer

START_LIMIT_S = 180.0
STOP_LIMIT_S = 5.0
"""How long it may take to end by itself; then it is killed."""
POLL_S = 0.1
TAIL_BYTES = 4096


class RenderProcessError(Exception):
    """The process cannot be used; the message says why and where its output is."""


class RenderProcess:
    """Renders for one model on this machine; ends with us. It has no engine and no GPU."""

    def __init__(
        self,
        model_dir: str,
        *,
        log: Path,
        max_context: int | None = None,
        model_name: str = "",
        options: Sequence[str] = (),
    ) -> None:
        """`options` are further ones of `vllm serve`, such as `--chat-template`. The longest prompt
        and output together are `max_context`; None: the model's limit.
        """
        self._log = log
        self._options = [
            *("--host", "127.0.0.1"),
            *(("--max-model-len", str(max_context)) if max_context is not None else ()),
            *(("--served-model-name", model_name) if model_name else ()),
            *options,
        ]
        self._model_dir = model_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._connections = Connections()

    @property
    def pid(self) -> int | None:
        """Its process id, also that of its process group."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> HttpRenderer:
        """Start it, and wait until it renders.

        Raises:
            RenderProcessError: it ended, or was not ready in time; nothing of it is left.
        """
        try:
            return await self._start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End it; afterwards none of its processes is left."""
        await self._connections.close()
        process = self._process
        if process is None:
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + STOP_LIMIT_S
        if process.poll() is None:
            process.terminate()
        while process.poll() is None and loop.time() < until_s:
            await asyncio.sleep(POLL_S)
        until_s = loop.time() + HANG_S
        while (members := group_members(process.pid)) and loop.time() < until_s:
            for member in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            await asyncio.sleep(POLL_S)
        process.wait()

    async def _start(self) -> HttpRenderer:
        port = _free_port()
        command = [sys.executable, "-m", "heddle_runtime.vllm.command", PARENT, str(os.getpid())]
        command += ["launch", "render", self._model_dir, "--port", str(port), *self._options]
        try:
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **OFFLINE, "TOKENIZERS_PARALLELISM": "false"},
                    start_new_session=True,
                )
        except OSError as error:
            raise RenderProcessError(f"vllm launch render cannot be started: {error}") from None
        endpoint = Endpoint(f"http://127.0.0.1:{port}", self._connections)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + START_LIMIT_S
        while loop.time() < until_s:
            if self._process.poll() is not None:
                raise RenderProcessError(
                    f"vllm launch render ended with status {self._process.returncode}: "
                    f"{self._last_line()} (see {self._log})"
                )
            with contextlib.suppress(UnreachableError):
                if (await endpoint.call("/health", limit_s=5.0)).status == 200:
                    return HttpRenderer(endpoint)
            await asyncio.sleep(POLL_S)
        raise RenderProcessError(
            f"vllm launch render was not ready after {START_LIMIT_S:g} s; see {self._log}"
        )

    def _last_line(self) -> str:
        """The last error in its output, which begins at the left; what follows is clean-up."""
        text = self._log.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
        return (errors or lines or ["no output"])[-1]


def _free_port() -> int:
    """A port that is free now; if another takes it meanwhile, the process says so and ends."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
