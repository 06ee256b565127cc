"""The command line and environment of `vllm serve`, for engines that are used by their URL."""

import json
import os

from heddle_runtime.vllm.settings import (
    CPU_BLOCK_TOKENS,
    CPU_KV_BYTES,
    OFFLINE,
    Platform,
    VllmSettings,
)


def serve_arguments(
    settings: VllmSettings, platform: Platform, *, tp: int, max_running: int
) -> list[str]:
    """Arguments of vLLM's command, beside the address."""
    on_cpu = platform == "cpu"
    valued: dict[str, object] = {
        "--served-model-name": os.path.basename(os.path.normpath(settings.model_dir)),
        "--dtype": settings.dtype,
        "--load-format": settings.load_format,
        "--tensor-parallel-size": tp,
        "--max-num-seqs": max_running,
        "--max-num-batched-tokens": settings.max_batched_tokens,
        "--gpu-memory-utilization": settings.gpu_memory_share,
        "--seed": settings.seed,
        "--generation-config": "vllm",
    }
    if settings.max_context is not None:
        valued["--max-model-len"] = settings.max_context
    if on_cpu or settings.kv_bytes is not None:
        valued["--kv-cache-memory-bytes"] = settings.kv_bytes or CPU_KV_BYTES
    if on_cpu:
        valued["--block-size"] = CPU_BLOCK_TOKENS
    if settings.host_kv_gib is not None:
        valued["--kv-offloading-size"] = settings.host_kv_gib * tp
    if settings.kv_transfer == "nixl":
        valued["--kv-transfer-config"] = json.dumps(
            {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": platform,
                "kv_load_failure_policy": "fail",
            }
        )
    flags = ["--enable-prompt-tokens-details"]
    # The release for GPUs always serves requests of tokens, and has no flag for it.
    flags += ["--enforce-eager", "--enable-scale-out"] if on_cpu else []
    pairs = (word for name, value in valued.items() for word in (name, str(value)))
    return ["serve", settings.model_dir, *pairs, *flags]


def serve_environment(platform: Platform, *, host: str, kv_port: int, key: str) -> dict[str, str]:
    """Environment variables of `vllm serve`, this process's own included.

    Clients need `key`. Other engines reach its KV at `host` and `kv_port`.
    """
    ours = {
        **OFFLINE,
        "VLLM_API_KEY": key,
        "VLLM_HOST_IP": host,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(kv_port),
    }
    if platform == "cpu":
        ours |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**os.environ, **ours}
