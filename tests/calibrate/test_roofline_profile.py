"""Profiles from a configuration."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heddle_calibrate.fit.from_aiconfigurator import EstimatorError
from heddle_calibrate.profiles import encode_profile
from heddle_calibrate.roofline import from_config
from heddle_calibrate.roofline.efficiency import shipped_efficiencies
from heddle_calibrate.roofline.from_config import ConfigRequest, profile_from_config
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.locate import find_model
from heddle_calibrate.roofline.operators import decode_iterations
from heddle_calibrate.roofline.profile import (
    EXPERTS_HOST,
    HOPPER_4BIT_PROMPTS,
    HOPPER_FP8,
    LATENT,
    RooflineError,
    error_statement,
    gpu_class,
    layouts,
    measured_factors,
    profile_from_shape,
    step_seconds,
)
from heddle_core.ids import EngineShape
from heddle_sim.config_fields import ModelConfigError
from heddle_sim.known_models import known_config
from heddle_sim.model_config import model_shape
from heddle_sim.model_shape import ModelShape
from heddle_sim.profile_files import Profile, load_profile, read_profile


def request(model: str, gpu: str, **given: Any) -> ConfigRequest:
    return ConfigRequest(model=model, gpu=gpu, source="roofline", **given)


def made(model: str, gpu: str, **given: Any) -> Profile:
    return profile_from_config(request(model, gpu, **given)).profile


def step_ms(profile: Profile, tp: int, batch: int, context: int) -> float:
    table = profile.table(tp, max_batch=256)
    return 1e3 * (table.base_s[batch] + table.per_context_s[batch] * batch * context)


def test_a_profile_is_a_file_that_reads_back(tmp_path: Path) -> None:
    profile = made("Qwen/Qwen3-30B-A3B", "h20", expert_parallel=True)
    path = tmp_path / "mine.json"
    path.write_bytes(encode_profile(profile))
    again = read_profile(path)
    assert again == read_profile(path)
    assert (again.model, again.gpu, again.experts) == ("qwen3-30b-a3b", "h20", 128)
    assert again.kv_bytes_per_token == 98_304
    assert again.shape(4) == EngineShape("h20", 4, ep=4)
    assert again.gpu_label == "h20 (derived)"
    assert again.source.package == "heddle roofline"
    assert again.host.per_step_s == EXPERTS_HOST.per_step_s
    left_out = again.errors["roofline"]["leave_one_class_out"]["decode"]
    assert left_out["mean_pct"] < 15
    assert again.errors["roofline"]["expected"]["mean_pct"] == left_out["mean_pct"]


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-8B"])
@pytest.mark.parametrize("gpu", ["h100", "a100", "b200"])
def test_the_roofline_is_near_the_shipped_profile(model: str, gpu: str) -> None:
    profile, shipped = made(model, gpu), load_profile(model, gpu)
    for tp in shipped.tps:
        for batch, context in ((1, 1024), (16, 8192), (128, 4096)):
            ratio = step_ms(profile, tp, batch, context) / step_ms(shipped, tp, batch, context)
            assert 0.85 < ratio < 1.15, (tp, batch, context)


@pytest.mark.parametrize(
    ("model", "shipped", "gpu", "bound"),
    [
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b", "h100", 0.12),
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b", "l40s", 0.15),
        ("moonshotai/Kimi-K2.5", "kimi-k2.5", "h200", 0.20),
    ],
)
def test_models_that_the_fit_never_saw_are_near_their_shipped_profiles(
    model: str, shipped: str, gpu: str, bound: float
) -> None:
    profile = made(model, gpu)
    # Of a dense model kernel times alone: what measured runs add to it is not in a roofline.
    other = replace(load_profile(shipped, gpu), host=profile.host)
    other = other if profile.experts else replace(other, kernel_factors=None)
    errors = [
        abs(step_ms(profile, tp, batch, context) / step_ms(other, tp, batch, context) - 1)
        for tp in sorted({*profile.tps} & {*other.tps})
        for batch in (1, 8, 64, 128)
        for context in (1024, 8192)
    ]
    assert np.mean(errors) < bound


def test_the_curve_of_the_file_is_the_sum_of_the_operators() -> None:
    model = model_shape(known_config("Qwen3-8B"), place="", name="qwen3-8b")
    h200, tp2 = GPU_CLASSES["h200"], EngineShape("h200", 2)
    profile = profile_from_shape(model, h200, [tp2])
    summed = step_seconds(model, tp2, h200, decode_iterations(np.array([64.0]), np.array([8192.0])))
    kernels = sum(float(s[0]) for s in summed.values())
    host = profile.host.per_step_s + 64 * profile.host.per_running_s
    assert step_ms(profile, 2, 64, 8192) == pytest.approx(1e3 * (kernels + host), rel=1e-3)


def test_fp8_kv_halves_its_bytes_and_fp8_weights_leave_more_room() -> None:
    plain = made("Qwen/Qwen3-32B", "h100")
    kv = made("Qwen/Qwen3-32B", "h100", fp8_kv=True)
    weights = made("Qwen/Qwen3-32B", "h100", precision="fp8")
    assert kv.kv_bytes_per_token == plain.kv_bytes_per_token / 2
    assert kv.at(2).kv_capacity_tokens == pytest.approx(2 * plain.at(2).kv_capacity_tokens, abs=2)
    assert weights.at(2).kv_capacity_tokens > 1.3 * plain.at(2).kv_capacity_tokens
    assert step_ms(weights, 1, 1, 1024) < 0.7 * step_ms(plain, 1, 1, 1024)
    assert (plain.source.precision, weights.source.precision) == ("bfloat16", "fp8")


def test_attention_ranks_have_their_own_tables() -> None:
    profile = made(
        "deepseek-ai/DeepSeek-V3", "h200", tps=(1,), attention_dp=8, expert_parallel=True
    )
    assert profile.shape(1) == EngineShape("h200", 1, ep=8, dp=8)
    assert profile.table(1).kv_capacity_tokens == 8 * profile.at(1).kv_capacity_tokens


def test_a_layout_that_does_not_fit_is_refused_with_the_reason() -> None:
    profile = made("Qwen/Qwen3-32B", "l40s")
    assert profile.tps == (2, 4, 8)
    assert profile.refused["1"].startswith("its weights, 65.5 GB on each GPU of 47.7 GB, leave no")
    nodes = made("deepseek-ai/DeepSeek-V3", "h200", tps=(8, 16))
    assert "16 GPUs are more than the 8 that h200 links in a node" in nodes.refused["16"]


@pytest.mark.parametrize(
    ("model", "gpu", "given", "said"),
    [
        ("deepseek-ai/DeepSeek-V3", "l4", {}, "runs with none of these layouts .*leave no memory"),
        ("Qwen/Qwen3-8B", "h200", {"tps": (3,)}, "32 attention heads do not divide over TP 3"),
        ("Qwen/Qwen3-8B", "tpu", {}, "no data sheet of the GPU class 'tpu'. Known: a100"),
        (
            "Qwen/Qwen3-8B",
            "h200",
            {"expert_parallel": True},
            "is a dense model: leave",
        ),
        ("Qwen/Qwen3-8B", "h200", {"attention_dp": 2}, "is a dense model: leave"),
        (
            "deepseek-ai/DeepSeek-V3",
            "h200",
            {"tps": (1,), "attention_dp": 7, "expert_parallel": True},
            "256 experts do not divide over 7 GPUs; numbers of GPUs that divide: 1, 2, 4, 8",
        ),
    ],
)
def test_what_cannot_run_is_refused(model: str, gpu: str, given: Any, said: str) -> None:
    with pytest.raises(RooflineError, match=said):
        made(model, gpu, **given)


def test_the_stated_error_is_of_models_or_of_classes_left_out() -> None:
    h100, h20 = error_statement("h100"), error_statement("h20")
    assert (h100.left_out, h20.left_out) == ("model", "class")
    assert h100.mean_pct < 15
    assert h100.class_pct is not None
    assert h20.mean_pct > h100.mean_pct
    assert h20.class_pct is None
    prompts = shipped_efficiencies().errors["leave_one_model_out"]["prefill"]
    assert h100.prompt_mean_pct == prompts["mean_pct"]
    assert h100.prompt_p90_pct == prompts["p90_pct"]
    assert h20.prompt_mean_pct > h100.prompt_mean_pct


def test_classes_have_names_in_any_case() -> None:
    assert gpu_class("H200_SXM").name == "h200"
    with pytest.raises(RooflineError, match="heddle profile measure"):
        gpu_class("")


def test_layouts_spread_experts_where_there_are_several_gpus() -> None:
    moe = model_shape(known_config("Qwen3-30B-A3B"), place="", name="")
    assert layouts(moe, "h200", (1, 2)) == [
        EngineShape("h200", 1),
        EngineShape("h200", 2),
        EngineShape("h200", 2, ep=2),
    ]
    dense = model_shape(known_config("Qwen3-8B"), place="", name="")
    assert layouts(dense, "h200", (1, 2)) == [EngineShape("h200", 1), EngineShape("h200", 2)]


# -- kernel times of AIConfigurator first ----------------------------------------------------------


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernel times for everything: those of a shipped profile."""
    queried: list[str] = []

    def fit_shapes(model: str, gpu: str, *_: object, name: str) -> Profile:
        queried.append(model)
        return load_profile("qwen3-8b", gpu)

    monkeypatch.setattr(from_config, "fit_shapes", fit_shapes)
    return queried


@pytest.mark.parametrize("source", ["auto", "aiconfigurator"])
def test_kernel_times_are_queried_first(package: list[str], source: Any) -> None:
    found = profile_from_config(ConfigRequest(model="Qwen/Qwen3-8B", gpu="h200", source=source))
    assert found.source == "aiconfigurator"
    assert found.profile.source.package == "aiconfigurator-core"
    assert package == ["Qwen/Qwen3-8B"]


def test_the_roofline_can_be_chosen(package: list[str]) -> None:
    assert profile_from_config(request("Qwen/Qwen3-8B", "h200")).source == "roofline"
    assert package == []


def test_a_precision_of_ones_own_takes_the_roofline(package: list[str]) -> None:
    own = ConfigRequest(model="Qwen/Qwen3-8B", gpu="h200", precision="fp8")
    found = profile_from_config(own)
    assert found.source == "roofline"
    assert "profile.precision" in found.why
    assert package == []


def test_without_times_in_the_package_the_roofline_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: object, **__: object) -> Profile:
        raise EstimatorError("no such model")

    monkeypatch.setattr(from_config, "fit_shapes", none)
    found = profile_from_config(ConfigRequest(model="Qwen/Qwen3-8B", gpu="h200"))
    assert (found.source, found.why) == ("roofline", "no such model")
    with pytest.raises(EstimatorError):
        profile_from_config(
            ConfigRequest(model="Qwen/Qwen3-8B", gpu="h200", source="aiconfigurator")
        )


@pytest.mark.parametrize("error", [ModelConfigError, RooflineError, EstimatorError])
def test_errors_of_users_are_known_to_the_command_line(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


def test_models_with_experts_have_a_host_time_of_their_own() -> None:
    dense, experts = (
        profile_from_config(ConfigRequest(model=model, gpu="h200", source="roofline")).profile
        for model in ("Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B")
    )
    assert dense.host.per_step_s > experts.host.per_step_s == EXPERTS_HOST.per_step_s
    assert "577 published runs" in experts.host.measured_on
    assert "on 592, these among them" in experts.host.measured_on
    assert "577 published runs" not in dense.host.measured_on


@pytest.mark.parametrize(
    ("model", "gpu", "decode", "prompts"),
    [
        ("Qwen/Qwen3-235B-A22B-FP8", "h200", *HOPPER_FP8),
        ("Qwen/Qwen3-235B-A22B-FP8", "b200", 1.0, 1.0),
        ("deepseek-ai/DeepSeek-R1", "h200", *LATENT),
        ("moonshotai/Kimi-K2.5", "h200", LATENT[0], HOPPER_4BIT_PROMPTS),
        ("openai/gpt-oss-120b", "h100", 1.0, HOPPER_4BIT_PROMPTS),
        ("nvidia/Qwen3-235B-A22B-NVFP4", "h200", 1.0, HOPPER_4BIT_PROMPTS),
        ("openai/gpt-oss-120b", "b200", 1.0, 1.0),
        ("Qwen/Qwen3-32B-FP8", "h200", 1.0, 1.0),
    ],
)
def test_kinds_that_measured_runs_differ_by_have_factors(
    model: str, gpu: str, decode: float, prompts: float
) -> None:
    shape, _ = find_model(model)
    assert measured_factors(shape, gpu) == (decode, prompts)
    if shape.experts is None:
        return
    layout = [EngineShape(gpu, 8, ep=8)]
    plain = profile_from_shape(shape, GPU_CLASSES[gpu], layout, factors=(1.0, 1.0))
    tables = [p.tables["8ep8"] for p in (made_of(shape, gpu, layout), plain)]
    steps = [t.decode.base_ms[1] for t in tables]
    whole = [t.decode.base_ms[0] + t.prefill.ms[-1] for t in tables]
    assert steps[0] == pytest.approx(decode * steps[1], rel=0.01)
    assert whole[0] == pytest.approx(prompts * whole[1], rel=0.01)


def made_of(shape: ModelShape, gpu: str, layouts: list[EngineShape]) -> Profile:
    return profile_from_shape(shape, GPU_CLASSES[gpu], layouts)


def test_gpus_on_pcie_are_slower_together_than_those_on_nvlink() -> None:
    tables_of = {
        gpu: made("Qwen/Qwen3-32B", gpu, tps=(1, 8)).tables for gpu in ("h100", "h100-pcie")
    }
    eight = {gpu: tables["8"].prefill.ms[-1] for gpu, tables in tables_of.items()}
    one = {gpu: tables["1"].prefill.ms[-1] for gpu, tables in tables_of.items()}
    assert eight["h100"] < one["h100"] / 3
    assert eight["h100-pcie"] > one["h100-pcie"] / 2
