"""What engines' processes run on: who uses which core and GPU of this machine."""

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from heddle_core.ids import EngineId
from heddle_core.plans import EngineSpec
from heddle_runtime.vllm.engine import LaunchSpec
from heddle_runtime.vllm.settings import Platform, VllmSettings, environment

CoreOrGpu = TypeVar("CoreOrGpu", int, str)


class ThisMachine:
    """Engines of this machine, each with CPU cores, GPUs and a port."""

    def __init__(
        self,
        settings: VllmSettings,
        platform: Platform,
        *,
        log_dir: Path,
        cores: Sequence[int],
        devices: Sequence[str],
        engines_per_device: int,
        start_limit_s: float,
        module: str,
    ) -> None:
        self._settings, self._platform = settings, platform
        self._log_dir = log_dir
        self._cores = list(cores)
        self._devices = list(devices) if platform == "cuda" else []
        self._per_device = engines_per_device
        self._start_limit_s, self._module = start_limit_s, module
        self._pinned: dict[EngineId, tuple[int, ...]] = {}
        """The cores of each engine."""
        self._on: dict[EngineId, tuple[str, ...]] = {}
        """The GPUs of each engine."""
        self._temporary: dict[EngineId, str] = {}
        """The folder of each engine for temporary files: killed processes cannot remove theirs."""
        self._port = settings.kv_port
        self._held: dict[EngineId, socket.socket] = {}
        """Ports reserved for engines."""

    def free(self, engine: EngineId) -> None:
        """Give back cores, GPUs and port, and remove temporary files."""
        self._pinned.pop(engine, None)
        self._on.pop(engine, None)
        if engine in self._temporary:
            shutil.rmtree(self._temporary.pop(engine), ignore_errors=True)
        if engine in self._held:
            self._held.pop(engine).close()

    def place(self, spec: EngineSpec) -> LaunchSpec | None:
        """Choose cores and GPUs; None while too few GPUs are free."""
        devices: tuple[str, ...] = ()
        if self._devices:
            free = [d for d in self._devices if _uses(self._on, d) < self._per_device]
            if len(free) < spec.shape.gpus:
                return None
            devices = _least_used(self._on, free, spec.shape.gpus)
            self._on[spec.engine] = devices
        cores = _least_used(self._pinned, self._cores, spec.shape.tp)
        self._pinned[spec.engine] = cores
        variables = environment(
            self._settings,
            self._platform,
            kv_port=self._next_port(spec.engine),
            devices=devices,
            temporary=self._temporary_folder(spec.engine),
        )
        return LaunchSpec(
            module=self._module,
            environment=variables,
            cores=cores,
            log=log_of(self._log_dir, spec.engine),
            start_limit_s=self._start_limit_s,
        )

    def _temporary_folder(self, engine: EngineId) -> str:
        try:
            made = self._temporary[engine] = tempfile.mkdtemp(prefix="heddle-engine-")
        except OSError:
            return os.environ.get("TMPDIR", "/tmp")  # a full disk ends the start of the engine
        return made

    def _next_port(self, engine: EngineId) -> int:
        if self._settings.kv_transfer == "none":
            return 0
        if self._port is not None:
            self._port += 1
            return self._port - 1
        held = self._held[engine] = reserved_port("127.0.0.1")
        port: int = held.getsockname()[1]
        return port


def log_of(folder: Path, engine: EngineId) -> Path:
    """The file for the output of an engine's process."""
    name = re.sub(r"[^\w.+-]", "_", engine)
    return folder / f"{name}.log"


def reserved_port(host: str) -> socket.socket:
    """A free port of an address of this machine, bound until the socket is closed.

    Reserved, not only found: an engine uses it seconds later, and meanwhile the system may give it
    to another socket. ZeroMQ sets SO_REUSEADDR, and so can bind it all the same.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def _uses(by_engine: Mapping[EngineId, Sequence[CoreOrGpu]], one: CoreOrGpu) -> int:
    """How many engines use a core or a GPU."""
    return sum(one in used for used in by_engine.values())


def _least_used(
    by_engine: Mapping[EngineId, Sequence[CoreOrGpu]], choices: Sequence[CoreOrGpu], count: int
) -> tuple[CoreOrGpu, ...]:
    """The `count` cores or GPUs that the fewest engines use, in the order of `choices`."""
    chosen = sorted(choices, key=partial(_uses, by_engine))[:count]
    return tuple(one for one in choices if one in chosen)
