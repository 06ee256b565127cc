"""Nine cells against tuned baselines: what is run, what is kept, what is printed."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from experiments.harness.store import Store
from experiments.tuned import __main__ as command
from experiments.tuned.cells import CELLS, PlannedCell, Row, planned, rows, summaries
from heddle.cluster.config import HostKvScope
from heddle.comparison.tuning import TUNED_BASELINES

CELL = CELLS["coding-8b"]
SMALL = ("--gpus", "1", "--per-gpu", "2", "--jobs", "1")


def cell(
    store: Store,
    *policies: str,
    name: str = "coding-8b",
    gpus: int = 2,
    per_gpu: int = 2,
    host_kv: HostKvScope = "none",
) -> PlannedCell:
    return planned(
        CELLS[name],
        gpus=gpus,
        per_gpu=per_gpu,
        seeds=[977, 978],
        policies=policies,
        store=store,
        host_kv=host_kv,
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command with a cache of its own."""
    monkeypatch.setattr(command, "CACHE", tmp_path)

    def run(*options: str) -> Result:
        return CliRunner().invoke(command.main, [*SMALL, *options])

    return run


def test_there_are_nine_cells_and_32b_has_half_of_the_trajectories(store: Store):
    assert len(CELLS) == 9
    counts = [
        {job.rollout.trajectories for entry in cell(store, name=name).entries for job in entry.jobs}
        for name in ("math-14b", "math-32b")
    ]
    assert counts == [{4}, {2}]


def test_baselines_run_at_every_setting_and_policies_once(store: Store):
    found = cell(store, "heddle", "verl+consolidate@tp2", "slime@tp1/64")
    baselines = [entry for entry in found.entries if entry.baseline]
    assert [entry.name for entry in baselines] == [
        f"{policy}@tp{tp}/{slots}"
        for policy in TUNED_BASELINES
        for tp in (1, 2)
        for slots in (64, 100, 128, 200, 256)
    ]
    own = [entry for entry in found.entries if not entry.baseline]
    assert [(e.name, e.jobs[0].policy) for e in own] == [
        ("heddle", "heddle"),
        ("verl+consolidate@tp2", "verl+consolidate"),
        ("slime@tp1/64", "slime"),
    ]
    clusters = [(e.jobs[0].cluster.tp, e.jobs[0].cluster.max_running) for e in own]
    assert clusters == [(1, 256), (2, 256), (1, 64)]
    assert all([job.rollout.seed for job in e.jobs] == [977, 978] for e in found.entries)
    assert {limit.question["cluster"]["max_running"] for limit in found.limits} == {256}


def test_starts_are_a_setting_of_a_policy_and_host_memory_is_everybodys(store: Store):
    found = cell(store, "heddle@start5", "heddle@standby2", host_kv="cluster")
    started, asleep = (entry.jobs[0].cluster for entry in found.entries if not entry.baseline)
    assert (started.engine_start_s, started.standby_tp) == (5.0, ())
    assert (asleep.engine_start_s, asleep.standby_tp) == (None, (2,))
    assert {job.cluster.host_kv for entry in found.entries for job in entry.jobs} == {"cluster"}


def test_a_degree_that_does_not_hold_the_largest_context_is_no_setting(store: Store):
    found = cell(store, "heddle", name="coding-32b", per_gpu=400)
    assert {entry.jobs[0].cluster.tp for entry in found.entries} == {2}


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("heddle@4", "write a setting as @tp4"),
        ("heddel", "Did you mean 'heddle'"),
        ("verl@tp3", "gpus = 2 is not divisible by tp = 3"),
    ],
)
def test_a_policy_that_cannot_run_is_refused_before_any_run(store: Store, policy: str, said: str):
    with pytest.raises(ValueError, match=said):
        cell(store, policy)


def test_rows_have_the_best_of_each_baseline_and_ratios_to_the_best(store: Store):
    found = cell(store, "heddle", gpus=1)
    for limit in found.limits:
        made = {"bound_s": 50.0, "fluid_s": 60.0, "equal_progress_s": 80.0}
        store.put(limit.key, limit.question, made)
    for number, entry in enumerate(found.entries):
        seconds = 90.0 if entry.name == "heddle" else 200.0 + number
        if entry.name == "slime@tp1/128":
            seconds = 100.0
        for job, more in zip(entry.jobs, (0.0, 20.0), strict=True):
            store.put(job.key, {}, {"makespan_s": seconds + more})
    best, *others, heddle = rows(found, store)
    assert (best.policy, best.makespan_s, best.over_best) == ("slime@tp1/128", 110.0, 1.0)
    assert [row.policy for row in others] == [
        f"{name}@tp1/64" for name in TUNED_BASELINES if name != "slime"
    ]
    assert (heddle.makespan_s, heddle.over_best) == (100.0, 1.1)
    assert heddle.over_best_least == pytest.approx(120.0 / 110.0)
    assert heddle.over_best_most == pytest.approx(100.0 / 90.0)
    assert (heddle.of_bound, heddle.of_fluid, heddle.of_equal_progress) == (0.5, 0.6, 0.8)
    assert [row.baseline for row in (best, *others, heddle)] == [True] * 5 + [False]


def test_summaries_are_geometric_means_and_the_worst_of_policies():
    row = Row(
        cell="a",
        policy="heddle",
        baseline=False,
        makespan_s=1.0,
        over_best=2.0,
        over_best_least=2.0,
        over_best_most=2.0,
        of_bound=0.5,
        of_fluid=0.5,
        of_equal_progress=1.0,
    )
    other = replace(row, cell="b", over_best=0.5, of_bound=0.125)
    verl = replace(row, policy="verl@tp1/64", baseline=True)
    (_, mean, means), (_, worst, least) = summaries([verl, row, other])
    assert (mean, worst) == ("mean", "worst")
    assert means["over_best"] == pytest.approx(1.0)
    assert means["of_bound"] == pytest.approx(math.sqrt(0.5 * 0.125))
    assert (least["over_best"], least["of_bound"]) == (0.5, 0.125)


@pytest.mark.soak
def test_the_command_prints_the_table_and_keeps_what_has_run(
    tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    done = tuned("--cells", "coding-8b,math-8b")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["cell", "policy", "makespan_s"]
    firsts = [line.split()[0] for line in lines]
    assert (firsts.count("coding-8b"), firsts.count("math-8b")) == (1, 1)
    assert [line.split()[:2] for line in lines[-3:-1]] == [["mean", "heddle"], ["worst", "heddle"]]
    assert "the hindsight is theirs" in lines[-1]
    # 25 settings and `heddle` on each of two rollouts, and the limits of each.
    assert done.stderr.startswith("54 results were missing")
    again = tuned("--cells", "math-8b", "--json")
    assert again.stderr.startswith("0 results were missing")
    plain = json.loads(again.stdout)
    assert [row["cell"] for row in plain["rows"]] == ["math-8b"] * 6
    assert plain["summaries"][0]["over_cells"] == "mean"
    for row in plain["rows"]:
        assert row["of_bound"] <= row["of_fluid"] <= 1.0 + 1e-9

    monkeypatch.setattr("experiments.harness.store.code_key", lambda: "other")
    later = tuned("--cells", "math-8b")
    assert later.stderr.startswith("2 results were missing")
    assert "25 runs of baselines were made by other code" in later.stderr
    fresh = tuned("--cells", "math-8b", "--fresh")
    assert fresh.stderr.startswith("26 results were missing")
    assert "other code" not in fresh.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cells", "coding-7b"), "there is no 'coding-7b'; there are: coding-8b"),
        (("--cells", ","), "--cells names none"),
        (("--seeds", "one"), "--seeds one: write numbers"),
        (("--seeds", ","), "--seeds ,: write numbers"),
        (("--policies", "heddel"), "Did you mean 'heddle'"),
    ],
)
def test_a_wrong_option_is_named(tuned, options: tuple[str, ...], said: str):
    done = tuned(*options)
    assert done.exit_code != 0
    assert said in done.stderr
    assert "Traceback" not in done.output
