"""Plans of planners: what they know, and what they refuse."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.harness.planned import Planned, plan
from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig
from heddle.runs import load_run
from heddle.setup import Workspace
from heddle.simulation import simulate
from heddle.workload import CapacityError
from heddle_core.commands import SolvePlan, StartEngine
from heddle_core.estimate.ordered import Cost
from heddle_core.solve.joint import JointProblem, Solver
from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from tests.app.conftest import ROOT

CODING = ROOT / "traces" / "coding-512.jsonl.gz"


@pytest.fixture
def coding(tmp_path: Path) -> Path:
    """Eight groups of coding, small enough to plan at once."""
    path = tmp_path / "some.jsonl"
    write_trace(path, synth("coding", 64, seed=5, samples_per_group=8))
    return path


def planned(
    coding: Path, gpus: int = 8, cluster: Mapping[str, Any] | None = None, **how: Any
) -> Planned:
    made = ClusterConfig(gpus=gpus, **(cluster or {}))
    return plan(RunConfig(trace=str(coding), cluster=made), **how)


PAIRS = [(p, c) for p in ("exact", "anneal", "libra-dp") for c in ("context", "paper")]


@pytest.mark.parametrize(("planner", "cost"), [*PAIRS, ("portfolio", "context")])
def test_every_planner_gives_each_trajectory_a_home_within_the_gpus(
    coding: Path, planner: Solver, cost: Cost
):
    found = planned(coding, planner=planner, cost=cost)
    groups = found.groups()
    assert sum(g["members"] for g in groups) == 64
    assert sum(g["tp"] for g in groups) <= 8
    assert [g["tp"] for g in groups] == sorted((g["tp"] for g in groups), reverse=True)
    assert found.makespan_s == max(g["estimated_end_s"] for g in groups)
    assert found.solver_s > 0.0
    if planner != "portfolio":
        assert 0.0 < found.bound_s <= found.makespan_s * (1 + 1e-9)


def test_equal_inputs_give_equal_plans(coding: Path):
    first, second = (planned(coding, planner="anneal") for _ in range(2))
    assert first.groups() == second.groups()


def test_the_oracle_reads_the_true_lengths(coding: Path):
    scripts, *_ = Workspace().completed(RunConfig(trace=str(coding)))
    true = sorted(sum(step.output_tokens for step in s.steps) for s in scripts)
    groups = planned(coding, predictor="oracle", planner="exact").groups()
    assert max(g["longest_tokens"] for g in groups) == true[-1]
    assert min(g["shortest_tokens"] for g in groups) == true[0]


def test_without_an_oracle_no_length_of_the_trace_is_known(coding: Path):
    shorter = coding.with_name("shorter.jsonl")
    cut = [
        json.loads(line) | {"steps": [json.loads(line)["steps"][0] | {"output_tokens": 1}]}
        for line in coding.read_text().splitlines()
    ]
    shorter.write_text("".join(json.dumps(record) + "\n" for record in cut))
    first, second = planned(coding), planned(shorter)
    assert first.groups() == second.groups()
    assert first.history.name == second.history.name == "prior:coding"


def test_groups_are_cut_from_longest_to_shortest(coding: Path):
    groups = planned(coding, predictor="oracle", planner="exact").groups()
    for wider, narrower in pairwise(g for g in groups if g["members"]):
        assert wider["shortest_tokens"] >= 0.8 * narrower["longest_tokens"]


def test_tp_degrees_that_cannot_hold_the_largest_context_are_left_out(coding: Path):
    lines = coding.read_text().splitlines()
    long = json.loads(lines[0]) | {"prompt_tokens": 400_000}
    coding.write_text("\n".join([json.dumps(long), *lines[1:]]) + "\n")
    found = planned(coding)
    assert [shape.tp for shape in found.left_out] == [1]
    assert {g["tp"] for g in found.groups()} <= {2, 4, 8}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"planner": "portfolio", "cost": "paper"}, "goes with planner exact"),
        ({"predictor": "fcfs"}, "fcfs is no predictor"),
        ({"predictor": "progresive"}, "Did you mean 'progressive'?"),
        ({"predictor": "noisy-oracle"}, "as in noisy-oracle:0.5"),
        ({"predictor": "noisy-oracle:much"}, "as in noisy-oracle:0.5"),
    ],
)
def test_what_cannot_be_planned_is_refused(coding: Path, how: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=re.escape(says)):
        planned(coding, **how)


def test_a_model_that_fits_nowhere_is_refused_with_its_needs(coding: Path):
    long = json.loads(coding.read_text().splitlines()[0]) | {"prompt_tokens": 9_000_000}
    coding.write_text(json.dumps(long) + "\n")
    with pytest.raises(CapacityError, match="the largest context of the trace, 9,0"):
        planned(coding, 2)


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


def test_a_model_that_needs_more_gpus_is_refused_with_their_number(coding: Path):
    with pytest.raises(CapacityError, match="qwen3-32b on l40s needs at least 2 GPUs, not 1"):
        planned(coding, 1, {"model": "qwen3-32b", "gpu": "l40s"})
