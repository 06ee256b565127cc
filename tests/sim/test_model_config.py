"""Configurations that lack a field: no other kind of model is made of the rest."""

from collections.abc import Mapping
from typing import Any

import pytest

from heddle_sim.config_fields import ModelConfigError
from heddle_sim.known_models import known_config
from heddle_sim.model_config import model_shape
from heddle_sim.model_shape import ModelShape


def with_text(name: str, changes: Mapping[str, Any]) -> ModelShape:
    """The shape of a known configuration with other fields, without those that are None."""
    values = dict(known_config(name))
    text = {**values.get("text_config", values), **changes}
    text = {key: value for key, value in text.items() if value is not None}
    whole = {**values, "text_config": text} if "text_config" in values else text
    return model_shape(whole, place="config.json", name="")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("moonshotai/Kimi-K2.5", "n_routed_experts"),
        ("moonshotai/Kimi-K2.5", "kv_lora_rank"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "num_experts"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "moe_intermediate_size"),
        ("Qwen/Qwen3-30B-A3B", "moe_intermediate_size"),
        ("Qwen/Qwen3.5-397B-A17B", "linear_num_value_heads"),
    ],
)
def test_a_field_that_decides_the_kind_of_layers_is_not_left_out(name: str, field: str) -> None:
    with pytest.raises(ModelConfigError, match=rf"the field .*{field}.* is missing"):
        with_text(name, {field: None})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1},
        {"full_attention_interval": 10**9, "layer_types": None},
        {"layer_types": ["linear_attention"] * 60},
    ],
)
def test_linear_attention_alone_is_refused(changes: Mapping[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match=r"none of the .* layers has full attention"):
        with_text("Qwen/Qwen3.5-397B-A17B", changes)


def test_kinds_of_layers_beyond_the_last_do_not_count() -> None:
    kinds = known_config("Qwen/Qwen3.5-397B-A17B")["text_config"].get("layer_types")
    kinds = kinds or ["linear_attention"] * 3 + ["full_attention"]
    short = with_text("Qwen/Qwen3.5-397B-A17B", {"num_hidden_layers": 8, "layer_types": kinds * 30})
    assert (short.linear is not None and short.linear.layers, short.full_layers) == (6, 2)
