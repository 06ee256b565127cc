"""`heddle profile`: profiles from a configuration, and those that are shipped."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle_calibrate.roofline.efficiency import shipped_efficiencies
from heddle_sim.known_models import known_config
from heddle_sim.profile_files import PROFILE_FOLDER, load_profile, read_profile
from tests.app.journals import ONE_RUN, Heddle


def done(heddle: Heddle, *args: object) -> str:
    result = heddle("profile", *args)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def test_from_config_states_operators_capacity_and_error(heddle: Heddle, tmp_path: Path) -> None:
    folder = tmp_path / "Mine-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(known_config("Qwen3-8B"))))
    args = (
        "from-config",
        folder,
        "--gpu",
        "h200",
        "--set",
        "profile.source=roofline",
        "--tp",
        "1,2",
    )
    said = done(heddle, *args, "-o", "mine.json")
    assert "8.19 billion parameters; 147,456 bytes of KV per token" in said
    assert "attention output" in said
    assert "cross-validated on models that were left out of the fit: mean" in said
    assert "use it as --model mine.json" in said
    assert read_profile(Path("mine.json")).model == "mine-8b"
    again = heddle("profile", *args, "-o", "mine.json")
    assert again.exit_code == 2
    assert "--force" in again.stderr


def test_a_run_states_the_cross_validated_error_of_its_profile(heddle: Heddle, trace: Path) -> None:
    args = ("Qwen/Qwen3-30B-A3B", "--gpu", "h200", "--set", "cluster.attention_dp=2", "--tp", 1)
    said = done(heddle, "from-config", *args, "--set", "profile.source=roofline", "-o", "mine.json")
    assert "use it as --model mine.json --set cluster.attention_dp=2 --tp 1" in said
    run = ("--model", "mine.json", "--set", "cluster.attention_dp=2", "--tp", 1, "--gpus", 2)
    result = heddle(*ONE_RUN, trace, *run)
    assert result.exit_code == 0, result.output
    left_out = shipped_efficiencies().errors["leave_one_model_out"]["decode"]["mean_pct"]
    head = " ".join(result.stdout.split())
    assert f"decode error {left_out:.1f} % mean" in head
    assert "on models left out of its fit" in head
    assert "2 x h200 (derived)" in result.stdout
    prompts = shipped_efficiencies().errors["leave_one_model_out"]["prefill"]["mean_pct"]
    assert f"prompts {prompts:.1f} %" in head
    assert f"error of a prompt alone, likewise, over all classes: mean {prompts:g} %" in said
    kept = read_profile(Path("mine.json")).errors["roofline"]["expected"]
    assert kept["prompt_mean_pct"] == prompts


def test_from_config_as_json(heddle: Heddle) -> None:
    args = (
        "from-config",
        "Qwen/Qwen3-30B-A3B",
        "--gpu",
        "gb200",
        "--set",
        "cluster.expert_parallel=on",
        "--set",
        "profile.source=roofline",
    )
    report = json.loads(done(heddle, *args, "--json"))
    assert report["schema"] == "heddle.from-config/1"
    assert report["kv_precision"] == "bf16"
    assert set(report["kv_capacity_tokens"]) == {"1", "2", "2ep2", "4", "4ep4", "8", "8ep8"}
    for shares in report["operators"].values():
        assert sum(shares.values()) == pytest.approx(1.0)
    assert report["errors"]["roofline"]["leave_one_model_out"]["decode"]["mean_pct"] < 15


@pytest.mark.parametrize(
    ("text", "args", "said"),
    [
        ("{", (), "not JSON"),
        ('{"architectures": ["Foo"]}', (), "Foo is an unknown architecture"),
        ('{"architectures": ["LlamaForCausalLM"]}', (), "num_hidden_layers is missing"),
        (None, ("--gpu", "tpu"), "no data sheet of the GPU class 'tpu'"),
        (None, ("--gpu", "l4", "--tp", "3"), "do not divide over TP 3"),
        (None, ("--tp", "0"), "no list such as 4,8"),
        (None, ("-o", "mine.txt"), "ends in .json"),
        (None, ("-o", "nowhere/mine.json"), "nowhere: no such folder"),
    ],
)
def test_bad_input_is_one_message_with_status_2(
    refused: Callable[..., str], tmp_path: Path, text: str | None, args: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dict(known_config("Qwen3-8B"))) if text is None else text)
    gpu = () if "--gpu" in args else ("--gpu", "h200")
    assert said in refused(
        "profile", "from-config", file, *gpu, "--set", "profile.source=roofline", *args
    )


def test_shipped_profiles_are_listed_and_shown(heddle: Heddle) -> None:
    listed = done(heddle, "list")
    assert "qwen3-8b" in listed
    assert "h20 (derived)" in listed
    rows = json.loads(done(heddle, "list", "--json"))["profiles"]
    assert {"model", "gpu", "derived", "precision", "kv_precision", "layouts"} == set(rows[0])
    shown = done(heddle, "show", "Qwen/Qwen3-8B", "h100")
    assert "KV tokens" in shown
    assert "KV in bf16: 147,456 bytes a token" in shown
    assert "host time" in shown
    assert "by release" not in shown
    shown = done(heddle, "show", "qwen3-8b", "h200")
    assert "host time 0.000 ms a step, 0.000 ms a running sequence, 2.500 ms a prompt" in shown
    assert "host time of a step by release: 0.12.0 1.070 ms, 0.26.0 0.000 ms" in shown
    assert "slower than" not in shown


def test_layouts_that_are_slower_than_on_a_lesser_class_are_named(heddle: Heddle) -> None:
    shown = done(heddle, "show", "gpt-oss-120b", "gb200")
    (line,) = [line for line in shown.splitlines() if line.startswith("slower than b200")]
    found = re.search(r"TP 8 (\d+) %", line)
    assert found is not None
    step_ms = [
        load_profile("gpt-oss-120b", gpu).table(8).base_s[1] * 1e3 for gpu in ("gb200", "b200")
    ]
    assert int(found[1]) == pytest.approx((step_ms[0] / step_ms[1] - 1) * 100, abs=2)
    assert "No figure of the data sheets explains it" in line


def test_a_run_names_the_error_on_measured_runs(heddle: Heddle, trace: Path) -> None:
    result = heddle(*ONE_RUN, trace, "--model", "gpt-oss-120b", "--gpu", "h200", "--gpus", 2)
    assert result.exit_code == 0, result.output
    assert "TPOT of 45 measured runs off by 2.52 %, and 4.14 % without" in result.stdout


def test_an_unknown_model_is_answered_with_the_command_that_makes_it(
    refused: Callable[..., str],
) -> None:
    said = refused("profile", "show", "Some/Model", "h100")
    assert "heddle profile from-config Some/Model --gpu h100 -o FILE.json" in said


def test_a_profile_file_is_not_shown_as_one_of_another_class(refused: Callable[..., str]) -> None:
    Path("mine.json").write_bytes((PROFILE_FOLDER / "qwen3-8b.h100.json").read_bytes())
    said = refused("profile", "show", "mine.json", "h200")
    assert "mine.json is a profile of h100, not of h200" in said


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "h100", "error class: roofline, decode error 9.5 % mean"),
        ("deepseek-ai/DeepSeek-R1", "h200", "error class: table, decode error"),
        ("Qwen/Qwen3-32B", "h100", "error class: measured, TPOT of 20 measured runs"),
    ],
)
def test_a_profile_of_an_id_is_shown_with_its_error_class(
    heddle: Heddle, model: str, gpu: str, said: str
) -> None:
    assert said in done(heddle, "show", model, gpu)
