"""Models of `heddle_sim/models.json`: their shapes, and the profiles that their ids give."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import layout_profile, load_profiles
from heddle_calibrate.roofline.by_name import profile_by_name
from heddle_calibrate.roofline.kv_precision import kv_dtype_of, with_kv_dtype
from heddle_calibrate.roofline.memory import weights_read_bytes
from heddle_calibrate.roofline.slower_layouts import shown_seconds
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
    return replace(plain, int4_group=128, fp8_block=0, mtp_layers=0, notes=())


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


@pytest.mark.parametrize("config", [c for c in known_configs() if known_model(c)])
def test_kv_of_a_shipped_profile_is_that_of_the_configuration(config: str) -> None:
    for gpu in (*GPUS, "h200"):
        with suppress(ProfileError):
            profile = load_profile(config, gpu)
            assert profile.kv_bytes_per_token == shape(config).kv_bytes_per_token()


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


@pytest.mark.parametrize(
    ("model", "gpu", "missing", "wide"),
    [
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "h200", "8", "320"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", "h200", "8", "64"),
        ("Qwen/Qwen3-4B-FP8", "h100", "8", "1216"),
        ("qwen3-4b-fp8", "h100", "8", "1216"),
    ],
)
def test_fp8_is_not_cut_through_blocks_that_share_a_scale(
    model: str, gpu: str, missing: str, wide: str
) -> None:
    profile = profile_by_name(model, gpu)
    assert missing not in profile.tables
    assert "4" in profile.tables
    assert f"are {wide}, no multiple of the 128 that share a scale" in profile.refused[missing]


def test_fp8_with_a_scale_for_each_channel_is_cut_anywhere() -> None:
    assert "8" in profile_by_name("RedHatAI/Qwen3-4B-FP8-dynamic", "h100").tables
    assert "8" in profile_by_name("zai-org/GLM-4.5-Air-FP8", "h200").tables


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [
        ("RedHatAI/Llama-3.3-70B-Instruct-NVFP4A16", "b200", "activations of the repository have"),
        ("nvidia/DeepSeek-R1-0528-FP4", "b200", "KV is taken in bf16: set cluster.kv_dtype = fp8"),
        ("nvidia/Qwen3-32B-FP8", "h100", "KV is taken in bf16: set cluster.kv_dtype = fp8"),
        ("nvidia/Qwen3-32B-FP8", "h100", "scales of blocks of 128, and not of a tensor"),
    ],
)
def test_what_a_quantised_repository_has_beside_its_weights_is_said(
    model: str, gpu: str, said: str
) -> None:
    assert said in profile_by_name(model, gpu).source.note


def test_repositories_that_a_profile_has_as_they_are_have_no_such_note() -> None:
    for model in ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "RedHatAI/Llama-3.3-70B-Instruct-NVFP4"):
        note = profile_by_name(model, "b200").source.note
        assert "activations" not in note
        assert "is taken" not in note


@pytest.mark.parametrize(
    ("model", "shipped", "other", "kv"),
    [
        ("llama-3.1-70b-fp8", "gb200", "gb300", "fp8"),
        ("llama-3.1-8b-fp8", "h200", "h20", "fp8"),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "b200", "h200", "fp8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-NVFP4", "b200", "h200", "bf16"),
        ("qwen3-32b-fp8", "h100", "l40s", "bf16"),
    ],
)
def test_kv_by_the_roofline_has_the_precision_of_shipped_profiles(
    model: str, shipped: str, other: str, kv: str
) -> None:
    profiles = [profile_by_name(model, gpu) for gpu in (shipped, other)]
    assert [kv_dtype_of(profile) for profile in profiles] == [kv, kv]
    assert profiles[0].kv_bytes_per_token == profiles[1].kv_bytes_per_token


@pytest.mark.parametrize(
    ("model", "int4"),
    [
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "ibnzterrell/Llama-3.3-70B-Instruct-AWQ"),
        ("nvidia/Qwen3-235B-A22B-NVFP4", "Qwen/Qwen3-235B-A22B-GPTQ-Int4"),
    ],
)
def test_without_fp4_units_prompts_of_nvfp4_take_as_long_as_those_of_int4(
    model: str, int4: str
) -> None:
    for gpu in ("h200", "l40s", "h20"):
        narrow, other = (shown_seconds(profile_by_name(m, gpu), "8") for m in (model, int4))
        assert narrow[-1] == pytest.approx(other[-1], rel=0.02)
    with_units = shown_seconds(profile_by_name(model, "b300"), "8")
    wide = shown_seconds(profile_by_name(int4, "b300"), "8")
    assert with_units[-1] < wide[-1]


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
        ("cpatonn/Qwen3-30B-A3B-2507-AWQ-8bit", "h200", "weights in int8 are not modelled"),
        ("Qwen/Qwen3-8B", "rtx4090", "l40s, l40, l4, a10g, rtx-pro-6000"),
        ("Qwen/Qwen3-8B", "a100-40gb", "did you mean 'a100'?"),
        ("Qwen/Qwen3.5-9B", "h200", "its config.json is not shipped: download it"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "h200", "chunked attention"),
        (
            "Qwen/Qwen3-8B",
            "mi355x",
            "not modelled: efficiencies and host time are of NVIDIA",
        ),
        ("meta-llama/Meta-Llama-3.1-405B", "l40s", "leave no memory for KV"),
        ("Qwen/Qwen3-8B", "", "name a GPU class after the model: a100"),
    ],
)
def test_what_has_no_profile_is_refused_with_the_reason(model: str, gpu: str, said: str) -> None:
    with pytest.raises(ProfileError) as caught:
        profile_by_name(model, gpu)
    assert said in str(caught.value)


@pytest.mark.parametrize("gpu", ["RTX PRO 6000", " Rtx-Pro-6000 "])
def test_a_gpu_class_is_known_by_its_words(gpu: str) -> None:
    assert profile_by_name("qwen3-8b", gpu).gpu == "rtx-pro-6000"


def test_a_repository_without_scales_has_kv_in_bf16_and_as_many_tokens_as_published() -> None:
    """1,429,856 with vLLM 0.11.0 and 1,391,344 with 0.11.2."""
    dynamic = profile_by_name("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "h200")
    assert kv_dtype_of(dynamic) == "bf16"
    assert dynamic.at(4).kv_capacity_tokens == pytest.approx(1_391_344, rel=0.05)
    assert "KV in bf16" in dynamic.source.note
    assert "scales of a tensor, and not of channels and tokens" in dynamic.source.note
    scaled = profile_by_name("nvidia/Llama-3.3-70B-Instruct-FP8", "h200")
    assert (kv_dtype_of(scaled), scaled.source.note) == ("fp8", "")
    unsure = profile_by_name("Some/Llama-3.3-70B-Instruct-FP8", "h200")
    assert "set cluster.kv_dtype = bf16 where config.json has no" in unsure.source.note


def test_a_cluster_sets_the_precision_of_kv() -> None:
    cluster = ClusterConfig(model="Some/Llama-3.3-70B-Instruct-FP8", gpu="h200", tp=4)
    fp8, bf16 = (
        layout_profile(replace(cluster, kv_dtype=dtype)).at(4) for dtype in ("fp8", "bf16")
    )
    assert bf16.kv_capacity_tokens == fp8.kv_capacity_tokens // 2
    assert bf16.belief.kv_capacity_tokens == fp8.belief.kv_capacity_tokens // 2
    assert bf16.belief.t2_s == pytest.approx(2 * fp8.belief.t2_s)
    assert bf16.decode.context_us == pytest.approx([2 * us for us in fp8.decode.context_us])
    assert "KV" not in layout_profile(replace(cluster, kv_dtype="fp8")).source.note
    own = replace(load_profile("qwen3-8b", "h200"), model="of-nobody")
    with pytest.raises(ProfileError, match=r"of-nobody is unknown.*profile\.kv_precision"):
        with_kv_dtype(own, "fp8")


def test_scales_of_another_form_are_named() -> None:
    note = profile_by_name("Qwen/Qwen3-32B-FP8-Static-PerTensor", "h200").source.note
    assert "FP8 with scales of blocks of 128, and not of a tensor" in note
    assert "scales" not in profile_by_name("Qwen/Qwen3-32B-FP8", "h200").source.note


@pytest.mark.parametrize("model", ["minimax-m2.5", "qwen3-235b-a22b-fp8"])
def test_experts_that_scales_forbid_to_cut_are_refused_with_the_remedy(model: str) -> None:
    cluster = ClusterConfig(model=model, gpu="h200", gpus=8, tp=8)
    with pytest.raises(
        ProfileError, match=r"are 192, no multiple of the 128.*cluster\.expert_parallel"
    ):
        load_profiles(cluster)
    assert load_profiles(replace(cluster, expert_parallel="on")).classes[0].profile.at(8)
