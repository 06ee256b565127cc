"""Prefill and decode engines as a user gives them: options, TOML, every verb, and bad input."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from heddle.cluster.config import ClusterConfig
from heddle.cluster.gpu_pools import PoolConfig
from heddle.cluster.profiles import load_profiles
from heddle.cluster.role_choice import prefill_share, prefilled_tokens, role_choices
from heddle.cluster.roles import RoleGpus, roles_of
from heddle.comparison.tuning import tuning
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.loops.config import LoopConfig
from heddle.loops.splits import splits
from heddle.runs import load_run
from heddle.setup import Workspace, prepare
from heddle.simulation import simulate
from heddle_core.ids import EngineShape
from tests.app.journals import ONE_RUN, Heddle, run_of

GIVEN = (
    "--gpus",
    "4",
    "--set",
    "cluster.roles=prefill=1,decode=3",
    "--set",
    "cluster.prefill_threshold=100",
)


@pytest.mark.parametrize("text", ["prefill=2,decode=6", " decode=6 , prefill=2,"])
def test_roles_are_gpus_in_any_order(text: str):
    assert roles_of(text) == RoleGpus(prefill=2, decode=6)
    assert roles_of(str(roles_of(text))) == roles_of(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prefill=8", "add decode=GPUS"),
        ("decode=8", "add prefill=GPUS"),
        ("prefill=1,both=7", "'both=7' is no role"),
        ("prefill,decode=7", "'prefill' is no role"),
        ("prefill=0,decode=8", "'prefill=0' is no number of GPUs"),
        (",", "',' names no role: write prefill=GPUS,decode=GPUS"),
        ("prefill=x,decode=8", "'prefill=x' is no number of GPUs"),
        ("prefill=1,prefill=1,decode=6", "two numbers of prefill GPUs"),
        ("prefill=2,decode=4", "are of 6 GPUs, and there are gpus = 8"),
        ("prefill=3,decode=5", "prefill = 3 is not divisible into engines of 2 GPUs"),
        ("prefill=2,decode=5", "decode = 5 is not divisible by tp = 2"),
    ],
)
def test_bad_roles_are_refused_with_the_remedy(
    refused: Callable[..., str], trace: Path, text: str, said: str
):
    assert said in refused(
        *ONE_RUN, trace, "--gpus", "8", "--tp", "2", "--set", f"cluster.roles={text}"
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prefill_threshold": -1}, "prefill_threshold must be 0 or more"),
        ({"handover_fixed_s": -1.0}, "handover_fixed_s must be from 0"),
        ({"prefill_tp": 0}, "prefill_tp must be 1 or more"),
    ],
)
def test_settings_of_roles_have_limits(values: dict[str, int], said: str):
    with pytest.raises(ValueError, match=said):
        ClusterConfig(gpus=4, roles="prefill=2,decode=2", **values)  # type: ignore[arg-type]


def test_engines_without_kv_transfer_are_refused(
    refused: Callable[..., str], trace: Path, tmp_path: Path
):
    given = ("run", trace, "--set", "cluster.roles=prefill=1,decode=1", "--engine", "vllm")
    said = refused(*given, "--model-dir", tmp_path, "--engines", "2")
    assert "give --set runtime.kv_transfer=nixl" in said


def test_policies_get_decode_engines_and_the_controller_the_others(config: RunConfig):
    cluster = ClusterConfig(gpus=8, tp=2, prefill_tp=1, roles="prefill=2,decode=6")
    setup = prepare(replace(config, cluster=cluster))
    assert setup.context.shape == EngineShape("h100", 2, "decode")
    assert {s.role for s in setup.context.shape_choices} == {"decode"}
    assert setup.context.pools == {"h100": 6}
    found = setup.context.disaggregation
    assert found is not None
    assert [spec.shape for spec in found.engines] == [EngineShape("h100", 1, "prefill")] * 2
    whole = prepare(replace(config, cluster=ClusterConfig(gpus=8, tp=1)))
    estimate = whole.context.cost.by_shape[EngineShape("h100", 1)].prefill_s
    assert found.prefill_s_by_shape == {EngineShape("h100", 1, "prefill"): estimate}


@pytest.mark.parametrize("policy", ["verl", "heddle", "libra-cmlfq"])
def test_a_run_with_roles_replays_and_counts_its_hand_overs(
    heddle: Heddle, trace: Path, policy: str
):
    shown = heddle(*ONE_RUN, trace, *GIVEN, "--policies", policy, "--json")
    path = run_of(shown)["run"]
    run = load_run(path)
    assert run.summary["completed"] == 6
    # Six first prompts and no observation have more than 100 new tokens.
    assert run.summary["prefilled_elsewhere"] == 6
    assert run.summary["preemptions_policy"] == 0
    assert heddle("replay", path).exit_code == 0
    toml = Path("run.toml")
    toml.write_text(
        f'trace = "{trace}"\n[cluster]\ngpus = 4\n'
        'roles = "prefill=1,decode=3"\nprefill_threshold = 100\n'
    )
    again = heddle(*ONE_RUN, "-c", toml, "--policies", policy, "--json")
    assert run_of(again)["makespan_s"] == run_of(shown)["makespan_s"]


def test_fake_engines_run_the_same_roles(heddle: Heddle, trace: Path):
    options = ("--engine", "fake", "--set", "runtime.time_scale=0.01", *GIVEN[2:])
    shown = heddle("run", trace, "--engines", "4", *options, "--json")
    assert shown.exit_code == 0, shown.output
    (path,) = Path("runs").iterdir()
    assert load_run(path).summary["prefilled_elsewhere"] == 6
    assert heddle("replay", path).exit_code == 0


def test_prompts_of_a_group_count_once_and_short_observations_never(config: RunConfig):
    scripts = Workspace().workload(config).scripts
    first = {s.group: s.steps[0].prompt_tokens for s in scripts}
    appended = [x.prompt_tokens - x.shared_tokens for s in scripts for x in s.steps[1:]]
    assert prefilled_tokens(scripts, max(appended)) == sum(first.values())
    assert prefilled_tokens(scripts, 0) == sum(first.values()) + sum(appended)
    assert prefilled_tokens(scripts, 10**6) == 0


def test_the_share_of_prefill_is_that_of_its_gpu_seconds(config: RunConfig):
    cluster = ClusterConfig(gpus=8, prefill_threshold=0)
    shared = Workspace()
    scripts, profile = shared.workload(config).scripts, load_profiles(cluster).only
    share = prefill_share(scripts, cluster)
    cost = profile.cost_estimate((1,)).by_shape[profile.shape(1)]
    prefill_s = prefilled_tokens(scripts, 0) * cost.prefill_s
    # Six trajectories on eight engines: a batch of one each.
    decode_s = sum(
        x.output_tokens * cost.iteration_s(1, x.prompt_tokens + x.output_tokens / 2)
        for s in scripts
        for x in s.steps
    )
    assert share == pytest.approx(prefill_s / (prefill_s + decode_s), rel=0.02)
    assert role_choices(scripts, cluster) == (RoleGpus(1, 7), RoleGpus(2, 6))
    assert role_choices(scripts, replace(cluster, gpus=1)) == ()
    wide = replace(cluster, tp=2, prefill_tp=1)
    assert role_choices(scripts, wide) == (RoleGpus(2, 6), RoleGpus(4, 4))


def test_a_comparison_has_the_best_split_beside_engines_that_do_both(heddle: Heddle, trace: Path):
    shown = heddle(
        "compare", trace, "--gpus", "4",
        "--sweep", "cluster.tp=1,2", "--sweep", "cluster.roles=best",
        "--policies", "verl,heddle", "--json",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)["policies"]
    best = [row for row in rows if row.get("best", True)]
    assert [bool(row.get("roles")) for row in best] == [False, True, False, True]
    both, split = (row["makespan_s"]["mean"] for row in best[:2])
    tried = [row["makespan_s"]["mean"] for row in rows if row.get("preset") == "verl"]
    assert split in tried
    assert both in tried
    names = [row["policy"] for row in rows]
    assert "verl@tp1/p1d3" in names
    assert "verl@tp2/p2d2" in names
    # `heddle` plans its engines, so that no TP degree names its rows.
    assert {name for name in names if name.startswith("heddle")} == {
        "heddle", "heddle@p1d3", "heddle@p2d2",
    }  # fmt: skip


def test_the_table_of_settings_has_each_split_and_planned_engines(heddle: Heddle, trace: Path):
    table = heddle(
        "compare", trace, "--gpus", "4",
        "--sweep", "cluster.tp=1,2", "--sweep", "cluster.roles=best",
        "--policies", "verl,heddle", "--wide",
    )  # fmt: skip
    assert table.exit_code == 0, table.output
    lines = table.stdout.splitlines()
    begin = next(k for k, line in enumerate(lines) if line.startswith("policy"))
    head, *rows = lines[begin : lines.index("", begin)]
    assert " ".join(head.split()) == "policy running GPUs by role TP 1 TP 2 planned"
    cells = [row.split() for row in rows]
    assert [row[:3] for row in cells] == [
        ["verl", "100", "-"], ["verl", "100", "p1d3"], ["verl", "100", "p2d2"],
        ["heddle", "100", "-"], ["heddle", "100", "p1d3"], ["heddle", "100", "p2d2"],
    ]  # fmt: skip
    # Engines of TP 2 do not divide one GPU, and policies that plan have no TP degree.
    assert [[cell == "-" for cell in row[3:]] for row in cells] == [
        [False, False, True], [False, True, True], [False, False, True],
        [True, True, False], [True, True, False], [True, True, False],
    ]  # fmt: skip
    assert sum(cell.startswith("*") for row in cells for cell in row) == 4
    assert "verl@tp1/p1d3" in table.stdout or "verl@tp2/p2d2" in table.stdout


def test_best_roles_refuse_given_ones(config: RunConfig):
    cluster = replace(config.cluster, gpus=4, roles="prefill=1,decode=3")
    with pytest.raises(ConfigError, match=r"cluster.roles=best chooses"):
        tuning(replace(config, cluster=cluster), roles=True, workspace=Workspace())
    pools = (PoolConfig(gpu="h100", gpus=2), PoolConfig(gpu="h200", gpus=2))
    mixed = replace(config, cluster=ClusterConfig(pool=pools))
    with pytest.raises(ConfigError, match=r"cluster.roles=best chooses .* of one GPU class"):
        tuning(mixed, roles=True, workspace=Workspace())


def test_best_roles_without_a_split_are_refused(refused: Callable[..., str], trace: Path):
    given = ("compare", trace, "--policies", "verl", "--sweep", "cluster.roles=best")
    said = refused(*given, "--gpus", "1")
    assert "--sweep cluster.roles=best: gpus = 1 cannot be split into engines that prefill" in said
    assert "decode, of TP 4: take more --gpus" in refused(*given, "--gpus", "4", "--tp", "4")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            ("--set", "cluster.prefill_threshold=100"),
            "cluster.prefill_threshold = 100 has no effect without",
        ),
        (("--set", "cluster.prefill_tp=2"), "cluster.prefill_tp = 2 has no effect without"),
        (("--set", "cluster.handover_fixed_s=0"), "cluster.handover_fixed_s = 0.0 has no effect"),
    ],
)
def test_settings_of_roles_without_roles_are_refused(
    refused: Callable[..., str], heddle: Heddle, trace: Path, setting: tuple[str, ...], said: str
):
    for command in ((*ONE_RUN,), ("run",), ("compare", "--policies", "verl")):
        message = refused(*command, trace, *setting)
        assert said in message
        assert "set cluster.roles = prefill=GPUS,decode=GPUS, or leave it out" in message
    best = ("--sweep", "cluster.roles=best", "--gpus", "4")
    assert heddle("compare", "--policies", "verl", trace, *setting, *best).exit_code == 0


def test_degrees_to_try_divide_the_gpus_of_both_roles(config: RunConfig):
    split = replace(config, cluster=ClusterConfig(gpus=8, roles="prefill=2,decode=6"))
    found = tuning(split, tps="best", workspace=Workspace())
    assert [c.tp for c in found.settings] == [1, 2]
    with pytest.raises(ConfigError, match="'prefill=2,decode=6' is not divisible by TP degree 4"):
        tuning(split, tps=[2, 4], workspace=Workspace())
    with pytest.raises(ConfigError, match="prefill = 2 is not divisible into engines of 4 GPUs"):
        replace(split.cluster, tp=4)


def test_prefill_engines_take_the_prefill_off_decode_engines(config: RunConfig, tmp_path: Path):
    """With long prompts and many steps, tokens come at a steadier pace, if not sooner."""
    lines = [json.loads(line) for line in Path(config.trace).read_text().splitlines()]
    for index, line in enumerate(lines):
        line["prompt_tokens"] = 20_000 + index
        line["arrival_s"] = 0.3 * index
    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = replace(config, trace=str(long), cluster=ClusterConfig(gpus=2, max_running=8, tp=1))
    alone = replace(base, cluster=replace(base.cluster, gpus=1))
    split = replace(
        base,
        cluster=replace(base.cluster, roles="prefill=1,decode=1", handover_fixed_s=0.01),
    )
    found = [simulate(c, out=tmp_path / str(k)).summary for k, c in enumerate((alone, split))]
    assert found[1]["prefilled_elsewhere"] == 6
    assert found[1]["tpot_p99_ms"] < found[0]["tpot_p99_ms"]
    assert np.isfinite(found[1]["makespan_s"])


@pytest.mark.parametrize("regime", ["sync", "areal:max_head_offpolicyness=1"])
def test_loops_generate_with_prefill_engines_on_the_gpus_of_the_rollout(
    heddle: Heddle, refused: Callable[..., str], trace: Path, regime: str
):
    loop = (
        "loop", trace, "--regimes", regime, "--set", "loop.train_gpus=4", "--set", "loop.groups=2",
        "--seeds", "1",
        "--set", "loop.samples=2", "--set", "loop.batches=8", "--set", "loop.repeat=true",
        "--set", "cluster.roles=prefill=1,decode=3",
        "--set", "cluster.prefill_threshold=0",
    )  # fmt: skip
    shown = heddle(*loop, "--gpus", "8", "--json")
    assert shown.exit_code == 0, shown.output
    (row,) = json.loads(shown.stdout)["regimes"]
    assert row["step_s"]["mean"] > 0.0
    said = refused(*loop, "--gpus", "9")
    assert "prefill=1,decode=3 has 4 GPUs for engines, and of --gpus 9 4 train" in said
    assert "take loop.train_gpus = 5, or roles that add up to 5" in said
    said = refused(*loop, "--gpus", "4")
    assert "of --gpus 4 4 train: take roles that add up to" in said


def test_roles_leave_a_loop_one_number_of_training_gpus(config: RunConfig):
    cluster = ClusterConfig(gpus=8, roles="prefill=2,decode=2")
    loop = LoopConfig(run=replace(config, cluster=cluster), regimes=("sync",))
    found = splits(loop, None, None)
    assert [(c.train_gpus, c.run.cluster.gpus, c.run.cluster.tp) for c in found] == [
        (4, 4, 1),
        (4, 4, 2),
    ]
    with pytest.raises(ConfigError, match="prefill = 2 is not divisible into engines of 4 GPUs"):
        splits(loop, [4], [4])
    shared = replace(loop, colocated=True)
    with pytest.raises(ConfigError, match="all are shared: take roles that add up to 8"):
        splits(shared, None, None)
    rewarded = replace(loop, reward_gpus=1)
    with pytest.raises(ConfigError, match=r"4 train, 1 compute rewards: take loop\.train_gpus = 3"):
        splits(rewarded, [4], None)


def test_a_step_prefilled_elsewhere_has_one_first_token_and_one_prompt(
    config: RunConfig, tmp_path: Path
):
    line = json.loads(Path(config.trace).read_text().splitlines()[0])
    line["steps"] = [{"output_tokens": 20}]
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps(line) + "\n")
    base = replace(config, trace=str(one), cluster=ClusterConfig(gpus=2))
    split = replace(
        base, cluster=replace(base.cluster, roles="prefill=1,decode=1", prefill_threshold=0)
    )
    found = [simulate(c, out=tmp_path / str(k)).summary for k, c in enumerate((base, split))]
    assert [run["prefilled_elsewhere"] for run in found] == [0, 1]
    assert found[1]["ttft_mean_s"] == pytest.approx(found[0]["ttft_mean_s"])
    assert [run["prefix_hit"] for run in found] == [0.0, 0.0]
    assert found[1]["makespan_s"] > found[0]["makespan_s"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--gpus", "8", "--set", "cluster.roles=prefill=2,decode=4"),
            "are of 6 GPUs, and there are gpus = 8",
        ),
        (("--gpus", "8", "--set", "cluster.roles=prefill=8"), "add decode=GPUS"),
        (("--gpus", "8", "--set", "cluster.roles=bset"), "'bset' is no role with its GPUs"),
        (
            (
                "--gpus",
                "8",
                "--sweep",
                "cluster.roles=best",
                "--set",
                "cluster.roles=prefill=2,decode=6",
            ),
            "leave cluster.roles out",
        ),
        (
            (
                "--set",
                'cluster.pool=[{gpu="h100",gpus=4},{gpu="h200",gpus=4}]',
                "--sweep",
                "cluster.roles=best",
            ),
            "of one GPU class",
        ),
        (
            (
                "--set",
                'cluster.pool=[{gpu="h100",gpus=4}]',
                "--set",
                "cluster.roles=prefill=1,decode=3",
            ),
            "roles names engines of one GPU",
        ),
        (
            ("--gpus", "8", "--sweep", "cluster.roles=best", "--regimes", "best"),
            "a loop is planned without roles",
        ),
        (
            (
                "--gpus",
                "8",
                "--set",
                "cluster.roles=prefill=2,decode=6",
                "--set",
                "cluster.prefill_tp=4",
            ),
            "prefill = 2 is not divisible into engines of 4 GPUs",
        ),
    ],
)
def test_roles_that_cannot_be_planned_are_refused(
    refused: Callable[..., str], trace: Path, options: tuple[str, ...], said: str
):
    assert said in refused("plan", trace, *options)
