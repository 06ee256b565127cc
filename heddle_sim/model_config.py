"""Reading a Hugging Face ``config.json`` as a `ModelShape`."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from heddle_sim.config_fields import Fields, ModelConfigError, read_object
from heddle_sim.model_shape import (
    ExpertLayers,
    LatentAttention,
    LinearAttention,
    ModelShape,
    Precision,
    Precisions,
)

DENSE: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "MiMoForCausalLM",
    "SeedOssForCausalLM",
)
EXPERTS: Final = (
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Glm4MoeForCausalLM",
    "Qwen3NextForCausalLM",
)
ONE_WIDTH: Final = ("MixtralForCausalLM", "GptOssForCausalLM", "MiniMaxM2ForCausalLM")
"""Their `intermediate_size` is that of experts; of others, of dense layers."""
LATENT: Final = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Glm4MoeLiteForCausalLM",
)
WITH_VISION: Final = (
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Their text part is modelled."""
SUPPORTED: Final = (*DENSE, *EXPERTS, *LATENT, *WITH_VISION)
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "KimiLinear": "linear attention",
        "MiniMaxM1": "linear attention",
        "MiniMaxM3": "sparse attention",
        "DeepseekV4": "sparse attention",
        "NemotronH": "Mamba layers",
        "Mamba": "Mamba layers",
        "Jamba": "Mamba layers",
        "Bamba": "Mamba layers",
        "GraniteMoeHybrid": "Mamba layers",
        "DeciLM": "layers of different shapes",
        "Llama4": "chunked attention",
        "Gemma": "another form of layer",
        "MiMoV2": "heads of different sizes in its sliding layers",
        "Step3": "heads of different sizes in its sliding layers",
    }
)  # fmt: skip
"""Beginnings of architectures that are refused, with the reason."""
MEASURE: Final = "measure its engines instead (heddle profile measure)"


MOST_LAYERS = 10**4
"""Larger numbers are mistakes."""


def read_model_config(path: Path, *, precision: Precision | None = None) -> ModelShape:
    """Read a config.json, or the one in a folder; `precision` overrides that of all linear layers.

    Raises ModelConfigError with the file, the field and the remedy.
    """
    file = path / "config.json" if path.is_dir() else path
    values = read_object(file)
    quantization = file.with_name("hf_quant_config.json")
    if values.get("quantization_config") is None and quantization.is_file():
        values["quantization_config"] = read_object(quantization).get("quantization")
    return model_shape(
        values,
        place=str(file),
        name=_name(file),
        precision=precision,
    )


def _name(file: Path) -> str:
    """Name of a model by its folder; that of a cache snapshot is the repository's."""
    folder = file.resolve().parent
    if folder.parent.name == "snapshots":
        folder = folder.parent.parent
    stem = folder.name if file.name == "config.json" else file.stem
    return re.sub(r"^models--", "", stem).rpartition("--")[2].lower()


def model_shape(
    values: Mapping[str, Any], *, place: str, name: str, precision: Precision | None = None
) -> ModelShape:
    """Make a shape from the fields of a configuration; `place` names it in errors.

    Raises ModelConfigError.
    """
    architecture = _architecture(values, place)
    notes: list[str] = []
    text = values
    if architecture in WITH_VISION:
        nested = values.get("text_config")
        if not isinstance(nested, Mapping):
            raise ModelConfigError(
                f"{place}: text_config is missing; give the complete config.json"
            )
        text = {**nested, "tie_word_embeddings": values.get("tie_word_embeddings", False)}
        notes.append("the vision part is left out: text only")
    fields = Fields(place, text)
    layers = fields.positive("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ModelConfigError(
            f"{place}: num_hidden_layers must be at most {MOST_LAYERS:,}, not {layers:,}"
        )
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    latent = architecture in LATENT or not {"kv_lora_rank", "qk_nope_head_dim"}.isdisjoint(text)
    experts = _experts(fields, architecture)
    if experts is None and (architecture in (*EXPERTS, *LATENT) or "moe_intermediate_size" in text):
        fields.positive("num_experts", "n_routed_experts", "num_local_experts")
    dense_layers = layers if experts is None else _dense_layers(fields, layers)
    (window, sliding), linear = _sliding(fields, layers), _linear(fields, layers)
    attention = _latent(fields) if latent else None
    if linear is not None or (attention is not None and attention.index_heads):
        kind = "sparse" if linear is None else "linear"
        notes.append(
            f"{kind} attention is counted by its bytes and operations; no table has its kernels, "
            "and the error that is stated was measured without it"
        )
    kv_heads = fields.positive("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelConfigError(
            f"{place}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}; "
            "give the complete config.json of the model, as on its Hugging Face page"
        )
    own = _precisions(values, text, place, layers, experts=experts is not None)
    quantised = values.get("quantization_config") or text.get("quantization_config") or {}
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.positive("head_dim", default=hidden // heads),
        vocabulary=fields.positive("vocab_size"),
        intermediate=fields.positive("intermediate_size") if dense_layers else 0,
        dense_layers=dense_layers,
        tied=fields.flag("tie_word_embeddings", default=False),
        precisions=own if precision is None else _overridden(precision, experts is not None),
        attention=attention,
        linear=linear,
        query_gate=linear is not None and fields.flag("attn_output_gate", default=True),
        experts=experts,
        window=window,
        sliding_layers=sliding,
        kv_element_bytes=_kv_element_bytes(quantised),
        int4_group=_int4_group(quantised),
        fp8_block=_fp8_block(quantised) if precision in (None, "fp8") else 0,
        mtp_layers=fields.count("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0),
        notes=tuple(notes),
    )


def _architecture(values: Mapping[str, Any], place: str) -> str:
    named = values.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise ModelConfigError(
            f"{place}: the field architectures is missing; give the complete config.json of the "
            "model, as on its Hugging Face page"
        )
    architecture = named[0]
    if architecture in SUPPORTED:
        return architecture
    why = next((why for prefix, why in REFUSED.items() if architecture.startswith(prefix)), None)
    said = f"has {why}, which is not modelled" if why else "is an unknown architecture"
    raise ModelConfigError(
        f"{place}: {architecture} {said}; {MEASURE}. Modelled: {', '.join(SUPPORTED)}"
    )


def _experts(fields: Fields, architecture: str) -> ExpertLayers | None:
    count = fields.count("num_experts", "n_routed_experts", "num_local_experts", default=0)
    if count < 2:
        return None
    own = ("intermediate_size",) if architecture in ONE_WIDTH else ()
    wide = fields.positive("moe_intermediate_size", *own)
    per_token = fields.positive("num_experts_per_tok", "num_experts_per_token")
    if per_token > count:
        raise ModelConfigError(
            f"{fields.place}: num_experts_per_tok {per_token} is above the {count} experts there "
            "are; correct one of the two"
        )
    shared = fields.count("shared_expert_intermediate_size", default=0)
    return ExpertLayers(
        count=count,
        per_token=per_token,
        intermediate=wide,
        shared_intermediate=shared or wide * fields.count("n_shared_experts", default=0),
    )


def _dense_layers(fields: Fields, layers: int) -> int:
    first = fields.count("first_k_dense_replace", default=0)
    every = fields.positive("decoder_sparse_step", default=1)
    listed = fields.values.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise ModelConfigError(f"{fields.place}: mlp_only_layers must be a list, not {listed!r}")
    return sum(i < first or (i + 1) % every > 0 or i in listed for i in range(layers))


def _linear(fields: Fields, layers: int) -> LinearAttention | None:
    if not any(name.startswith("linear_num_") for name in fields.values):
        return None
    kinds = fields.values.get("layer_types")
    full = layers // fields.positive("full_attention_interval", default=4)
    if isinstance(kinds, list):
        full = layers - kinds[:layers].count("linear_attention")
    if not full:
        raise fields.wrong(f"none of the {layers} layers has full attention; {MEASURE}")
    return LinearAttention(
        layers=layers - full,
        key_heads=fields.positive("linear_num_key_heads"),
        value_heads=fields.positive("linear_num_value_heads"),
        key_dim=fields.positive("linear_key_head_dim"),
        value_dim=fields.positive("linear_value_head_dim"),
    )


def _latent(fields: Fields) -> LatentAttention:
    if fields.values.get("indexer_types"):
        raise fields.wrong(f"layers that share an indexer are not modelled; {MEASURE}")
    return LatentAttention(
        kv_rank=fields.positive("kv_lora_rank"),
        query_rank=fields.count("q_lora_rank", default=0),
        rope_dim=fields.positive("qk_rope_head_dim"),
        nope_dim=fields.positive("qk_nope_head_dim"),
        value_dim=fields.positive("v_head_dim"),
        index_heads=fields.count("index_n_heads", default=0),
        index_dim=fields.count("index_head_dim", default=0),
        index_tokens=fields.count("index_topk", default=0),
    )


def _sliding(fields: Fields, layers: int) -> tuple[int, int]:
    """Window, and the number of layers that have it."""
    values = fields.values
    window = fields.count("sliding_window", default=0)
    switched = str(values.get("model_type", "")).startswith("qwen")
    if not window or not fields.flag("use_sliding_window", default=not switched):
        return 0, 0
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        return window, sum(kind == "sliding_attention" for kind in kinds[:layers])
    if fields.flag("use_sliding_window", default=False):
        return window, max(0, layers - fields.count("max_window_layers", default=0))
    return window, layers


# -- precision -------------------------------------------------------------------------------------

ATTENTION = re.compile(r"attn(?!.*(norm|indexer))")
MLP = re.compile(r"shared_expert|mlp\\?\.(\(|gate_proj|up_proj|gate_up_proj|down_proj)")


def _overridden(precision: Precision, experts: bool) -> Precisions:
    """All linear layers; mxfp4 is of experts only, as gpt-oss has it."""
    if precision == "mxfp4" and experts:
        return Precisions(experts="mxfp4")
    return Precisions(attention=precision, mlp=precision, experts=precision)


def _precisions(
    values: Mapping[str, Any],
    text: Mapping[str, Any],
    place: str,
    layers: int,
    *,
    experts: bool,
) -> Precisions:
    quantization = values.get("quantization_config") or text.get("quantization_config")
    if not quantization:
        stated = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16")
        if stated not in ("bfloat16", "float16"):
            raise ModelConfigError(
                f"{place}: torch_dtype {stated} is not modelled; give profile.precision bf16, as "
                "engines convert it (vLLM: --dtype bfloat16)"
            )
        return Precisions()
    if not isinstance(quantization, Mapping):
        raise ModelConfigError(f"{place}: quantization_config must be an object")
    found = _quantized(quantization, place)
    if found == "mxfp4":
        return _overridden(found, experts)
    names = [
        str(name)
        for field in ("ignore", "exclude_modules", "modules_to_not_convert")
        if isinstance(quantization.get(field), list)
        for name in quantization[field]
    ]
    return replace(
        Precisions(experts=found),
        attention="bf16" if _covers(names, ATTENTION, layers) else found,
        mlp="bf16" if _covers(names, MLP, layers) else found,
    )


def _grouped_weights(quantised: Mapping[str, Any]) -> Any:
    groups = quantised.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    return first.get("weights") if isinstance(first, Mapping) else None


def _int4_group(quantised: Mapping[str, Any]) -> int:
    """Weights that share a scale, where the configuration says so of the first of its groups."""
    weights = _grouped_weights(quantised)
    size = weights.get("group_size") if isinstance(weights, Mapping) else None
    return size if isinstance(size, int) and size > 0 else 128


def _fp8_block(quantised: Mapping[str, Any]) -> int:
    sizes = quantised.get("weight_block_size")
    size = sizes[0] if isinstance(sizes, list) and sizes else 0
    return size if isinstance(size, int) and size > 0 else 0


def _kv_element_bytes(quantised: Mapping[str, Any]) -> int:
    """Of modelopt's `kv_cache_quant_algo`, or `kv_cache_scheme` of compressed-tensors."""
    scheme = quantised.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else None
    return 1 if quantised.get("kv_cache_quant_algo") == "FP8" or bits == 8 else 2


def _covers(names: list[str], kind: re.Pattern[str], layers: int) -> bool:
    """Whether a list of unquantized modules has those of most layers, by name or by pattern."""
    found = [name for name in names if kind.search(name)]
    numbers = {m.group(1) for name in found if (m := re.search(r"layers\.(\d+)\b", name))}
    everywhere = any(not re.search(r"layers\.\d+\b", name) for name in found)
    return everywhere or len(numbers) * 2 > layers


def _quantized(quantization: Mapping[str, Any], place: str) -> Precision:
    method = str(quantization.get("quant_method") or quantization.get("quant_algo") or "").lower()
    bits = quantization.get("bits")
    weights = _grouped_weights(quantization)
    if isinstance(weights, Mapping):
        bits, method = weights.get("num_bits"), f"{weights.get('type')}{weights.get('num_bits')}"
    match method, bits:
        case (("fp8" | "fbgemm_fp8" | "float8"), _):
            return "fp8"
        case "mxfp4", _:
            return "mxfp4"
        case (("nvfp4" | "float4"), _):
            return "nvfp4"
        case (("awq" | "gptq" | "int4"), 4):
            return "int4"
    raise ModelConfigError(
        f"{place}: quantization_config {method or 'without quant_method'}"
        f"{f' with {bits} bits' if bits else ''} is not modelled; "
        "give profile.precision (bf16, fp8, mxfp4, nvfp4 or int4)"
    )
