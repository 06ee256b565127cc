"""The operators of one iteration of a transformer on one GPU: how often, bytes, and operations.

Counts come from the model's shape and the engine's layout alone. Iterations are described by
arrays, so that one call counts many of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from heddle_core.ids import EngineShape
from heddle_sim.model_shape import (
    WEIGHT_BYTES,
    ExpertLayers,
    LatentAttention,
    LinearAttention,
    ModelShape,
    Precision,
)

Floats = NDArray[np.float64]
OperatorKind = Literal[
    "gemm",
    "attention",
    "latent-attention",
    "experts",
    "elementwise",
    "all-reduce",
    "all-to-all",
]
ACTIVATION_BYTES = 2
BY_PHASE = ("attention", "experts", "all-reduce", "all-to-all")
"""Kinds with other kernels for prompts than for decoding."""


class LayoutError(ValueError):
    """A model that cannot be cut over the GPUs of an engine in the requested way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterations:
    """Work of one attention rank in each of several iterations."""

    tokens: Floats
    """New tokens: sequences that decode, or a prompt's tokens."""
    pairs: Floats
    """(query, key) pairs of attention, without a sliding window."""
    kv_tokens: Floats
    """Tokens whose KV is read, without a sliding window."""
    sequences: Floats
    """Sequences: each needs one row of logits."""
    prefill: bool = False
    """True where sequences have several new tokens."""


def decode_iterations(batch: Floats, context: Floats) -> Iterations:
    """Iterations in which each of `batch` sequences adds a token to `context` tokens."""
    return Iterations(
        tokens=batch, pairs=batch * context, kv_tokens=batch * context, sequences=batch
    )


def prefill_iterations(tokens: Floats, cached: Floats) -> Iterations:
    """Iterations of one prompt each: `tokens` new ones after `cached` in the prefix cache."""
    return Iterations(
        tokens=tokens,
        pairs=tokens * (cached + tokens / 2),
        kv_tokens=cached + tokens,
        sequences=np.ones_like(tokens),
        prefill=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One kind of kernel of an iteration, on the GPU with the most work."""

    name: str
    kind: OperatorKind
    precision: Precision
    count: int
    """Executions in one iteration."""
    bytes: Floats
    """Moved in one execution: weights, KV and activations; over links for collectives."""
    flops: Floats
    """Of one execution."""
    gpus: int = 1
    """That take part in a collective."""
    prefill: bool = False
    """Part of an iteration with prompts."""

    @property
    def key(self) -> str:
        """Name of the operator's efficiency: kind, precision of weights, phase where they count."""
        kind = f"{self.kind} {self.precision}" if self.kind in ("gemm", "experts") else self.kind
        return f"{kind} prefill" if self.prefill and self.kind in BY_PHASE else kind


def operators(model: ModelShape, layout: EngineShape, work: Iterations) -> list[Operator]:
    """List the operators of `work`.

    `layout` is one of vLLM's: attention cut over `tp` GPUs in each of `dp` ranks, experts spread
    over `ep` of them or each cut over all. Raises LayoutError where heads or experts do not divide.
    """
    check_layout(model, layout)
    found = [
        *_attention(model, layout, work),
        *_dense_layers(model, layout, work),
        *_expert_layers(model, layout, work),
        *_ends(model, layout, work),
    ]
    return [replace(operator, prefill=True) for operator in found] if work.prefill else found


def check_layout(model: ModelShape, layout: EngineShape) -> None:
    """Raise LayoutError where heads or experts do not divide over the GPUs."""
    if model.heads % layout.tp:
        raise LayoutError(
            f"{model.heads} attention heads do not divide over TP {layout.tp}; "
            f"TP degrees that divide: {_divisors(model.heads)}"
        )
    kv_heads = model.kv_heads
    if kv_heads % layout.tp and layout.tp % kv_heads:
        raise LayoutError(
            f"{kv_heads} key-value heads do not divide over TP {layout.tp}; "
            f"TP degrees that divide: {_divisors(kv_heads)}, or multiples of {kv_heads}"
        )
    experts = model.experts
    if experts is None:
        if layout.ep > 1 or layout.dp > 1:
            raise LayoutError(
                "a dense model has no experts to spread; leave expert_parallel and attention_dp "
                "out, and run more engines instead"
            )
        return
    if experts.count % layout.ep:
        raise LayoutError(
            f"{experts.count} experts do not divide over {layout.ep} GPUs; "
            f"numbers of GPUs that divide: {_divisors(experts.count)}"
        )
    cut = layout.gpus // layout.ep
    if experts.intermediate % cut:
        raise LayoutError(
            f"experts {experts.intermediate} wide do not divide over TP {cut}; use expert_parallel"
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, min(n, 64) + 1) if n % d == 0)


def _gemm(
    name: str, count: int, tokens: Floats, into: int, out: float, precision: Precision
) -> Operator:
    """A product of (tokens, into) and (into, out)."""
    return Operator(
        name=name,
        kind="gemm",
        precision=precision,
        count=count,
        bytes=into * out * WEIGHT_BYTES[precision] + tokens * (into + out) * ACTIVATION_BYTES,
        flops=2 * tokens * into * out,
    )


def _elementwise(name: str, count: int, tokens: Floats, wide: int) -> Operator:
    """A kernel that reads and writes vectors `wide` long twice."""
    return Operator(
        name=name,
        kind="elementwise",
        precision="bf16",
        count=count,
        bytes=4 * tokens * wide * ACTIVATION_BYTES,
        flops=np.zeros_like(tokens),
    )


def _all_reduce(count: int, tokens: Floats, hidden: int, tp: int) -> Iterator[Operator]:
    if tp > 1:
        moved = 2 * (tp - 1) / tp * tokens * hidden * ACTIVATION_BYTES
        yield Operator(
            name="all-reduce",
            kind="all-reduce",
            precision="bf16",
            count=count,
            bytes=moved,
            flops=np.zeros_like(tokens),
            gpus=tp,
        )


def _attention(model: ModelShape, layout: EngineShape, work: Iterations) -> Iterator[Operator]:
    if isinstance(model.attention, LatentAttention):
        yield from _latent_attention(model, model.attention, layout, work)
    else:
        yield from _grouped_attention(model, layout, work)
    if model.linear is not None:
        yield from _linear_attention(model, model.linear, layout, work)
    yield from _all_reduce(model.layers, work.tokens, model.hidden, layout.tp)


def _grouped_attention(
    model: ModelShape, layout: EngineShape, work: Iterations
) -> Iterator[Operator]:
    heads, kv_heads = model.heads // layout.tp, max(1, model.kv_heads // layout.tp)
    wide, precision = model.head_dim, model.precisions.attention
    n, layers = work.tokens, model.full_layers
    out = ((1 + model.query_gate) * heads + 2 * kv_heads) * wide
    yield _gemm("qkv", layers, n, model.hidden, out, precision)
    kv_bytes = 2 * kv_heads * wide * model.kv_element_bytes
    for name, count, window in (
        ("attention", layers - model.sliding_layers, math.inf),
        ("sliding attention", model.sliding_layers, model.window or math.inf),
    ):
        if not count:
            continue
        read = np.minimum(work.kv_tokens, work.sequences * (window + work.tokens - work.sequences))
        pairs = np.minimum(work.pairs, work.tokens * window)
        yield Operator(
            name=name,
            kind="attention",
            precision="bf16",
            count=count,
            bytes=read * kv_bytes + 2 * n * heads * wide * ACTIVATION_BYTES,
            flops=4 * pairs * heads * wide,
        )
    yield _gemm("attention output", layers, n, heads * wide, model.hidden, precision)


def _linear_attention(
    model: ModelShape, linear: LinearAttention, layout: EngineShape, work: Iterations
) -> Iterator[Operator]:
    """Gated delta rule: states are read and written once an iteration, whatever the context."""
    layers, n, precision = linear.layers, work.tokens, model.precisions.attention
    keys = linear.key_heads * linear.key_dim // layout.tp
    values = linear.value_heads * linear.value_dim // layout.tp
    gates = 2 * linear.value_heads // layout.tp
    wide = 2 * (keys + values) + gates
    yield _gemm("linear attention in", layers, n, model.hidden, wide, precision)
    yield _elementwise("convolution and gates", 2 * layers, n, 2 * keys + values)
    state = values * linear.key_dim
    yield Operator(
        name="linear attention",
        kind="attention",
        precision="bf16",
        count=layers,
        bytes=2 * work.sequences * state * 4 + n * wide * ACTIVATION_BYTES,
        flops=8 * n * state,
    )
    yield _gemm("linear attention out", layers, n, values, model.hidden, precision)


def _latent_attention(
    model: ModelShape, latent: LatentAttention, layout: EngineShape, work: Iterations
) -> Iterator[Operator]:
    """Multi-head latent attention: decoding attends over the latent vectors themselves, prefill
    over keys and values that are computed from them."""
    heads = model.heads // layout.tp
    precision, layers, n = model.precisions.attention, model.layers, work.tokens
    query = heads * (latent.nope_dim + latent.rope_dim)
    compressed = latent.kv_rank + latent.rope_dim
    if latent.query_rank:
        yield _gemm(
            "query and KV in", layers, n, model.hidden, latent.query_rank + compressed, precision
        )
        yield _gemm("query", layers, n, latent.query_rank, query, precision)
    else:
        yield _gemm("query and KV in", layers, n, model.hidden, query + compressed, precision)
    expansion = heads * (latent.nope_dim + latent.value_dim)
    pairs, kv_tokens, apart = work.pairs, work.kv_tokens, work.prefill
    if latent.index_heads:
        # Chosen tokens differ between queries, so that prompts attend over latent vectors too.
        yield from _indexer(model, latent, work)
        pairs, apart = np.minimum(pairs, n * latent.index_tokens), False
        kv_tokens = np.minimum(kv_tokens, n * latent.index_tokens)
    expanded = kv_tokens if apart else n
    for name, wide in (("key expansion", latent.nope_dim), ("value expansion", latent.value_dim)):
        yield _gemm(name, layers, expanded, latent.kv_rank, heads * wide, "bf16")
    yield _elementwise("norms and rotation of latents", 4 * layers, n, compressed)
    if apart:
        flops = 2 * pairs * heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
        moved = kv_tokens * (expansion + latent.rope_dim) * ACTIVATION_BYTES
    else:
        flops = 2 * pairs * heads * (2 * latent.kv_rank + latent.rope_dim)
        moved = kv_tokens * compressed * model.kv_element_bytes
    yield Operator(
        name="attention",
        kind="attention" if apart else "latent-attention",
        precision="bf16",
        count=layers,
        bytes=moved + n * (query + heads * latent.value_dim) * ACTIVATION_BYTES,
        flops=flops,
    )
    yield _gemm("attention output", layers, n, heads * latent.value_dim, model.hidden, precision)


def _indexer(model: ModelShape, latent: LatentAttention, work: Iterations) -> Iterator[Operator]:
    """Scores of all tokens for each query, in FP8 and on every GPU of a rank, and their largest."""
    n, precision = work.tokens, model.precisions.attention
    wide = latent.index_heads * latent.index_dim
    yield _gemm("index query", model.layers, n, latent.query_rank, wide, precision)
    into = latent.index_dim + latent.index_heads
    yield _gemm("index key", model.layers, n, model.hidden, into, precision)
    yield Operator(
        name="index scores",
        kind="attention",
        precision="fp8",
        count=model.layers,
        # Scores are written and read in float32.
        bytes=work.kv_tokens * latent.index_bytes_per_token + n * wide + 8 * work.pairs,
        flops=2 * work.pairs * wide,
    )


def _mlp(
    name: str, count: int, model: ModelShape, wide: float, work: Iterations
) -> Iterator[Operator]:
    precision = model.precisions.mlp
    yield _gemm(f"{name} up", count, work.tokens, model.hidden, 2 * wide, precision)
    # A product's bytes are alike in both directions.
    yield _gemm(f"{name} down", count, work.tokens, model.hidden, wide, precision)


def _dense_layers(model: ModelShape, layout: EngineShape, work: Iterations) -> Iterator[Operator]:
    if model.dense_layers:
        yield from _mlp("MLP", model.dense_layers, model, model.intermediate / layout.tp, work)
        yield from _all_reduce(model.dense_layers, work.tokens, model.hidden, layout.tp)


def _expert_layers(model: ModelShape, layout: EngineShape, work: Iterations) -> Iterator[Operator]:
    experts = model.experts
    if experts is None:
        return
    layers, n = model.layers - model.dense_layers, work.tokens
    yield _gemm("router", layers, n, model.hidden, experts.count, "bf16")
    if experts.shared_intermediate:
        wide = experts.shared_intermediate / layout.tp
        yield from _mlp("shared experts", layers, model, wide, work)
    touched, routed = _busiest_gpu(experts, layout.ep, n * layout.dp)
    wide = experts.intermediate / (layout.gpus / layout.ep)
    precision = model.precisions.experts
    weights = 3 * model.hidden * wide
    yield Operator(
        name="experts",
        kind="experts",
        precision=precision,
        count=layers,
        bytes=touched * weights * WEIGHT_BYTES[precision]
        + routed * (2 * model.hidden + 3 * wide) * ACTIVATION_BYTES,
        flops=2 * routed * weights,
    )
    if layout.dp > 1:
        # Dispatch and combine: every rank's tokens go to the GPUs of their experts and back.
        others = (layout.gpus - layout.tp) / layout.gpus
        copies = min(experts.per_token, layout.ep)
        yield Operator(
            name="dispatch and combine",
            kind="all-to-all",
            precision="bf16",
            count=2 * layers,
            bytes=n * others * copies * model.hidden * ACTIVATION_BYTES,
            flops=np.zeros_like(n),
            gpus=layout.gpus,
        )
    else:
        yield from _all_reduce(layers, n, model.hidden, layout.tp)


def _busiest_gpu(experts: ExpertLayers, ep: int, tokens: Floats) -> tuple[Floats, Floats]:
    """Distinct experts and (token, expert) pairs of the GPU with most of them.

    Tokens choose experts uniformly, and apart from each other.
    """
    own = experts.count / ep
    share = 1 - (1 - experts.per_token / experts.count) ** tokens
    touched = own * share
    routed = tokens * experts.per_token / ep
    if ep > 1:
        above = math.sqrt(2 * math.log(ep))
        touched = np.minimum(own, touched + above * np.sqrt(touched * (1 - share)))
        routed = routed + above * np.sqrt(routed * (1 - 1 / ep))
    return touched, routed


def _ends(model: ModelShape, layout: EngineShape, work: Iterations) -> Iterator[Operator]:
    n = work.tokens
    yield _elementwise("norms and activations", 3 * model.layers + 2, n, model.hidden)
    yield _gemm("LM head", 1, work.sequences, model.hidden, model.vocabulary / layout.tp, "bf16")
