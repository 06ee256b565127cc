"""The search of a loop: what it recommends, and what it says of it."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import heddle
from heddle.cli import main
from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.cost.prices import prices_of
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.splits import splits
from heddle.planning.blocks import FRAMEWORKS, block
from heddle.planning.deployment import deployment_of_search
from heddle.planning.exports import export
from heddle.search.loops import search_loops
from heddle.search.result import SearchResult
from heddle.search.verdict import verdict_of_search
from heddle_trace.files import write_trace
from heddle_trace.synth import synth


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "search.jsonl.gz"
    write_trace(path, synth("search", trajectories=160, samples_per_group=4, seed=4))
    return str(path)


def config(trace: str, *names: str, model: str = "qwen3-8b", **options: Any) -> LoopConfig:
    run = RunConfig(trace=trace, cluster=ClusterConfig(gpus=8, max_running=64, model=model))
    return LoopConfig(
        run=run, regimes=names, train_gpus=4, groups=8, samples=4, batches=5, **options
    )


def searched(loop: LoopConfig, **given: Any) -> SearchResult:
    given = {"policies": ("verl", "slime"), "slots": (64,), "tps": [1, 2], **given}
    return search_loops(loop, train_gpus=[4, 6], prices=prices_of({}, ["h100"]), jobs=1, **given)


@pytest.fixture(scope="module")
def found(trace: str) -> SearchResult:
    return searched(config(trace, "sync", "areal:max_head_offpolicyness=1"))


def test_the_recommended_loop_is_near_the_best_of_all_settings(trace: str, found: SearchResult):
    loop = config(trace, "sync", "areal:max_head_offpolicyness=1")
    every = compare_regimes(splits(loop, [4, 6], [1, 2]), fitting_only=True).tried
    best = found.best
    assert best.loop is not None
    mine = next(
        row
        for row in every
        if (row.setup.name, row.setup.train_gpus) == (best.loop.regime, best.loop.train_gpus)
        and row.setup.config.run.cluster.tp == best.candidate.cluster.tp
    )
    assert mine.step_s.mean <= 1.05 * min(row.step_s.mean for row in every)
    assert best.loop.mean_staleness == mine.mean_staleness
    assert best.makespan_s.mean == mine.step_s.mean
    assert found.bound_s <= mine.step_s.mean
    assert len(best.times) == found.draws == 4
    assert best.makespan_s.low <= best.makespan_s.mean <= best.makespan_s.high


def test_other_regimes_and_the_first_as_it_comes_are_judged(found: SearchResult):
    comes = found.as_it_comes
    judged = {each.loop.regime for each in (*found.judged, comes) if each and each.loop}
    assert judged == {"sync", "areal:max_head_offpolicyness=1"}
    assert comes is not None
    assert comes.loop is not None
    assert (comes.loop.regime, comes.loop.train_gpus, comes.candidate.cluster.tp) == ("sync", 4, 1)
    assert sum(found.gpus.values()) == 8
    said = verdict_of_search(found)
    assert said.startswith("Run areal:max_head_offpolicyness=1 under ")
    assert " s a batch (" in said
    assert "x as fast as sync under verl as it comes" in said
    assert "versions old in the mean, at most 1." in said


def test_blocks_have_the_split_and_the_staleness(found: SearchResult):
    plan = deployment_of_search(found)
    assert plan.loop is not None
    train, rollout = plan.loop.train_gpus, plan.loop.rollout_gpus
    for name, lines in {
        "verl": [
            f"trainer.n_gpus_per_node={train}",
            f"rollout.n_gpus_per_node={rollout}",
            "async_training.staleness_threshold=1",
        ],
        "skyrl": ["trainer.fully_async.max_staleness_steps=1"],
        "slime": [f"--actor-num-gpus-per-node {train}"],
        "prime-rl": [f"num_train_gpus = {train}", "max_off_policy_steps = 1"],
        "nemo-rl": [
            f"policy.generation.colocated.resources.gpus_per_node={rollout}",
            "grpo.async_grpo.max_trajectory_age_steps=1",
        ],
    }.items():
        text = block(plan, name).splitlines()
        assert set(lines) <= set(text), name
    shared = replace(plan, loop=replace(plan.loop, colocated=True))
    assert "--colocate" in block(shared, "slime")
    with pytest.raises(ConfigError, match="do not share GPUs"):
        block(shared, "prime-rl")
    assert set(FRAMEWORKS) >= {"verl", "skyrl", "slime", "vime", "prime-rl", "nemo-rl"}


def test_the_file_for_verl_names_the_split(found: SearchResult, tmp_path: Path):
    plan = deployment_of_search(found)
    assert plan.loop is not None
    text = export(plan, tmp_path / "v.yaml")[tmp_path / "v.yaml"]
    assert f"#   rollout.n_gpus_per_node={plan.loop.rollout_gpus}\n" in text


def test_ten_gpus_are_two_nodes_of_five(found: SearchResult):
    plan = deployment_of_search(found)
    assert plan.loop is not None
    ten = replace(plan, loop=replace(plan.loop, rollout_gpus=10))
    assert "rollout.nnodes=2\nrollout.n_gpus_per_node=5" in block(ten, "verl")


def test_settings_that_do_not_fit_are_left_out_unless_none_fits(tmp_path: Path):
    path = tmp_path / "coding.jsonl.gz"
    write_trace(path, synth("coding", trajectories=160, samples_per_group=4, seed=4))
    large = config(str(path), "sync", model="qwen3-32b")
    found = search_loops(
        large.on(gpus=32),
        train_gpus=[16],
        tps=[1, 4],
        policies=("verl",),
        slots=(64,),
        prices=prices_of({}, ["h100"]),
        budget_s=0.0,
        jobs=1,
    )
    assert {each.candidate.cluster.tp for each in found.tried} == {4}
    with pytest.raises(ValueError, match="TP 1 holds"):
        search_loops(
            large.on(gpus=32), train_gpus=[16], tps=[1], prices=prices_of({}, ["h100"]), jobs=1
        )


def test_a_trace_of_few_prompts_is_refused(tmp_path: Path):
    path = tmp_path / "few.jsonl.gz"
    write_trace(path, synth("search", trajectories=12, samples_per_group=4, seed=4))
    with pytest.raises(ConfigError, match="which takes 4 groups at least"):
        searched(config(str(path), "sync", repeat=True))


def invoke(*words: str) -> str:
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


BATCHES = [
    *("--set", "loop.groups=8", "--set", "loop.samples=4", "--set", "loop.batches=5"),
    *("--gpus", "8", "--model", "qwen3-8b"),
]


def test_the_command_of_the_answer_runs_what_was_planned(trace: str):
    words = [trace, *BATCHES, "--set", "loop.train_backend=fsdp", "--set", "seed=3"]
    chosen = ["--regimes", "sync", "--sweep", "loop.train_gpus=4", "--sweep", "cluster.tp=1"]
    planned = json.loads(
        invoke("plan", *words, *chosen, "--max-running", "64", "--budget-s", "0.001", "--json")
    )
    best = planned["recommended"]
    assert best["loop"]["batch_s"] == best["makespan_s"]
    assert (best["gpus"], best["loop"]["train_gpus"]) == (8, 4)
    assert shlex.join(best["command"]).startswith(f"heddle loop {trace} ")
    ran = json.loads(invoke(*best["command"][1:], "--json"))
    (row,) = ran["regimes"]
    assert row["train_gpus"] == 4
    assert row["staleness"]["mean"] == best["loop"]["mean_staleness"]
    # The bound is that of the trace itself, as the run.
    assert row["bound_fraction"] * row["step_s"]["mean"] == pytest.approx(planned["bound_s"])


def test_colocated_plans_have_regimes_that_can_share_gpus(trace: str):
    printed = invoke(
        *("plan", trace, *BATCHES, "--regimes", "best", "--set", "loop.colocated=true"),
        *("--sweep", "cluster.tp=2", "--max-running", "64", "--budget-s", "0.001"),
    )
    assert "--regimes sync --policy verl --tp 2 --max-running 64" in " ".join(printed.split())
    assert "trained in turn" in " ".join(printed.split())


def test_several_clusters_of_a_loop_are_searched(trace: str):
    printed = invoke(
        *("plan", trace, *BATCHES[:-4], "--model", "qwen3-8b", "--regimes", "sync"),
        *("--sweep", "cluster.gpus=8,16", "--max-running", "64", "--budget-s", "0.001", "--json"),
    )
    found = json.loads(printed)
    assert {row["gpus"] for row in found["clusters"]} == {8, 16}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sweep", "cluster.roles=best"), "without roles"),
        (("--regimes", ""), "--regimes names no regime"),
    ],
)
def test_what_a_loop_cannot_have_is_refused(trace: str, words: tuple[str, ...], said: str):
    result = CliRunner().invoke(main, ["plan", trace, *BATCHES, "--regimes", "sync", *words])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_without_time_the_first_regime_is_simulated_on_the_trace(trace: str):
    found = searched(config(trace, "sync", "heddle-loop"), budget_s=0.0)
    assert (found.draws, found.complete, found.simulations) == (0, False, 1)
    (only,) = found.judged
    assert only.makespan_s.low is only.makespan_s.high is None
    (row,) = compare_regimes([config(trace, "sync").on(gpus=4, tp=2)]).tried
    assert only.makespan_s.mean == row.step_s.mean
    assert " s a batch (one run has no interval)." in verdict_of_search(found)


def test_python_plans_loops_too(trace: str):
    found = heddle.plan(
        trace,
        "verl",
        regimes="sync",
        gpus=8,
        model="qwen3-8b",
        max_running=64,
        budget_s=0.0,
        settings={"loop.groups": 8, "loop.samples": 4, "loop.batches": 5},
    )
    assert found.verdict.startswith("Run sync under verl with ")
    (row, *_) = found.rows()
    assert row["loop"]["regime"] == "sync"
    assert "hybrid_engine=False" in found.export("verl")
    assert found.to_pandas()["loop.train_gpus"][0] == row["loop"]["train_gpus"]
