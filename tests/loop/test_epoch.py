"""Prompts that share a batch: rules, what they know, and what they gain."""

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.cost.prices import prices_of
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.data import packs, whole_epochs
from heddle.loops.setup import prepare_loop, regime_of
from heddle.loops.splits import beside_random
from heddle.search.loops import UNPACKED, search_loops
from heddle.search.verdict import command_of
from heddle.setup import Workspace
from heddle_core.ids import GroupId
from heddle_core.loop.epoch import EpochOrder, EpochPlan, lengths_by_age
from heddle_core.loop.groups import Prompt
from heddle_trace import read_trace, synth, write_trace
from heddle_trace.columns import TraceColumn
from heddle_trace.complete import MissingRules, complete
from heddle_trace.history import totals_by_epoch
from heddle_trace.table import Records

RULES = ("random", "sorted", "tail:.25", "tail:0.5")


@given(
    st.lists(st.integers(0, 1000), max_size=60),
    st.integers(1, 9),
    st.sampled_from(RULES),
    st.integers(0, 50),
    st.data(),
)
def test_every_prompt_is_once_in_an_epoch(
    tokens: list[int], batch: int, rule: str, seed: int, data: st.DataObject
):
    prompts = [GroupId(f"p{k}") for k in range(len(tokens))]
    known = data.draw(st.sets(st.sampled_from(prompts)) if prompts else st.just(set()))
    lengths = {p: float(n) for p, n in zip(prompts, tokens, strict=True) if p in known}
    plan = EpochPlan.of(rule)
    found = plan.order(prompts, lengths, batch=batch, seed=(seed, 0))
    assert sorted(found) == sorted(prompts)
    assert found == plan.order(prompts, lengths, batch=batch, seed=(seed, 0))


def test_sorted_batches_have_neighbours_in_length():
    prompts = [GroupId(f"p{k}") for k in range(40)]
    lengths = {p: float(k) for k, p in enumerate(prompts)}
    found = EpochPlan.of("sorted").order(prompts, lengths, batch=8, seed=(1, 0))
    batches = [sorted(lengths[p] for p in found[at : at + 8]) for at in range(0, 40, 8)]
    assert sorted(batches) == [[float(k) for k in range(at, at + 8)] for at in range(0, 40, 8)]
    # The order of batches is by chance, and another in each epoch.
    orders = {
        tuple(EpochPlan.of("sorted").order(prompts, lengths, batch=8, seed=(1, epoch))[::8])
        for epoch in range(5)
    }
    assert len(orders) > 1


@pytest.mark.parametrize("rule", ["tail:.2", "tail:.05"], ids=["a batch", "less than one"])
def test_the_tail_alone_is_apart(rule: str):
    prompts = [GroupId(f"p{k}") for k in range(40)]
    lengths = {p: float(k) for k, p in enumerate(prompts)}
    found = EpochPlan.of(rule).order(prompts, lengths, batch=8, seed=(1, 0))
    batches = [{lengths[p] for p in found[at : at + 8]} for at in range(0, 40, 8)]
    assert {float(k) for k in range(32, 40)} in batches
    assert sum(max(each) - min(each) > 8 for each in batches) == 4


def test_prompts_without_history_are_in_the_middle():
    prompts = [GroupId(name) for name in "abcdef"]
    lengths = {GroupId(n): x for n, x in (("a", 1.0), ("b", 2.0), ("e", 9.0), ("f", 10.0))}
    found = EpochPlan.of("sorted").order(prompts, lengths, batch=2, seed=(3, 0))
    assert {frozenset(found[at : at + 2]) for at in (0, 2, 4)} == {
        frozenset("ab"),
        frozenset("cd"),
        frozenset("ef"),
    }


@pytest.mark.parametrize(
    "text", ["sort", "tail", "tail:1", "tail:0", "tail:x", "sorted:.5", "tail:nan"]
)
def test_other_rules_are_refused(text: str):
    with pytest.raises(ValueError, match="is no epoch plan: take random, sorted, or"):
        EpochPlan.of(text)


def test_a_prompt_that_is_twice_in_an_epoch_is_refused():
    prompts = [GroupId(name) for name in "aba"]
    with pytest.raises(ValueError, match="prompt 'a' is 2 times in an epoch"):
        EpochPlan.of("sorted").order(prompts, {}, batch=1, seed=(1, 0))


def test_the_newest_epoch_weighs_most():
    a, b, c = (GroupId(name) for name in "abc")
    older, newer = {a: [10], b: [30], c: [20]}, {a: [60, 60], b: [20]}
    found = lengths_by_age([older, newer])
    # Over the means of their epochs, 20 and 40: a was 0.5, then 1.5; b 1.5, then 0.5.
    assert found[a] == pytest.approx(40.0 * (0.5 * 0.5 + 1.5) / 1.5)
    assert found[b] == pytest.approx(40.0 * (0.5 * 1.5 + 0.5) / 1.5)
    # A prompt of the older epoch alone has the scale of the newer one.
    assert found[c] == pytest.approx(40.0)
    assert lengths_by_age([]) == lengths_by_age([{}]) == {}


def test_an_epoch_of_long_prompts_alone_makes_them_no_shorter():
    a, b, c = (GroupId(name) for name in "abc")
    found = lengths_by_age([{a: [10], b: [30], c: [80]}, {c: [80]}])
    assert found == {a: pytest.approx(10.0), b: pytest.approx(30.0), c: pytest.approx(80.0)}


def names_of(order: EpochOrder, count: int) -> list[str]:
    return [prompt.group for prompt in islice(order, count)]


def test_the_first_epoch_is_random_and_the_next_is_packed_by_it():
    prompts = [Prompt(group=GroupId(f"p{k:02d}"), samples=2) for k in range(20)]

    def order(**options: Any) -> EpochOrder:
        made = EpochOrder(EpochPlan.of("sorted"), prompts, batch=4, seed=5, **options)
        for k in range(20):
            made.ended(GroupId(f"p{k:02d}"), 10 * k)
        return made

    known = names_of(order(), 40)
    random = EpochOrder(EpochPlan.of("random"), prompts, batch=4, seed=5)
    first = names_of(random, 20)
    assert sorted(known[:20]) == [prompt.group for prompt in prompts]
    batches = [sorted(known[20 + at : 24 + at]) for at in range(0, 20, 4)]
    assert sorted(batches) == [[f"p{k + i:02d}#1" for i in range(4)] for k in range(0, 20, 4)]
    assert set(map(frozenset, zip(*[iter(known[:20])] * 4, strict=True))) == set(
        map(frozenset, zip(*[iter(first)] * 4, strict=True))
    )
    # In a replay whose samples are the same in every epoch, an epoch says too much of the next.
    assert not order(repeats_after=1).lengths(3)
    assert order(repeats_after=2).lengths(1)
    assert not order(repeats_after=2).lengths(2)


def test_epochs_of_a_history_are_told_apart_by_their_steps(tmp_path: Path):
    records = Records.of(synth("search", 24, 5, 4))
    # Six prompts of four samples: two in step 3, two in step 5; steps 7 and 9 have them again.
    steps = np.array([3, 3, 7, 7] * 3 + [5, 5, 9, 9] * 3, np.int32)
    marked = records.changed(records.ids, {"step": TraceColumn("number", steps)})
    write_trace(tmp_path / "steps.jsonl", marked)
    scripts, _ = complete(read_trace(tmp_path / "steps.jsonl"), rules=MissingRules(), seed=0)
    older, newer = totals_by_epoch(scripts)
    assert set(older) == set(newer) == {script.group for script in scripts}
    assert all(len(tokens) == 2 for epoch in (older, newer) for tokens in epoch.values())


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Samples of 32 prompts, and others of the same."""
    folder = tmp_path_factory.mktemp("epoch")
    records = Records.of(synth("coding", 256, 977, 8))
    members = list(records.trajectory("group_id").occurring().values())
    paths = folder / "now.jsonl", folder / "earlier.jsonl"
    for path, half in zip(paths, (slice(4), slice(4, 8)), strict=True):
        write_trace(path, records.take(np.concatenate([own[half] for own in members])))
    return str(paths[0]), str(paths[1])


def config(traces: tuple[str, str], history: str | None = None, **options: Any) -> LoopConfig:
    cluster = ClusterConfig(gpus=4, max_running=64, model="qwen3-8b")
    run = RunConfig(trace=traces[0], history=history or traces[1], cluster=cluster)
    options = {"groups": 8, "samples": 4, "batches": 9, "repeat": True, **options}
    return LoopConfig(run=run, regimes=("sync",), train_gpus=4, **options)


def test_batches_of_like_length_take_less_time(traces: tuple[str, str]):
    plain, packed = (
        compare_regimes([config(traces, epoch_plan=rule)]).tried[0] for rule in ("random", "sorted")
    )
    assert packed.split_s["rollout"] < 0.95 * plain.split_s["rollout"]
    assert packed.batch_spread > plain.batch_spread
    assert packed.plain()["known_prompts"] == 1.0
    assert packed.length_bias == pytest.approx(1.0)


@pytest.mark.parametrize("rule", ["random", "sorted"])
def test_each_prompt_is_measured_as_often_as_any_other(traces: tuple[str, str], rule: str):
    regime = regime_of(config(traces), "sync")
    assert whole_epochs(10, 4, [regime]) == whole_epochs(12, 4, [regime]) == 12
    assert whole_epochs(1, 4, [regime]) == 8
    # Four batches are an epoch, and the first of all is the warm-up.
    for batches, first in ((12, 4), (8, 4), (9, 1), (4, 1)):
        own = config(traces, epoch_plan=rule, batches=batches)
        assert prepare_loop(own, "sync", workspace=Workspace()).first_measured == first
    plain = prepare_loop(config(traces, batches=12), "sync", workspace=Workspace())
    assert plain.first_measured == 1
    warned = compare_regimes([config(traces, epoch_plan=rule, batches=9)]).warnings
    assert any("no whole epochs of 4" in each and "loop.batches = 12" in each for each in warned)
    assert not compare_regimes([config(traces, epoch_plan=rule, batches=8)]).warnings


@pytest.mark.parametrize(
    ("history", "options", "said"),
    [
        ("prior:coding", {"epoch_plan": "sorted"}, "history prior:coding has none of the 32"),
        ("none", {"epoch_plan": "tail:.25"}, "has none of the 32"),
        (None, {"epoch_plan": "sorted", "groups": 5}, "32 prompts are none of 5"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    traces: tuple[str, str], history: str | None, options: dict[str, Any], said: str
):
    with pytest.raises(ConfigError, match=said):
        prepare_loop(config(traces, history, **options), "sync", workspace=Workspace())


def test_what_cannot_be_packed_is_said_before_what_the_trainer_lacks(traces: tuple[str, str]):
    made = replace(config(traces, "none", epoch_plan="sorted"), train_gpus=1)
    with pytest.raises(ConfigError, match="has none of the 32"):
        prepare_loop(made, "sync", workspace=Workspace())


def test_a_history_of_few_prompts_is_warned_of(traces: tuple[str, str], tmp_path: Path):
    earlier = Records.of(read_trace(traces[1]).records)
    few = str(tmp_path / "few.jsonl")
    members = earlier.trajectory("group_id").occurring().values()
    write_trace(few, earlier.take(next(iter(members))))
    said = "loop.epoch_plan = sorted packs by lengths of 1 of the 32 prompts (3.1%), which history"
    (warned,) = compare_regimes([config(traces, few, epoch_plan="sorted", batches=8)]).warnings
    assert said in warned
    assert not compare_regimes([config(traces, few, epoch_plan="random", batches=8)]).warnings
    for history, enough in ((few, False), (traces[1], True)):
        setup = prepare_loop(config(traces, history), "sync", workspace=Workspace())
        assert packs(setup.config, setup.data, setup.run.history.epochs) is enough


def test_a_wrong_rule_names_its_key(traces: tuple[str, str]):
    with pytest.raises(ConfigError, match=r"loop\.epoch_plan = 'sort' is no epoch plan"):
        config(traces, epoch_plan="sort")


def test_random_order_needs_no_history(traces: tuple[str, str]):
    setup = prepare_loop(config(traces, "none", epoch_plan="random"), "sync", workspace=Workspace())
    prompts = iter(setup.prompts())
    first, second = ([next(prompts).group for _ in range(32)] for _ in range(2))
    assert sorted(first) == sorted(setup.data.groups)
    assert [name.removesuffix("#1") for name in second] != first


def test_prompts_of_drawn_rollouts_are_known_too(traces: tuple[str, str], tmp_path: Path):
    from heddle.search.draws import Draw, drawn

    made, workspace = config(traces, epoch_plan="sorted"), Workspace()
    workload = drawn(workspace.workload(made.run), Draw("search", 0), 0)
    setup = prepare_loop(made, "sync", workspace=workspace, workload=workload)
    assert len(setup.lengths) == 32


def test_a_trace_with_samples_for_two_epochs_needs_no_history(traces: tuple[str, str]):
    options = {"samples": 2, "batches": 9}
    made = config(traces, "none", epoch_plan="sorted", **options)
    assert prepare_loop(made, "sync", workspace=Workspace()).data.cycle == 2
    result = compare_regimes(beside_random([made]))
    plain, packed = result.tried
    # The first four batches are alike: nothing is known of the prompts.
    one, other = (row.runs[0].batches for row in (plain, packed))
    assert {each.tokens for each in one[:4]} == {each.tokens for each in other[:4]}
    assert packed.batch_spread > plain.batch_spread
    gain = plain.step_s.mean / packed.step_s.mean
    assert result.packing_gain(packed) == gain > 1.0
    assert result.packing_gain(plain) is None
    assert [row["epoch_plan"] for row in result.plain()["tried"]] == ["random", "sorted"]
    assert sorted(result.plain()["ranking"]) == ["sync (random)", "sync (sorted)"]
    assert f"in random order its prompts take {gain:.2f} times as long" in result.verdict


@pytest.mark.parametrize(
    "regime", ["one-step-off", "areal", "april", "roll", "rollpacker", "heddle-loop"]
)
def test_other_regimes_pack_too(traces: tuple[str, str], regime: str):
    options = {"samples": 2, "batches": 12, "groups": 4}
    made = config(traces, epoch_plan="sorted", **options)
    (row,) = compare_regimes([replace(made, regimes=(regime,))]).tried
    (batch,) = {each.trajectories for each in row.runs[0].batches}
    assert batch == 8
    assert all(each.longest_over_mean >= 1.0 for each in row.runs[0].batches)
    assert row.reward_spread is None


def test_a_plan_tries_packed_epochs_or_says_that_it_had_no_time(traces: tuple[str, str]):
    made = config(traces, "none", samples=2, batches=4)
    search = partial(
        search_loops,
        made.on(gpus=8),
        train_gpus=(4,),
        tps=(2,),
        policies=["verl"],
        slots=(64,),
        prices=prices_of({}, ["h100"]),
        jobs=1,
    )
    found = search()
    assert UNPACKED in search(budget_s=0.0).notes
    assert UNPACKED not in found.notes
    tried = {each.candidate.epoch_plan for each in found.tried}
    assert tried == {"random", "sorted"}
    loop = found.best.loop
    assert loop is not None
    assert loop.epoch_plan == "sorted"
    command = command_of(found.best, ["now.jsonl"])
    assert command[-2:] == ["--set", "loop.epoch_plan=sorted"]
