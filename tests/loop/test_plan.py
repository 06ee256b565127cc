"""The plan of a loop: estimates beside simulations, and what is refused."""

import json
import shlex
from dataclasses import replace

import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.config_files import ConfigError
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.plan import estimate_step, plan_loop
from heddle.loops.setup import prepare_loop
from heddle.loops.splits import splits
from heddle.setup import Workspace
from heddle_trace.files import write_trace
from heddle_trace.synth import synth

REGIMES = ("sync", "one-step-off", "areal:max_head_offpolicyness=1", "heddle-loop")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "search.jsonl.gz"
    write_trace(path, synth("search", trajectories=1_280, samples_per_group=8, seed=4))
    return str(path)


def config(trace: str, *names: str, policy: str = "verl") -> LoopConfig:
    cluster = ClusterConfig(gpus=16, max_running=64, model="qwen3-8b")
    run = RunConfig(trace=trace, cluster=cluster, policy=PolicyConfig(preset=policy))
    return LoopConfig(run=run, regimes=names or REGIMES, groups=16, samples=8, batches=8)


def test_estimates_are_near_simulations_and_order_them_alike(trace: str):
    errors = []
    tried = splits(config(trace), [4, 8], [1, 4])
    simulated = {
        (row.setup.name, row.setup.train_gpus, row.setup.config.run.cluster.tp): row.step_s.mean
        for row in compare_regimes(tried).tried
    }
    estimated = {}
    for one in tried:
        for name in one.regimes:
            e = estimate_step(prepare_loop(one, name, workspace=Workspace()))
            key = name, e.setup.train_gpus, one.run.cluster.tp
            estimated[key] = e.step_s
            errors.append(abs(e.step_s / simulated[key] - 1.0))
    assert sorted(errors)[len(errors) // 2] < 0.15
    best = min(estimated, key=lambda key: estimated[key])
    assert simulated[best] <= 1.1 * min(simulated.values())


def test_the_first_estimates_are_simulated_and_the_best_of_them_is_taken(trace: str):
    seen: list[tuple[int, int]] = []
    plan = plan_loop(
        splits(config(trace, "sync", "heddle-loop"), [4, 8], [1]),
        simulate=2,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert len(plan.estimates) == 4
    steps = [e.step_s for e in plan.estimates]
    assert steps == sorted(steps)
    assert [row.setup.name for row in plan.simulated] == [e.setup.name for e in plan.estimates[:2]]
    assert plan.best[1].step_s.mean == min(row.step_s.mean for row in plan.simulated)
    assert seen[-1] == (16, 16)
    rows = plan.plain()["estimates"]
    assert [row["simulated_step_s"] is None for row in rows] == [False, False, True, True]


def test_a_slow_trainer_is_said_to_limit_the_step(trace: str):
    setup = prepare_loop(
        replace(config(trace, "heddle-loop"), train_gpus=8), "heddle-loop", workspace=Workspace()
    )
    slow = replace(setup.world, train_s=lambda tokens, pool_trains: 10_000.0)
    found = estimate_step(replace(setup, world=slow))
    assert found.limit == "training"
    assert found.step_s == pytest.approx(10_000.0 + setup.world.update_s)
    assert estimate_step(setup).limit == "rollout"


@pytest.mark.parametrize(
    ("name", "policy", "said"),
    [
        ("april", "verl", "the step of regime april is not estimated"),
        ("verl-separate-async:parameter_sync_step=1", "verl", "GPUs change sides"),
        ("sync", "heddle", "chooses TP degrees itself"),
        ("rollart", "verl", "redundant or dropped"),
        ("libra-release:pool_gpus=0:max_head_offpolicyness=0", "verl", "redundant or dropped"),
        ("libra:pool_gpus=800", "verl", "GPUs change sides"),
    ],
)
def test_what_is_not_estimated_is_refused(trace: str, name: str, policy: str, said: str):
    with pytest.raises(ConfigError, match=said):
        plan_loop(splits(config(trace, name, policy=policy), [8], [1]))


def test_settings_that_do_not_fit_are_left_out_unless_none_fits(trace: str):
    large = config(trace, "sync")
    cluster = replace(large.run.cluster, model="qwen3-32b")
    large = replace(large, run=replace(large.run, cluster=cluster))
    plan = plan_loop(splits(large, [8], [1, 4]), simulate=1)
    assert {e.setup.config.run.cluster.tp for e in plan.estimates} == {4}
    with pytest.raises(ValueError, match="TP 1 holds"):
        plan_loop(splits(large, [8], [1]), simulate=1)


def invoke(*words: str) -> str:
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_that_is_printed_runs_what_was_planned(trace: str):
    words = [
        "--gpus",
        "16",
        "--model",
        "qwen3-8b",
        "--set",
        "loop.groups=16",
        "--set",
        "loop.samples=8",
    ]
    words += [
        "--set",
        "loop.batches=8",
        "--set",
        "loop.train_backend=fsdp",
        "--set",
        "loop.logprob_passes=2",
        "--set",
        "seed=3",
    ]
    words += ["--set", "cluster.max_running=64"]
    chosen = [
        "--set",
        "loop.train_gpus=4",
        "--sweep",
        "cluster.tp=1",
        "--set",
        "plan.simulated=1",
        "--regimes",
        "sync",
    ]
    printed = invoke("plan", trace, *words, *chosen)
    planned = json.loads(invoke("plan", trace, *words, *chosen, "--json"))
    command = shlex.split(printed.splitlines()[-1])
    assert command[:3] == ["next", "heddle", "loop"]
    ran = json.loads(invoke(*command[2:], "--json"))
    assert ran["regimes"][0]["step_s"]["mean"] == planned["best_simulated_step_s"]


def test_colocated_plans_have_regimes_that_can_share_gpus(trace: str):
    words = [
        "--gpus",
        "8",
        "--model",
        "qwen3-8b",
        "--set",
        "loop.groups=8",
        "--set",
        "loop.samples=8",
    ]
    printed = invoke(
        "plan",
        trace,
        "--regimes",
        "best",
        *words,
        "--set",
        "loop.batches=4",
        "--set",
        "loop.colocated=true",
        "--sweep",
        "cluster.tp=2",
    )
    assert "--regimes sync --tp 2" in printed
