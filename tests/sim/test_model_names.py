"""Names and Hugging Face ids of models."""

import pytest

from heddle_sim.model_names import short_model_name
from heddle_sim.profile_files import ProfileError, load_profile
from heddle_sim.trained_models import trained_model

KNOWN = ("qwen3-8b", "llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-70b-fp8", "qwen3-235b-a22b-fp8")


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
    ],
)
def test_an_id_stands_for_the_name_of_its_shape_and_precision(model: str, name: str) -> None:
    assert short_model_name(model, KNOWN) == name


def test_profiles_and_training_shapes_are_found_by_id() -> None:
    assert load_profile("Qwen/Qwen3-14B", "h200").model == "qwen3-14b"
    assert load_profile("meta-llama/Llama-3.1-8B-Instruct", "A100").model == "llama-3.1-8b"
    assert trained_model("Qwen/Qwen3-32B").name == "qwen3-32b"


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
