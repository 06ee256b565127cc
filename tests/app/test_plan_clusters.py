"""`heddle plan` over several clusters, GPU types and roles: one search, one answer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle_trace import synth, write_trace
from tests.app.journals import Heddle

ON = ("--model", "qwen3-8b", "--max-running", 8, "--history", "none")


@pytest.fixture(scope="module")
def coding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four groups of four samples."""
    path = tmp_path_factory.mktemp("traces") / "some.jsonl"
    write_trace(path, synth("coding", 16, seed=5, samples_per_group=4))
    return path


@pytest.fixture(scope="module")
def found(coding: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Of 1 and 2 GPUs of two types, within a deadline that all keep."""
    words = ["plan", str(coding), *map(str, ON), "--sweep", "cluster.gpus=1,2", "--deadline", "9h"]
    words += ["--sweep", "cluster.gpu=h100,h200", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_the_cheapest_in_time_is_taken(found: dict[str, object]):
    clusters = found["clusters"]
    assert isinstance(clusters, list)
    assert {row["name"] for row in clusters} == {
        f"{n} x {gpu}" for n in (1, 2) for gpu in ("h100", "h200")
    }
    assert found["objective"] == "cost"
    least = min(row["dollars"] for row in clusters)
    assert clusters[0]["dollars"] <= least * 1.02
    recommended = found["recommended"]
    assert isinstance(recommended, dict)
    assert recommended["makespan_s"] == clusters[0]["makespan_s"]
    assert str(found["verdict"]).startswith(f"Take {clusters[0]['name']}, $")
    assert "the cheapest of 4 clusters that ends in 32,400 s" in str(found["verdict"])
    command = recommended["command"]
    at = command.index("--gpus")
    assert f"{command[at + 1]} x {command[command.index('--gpu') + 1]}" == clusters[0]["name"]


def test_one_cluster_of_the_list_is_what_it_is_alone(
    found: dict[str, object], coding: Path, heddle: Heddle
):
    alone = json.loads(heddle("plan", coding, *ON, "--gpus", 2, "--json").stdout)["recommended"]
    clusters = found["clusters"]
    assert isinstance(clusters, list)
    (same,) = (row for row in clusters if row["name"] == "2 x h100")
    assert same["makespan_s"] == alone["makespan_s"]
    assert same["engines"] == alone["engines"]


def test_a_table_has_a_row_for_each_cluster_and_an_export(
    heddle: Heddle, coding: Path, tmp_path: Path
):
    file = tmp_path / "vllm.sh"
    on = ("--sweep", "cluster.gpus=1,2", "--budget", 100, "--export", file)
    done = heddle("plan", coding, *ON, *on)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Take ")
    assert "limits" in done.stdout
    assert file.read_text().count(" vllm serve ") >= 1
    wide = heddle("plan", coding, *ON, "--sweep", "cluster.gpus=1,2", "--wide")
    assert "draws" in wide.stdout


def test_what_keeps_no_limit_says_what_is_reachable(refused: Callable[..., str], coding: Path):
    on = (*ON, "--sweep", "cluster.gpus=1,2")
    late = refused("plan", coding, *on, "--deadline", "1s")
    assert "--deadline 1 s is not reachable: the fastest is" in late
    assert "No number of GPUs keeps it: the longest trajectory alone takes" in late
    poor = refused("plan", coding, *on, "--budget", "0.0001")
    assert "--budget $0.00 is not reachable: the cheapest is" in poor


def test_a_cluster_that_cannot_serve_is_left_out(heddle: Heddle, coding: Path):
    on = ("--model", "qwen3-32b", "--gpu", "l40s", "--max-running", 8)
    done = heddle("plan", coding, *on, "--sweep", "cluster.gpus=1,4", "--json")
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["left_out"]) == ["1 x l40s"]
    done = heddle("plan", coding, *on, "--sweep", "cluster.gpus=1,4")
    assert "left out 1 x l40s: " in done.stdout


def test_two_gpu_types_side_by_side_are_searched(heddle: Heddle, coding: Path):
    pools = 'cluster.engines=[{gpu="h100",gpus=2},{gpu="l40s",gpus=2}]'
    found = json.loads(heddle("plan", coding, *ON, "--set", pools, "--json").stdout)
    recommended = found["recommended"]
    assert recommended["gpu"] is None
    assert {each["gpu"].lower() for each in recommended["engines"]} == {"h100", "l40s"}
    replay = heddle(*recommended["command"][1:], "--json")
    assert replay.exit_code == 0, replay.output
    tuned = next(row for row in found["candidates"] if row["policy"] == "verl")
    degrees = {each["gpu"].lower(): each["tp"] for each in tuned["engines"]}
    assert set(degrees) == {"h100", "l40s"}


def test_roles_are_searched(heddle: Heddle, coding: Path):
    on = ("--gpus", 2, "--sweep", "cluster.roles=best")
    found = json.loads(heddle("plan", coding, *ON, *on, "--json", "--wide").stdout)
    assert found["recommended"]["gpus"] == 2
    fixed = ("--gpus", 2, "--set", "cluster.roles=prefill=1,decode=1")
    found = json.loads(heddle("plan", coding, *ON, *fixed, "--json").stdout)
    assert sorted(e["role"] for e in found["recommended"]["engines"]) == ["decode", "prefill"]
    replay = heddle(*found["recommended"]["command"][1:], "--json")
    assert replay.exit_code == 0, replay.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--set", "cluster.roles=prefill=1,decode=1", "--sweep", "cluster.gpus=2,4"), "one GPU"),
        (("--sweep", "cluster.gpus=1,2", "--set", "report.figure=a.svg"), "report.figure is of"),
        (("--set", "plan.search=false", "--budget-s", "5"), "--budget-s has no effect here"),
        (("--budget-s", "-1"), "--budget-s -1.0: plan.budget_s must be from 0"),
        (("--sweep", "cluster.gpu=nvidia"), "nvidia"),
    ],
)
def test_what_does_not_fit_is_refused(
    refused: Callable[..., str], coding: Path, given: tuple[object, ...], said: str
):
    assert said in refused("plan", coding, *ON, *given)
