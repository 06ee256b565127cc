"""Rounds of a search on a part of a large cluster, before those on all of it."""

from dataclasses import replace
from typing import Any

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.comparison.tuning import tuning
from heddle.config import RunConfig
from heddle.cost.prices import prices_of
from heddle.search import rounds
from heddle.search.draws import Draw, drawn
from heddle.search.jobs import race_of
from heddle.search.policies import FIRST
from heddle.search.race import Race
from heddle.search.result import SearchResult, search
from heddle.search.rounds import share_of
from heddle.setup import Workspace
from heddle_trace import synth, write_trace

pytestmark = pytest.mark.usefixtures("few_policies")
PRICES = prices_of({}, ["h100"])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight trajectories are enough to find settings on."""
    monkeypatch.setattr(rounds, "SCREENED", 8)
    monkeypatch.setattr(rounds, "SCREENED_GROUPS", 2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Eight groups of four samples on 32 GPUs."""
    path = tmp_path_factory.mktemp("traces") / "some.jsonl"
    write_trace(path, synth("coding", 32, seed=5, samples_per_group=4))
    cluster = ClusterConfig(model="qwen3-8b", gpu="h100", gpus=32, max_running=8)
    return RunConfig(trace=str(path), cluster=cluster, history="none")


def share(config: RunConfig, **changes: Any) -> int:
    shared, own = Workspace(), replace(config, cluster=replace(config.cluster, **changes))
    settings = tuning(own, tps="best", workspace=shared)
    return share_of(own, settings.variants(own, ["verl"], shared), shared)


def test_settings_are_found_on_a_part_that_has_enough_of_everything(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    assert share(config) == 2  # two engines of TP 8 are left
    assert share(config, gpus=16) == share(config, gpus=24) == 1
    assert share(config, gpus=96) == 4  # two groups are left; 6 would leave fewer
    assert share(config, tool_capacity=4) == share(config, failures="e3@50") == 1
    assert share(config, gpus=33) == 3  # of one TP degree only
    assert share(config, gpus=33, tp_choices=(1, 8)) == 1
    monkeypatch.setattr(rounds, "SCREENED", 17)
    assert share(config) == 1


def test_a_part_of_a_draw_has_so_many_groups_of_the_same_half(config: RunConfig):
    workload = Workspace().workload(config)
    whole, part = (drawn(workload, Draw("search", 0), config.seed, share=n).scripts for n in (1, 2))
    halves = [{script.group.partition("~")[0] for script in each} for each in (whole, part)]
    assert (len(whole), len(part)) == (32, 16)
    assert len({script.group for script in part}) == 4
    judged = drawn(workload, Draw("judge", 0), config.seed).scripts
    assert not halves[1] & {script.group.partition("~")[0] for script in judged}


def test_the_part_has_as_few_gpus(config: RunConfig):
    shared = Workspace()
    (verl, *_) = tuning(config, tps="best", workspace=shared).variants(config, ["verl"], shared)
    part, whole = race_of(config, shared, share=2, jobs=1), race_of(config, shared, jobs=1)
    halved = replace(config, cluster=replace(config.cluster, gpus=16))
    on_half = replace(verl, cluster=replace(verl.cluster, gpus=16))
    for race, each in ((part, verl), (whole, verl), (race_of(halved, shared, jobs=1), on_half)):
        race.run([each], [0])
    took = [next(iter(race.made["search"].values()))[0] for race in (part, whole)]
    assert 0.0 < took[0] < took[1] * 1.5


def test_those_that_are_good_on_a_part_run_on_all(config: RunConfig):
    found = search(config, policies=("verl", "slime", "heddle"), prices=PRICES, jobs=1)
    assert found.complete
    ran = [each for each in found.tried if each.draws]
    rest = [each for each in found.tried if not each.draws]
    assert ran
    assert rest
    assert all(each.mean_s is None for each in rest)
    assert not {each.candidate for each in ran} & {each.candidate for each in rest}
    assert {each.candidate.cluster.gpus for each in found.tried} == {32}
    assert FIRST in {each.candidate.policy for each in ran}
    assert found.best.candidate in {each.candidate for each in ran}
    assert found.simulations > len(ran) + len(rest)
    assert found == replace(
        search(config, policies=("verl", "slime", "heddle"), prices=PRICES, jobs=2),
        seconds=found.seconds,
        setup=found.setup,
    )


def interrupted_at(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, *at: int, on_all: bool = False
) -> SearchResult:
    """A search with signals in the runs of these numbers, with `on_all` of those on all GPUs."""
    run, calls = Race.run, []

    def interrupted(race: Race, *args: Any, **options: Any) -> None:
        if not on_all or race._shared[2] == 1:
            calls.append(race)
            if len(calls) in at:
                raise KeyboardInterrupt
        run(race, *args, **options)

    monkeypatch.setattr(Race, "run", interrupted)
    return search(config, policies=("verl", "slime"), prices=PRICES, jobs=1)


@pytest.mark.parametrize(("call", "on_all"), [(2, False), (3, False), (5, False), (1, True)])
def test_an_interrupted_search_on_a_part_judges_the_best_of_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, call: int, on_all: bool
):
    found = interrupted_at(config, monkeypatch, call, on_all=on_all)
    assert not found.complete
    assert len(found.best.times) == found.draws


def test_a_signal_before_the_first_simulations_ends_is_raised(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(KeyboardInterrupt):
        interrupted_at(config, monkeypatch, 1)


def test_a_second_signal_is_raised(config: RunConfig, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(KeyboardInterrupt):
        interrupted_at(config, monkeypatch, 1, 2, on_all=True)


def test_a_search_on_a_part_without_time_judges_what_it_has(config: RunConfig):
    found = search(config, prices=PRICES, budget_s=0.0, jobs=1)
    assert not found.complete
    assert found.simulations == 1 + 1 + 2, "on a part, on all, and of two on one judged draw"
    assert found.best.candidate.policy == FIRST
    assert len(found.best.times) == found.draws
