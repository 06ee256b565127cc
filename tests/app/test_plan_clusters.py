"""`heddle plan` over several clusters, GPU types and roles: one search, one answer."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import heddle as heddle_api
from heddle.cli import main
from heddle.config_error import ConfigError
from heddle.cost.prices import RunCost
from heddle.planning.limits import RolloutLimits, recommended_of, unreachable
from heddle.search.race import Race
from heddle.search.result import SearchResult, search
from heddle.search.rounds import first_rounds
from heddle_trace import synth, write_trace
from tests.app.journals import BRIEF, Heddle

pytestmark = pytest.mark.usefixtures("few_policies")

ON = ("--model", "qwen3-8b", "--max-running", 8, "--history", "none")


@pytest.fixture(scope="module")
def coding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four groups of four samples."""
    path = tmp_path_factory.mktemp("traces") / "some.jsonl"
    write_trace(path, synth("coding", 16, seed=5, samples_per_group=4))
    return path


@pytest.fixture(scope="module")
def found(coding: Path, few_policies: None) -> dict[str, object]:
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


def test_clusters_of_a_loop_are_told_by_batches(heddle: Heddle, coding: Path):
    on = ["--sweep", "cluster.gpus=8,16", "--regimes", "april", "--budget-s", 0]
    on += ["--set", "loop.batches=4", "--set", "loop.groups=2", "--set", "loop.samples=2"]
    on += ["--set", "loop.repeat=true", "--model", "qwen3-8b", "--gpu", "h100"]
    said = heddle("plan", coding, *on).stdout
    assert re.match(r"Take \d+ x h100, \$[\d.]+ a batch: the fastest of 2 clusters\.", said)
    assert re.search(r"versions old in the mean, up to \d here, without a bound", said)
    assert "batch_s  of a batch" in said
    assert "rollout" not in said.partition("next ")[0]
    command = shlex.split(said.partition("next ")[2].partition("\n\n")[0])
    assert command[command.index("--gpus") + 1] in said.partition(" x h100")[0]


def test_a_signal_keeps_the_clusters_that_were_searched(
    coding: Path, monkeypatch: pytest.MonkeyPatch
):
    began = count()

    def interrupted(*args: Any, **given: Any) -> SearchResult:
        if next(began):
            raise KeyboardInterrupt
        return search(*args, **given)

    monkeypatch.setattr("heddle.search.clusters.search", interrupted)
    found = heddle_api.plan(coding, "verl", gpus=[2, 4], model="qwen3-8b", gpu="h100", jobs=1)
    assert found.taken.name == "2 x h100"
    assert found.left_out == {"4 x h100": "not searched: interrupted"}
    with pytest.raises(KeyboardInterrupt):
        heddle_api.plan(coding, "verl", gpus=2, model="qwen3-8b", gpu="h100", jobs=1)


def test_a_cluster_that_drops_what_another_holds_is_left_out(heddle: Heddle, tmp_path: Path):
    first, *rest = synth("coding", 16, seed=5, samples_per_group=4)
    step = msgspec.structs.replace(first.steps[0], output_tokens=90_000)
    path = tmp_path / "long.jsonl"
    write_trace(path, [msgspec.structs.replace(first, steps=(step,)), *rest])
    on = ["--sweep", "cluster.gpus=8,16", "--regimes", "sync", "--budget-s", 0]
    on += ["--set", "loop.batches=4", "--set", "loop.groups=2", "--jobs", 1]
    said = heddle("plan", path, *on, "--set", "cluster.over_capacity=drop").stdout
    assert said.startswith("Take 16 x h100")
    assert "left out 8 x h100: its engines or trainer do not hold 1 traject" in said
    assert "; stopped early: the best so far" in said
    assert "profile  qwen3-14b on h100: vLLM 0.24 kernel tables, decode error 1.1 % median" in said


@pytest.mark.parametrize("budget_s", [None, 60.0])
def test_after_a_search_that_a_signal_ended_no_further_cluster_is_searched(
    coding: Path, monkeypatch: pytest.MonkeyPatch, budget_s: float | None
):
    def rounds_interrupted(race: Race, *args: Any, **given: Any) -> None:
        first_rounds(race, *args, **given)
        raise KeyboardInterrupt

    monkeypatch.setattr("heddle.search.result.first_rounds", rounds_interrupted)
    on: Any = {"model": "qwen3-8b", "gpu": "h100", "jobs": 1, "budget_s": budget_s}
    found = heddle_api.plan(coding, "verl", gpus=[2, 4], **on)
    assert found.taken.name == "2 x h100"
    assert found.left_out == {"4 x h100": "not searched: interrupted"}


def test_a_table_has_a_row_for_each_cluster_and_an_export(
    heddle: Heddle, coding: Path, tmp_path: Path
):
    file = tmp_path / "vllm.sh"
    on = ("--sweep", "cluster.gpus=1,2", "--budget", 100, "--export", file, *BRIEF)
    done = heddle("plan", coding, *ON, *on)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Take ")
    assert "limits" in done.stdout
    assert file.read_text().count(" vllm serve ") >= 1
    wide = heddle("plan", coding, *ON, "--sweep", "cluster.gpus=1,2", "--wide", *BRIEF)
    assert "draws" in wide.stdout


def test_what_keeps_no_limit_says_what_is_reachable(refused: Callable[..., str], coding: Path):
    on = (*ON, *BRIEF, "--sweep", "cluster.gpus=1,2")
    late = refused("plan", coding, *on, "--deadline", "1s")
    assert "--deadline 1 s is not reachable: the fastest is" in late
    assert "No number of GPUs keeps it: the longest trajectory alone takes" in late
    poor = refused("plan", coding, *on, "--budget", "0.0001")
    assert "--budget $0.0001 is not reachable: the cheapest is" in poor


def test_what_no_bound_allows_is_refused_before_a_search(
    coding: Path, monkeypatch: pytest.MonkeyPatch
):
    on = {"gpus": [1, 2], "model": "qwen3-8b", "max_running": 8, "history": "none"}
    found = heddle_api.plan(coding, "verl", deadline_s=1e6, budget_s=0.0, **on)
    # Twice what is proven cannot be refused by it.
    near_s = 2.0 * max(row.bound_s for row in found.clusters)
    monkeypatch.setattr(Race, "run", lambda *_, **__: pytest.fail("it searches"))
    with pytest.raises(ConfigError, match=r"no cluster of these keeps the limit\. --deadline 1 s "):
        heddle_api.plan(coding, "verl", deadline_s=1.0, **on)
    with pytest.raises(
        ConfigError, match=r"--budget \$0\.002 .* the cheapest is . x h100 \(at least"
    ):
        heddle_api.plan(coding, "verl", dollars=0.002, deadline_s=1e6, **on)
    with pytest.raises(pytest.fail.Exception, match="it searches"):
        heddle_api.plan(coding, "verl", deadline_s=near_s, **on)


def test_a_cluster_that_cannot_serve_is_left_out(heddle: Heddle, coding: Path):
    on = ("--model", "qwen3-32b", "--gpu", "l40s", "--max-running", 8, *BRIEF)
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
        (("--sweep", "cluster.gpus=1,2", "--set", "report.figure=a.bmp"), "a.bmp"),
        (("--budget-s", "-1"), "--budget-s -1.0: plan.budget_s must be from 0"),
        (("--sweep", "cluster.gpu=nvidia"), "nvidia"),
    ],
)
def test_what_does_not_fit_is_refused(
    refused: Callable[..., str], coding: Path, given: tuple[object, ...], said: str
):
    assert said in refused("plan", coding, *ON, *given)


@dataclass(frozen=True)
class Row:
    """A cluster of which only time and cost matter."""

    gpus: int
    makespan_s: float
    dollars: float | None = None

    @property
    def name(self) -> str:
        return f"{self.gpus} x h100"

    @property
    def cost(self) -> RunCost:
        return RunCost(gpu_hours=self.gpus * self.makespan_s / 3600.0, dollars=self.dollars)


ROWS = (Row(8, 400.0, 2.0), Row(16, 300.0, 3.0), Row(32, 298.0, 6.0), Row(64, 450.0, 20.0))


@pytest.mark.parametrize(
    ("limits", "objective", "gpus"),
    [
        (RolloutLimits(), "makespan", 16),  # 32 GPUs are within 2 % and cost twice as much
        (RolloutLimits(), "cost", 8),
        (RolloutLimits(deadline_s=299.0), "cost", 32),
        (RolloutLimits(deadline_s=410.0), "cost", 8),
        (RolloutLimits(dollars=2.5), "makespan", 8),
        (RolloutLimits(deadline_s=350.0, dollars=3.0), "cost", 16),
    ],
)
def test_the_recommended_row_keeps_the_limits_and_is_best_of_those(
    limits: RolloutLimits, objective: Any, gpus: int
):
    found = recommended_of(ROWS, limits, objective)
    assert found is not None
    assert found.gpus == gpus


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (
            RolloutLimits(deadline_s=350.0, dollars=2.5),
            "keeps both limits. --deadline 350 s is reachable: the cheapest is 16 x h100 (300 s, "
            "$3.00); --budget $2.50 is reachable: the fastest is 8 x h100 (400 s, $2.00)",
        ),
        (
            RolloutLimits(deadline_s=100.0, dollars=2.5),
            "--deadline 100 s is not reachable: the fastest is 32 x h100 (298 s, $6.00); --budget "
            "$2.50 is reachable",
        ),
        (
            RolloutLimits(dollars=1.0),
            "the limit. --budget $1.00 is not reachable: the cheapest is 8 x h100 (400 s, $2.00)",
        ),
    ],
)
def test_limits_that_no_row_keeps_are_named_with_what_is_reachable(
    limits: RolloutLimits, said: str
):
    assert recommended_of(ROWS, limits, "makespan") is None
    assert said in unreachable(ROWS, limits)


def test_without_prices_gpu_hours_decide():
    rows = (Row(8, 400.0), Row(64, 300.0))
    assert recommended_of(rows, RolloutLimits(deadline_s=500.0), "cost") is rows[0]


def test_of_clusters_that_cost_nothing_the_fastest_is_taken():
    rows = (Row(8, 400.0, 0.0), Row(64, 300.0, 0.0))
    assert recommended_of(rows, RolloutLimits(deadline_s=500.0), "cost") is rows[1]


def test_a_class_without_a_price_is_refused_where_dollars_decide(coding: Path):
    on = {"model": "qwen3-8b", "gpus": 8}
    with pytest.raises(ConfigError, match=r"gb200 has no price, and dollars decide"):
        heddle_api.plan(coding, gpu="gb200", dollars=5.0, **on)
    with pytest.raises(ConfigError, match=r"give --set prices\.gb200"):
        heddle_api.plan(coding, gpu=["gb200", "h100"], deadline_s=5.0, **on)


def test_clusters_are_drawn_and_the_front_has_what_no_other_beats(
    heddle: Heddle, coding: Path, tmp_path: Path
):
    figure = tmp_path / "front.svg"
    on = ("--sweep", "cluster.gpus=1,2", "--set", f"report.figure={figure}", *BRIEF)
    assert heddle("plan", coding, *ON, *on).exit_code == 0
    assert "numbers are GPUs" in figure.read_text()
    found = heddle_api.plan(
        coding, "verl", gpus=[1, 2, 4], model="qwen3-8b", max_running=8, history="none"
    )
    spent = [found.spent(row) for row in found.front]
    times = [row.makespan_s for row in found.front]
    assert spent == sorted(spent)
    assert times == sorted(times, reverse=True)
    assert len(found.front) >= 1
