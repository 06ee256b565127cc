"""What each part of `heddle` adds to a baseline: the steps, the table, the figure."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.comparison.compare import compare
from heddle.comparison.result import Comparison
from heddle.comparison.waterfall import STEPS, waterfall, waterfall_policies
from heddle.config import RunConfig
from heddle.policies.plugins import load_policy
from heddle_core.parts.table import kind_of
from heddle_core.policy import PolicyContext
from heddle_sim.profile_files import load_profile
from tests.app.journals import Heddle

WATERFALL = ("--sweep", "policy.parts=waterfall")


@pytest.fixture
def compared(trace: Path, tmp_path: Path) -> Comparison:
    config = RunConfig(trace=str(trace), cluster=ClusterConfig(gpus=2, max_running=2))
    return compare(config, waterfall_policies(), tps="best", seeds=2, out=tmp_path, jobs=1)


def test_the_last_step_makes_the_baseline_the_preset():
    cost = load_profile("qwen3-14b", "h100").cost_estimate((1, 2))
    shapes = tuple(cost.by_shape)
    context = PolicyContext(
        pools={"h100": 2}, shape=shapes[0], shape_choices=shapes, max_running=8, cost=cost
    )
    every = "+".join(["verl", *(part for _, parts in STEPS for part in parts)])
    made, preset = load_policy(every, context), load_policy("heddle", context)
    for field in ("predictor", "scheduler", "admission", "placement", "migration", "planner"):
        assert type(getattr(made, field)) is type(getattr(preset, field))
    assert type(made.consolidation) is type(preset.consolidation)
    kinds = [kind_of(part) for _, parts in STEPS for part in parts]
    assert len(set(kinds)) == len(kinds) == 7


def test_the_steps_lead_from_the_untuned_baseline_to_heddle(compared: Comparison):
    steps = waterfall(compared)
    means = {row.policy: row.makespan_s.mean for row in compared.policies}
    assert [step.name for step in steps[2:]] == [name for name, _ in STEPS]
    assert steps[0].policy == "verl@tp1"
    assert steps[1].makespan_s.mean == min(s for p, s in means.items() if p.startswith("verl@"))
    assert steps[-1].policy == "heddle"
    assert all(step.makespan_s.mean == means[step.policy] for step in steps)
    whole_s = steps[0].makespan_s.mean - steps[-1].makespan_s.mean
    assert sum(step.saved_s for step in steps) == pytest.approx(whole_s)
    shares = [step.share for step in steps[1:]]
    if whole_s > 0.0:
        assert sum(share or 0.0 for share in shares) == pytest.approx(1.0)
    else:
        assert shares == [None] * len(shares)


def test_the_command_prints_the_steps_and_draws_them(heddle: Heddle, trace: Path, tmp_path: Path):
    figure = tmp_path / "parts.svg"
    args = (
        "compare",
        trace,
        "--gpus",
        2,
        *WATERFALL,
        "--set",
        f"report.figure={figure}",
        "--jobs",
        1,
    )
    done = heddle(*args)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("step "))
    names = ["verl, TP 1", "best TP degree", *(name for name, _ in STEPS)]
    assert all(line.startswith(name) for line, name in zip(lines[at + 1 :], names, strict=False))
    assert "its best TP degree, and " in done.stdout
    assert "<svg" in figure.read_text()
    plain = json.loads(heddle(*args, "--policies", "slime", "--json").stdout)
    assert plain["waterfall"][0]["step"] == "slime, TP 1"
    assert plain["waterfall"][-1]["policy"] == "heddle"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((*WATERFALL, "--set", "report.figure=x.txt"), "a figure must be named"),
        ((*WATERFALL, "--set", "report.figure=missing/x.png"), "no such folder"),
        (
            (*WATERFALL, "--set", "report.figure=x.png", "--policies", "verl,slime"),
            "begins with one baseline, not 2",
        ),
        (
            (*WATERFALL, "--set", "report.figure=x.png", "--policies", "heddle+fixed+keep_engines"),
            "name a baseline, such as",
        ),
        (
            (*WATERFALL, "--set", "report.figure=x.png", "--sweep", "cluster.max_running=best"),
            "tries TP degrees only",
        ),
        (
            (*WATERFALL, "--set", "report.figure=x.png", "--sweep", "cluster.roles=best"),
            "tries TP degrees only",
        ),
    ],
)
def test_what_makes_no_waterfall_is_refused_before_a_run(
    refused: Callable[..., str], trace: Path, args: tuple[str, ...], said: str
):
    assert said in refused("compare", trace, "--gpus", 2, *args)
    assert not Path("runs").exists()
