"""NIXL as vLLM's connector of KV, in an engine's process."""

from typing import Any

from heddle_runtime.vllm.settings import VllmSettings

NIXL_PAUSE_US = 500
"""The largest delay of a pull; without a pause, decoding ran at half its speed."""


def nixl_connector(settings: VllmSettings, *, on_cpu: bool) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_both",
        kv_buffer_device="cpu" if on_cpu else "cuda",
        # With the other policy, recompute, vLLM hung when the source was dead.
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"kv_lease_duration": settings.kv_lease_s},
    )


def pause_nixl() -> None:
    """Let NIXL's progress thread pause between two polls: it would occupy a CPU core.

    NIXL's Python API has no option for it. With spare cores it does not matter.
    """
    from nixl import _api

    make = _api.nixlBind.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = NIXL_PAUSE_US
        return make(name, config)

    _api.nixlBind.nixlAgent = agent
