"""Our KV capacity beside what engines print, and that of profiles of latent attention."""

from dataclasses import replace

import pytest

from heddle_calibrate.roofline.locate import find_model
from heddle_calibrate.roofline.memory import reserved_bytes, weight_bytes_per_gpu
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import known_profiles, load_profile
from heddle_sim.profile_parts import release
from tools.profiles.kv_sizes import FAULTY, KvSize, kv_sizes
from tools.profiles.shipped import with_capacity

SIZES = list(kv_sizes())
SOUND = [size for size in SIZES if size.source not in FAULTY]


def test_there_are_25_published_sizes_with_sources() -> None:
    assert len(SOUND) >= 25
    assert all(size.source for size in SIZES)


@pytest.mark.parametrize("size", SOUND, ids=lambda s: f"{s.model} {s.engine.gpu} {s.version}")
def test_ours_is_within_5_percent_of_what_engines_print(size: KvSize) -> None:
    roofline, shipped = size.errors_pct
    assert abs(roofline) < 5.0
    assert shipped is None or abs(shipped) < 5.0


def test_most_sizes_are_of_shipped_profiles() -> None:
    assert sum(size.shipped is not None for size in SOUND) > 0.8 * len(SOUND)


@pytest.mark.parametrize(
    "names",
    [n for n in known_profiles() if n[0].startswith(("deepseek", "kimi", "gpt-oss"))],
    ids=".".join,
)
def test_profiles_of_latent_attention_and_of_mxfp4_have_our_capacity(
    names: tuple[str, str],
) -> None:
    profile = load_profile(*names)
    assert with_capacity(profile) == profile


def test_releases_are_compared_by_their_numbers() -> None:
    assert release("0.11.2rc1+rhai0.cuda") == (0, 11, 2)
    assert release("v0.12.0") == release(" 0.12.0 ") == release("0.12.0-beta") == (0, 12, 0)
    for nonsense in ("vllm 0.12.0", "x.12.0", "0.12 .0", "0,12,0", "nightly-5b8c", "9" * 5000):
        assert release(nonsense) == (), nonsense
    one = EngineShape("h200", 1)
    assert (
        reserved_bytes(one, "0.11.0") < reserved_bytes(one, "0.18.0") < reserved_bytes(one, "0.13")
    )
    assert reserved_bytes(one) == reserved_bytes(one, "0.26.0")


LOADED = [
    # "Model loading took": vllm-project/vllm issues 23278 (Marlin) and 33155 (Triton, with two
    # copies of scales), and myoceane.fr/index.php/ai-vllm-a100-gemma-4 (Marlin).
    ("openai/gpt-oss-120b", "h100", "0.10.1", 65.97),
    ("openai/gpt-oss-120b", "h100", "0.14.1", 64.38),
    ("openai/gpt-oss-20b", "a100", "0.19.0", 13.72),
]


@pytest.mark.parametrize(("name", "gpu", "version", "gib"), LOADED)
def test_weights_in_mxfp4_are_as_large_as_engines_log(
    name: str, gpu: str, version: str, gib: float
) -> None:
    shape, _ = find_model(name)
    ours = weight_bytes_per_gpu(shape, EngineShape(gpu, 1), version)
    assert ours / 2**30 == pytest.approx(gib, rel=0.01)


def test_what_makes_latent_vectors_is_on_every_gpu() -> None:
    shape, _ = find_model("deepseek-ai/DeepSeek-R1")
    one, eight = (weight_bytes_per_gpu(shape, EngineShape("h200", tp)) for tp in (1, 8))
    # Query and KV vectors of 1,536 + 512 + 64 numbers from 7,168 in 61 layers, in FP8.
    assert 8 * eight - one == pytest.approx(7 * 61 * 7168 * 2112)


def test_int4_weights_have_a_scale_for_each_group_of_their_configuration() -> None:
    shape, _ = find_model("moonshotai/Kimi-K2.5")
    assert shape.int4_group == 32
    layout = EngineShape("h200", 8)
    wide = weight_bytes_per_gpu(replace(shape, int4_group=128), layout)
    experts = 60 * 384 * 3 * 7168 * 2048 / 8
    assert weight_bytes_per_gpu(shape, layout) - wide == pytest.approx(experts * (2 / 32 - 2 / 128))
