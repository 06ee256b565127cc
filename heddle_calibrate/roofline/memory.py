"""Memory of an engine: parameters, weights on each GPU, and what they leave for KV."""

from dataclasses import dataclass

from heddle_calibrate.roofline.gpu_classes import GpuClass
from heddle_calibrate.roofline.model_shape import WEIGHT_BYTES, LatentAttention, ModelShape
from heddle_calibrate.roofline.operators import ACTIVATION_BYTES
from heddle_core.ids import EngineShape
from heddle_sim.profile_parts import release

MEMORY_SHARE = 0.9
"""Of a GPU's memory that an engine uses (vLLM: ``--gpu-memory-utilization``)."""
RESERVES = {(0,): (1.0, 1.6), (0, 11, 1): (4.7, 1.2), (0, 17): (2.0, 1.6)}
"""GiB since a release of vLLM: of CUDA context, kernels and graphs; of buffers of several GPUs.
Fitted to published sizes of the KV cache (`tools/profiles/kv_cache_sizes.csv`)."""
STATES = 128
"""Sequences whose states of linear attention have room."""
MAX_BATCHED_TOKENS = 8192
"""Tokens of the iteration that activations are reserved for, vLLM's on large GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameters of a model's parts. Norms and biases are left out: less than 0.1 %."""

    embedding: int
    head: int
    """0 where it is the embedding."""
    attention: int
    mlp: int
    """Dense layers, shared experts and routers."""
    experts: int
    active_experts: int
    """Of those that one token uses."""

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.attention + self.mlp + self.experts


def count_parameters(model: ModelShape) -> ParameterCounts:
    """Count the parameters by a model's sizes."""
    experts = model.experts
    mlp = 3 * model.hidden * model.intermediate * model.dense_layers
    routed = chosen = 0
    if experts is not None:
        layers = model.layers - model.dense_layers
        one = 3 * model.hidden * experts.intermediate
        routed, chosen = layers * experts.count * one, layers * experts.per_token * one
        mlp += layers * model.hidden * (3 * experts.shared_intermediate + experts.count)
    embedding = model.vocabulary * model.hidden
    return ParameterCounts(
        embedding=embedding,
        head=0 if model.tied else embedding,
        attention=_attention_parameters(model),
        mlp=mlp,
        experts=routed,
        active_experts=chosen,
    )


def _attention_parameters(model: ModelShape) -> int:
    latent = model.attention
    if not isinstance(latent, LatentAttention):
        heads = (2 + model.query_gate) * model.heads + 2 * model.kv_heads
        found = model.full_layers * model.hidden * model.head_dim * heads
        if (linear := model.linear) is not None:
            keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
            wide = 2 * keys + 3 * values + 2 * linear.value_heads
            found += linear.layers * model.hidden * wide
        return found
    query = model.heads * (latent.nope_dim + latent.rope_dim)
    into = latent.query_rank * (model.hidden + query) if latent.query_rank else model.hidden * query
    compressed = model.hidden * (latent.kv_rank + latent.rope_dim)
    expansion = latent.kv_rank * model.heads * (latent.nope_dim + latent.value_dim)
    out = model.heads * latent.value_dim * model.hidden
    index = latent.query_rank * latent.index_heads * latent.index_dim
    index += model.hidden * (latent.index_dim + latent.index_heads)
    return model.layers * (into + compressed + expansion + out + index)


def reserved_bytes(layout: EngineShape, version: str = "") -> float:
    """Bytes of a GPU beside weights, activations and KV; without a version of the newest."""
    known = release(version)
    runtime, links = next(
        RESERVES[since] for since in sorted(RESERVES, reverse=True) if not known or known >= since
    )
    return (runtime + (links if layout.gpus > 1 else 0.0)) * 2**30


def weight_bytes_per_gpu(model: ModelShape, layout: EngineShape) -> float:
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
    return rank / layout.tp + everywhere + p.experts * width[of.experts] / layout.gpus


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
    free -= weight_bytes_per_gpu(model, layout) + activation_bytes_per_gpu(model, layout)
    free -= STATES * model.linear.state_bytes / layout.tp if model.linear is not None else 0.0
    return max(0, int(free / model.kv_bytes_per_token(layout.tp)))
