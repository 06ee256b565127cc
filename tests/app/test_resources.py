"""Engines asleep and KV in host memory: what a configuration makes of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import capacity_tokens, load_cluster_profile, memory_profile
from heddle.comparison.compare import compare
from heddle.comparison.tuning import tuning
from heddle.config import PolicyConfig, RunConfig, RuntimeConfig
from heddle.engines import engine_facts
from heddle.setup import STANDBY_START_S, Workspace, prepare
from heddle.simulation import simulate
from heddle_core.ids import EngineShape
from heddle_runtime.vllm.checks import EngineSetupError
from heddle_sim.profile_files import ProfileError
from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from tests.app.journals import ONE_RUN, Heddle


def on(config: RunConfig, policy: str = "heddle", **cluster: object) -> RunConfig:
    made = replace(config.cluster, **({"gpus": 8} | cluster))
    return replace(config, cluster=made, policy=PolicyConfig(preset=policy))


def test_engines_asleep_start_soon_and_take_kv_from_all(config: RunConfig):
    plain, asleep = prepare(on(config)), prepare(on(config, standby_tp=(4, 8)))
    wide, narrow = EngineShape("h100", 8), EngineShape("h100", 2)
    assert asleep.context.start_s(wide) == STANDBY_START_S < plain.context.start_s(wide)
    assert asleep.context.start_s(narrow) == plain.context.start_s(narrow)
    assert asleep.simulation.start_s(EngineShape("h100", 4)) == STANDBY_START_S
    lost_bytes = 2 * asleep.config.cluster.standby_gib * 2**30
    for tp in (1, 8):
        before, after = (s.profile.at(tp).kv_capacity_tokens for s in (plain, asleep))
        assert before - after == pytest.approx(
            tp * lost_bytes / plain.profile.kv_bytes_per_token, abs=1.0
        )
        shape = EngineShape("h100", tp)
        believed = [s.context.cost.by_shape[shape].kv_capacity_tokens for s in (plain, asleep)]
        assert believed[0] - believed[1] == before - after


def test_engines_asleep_that_leave_no_kv_are_refused_by_degree():
    crowded = ClusterConfig(gpus=8, standby_tp=(8,), standby_gib=50.0)
    with pytest.raises(ProfileError, match=r"engines asleep on its GPUs .* leave no room"):
        load_cluster_profile(crowded)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"standby_tp": (0,)}, "standby_tp"),
        ({"standby_tp": (16,)}, "standby_tp"),
        ({"standby_tp": (4, 4)}, "each once"),
        ({"standby_gib": -1.0}, "standby_gib"),
        ({"standby_start_s": float("nan")}, "standby_start_s"),
        ({"host_kv_gib": 0.0}, "host_kv_gib"),
        ({"host_kv_gb_per_s": 0.0}, "host_kv_gb_per_s"),
    ],
)
def test_what_cannot_be_is_named(wrong: dict[str, object], said: str):
    with pytest.raises(ValueError, match=said):
        ClusterConfig(gpus=8, **wrong)


def test_policies_that_start_no_engine_have_none_asleep(config: RunConfig):
    given = on(config, standby_tp=(8,))
    shared = Workspace()
    found = tuning(given, tps=[1, 2], workspace=shared)
    rows = found.variants(given, ["verl", "heddle", "heddle+keep_engines"], shared)
    assert {(row.policy, row.cluster.standby_tp) for row in rows} == {
        ("verl", ()),
        ("heddle", (8,)),
        ("heddle+keep_engines", ()),
    }


@pytest.fixture
def crowded(tmp_path: Path) -> RunConfig:
    """Contexts that outgrow the KV of their engines, for a policy that changes engines."""
    path = tmp_path / "crowded.jsonl.gz"
    write_trace(path, synth("search", trajectories=600, seed=5))
    cluster = ClusterConfig(gpus=2, max_running=256)
    return RunConfig(trace=str(path), cluster=cluster, policy=PolicyConfig(preset="slime"))


@pytest.mark.parametrize("scope", ["engine", "cluster"])
def test_kv_in_host_memory_saves_prefill(crowded: RunConfig, scope: str, tmp_path: Path):
    plain = simulate(crowded, out=tmp_path)
    config = replace(crowded, cluster=replace(crowded.cluster, host_kv=scope))
    stored = simulate(config, out=tmp_path)
    assert stored.summary["output_tokens"] == plain.summary["output_tokens"]
    assert stored.summary["prefix_hit"] > plain.summary["prefix_hit"]
    small = replace(config, cluster=replace(config.cluster, host_kv_gib=0.01))
    assert simulate(small, out=tmp_path).summary["prefix_hit"] < stored.summary["prefix_hit"]


def test_a_store_of_the_cluster_is_part_of_the_estimate(config: RunConfig):
    shape = EngineShape("h100", 2)
    costs = {
        scope: prepare(on(config, host_kv=scope)).context.cost.by_shape[shape]
        for scope in ("none", "engine", "cluster")
    }
    assert costs["none"].load_s is costs["engine"].load_s is None
    assert costs["cluster"].restore_s < costs["engine"].restore_s == costs["none"].prefill_s


@pytest.mark.parametrize("wrong", [{"host_kv": "cluster"}, {"standby_tp": (2,)}])
def test_a_run_on_vllm_refuses_what_only_simulations_have(
    config: RunConfig, wrong: dict[str, object]
):
    runtime = RuntimeConfig(engine="vllm", model_dir="nowhere")
    with pytest.raises(EngineSetupError, match=next(iter(wrong))):
        engine_facts(replace(on(config, **wrong), runtime=runtime), 1_000)


def test_the_command_line_has_both(heddle: Heddle, trace: Path):
    shown = heddle(
        *ONE_RUN,
        str(trace),
        "--gpus",
        "8",
        "--set",
        "cluster.standby_tp=[4,8]",
        "--set",
        "cluster.host_kv=engine",
    )
    assert shown.exit_code == 0, shown.output
    wrong = heddle(*ONE_RUN, str(trace), "--set", 'cluster.standby_tp=[4,"x"]')
    assert wrong.exit_code == 2
    assert "expected `int`, got `str`" in wrong.output


@pytest.fixture
def tight(tmp_path: Path) -> RunConfig:
    """Qwen3-32B at TP 1, where engines asleep leave little KV: some contexts fit only without."""
    path = tmp_path / "tight.jsonl.gz"
    write_trace(path, synth("coding", trajectories=32, samples_per_group=8, seed=0))
    cluster = ClusterConfig(model="qwen3-32b", gpus=8, standby_tp=(4, 8), over_capacity="drop")
    return RunConfig(trace=str(path), cluster=cluster)


def test_rows_with_and_without_engines_asleep_have_the_same_trajectories(
    tight: RunConfig, tmp_path: Path
):
    result = compare(tight, ["verl", "heddle"], out=tmp_path, jobs=1)
    assert result.workload.dropped
    tokens = {run.summary["output_tokens"] for run in result.runs}
    assert tokens == {result.workload.output_tokens}
    assert {run.summary["dropped_over_capacity"] for run in result.runs} == {
        len(result.workload.dropped)
    }


def test_the_bound_has_the_kv_of_the_row_that_has_most(tight: RunConfig, tmp_path: Path):
    result = compare(tight, ["heddle", "verl"], out=tmp_path, jobs=1)
    without = prepare(
        replace(tight, cluster=replace(tight.cluster, standby_tp=())), workload=result.workload
    )
    assert result.bound.makespan_s == pytest.approx(without.bound().makespan_s)
    assert all(row.bound_fraction <= 1.0 for row in result.policies)


def test_the_best_degree_holds_the_contexts_beside_engines_asleep(tight: RunConfig, tmp_path: Path):
    strict = replace(tight, cluster=replace(tight.cluster, over_capacity="error"))
    found = tuning(strict, tps="best", workspace=Workspace())
    largest = prepare(strict_at(strict, 8)).workload.largest_tokens
    for cluster in (found.base, *found.settings):
        assert capacity_tokens(memory_profile(cluster), cluster.tp) >= largest


def strict_at(config: RunConfig, tp: int) -> RunConfig:
    return replace(config, cluster=replace(config.cluster, tp=tp))


def test_a_comparison_says_what_the_cluster_has(heddle: Heddle, trace: Path):
    options = (
        "--gpus",
        "8",
        "--set",
        "cluster.standby_tp=[4]",
        "--set",
        "cluster.host_kv=engine",
        "--set",
        "cluster.engine_start_s=5",
    )
    shown = heddle("compare", str(trace), "--policies", "verl", *options)
    line = " ".join(shown.stdout.partition("cluster")[2].partition("profile")[0].split())
    for what in ("start in 5 s", "TP 4 asleep", "host memory for each engine"):
        assert what in line
    told = heddle("compare", str(trace), "--policies", "verl", "--json", *options)
    cluster = json.loads(told.stdout)["cluster"]
    assert (cluster["standby_tp"], cluster["host_kv"]) == ([4], "engine")
    assert cluster["engine_start_s"] == 5.0
