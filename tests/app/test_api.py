"""`heddle.compare`, `heddle.plan` and `heddle.loop` as a program calls them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import heddle
from heddle.cli import main
from heddle.config_error import ConfigError
from heddle_trace import synth, write_trace
from heddle_trace.errors import TraceError

ON = {"model": "qwen3-8b", "gpus": 2, "max_running": 8, "history": "none"}
SCRIPT = """
import heddle
found = heddle.compare({trace!r}, ["verl", "slime"], gpus=2, seeds=2, jobs=2, out={out!r})
print(found.best.candidate.policy)
"""


@pytest.fixture(scope="module")
def coding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four groups of four samples."""
    path = tmp_path_factory.mktemp("traces") / "some.jsonl"
    write_trace(path, synth("coding", 16, seed=5, samples_per_group=4))
    return path


def test_a_comparison_answers_as_the_command_does(
    coding: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    found = heddle.compare(coding, "verl*", out=tmp_path / "runs", seeds=2, **ON)
    words = ["compare", str(coding), "--policies", "verl*", "--seeds", "2", "--json"]
    options = [w for k, v in ON.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    done = CliRunner().invoke(main, [*words, *options])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert found.verdict == told["verdict"]
    assert found.best.candidate.policy == told["recommended"]["policy"]
    assert found.export("verl") == told["recommended"]["export"]["verl"]
    table = found.to_pandas()
    assert list(table["policy"]) == told["ranking"]
    assert table["makespan_s.mean"].is_monotonic_increasing
    html = found._repr_html_()
    assert html.startswith(f"<p><b>{found.verdict}</b></p><table")


def test_one_number_stands_for_a_list_and_a_string_for_a_path(coding: Path, tmp_path: Path):
    found = heddle.compare(str(coding), "verl", tps=2, slots=4, out=str(tmp_path), **ON)
    assert [row.policy for row in found.policies] == ["verl@tp2"]
    assert len(found.runs) == 1
    fixed = heddle.compare(
        coding, "verl*", out=tmp_path, seeds=1, model="qwen3-8b", gpus=2,
        settings={"cluster.tp": 2, "cluster.max_running": 4},
    )  # fmt: skip
    assert {row.variant.cluster.tp for row in fixed.policies} == {2}
    assert {row.variant.cluster.max_running for row in fixed.policies} == {4}
    three = heddle.compare(coding, ["verl", "slime"], out=tmp_path, **ON)
    assert len(three.runs) == 6


def test_a_plan_is_exported_and_tabled(coding: Path):
    found = heddle.plan(coding, **ON)
    assert found.verdict.startswith("Run ")
    assert found.best.makespan_s.low <= found.best.makespan_s.mean <= found.best.makespan_s.high
    assert found.to_pandas()["max_running"].eq(8).all()
    assert "tensor_model_parallel_size" in found.export("verl")
    assert "<table" in found._repr_html_()
    several = heddle.plan(coding, gpus=[1, 2], gpu="h100", dollars=50.0, model="qwen3-8b")
    assert several.verdict.startswith("Take ")
    assert len(several.clusters) == 2


def test_a_loop_ranks_regimes(coding: Path):
    batches = {"loop.batches": 4, "loop.groups": 2, "loop.samples": 2, "loop.repeat": True}
    regimes = ["sync", "one-step-off"]
    given = {"gpus": 12, "model": "qwen3-8b", "settings": batches, "seeds": 1}
    found = heddle.loop(coding, regimes, train_gpus=4, **given)
    assert {row.setup.name for row in found.regimes} == set(regimes)
    assert found.verdict.startswith(f"Train with {found.best.setup.name}, 8 GPUs of rollout")
    assert "trainer.n_gpus_per_node=4" in found.export("verl")
    tried = heddle.loop(coding, "sync", policy="slime", train_gpus=(4, 6), tps=2, **given)
    assert [row.setup.train_gpus for row in tried.tried] == [4, 6]
    first, _, *settings = tried.export().splitlines()
    assert first == "# sync, batches of 4 samples"
    assert settings[:2] == ["--num-gpus-per-node 4", "--rollout-num-gpus 8"]
    assert found.to_pandas()["step_s.mean"].is_monotonic_increasing
    assert "<table" in found._repr_html_()


def test_a_script_needs_no_guard(coding: Path, tmp_path: Path):
    script = tmp_path / "study.py"
    script.write_text(SCRIPT.format(trace=str(coding), out=str(tmp_path / "runs")))
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("verl", "slime")
    assert len(list((tmp_path / "runs").glob("*/manifest.json"))) == 4


def test_errors_are_those_of_the_command(coding: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="gpsu is not a key of the top level"):
        heddle.compare(coding, "verl", gpsu=4)
    with pytest.raises(ValueError, match="no policy is called 'verk'"):
        heddle.compare(coding, "verk", out=tmp_path, **ON)
    with pytest.raises(ConfigError, match="gpus has no effect beside a RunConfig"):
        heddle.compare(heddle.RunConfig(trace=str(coding)), "verl", gpus=4)
    with pytest.raises(ConfigError, match=r"settings\['cluster.tpp'\]: .* Did you mean"):
        heddle.plan(coding, settings={"cluster.tpp": 4})
    with pytest.raises(ConfigError, match="no settings are known for 'trl'"):
        heddle.compare(coding, "verl", out=tmp_path, **ON).export("trl")
    with pytest.raises(ConfigError, match="trace must be a path or a RunConfig, not 3"):
        heddle.compare(3, "verl")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"policies": ["verl", 3]},
            r"policies must be a name or a list of names, not \['verl', 3\]",
        ),
        ({"policies": 3}, "policies must be a name or a list of names, not 3"),
        ({"policies": "zzz*"}, r"zzz\*: none of the shipped policies matches it; did you mean '"),
        ({"tp": "best"}, "tp='best': it is one number; tps are several, or best"),
        ({"max_running": [8, 16]}, r"max_running=\[8, 16\]: it is one number; slots are several"),
    ],
)
def test_plain_values_of_a_wrong_kind_are_refused(coding: Path, given: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        heddle.compare(coding, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"deadline_s": "20m"}, "deadline_s='20m': a number above 0"),
        ({"dollars": float("nan")}, "dollars=nan: a number above 0"),
        ({"budget_s": -1}, "budget_s must be from 0"),
        ({"gpus": []}, "a number of GPUs, or several"),
        ({"gpus": 2.5}, "a number of GPUs, or several"),
        ({"policies": []}, "policies is empty"),
        ({"regimes": "sync", "settings": {"loop.train_gpus": 64}}, "cannot be split"),
    ],
)
def test_plain_values_of_a_plan_are_checked(coding: Path, given: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        heddle.plan(coding, **given)


def test_a_plan_is_exported_to_the_framework_that_is_named(coding: Path):
    settings = {"plan.framework": "skyrl", "plan.budget_s": 0}
    found = heddle.plan(coding, "verl", settings=settings, **ON)
    assert "generator.inference_engine.num_engines" in found.export()
    assert not found.taken.complete


def test_regimes_are_names_too(coding: Path):
    with pytest.raises(ConfigError, match="regimes must be a name or a list of names"):
        heddle.loop(coding, ["sync", 3])  # type: ignore[list-item]


def test_logs_in_no_known_format_name_all_formats(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(TraceError, match=r"of a known format; .*: mooncake, .*, openhands"):
        heddle.compare(tmp_path)
