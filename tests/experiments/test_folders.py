"""Every experiment has its parts, cites its sources, and is documented."""

import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest

from experiments.harness.drawing import MAX_BYTES
from experiments.harness.experiment import (
    EXPERIMENTS,
    FIGURES,
    MEASURED,
    Context,
    Experiment,
    experiments,
    judged_all,
)
from experiments.harness.jobs import REDUCED, planned_runs
from experiments.harness.report import page
from experiments.harness.running import Skipped
from experiments.harness.store import Store
from experiments.harness.values import Results
from heddle.policies.plugins import load_policy
from heddle_core.policy import PolicyContext
from heddle_sim.profile_files import load_profile
from heddle_trace.oracle import Oracle
from tests.in_turn import some

FIGURES_AND_TABLES = [*(f"F{n}" for n in range(1, 17)), "T1", "T2"]
BEYOND = list("ABCDEGHIJKLMNOPRSUVWX")
ALL = experiments()
each = pytest.mark.parametrize("experiment", ALL, ids=lambda e: e.name)


def test_every_figure_and_table_of_the_paper_has_a_folder():
    found = [e.expected.figure for e in ALL]
    assert [f for f in found if f in FIGURES_AND_TABLES] == FIGURES_AND_TABLES
    assert {f[0] for f in found if f not in FIGURES_AND_TABLES} == {*BEYOND, "F"}


@each
def test_a_folder_has_a_configuration_one_script_and_sourced_expectations(experiment: Experiment):
    folder, expected = experiment.folder, experiment.expected
    assert [p.name for p in folder.glob("*.py")] == ["run.py"]
    assert tomllib.loads((folder / "config.toml").read_text())
    assert expected.title
    assert all(len(text) > 8 for text in (expected.source, *(c.source for c in expected.claims)))
    script = experiment.script
    assert (script.__doc__ or "").startswith(f"{expected.figure[0]}")
    assert list(inspect.signature(script.measure).parameters) == ["context"]
    assert list(inspect.signature(script.draw).parameters) == ["data", "path"]


@each
def test_every_run_of_a_configuration_can_be_made(experiment: Experiment):
    cost = load_profile("qwen3-14b", "h100").cost_estimate((1, 2, 4, 8))
    shapes = tuple(cost.by_shape)
    policy_context = PolicyContext(
        pools={"h100": 8}, shape=shapes[0], shape_choices=shapes, max_running=8, cost=cost
    )
    for policy in {a.job.policy for a in planned_runs(experiment.config, REDUCED)}:
        plain = re.sub(r"\+(paper_quality|(noisy-)?oracle(:[\d.]+)?)", "", policy)
        assert load_policy(plain, policy_context).planner is not None
    assert Oracle([]).served is False


@each
def test_the_table_of_experiments_lists_it(experiment: Experiment):
    readme = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    assert f"`python -m experiments {experiment.name}`" in readme


@each
def test_what_was_measured_answers_what_is_claimed(experiment: Experiment):
    if not experiment.measured:
        pytest.skip("not measured yet: its recorded traces were not there")
    outcome = experiment.outcome()
    assert len(outcome.judged) == len(experiment.expected.claims)
    unexplained = [j.claim.id for j in outcome.judged if j.verdict != "agrees" and not j.claim.why]
    assert not unexplained, f"{experiment.name}/{MEASURED} differs without a reason"
    picture = FIGURES / f"{experiment.name}.png"
    assert 3_000 < picture.stat().st_size <= MAX_BYTES


@pytest.mark.parametrize(
    "experiment", some([e for e in ALL if not e.has_size], 2), ids=lambda e: e.name
)
def test_a_small_worked_example_can_be_made_again(experiment: Experiment, tmp_path: Path):
    """Those that need runs of a size are `make experiments`' business."""
    store = Store(tmp_path)
    try:
        measured = experiment.script.measure(
            Context(Results([]), REDUCED, store, experiment.config)
        )
    except Skipped as reason:
        pytest.skip(str(reason))
    assert len(judged_all(experiment.expected, measured.values)) == len(experiment.expected.claims)
    experiment.script.draw(json.loads(json.dumps(measured.data)), tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 3_000


def test_no_figure_is_left_over():
    assert {p.stem for p in FIGURES.glob("*.png")} <= {e.name for e in ALL}


def test_the_page_of_results_links_to_pictures_that_are_there():
    path, text = page()
    linked = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert linked
    assert all((path.parent / link).exists() for link in linked)
