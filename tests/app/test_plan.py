"""`heddle plan`: what it prints, what it knows, and what it refuses."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig
from heddle.planning.plan import plan
from heddle.runs import load_run
from heddle.setup import Workspace
from heddle.simulation import simulate
from heddle_core.commands import SolvePlan, StartEngine
from heddle_core.solve.joint import JointProblem
from heddle_trace.files import write_trace
from heddle_trace.schema import TrajectoryRecord
from heddle_trace.synth import synth
from tests.app.conftest import ROOT
from tests.app.journals import CLOSED_FORM, Heddle

CODING = ROOT / "traces" / "coding-512.jsonl.gz"


@pytest.fixture
def coding(tmp_path: Path) -> Path:
    """Eight groups of coding, small enough to plan at once."""
    path = tmp_path / "some.jsonl"
    write_trace(path, synth("coding", 64, seed=5, samples_per_group=8))
    return path


def planned(heddle: Heddle, *args: object) -> dict[str, Any]:
    done = heddle("plan", *CLOSED_FORM, *args, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


PAIRS = [(p, c) for p in ("exact", "anneal", "libra-dp") for c in ("context", "paper")]


@pytest.mark.parametrize(("planner", "cost"), [*PAIRS, ("portfolio", "context")])
def test_every_planner_gives_each_trajectory_a_home_within_the_gpus(
    heddle: Heddle, coding: Path, planner: str, cost: str
):
    found = planned(
        heddle,
        coding,
        "--gpus",
        8,
        "--set",
        f"policy.planner={planner}",
        "--set",
        f"policy.cost={cost}",
    )
    assert found["schema"] == "heddle.plan/1"
    assert (found["planner"], found["cost"]) == (planner, cost)
    groups = found["groups"]
    assert sum(g["members"] for g in groups) == 64
    assert sum(g["tp"] for g in groups) <= 8
    assert found["tp_mix"] == {
        str(tp): [g["tp"] for g in groups].count(tp) for tp in {g["tp"]: None for g in groups}
    }
    assert [g["tp"] for g in groups] == sorted((g["tp"] for g in groups), reverse=True)
    assert found["estimated_makespan_s"] == max(g["estimated_end_s"] for g in groups)
    assert found["solver_s"] > 0.0
    if planner != "portfolio":
        assert 0.0 < found["bound_s"] <= found["estimated_makespan_s"] * (1 + 1e-9)


def test_equal_inputs_give_equal_plans_but_for_the_time(heddle: Heddle, coding: Path):
    first, second = (planned(heddle, coding, "--set", "policy.planner=anneal") for _ in range(2))
    assert {**first, "solver_s": 0.0} == {**second, "solver_s": 0.0}


def test_the_oracle_reads_the_true_lengths_and_is_marked(heddle: Heddle, coding: Path):
    scripts, _ = Workspace().completed(RunConfig(trace=str(coding)))
    true = sorted(sum(step.output_tokens for step in s.steps) for s in scripts)
    found = planned(
        heddle, coding, "--set", "policy.predictor=oracle", "--set", "policy.planner=exact"
    )
    assert max(g["longest_tokens"] for g in found["groups"]) == true[-1]
    assert min(g["shortest_tokens"] for g in found["groups"]) == true[0]
    said = heddle("plan", *CLOSED_FORM, coding, "--set", "policy.predictor=oracle").stdout
    assert "true lengths (oracle): no plan" in said


def test_without_an_oracle_no_length_of_the_trace_is_known(heddle: Heddle, coding: Path):
    shorter = coding.with_name("shorter.jsonl")
    cut = [
        json.loads(line) | {"steps": [json.loads(line)["steps"][0] | {"output_tokens": 1}]}
        for line in coding.read_text().splitlines()
    ]
    shorter.write_text("".join(json.dumps(record) + "\n" for record in cut))
    first, second = planned(heddle, coding), planned(heddle, shorter)
    assert first["groups"] == second["groups"]
    assert (
        first["history"]
        == second["history"]
        == {"name": "prior:coding"} | {"sha256": first["history"]["sha256"]}
    )


def test_groups_are_cut_from_longest_to_shortest(heddle: Heddle, coding: Path):
    groups = planned(
        heddle, coding, "--set", "policy.predictor=oracle", "--set", "policy.planner=exact"
    )["groups"]
    for wider, narrower in pairwise(g for g in groups if g["members"]):
        assert wider["shortest_tokens"] >= 0.8 * narrower["longest_tokens"]


def test_the_table_lists_the_inputs_of_the_plan_and_the_time_goes_to_stderr(
    heddle: Heddle, coding: Path
):
    done = heddle("plan", *CLOSED_FORM, coding, "--gpus", 4)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "trace    some: 64 trajectories"
    assert lines[1] == "cluster  4 x h100, qwen3-14b, TP 1, 2, 4, 100 running per engine"
    assert lines[2] == "history  prior:coding"
    assert lines[3].startswith("knows    what learned predicts before anything has run")
    assert lines[4].endswith("planner portfolio, cost context")
    assert lines[5].startswith("makespan ")
    assert lines[6].startswith("replayed ")
    assert lines[7].startswith("cost     ")
    assert lines[9].split() == [
        *("engine", "tp", "members", "longest_tokens", "shortest_tokens", "estimated_end_s")
    ]
    assert done.stderr.startswith("searched for ")
    assert "searched" not in done.stdout


def test_an_estimate_far_off_by_guessed_lengths_names_the_remedy(
    heddle: Heddle, coding: Path, tmp_path: Path
):
    short, earlier = tmp_path / "short.jsonl", tmp_path / "earlier.jsonl"
    for seed, path in enumerate((short, earlier)):
        write_trace(path, brief(synth("coding", 64, seed=seed, samples_per_group=8)))
    line = "take the replayed time, and name earlier rollouts of these tasks with --history"
    for history, said in (("none", "a guess"), ("prior:coding", "those of prior:coding")):
        shown = heddle("plan", *CLOSED_FORM, short, "--gpus", 4, "--history", history).stdout
        assert f"lengths  of the estimate are {said}: {line}" in shown
    for near in (("--history", earlier), ("--set", "policy.predictor=oracle")):
        shown = heddle("plan", *CLOSED_FORM, short, "--gpus", 4, *near).stdout
        assert "replayed " in shown
        assert "lengths  " not in shown


def brief(records: Sequence[TrajectoryRecord]) -> list[TrajectoryRecord]:
    """The same, each step with a tenth of the output."""
    return [
        structs.replace(
            record,
            steps=tuple(
                structs.replace(step, output_tokens=max(step.output_tokens // 10, 1))
                for step in record.steps
            ),
        )
        for record in records
    ]


def test_equal_predictions_are_named_as_such(heddle: Heddle, coding: Path):
    done = heddle(
        "plan", *CLOSED_FORM, coding, "--set", "policy.predictor=none", "--history", "none"
    )
    assert "alike for all, so that groups differ in number only" in done.stdout


def test_tp_degrees_that_cannot_hold_the_largest_context_are_left_out(heddle: Heddle, coding: Path):
    lines = coding.read_text().splitlines()
    long = json.loads(lines[0]) | {"prompt_tokens": 400_000}
    coding.write_text("\n".join([json.dumps(long), *lines[1:]]) + "\n")
    found = planned(heddle, coding, "--gpus", 8)
    assert found["cluster"]["tp_left_out"] == [1]
    assert {g["tp"] for g in found["groups"]} <= {2, 4, 8}
    assert "left out TP 1: " in heddle("plan", *CLOSED_FORM, coding, "--gpus", 8).stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ("--set", "policy.planner=portfolio", "--set", "policy.cost=paper"),
            "goes with policy.planner = exact",
        ),
        (("--set", "policy.predictor=fcfs"), "policy.predictor = fcfs: is no predictor"),
        (("--set", "policy.predictor=progresive"), "Did you mean 'progressive'?"),
        (("--set", "policy.predictor=noisy-oracle"), "as in noisy-oracle:0.5"),
        (("--set", "policy.predictor=noisy-oracle:much"), "as in noisy-oracle:0.5"),
        (("--gpus", "0"), "gpus must be from 1"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    refused: Callable[..., str], coding: Path, args: tuple[str, ...], says: str
):
    assert says in refused("plan", *CLOSED_FORM, coding, *args)


def test_a_model_that_fits_nowhere_is_refused_with_its_needs(
    refused: Callable[..., str], coding: Path
):
    long = json.loads(coding.read_text().splitlines()[0]) | {"prompt_tokens": 9_000_000}
    coding.write_text(json.dumps(long) + "\n")
    said = refused("plan", *CLOSED_FORM, coding, "--gpus", "2")
    assert "no engine holds the largest context of the trace, 9,0" in said
    assert "Take more GPUs" in said


def test_a_run_makes_the_plan_that_was_shown(coding: Path, tmp_path: Path):
    config = RunConfig(trace=str(coding), cluster=ClusterConfig(gpus=4))
    shown = plan(config)
    run = simulate(
        replace(config, policy=replace(config.policy, preset="heddle")), out=tmp_path / "runs"
    )
    commands = [c for entry in load_run(run.path).entries() for c in entry.commands]
    started = sorted((c.shape.tp for c in commands if isinstance(c, StartEngine)), reverse=True)
    assert started == [group.shape.tp for group in shown.solved.groups]
    assert any(isinstance(c, SolvePlan) for c in commands)
    assert isinstance(shown.problem, JointProblem)


def test_a_model_that_needs_more_gpus_is_refused_with_their_number(
    refused: Callable[..., str], coding: Path
):
    said = refused(
        "plan", *CLOSED_FORM, coding, "--model", "qwen3-32b", "--gpu", "l40s", "--gpus", 1
    )
    assert "qwen3-32b on l40s needs at least 2 GPUs, not 1" in said
