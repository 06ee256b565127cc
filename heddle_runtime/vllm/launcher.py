"""Starts vLLM engines on this machine; implements `Launcher`."""

import asyncio
import re
import socket
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from heddle_core.ids import EngineId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import EngineListener
from heddle_runtime.process.wire import Ready
from heddle_runtime.vllm.engine import LaunchSpec, VllmEngine
from heddle_runtime.vllm.settings import Platform, VllmSettings, environment, installed_vllm


class VllmLauncher:
    """Starts engines and assigns them CPU cores and GPUs.

    Use it inside a running event loop. Run the checks of `heddle_runtime.vllm.checks` first: they
    report in one line what would otherwise fail in the middle of a start.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        log_dir: Path | None = None,
        cores: Sequence[int] = (),
        devices: Sequence[int] = (),
        engines_per_device: int = 1,
        start_limit_s: float = 600.0,
        module: str = "heddle_runtime.vllm.process",
    ) -> None:
        """vLLM's output goes to `log_dir`/<engine>.log; None: to a temporary folder.

        `cores` are CPU cores, if engines are to be pinned: each to as many of the least used as its
        TP degree. `devices` are GPU numbers, each for `engines_per_device` engines; empty: CUDA's
        choice. `module` runs in an engine's process.
        """
        self._settings = settings
        installed = installed_vllm()
        self._platform: Platform = installed.platform if installed is not None else "cpu"
        self._scratch = tempfile.TemporaryDirectory(prefix="heddle-") if log_dir is None else None
        self._log_dir = log_dir if log_dir is not None else Path(self._scratch_name())
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._cores = list(cores)
        self._devices = list(devices) if self._platform == "cuda" else []
        self._per_device = engines_per_device
        self._start_limit_s, self._module = start_limit_s, module
        self._engines: dict[EngineId, VllmEngine] = {}
        self._pinned: dict[EngineId, tuple[int, ...]] = {}
        """The cores of each engine."""
        self._on: dict[EngineId, tuple[int, ...]] = {}
        """The GPUs of each engine."""
        self._port = settings.kv_port
        self._held: dict[EngineId, socket.socket] = {}
        """Ports reserved for engines."""
        self._queue: list[VllmEngine] = []
        """Engines that wait until others are ready: vLLM measures the free memory of a GPU, and two
        that measure at once count each other's."""
        self._all_gone = asyncio.Event()

    def start(self, spec: EngineSpec, listener: EngineListener) -> VllmEngine:
        """Begin to start an engine. Ends in `engine_ready` or `engine_failed`."""
        engine = VllmEngine(spec, listener, self._settings, changed=self._changed)
        self._engines[spec.engine] = engine
        self._queue.append(engine)
        # Not now: it may fail at once, and failures come from the event loop.
        asyncio.get_running_loop().call_soon(self._launch_next)
        return engine

    def pid(self, engine: EngineId) -> int | None:
        """Return the process id, also of the process group, of a running engine."""
        client = self._engines.get(engine)
        return client.pid if client is not None else None

    def facts(self, engine: EngineId) -> Ready | None:
        """Return what a running engine reported; None before it is ready."""
        client = self._engines.get(engine)
        return client.facts if client is not None else None

    async def close(self) -> None:
        """End every engine; afterwards none of their processes is left."""
        self._queue.clear()
        for engine in self._engines.values():
            engine.kill()
        while self._engines:
            self._all_gone.clear()
            await self._all_gone.wait()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _scratch_name(self) -> str:
        assert self._scratch is not None
        return self._scratch.name

    def _changed(self, engine: VllmEngine) -> None:
        name = engine.spec.engine
        if engine.gone and self._engines.get(name) is engine:
            del self._engines[name]
            self._pinned.pop(name, None)
            self._on.pop(name, None)
            if name in self._held:
                self._held.pop(name).close()
            if not self._engines:
                self._all_gone.set()
        self._launch_next()

    def _launch_next(self) -> None:
        """Start waiting engines: on shared GPUs one at a time, and only on free ones."""
        while self._queue:
            engine = self._queue[0]
            one_at_a_time = self._platform == "cuda" and self._per_device > 1
            if one_at_a_time and any(other.starting for other in self._engines.values()):
                return
            spec = self._launch_spec(engine.spec)
            if spec is None:
                return
            self._queue.pop(0)
            engine.launch(spec)

    def _launch_spec(self, spec: EngineSpec) -> LaunchSpec | None:
        """Choose cores and GPUs; None while too few GPUs are free."""
        devices: tuple[int, ...] = ()
        if self._devices:
            free = [d for d in self._devices if _uses(self._on, d) < self._per_device]
            if len(free) < spec.shape.tp:
                return None
            devices = _least_used(self._on, free, spec.shape.tp)
            self._on[spec.engine] = devices
        cores = _least_used(self._pinned, self._cores, spec.shape.tp)
        self._pinned[spec.engine] = cores
        name = re.sub(r"[^\w.+-]", "_", spec.engine)
        return LaunchSpec(
            module=self._module,
            environment=environment(
                self._settings,
                self._platform,
                kv_port=self._next_port(spec.engine),
                devices=devices,
            ),
            cores=cores,
            log=self._log_dir / f"{name}.log",
            start_limit_s=self._start_limit_s,
        )

    def _next_port(self, engine: EngineId) -> int:
        if self._settings.kv_transfer == "none":
            return 0
        if self._port is not None:
            self._port += 1
            return self._port - 1
        # Reserved, not only found: the engine uses it seconds later, and meanwhile the system may
        # give it to another socket. ZeroMQ sets SO_REUSEADDR, and so can bind it all the same.
        held = self._held[engine] = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def _uses(by_engine: Mapping[EngineId, Sequence[int]], one: int) -> int:
    """How many engines use a core or a GPU."""
    return sum(one in used for used in by_engine.values())


def _least_used(
    by_engine: Mapping[EngineId, Sequence[int]], choices: Sequence[int], count: int
) -> tuple[int, ...]:
    """The `count` cores or GPUs that the fewest engines use, in the order of their numbers."""
    return tuple(sorted(sorted(choices, key=partial(_uses, by_engine))[:count]))
