"""`heddle calibrate measure`: real or fake engines, swept; what they were and where they ran."""

import asyncio
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from heddle.config import MAX_RUNNING, RunConfig
from heddle.engines import open_vllm, vllm_settings
from heddle.hardware import gpus, hardware
from heddle.run_files import git_commit
from heddle.simulation import profile_of, world_of
from heddle_rollout.engines import EngineClient
from heddle_rollout.scripted_agent import TokenSource
from heddle_runtime.clock import RunClock
from heddle_runtime.measure import Found, Order, measure
from heddle_runtime.measure_plan import SizeName
from heddle_runtime.measure_session import Report
from heddle_runtime.virtual_time import run_virtual
from heddle_runtime.vllm_checks import EnginesChecked, check_engines, check_release, read_model
from heddle_runtime.vllm_engine import VllmEngine
from heddle_sim.engine_client import SimLauncher
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
        settings = vllm_settings(config)
        installed, _ = check_release(settings)
        facts = read_model(settings.model_dir, weights=settings.load_format != "dummy")
        most = config.runtime.max_context or facts.max_context
        model = model or Path(settings.model_dir).resolve().name.lower()
        on_gpu = installed.platform != "cpu"
        gpu = gpu or (_gpu_class() if on_gpu else "cpu")
        limits = GPU_LIMITS if on_gpu else CPU_LIMITS
    running = limits[0] if max_running is None else max_running
    context = min(limits[1], most) if max_context is None else max_context
    for option, value, high in (
        ("--max-running", running, MAX_RUNNING),
        ("--max-context", context, most),
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
    found = gpus()
    words = found[0].partition(",")[0].lower().replace("nvidia", "").split() if found else []
    return words[0].partition("-")[0] if words else "gpu"


@dataclass(slots=True)
class _Seen:
    """What engines tell of themselves once they are ready."""

    block_tokens: int = 0
    kv_bytes_per_token: int = 0
    release: str = ""


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
    facts = _fake_facts(config, order) if fake else _vllm_facts(config, order)
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
        "precision": profile.source.precision,
        "model_config": {"profile": f"{profile.model} {profile.gpu}"},
        "settings": {},
    }


def _sweep_fake(config: RunConfig, order: Order, found: Found, seen: _Seen, report: Report) -> None:
    """In virtual time: a sweep of hours takes seconds."""
    profile = profile_of(config.cluster)
    world = world_of(config.cluster, profile)
    seen.block_tokens, seen.kv_bytes_per_token = world.block_size, profile.kv_bytes_per_token

    async def swept() -> None:
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        # As many seconds for every degree as for the first: they all start alike in a sweep.
        launcher = SimLauncher(
            replace(world, engine_start_s=world.start_s(order.tps[0]), engine_start_s_at={}), clock
        )
        await measure(launcher, order, tokens=None, report=report, found=found)

    run_virtual(swept())


# -- vLLM -----------------------------------------------------------------------------------------


def _checked(config: RunConfig, order: Order) -> EnginesChecked:
    """Check the engines of a sweep, of which two at most are alive."""
    return check_engines(
        vllm_settings(config),
        tp_degrees=(max(order.tps), order.tps[0]),
        largest_tokens=order.max_context,
    )


def _vllm_facts(config: RunConfig, order: Order) -> dict[str, Any]:
    settings, model = vllm_settings(config), _checked(config, order).model
    plain = msgspec.to_builtins(settings)
    plain["model_dir"] = Path(settings.model_dir).name
    kept = model.dtype in ("float32", "float16", "bfloat16") and model.itemsize(
        settings.dtype
    ) == model.itemsize(model.dtype)
    own = model.dtype if kept else "bfloat16"  # what "auto" makes of float32
    return {
        "max_batched_tokens": settings.max_batched_tokens,
        "precision": own if settings.dtype == "auto" else settings.dtype,
        "model_config": asdict(model),
        "settings": plain,
    }


def _sweep_vllm(config: RunConfig, order: Order, found: Found, seen: _Seen, report: Report) -> None:
    vocabulary = _checked(config, order).model.vocabulary

    def ready(engine: EngineClient) -> None:
        assert isinstance(engine, VllmEngine)
        assert engine.facts is not None
        seen.block_tokens = engine.facts.block_tokens
        seen.kv_bytes_per_token = engine.facts.kv_bytes_per_token
        seen.release = engine.facts.release
        found.notes.update(dict.fromkeys(engine.facts.notes))

    async def swept(logs: Path) -> None:
        # Two engines at most are alive, each with the cores that it would have in such a run.
        widest = max(order.tps)
        alive = replace(config.cluster, tp=widest, gpus=2 * widest)
        # vLLM wants room for the longest context it may be asked for: no more than is measured.
        runtime = replace(config.runtime, max_context=order.max_context)
        launcher = open_vllm(replace(config, cluster=alive, runtime=runtime), logs)
        tokens = TokenSource(vocabulary, seed=order.seed)
        await measure(launcher, order, tokens=tokens, report=report, found=found, ready=ready)

    with tempfile.TemporaryDirectory(prefix="heddle-") as logs:
        asyncio.run(swept(Path(logs)))


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
