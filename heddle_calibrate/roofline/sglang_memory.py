"""Limits that SGLang takes by itself, and the KV that they leave.

By the rule of sgl-project/sglang pull request 10975 (`server_args.py`: 512 MiB, 1.5 for each token
of a chunk, 2 for each sequence of the largest graph, 128 for each rank, at least 10 GiB). Not
compared with sizes that an engine printed.
"""

from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES, GpuClass
from heddle_calibrate.roofline.memory import (
    MEMORY_SHARE,
    activation_bytes_per_gpu,
    reserved_bytes,
)
from heddle_calibrate.roofline.pairs import shape_of
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import Profile

MIB, GIB = 2**20, 2**30
LARGE = 160 * GIB
"""Memory of GPUs with chunks of twice the tokens."""


def chunk_tokens(gpu: str) -> int:
    """Tokens of an iteration of prompts (``--chunked-prefill-size``)."""
    known = GPU_CLASSES.get(gpu)
    return 16384 if known is not None and known.memory >= LARGE else 8192


def memory_share(gpu: GpuClass, tp: int) -> float:
    """Part of a GPU's memory for weights and KV (``--mem-fraction-static``)."""
    graphs = 256 if tp < 4 and gpu.memory < LARGE else 512
    reserved = 512 + 1.5 * chunk_tokens(gpu.name) + 2 * graphs + 128 * tp
    return 1 - max(reserved, 10 * 1024) * MIB / gpu.memory


def kv_gain_tokens(profile: Profile, layout: EngineShape, share: float | None = None) -> float:
    """Tokens of KV that a rank has beside those of a vLLM with its default memory share."""
    gpu, shape = GPU_CLASSES.get(profile.gpu), shape_of(profile)
    if gpu is None:
        return 0.0
    own = memory_share(gpu, layout.tp) if share is None else share
    gain = own * (gpu.memory - GIB) - MEMORY_SHARE * gpu.memory + reserved_bytes(layout)
    gain += activation_bytes_per_gpu(shape, layout) if shape is not None else 0.0
    return gain * min(layout.tp, profile.kv_heads or layout.tp) / profile.kv_bytes_per_token
