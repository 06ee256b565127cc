"""`heddle plan` of one cluster: what is drawn, raced, judged, said and written."""

import json
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.bench_plan_search import summary
from heddle.cluster.config import ClusterConfig
from heddle.comparison.tuning import tuning, with_policy
from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.cost.prices import prices_of
from heddle.planning.blocks import block
from heddle.planning.deployment import deployment_of_search
from heddle.search.draws import Draw, drawn
from heddle.search.interval import prediction_interval
from heddle.search.jobs import makespan_s, race_of
from heddle.search.makespan import simulated
from heddle.search.policies import shipped
from heddle.search.race import CUT, NEVER, Job, Race, with_slots
from heddle.search.result import SearchResult, engines_of, named_ties, search
from heddle.search.ties import name_of
from heddle.search.verdict import answer_of_search, plain, verdict
from heddle.setup import Workspace, prepare
from heddle.simulation import simulate
from heddle_core.presets import PRESETS
from heddle_trace import synth, write_trace
from heddle_trace.files import read_trace
from heddle_trace.schema import TrajectoryRecord
from tests.app.journals import BRIEF, Heddle

Refused = Callable[..., str]
pytestmark = pytest.mark.usefixtures("few_policies")


@pytest.fixture(scope="module")
def coding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight groups of four samples."""
    path = tmp_path_factory.mktemp("traces") / "some.jsonl"
    write_trace(path, synth("coding", 32, seed=5, samples_per_group=4))
    return path


@pytest.fixture(scope="module")
def config(coding: Path) -> RunConfig:
    cluster = ClusterConfig(model="qwen3-8b", gpu="h100", gpus=4, max_running=8)
    return RunConfig(trace=str(coding), cluster=cluster, history="none")


@pytest.fixture(scope="module")
def found(config: RunConfig) -> SearchResult:
    return search(config, policies=("verl", "slime", "heddle"), prices=prices_of({}, ["h100"]))


def test_a_search_for_a_framework_is_among_its_engines(config: RunConfig, found: SearchResult):
    assert any(each.candidate.planned for each in found.tried)
    names, prices = ("verl", "slime", "heddle"), prices_of({}, ["h100"])
    own = search(config, policies=names, prices=prices, framework="verl")
    assert not any(each.candidate.planned for each in own.tried)
    assert all(len(each.engines) == 1 for each in own.judged)
    assert "heddle serve" not in block(deployment_of_search(own), "verl")
    parted = replace(config, cluster=replace(config.cluster, roles="prefill=2,decode=2"))
    with pytest.raises(ConfigError, match="'verl': verl: the plan has engines that only prefill"):
        search(parted, policies=names, prices=prices, framework="verl")


def test_a_plan_for_a_framework_that_has_no_such_engines_is_refused(heddle: Heddle, coding: Path):
    on = (coding, "--gpus", 4, "--set", "cluster.roles=prefill=2,decode=2", "--budget-s", 0.001)
    done = heddle("plan", *on, "--set", "plan.framework=verl")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "plan.framework = 'verl': verl: the plan has engines that only prefill" in done.stderr


def groups_of(ids: list[str]) -> set[str]:
    """The trace's own groups of drawn trajectories."""
    return {each.rpartition("~")[0].rpartition("/")[0] or each.rpartition("~")[0] for each in ids}


def test_halves_have_no_prompt_in_common_and_draws_are_of_full_size(config: RunConfig):
    workload = Workspace().workload(config)
    seen: dict[str, set[str]] = {"search": set(), "judge": set()}
    for half, known in seen.items():
        for number in range(4):
            draw = drawn(workload, Draw(half, number), config.seed)  # type: ignore[arg-type]
            groups = [script.group for script in draw.scripts]
            assert len(draw.scripts) == 32
            assert len(set(groups)) == 8
            assert len({script.id for script in draw.scripts}) == 32
            known |= {group.rpartition("~")[0] for group in groups}
    assert seen["search"].isdisjoint(seen["judge"])
    assert len(seen["search"] | seen["judge"]) == 8


def test_equal_draws_are_equal_and_others_are_not(config: RunConfig):
    workload = Workspace().workload(config)
    first, same, other = (
        drawn(workload, Draw("search", number), config.seed).scripts for number in (0, 0, 1)
    )
    assert first == same
    assert first != other


def test_a_makespan_without_a_journal_is_that_of_the_run(config: RunConfig, tmp_path: Path):
    for policy in ("verl", "heddle"):
        mine = with_policy(config, policy, config.cluster)
        whole = simulate(mine, out=tmp_path).summary["makespan_s"]
        # The first arrival is at 0 s.
        assert simulated(prepare(mine))[0] == whole
        assert simulated(prepare(mine), whole)[0] == whole
        assert simulated(prepare(mine), whole * 0.99)[0] == NEVER


def test_shipped_policies_are_all_presets_but_those_by_gpu_type(config: RunConfig):
    assert set(PRESETS) - set(shipped(config)) == {"rollart", "rollart-measured"}


def test_the_recommended_comes_first_and_the_rest_by_makespan(found: SearchResult):
    policies = {each.candidate.policy for each in found.judged}
    assert {"verl", "heddle"} <= policies
    assert found.best is found.judged[0]
    assert found.simulations > 10
    assert found.complete
    rest = [each.makespan_s.mean for each in found.judged[1:]]
    assert rest == sorted(rest)
    assert found.as_it_comes is not None
    assert found.as_it_comes.candidate.policy == "verl"


def test_equal_searches_give_equal_results(config: RunConfig, found: SearchResult):
    again = search(config, policies=("verl", "slime", "heddle"), prices=prices_of({}, ["h100"]))
    words = ["t.jsonl"]
    assert replace(again, seconds=0.0).best == found.best
    first, second = plain(found, words), plain(again, words)
    first["searched"]["seconds"] = second["searched"]["seconds"] = 0.0
    assert first == second


def test_judged_makespans_are_simulations_of_unseen_prompts(config: RunConfig, found: SearchResult):
    best, shared = found.best, Workspace()
    mine = with_policy(config, best.candidate.policy, best.candidate.cluster)
    times = []
    for number in range(found.draws):
        base = replace(config, cluster=found.setup.config.cluster)
        workload = drawn(shared.workload(base), Draw("judge", number), config.seed)
        times.append(simulated(prepare(mine, workspace=shared, workload=workload))[0])
    assert times == list(best.times)
    assert best.makespan_s.mean == fmean(times)
    spread = prediction_interval(times)
    assert best.makespan_s.low <= spread.low <= spread.high <= best.makespan_s.high


def test_an_interval_is_that_of_one_more_value():
    one = prediction_interval([10.0])
    assert (one.low, one.mean, one.high, one.text) == (None, 10.0, None, "-")
    tail = prediction_interval([10.0], (), [[1.0, 2.0, 3.0, 5.0]])
    assert tail.low < 10.0 < tail.high
    # Two tell of no spread, and what is known of lengths does.
    two = prediction_interval([10.0], [11.0], [[5.0, 5.0], [5.0, 5.0]])
    assert (two.low, two.mean, two.high) == (10.0, 10.0, 11.0)
    # Of logarithms 1.9, 2, 2.1: t(2) is 4.303, the deviation 0.1, and sqrt(1 + 1/3) 1.1547.
    times = [math.exp(each) for each in (1.9, 2.0, 2.1)]
    three = prediction_interval(times)
    assert three.mean == fmean(times)
    assert three.low == pytest.approx(math.exp(2.0 - 0.4303 * 1.1547), rel=1e-3)
    assert three.high == pytest.approx(math.exp(2.0 + 0.4303 * 1.1547), rel=1e-3)
    assert 0.0 < prediction_interval([1.0, 100.0]).low < 1.0
    # The other half tells of spread, not of the mean.
    both = prediction_interval([10.0, 10.0], [20.0, 20.0])
    assert both.mean == 10.0
    assert both.high > 20.0


@pytest.mark.parametrize("groups", [16, 100])
def test_an_interval_holds_the_longest_of_as_many_new_groups(groups: int):
    rng = np.random.default_rng(groups)
    held = narrow = 0
    for _ in range(400):
        known, new = rng.exponential(100.0, (2, groups))
        halves = known[: groups // 2], known[groups // 2 :]
        drawn = [[max(rng.choice(half, groups)) for _ in range(8)] for half in halves]
        found = prediction_interval(*drawn, longest_s=(list(halves[0]), list(halves[1])))
        held += found.low <= max(new) <= found.high
        narrow += prediction_interval(*drawn).low <= max(new) <= prediction_interval(*drawn).high
    assert 0.90 <= held / 400 <= 0.99
    # Of what was drawn alone, too few.
    assert narrow / 400 < 0.85


def test_ties_are_near_and_not_significant(config: RunConfig):
    shared = Workspace()
    found = search(config, policies=("verl", "verl-star"), prices=prices_of({}, ["h100"]))
    # Both decide alike here: no engine has 32 times the load of another.
    assert found.best.candidate.policy == "verl"
    assert any(each.startswith("verl-star") for each in found.ties)
    race = race_of(config, shared)
    assert race.draws == 8
    best = found.best.candidate
    names = ("best", "near", "far", "doubtful", "few draws", "stopped")
    candidates = {name: replace(best, name=name) for name in names}
    searched = {
        "best": [100.0, 10.0],
        "near": [100.9, 10.05],
        "far": [102.0, 10.2],
        "doubtful": [110.0, 9.5],
        "few draws": [50.0],
        "stopped": [50.0, NEVER],
    }
    for name, times in searched.items():
        candidate = candidates[name]
        race.made["search"][candidate].update(enumerate(times))
        race.made["judge"][candidate].update(enumerate(times))
    assert [each.name for each in race.decided()] == ["best", "near", "far", "doubtful"]
    assert race.decided()[candidates["far"]] == [1.02, 10.2 / 9.5, 1.02, 10.2 / 9.5]
    same, doubtful = race.ties()
    assert [each.name for each in same] == ["best", "near"]
    assert [each.name for each in doubtful] == ["doubtful"]


def test_what_unseen_prompts_refute_is_no_tie(config: RunConfig, found: SearchResult):
    race = race_of(config, Workspace())
    one, other = found.best.candidate, replace(found.best.candidate, name="other")
    race.made["search"] |= {one: dict.fromkeys(range(4), 9.5), other: dict.fromkeys(range(4), 10.0)}
    race.made["judge"] |= {one: {0: 10.3, 1: 10.31, 2: 10.3}, other: dict.fromkeys(range(3), 10.0)}
    assert next(iter(race.decided())) == one
    assert race.ties()[0] == [one]  # the other is over 1 % slower in all
    race.made["search"][other] = dict.fromkeys(range(4), 9.7)
    assert race.ties()[0] == [other]
    race.made["judge"][one] = {0: 9.0, 1: 11.0, 2: 10.9}  # not significant
    assert race.ties()[0] == [one, other]


def test_the_last_candidates_are_chosen_on_both_halves(config: RunConfig, found: SearchResult):
    race = race_of(config, Workspace())
    one, other = found.best.candidate, replace(found.best.candidate, name="other")
    race.made["search"] |= {one: {0: 10.0}, other: {0: 11.0}}
    race.made["judge"] |= {one: {0: 20.0}, other: {0: 10.0}}
    assert race.ranked() == [one, other]
    assert list(race.decided()) == [other, one]


def test_policies_that_decide_alike_take_one_of_the_last_places(
    config: RunConfig, found: SearchResult
):
    race = race_of(config, Workspace())
    names = ("verl", "verl-star", "continuum", "heddle")
    first, second, third, last = (replace(found.best.candidate, policy=each) for each in names)
    race.made["search"] |= {first: {0: 10.0}, second: {0: 10.0, 1: 11.0}, last: {0: 10.5}}
    race.made["search"] |= {third: {0: 10.0}}
    assert race.near(1.1, 2) == [second, last]
    assert race.alike(second) == [first, third]
    race.made["judge"] |= {second: {0: 12.0, 1: 13.0}}
    ties = race.tied_with(second, [second])
    assert ties == [first, third]
    assert race.made["judge"][first] == race.made["judge"][third] == {0: 12.0, 1: 13.0}
    assert named_ties(ties, [second]) == [first]
    narrow = replace(third, cluster=replace(third.cluster, tp=1))
    assert named_ties(ties, [second, narrow]) == [first, third]


def test_a_policy_that_decides_as_the_best_is_named_as_a_tie(config: RunConfig):
    names = ("verl", "slime", "verl-2026", "heddle+fixed+keep_engines")
    found = search(config, policies=names, slots=(100,), prices=prices_of({}, ["h100"]))
    best, other, *_ = found.judged
    assert name_of(other.candidate) in found.ties
    assert other.times == best.times
    assert other.candidate.cluster == best.candidate.cluster
    assert "not significantly different from the next best" in verdict(answer_of_search(found))


def test_a_simpler_candidate_is_near_the_next_best_not_slower(found: SearchResult):
    best = found.best
    for factor, words in ((0.993, "within 1 % of"), (0.97, "3 % (±0) slower than")):
        times = tuple(factor * seconds for seconds in best.times)
        policy = "slime" if best.candidate.policy == "verl" else "verl"
        other = replace(best, candidate=replace(best.candidate, policy=policy), times=times)
        sentence = verdict(answer_of_search(replace(found, judged=(best, other))))
        assert f"{words} the next best, {policy} with" in sentence


def test_a_search_without_time_judges_what_it_has(config: RunConfig, heddle: Heddle):
    assert "Seconds to search and to judge" in heddle("plan", "--help").stdout
    found = search(config, prices=prices_of({}, ["h100"]), budget_s=0.0)
    assert not found.complete
    assert found.best.candidate.policy == "verl"
    # One candidate of the first policy, the widest, then that and what comes first on one draw.
    assert found.simulations == 1 + 2
    assert len(found.best.times) == found.draws == 1
    assert found.best.candidate.cluster.tp == 4
    # Of what was not judged nothing is said, and whoever comes first is always judged.
    assert {each.candidate.policy for each in found.judged} == {"verl"}


def test_an_interrupted_search_judges_what_it_has(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    run, rounds = Race.run, []

    def interrupted(race: Race, *args: Any, **options: Any) -> None:
        rounds.append(options.get("half", "search"))
        if len(rounds) == 3:
            raise KeyboardInterrupt
        run(race, *args, **options)

    monkeypatch.setattr(Race, "run", interrupted)
    found = search(config, policies=("verl", "slime"), prices=prices_of({}, ["h100"]))
    assert rounds == ["search", "search", "search", "judge", "judge"]
    assert not found.complete
    assert "Run " in verdict(answer_of_search(found))


@pytest.mark.parametrize("half", ["judge", "ties"])
def test_a_signal_after_the_rounds_keeps_the_best(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, half: str
):
    old, began = Race.run, count()

    def interrupted(self: Race, candidates: Any, draws: Any, **given: Any) -> None:
        judges = given.get("half", "search") == "judge"
        if half == "judge" and judges and next(began) == 0:
            raise KeyboardInterrupt
        if half == "ties" and not judges and self.made["judge"] and next(began) == 0:
            raise KeyboardInterrupt
        old(self, candidates, draws, **given)

    monkeypatch.setattr(Race, "run", interrupted)
    found = search(config, policies=["verl", "slime"], prices=prices_of({}, ["h100"]), jobs=1)
    assert next(began) > 0, "interrupted"
    assert not found.complete
    assert found.best.times
    began = count()
    with pytest.raises(KeyboardInterrupt):
        search(
            config,
            policies=["verl", "slime"],
            prices=prices_of({}, ["h100"]),
            jobs=1,
            keeps_best=False,
        )


def test_planned_engines_are_those_that_the_policy_starts(config: RunConfig):
    setup = prepare(with_policy(config, "heddle", config.cluster))
    assert sum(shape.gpus * count for shape, count in engines_of(setup)) == 4
    fixed = prepare(with_policy(config, "verl", replace(config.cluster, tp=2)))
    assert [(shape.tp, count) for shape, count in engines_of(fixed)] == [(2, 2)]


ON = ("--model", "qwen3-8b", "--gpus", 4, "--max-running", 8, "--history", "none")


def test_the_answer_says_what_to_run_and_its_command_runs(
    heddle: Heddle, coding: Path, tmp_path: Path
):
    done = heddle("plan", coding, *ON, *BRIEF)
    assert done.exit_code == 0, done.output
    sentence = done.stdout.splitlines()[0]
    assert sentence.startswith("Run ")
    assert "In the mean of these rollouts nothing can be faster than" in sentence
    as_json = json.loads(heddle("plan", coding, *ON, *BRIEF, "--json").stdout)
    assert as_json["schema"] == "heddle.plan/2"
    assert as_json["verdict"] == sentence
    recommended = as_json["recommended"]
    assert recommended["max_running"] == 8
    low, mean, high = (recommended["makespan_s"][key] for key in ("low", "mean", "high"))
    assert 0.0 < low <= mean <= high
    # Bound and mean are of the same rollouts.
    assert all(each["makespan_s"]["mean"] >= as_json["bound_s"] for each in as_json["candidates"])
    assert sum(e["count"] * e["tp"] for e in recommended["engines"]) == recommended["gpus"] == 4
    assert recommended["command"][:3] == ["heddle", "compare", str(coding)]
    replay = heddle(*recommended["command"][1:], "--json")
    assert replay.exit_code == 0, replay.output
    row = json.loads(replay.stdout)["policies"][0]
    assert row["policy"] == recommended["policy"]


def test_what_is_recommended_is_exported(heddle: Heddle, coding: Path, tmp_path: Path):
    files = [tmp_path / name for name in ("verl.yaml", "vllm.sh", "gateway.toml")]
    options = [word for file in files for word in ("--export", file)]
    done = heddle("plan", coding, *ON, *BRIEF, *options, "--json")
    assert done.exit_code == 0, done.output
    recommended = json.loads(done.stdout)["recommended"]
    served = [
        shlex.split(line.partition(" vllm serve ")[2].partition(" > ")[0])
        for line in files[1].read_text().splitlines()
        if " vllm serve " in line
    ]
    degrees = sorted(int(dict(pairwise(words))["--tensor-parallel-size"]) for words in served)
    assert degrees == sorted(e["tp"] for e in recommended["engines"] for _ in range(e["count"]))
    gateway = files[2].read_text()
    policy = recommended["policy"].partition("+")[0]
    assert f'preset = "{policy}' in gateway
    assert "max_running = 8" in gateway
    router = (tmp_path / "verl-router.yaml").read_text()
    assert f'policy: "{policy}"' in router


def test_drafts_are_searched(heddle: Heddle, coding: Path):
    drafts = ("--speculation", "eagle3:best:0.9/0.8/0.7", "--set", "plan.budget_s=1000")
    found = json.loads(heddle("plan", coding, *ON, *drafts, "--json").stdout)
    recommended = found["recommended"]
    # At batches of eight, drafts that are nearly always accepted pay.
    assert recommended["speculation"].startswith("eagle3:")
    assert "drafts" in found["verdict"]
    # The others have theirs too, and verl as it comes has none.
    assert {each["speculation"][:7] for each in found["candidates"]} == {"eagle3:"}
    assert found["as_it_comes"]["speculation"] == "off"
    at = recommended["command"].index("--speculation")
    assert recommended["command"][at + 1] == recommended["speculation"]


def test_a_trace_of_few_groups_is_refused(refused: Refused, tmp_path: Path):
    path = tmp_path / "few.jsonl"
    write_trace(path, synth("coding", 24, seed=5, samples_per_group=8))
    assert "the trace has 3 groups of samples" in refused("plan", path, *ON)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--jobs", 0), "jobs must be 1 or more, not 0"),
        (("--set", "cluster.mix=[1,1,2]"), "cluster.mix names the engines, and a search chooses"),
        (("--set", "plan.budget_s=-1"), "plan.budget_s must be from 0"),
        (("--speculation", "mtp:best"), "qwen3-8b has no head for mtp"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    refused: Refused, coding: Path, given: tuple[object, ...], said: str
):
    assert said in refused("plan", coding, *ON, *given)


def test_the_command_does_not_say_what_was_found(heddle: Heddle, coding: Path):
    keys = ("cluster.tp=4", "cluster.max_running=8", "cluster.report_interval_s=2")
    given = [word for key in keys for word in ("--set", key)]
    done = heddle("plan", coding, *ON, *BRIEF, *given, "--json")
    assert done.exit_code == 0, done.output
    command = json.loads(done.stdout)["recommended"]["command"]
    assert [word for word in command if "=" in word] == ["cluster.report_interval_s=2"]


def later_epoch(trace: Path) -> list[TrajectoryRecord]:
    """Other samples of the prompts of a trace."""
    longer = []
    for record in read_trace(trace).records:
        first, *rest = record.steps
        step = msgspec.structs.replace(first, output_tokens=(first.output_tokens or 0) + 7)
        longer.append(msgspec.structs.replace(record, steps=(step, *rest)))
    return longer


def test_a_comparison_says_that_policies_know_the_prompts(
    refused: Refused, coding: Path, heddle: Heddle, tmp_path: Path
):
    drawn, epoch = tmp_path / "drawn.jsonl", tmp_path / "epoch.jsonl"
    assert heddle("trace", "resample", coding, 8, 4, "-o", drawn).exit_code == 0
    write_trace(epoch, later_epoch(coding))
    words = ("compare", coding, "--policies", "heddle", *ON[:-1])
    assert "a policy that knows them cannot be judged on them" in refused(*words, drawn)
    done = heddle(*words, epoch, "--json")
    (warning,) = json.loads(done.stdout)["warnings"]
    assert f"Warning: {warning}" in done.stderr
    assert "has the prompts of 32 of the trace's 32 trajectories" in warning
    # Other prompts may have the same names: those of every synthetic trace begin at 0.
    write_trace(tmp_path / "other.jsonl", synth("coding", 32, seed=99, samples_per_group=4))
    done = heddle(*words, tmp_path / "other.jsonl", "--json")
    assert "warnings" not in json.loads(done.stdout)


def test_a_history_of_the_same_prompts_is_refused(
    refused: Refused, coding: Path, heddle: Heddle, tmp_path: Path
):
    drawn = tmp_path / "drawn.jsonl"
    assert heddle("trace", "resample", coding, 8, 4, "-o", drawn).exit_code == 0
    said = refused("plan", coding, *ON[:-1], drawn)
    assert "of the trace's 32 trajectories" in said
    assert "--history none" in said
    write_trace(epoch := tmp_path / "epoch.jsonl", later_epoch(coding))
    said = refused("plan", coding, *ON[:-1], epoch)
    assert "has the prompts of 32 of the trace's 32 trajectories" in said
    assert "--history none" in said
    assert "heddle compare" in said
    other = tmp_path / "other.jsonl"
    write_trace(other, synth("coding", 64, seed=99, samples_per_group=8))
    done = heddle("plan", coding, *ON[:-1], other, "--budget-s", 0)
    assert done.exit_code == 0, done.output


def test_a_history_of_the_trace_itself_is_refused(refused: Refused, coding: Path):
    on = (*ON[:-1], coding)
    assert "is the replayed trace itself" in refused("plan", coding, *on)


def test_slots_that_no_baseline_uses_are_not_tried_again(config: RunConfig):
    done: list[tuple[str, int]] = []

    def use_70(_: object, job: Job, __: object) -> tuple[float, float, int]:
        slots = job.candidate.cluster.max_running
        done.append((job.candidate.policy, slots))
        return 10.0, 0.0, min(slots, 70)

    race = Race((), use_70, draws=1, steps=1, jobs=1)
    tries = tuning(config, workspace=Workspace()).variants(config, ["verl", "heddle"], Workspace())
    race.run_slots(tries, (64, 100, 128, 256))
    assert [slots for policy, slots in done if policy == "verl"] == [256, 64]
    assert [slots for policy, slots in done if policy == "heddle"] == [256, 128, 100, 64]


@pytest.mark.parametrize(
    ("times", "tried"),
    [
        ({64: 12.0, 100: 10.0, 128: 9.0, 200: 9.5, 256: 9.8}, [100, 256, 200, 128]),
        ({64: 9.0, 100: 10.0, 128: 10.1, 200: 10.2, 256: 10.3}, [100, 256, 64, 128]),
        ({64: 12.0, 100: 10.0, 128: 9.8, 200: 9.5, 256: 9.0}, [100, 256, 200]),
    ],
)
def test_slots_next_to_the_best_are_tried(
    config: RunConfig, times: dict[int, float], tried: list[int]
):
    done: list[int] = []

    def take(_: object, job: Job, __: object) -> tuple[float, float, int]:
        done.append(slots := job.candidate.cluster.max_running)
        return times[slots], 0.0, slots

    race = Race((), take, draws=1, steps=1, jobs=1)
    (own,) = tuning(config, workspace=Workspace()).variants(config, ["verl"], Workspace())
    race.run([own := with_slots(own, 100)], [0])
    race.run_slots([own], [*times])
    assert done == tried


def test_a_simulation_ends_when_the_time_does(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    calls = count()
    monkeypatch.setattr("heddle.search.jobs.time.time", lambda: next(calls))
    shared = Workspace()
    (candidate,) = tuning(config, workspace=shared).variants(config, ["verl"], shared)
    job = Job(candidate, Draw("search", 0), NEVER, ends_s=50.0)
    assert makespan_s((shared, config, 1), job, None)[0] == CUT
    assert next(calls) < 60
    assert makespan_s((shared, config, 1), replace(job, ends_s=1e9), None)[0] > 0.0


def test_a_job_ends_at_a_time_that_other_machines_know(config: RunConfig):
    ends_s: list[float] = []

    def take(_: object, job: Job, __: object) -> tuple[float, float, int]:
        ends_s.append(job.ends_s)
        return 1.0, 0.0, 0

    race = Race((), take, draws=1, steps=1, jobs=1, budget_s=600.0)
    race.run(tuning(config, workspace=Workspace()).variants(config, ["verl"], Workspace()), [0])
    # Not the time since a machine has started.
    assert 0.0 < ends_s[0] - time.time() <= 600.0


def test_the_simplest_stands_for_candidates_that_decide_alike(config: RunConfig):
    def alike(_: object, job: Job, __: object) -> tuple[float, float, int]:
        return (10.0 if job.candidate.policy != "slime" else 11.0), 0.0, 0

    race = Race((), alike, draws=1, steps=1, jobs=1)
    names = ["heddle", "verl", "slime"]
    race.run(tuning(config, workspace=Workspace()).variants(config, names, Workspace()), [0])
    assert [each.policy for each in race.distinct()] == ["heddle", "slime"]
    race.simplicity = lambda each: each.policy == "heddle"
    assert [each.policy for each in race.distinct()] == ["verl", "slime"]


def test_a_cell_whose_settings_hardly_differ_is_listed_and_not_counted():
    cell = {"trace": "t", "gpus": 8, "history": "none", "low": 1.0, "high": 3.0, "makespan_s": 2.0}
    cell |= {"of_hindsight": 0.9, "over_tuned_verl": 1.1, "search_s": 1.0}
    apart = {**cell, "seed": 0, "settings": {"a": 1.0, "b": 0.969, "c": 0.0}}
    alike = {**cell, "seed": 1, "of_hindsight": 0.99, "settings": {"a": 1.0, "b": 0.98, "c": 0.0}}
    found = summary([apart, alike])
    assert (found["cells"], found["of_hindsight"]["mean"]) == (1, 0.9)
    assert found["flat"] == [{"trace": "t", "gpus": 8, "seed": 1, "history": "none"}]
    assert summary([alike]) == {"cells": 0, "covered": 1.0, "flat": found["flat"]}
