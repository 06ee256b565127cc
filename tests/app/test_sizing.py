"""`heddle plan` over several clusters: what it recommends, what it prints, what it refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.comparison.compare import compare
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.cost.prices import Prices, RunCost
from heddle.planning.cluster_sizes import ClusterSize, Sizes, UniformEngines
from heddle.planning.limits import RolloutLimits, recommended_of
from heddle.planning.sizing import size_clusters
from heddle_core.ids import EngineShape
from tests.app.journals import CLOSED_FORM, Heddle


@pytest.fixture
def sized(trace: Path) -> Sizes:
    """Two numbers of GPUs of two classes."""
    config = RunConfig(trace=str(trace))
    return size_clusters(config, gpus=[1, 2], classes=["h100", "h200"], jobs=1)


def row(gpus: int, seconds: float, dollars: float | None = None, gpu: str = "h100") -> ClusterSize:
    """A cluster of which only time and cost matter."""
    return ClusterSize(
        gpu=gpu,
        gpus=gpus,
        mix={EngineShape(gpu=gpu, tp=1): gpus},
        estimated_s=seconds,
        simulated_s=seconds,
        uniform=UniformEngines(tp=1, makespan_s=seconds),
        bound_s=1.0,
        solo_s=1.0,
        cost=RunCost(gpu_hours=gpus * seconds / 3600.0, dollars=dollars),
    )


def sizes(rows: tuple[ClusterSize, ...], limits: RolloutLimits) -> Sizes:
    return Sizes(
        trace="t",
        trajectories=1,
        model="m",
        max_running=1,
        history="none",
        rows=rows,
        left_out={},
        limits=limits,
        objective="makespan",
        prices=Prices({}),
        recommended=recommended_of(rows, limits, "makespan"),
    )


def test_a_row_has_what_a_comparison_on_its_cluster_has(sized: Sizes, trace: Path, tmp_path: Path):
    config = RunConfig(trace=str(trace), cluster=ClusterConfig(gpus=2, gpu="h200"))
    result = compare(config, ["verl", "heddle"], tps="best", out=tmp_path, jobs=1)
    verl, heddle = result.best_rows
    found = next(row for row in sized.rows if row.name == "2 x h200")
    assert found.simulated_s == heddle.makespan_s.mean
    assert found.uniform.makespan_s == verl.makespan_s.mean
    assert found.uniform.tp == verl.variant.cluster.tp
    assert found.bound_s == result.bound.makespan_s
    assert found.cost == heddle.cost
    assert sum(shape.gpus * count for shape, count in found.mix.items()) == 2


def test_the_estimate_comes_from_the_lengths_of_the_trace_and_the_engines_do_not(
    trace: Path, tmp_path: Path
):
    longer = tmp_path / "longer.jsonl"
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    for record in records:
        for step in record["steps"]:
            step["output_tokens"] *= 20
    longer.write_text("".join(json.dumps(record) + "\n" for record in records))
    first, second = (
        size_clusters(RunConfig(trace=str(path)), gpus=[4], classes=["h100"], simulated=False)
        for path in (trace, longer)
    )
    assert second.rows[0].estimated_s > 5.0 * first.rows[0].estimated_s
    assert second.rows[0].mix == first.rows[0].mix


def test_no_row_beats_its_bound_and_one_is_on_the_front(sized: Sizes):
    assert len(sized.rows) == 4
    for each in sized.rows:
        assert each.simulated_s is not None
        assert each.simulated_s >= each.bound_s >= each.solo_s
        assert each.limit == "longest trajectory" or each.bound_s > each.solo_s
    fastest = min(sized.rows, key=lambda each: each.makespan_s)
    assert any(sized.on_front(each) for each in sized.rows)
    assert sized.on_front(fastest) or any(
        each.makespan_s == fastest.makespan_s and sized.on_front(each) for each in sized.rows
    )
    assert sized.rows[0] is sized.recommended


ROWS = (row(8, 400.0, 2.0), row(16, 300.0, 3.0), row(32, 298.0, 6.0), row(64, 450.0, 20.0))


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


def test_the_front_has_what_no_other_row_is_faster_and_cheaper_than():
    found = sizes(ROWS, RolloutLimits())
    assert [each.gpus for each in ROWS if found.on_front(each)] == [8, 16, 32]


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
    found = sizes(ROWS, limits)
    assert found.recommended is None
    assert said in (found.unreachable() or "")
    assert sizes(ROWS, RolloutLimits()).unreachable() is None


def test_without_prices_gpu_hours_decide():
    rows = (row(8, 400.0), row(64, 300.0))
    assert recommended_of(rows, RolloutLimits(deadline_s=500.0), "cost") is rows[0]


def test_a_class_without_a_price_is_refused_where_dollars_decide(trace: Path):
    config = RunConfig(trace=str(trace))
    with pytest.raises(ConfigError, match=r"--budget needs the price .* gb200 has none"):
        size_clusters(config, gpus=[4], classes=["gb200"], limits=RolloutLimits(dollars=5.0))
    two = {"gpus": [4], "classes": ["gb200", "h100"], "simulated": False}
    with pytest.raises(ConfigError, match=r"gb200 has no price: give --set prices\.gb200"):
        size_clusters(config, **two, limits=RolloutLimits(deadline_s=5.0))
    priced = size_clusters(replace(config, prices={"gb200": 4.0}), **two)
    assert all(each.cost.dollars for each in priced.rows)


def test_the_table_has_the_recommended_row_first_and_the_errors(heddle: Heddle, trace: Path):
    done = heddle(
        "plan", *CLOSED_FORM, trace, "--sweep", "cluster.gpus=1,2", "--deadline", "1h", "--jobs", 1
    )
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    take = next(line for line in lines if line.startswith("take     "))
    assert "the lowest cost within 3,600 s" in take
    header = next(i for i, line in enumerate(lines) if line.startswith("GPUs "))
    assert lines[header].split()[:6] == [
        "GPUs",
        "mix",
        "estimated_s",
        "simulated_s",
        "error",
        "bound_s",
    ]
    assert lines[header + 1].startswith(take.split(",")[0].removeprefix("take").strip())
    assert any(line.startswith("estimate against simulation ") for line in lines)
    assert any(line.startswith("limit    ") for line in lines)


def test_the_json_has_every_row_and_nothing_simulated_if_not_asked_for(heddle: Heddle, trace: Path):
    args = (
        "plan",
        trace,
        "--sweep",
        "cluster.gpus=1,2",
        "--sweep",
        "cluster.gpu=h100,h200",
        "--set",
        "plan.estimate_only=true",
        "--json",
    )
    found = json.loads(heddle(*args).stdout)
    assert found["schema"] == "heddle.plan-sizes/1"
    assert len(found["sizes"]) == 4
    assert found["sizes"][0]["name"] == found["recommended"]
    assert {each["simulated_makespan_s"] for each in found["sizes"]} == {None}
    assert json.loads(heddle(*args).stdout) == found


def test_contradicting_limits_print_the_table_and_one_message(heddle: Heddle, trace: Path):
    done = heddle(
        *(
            "plan",
            trace,
            "--sweep",
            "cluster.gpus=1,2",
            "--deadline",
            "1s",
            "--budget",
            50,
            "--set",
            "plan.estimate_only=true",
        )
    )
    assert done.exit_code == 2
    assert "GPUs " in done.stdout
    assert "late" in done.stdout
    assert done.stderr.startswith("Error: no cluster of these keeps both limits. --deadline 1 s is")


def test_a_cluster_that_cannot_hold_the_trace_is_left_out_and_none_is_an_error(
    heddle: Heddle, refused: Callable[..., str], trace: Path
):
    model = ("--model", "qwen3-32b", "--gpu", "l40s", "--set", "plan.estimate_only=true")
    done = heddle("plan", *CLOSED_FORM, trace, "--sweep", "cluster.gpus=1,4", *model)
    assert done.exit_code == 0, done.output
    assert "left out 1 x l40s: " in done.stdout
    assert "no cluster of these serves the trace: " in refused(
        "plan", *CLOSED_FORM, trace, "--gpus", "1", "--deadline", "5m", *model
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--sweep", "cluster.gpus=,"), "cluster.gpus=,: write whole numbers from 1"),
        (("--sweep", "cluster.gpus=8,x"), "cluster.gpus=8,x: write whole numbers from 1"),
        (("--sweep", "cluster.gpu=h100,"), "cluster.gpu=h100,: write names"),
        (("--gpus", "2", "--deadline", "20"), "'20': write a time with its unit"),
        (("--gpus", "2", "--deadline", "0m"), "write a time with its unit"),
        (("--gpus", "2", "--deadline", "9" * 400 + "s"), "write a time with its unit"),
        (("--gpus", "2", "--budget", "9" * 400), "write an amount above 0"),
        (("--gpus", "2", "--budget", "50eur"), "'50eur': write an amount above 0"),
        (("--gpus", "2", "--budget", "-5"), "'-5': write an amount above 0"),
        (("--sweep", "cluster.gpus=2,4", "--export", "x.sh"), "--export has no effect here"),
        (
            ("--sweep", "cluster.gpus=2,4", "--regimes", "best"),
            "--regimes plans for one number of GPUs",
        ),
        (("--gpus", "2", "--deadline", "5m", "--regimes", "best"), "--deadline has no effect here"),
        (("--gpus", "2", "--jobs", "2"), "--jobs has no effect here"),
        (("--sweep", "cluster.gpu=h100,h300"), "h300"),
        (
            ("--sweep", "cluster.gpus=2,4", "--set", 'cluster.pool=[{gpu="h100",gpus=8}]'),
            "leave out cluster.pool and",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_message(
    refused: Callable[..., str], trace: Path, args: tuple[str, ...], said: str
):
    assert said in refused("plan", *CLOSED_FORM, trace, *args)


def test_one_cluster_is_planned_and_simulated_as_it_is(heddle: Heddle, trace: Path):
    done = json.loads(heddle("plan", *CLOSED_FORM, trace, "--gpus", 2, "--json").stdout)
    alone = json.loads(
        heddle(
            "plan", *CLOSED_FORM, trace, "--gpus", 2, "--set", "plan.estimate_only=true", "--json"
        ).stdout
    )
    assert done["trace_makespan_s"] > 0.0
    error = done["estimated_makespan_s"] / done["trace_makespan_s"] - 1.0
    assert done["estimate_error"] == pytest.approx(error)
    assert done["gpu_hours"] == pytest.approx(2 * done["trace_makespan_s"] / 3600.0)
    assert alone["trace_makespan_s"] is None
    assert alone["groups"] == done["groups"]
