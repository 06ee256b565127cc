"""Models of `heddle_sim/models.json`: their shapes, and the profiles that their ids give."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from heddle_calibrate.roofline.by_name import profile_by_name
from heddle_calibrate.roofline.memory import weights_read_bytes
from heddle_sim.known_models import known_config, known_configs
from heddle_sim.model_config import model_shape
from heddle_sim.model_names import known_model, listed_models
from heddle_sim.model_shape import ModelShape, Precisions
from heddle_sim.profile_files import Profile, ProfileError, known_profiles, load_profile

SHAPES = listed_models()["shapes"]
GPUS = ("b200", "b300")


def shape(config: str) -> ModelShape:
    return model_shape(known_config(config), place=config, name="")


def sizes(model: ModelShape) -> ModelShape:
    """The shape without what its precision, heads for drafts and notes change."""
    head_dim = model.head_dim if model.attention is None else 0  # latent attention has its own
    plain = replace(model, precisions=Precisions(), kv_element_bytes=2, head_dim=head_dim)
    return replace(plain, int4_group=128, mtp_layers=0, notes=())


@cache
def found() -> Mapping[str, Profile]:
    """The first profile on `GPUS` of each listed id that has one."""
    profiles = {}
    for model in listed_models()["ids"]:
        for gpu in GPUS:
            with suppress(ProfileError):
                profiles[model] = profile_by_name(model, gpu)
                break
    return profiles


@pytest.mark.parametrize("config", [c for c in known_configs() if known_model(c)])
def test_models_under_one_shape_have_its_sizes(config: str) -> None:
    known = known_model(config)
    assert known is not None
    like = SHAPES[known.shape].get("like", known.shape)
    assert sizes(shape(config)) == sizes(shape(SHAPES[like]["config"]))


@pytest.mark.parametrize("name", [n for n in SHAPES if (n, "b200") in known_profiles()])
def test_a_shipped_profile_has_the_sizes_of_its_shape(name: str) -> None:
    model, profile = shape(SHAPES[name]["config"]), load_profile(name, "b200")
    assert profile.experts == (model.experts.count if model.experts is not None else 0)
    assert profile.kv_heads == (1 if model.attention is not None else model.kv_heads)
    elements = model.kv_bytes_per_token() / model.kv_element_bytes
    assert profile.kv_bytes_per_token in (elements, 2 * elements)
    if model.experts is None:
        assert profile.roofline is not None
        assert profile.roofline.weights_read_bytes == pytest.approx(weights_read_bytes(model))


def test_most_listed_ids_give_a_profile() -> None:
    packages = Counter(profile.source.package for profile in found().values())
    assert packages == {"aiconfigurator-core": 40, "heddle roofline": 47}


def test_a_profile_by_name_has_the_precision_of_the_id() -> None:
    for model, profile in found().items():
        known = known_model(model)
        assert known is not None
        stated = profile.source.precision.split("+")[0].replace("bfloat16", "bf16")
        assert stated == known.precision, model


def test_a_quantised_model_takes_its_own_profile_or_the_roofline_and_says_so() -> None:
    assert profile_by_name("nvidia/Llama-3.3-70B-Instruct-NVFP4", "b200").derived == ""
    made = profile_by_name("Qwen/Qwen3-14B-AWQ", "h100")
    assert (made.model, made.source.precision) == ("qwen3-14b-awq", "int4")
    said = "no shipped profile of qwen3-14b in int4 on h100: made of its shape by the roofline"
    assert made.source.note == said
    assert made.errors["roofline"]["expected"]["mean_pct"] > 0
    plain = profile_by_name("Qwen/Qwen3-14B", "h100")
    assert made.table(1).base_s[1] < plain.table(1).base_s[1]


def test_a_shipped_model_on_another_class_is_a_rooflines() -> None:
    made = profile_by_name("Qwen/Qwen3-8B", "rtx-pro-6000")
    assert made.derived
    assert "no shipped profile of qwen3-8b in bf16 on rtx-pro-6000, but on a100" in made.source.note


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [
        ("Some/Model", "h100", "heddle profile from-config Some/Model --gpu h100"),
        ("Qwen/Qwen2.5-8B", "h100", "ids of repositories like it: Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen3-14B-GPTQ-Int8", "h100", "weights in int8 are not modelled"),
        ("Qwen/Qwen3-8B", "h1000", "unknown GPU 'h1000'"),
        (
            "Qwen/Qwen3-8B",
            "mi355x",
            "not modelled: efficiencies and host time are of NVIDIA",
        ),
        ("meta-llama/Meta-Llama-3.1-405B", "l40s", "leave no memory for KV"),
        ("Qwen/Qwen3-8B", "", "unknown GPU"),
    ],
)
def test_what_has_no_profile_is_refused_with_the_reason(model: str, gpu: str, said: str) -> None:
    with pytest.raises(ProfileError) as caught:
        profile_by_name(model, gpu)
    assert said in str(caught.value)
