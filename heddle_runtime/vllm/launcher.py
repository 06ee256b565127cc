"""Starts vLLM engines on this machine; implements `Launcher`."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from heddle_core.ids import EngineId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import EngineListener
from heddle_runtime.process.wire import Ready
from heddle_runtime.vllm.engine import VllmEngine
from heddle_runtime.vllm.machine import ThisMachine
from heddle_runtime.vllm.settings import VllmSettings, installed_vllm


class VllmLauncher:
    """Starts engines on this machine and assigns them CPU cores and GPUs.

    Use it inside a running event loop. Run the checks of `heddle_runtime.vllm.checks` first: they
    report in one line what would otherwise fail in the middle of a start.
    """

    def __init__(
        self,
        settings: VllmSettings,
        *,
        log_dir: Path | None = None,
        cores: Sequence[int] = (),
        devices: Sequence[str] = (),
        engines_per_device: int = 1,
        start_limit_s: float = 600.0,
        module: str = "heddle_runtime.vllm.process",
    ) -> None:
        """vLLM's output goes to `log_dir`/<engine>.log; None: to a temporary folder.

        `cores` are CPU cores, if engines are to be pinned: each to as many of the least used as its
        TP degree. `devices` are GPUs as `CUDA_VISIBLE_DEVICES` names them, each for
        `engines_per_device` engines; empty: CUDA's choice. `module` runs in an engine's process.
        """
        installed = installed_vllm()
        platform = installed.platform if installed is not None else "cpu"
        self._scratch = tempfile.TemporaryDirectory(prefix="heddle-") if log_dir is None else None
        if log_dir is None:
            assert self._scratch is not None
            log_dir = Path(self._scratch.name)
        log_dir.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        self._machine = ThisMachine(
            settings,
            platform,
            log_dir=log_dir,
            cores=cores,
            devices=devices,
            engines_per_device=engines_per_device,
            start_limit_s=start_limit_s,
            module=module,
        )
        # vLLM measures the free memory of a GPU, and two that measure at once count each other's.
        self._one_at_a_time = platform == "cuda" and engines_per_device > 1
        self._engines: dict[EngineId, VllmEngine] = {}
        self._drafted: list[tuple[int, ...]] = []
        """Of engines that are gone."""
        self._queue: list[VllmEngine] = []
        """Engines that wait until others are ready or gone."""
        self._all_gone = asyncio.Event()

    def start(self, spec: EngineSpec, listener: EngineListener) -> VllmEngine:
        engine = VllmEngine(spec, listener, self._settings, changed=self._changed)
        self._engines[spec.engine] = engine
        self._queue.append(engine)
        # Not now: it may fail at once, and failures come from the event loop.
        asyncio.get_running_loop().call_soon(self._launch_next)
        return engine

    def fail(self, engine: EngineId) -> None:
        """Kill the processes of an engine, as a fault would; nothing if it has none."""
        client = self._engines.get(engine)
        if client is not None:
            client.fail()

    def facts(self, engine: EngineId) -> Ready | None:
        """Return what a running engine reported; None before it is ready."""
        client = self._engines.get(engine)
        return client.facts if client is not None else None

    def drafted(self) -> tuple[int, ...]:
        """Return the sum of what all engines drafted, as in `wire.Sampled`."""
        every = [*self._drafted, *(engine.drafted for engine in self._engines.values())]
        return tuple(map(sum, zip(*filter(None, every), strict=True)))

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

    def _changed(self, engine: VllmEngine) -> None:
        name = engine.spec.engine
        if engine.gone and self._engines.get(name) is engine:
            self._drafted.append(engine.drafted)
            del self._engines[name]
            self._machine.free(name)
            if not self._engines:
                self._all_gone.set()
        self._launch_next()

    def _launch_next(self) -> None:
        """Start waiting engines for which enough is free."""
        for engine in list(self._queue):
            if self._one_at_a_time and any(other.starting for other in self._engines.values()):
                return
            if engine.gone or engine.ending:
                self._queue.remove(engine)
                continue
            launch = self._machine.place(engine.spec)
            if launch is None:
                self._not_placed(engine)
            else:
                self._queue.remove(engine)
                engine.launch(launch)

    def _not_placed(self, engine: VllmEngine) -> None:
        """End an engine that fits nowhere, unless one that is ending may give enough back."""
        if not any(other.ending for other in self._engines.values()):
            self._queue.remove(engine)
            engine.refuse(
                f"TP {engine.spec.shape.tp} needs {engine.spec.shape.gpus} GPU(s), "
                "and fewer are free"
            )
