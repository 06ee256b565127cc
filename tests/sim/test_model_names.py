"""Names and Hugging Face ids of models."""

import re

import pytest

from heddle_sim.known_models import known_configs
from heddle_sim.model_config import model_shape
from heddle_sim.model_names import known_model, listed_models, short_model_name
from heddle_sim.model_shape import count_parameters
from heddle_sim.profile_files import ProfileError, load_profile
from heddle_sim.trained_models import trained_model

KNOWN = ("qwen3-8b", "llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-70b-fp8", "qwen3-235b-a22b-fp8")

SIZE = re.compile(r"-(\d+(?:\.\d+)?)b\b")
"""Billions of parameters in a name; "8x7b" states those of an expert."""


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen3-8b", "qwen3-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"),
        ("nvidia/Llama-3.1-70B-Instruct-FP8", "llama-3.1-70b-fp8"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b-fp8"),
        ("Other/Model-7B", "other/model-7b"),
        ("Qwen/Qwen3-8B-FP8", "qwen/qwen3-8b-fp8"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-VL-8B-Thinking", "qwen3-8b"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.1-70b-fp8"),
        ("unsloth/Qwen3-30B-A3B-Instruct-2507-AWQ", "unsloth/qwen3-30b-a3b-instruct-2507-awq"),
    ],
)
def test_an_id_stands_for_the_name_of_its_shape_and_precision(model: str, name: str) -> None:
    assert short_model_name(model, KNOWN) == name


def test_profiles_and_training_shapes_are_found_by_id() -> None:
    assert load_profile("Qwen/Qwen3-14B", "h200").model == "qwen3-14b"
    assert load_profile("meta-llama/Llama-3.1-8B-Instruct", "A100").model == "llama-3.1-8b"
    assert trained_model("Qwen/Qwen3-32B").name == "qwen3-32b"


@pytest.mark.parametrize("name", listed_models()["shapes"])
def test_trainers_know_every_shape_and_its_stated_parameters_are_the_counted_ones(
    name: str,
) -> None:
    shape = listed_models()["shapes"][name]
    counts = count_parameters(model_shape(known_configs()[shape["config"]], place=name, name=name))
    model = trained_model(name)
    assert model.parameters == pytest.approx(counts.total, rel=5e-4)
    assert model.active == pytest.approx(counts.active, rel=5e-4)
    assert model.moe == (model.experts > 0)


@pytest.mark.parametrize("name", [n for n in listed_models()["shapes"] if SIZE.search(n)])
def test_parameters_are_those_that_the_name_states(name: str) -> None:
    """Within 5 %, or the name leaves the fraction out: model cards give Qwen2.5-7B 7.61 billion."""
    stated = SIZE.search(name)
    assert stated is not None
    config = listed_models()["shapes"][name]["config"]
    total = count_parameters(model_shape(known_configs()[config], place=name, name=name)).total
    rounded_down = str(int(total / 1e9)) == stated[1]
    assert rounded_down or total / 1e9 == pytest.approx(float(stated[1]), rel=0.05)


@pytest.mark.parametrize(
    ("model", "gpu", "command"),
    [
        ("Some/Model", "h100", "heddle profile from-config Some/Model --gpu h100 -o FILE.json"),
        ("qwen9", "", "heddle profile from-config CONFIG.json --gpu GPU -o FILE.json"),
        ("Qwen/Qwen3-8B", "l4", "heddle profile from-config Qwen/Qwen3-8B --gpu l4 -o FILE.json"),
        ("deepseek-v3", "l40s", "heddle profile from-config CONFIG.json --gpu l40s -o FILE.json"),
    ],
)
def test_what_is_not_shipped_is_answered_with_the_command_that_makes_it(
    model: str, gpu: str, command: str
) -> None:
    with pytest.raises(ProfileError, match=command):
        load_profile(model, gpu)


@pytest.mark.parametrize(
    ("model", "shape", "precision", "profile"),
    [
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3", "fp8", "deepseek-v3"),
        ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "deepseek-v3", "nvfp4", "deepseek-v3-nvfp4"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2.5", "int4", "kimi-k2.5"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2", "fp8", "kimi-k2.5-fp8"),
        ("nvidia/Kimi-K2-Thinking-NVFP4", "kimi-k2.5", "nvfp4", "kimi-k2.5-nvfp4"),
        ("MiniMaxAI/MiniMax-M2", "minimax-m2.5", "fp8", "minimax-m2.5"),
        ("Qwen/Qwen3-14B-AWQ", "qwen3-14b", "int4", "qwen3-14b-int4"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2.5-7b", "int8", "qwen2.5-7b-int8"),
        ("cpatonn/Qwen3-30B-A3B-AWQ-8bit", "qwen3-30b-a3b", "int8", "qwen3-30b-a3b-int8"),
        ("Some/Qwen3-14B-GPTQ-W8A16", "qwen3-14b", "int8", "qwen3-14b-int8"),
        ("Some/Qwen3-14B-FP8-W8A8", "qwen3-14b", "fp8", "qwen3-14b-fp8"),
        ("RedHatAI/Qwen3-8B-FP8_dynamic", "qwen3-8b", "fp8", "qwen3-8b-fp8"),
        ("RedHatAI/Qwen3-32B-NVFP4A16", "qwen3-32b", "nvfp4", "qwen3-32b-nvfp4"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b", "bf16", "llama-3.1-70b"),
        ("deepseek-ai/DeepSeek-V3.2-Speciale", "deepseek-v3.2", "fp8", "deepseek-v3.2"),
        ("deepseek-ai/DeepSeek-R1-Zero", "deepseek-v3", "fp8", "deepseek-v3"),
        (
            "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
            "mistral-small-3.1-24b",
            "bf16",
            "mistral-small-3.1-24b",
        ),
        ("mistralai/Devstral-Small-2507", "mistral-small-24b", "bf16", "mistral-small-24b"),
        (
            "mistralai/Magistral-Small-2509",
            "mistral-small-3.1-24b",
            "bf16",
            "mistral-small-3.1-24b",
        ),
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5-7b", "bf16", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-7B-Instruct-1M", "qwen2.5-7b", "bf16", "qwen2.5-7b"),
        ("qwen3-coder-30b", "qwen3-30b-a3b", "bf16", "qwen3-30b-a3b"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "llama-3.1-8b", "bf16", "llama-3.1-8b"),
        ("allenai/Llama-3.1-Tulu-3-8B", "llama-3.1-8b", "bf16", "llama-3.1-8b"),
    ],
)
def test_a_name_states_shape_and_precision(
    model: str, shape: str, precision: str, profile: str
) -> None:
    found = known_model(model)
    assert found is not None
    assert (found.shape, found.precision, found.profile) == (shape, precision, profile)


def test_a_name_of_no_known_shape_stands_for_nothing() -> None:
    assert known_model("Some/Model-7B-FP8") is None
    assert known_model("Qwen/Qwen3-8B-GGUF") is None


def test_every_id_and_shape_names_a_source_with_a_date() -> None:
    listed = listed_models()
    assert len(listed["ids"]) == 100
    stated = [*listed["ids"].values(), *(shape["source"] for shape in listed["shapes"].values())]
    assert {each.partition(":")[0] for each in stated} == listed["sources"].keys()
    assert all(source["what"] and source["read"] for source in listed["sources"].values())
