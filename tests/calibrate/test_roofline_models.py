"""Models by their config.json: sizes, precision, memory, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from heddle_calibrate.roofline import locate
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.locate import find_model
from heddle_calibrate.roofline.memory import (
    kv_capacity_tokens,
    weight_bytes_per_gpu,
    weights_read_bytes,
)
from heddle_core.ids import EngineShape
from heddle_sim.config_fields import ModelConfigError
from heddle_sim.known_models import known_config
from heddle_sim.model_config import (
    model_shape,
    read_model_config,
)
from heddle_sim.model_shape import ModelShape, Precisions, count_parameters


def shape(name: str, **changes: Any) -> ModelShape:
    return model_shape({**known_config(name), **changes}, place="config.json", name=name)


def written(folder: Path, values: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return file


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen3-8B", 8.19e9, 8.19e9),
        ("Qwen3-14B", 14.77e9, 14.77e9),
        ("Qwen3-32B", 32.76e9, 32.76e9),
        ("Llama-3.1-8B", 8.03e9, 8.03e9),
        ("Qwen3-30B-A3B", 30.53e9, 3.35e9),
        ("Qwen3-235B-A22B", 235.09e9, 22.19e9),
        ("gpt-oss-120b", 116.83e9, 5.71e9),
        ("DeepSeek-V3", 671.03e9, 37.55e9),
    ],
)
def test_parameters_are_those_that_the_publishers_state(
    name: str, total: float, active: float
) -> None:
    p = count_parameters(shape(name))
    assert p.total == pytest.approx(total, rel=1e-3)
    assert p.active == pytest.approx(active, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("Qwen3-8B", 36 * 2 * 8 * 128 * 2),
        ("Qwen3-30B-A3B", 48 * 2 * 4 * 128 * 2),
        ("Qwen3-235B-A22B", 94 * 2 * 4 * 128 * 2),
        ("gpt-oss-120b", 18 * 2 * 8 * 64 * 2),
        ("DeepSeek-V3", 61 * (512 + 64) * 2),
    ],
)
def test_kv_bytes_per_token_are_those_of_the_heads_or_of_the_latent_vector(
    name: str, by_hand: int
) -> None:
    assert shape(name).kv_bytes_per_token() == by_hand


def test_kv_bytes_per_token_of_two_models_by_hand() -> None:
    assert shape("Qwen3-8B").kv_bytes_per_token() == 147_456
    assert shape("DeepSeek-V3").kv_bytes_per_token() == 70_272


def test_heads_fewer_than_gpus_are_replicated_and_latent_vectors_always() -> None:
    model = shape("Qwen3-30B-A3B")
    assert [model.kv_bytes_per_token(tp) for tp in (1, 2, 4, 8)] == [98_304, 49_152, 24_576, 24_576]
    assert shape("DeepSeek-V3").kv_bytes_per_token(8) == 70_272


def test_weights_of_each_gpu_and_the_kv_that_they_leave() -> None:
    model, h200 = shape("Qwen3-8B"), GPU_CLASSES["h200"]
    assert weight_bytes_per_gpu(model, EngineShape("h200", 1)) == 2 * 8_190_427_136
    assert weight_bytes_per_gpu(model, EngineShape("h200", 4)) == 2 * 8_190_427_136 / 4
    # 0.9 of 139.8 GiB, less 2 GiB, weights, and 8,192 tokens of residuals and the MLP.
    free = 0.9 * round(139.8 * 2**30) - 2 * 2**30 - 2 * 8_190_427_136
    free -= 8192 * 2 * (2 * 4096 + 3 * 12_288)
    assert kv_capacity_tokens(model, EngineShape("h200", 1), h200) == int(free / 147_456)


def test_layers_with_a_window_keep_no_kv_beyond_it() -> None:
    model, h200, one = shape("gpt-oss-120b"), GPU_CLASSES["h200"], EngineShape("h200", 1)
    assert (model.window, model.sliding_layers) == (128, 18)
    whole = model_shape({**known_config("gpt-oss-120b"), "sliding_window": None}, place="", name="")
    assert kv_capacity_tokens(model, one, h200) == pytest.approx(
        2 * kv_capacity_tokens(whole, one, h200), abs=1
    )


def test_spread_experts_are_on_all_gpus_and_attention_on_each_rank() -> None:
    model = shape("Qwen3-30B-A3B")
    p = count_parameters(model)
    rest = 2 * (p.total - p.experts)
    ranks = weight_bytes_per_gpu(model, EngineShape("h200", 1, ep=8, dp=8))
    assert ranks == pytest.approx(rest + 2 * p.experts / 8)
    one_rank = weight_bytes_per_gpu(model, EngineShape("h200", 8, ep=8))
    assert one_rank == pytest.approx((rest + 2 * p.experts) / 8)


def test_a_step_reads_at_least_the_active_weights_without_the_embedding() -> None:
    model = shape("Qwen3-30B-A3B")
    p = count_parameters(model)
    assert weights_read_bytes(model) == 2 * (p.active - p.embedding)
    tied = shape("Qwen3-8B", tie_word_embeddings=True)
    assert weights_read_bytes(tied) == 2 * count_parameters(tied).total


KEPT_ATTENTION = [f"model.layers.{i}.self_attn.q_proj" for i in range(48)]


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        ({"quant_method": "fp8"}, Precisions(attention="fp8", mlp="fp8", experts="fp8")),
        ({"quant_method": "mxfp4"}, Precisions(experts="mxfp4")),
        ({"quant_method": "awq", "bits": 4}, Precisions("int4", "int4", "int4")),
        ({"quant_method": "gptq", "bits": 4}, Precisions("int4", "int4", "int4")),
        (
            {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
            Precisions("nvfp4", "nvfp4", "nvfp4"),
        ),
        (
            {"quant_algo": "NVFP4", "exclude_modules": KEPT_ATTENTION},
            Precisions("bf16", "nvfp4", "nvfp4"),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
                "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
            },
            Precisions("bf16", "bf16", "int4"),
        ),
    ],
)
def test_the_precision_is_that_of_the_quantization(
    quantization: Mapping[str, Any], found: Precisions
) -> None:
    assert shape("Qwen3-30B-A3B", quantization_config=quantization).precisions == found


@pytest.mark.parametrize(
    ("stated", "element_bytes"),
    [
        ({"kv_cache_quant_algo": "FP8"}, 1),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
        ({"kv_cache_scheme": None}, 2),
        ({}, 2),
    ],
)
def test_the_precision_of_kv_is_that_of_the_quantization(
    stated: Mapping[str, Any], element_bytes: int
) -> None:
    quantization = {"quant_method": "fp8", **stated}
    found = shape("Qwen3-30B-A3B", quantization_config=quantization)
    assert found.kv_element_bytes == element_bytes


def test_a_precision_given_by_hand_replaces_the_configurations() -> None:
    known = known_config("Qwen3-30B-A3B")
    made = model_shape(known, place="", name="", precision="fp8")
    assert made.precisions == Precisions("fp8", "fp8", "fp8")
    assert model_shape(known, place="", name="", precision="mxfp4").precisions == Precisions(
        experts="mxfp4"
    )


def test_the_quantization_may_be_in_a_file_beside_the_configuration(tmp_path: Path) -> None:
    file = written(tmp_path / "mine", known_config("Qwen3-8B"))
    assert read_model_config(file).precisions == Precisions()
    quantization = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    file.with_name("hf_quant_config.json").write_text(json.dumps(quantization))
    assert read_model_config(file.parent).precisions == Precisions("fp8", "fp8", "fp8")


def test_the_text_part_of_a_model_with_vision_is_read() -> None:
    text = dict(known_config("Qwen3-8B"))
    nested = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    made = model_shape(nested, place="", name="vl")
    assert made.layers == 36
    assert made.notes == ("the vision part is left out: text only",)


def test_dense_layers_of_a_model_with_experts_are_counted() -> None:
    assert shape("DeepSeek-V3").dense_layers == 3
    assert shape("Qwen3-30B-A3B", mlp_only_layers=[0, 5]).dense_layers == 2
    assert shape("Qwen3-30B-A3B", decoder_sparse_step=2).dense_layers == 24


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "holds no JSON object"),
        ("{}", "the field architectures is missing"),
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel is an unknown architecture; measure"),
        ({"architectures": ["KimiLinearForCausalLM"]}, "linear attention, which is not modelled"),
        ({"architectures": ["NemotronHForCausalLM"]}, "Mamba layers, which is not modelled"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "sparse attention, which is not modelled"),
    ],
)
def test_what_is_no_configuration_is_refused_with_the_remedy(
    tmp_path: Path, text: object, said: str
) -> None:
    with pytest.raises(ModelConfigError, match=said) as e:
        read_model_config(written(tmp_path, text))
    assert "config.json" in str(e.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": None}, "field num_hidden_layers is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number from 0 to .*, not 'many'"),
        ({"vocab_size": -1}, "vocab_size must be a whole number"),
        ({"vocab_size": 10**400}, "vocab_size must be a whole number"),
        ({"num_key_value_heads": [4, 4]}, "num_key_value_heads must be a whole number"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers must be at most 10,000"),
        ({"mlp_only_layers": 5}, "mlp_only_layers must be a list, not 5"),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings must be true or false, not 'false'",
        ),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings must be true or false, not 0"),
        (
            {"sliding_window": 9, "use_sliding_window": 1},
            "use_sliding_window must be true or false, not 1",
        ),
        ({"quantization_config": {"config_groups": {"a": 1}}}, "without quant_method"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok 200 is above the 128 experts"),
        ({"num_experts": None}, "field num_experts or n_routed_experts or num_local_experts"),
        ({"torch_dtype": "float32"}, "torch_dtype float32 is not modelled; give profile.precision"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config hqq"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "gptq with 8 bits"),
        ({"quantization_config": [1]}, "quantization_config must be an object"),
    ],
)
def test_a_field_at_fault_is_named(changes: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ModelConfigError, match=f"config.json: .*{said}"):
        shape("Qwen3-30B-A3B", **changes)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, without the package that downloads."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    return tmp_path / "hub"


def test_an_id_is_looked_up_in_the_local_cache(hub: Path) -> None:
    folder = hub / "models--Some--Model-8B"
    for revision, layers in (("aaa", 36), ("bbb", 40)):
        values = {**known_config("Qwen3-8B"), "num_hidden_layers": layers}
        written(folder / "snapshots" / revision, values)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbb")
    model, file = find_model("Some/Model-8B")
    assert (model.name, model.layers) == ("model-8b", 40)
    assert file == folder / "snapshots" / "bbb" / "config.json"


def test_known_models_need_no_file(hub: Path) -> None:
    assert not hub.exists()
    model, file = find_model("Qwen/Qwen3-30B-A3B")
    assert (model.name, file) == ("qwen3-30b-a3b", None)


def test_a_folder_and_a_file_give_the_folders_name(tmp_path: Path) -> None:
    file = written(tmp_path / "My-Model", known_config("Qwen3-8B"))
    assert find_model(str(file))[0].name == find_model(str(file.parent))[0].name == "my-model"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("Some/Model", "not in the local cache .*huggingface_hub is not installed; download"),
        ("nothing", "no file or folder of this name, no Hugging Face id .*known here: "),
        ("there/config.json", "cannot read there/config.json: no such file"),
    ],
)
def test_a_model_that_is_not_found_ends_with_the_remedy(hub: Path, model: str, said: str) -> None:
    assert not hub.exists()
    with pytest.raises(ModelConfigError, match=said):
        find_model(model)


class UnreachableError(Exception):
    """As an HTTP client's own error, which is no OSError."""


class FakeHub:
    """`huggingface_hub` with the calls that a download makes, of which the first may fail."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.calls: list[str] = []

    def hf_hub_url(self, model: str, file: str) -> str:
        return f"https://hub/{model}/{file}"

    def get_hf_file_metadata(self, url: str, timeout: float) -> None:
        self.calls.append(f"{url} within {timeout}")
        if self.file is None:
            raise UnreachableError(f"no connection to {url}\nand more lines")

    def hf_hub_download(self, model: str, file: str) -> str:
        self.calls.append(f"download {model} {file}")
        return str(self.file)


def test_a_hub_out_of_reach_is_one_message_and_no_download(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline = FakeHub()
    monkeypatch.setattr(locate, "import_module", lambda _: offline)
    with pytest.raises(ModelConfigError) as caught:
        find_model("A/B")
    said = str(caught.value)
    assert "cannot be downloaded (no connection to https://hub/A/B/config.json); download" in said
    assert "\n" not in said
    # A download would try again for half a minute.
    assert offline.calls == ["https://hub/A/B/config.json within 2.0"]
    assert not hub.exists()


def test_a_model_of_the_hub_is_downloaded(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = FakeHub(written(tmp_path / "Model-B", known_config("Qwen3-8B")))
    monkeypatch.setattr(locate, "import_module", lambda _: online)
    model, file = find_model("A/Model-B")
    assert (model.layers, file) == (36, online.file)
    assert online.calls[1:] == ["download A/Model-B config.json"]
    assert not hub.exists()


def test_latent_attention_without_its_rank_is_refused() -> None:
    fields = {k: v for k, v in known_config("DeepSeek-V3").items() if k != "kv_lora_rank"}
    with pytest.raises(ModelConfigError, match="the field kv_lora_rank is missing"):
        model_shape(fields, place="config.json", name="x")


def test_key_value_heads_divide_the_heads() -> None:
    with pytest.raises(ModelConfigError, match="num_key_value_heads 64 does not divide"):
        shape("Qwen3-8B", num_key_value_heads=64)


def test_mxfp4_is_of_all_layers_of_a_dense_model() -> None:
    dense = shape("Qwen3-8B", quantization_config={"quant_method": "mxfp4"})
    assert dense.precisions == Precisions(attention="mxfp4", mlp="mxfp4", experts="mxfp4")


def test_a_window_of_qwen_needs_its_switch() -> None:
    assert shape("Qwen3-8B", sliding_window=4096, use_sliding_window=None).sliding_layers == 0


def test_variants_of_an_id_have_the_shape_of_their_base_and_other_publishers_do_not() -> None:
    assert known_config("Qwen/Qwen3-30B-A3B-Instruct-2507") == known_config("Qwen3-30B-A3B")
    with pytest.raises(KeyError):
        known_config("other/Qwen3-8B")


def test_sparse_attention_keeps_index_keys_and_shared_indexers_are_refused() -> None:
    model, dense = shape("GLM-5"), shape("GLM-5", index_n_heads=0, index_head_dim=0)
    # An FP8 key of 128 and its scale, of each of the 78 layers.
    assert model.kv_bytes_per_token() - dense.kv_bytes_per_token() == 78 * (128 + 4)
    assert count_parameters(model).total == pytest.approx(744e9, rel=1e-3)  # its model card
    assert "sparse attention" in model.notes[0]
    with pytest.raises(ModelConfigError, match="layers that share an indexer"):
        shape("GLM-5", indexer_types=["full", "shared"])


def test_exclusion_of_the_indexer_leaves_attention_quantised() -> None:
    assert shape("GLM-5-FP8").precisions == Precisions("fp8", "fp8", "fp8")


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [("Qwen3.5-397B-A17B", 397e9, 17e9), ("Qwen3-Next-80B-A3B-Instruct", 80e9, 3.9e9)],
)
def test_layers_with_linear_attention_keep_states_in_place_of_kv(
    name: str, parameters: float, active: float
) -> None:
    model = shape(name)
    assert model.linear is not None
    assert model.full_layers * 4 == model.layers
    assert model.kv_bytes_per_token() == model.full_layers * 2 * 2 * 256 * 2
    p = count_parameters(model)
    assert p.total == pytest.approx(parameters, rel=0.01)
    assert p.active == pytest.approx(active, rel=0.03)
    # Of 128 sequences, in float32.
    assert 128 * model.linear.state_bytes > 8e9
