"""`heddle profile measure`: sweeps of real or fake engines, and the conditions of each."""

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
from msgspec.structs import replace as replace_struct

from heddle.cluster.config import MAX_RUNNING
from heddle.cluster.profiles import load_profiles
from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.engines import open_vllm, vllm_settings
from heddle.hardware import gpus, hardware
from heddle.runs.files import git_commit
from heddle.setup import simulation_config
from heddle_calibrate.measure.cells import SizeName
from heddle_calibrate.measure.session import Measurements, OnProgress, SweepSpec
from heddle_calibrate.measure.sweep import measure
from heddle_calibrate.sweeps import TRIALS, Sweep
from heddle_compiled import installed_version
from heddle_rollout.engines import EngineClient
from heddle_rollout.scripted_agent import TokenSource
from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import run_virtual
from heddle_runtime.vllm.checks import EnginesChecked, check_engines, check_release, read_model
from heddle_runtime.vllm.engine import VllmEngine
from heddle_runtime.vllm.settings import VllmSettings, installed_vllm
from heddle_sim.engine_client import SimLauncher

GPU_LIMITS, CPU_LIMITS = (128, 16384), (32, 2048)
"""Default for the largest batch and the longest context: a sweep then takes minutes."""


def choose_sweep(
    config: RunConfig,
    tps: tuple[int, ...],
    *,
    size: SizeName,
    model: str | None,
    gpu: str | None,
    max_running: int | None,
    max_context: int | None,
    served: bool = False,
) -> tuple[SweepSpec, str]:
    """The sweep, and the name of the model; None: derived from the machine and the model.

    Raises:
        ValueError: vLLM, the model or the profile is not there, or a number is out of range.
    """
    most = sys.maxsize
    if config.runtime.engine == "fake":
        if served:
            raise ConfigError(
                "profile.share is of engines of yours: it needs --engine vllm, or leave it out"
            )
        profile = load_profiles(config.cluster).only
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
        ("profile.max_context", context, most),
    ):
        if not 1 <= value <= high:
            raise ConfigError(f"{option} {value}: must be from 1 to {high}")
    spec = SweepSpec(
        tps=tps,
        gpu=gpu,
        max_running=running,
        max_context=context,
        size=size,
        seed=config.seed,
        served=served,
    )
    return spec, model


def _gpu_class() -> str:
    """The name that profiles of this machine's GPU have: "NVIDIA H200" is an h200."""
    found = gpus()
    words = found[0].partition(",")[0].lower().replace("nvidia", "").split() if found else []
    return words[0].partition("-")[0] if words else "gpu"


@dataclass(slots=True)
class _EngineFacts:
    """Facts reported by ready engines."""

    block_tokens: int = 0
    kv_bytes_per_token: int = 0
    release: str = ""


def sweep_engines(
    config: RunConfig,
    spec: SweepSpec,
    *,
    model: str,
    on_progress: OnProgress,
    save: Callable[[Sweep], None],
) -> Sweep:
    """Sweep engines as `config.runtime` describes them, and save the sweep.

    After a failure the measured part of the sweep is saved, with a note that gives the reason.

    Raises:
        ValueError: one of the packages' errors for bad input, before anything is started.
        MeasureError: an engine failed or does not answer.
    """
    measured, reported = Measurements(), _EngineFacts()
    made = datetime.now(UTC)
    fake = config.runtime.engine == "fake"
    facts = _fake_facts(config, spec) if fake else _vllm_facts(config, spec)
    run = _sweep_fake if fake else _sweep_vllm

    def sweep() -> Sweep:
        trials: dict[str, Any] = {name: tuple(getattr(measured, name)) for name in TRIALS}
        return Sweep(
            schema="heddle.sweep/1",
            made=f"{made:%Y-%m-%dT%H:%M:%SZ}",
            command=shlex.join(["heddle", *sys.argv[1:]]),
            size=spec.size,
            seed=spec.seed,
            engine=config.runtime.engine,
            model=model,
            gpu=spec.gpu,
            hardware=hardware(),
            versions=_versions(config.runtime.engine, reported.release),
            max_running=spec.max_running,
            block_tokens=reported.block_tokens,
            kv_bytes_per_token=reported.kv_bytes_per_token,
            kv_capacity_tokens={str(tp): n for tp, n in measured.kv_capacity_tokens.items()},
            spoiled=measured.spoiled,
            notes=tuple(measured.notes),
            **trials,
            **facts,
        )

    try:
        run(config, spec, measured, reported, on_progress)
    except BaseException as error:
        if measured.decode:
            measured.notes[f"broke off: {type(error).__name__}: {error}"] = None
            save(sweep())
        raise
    whole = sweep()
    save(whole)
    return whole


# -- engines that keep time only ------------------------------------------------------------------


def _fake_facts(config: RunConfig, spec: SweepSpec) -> dict[str, Any]:
    profiles = load_profiles(config.cluster)
    profile = profiles.only
    for tp in spec.tps:
        profile.at(tp)
    return {
        "max_batched_tokens": simulation_config(config.cluster, profiles).max_batched_tokens,
        "precision": profile.source.precision,
        "model_config": {"profile": f"{profile.model} {profile.gpu}"},
        "settings": {},
    }


def _sweep_fake(
    config: RunConfig,
    spec: SweepSpec,
    measured: Measurements,
    reported: _EngineFacts,
    on_progress: OnProgress,
) -> None:
    """In virtual time: a sweep of hours takes seconds."""
    profiles = load_profiles(config.cluster)
    profile, simulation = profiles.only, simulation_config(config.cluster, profiles)
    reported.block_tokens, reported.kv_bytes_per_token = (
        simulation.block_size,
        profile.kv_bytes_per_token,
    )

    async def swept() -> None:
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        # The same time for every degree as for the first: all start the same way in a sweep.
        launcher = SimLauncher(
            replace(
                simulation,
                engine_start_s=simulation.start_s(profile.shape(spec.tps[0])),
                engine_start_s_at={},
            ),
            clock,
        )
        await measure(launcher, spec, tokens=None, on_progress=on_progress, measured=measured)

    run_virtual(swept())


# -- vLLM -----------------------------------------------------------------------------------------


def settings_of(config: RunConfig) -> VllmSettings:
    """Of engines that can sleep, on GPUs; not with NIXL, whose registered memory sleep releases."""
    settings, installed = vllm_settings(config), installed_vllm()
    on_gpu = installed is not None and installed.platform != "cpu"
    return replace_struct(settings, sleep_mode=on_gpu and settings.kv_transfer == "none")


def _checked(config: RunConfig, spec: SweepSpec) -> EnginesChecked:
    """Check the engines of a sweep: at most two at once."""
    return check_engines(
        vllm_settings(config),
        tp_degrees=(max(spec.tps), spec.tps[0]),
        largest_tokens=spec.max_context,
    )


def _vllm_facts(config: RunConfig, spec: SweepSpec) -> dict[str, Any]:
    settings, model = settings_of(config), _checked(config, spec).model
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


def _sweep_vllm(
    config: RunConfig,
    spec: SweepSpec,
    measured: Measurements,
    reported: _EngineFacts,
    on_progress: OnProgress,
) -> None:
    vocabulary = _checked(config, spec).model.vocabulary

    def ready(engine: EngineClient) -> None:
        assert isinstance(engine, VllmEngine)
        assert engine.facts is not None
        reported.block_tokens = engine.facts.block_tokens
        reported.kv_bytes_per_token = engine.facts.kv_bytes_per_token
        reported.release = engine.facts.release
        measured.notes.update(dict.fromkeys(engine.facts.notes))

    async def swept(logs: Path) -> None:
        # At most two engines run at once, each with the same cores as in a run of two engines.
        widest = max(spec.tps)
        alive = replace(config.cluster, tp=widest, gpus=2 * widest)
        # vLLM reserves KV for the longest permitted context, so permit only what is measured.
        runtime = replace(config.runtime, max_context=spec.max_context)
        wanted = replace(config, cluster=alive, runtime=runtime)
        launcher = open_vllm(wanted, logs, settings_of(wanted))
        tokens = TokenSource(vocabulary, seed=spec.seed)
        await measure(
            launcher, spec, tokens=tokens, on_progress=on_progress, measured=measured, ready=ready
        )

    with tempfile.TemporaryDirectory(prefix="heddle-") as logs:
        asyncio.run(swept(Path(logs)))


def _versions(engine: str, release: str) -> dict[str, str]:
    found = {"python": platform.python_version(), "heddle": installed_version()}
    try:
        found["torch"] = version("torch")
    except PackageNotFoundError:
        found["torch"] = "not installed"
    found["git_commit"] = git_commit() or "unknown"
    found[engine] = release or found["heddle"]
    return found
