"""Settings that a comparison tries: which, for which policies, and what is said of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.comparison.compare import compare
from heddle.comparison.result import Comparison
from heddle.comparison.tuning import SLOTS, TUNED_BASELINES, Choice, Tuning, tuning
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.runs import load_run
from heddle.setup import Workspace, prepare
from heddle_core.presets import PRESETS
from heddle_sim.profile_files import ProfileError
from tests.app.journals import Heddle

FOUR = ClusterConfig(gpus=4, max_running=2)


@pytest.fixture
def four(config: RunConfig) -> RunConfig:
    return replace(config, cluster=FOUR)


@pytest.fixture
def compared(four: RunConfig, tmp_path: Path) -> Comparison:
    """Two baselines at two TP degrees and two numbers of slots, and a policy with a planner."""
    return compare(
        four,
        ["slime", "heddle", "verl"],
        tps=[2, 1],
        slots=[1, 3],
        seeds=2,
        out=tmp_path / "runs",
        jobs=1,
    )


def settings(
    config: RunConfig, *, tps: Choice = None, slots: Choice = None
) -> list[tuple[int, int]]:
    found = tuning(config, tps=tps, slots=slots, workspace=Workspace())
    return [(cluster.tp, cluster.max_running) for cluster in found.settings]


def longest_context(trace: Path, tokens: int, lines: slice = slice(2, 3)) -> None:
    """Give some trajectories of a trace a first prompt of so many tokens."""
    made = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in made[lines]:
        line["prompt_tokens"] = tokens
    trace.write_text("".join(json.dumps(line) + "\n" for line in made))


def test_nothing_is_tried_unless_asked_for(config: RunConfig):
    found = tuning(config, workspace=Workspace())
    assert found == Tuning(base=config.cluster, settings=(config.cluster,), swept=False)


def test_best_tries_degrees_that_divide_the_gpus_and_numbers_up_to_the_largest_batch(
    four: RunConfig,
):
    six = replace(four, cluster=replace(FOUR, gpus=6))
    assert settings(four, tps="best") == [(1, 2), (2, 2), (4, 2)]
    assert settings(six, tps="best") == [(1, 2), (2, 2)]
    assert settings(four, slots="best") == [(1, n) for n in (2, *SLOTS)]
    both = settings(four, tps=[4, 1], slots=[7, 3])
    assert both == [(4, 7), (4, 3), (1, 7), (1, 3)]


def test_a_degree_that_does_not_hold_the_largest_context_is_left_out_of_best(
    four: RunConfig, trace: Path
):
    longest_context(trace, 400_000)  # TP 1 holds 263,017 tokens, TP 2 706,537
    assert settings(four, tps="best") == [(2, 2), (4, 2)]
    found = tuning(four, tps="best", workspace=Workspace())
    assert found.base.tp == 2, "TP 1 would refuse the trace for every policy"
    with pytest.raises(ConfigError, match=r"TP degree 1 hold 263,0.*leave 1 out; best takes"):
        settings(four, tps=[1, 2])


def test_what_the_widest_engines_cannot_hold_is_dropped_at_all_settings_alike(
    four: RunConfig, trace: Path
):
    longest_context(trace, 900_000, slice(0, 1))
    longest_context(trace, 9_000_000, slice(1, 2))
    dropping = replace(four, cluster=replace(FOUR, over_capacity="drop"))
    found = tuning(dropping, tps="best", workspace=Workspace())
    assert [c.tp for c in found.settings] == [4]
    workload = prepare(replace(dropping, cluster=found.base)).workload
    assert (len(workload.scripts), workload.dropped) == (5, ("g0/1",))


def test_a_mix_gives_way_to_uniform_degrees(four: RunConfig):
    mixed = replace(four, cluster=replace(FOUR, mix=(2, 1, 1)))
    found = tuning(mixed, tps=[1, 2], workspace=Workspace())
    assert [c.tps for c in found.settings] == ["1", "2"]
    assert tuning(mixed, slots=[1, 2], workspace=Workspace()).tps == ("2, 1, 1",)


@pytest.mark.parametrize(
    ("tps", "slots", "said"),
    [
        ([], None, "no TP degrees are listed"),
        ([2, 0], None, "TP degrees must be 1 or more, not 0"),
        ([1, 1], None, "1 is listed twice"),
        ([1, 3], None, "TP degrees that fit: 1, 2, 4, 8"),
        ([1, 8], None, "gpus = 4 is not divisible by TP degree 8.*cluster.mix"),
        ("widest", None, "'widest' is neither best nor a list"),
        (None, [], "no numbers of running steps are listed"),
        (None, [1, 1_000_000], "1000000 running steps: max_running must be"),
    ],
)
def test_settings_that_cannot_be_tried_are_named(
    four: RunConfig, tps: Choice, slots: Choice, said: str
):
    with pytest.raises((ConfigError, ProfileError), match=said):
        settings(four, tps=tps, slots=slots)


def test_no_degree_divides_the_gpus(tmp_path: Path, four: RunConfig):
    from heddle_sim.profile_files import PROFILE_FOLDER

    profile = json.loads((PROFILE_FOLDER / "qwen3-14b.h100.json").read_text())
    profile["tables"] = {tp: profile["tables"][tp] for tp in ("2", "4")}
    own = tmp_path / "own.json"
    own.write_text(json.dumps(profile))
    odd = replace(four, cluster=ClusterConfig(gpus=3, model=str(own)))
    with pytest.raises(ConfigError, match="gpus = 3 is divisible by no TP degree"):
        settings(odd, tps="best")


def test_policies_without_a_planner_run_at_every_setting_and_others_once(compared: Comparison):
    rows = [f"@tp{tp}/{n}" for tp in (2, 1) for n in (1, 3)]
    assert [p.policy for p in compared.policies] == [
        *(f"slime{row}" for row in rows),
        "heddle",
        *(f"verl{row}" for row in rows),
    ]
    for policy in compared.policies:
        clusters = [load_run(run.path).config.cluster for run in policy.runs]
        assert clusters == [policy.variant.cluster] * 2
        assert [run.seed for run in policy.runs] == [0, 1]
    planned = compared.policies[4].variant
    assert (planned.cluster.tp, planned.cluster.max_running, planned.swept) == (1, 3, False)


def test_the_best_has_the_lowest_mean_over_the_seeds(compared: Comparison):
    def mean(policy: str) -> dict[str, float]:
        return {
            p.policy: sum(run.summary["makespan_s"] for run in p.runs) / 2
            for p in compared.policies
            if p.variant.policy == policy
        }

    slime, verl = mean("slime"), mean("verl")
    names = [min(slime, key=slime.__getitem__), "heddle", min(verl, key=verl.__getitem__)]
    assert [p.policy for p in compared.best_rows] == names
    assert len(set(slime.values())) > 1
    best = compared.best_baseline
    assert best is not None
    assert best.makespan_s.mean == min(*slime.values(), *verl.values())


def test_ratios_are_over_the_best_settings(compared: Comparison):
    plain = compared.plain()
    rows = {row["policy"]: row for row in plain["policies"]}
    first, best = compared.best_rows[0].policy, plain["best_baseline"]
    for row in rows.values():
        mean = row["throughput_tok_s"]["mean"]
        assert row["speedup"] == mean / rows[first]["throughput_tok_s"]["mean"]
        assert row["over_best_baseline"] == mean / rows[best]["throughput_tok_s"]["mean"]
    assert sum(row.get("best", False) for row in rows.values()) == 2
    assert rows["slime@tp2/3"]["preset"] == "slime"
    assert (rows["slime@tp2/3"]["tp"], rows["slime@tp2/3"]["max_running"]) == (2, 3)
    assert "tp" not in rows["heddle"]
    assert [run["policy"] for run in plain["runs"][:3]] == ["slime@tp2/1"] * 2 + ["slime@tp2/3"]


def test_the_bound_holds_for_the_largest_number_of_slots(compared: Comparison, four: RunConfig):
    most = replace(four, cluster=replace(FOUR, max_running=3))
    assert compared.bound == prepare(most).bound()
    for run in compared.runs:
        assert run.summary["makespan_s"] >= compared.bound.makespan_s
    fewest = replace(four, cluster=replace(FOUR, max_running=1))
    assert prepare(fewest).bound().capacity_s > compared.bound.capacity_s


def test_fractions_are_ideals_over_makespans(compared: Comparison):
    plain = compared.plain()
    assert plain["ideal"]["fluid_s"] >= plain["bound"]["makespan_s"]
    for row in plain["policies"]:
        mean = row["makespan_s"]["mean"]
        assert row["fluid_fraction"] == plain["ideal"]["fluid_s"] / mean
        assert row["equal_progress_fraction"] == plain["ideal"]["equal_progress_s"] / mean


def test_what_predicts_or_consolidates_is_tried_but_is_no_baseline(four: RunConfig, tmp_path: Path):
    names = ["verl+lpt+oracle", "heddle+fixed+keep_engines", "verl+consolidate", "slime+lpt"]
    found = compare(four, names, tps=[1, 2], out=tmp_path / "runs", jobs=1)
    assert {p.variant.policy: p.variant.baseline for p in found.best_rows} == {
        "verl+lpt+oracle": False,
        "heddle+fixed+keep_engines": False,
        "verl+consolidate": False,
        "slime+lpt": True,
    }
    assert all(p.variant.swept for p in found.policies)
    assert found.best_baseline is not None
    assert found.best_baseline.variant.policy == "slime+lpt"


def test_without_settings_there_is_no_best_baseline(config: RunConfig, tmp_path: Path):
    found = compare(config, ["verl", "slime"], out=tmp_path / "runs", jobs=1)
    assert found.best_baseline is None
    assert found.best_rows == found.policies
    plain = found.plain()
    assert "best_baseline" not in plain
    assert all("over_best_baseline" not in row for row in plain["policies"])


def test_settings_run_in_other_processes_alike(four: RunConfig, tmp_path: Path):
    named: list[Sequence[str]] = []
    one, two = (
        compare(
            four,
            ["verl", "heddle"],
            tps="best",
            out=tmp_path / "runs",
            jobs=jobs,
            on_progress=lambda names, done, each: named.append(names),
        )
        for jobs in (1, 2)
    )
    assert one.plain()["policies"] == two.plain()["policies"]
    assert named[0] == ["verl@tp1 s0", "verl@tp2 s0", "verl@tp4 s0", "heddle s0"]


def test_tuned_baselines_are_presets_that_are_baselines(four: RunConfig):
    assert set(TUNED_BASELINES) <= PRESETS.keys()
    found = tuning(four, tps=[2], workspace=Workspace())
    variants = found.variants(four, TUNED_BASELINES, Workspace())
    assert all(v.baseline and v.swept for v in variants)
    assert [v.name for v in variants] == [f"{name}@tp2" for name in TUNED_BASELINES]


def test_the_text_shows_all_settings_and_then_the_best(heddle: Heddle, trace: Path):
    options = ("--gpus", 4, "--tp", "best", "--sweep", "cluster.max_running=1,3")
    done = heddle("compare", trace, "--policies", "verl,heddle", *options, "--wide")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Run ")
    assert lines[2].startswith("tried    mean makespan in seconds of policies without a planner")
    assert "the hindsight is theirs" in lines[3]
    assert lines[5].split() == ["policy", "running", "TP", "1", "TP", "2", "TP", "4"]
    assert [line.split()[:2] for line in lines[6:8]] == [["verl", "1"], ["verl", "3"]]
    assert sum(line.count("*") for line in lines[6:8]) == 1
    assert "vs best baseline" in lines[9]
    assert [line.split()[0].partition("@")[0] for line in lines[10:12]] == ["verl", "heddle"]
    assert f"best baseline: {lines[10].split()[0]}" in lines
    said = " ".join(" ".join(lines[12:]).split())
    assert "TP 1 or 2 or 4, 1 or 3 running per engine (3 with a planner)" in said
    assert "  and 5 at other settings" in lines
    assert len(list(Path("runs").glob("*/*/manifest.json"))) == 7


def test_nothing_to_try_is_said(heddle: Heddle, trace: Path):
    on = ("--gpus", 2, "--tp", "best", "--wide")
    done = heddle("compare", trace, "--policies", "heddle", *on)
    assert done.exit_code == 0, done.output
    assert "tried    nothing: every policy here plans its engines itself" in done.stdout
    assert "vs best baseline" not in done.stdout


def test_one_number_is_no_list_and_wins_over_a_file(heddle: Heddle, trace: Path):
    Path("run.toml").write_text("[cluster]\ngpus = 4\nmix = [2, 1, 1]\nmax_running = 7\n")
    options = ("--policies", "verl", "--json")
    plain = json.loads(heddle("compare", trace, "-c", "run.toml", "--tp", 2, *options).stdout)
    assert (plain["cluster"]["tp"], plain["cluster"]["max_running"]) == (2, 7)
    assert [row["policy"] for row in plain["policies"]] == ["verl"]
    plain = json.loads(heddle("compare", trace, "-c", "run.toml", *options).stdout)
    assert plain["cluster"]["mix"] == [2, 1, 1]
    setting = ("--set", "cluster.mix=[2,2]", "--max-running", 5)
    plain = json.loads(heddle("compare", trace, "-c", "run.toml", *setting, *options).stdout)
    assert (plain["cluster"]["mix"], plain["cluster"]["max_running"]) == ([2, 2], 5)


def test_a_context_that_no_engine_holds_is_refused_before_a_run(
    refused: Callable[..., str], trace: Path
):
    longest_context(trace, 9_000_000)
    said = refused("compare", trace, "--policies", "verl", "--tp", "best")
    assert "TP 8 holds" in said
    assert not Path("runs").exists()
