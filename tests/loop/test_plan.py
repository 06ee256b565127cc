"""The search of a loop: what it recommends, and what it says of it."""

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

import heddle
from heddle.cli import main
from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.cost.prices import prices_of
from heddle.epochs.rows import EpochSettings
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.splits import splits
from heddle.planning.block_loops import verl_training
from heddle.planning.blocks import FRAMEWORKS, block
from heddle.planning.deployment import deployment_of_search
from heddle.planning.exports import export
from heddle.search.loops import search_loops
from heddle.search.result import SearchResult
from heddle.search.verdict import command_of, verdict_of_search
from heddle_core.loop.epoch import EpochPlan
from heddle_sim.training_memory import TrainingMemoryError
from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from heddle_verl.settings import read_settings


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
    assert "versions old in the mean, up to " in said


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


@pytest.mark.parametrize(
    ("gpus", "tp", "nodes", "each"), [(10, 1, 2, 5), (10, 2, 5, 2), (12, 4, 3, 4), (24, 8, 3, 8)]
)
def test_nodes_have_whole_engines(found: SearchResult, gpus: int, tp: int, nodes: int, each: int):
    plan = deployment_of_search(found)
    assert plan.loop is not None
    loop = replace(plan.loop, rollout_gpus=gpus, train_gpus=8)
    lines = verl_training(replace(plan, loop=loop), tp)
    assert {f"rollout.nnodes={nodes}", f"rollout.n_gpus_per_node={each}"} <= set(lines)
    # verl 0.9.1's `fully_async_policy`: by default 4 batches, and it refuses another batch size.
    assert "async_training.trigger_parameter_sync_step=1" in lines
    assert "async_training.staleness_threshold=1" in lines
    assert "data.train_batch_size=0" in lines
    assert f"actor_rollout_ref.actor.ppo_mini_batch_size={loop.groups}" in lines
    four = replace(loop, update_every=4, staleness_bound=0.1)
    lines = verl_training(replace(plan, loop=four), tp)
    assert "async_training.trigger_parameter_sync_step=4" in lines
    assert "async_training.staleness_threshold=0.1" in lines


def test_what_makes_no_nodes_or_has_no_bound_is_a_comment(found: SearchResult):
    plan = deployment_of_search(found)
    assert plan.loop is not None
    loop = replace(plan.loop, rollout_gpus=16, regime="laminar", bounded=False)
    lines = verl_training(replace(plan, loop=loop), 16)
    assert [line for line in lines if line.startswith("rollout.")] == []
    why = f"16 and {loop.train_gpus} GPUs are no whole nodes of at most 8 at TP 16"
    assert f"# yours, as {why}: rollout.nnodes=" in lines
    assert "# yours, as laminar has no bound: async_training.staleness_threshold=" in lines


def test_asynchronous_nemo_rl_and_skyrl_have_what_they_insist_on(found: SearchResult):
    plan = deployment_of_search(found)
    assert plan.loop is not None
    loop = replace(plan.loop, rollout_gpus=16, train_gpus=8, staleness_bound=2.0, most_staleness=2)
    nemo = block(replace(plan, loop=loop), "nemo-rl").splitlines()
    assert {
        "policy.generation.vllm_cfg.async_engine=true",
        "loss_fn.use_importance_sampling_correction=true",
        "cluster.num_nodes=3",
        "cluster.gpus_per_node=8",
        "policy.generation.colocated.resources.num_nodes=2",
        "policy.generation.colocated.resources.gpus_per_node=8",
    } <= set(nemo)
    sync = replace(plan, loop=replace(loop, staleness_bound=0.0, most_staleness=0))
    assert "async" not in block(sync, "nemo-rl")
    skyrl = block(replace(plan, loop=loop), "skyrl").splitlines()
    assert "trainer.fully_async.enabled=true" in skyrl
    # At most so many prompts as the batches that may be ahead.
    workers = f"trainer.fully_async.num_parallel_generation_workers={3 * loop.groups}"
    assert {workers, f"trainer.policy_mini_batch_size={loop.groups}"} <= set(skyrl)
    prime = tomllib.loads(block(replace(plan, loop=loop), "prime-rl"))
    # Of the four GPUs that the cluster has for rollouts.
    nodes = {"num_train_nodes": 2, "num_infer_nodes": 1}
    assert prime["deployment"] == {"type": "multi_node", "gpus_per_node": 4, **nodes}


def test_packed_epochs_have_their_lines(found: SearchResult):
    plan = deployment_of_search(found)
    assert plan.loop is not None
    loop = replace(plan.loop, colocated=True, most_staleness=0, epoch_plan="tail:.25")
    packed = replace(plan, loop=loop)
    texts = {name: block(packed, name) for name in FRAMEWORKS if name not in ("sglang", "prime-rl")}
    verl = dict(line.partition("=")[::2] for line in texts["verl"].splitlines())
    skyrl = dict(line.partition("=")[::2] for line in texts["skyrl"].splitlines())
    for keys, at in ((verl, "+data.heddle."), (skyrl, "data.heddle.")):
        own = {key.removeprefix(at): each for key, each in keys.items() if key.startswith(at)}
        assert EpochSettings(**own).checked(at) == EpochPlan.of("tail:.25")
    assert verl["data.custom_cls.name"] == "EpochDataset"
    assert verl["actor_rollout_ref.rollout.router_config_path"] == "heddle.yaml"
    (router,) = [x for x in texts["verl"].splitlines() if x.startswith("# heddle.yaml: ")]
    settings = read_settings(yaml.safe_load(router.partition(": ")[2]))
    assert settings.epoch_file == verl["+data.heddle.epoch_file"]
    for name in ("slime", "vime"):
        (custom,) = [x for x in texts[name].splitlines() if x.startswith("# custom.yaml: ")]
        own = yaml.safe_load(custom.partition(": ")[2])
        own = {key.removeprefix("heddle_"): each for key, each in own.items()}
        assert EpochSettings(**own).checked("") == EpochPlan.of("tail:.25")
        assert f"heddle.epochs.slime.{name.capitalize()}DataSource" in texts[name]
    assert "serve.epoch_file=/shared/epoch.jsonl" in texts["heddle"]
    assert "their order is random" in texts["nemo-rl"]
    # verl's asynchronous trainer takes prompts one by one.
    apart = replace(plan, loop=replace(loop, colocated=False))
    assert "their order is random" in block(apart, "verl")
    random = replace(plan, loop=replace(loop, epoch_plan="random"))
    assert all("epoch" not in block(random, name) for name in texts)


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


def test_the_command_of_a_packed_plan_has_no_number_of_batches(found: SearchResult):
    loop = found.best.loop
    assert loop is not None
    packed = replace(found.best, loop=replace(loop, epoch_plan="sorted"))
    words = ["a.jsonl", "--set", "loop.batches=4", "--gpus", "8"]
    command = command_of(packed, words)
    assert "loop.epoch_plan=sorted" in command
    assert "loop.batches=4" not in command
    assert command[2:5] == ["a.jsonl", "--gpus", "8"]
    given = [*words, "--set", "loop.epoch_plan=sorted"]
    assert "loop.batches=4" in command_of(packed, given)
    assert "loop.batches=4" in command_of(found.best, words)


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


def test_samples_that_the_trainer_does_not_hold_are_left_out_where_that_is_asked(tmp_path: Path):
    path = tmp_path / "long.jsonl.gz"
    first, *others = synth("search", trajectories=48, samples_per_group=4, seed=1)
    grown = msgspec.structs.replace(first.steps[0], tool_s=1.0, tool_tokens=150_000)
    write_trace(path, [msgspec.structs.replace(first, steps=(grown, first.steps[-1])), *others])
    loop = config(str(path), "sync", model="qwen3-14b")
    with pytest.raises(TrainingMemoryError, match="needs"):
        searched(loop, budget_s=0.0)
    drops = loop.on(over_capacity="drop")
    result = searched(drops, budget_s=0.0)
    assert "1 of 48 trajectories left out, longer than engine or trainer holds" in result.notes
    assert result.setup.workload.trajectories == 47


def test_a_row_has_the_degrees_of_its_trainer(trace: str):
    words = ("loop", trace, *BATCHES, "--regimes", "sync", "--set", "loop.train_cp=2", "--json")
    found = json.loads(invoke(*words))
    assert found["regimes"][0]["trainer"] == {"backend": "megatron", "tp": 2, "pp": 1, "cp": 2}
    assert found["recommended"]["loop"]["train_cp"] == 2
