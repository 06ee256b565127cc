"""Memory of an engine: weights on each GPU, and what they leave for KV."""

from math import ceil

from heddle_calibrate.roofline.gpu_classes import GpuClass
from heddle_calibrate.roofline.operators import ACTIVATION_BYTES
from heddle_core.ids import EngineShape
from heddle_sim.model_shape import WEIGHT_BYTES, ModelShape, count_parameters
from heddle_sim.profile_parts import release

MEMORY_SHARE = 0.9
"""Of a GPU's memory that an engine uses (vLLM: ``--gpu-memory-utilization``)."""
RESERVES = {(0,): (1.0, 1.6), (0, 11, 1): (4.7, 1.2), (0, 17): (2.0, 1.6)}
"""GiB since a release of vLLM: of CUDA context, kernels and graphs; of buffers of several GPUs.
Fitted to published sizes of the KV cache (`tools/profiles/kv_cache_sizes.csv`)."""
STATES = 128
"""Sequences whose states of linear attention have room."""
TRITON_SINCE, SCALES_ONCE_SINCE = (0, 11), (0, 25)
"""Releases of vLLM: Triton's kernels of MXFP4 on Hopper by default; without a copy of scales."""
MAX_BATCHED_TOKENS = 8192
"""Tokens of the iteration that activations are reserved for, vLLM's on large GPUs."""


def reserved_bytes(layout: EngineShape, version: str = "") -> float:
    """Bytes of a GPU beside weights, activations and KV; without a version of the newest."""
    known = release(version)
    runtime, links = next(
        RESERVES[since] for since in sorted(RESERVES, reverse=True) if not known or known >= since
    )
    return (runtime + (links if layout.gpus > 1 else 0.0)) * 2**30


def weight_bytes_per_gpu(model: ModelShape, layout: EngineShape, version: str = "") -> float:
    """Bytes of weights on each GPU: experts are cut or spread over all, the rest over a rank."""
    p, of = count_parameters(model), model.precisions
    width = {**WEIGHT_BYTES, "int4": WEIGHT_BYTES["int4"] + 2 / model.int4_group - 2 / 128}
    # What makes latent vectors is on every GPU. Heads fewer than GPUs are on several: little.
    latent, whole = model.attention, 0
    if latent is not None:
        vectors = latent.query_rank + latent.kv_rank + latent.rope_dim
        whole = model.layers * model.hidden * vectors
    rank = (p.embedding + p.head) * width["bf16"] + p.mlp * width[of.mlp]
    rank += (p.attention - whole) * width[of.attention]
    everywhere = whole * width[of.attention]
    experts = p.experts * width[of.experts] * _mxfp4_held(model, layout, version)
    return rank / layout.tp + everywhere + experts / layout.gpus


def _mxfp4_held(model: ModelShape, layout: EngineShape, version: str) -> float:
    """Bytes that vLLM's kernels of MXFP4 hold over those of the weights: sizes are rounded up, and
    Triton's on Hopper kept scales twice until vllm-project/vllm pull request 46549 of June 2026.

    Multiples are those of vLLM's `fused_moe/oracle/mxfp4.py`; logs have 65.97 GiB with Marlin and
    64.38 with Triton (issues 23278 and 33155). The release of that change is assumed.
    """
    of, known = model.experts, release(version)
    if of is None or model.precisions.experts != "mxfp4":
        return 1.0
    part = of.intermediate * layout.ep / layout.gpus
    if layout.gpu.startswith("h") and (not known or known >= TRITON_SINCE):
        twice = bool(known) and known < SCALES_ONCE_SINCE
        return ceil(part / 64) * 64 / part * (1 + twice / 32 / WEIGHT_BYTES["mxfp4"])
    wide = 256 if layout.gpu.startswith(("b", "gb")) else 128
    return ceil(part / wide) * wide / part * ceil(model.hidden / 256) * 256 / model.hidden


def blocks_fault(model: ModelShape, layout: EngineShape) -> str:
    """Say which part of FP8 weights would be cut through blocks that share a scale, which vLLM
    (issue 17569) and SGLang refuse; empty where none is."""
    block, of, experts = model.fp8_block, model.precisions, model.experts
    parts = []
    if model.dense_layers and of.mlp == "fp8":
        parts.append(("the MLP", model.intermediate, layout.tp, "take a smaller TP degree"))
    if experts is not None and of.experts == "fp8":
        cut, remedy = layout.gpus // layout.ep, "set cluster.expert_parallel = on"
        parts.append(("an expert", experts.intermediate, cut, remedy))
    if experts is not None and of.mlp == "fp8":
        parts.append(
            ("shared experts", experts.shared_intermediate, layout.tp, "take a smaller TP degree")
        )
    for name, wide, cut, remedy in parts:
        if block and wide % (block * cut):
            return (
                f"{wide:,} columns of {name} over {cut} GPUs are {wide / cut:g}, no multiple of "
                f"the {block} that share a scale in FP8: {remedy}"
            )
    return ""


def weights_read_bytes(model: ModelShape) -> int:
    """Least bytes of weights that an iteration reads: without embedding and idle experts."""
    p, of = count_parameters(model), model.precisions
    read = (p.head or p.embedding) * WEIGHT_BYTES["bf16"]
    read += p.attention * WEIGHT_BYTES[of.attention] + p.mlp * WEIGHT_BYTES[of.mlp]
    return int(read + p.active_experts * WEIGHT_BYTES[of.experts])


def activation_bytes_per_gpu(model: ModelShape, layout: EngineShape) -> float:
    """Bytes of activations at the largest iteration: residuals, and the widest layer."""
    wide = 3 * model.intermediate / layout.tp
    if model.experts is not None:
        experts = model.experts
        cut = layout.gpus / layout.ep
        wide = max(wide, 3 * experts.per_token * experts.intermediate / cut)
    return MAX_BATCHED_TOKENS * ACTIVATION_BYTES * (2 * model.hidden + wide)


def kv_capacity_tokens(
    model: ModelShape,
    layout: EngineShape,
    gpu: GpuClass,
    *,
    memory_share: float = MEMORY_SHARE,
    version: str = "",
) -> int:
    """Tokens of KV that one attention rank of a vLLM holds; 0 where the weights leave no memory."""
    free = memory_share * gpu.memory - reserved_bytes(layout, version)
    free -= weight_bytes_per_gpu(model, layout, version) + activation_bytes_per_gpu(model, layout)
    free -= STATES * model.linear.state_bytes / layout.tp if model.linear is not None else 0.0
    return max(0, int(free / model.kv_bytes_per_token(layout.tp)))
