"""A prototype: starts a `vllm serve` for each engine and uses it by its URL; a `Launcher`."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import EngineListener, KvHandle, KvPlaced, StepResult
from heddle_runtime.vllm.command import PARENT
from heddle_runtime.vllm.serve import serve_arguments, serve_environment
from heddle_runtime.vllm.settings import VllmSettings
from heddle_runtime.vllm_http.engine import HttpEngine
from heddle_runtime.vllm_http.launcher import HttpLauncher
from heddle_runtime.vllm_http.settings import HttpSettings

KEY = "of-this-run"
LOOK_S = 0.1
STOP_S = 20.0


class ServeLauncher:
    """Engines on CPU, each a `vllm serve` on this machine that ends with its use."""

    def __init__(self, settings: VllmSettings, *, log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._settings, self._log_dir = settings, log_dir
        self._http = HttpLauncher(HttpSettings(sampling={"temperature": 0.0}, start_limit_s=600.0))
        self._servers: dict[EngineId, subprocess.Popen[bytes]] = {}
        self._registering: set[asyncio.Task[None]] = set()

    def start(self, spec: EngineSpec, listener: EngineListener) -> HttpEngine:
        """Start a server and the engine that waits for its URL."""
        port, kv_port = _free_port(), _free_port()
        command = [sys.executable, "-m", "heddle_runtime.vllm.command", PARENT, str(os.getpid())]
        command += serve_arguments(
            self._settings, "cpu", tp=spec.shape.tp, max_running=spec.max_running
        )
        command += ["--host", "127.0.0.1", "--port", str(port)]
        environment = serve_environment("cpu", host="127.0.0.1", kv_port=kv_port, key=KEY)
        with (self._log_dir / f"{spec.engine.name}.log").open("ab") as log:
            self._servers[spec.engine] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        engine = self._http.start(spec, _StopsServer(listener, self._stop))
        url = f"http://127.0.0.1:{port}"
        task = asyncio.get_running_loop().create_task(self._register(spec, engine, url))
        self._registering.add(task)
        task.add_done_callback(self._registering.discard)
        return engine

    def pid(self, engine: EngineId) -> int:
        """Process id, also of the process group, of an engine's server."""
        return self._servers[engine].pid

    def facts(self, engine: EngineId) -> None:
        """Nothing but what the engine itself says."""

    def fail(self, engine: EngineId) -> None:
        """Kill an engine's processes, as a fault would."""
        if engine in self._servers:
            self._signal(engine, signal.SIGKILL)

    async def close(self) -> None:
        """End every engine and server."""
        for task in list(self._registering):
            task.cancel()
        await self._http.close()
        for engine in list(self._servers):
            self._stop(engine)
        for server in self._servers.values():
            await asyncio.to_thread(server.wait)

    async def _register(self, spec: EngineSpec, engine: HttpEngine, url: str) -> None:
        server = self._servers[spec.engine]
        while not await asyncio.to_thread(_answers, url):
            if server.poll() is not None:
                engine.fail(f"vllm serve ended with status {server.returncode}")
                return
            await asyncio.sleep(LOOK_S)
        await self._http.add(url, api_key=KEY, tp=spec.shape.tp)
        self._http.reserve(url, spec.engine.name)

    def _stop(self, engine: EngineId) -> None:
        server = self._servers[engine]
        if server.poll() is None:
            self._signal(engine, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(STOP_S)
        self._signal(engine, signal.SIGKILL)

    def _signal(self, engine: EngineId, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._servers[engine].pid, number)


class _StopsServer:
    """Passes an engine's reports on, and stops its server when its use has ended."""

    def __init__(self, listener: EngineListener, stop: Callable[[EngineId], None]) -> None:
        self._listener, self._stop = listener, stop

    def engine_ready(self, engine: EngineId, kv_capacity_tokens: int) -> None:
        self._listener.engine_ready(engine, kv_capacity_tokens)

    def step_ended(self, engine: EngineId, result: StepResult) -> None:
        self._listener.step_ended(engine, result)

    def kv_exported(
        self, engine: EngineId, trajectory: TrajectoryId, kv: KvHandle | None, move: int
    ) -> None:
        self._listener.kv_exported(engine, trajectory, kv, move)

    def kv_placed(
        self, engine: EngineId, trajectory: TrajectoryId, placed: KvPlaced, move: int
    ) -> None:
        self._listener.kv_placed(engine, trajectory, placed, move)

    def weights_updated(self, engine: EngineId, version: int) -> None:
        self._listener.weights_updated(engine, version)

    def engine_stopped(self, engine: EngineId) -> None:
        self._stop(engine)
        self._listener.engine_stopped(engine)

    def engine_failed(
        self, engine: EngineId, reason: str, salvaged: Sequence[tuple[TrajectoryId, StepResult]]
    ) -> None:
        self._stop(engine)
        self._listener.engine_failed(engine, reason, salvaged)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1.0):
            return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
