"""Clusters of several GPU classes, from the command line to the journal."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.harness.planned import plan
from heddle import PoolConfig, load_run, simulate
from heddle.cli.options import take_settings
from heddle.cluster.config import ClusterConfig
from heddle.cluster.gpu_pools import read_tags
from heddle.cluster.profiles import load_profiles
from heddle.comparison.compare import compare
from heddle.comparison.tuning import tuning
from heddle.config import PolicyConfig, RunConfig, RuntimeConfig
from heddle.config_files import ConfigError, from_builtins, to_builtins
from heddle.gateway.config import GatewayConfig
from heddle.gateway.setup import prepared
from heddle.reports.figures import running_by_engine
from heddle.reports.page.html import page
from heddle.reports.perfetto import trace_events
from heddle.reports.run_bounds import run_bound
from heddle.runs.record import record
from heddle.runs.replay import replay
from heddle.setup import Workspace, prepare
from heddle_core.events import EngineReady, TrajectoryFinished
from heddle_core.presets import PRESETS
from heddle_gateway.front import FrontSettings
from heddle_sim.profile_files import PROFILE_FOLDER, ProfileError
from tests.app.journals import ONE_RUN, Heddle
from tests.app.reported import unpacked

DOCS = Path(__file__).resolve().parents[2] / "docs"
TWO = (PoolConfig(gpu="h100", gpus=2), PoolConfig(gpu="l40s", gpus=4, tp=2))

POOLS_OF_TWO = '[{gpu="h100",gpus=2},{gpu="l40s",gpus=2}]'
POOLS_OF_EIGHT = '[{gpu="h100",gpus=8},{gpu="l40s",gpus=8}]'


def on_two(config: RunConfig, policy: str = "verl", **cluster: object) -> RunConfig:
    """The same run on 2 H100 and 4 L40S."""
    pools = {"pool": TWO, "max_running": 2, **cluster}
    return replace(
        config,
        cluster=ClusterConfig(**pools),  # type: ignore[arg-type]
        policy=PolicyConfig(preset=policy),
    )


def test_pools_say_classes_and_gpus_of_the_whole_cluster():
    cluster = ClusterConfig(pool=TWO, tp=1)
    assert cluster.pools == {"h100": 2, "l40s": 4}
    assert (cluster.gpu, cluster.gpus, cluster.engine_count) == ("h100", 6, 4)
    assert [(c.gpu, c.gpus, c.tp) for c in cluster.classes] == [("h100", 2, 1), ("l40s", 4, 2)]
    assert cluster.tps == "1 (h100), 2 (l40s)"
    one = ClusterConfig(gpu="h200", gpus=16)
    assert one.pools == {"h200": 16}
    assert one.classes == (one,)


def test_a_configuration_with_pools_is_read_back(config: RunConfig):
    given = on_two(config)
    assert from_builtins(json.loads(json.dumps(to_builtins(given))), "run") == given


@pytest.mark.parametrize("policy", PRESETS)
def test_every_preset_ends_all_trajectories_on_two_classes_and_replays(
    policy: str, config: RunConfig, tmp_path: Path
):
    run = load_run(simulate(on_two(config, policy, failures="e0@1"), out=tmp_path).path)
    events = [entry.event for entry in run.entries()]
    assert sum(isinstance(e, TrajectoryFinished) for e in events) == 6
    assert {e.shape.gpu for e in events if isinstance(e, EngineReady)} == {"h100", "l40s"}
    assert replay(run).divergence is None
    bound = prepare(on_two(config, policy)).bound()
    assert run.summary["makespan_s"] >= bound.makespan_s * (1 - 1e-9)


def test_one_pool_is_the_cluster_of_its_class(config: RunConfig, tmp_path: Path):
    plain = replace(config, cluster=ClusterConfig(gpu="l40s", gpus=4, tp=2))
    pool = (PoolConfig(gpu="l40s", gpus=4, tp=2),)
    for policy in ("heddle", "verl"):
        runs = [
            load_run(
                simulate(
                    replace(config, cluster=cluster, policy=PolicyConfig(preset=policy)),
                    out=tmp_path,
                ).path
            )
            for cluster in (plain.cluster, ClusterConfig(pool=pool))
        ]
        first, second = ([(e.event, e.commands) for e in run.entries()] for run in runs)
        assert first == second
        assert runs[0].summary == runs[1].summary


def test_a_plan_names_the_class_of_each_group(config: RunConfig):
    found = plan(on_two(config), planner="exact")
    assert found.problem.pools == {"h100": 2, "l40s": 4}
    assert {group["gpu"] for group in found.groups()} <= {"h100", "l40s"}


@pytest.mark.parametrize(
    "pools",
    [("--gpu", "H100"), ("--set", 'cluster.pool=[{gpu="H100",gpus=2},{gpu="L40S",gpus=2}]')],
)
def test_json_names_classes_as_their_profiles_do(
    heddle: Heddle, trace: Path, pools: tuple[str, ...]
):
    done = heddle("compare", trace, *pools, "--policies", "verl", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["cluster"]["gpu"] in ("h100", "h100, l40s")
    assert found["cluster"]["gpu"].split(", ") == list(found["prices"])
    named = [pool["gpu"] for pool in found["cluster"].get("pools", [])]
    assert named == (["h100", "l40s"] if pools[0] == "--set" else [])


def test_a_comparison_names_its_pools(config: RunConfig, tmp_path: Path):
    found = compare(on_two(config), ["verl", "heddle"], out=tmp_path, jobs=1).plain()
    assert found["cluster"]["pools"] == [
        {"gpu": "h100", "gpus": 2, "tp": 1},
        {"gpu": "l40s", "gpus": 4, "tp": 2},
    ]
    assert found["cluster"]["gpu"] == "h100, l40s"
    assert all(row["bound_fraction"] <= 1.0 for row in found["policies"])


def test_the_best_setting_is_looked_for_on_each_class(config: RunConfig):
    found = tuning(on_two(config), tps=[1, 2], workspace=Workspace())
    assert found.tps == (
        *("1 (h100), 1 (l40s)", "1 (h100), 2 (l40s)"),
        *("2 (h100), 1 (l40s)", "2 (h100), 2 (l40s)"),
    )
    assert found.base.classes[1].tp == 2
    [first, *_] = found.variants(on_two(config), ["verl"], Workspace())
    assert first.name == "verl@tp1@h100+1@l40s"


def test_tp_choices_hold_for_each_class_as_far_as_it_has_them():
    cluster = ClusterConfig(pool=TWO, tp_choices=(1, 4))
    assert [each.tps for each in load_profiles(cluster).classes] == [(1,), (1, 4)]
    wide = (PoolConfig(gpu="h100", gpus=8), PoolConfig(gpu="l40s", gpus=4))
    with pytest.raises(ProfileError, match="pool of h100: none of the TP degrees in tp_choices"):
        load_profiles(ClusterConfig(pool=wide, tp_choices=(3,)))
    with pytest.raises(
        ValueError, match=r"tp_choices = \[4\] has no .* for the 2 GPUs of the pool of h100"
    ):
        ClusterConfig(pool=TWO, tp_choices=(4,))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            '--set cluster.pool=[{gpu="h100",gpus=8},{gpu="H100",gpus=4}]',
            "GPU class H100 is named twice, with 8 and 4 GPUs",
        ),
        (
            '--set cluster.pool=[{gpu="h100",gpus=0}]',
            "the pool of h100 has 0 GPUs: give",
        ),
        (
            '--set cluster.pool=[{gpu="h100",gpus=8},{gpu="x9",gpus=8}]',
            "unknown GPU 'x9'",
        ),
        (
            '--set cluster.pool=[{gpu="h100",gpus=8}] --gpus 16',
            "--gpus 16: sets cluster.gpus = 16, and the pools of --set cluster.pool=[",
        ),
        (
            '--set cluster.pool=[{gpu="h100",gpus=8}] --gpu l40s',
            "--gpu l40s: sets cluster.gpu = l40s, and the pools",
        ),
        ('--set cluster.pool=["h100"]', "cluster.pool"),
        ('--set cluster.pool=[{gpu="h100",gpus=4,dp=2}]', "cluster.pool.dp is not a key"),
        (
            '--set cluster.pool=[{gpu="h100",gpus=4,tp=0}]',
            "the pool of h100 has tp = 0: take",
        ),
        (
            '--set cluster.pool=[{gpu="h100",gpus=4,profile="x.toml"}]',
            "give the path of a profile file, ending in .json",
        ),
        (
            '--set cluster.pool=[{gpu="h100",gpus=3,tp=2}]',
            "gpus = 3 is not divisible by tp = 2",
        ),
        (
            f"--set cluster.pool={POOLS_OF_EIGHT} --set cluster.mix=[4,4]",
            "mix names engines of one GPU class",
        ),
        (
            f"--set cluster.pool={POOLS_OF_EIGHT} --set cluster.mix=[4,4]",
            "its own TP degree, as tp = 2",
        ),
        (
            '--set cluster.pool=[{gpu="h100",gpus=2}] --set cluster.roles=prefill=1,decode=1',
            "give --gpu and --gpus in place of cluster.pool",
        ),
        (
            '--set cluster.pool=[{gpu="h100",gpus=2}] --set cluster.tp_choices=[4]',
            "add one from 1 to 2, or leave the pool",
        ),
        (
            f"--set cluster.pool={POOLS_OF_EIGHT} --set cluster.standby_tp=[4]",
            "standby_tp names engines of one GPU class",
        ),
        (
            f'--set cluster.pool={POOLS_OF_TWO} --set policy.tags=["x=h100"]',
            "policy.tags: x=h100: the workload has no such task",
        ),
        (
            f'--set cluster.pool={POOLS_OF_TWO} --set policy.tags=["coding=h20"]',
            "there are no GPUs of class h20",
        ),
        (
            '--set cluster.pool=[{gpu="h100",gpus=2}] --set policy.tags=["coding"]',
            "'coding' is not TASK=CLASS",
        ),
        (
            '--set cluster.pool=[{gpu="h100",gpus=8},{gpu="l40s",gpus=1}] --model qwen3-32b',
            "pool of l40s: qwen3-32b on l40s cannot run at TP 1",
        ),
    ],
)
def test_pools_that_cannot_be_are_refused(
    options: str, said: str, trace: Path, refused: Callable[..., str]
):
    assert said in refused(*ONE_RUN, trace, *options.split(), "--policies", "rollart")


def test_a_class_that_holds_no_context_is_named(refused: Callable[..., str], tmp_path: Path):
    path = tmp_path / "long.jsonl"
    step = {"output_tokens": 10}
    record = {
        "trajectory_id": "a/0",
        "group_id": "a",
        "workload": "math",
        "prompt_tokens": 400_000,
        "steps": [step],
    }
    path.write_text(json.dumps(record) + "\n")
    pools = ("--set", 'cluster.pool=[{gpu="h100",gpus=8,tp=8},{gpu="l40s",gpus=1}]')
    assert "qwen3-14b on l40s at TP 1 holds" in refused(
        *ONE_RUN, path, *pools, "--policies", "verl"
    )
    assert "qwen3-14b on l40s at TP 1 holds" in refused("plan", path, *pools)


def test_tables_of_pools_are_checked_by_key(
    trace: Path, tmp_path: Path, refused: Callable[..., str]
):
    toml = tmp_path / "mixed.toml"
    toml.write_text('[[cluster.pool]]\ngpu = "h100"\ngpu_count = 8\n')
    assert "cluster.pool.gpu_count is not a key" in refused(*ONE_RUN, trace, "-c", toml)
    toml.write_text('[[cluster.pool]]\ngpu = "h100"\ngpus = "many"\n')
    assert "mixed.toml: cluster.pool.gpus" in refused(*ONE_RUN, trace, "-c", toml)


def test_loops_name_the_trainers_type_and_vllm_engines_take_one_class(
    trace: Path, refused: Callable[..., str], tmp_path: Path
):
    toml = tmp_path / "mixed.toml"
    toml.write_text('[[cluster.pool]]\ngpu = "h100"\ngpus = 8\n')
    assert "give loop.train_gpu, the GPU type of the trainer" in refused(
        "loop", trace, "--seeds", "1", "-c", toml, "--regimes", "sync"
    )
    vllm = ("--engine", "vllm", "--model-dir", tmp_path)
    assert "leave the pools out" in refused("run", trace, "-c", toml, *vllm)


def test_a_pool_may_have_a_profile_file_of_the_same_model(
    config: RunConfig, tmp_path: Path, heddle: Heddle, trace: Path
):
    found = json.loads((PROFILE_FOLDER / "qwen3-14b.l40s.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**found, "gpu": "new"}))
    pools = ("--set", f'cluster.pool=[{{gpu="h100",gpus=2}},{{gpu="new",gpus=2,profile="{path}"}}]')
    result = heddle(*ONE_RUN, trace, *pools, "--policies", "heddle")
    assert result.exit_code == 0, result.output
    assert "2 x h100 + 2 x new" in result.output
    for change, said in (
        ({"gpu": "new", "model": "other"}, "a cluster serves one model"),
        ({"gpu": "new", "kv_bytes_per_token": 1}, "no KV can move between them"),
        ({}, "is a profile of l40s"),
    ):
        path.write_text(json.dumps({**found, **change}))
        failed = heddle(*ONE_RUN, trace, *pools, "--policies", "heddle")
        assert failed.exit_code == 2
        assert said in failed.output


def test_tags_are_read_as_written():
    assert read_tags(("swe=H800", "a=b=h20")) == {"swe": "h800", "a=b": "h20"}
    with pytest.raises(ValueError, match="'a' is tagged twice"):
        read_tags(("a=h20", "a=h800"))
    with pytest.raises(ConfigError, match="there are no GPUs of class h20"):
        prepare(
            RunConfig(
                trace="traces/tiny.jsonl",
                cluster=ClusterConfig(pool=TWO),
                policy=PolicyConfig(preset="rollart", tags=("coding=h20",)),
            )
        )


def test_a_class_beside_a_profile_file_is_that_of_the_file(
    refused: Callable[..., str], trace: Path, tmp_path: Path
):
    file = tmp_path / "mine.json"
    file.write_bytes((PROFILE_FOLDER / "qwen3-8b.h200.json").read_bytes())
    said = refused(*ONE_RUN, trace, "--model", file, "--gpu", "h20")
    assert f"--gpu h20: {file} is a profile of h200: leave --gpu out" in said


def test_a_page_names_the_class_of_engines_where_there_are_several(
    config: RunConfig, tmp_path: Path
):
    one = replace(config, policy=PolicyConfig(preset="verl"))
    runs = [load_run(simulate(each, out=tmp_path).path) for each in (on_two(config), one)]
    labels = ["h100 TP 1", "h100 TP 1", "l40s TP 2", "l40s TP 2"]
    mixed, plain = (unpacked(page([run], run_bound))[0]["runs"][0] for run in runs)
    assert [engine["label"] for engine in mixed["engines"]] == labels
    assert mixed["fleet"]["of"] == [["l40s TP 2", 2, 2], ["h100 TP 1", 1, 2]]
    assert [engine["label"] for engine in plain["engines"]] == ["TP 1", "TP 1"]
    assert b"engine e3 (l40s TP 2)" in trace_events(record(runs[0]), packed=False)
    assert running_by_engine(runs[0])[2] == labels


def test_a_table_of_pools_in_single_brackets_is_named(refused: Callable[..., str], trace: Path):
    Path("one.toml").write_text('[cluster.pool]\ngpu = "h100"\ngpus = 2\n', encoding="utf-8")
    said = refused(*ONE_RUN, trace, "-c", "one.toml")
    assert "one.toml: cluster.pool is a list of tables: write [[cluster.pool]] in place of" in said


def test_a_run_takes_its_gpus_from_pools(heddle: Heddle, refused: Callable[..., str], trace: Path):
    pools = ("--set", 'cluster.pool=[{gpu="h100",gpus=1},{gpu="l40s",gpus=2}]')
    said = refused("run", trace, "--engines", 2, *pools)
    assert "--engines 2: sets cluster.gpus = 2, and the pools of" in said
    assert "--tp 2,1: mix names engines of one GPU class" in refused(
        "run", trace, "--tp", "2,1", *pools
    )
    done = heddle("run", trace, "--tp", 1, *pools, "--set", "runtime.time_scale=0.001", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["gpu_hours"] > 0.0


def test_tags_that_no_policy_reads_are_refused(
    heddle: Heddle, refused: Callable[..., str], trace: Path
):
    given = (trace, "--gpus", 2, "--set", 'policy.tags=["coding=h100"]')
    for command in ((*ONE_RUN,), ("run",), ("compare", "--policies", "verl,heddle")):
        given = (
            trace,
            *(() if command[0] == "run" else ("--gpus", 2)),
            "--set",
            'policy.tags=["coding=h100"]',
        )
        said = refused(*command, *given)
        assert "policy.tags: coding=h100 has no effect under these policies: take rollart" in said
    for policies in ("verl,rollart", "verl+tagged_affinity"):
        done = heddle(
            "compare",
            trace,
            "--policies",
            policies,
            "--set",
            'policy.tags=["coding=h100"]',
            "--gpus",
            2,
        )
        assert done.exit_code == 0, done.output


def test_pools_are_set_as_the_page_says() -> None:
    (said,) = re.findall(r"--set '(cluster\.pool=.*?)'", (DOCS / "cluster.md").read_text())
    pool = take_settings((said,)).cluster.pool
    assert [(each.gpu, each.gpus, each.tp) for each in pool] == [("h800", 96, None), ("h20", 32, 2)]


def test_one_repository_is_one_model_on_types_with_and_without_a_shipped_profile() -> None:
    model = "nvidia/Llama-3.3-70B-Instruct-NVFP4"
    pools = (PoolConfig(gpu="h200", gpus=4), PoolConfig(gpu="b200", gpus=4))
    profiles = load_profiles(ClusterConfig(model=model, pool=pools, tp=4))
    packages = [each.profile.source.package for each in profiles.classes]
    assert packages == ["heddle roofline", "aiconfigurator-core"]


def test_engines_by_url_have_the_tp_degrees_that_all_types_have():
    pool = (PoolConfig(gpu="h100", gpus=8), PoolConfig(gpu="l40s", gpus=1))
    run = RunConfig(
        trace="gateway",
        cluster=ClusterConfig(model="qwen3-8b", pool=pool),
        runtime=RuntimeConfig(engine="http"),
    )
    setup, _, _ = prepared(run, GatewayConfig(front=FrontSettings(max_open=64)))
    shapes = {(shape.gpu, shape.tp) for shape in setup.context.cost.by_shape}
    assert shapes == {(gpu, tp) for gpu in ("h100", "l40s") for tp in (1, 2, 4, 8)}
