"""A model as the roofline sees it: sizes of its layers, precision of its weights, KV and memory."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Precision = Literal["bf16", "fp8", "mxfp4", "nvfp4", "int4"]
KvDtype = Literal["auto", "bf16", "fp8"]
WEIGHT_BYTES: Final = MappingProxyType(
    {
        "bf16": 2.0,
        "fp8": 1.0,
        "mxfp4": 0.5 + 1 / 32,
        "nvfp4": 0.5 + 1 / 16,
        "int4": 0.5 + 2 / 128,
    }
)
"""Bytes of a weight with its scales: mxfp4 has one byte for 32 weights, nvfp4 one for 16, int4
(GPTQ, AWQ) two for 128. Scales of FP8 are for blocks of 128 x 128 and left out."""


@dataclass(frozen=True, slots=True)
class Precisions:
    """Precision of the weights; embeddings, router and LM head are bf16."""

    attention: Precision = "bf16"
    mlp: Precision = "bf16"
    """Of dense layers and shared experts."""
    experts: Precision = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA): sizes of its compressed vectors and of a head's parts."""

    kv_rank: int
    query_rank: int
    """0 where queries are not compressed."""
    rope_dim: int
    nope_dim: int
    value_dim: int
    index_heads: int = 0
    """Of the indexer that chooses the tokens to attend to; 0: all are."""
    index_dim: int = 0
    index_tokens: int = 0
    """Tokens that are chosen for a query."""

    @property
    def index_bytes_per_token(self) -> int:
        """Of a layer: an FP8 key with its scale."""
        return self.index_dim + 4 if self.index_heads else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers that keep a matrix of each head and sequence in place of KV (gated delta rule)."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def state_bytes(self) -> int:
        """Of a sequence, in float32."""
        return self.layers * self.value_heads * self.key_dim * self.value_dim * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """Experts of every layer that has some."""

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    """Width of all shared experts together; 0 without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    intermediate: int
    """Of dense layers; 0 where every layer has experts."""
    dense_layers: int
    tied: bool
    """True where input embedding and LM head are one matrix."""
    precisions: Precisions
    attention: LatentAttention | None = None
    """None: grouped-query attention."""
    linear: LinearAttention | None = None
    """Of some of the layers."""
    query_gate: bool = False
    """Whether queries have gates of their size, from the same projection."""
    experts: ExpertLayers | None = None
    window: int = 0
    """Tokens that a layer with sliding-window attention attends to."""
    sliding_layers: int = 0
    kv_element_bytes: int = 2
    int4_group: int = 128
    """Weights in INT4 that share a scale."""
    fp8_block: int = 0
    """Rows and columns of FP8 weights that share a scale; 0: all of a row, or of a matrix."""
    mtp_layers: int = 0
    """Layers of a head that predicts further tokens (MTP); beside `layers`."""
    notes: tuple[str, ...] = ()
    """What of the model is left out."""

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """Bytes that a token of a long context keeps on each GPU of a rank of `tp`.

        Layers with a sliding window keep no more than the window, and are not counted, unless all
        are such. Key-value heads fewer than GPUs are replicated; latent vectors always are.
        """
        index = 0
        if self.attention is not None:
            numbers = self.attention.kv_rank + self.attention.rope_dim
            index = self.attention.index_bytes_per_token
        else:
            numbers = 2 * max(1, self.kv_heads // tp) * self.head_dim
        layers = self.full_layers - self.sliding_layers or self.full_layers
        return layers * (numbers * self.kv_element_bytes + index)

    @property
    def full_layers(self) -> int:
        """Layers without linear attention."""
        return self.layers - (self.linear.layers if self.linear is not None else 0)


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

    @property
    def active(self) -> int:
        """Those that one token uses, embeddings included."""
        return self.total - self.experts + self.active_experts


def count_parameters(model: ModelShape) -> ParameterCounts:
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
    if latent is None:
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
