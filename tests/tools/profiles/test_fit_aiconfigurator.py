"""Profiles from the package that the shipped ones were made from, where it is installed."""

import json
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from heddle_calibrate.fit.from_aiconfigurator import EstimatorError
from heddle_calibrate.fit.model_config import model_spec, routed_experts, weight_precision
from heddle_sim.config_fields import ModelConfigError
from heddle_sim.profile_files import Profile, layout_name, load_profile, read_profile
from tools.profiles.__main__ import profiles
from tools.profiles.from_aiconfigurator import layouts, profile_from_aiconfigurator
from tools.profiles.shipped import make_profiles

needs_package = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None,
    reason="aiconfigurator-core is not installed (pip install 'heddle-rl[aiconfigurator]')",
)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        if name.startswith("aiconfigurator_core"):
            raise ModuleNotFoundError(name)
        return import_module(name)

    monkeypatch.setattr("heddle_calibrate.fit.from_aiconfigurator.import_module", missing)
    with pytest.raises(EstimatorError, match=r"pip install 'heddle-rl\[aiconfigurator\]'"):
        profile_from_aiconfigurator("qwen3-8b", "h200")


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"num_experts": 128}, 128),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, 8),
        ({"n_routed_experts": 256}, 256),
        ({"text_config": {"n_routed_experts": 384}}, 384),
        ({"num_local_experts": None}, 0),
        ({}, 0),
    ],
)
def test_experts_are_found_under_any_of_their_names(config: dict[str, Any], experts: int) -> None:
    assert routed_experts(config) == experts


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, "bfloat16"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "nvfp4"),
        (
            {
                "text_config": {
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}},
                    }
                }
            },
            "int4",
        ),
    ],
)
def test_the_precision_is_that_of_the_configuration(config: dict[str, Any], precision: str) -> None:
    assert weight_precision(config) == precision


def test_a_spec_counts_what_one_token_reads() -> None:
    """By hand: a small model with grouped queries, and one with MLA and a dense first layer."""
    grouped = {
        "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    spec = model_spec("m", grouped)
    attention = 16 * 8 * (4 + 2 + 2 + 4)
    assert spec.active_bytes == 2 * (2 * (attention + 2 * 3 * 16 * 32) + 16 * 100)
    assert (spec.kv_heads, spec.experts, spec.kv_share) == (2, 8, 1.0)
    latent = {
        "num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 100,
        "kv_lora_rank": 6, "q_lora_rank": 5, "qk_rope_head_dim": 2, "qk_nope_head_dim": 3,
        "v_head_dim": 4, "first_k_dense_replace": 1, "intermediate_size": 64,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32,
    }  # fmt: skip
    spec = model_spec("m", latent, "fp8")
    query = 5 * 4 * (3 + 2) + 16 * 5
    attention = query + 16 * (6 + 2) + 6 * 4 * (3 + 4) + 4 * 4 * 16
    feed_forward = 3 * 16 * 64 + 2 * 3 * 3 * 16 * 32
    assert spec.active_bytes == 3 * attention + feed_forward + 16 * 100
    assert spec.kv_heads == 1
    half = {"layer_types": ["sliding_attention", "full_attention"], "num_attention_heads": 4}
    assert model_spec("m", half).kv_share == 0.5


def test_layouts_are_those_of_the_options() -> None:
    assert [layout_name(s) for s in layouts((1, 2))] == ["1", "2"]
    spread = layouts((1, 2), expert_parallel=True, attention_dp=(1, 4))
    assert [layout_name(s) for s in spread] == ["1", "2", "2ep2", "1dp4ep4", "2dp4ep8"]
    assert [layout_name(s) for s in layouts((2,), attention_dp=(4,))] == ["2dp4"]
    assert [layout_name(s) for s in layouts((1, 8), expert_parallel=True, attention_dp=(8,))] == [
        "1dp8ep8",
        "8dp8ep64",
    ]


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_model_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError, match=r"config\.json: .* give a model's config\.json"):
        profile_from_aiconfigurator(str(tmp_path), "h200")


@pytest.mark.parametrize(
    ("experts", "options", "said"),
    [
        (128, ("--tp", "3", "--ep"), "small has 128 experts of a layer, which do not divide"),
        (128, ("--ep", "--attention-dp", "3"), "do not divide over 3 GPUs"),
        (0, ("--ep",), "small has no experts to spread: leave expert parallelism out"),
        (0, ("--attention-dp", "2"), "leave attention ranks out"),
        (0, ("--tp", "two"), "two is no list such as 4,8 of whole numbers"),
    ],
)
def test_a_layout_that_a_model_cannot_have_is_refused(
    tmp_path: Path, experts: int, options: tuple[str, ...], said: str
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps({"num_experts": experts}))
    given = ["from-aiconfigurator", "--model", str(small), "--gpu", "h200", *options]
    done = CliRunner().invoke(profiles, [*given, "-o", str(tmp_path / "p.json")])
    assert done.exit_code
    assert said in done.output
    assert not (tmp_path / "p.json").exists()


@needs_package
def test_the_shipped_profile_comes_back_from_the_same_source() -> None:
    """But for the names of the tables, which nobody needed here."""
    made = profile_from_aiconfigurator("qwen3-8b", "h200")
    shipped = load_profile("qwen3-8b", "h200")
    assert made.source.files == ()
    assert replace(made, source=shipped.source) == shipped
    assert replace(made.source, files=shipped.source.files) == shipped.source


@needs_package
def test_where_our_tables_had_no_mixed_steps_only_prompts_differ() -> None:
    made = profile_from_aiconfigurator("qwen3-32b", "l40s", tps=(1, 2))
    shipped = load_profile("qwen3-32b", "l40s")
    assert made.tps == (2,)
    assert "no memory" in made.refused["1"]
    assert made.at(2).decode.base_ms[1:] == shipped.at(2).decode.base_ms[1:]
    assert made.at(2).decode.context_us == shipped.at(2).decode.context_us
    assert made.at(2).belief == shipped.at(2).belief
    assert made.host == shipped.host
    assert made.transfer == shipped.transfer
    for tokens in (512, 2048, 8192):
        ours = shipped.table(2).prefill_s(tokens, tokens**2 / 2)
        theirs = made.table(2).prefill_s(tokens, tokens**2 / 2)
        assert theirs == pytest.approx(ours, rel=0.2)


@needs_package
def test_a_gpu_that_no_profile_ships_for_gets_one(tmp_path: Path) -> None:
    out = tmp_path / "b200.json"
    done = CliRunner().invoke(
        profiles,
        ["from-aiconfigurator", "--model", "qwen3-8b", "--gpu", "b200",
         "--tp", "1", "-o", str(out)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    b200 = read_profile(out)
    assert (b200.model, b200.gpu, b200.tps) == ("qwen3-8b", "b200", (1,))
    assert b200.roofline is not None
    h200 = load_profile("qwen3-8b", "h200").table(1)
    assert b200.table(1).base_s[64] < h200.base_s[64]
    assert b200.host.carried_over


@needs_package
def test_a_model_folder_will_do(tmp_path: Path) -> None:
    package = Path(str(import_module("aiconfigurator_core").__file__)).parent
    config = json.loads((package / "model_configs" / "Qwen--Qwen3-8B_config.json").read_text())
    folder = tmp_path / "Half-Qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 18}))
    half = profile_from_aiconfigurator(str(folder), "h200", tps=(1,))
    whole = load_profile("qwen3-8b", "h200")
    assert half.model == "half-qwen"
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    kernel_s = half.table(1).base_s[1] - half.host.per_step_s
    assert kernel_s < 0.7 * (whole.table(1).base_s[1] - whole.host.per_step_s)


@needs_package
@pytest.mark.parametrize(
    ("model", "gpu", "backend_version", "tps", "said"),
    [
        ("qwen3-9b", "h200", None, (1,), r"knows no model 'qwen3-9b'; near: .*qwen3-8b"),
        ("qwen3-8b", "h300", None, (1,), r"knows no GPU class 'h300'; near: .*h[12]00_sxm"),
        ("qwen3-8b", "h200", "0.1.0", (1,), r"no kernel times of vLLM 0.1.0 .* it has: 0.24.0"),
        ("qwen3-32b", "l40s", None, (1,), "no memory for KV in any of the layouts 1; try others"),
        ("deepseek-v3", "h200", None, (1,), "deepseek-v3 on h200: its weights leave no memory"),
        (
            "minimax-m2.5",
            "a100",
            None,
            (8,),
            "no kernel times of vLLM for any of the layouts 8",
        ),
        ("qwen3-8b", "h20", None, (1,), r"knows no GPU class 'h20'"),
    ],
)
def test_unknown_names_of_the_package_are_reported_with_the_known_ones(
    model: str, gpu: str, backend_version: str | None, tps: tuple[int, ...], said: str
) -> None:
    with pytest.raises(EstimatorError, match=said):
        profile_from_aiconfigurator(model, gpu, tps=tps, backend_version=backend_version)


def kernels(profile: Profile) -> dict[str, tuple[object, ...]]:
    """What of each layout does not change with the constants of measured runs."""
    return {
        name: (entry.kv_capacity_tokens, entry.decode, entry.prefill, entry.errors)
        for name, entry in profile.tables.items()
    }


@needs_package
@pytest.mark.parametrize("model", ["qwen3-30b-a3b-fp8", "llama-3.1-70b-nvfp4"])
def test_shipped_profiles_come_back_from_the_package(model: str) -> None:
    compared = 0
    for made in make_profiles(model):
        shipped = load_profile(made.model, made.gpu)
        assert kernels(made) == kernels(shipped), made.gpu
        assert (made.source, made.roofline) == (shipped.source, shipped.roofline)
        assert made.kv_bytes_per_token == shipped.kv_bytes_per_token
        compared += 1
    assert compared >= 3


@needs_package
def test_experts_and_ranks_are_laid_out_as_asked() -> None:
    made = profile_from_aiconfigurator(
        "qwen3-30b-a3b", "h200", tps=(1, 2), expert_parallel=True, attention_dp=(1, 4)
    )
    shipped = load_profile("qwen3-30b-a3b", "h200")
    assert list(made.tables) == ["1", "2", "2ep2", "1dp4ep4", "2dp4ep8"]
    assert all(kernels(made)[name] == kernels(shipped)[name] for name in made.tables)
