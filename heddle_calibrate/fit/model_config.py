"""What a fit reads from a model's configuration (the fields of a Hugging Face ``config.json``)."""

from collections.abc import Mapping
from typing import Any

from heddle_calibrate.fit.kernel_profile import ModelSpec

BYTES = {"bfloat16": 2.0, "fp8": 1.0, "mxfp4": 0.5, "nvfp4": 0.5, "int4": 0.5}
"""Bytes of a weight, without the scales of its block; of another precision, no more than these."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def model_spec(name: str, config: Mapping[str, Any], precision: str = "bfloat16") -> ModelSpec:
    """Return the spec of a model called `name` in the tables; `precision` is of its weights.

    Raises:
        KeyError: a model with experts lacks this field.
    """
    text = text_config(config)
    heads = int(text.get("num_key_value_heads") or text.get("num_attention_heads") or 1)
    return ModelSpec(
        table=name,
        vocabulary=int(text.get("vocab_size", 0)),
        hidden=int(text.get("hidden_size", 0)),
        kv_heads=1 if text.get("kv_lora_rank") else heads,
        experts=routed_experts(text),
        active_bytes=int(_active_parameters(text) * BYTES.get(precision, min(BYTES.values()))),
        precision=precision,
        kv_share=_full_attention(text),
    )


def weight_precision(config: Mapping[str, Any]) -> str:
    """Precision of the weights that a configuration states, as profiles name it."""
    stated = config.get("quantization_config") or text_config(config).get("quantization_config")
    if not isinstance(stated, dict):
        return "bfloat16"
    method = str(stated.get("quant_method") or stated.get("quant_algo") or "quantised").lower()
    if method == "compressed-tensors":
        groups = stated.get("config_groups") or {}
        weights = [group.get("weights") or {} for group in groups.values()]
        kinds = {f"{each.get('type')}{each.get('num_bits')}" for each in weights}
        return {"int4": "int4", "float8": "fp8", "float4": "nvfp4"}.get("".join(kinds), method)
    return {"awq": "int4", "gptq": "int4"}.get(method, method)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of the language model, where the model has others too."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def routed_experts(config: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0 for a dense model."""
    text = text_config(config)
    return max((int(text.get(field) or 0) for field in _EXPERTS), default=0)


def _full_attention(text: Mapping[str, Any]) -> float:
    """Share of the layers whose attention reaches over the whole context."""
    kinds = text.get("layer_types") or ["full_attention"]
    return sum("sliding" not in str(kind) for kind in kinds) / len(kinds)


def _active_parameters(text: Mapping[str, Any]) -> int:
    """Weights that one token reads of a model with experts: its k experts, shared ones, attention
    and the output matrix. Norms, biases and routers are left out: the number is a lower bound.
    """
    if not routed_experts(text):
        return 0
    layers, hidden = int(text["num_hidden_layers"]), int(text["hidden_size"])
    dense = int(text.get("first_k_dense_replace") or 0)
    expert = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    chosen = int(text["num_experts_per_tok"]) + int(text.get("n_shared_experts") or 0)
    feed_forward = 3 * hidden * ((layers - dense) * chosen * expert)
    if dense:
        feed_forward += 3 * hidden * dense * int(text["intermediate_size"])
    return feed_forward + layers * _attention(text) + hidden * int(text["vocab_size"])


def _attention(text: Mapping[str, Any]) -> int:
    """Weights of one layer's attention, grouped-query or MLA."""
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    if not text.get("kv_lora_rank"):
        head = int(text.get("head_dim") or hidden // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
        return hidden * head * (2 * heads + 2 * kv_heads)
    latent, rope = int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"])
    plain, value = int(text["qk_nope_head_dim"]), int(text["v_head_dim"])
    query_in = int(text.get("q_lora_rank") or 0)
    query = (query_in or hidden) * heads * (plain + rope) + hidden * query_in
    return (
        query + hidden * (latent + rope) + latent * heads * (plain + value) + heads * value * hidden
    )
