"""Profiles from the package that the shipped ones were made from, where it is installed."""

import json
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle_calibrate.fit.from_aiconfigurator import (
    EXPERTS_IN_NAME,
    EstimatorError,
    profile_from_aiconfigurator,
)
from heddle_sim.profile_files import load_profile, read_profile

needs_package = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None,
    reason="aiconfigurator-core is not installed (pip install 'heddle[aiconfigurator]')",
)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        if name.startswith("aiconfigurator_core"):
            raise ModuleNotFoundError(name)
        return import_module(name)

    monkeypatch.setattr("heddle_calibrate.fit.from_aiconfigurator.import_module", missing)
    with pytest.raises(EstimatorError, match=r"pip install 'heddle\[aiconfigurator\]'"):
        profile_from_aiconfigurator("qwen3-8b", "h200")


@pytest.mark.parametrize(
    "model",
    [
        "Qwen3-30B-A3B",
        "qwen3-235b-a22b-fp8",
        "gpt-oss-120b",
        "deepseek-ai/DeepSeek-V3",
        "DeepSeek-R1",
        "Mixtral-8x7B-v0.1",
    ],
)
def test_a_model_that_is_known_to_have_experts_is_refused(model: str) -> None:
    with pytest.raises(EstimatorError, match="is a mixture-of-experts model"):
        profile_from_aiconfigurator(model, "h200")


@pytest.mark.parametrize("model", ["qwen3-8b", "Llama-3.1-8B", "DeepSeek-R1-Distill-Qwen-32B"])
def test_no_dense_model_is_refused_for_its_name(model: str) -> None:
    assert EXPERTS_IN_NAME.search(model) is None


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 128},
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        {"n_routed_experts": 256},
        {"text_config": {"num_local_experts": 16}},
    ],
)
def test_a_model_folder_with_experts_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000, **config}))
    with pytest.raises(EstimatorError, match="is a mixture-of-experts model"):
        profile_from_aiconfigurator(str(tmp_path), "h200")


@pytest.mark.parametrize("config", [{}, {"num_experts": 0}, {"num_local_experts": None}])
def test_the_configuration_decides_before_the_name(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached() -> Path:
        raise EstimatorError("no experts found")

    monkeypatch.setattr("heddle_calibrate.fit.from_aiconfigurator._package", reached)
    folder = tmp_path / "Mixtral-made-dense"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EstimatorError, match="no experts found"):
        profile_from_aiconfigurator(str(folder), "h200")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_model_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EstimatorError, match=r"config\.json: .* give a model's config\.json"):
        profile_from_aiconfigurator(str(tmp_path), "h200")


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
        main,
        ["calibrate", "from-aiconfigurator", "--model", "qwen3-8b", "--gpu", "b200",
         "--tp", "1", "-o", str(out)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    b200 = read_profile(out)
    assert (b200.model, b200.gpu, b200.tps) == ("qwen3-8b", "b200", (1,))
    assert b200.roofline is None
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
        ("qwen3-32b", "l40s", None, (1,), "fits at no TP degree of 1; try others"),
        ("glm-5", "h200", None, (1,), "glm-5 is a mixture-of-experts model"),
    ],
)
def test_unknown_names_of_the_package_are_reported_with_the_known_ones(
    model: str, gpu: str, backend_version: str | None, tps: tuple[int, ...], said: str
) -> None:
    with pytest.raises(EstimatorError, match=said):
        profile_from_aiconfigurator(model, gpu, tps=tps, backend_version=backend_version)
