"""Prompts that share a batch: rules, what they know, and what they gain."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.setup import prepare_loop
from heddle.setup import Workspace
from heddle_core.ids import GroupId
from heddle_core.loop.epoch import EpochPlan
from heddle_trace import synth, write_trace
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


def test_the_tail_alone_is_apart():
    prompts = [GroupId(f"p{k}") for k in range(40)]
    lengths = {p: float(k) for k, p in enumerate(prompts)}
    found = EpochPlan.of("tail:.2").order(prompts, lengths, batch=8, seed=(1, 0))
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


def test_a_wrong_rule_names_its_key(traces: tuple[str, str]):
    with pytest.raises(ConfigError, match=r"loop\.epoch_plan = 'sort' is no epoch plan"):
        config(traces, epoch_plan="sort")


def test_random_order_needs_no_history(traces: tuple[str, str]):
    setup = prepare_loop(config(traces, "none", epoch_plan="random"), "sync", workspace=Workspace())
    prompts = setup.prompts()
    first, second = ([next(prompts).group for _ in range(32)] for _ in range(2))
    assert sorted(first) == sorted(setup.data.groups)
    assert [name.removesuffix("#1") for name in second] != first


def test_prompts_of_drawn_rollouts_are_known_too(traces: tuple[str, str], tmp_path: Path):
    from heddle.search.draws import Draw, drawn

    made, workspace = config(traces, epoch_plan="sorted"), Workspace()
    workload = drawn(workspace.workload(made.run), Draw("search", 0), 0)
    setup = prepare_loop(made, "sync", workspace=workspace, workload=workload)
    assert len(setup.lengths) == 32
