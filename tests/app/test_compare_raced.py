"""`heddle compare` without names, or with patterns: what is raced, and what it says to run."""

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle.cluster.config import ClusterConfig
from heddle.command_config import Config, FrameworkName, PlanSettings
from heddle.comparison.compare import compare
from heddle.comparison.estimates import estimate
from heddle.comparison.result import Comparison, PolicyResult
from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.search import tuned as tuned_module
from heddle.search.compared import answer_of
from heddle.search.interval import prediction_interval
from heddle.search.policies import is_other_system, is_ours, matching, shipped
from heddle.search.race import NEAR
from heddle.search.result import longest_s
from heddle.search.ties import SAME
from heddle.search.verdict import verdict
from heddle_trace import synth, write_trace
from tests.app.journals import Heddle

CLUSTER = ClusterConfig(model="qwen3-8b", gpu="h100", gpus=4, max_running=8)
NAMES = ("verl", "slime", "heddle")
ON = ("--model", "qwen3-8b", "--gpus", 4)


@pytest.fixture(scope="module")
def coding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six groups of eight samples."""
    path = tmp_path_factory.mktemp("traces") / "some.jsonl"
    write_trace(path, synth("coding", 48, seed=7, samples_per_group=8))
    return path


@pytest.fixture(scope="module")
def config(coding: Path) -> RunConfig:
    return RunConfig(trace=str(coding), cluster=CLUSTER, history="none")


@pytest.fixture(scope="module")
def raced(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("runs")
    return compare(config, ["verl", "slime*", "heddle"], tps="best", slots=(2, 8), seeds=2, out=out)


def test_patterns_stand_for_shipped_policies(config: RunConfig):
    every = shipped(config)
    assert every[0] == "verl"
    assert "rollart" not in every
    assert matching(["all"], config) == every
    assert matching(["verl*"], config) == [name for name in every if name.startswith("verl")]
    assert matching(["heddle", "*eddle", "mine:policy"], config) == ["heddle", "mine:policy"]
    assert matching(["verl", "verl"], config) == ["verl", "verl"]
    assert matching(["verl*", "verl", "heddle"], config) == [*matching(["verl*"], config), "heddle"]
    with pytest.raises(ConfigError, match=r"--policies verk\*: .* did you mean 'verl'\?"):
        matching(["verk*"], config)


def test_two_gpu_types_bring_policies_that_place_by_them(config: RunConfig):
    pool = [{"gpu": "h100", "gpus": 4}, {"gpu": "l40s", "gpus": 4}]
    from heddle.config_files import option_value, resolve

    made = resolve([option_value("trace", "-", ""), option_value("cluster.engines", pool, "")])
    assert "rollart" in shipped(made)


def test_each_policy_is_at_the_best_of_its_settings(
    config: RunConfig, raced: Comparison, tmp_path: Path
):
    assert [row.variant.policy for row in raced.policies] == [
        "verl",
        *(name for name in shipped(config) if name.startswith("slime")),
        "heddle",
    ]
    # Every setting under the first seed, which the race has ranked them by.
    whole = compare(config, ["verl"], tps="best", slots=(2, 8), out=tmp_path)
    least = min(row.makespan_s.mean for row in whole.policies)
    (verl,) = (row for row in raced.policies if row.variant.policy == "verl")
    assert verl.runs[0].summary["makespan_s"] <= least * NEAR
    same = compare(
        config, ["verl"], tps=(verl.variant.cluster.tp,), slots=(verl.variant.cluster.max_running,),
        seeds=2, out=tmp_path,
    )  # fmt: skip
    assert same.policies[0].makespan_s == verl.makespan_s


def test_a_race_finds_the_same_as_all_settings_under_all_seeds(config: RunConfig, tmp_path: Path):
    found = compare(config, ["ver[l]"], tps="best", slots=(8,), seeds=2, out=tmp_path)
    whole = compare(config, ["verl"], tps="best", slots=(8,), seeds=2, out=tmp_path)
    assert found.best_rows[0].makespan_s == whole.best_rows[0].makespan_s
    assert found.best_rows[0].variant.cluster == whole.best_rows[0].variant.cluster


def test_the_verdict_is_of_the_rows(raced: Comparison):
    answer = answer_of(raced)
    assert answer is not None
    best, *others = answer.judged
    means = {row.policy: row.makespan_s.mean for row in raced.policies}
    assert best.makespan_s.mean <= (1.0 + SAME) * min(means.values())
    # The next best, the best of Heddle's own, and the best that plans no engines.
    ranked = [row.variant.policy for row in raced.ranking]
    ranked.remove(best.candidate.policy)
    assert others[0].candidate.policy == ranked[0]
    assert any(is_ours(each.candidate.policy) for each in answer.judged)
    assert not all(each.candidate.planned for each in answer.judged)
    assert [each.makespan_s.mean for each in others] == sorted(
        each.makespan_s.mean for each in others
    )
    said = verdict(answer)
    assert said.startswith(f"Run {best.candidate.policy} with ")
    assert f"as {best.candidate.policy}" not in said
    assert "On this trace nothing can be faster than" in said
    comes = answer.as_it_comes
    assert comes is not None
    assert (comes.candidate.policy, comes.candidate.cluster.tp) == ("verl", 1)
    assert len(comes.times) == 2
    # Those of another run of the same setting.
    assert all(t > 0.0 and math.isfinite(t) for t in comes.times)


def test_the_simplest_of_those_as_good_as_the_best_is_recommended(raced: Comparison):
    verl, slime, heddle = (
        next(row for row in raced.policies if row.variant.policy == name) for name in NAMES
    )
    for slime_s, verl_s, simplest in ((61.0, 60.5, "verl"), (60.4, 61.0, "slime")):
        rows = (_taking(heddle, 60.0), _taking(slime, slime_s), _taking(verl, verl_s))
        answer = answer_of(replace(raced, policies=rows))
        assert answer is not None
        assert [each.candidate.policy for each in answer.judged][:2] == [simplest, "heddle"]
        assert "within 1 % of the next best, heddle with" in verdict(answer)


def test_what_a_named_framework_runs_is_recommended(raced: Comparison):
    verl, slime, heddle = (
        next(row for row in raced.policies if row.variant.policy == name) for name in NAMES
    )
    assert heddle.variant.planned
    rows = (_taking(heddle, 50.0), _taking(slime, 60.4), _taking(verl, 61.0))
    named: tuple[tuple[FrameworkName | None, str], ...]
    named = ((None, "heddle"), ("heddle", "heddle"), ("verl", "verl"))
    for framework, best in named:
        answer = answer_of(_run_by(framework, raced, rows))
        assert answer is not None
        assert answer.judged[0].candidate.policy == best
    # Of policies as good as another, that of the framework's router.
    answer = answer_of(_run_by("slime", raced, rows))
    assert answer is not None
    assert answer.judged[0].candidate.policy == "slime"
    only = answer_of(_run_by("verl", raced, rows[:1]))
    assert only is not None
    assert only.judged[0].candidate.policy == "heddle"


def _run_by(
    framework: FrameworkName | None, raced: Comparison, rows: tuple[PolicyResult, ...]
) -> Comparison:
    run = {each.name: getattr(raced.config, each.name) for each in fields(RunConfig)}
    config = Config(**run, plan=PlanSettings(framework=framework))
    return replace(raced, policies=rows, config=config)


def _taking(row: PolicyResult, seconds: float) -> PolicyResult:
    """The row with all its runs, and their mean, of so long."""
    runs = [replace(run, summary={**run.summary, "makespan_s": seconds}) for run in row.runs]
    return replace(row, runs=tuple(runs), makespan_s=estimate([seconds for _ in runs]))


def test_an_interval_is_of_one_rollout_as_that_of_a_plan(raced: Comparison):
    answer = answer_of(raced)
    assert answer is not None
    longest = longest_s(raced.workload, raced.profiles, raced.config.cluster)
    assert len(longest) == len(raced.workload.scripts.trajectory("group").occurring()) >= 4
    for each in answer.judged:
        assert each.makespan_s == prediction_interval(each.times, (), [longest])
        assert each.makespan_s.low < min(each.times)
        assert each.makespan_s.high > max(each.times)
    by_name = {row["policy"]: row["makespan_s"] for row in raced.plain()["policies"]}
    best = answer.judged[0]
    told = by_name[best.candidate.name]
    assert {key: told[key] for key in ("mean", "low", "high")} == best.makespan_s.plain()


def test_the_interval_of_what_is_above_zero_is_above_zero():
    wide = estimate([1.0, 9.0, 50.0])
    assert wide.ci95 is not None
    assert wide.ci95 > wide.mean
    low, high = wide.ends
    assert 0.0 < low < wide.mean < high
    assert low * high == pytest.approx(wide.mean**2)
    # That of a narrow one is as wide as the interval of the mean.
    low, high = estimate([10.0, 10.1, 10.2]).ends
    assert high - low == pytest.approx(2 * 4.303 * 0.1 / 3**0.5, rel=1e-3)


def test_the_best_baseline_is_of_another_system(raced: Comparison):
    baseline = raced.best_baseline
    assert baseline is not None
    others = [row for row in raced.policies if is_other_system(row.variant.policy)]
    assert baseline.makespan_s.mean == min(row.makespan_s.mean for row in others)


def test_a_policy_that_sees_the_future_is_not_recommended(config: RunConfig, tmp_path: Path):
    result = compare(config, ["verl", "heddle+oracle"], out=tmp_path)
    answer = answer_of(result)
    assert answer is not None
    assert [each.candidate.policy for each in answer.judged] == ["verl"]
    only = compare(config, ["heddle+oracle"], out=tmp_path)
    assert answer_of(only) is None
    assert only.plain()["verdict"] is None


def test_without_names_all_are_compared_with_three_seeds(
    coding: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = ("compare", str(coding), *map(str, ON), "--policies", "verl*,heddle")
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["schema"] == "heddle.compare/2"
    assert {run["seed"] for run in found["runs"]} == {0, 1, 2}
    recommended = found["recommended"]
    for each in (recommended, *found["policies"]):
        low, mean, high = (each["makespan_s"][key] for key in ("low", "mean", "high"))
        assert low <= mean <= high
    assert sum(e["count"] * e["tp"] for e in recommended["engines"]) == recommended["gpus"] == 4
    assert recommended["loop"] is None
    assert found["searched"]["simulations"] > 10
    # The command replays what is recommended.
    replay = CliRunner().invoke(main, [*recommended["command"][1:], "--json"])
    assert replay.exit_code == 0, replay.output
    first = json.loads(replay.stdout)["runs"][0]["makespan_s"]
    (mine,) = (
        run["makespan_s"]
        for run in found["runs"]
        if run["seed"] == 0 and run["policy"] == found["ranking"][0]
    )
    assert first == mine


def test_the_text_is_narrow_and_begins_with_the_verdict(heddle: Heddle, coding: Path):
    done = heddle("compare", coding, *ON)
    assert done.exit_code == 0, done.output
    sentence, _, heads, *rest = done.stdout.splitlines()
    assert sentence.startswith("Run ")
    table = [heads, *rest[: rest.index("--wide has all columns")]]
    assert max(map(len, table)) <= 100
    assert len(shipped(RunConfig(trace="-"))) == len(table) - 3
    assert any(line.startswith("next     heddle compare") for line in rest)
    wide = heddle("compare", coding, *ON, "--policies", "verl,heddle", "--wide").stdout
    assert "throughput_tok_s" in wide
    assert "makespan in seconds" in wide


def test_options_fix_degree_and_slots(heddle: Heddle, coding: Path):
    fixed = ("--tp", 2, "--max-running", 4, "--policies", "verl*")
    found = json.loads(heddle("compare", coding, *ON, *fixed, "--json").stdout)
    assert {(row["tp"], row["max_running"]) for row in found["policies"]} == {(2, 4)}
    Path("heddle.toml").write_text("[cluster]\ntp = 4\nmax_running = 3\n")
    found = json.loads(heddle("compare", coding, *ON, "--policies", "verl*", "--json").stdout)
    assert {(row["tp"], row["max_running"]) for row in found["policies"]} == {(4, 3)}


def test_long_runs_have_one_seed(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tuned_module, "LONG_S", 0.0)
    found = compare(config, ["ver[l]"], tps=(1,), slots=(8,), seeds=None, out=tmp_path)
    assert len(found.runs) == 1
    assert "one seed: a run takes over" in verdict_of(found)


def verdict_of(found: Comparison) -> str:
    answer = answer_of(found)
    assert answer is not None
    return verdict(answer)


def test_named_policies_are_told_what_was_not_tried(config: RunConfig, tmp_path: Path):
    said = verdict_of(compare(config, ["verl", "heddle"], out=tmp_path))
    assert "Other TP degrees and slots of verl were not tried" in said
    assert "not tried" not in verdict_of(compare(config, ["heddle"], out=tmp_path))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--policies", "verk*"), "did you mean 'verl'?"),
        (("--policies", "verl,verl"), "named twice"),
        (("--sweep", "cluster.roles=best"), "needs names"),
        (("--policies", "*", "--jobs", 0), "jobs must be 1 or more"),
        (("--policies", "*", "--seeds", 0), "seeds must be from 1"),
    ],
)
def test_what_cannot_be_raced_is_refused(
    refused: Callable[..., str], coding: Path, given: tuple[object, ...], said: str
):
    assert said in refused("compare", coding, *ON, *given)
    assert not Path("runs").exists()
