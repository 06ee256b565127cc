import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_core.estimate.step_lengths import RunningMean, StepLengths
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, GroupId
from heddle_core.parts.predictor import (
    _TASK_GROUPS,
    GroupPredictor,
    HistoryPredictor,
    NoPrediction,
    PosteriorPredictor,
    ProgressivePredictor,
    Served,
)
from heddle_core.policy import predictions_awaited
from tests.core.policy_fakes import trajectory

EVERY = {
    "none": NoPrediction,
    "group": GroupPredictor,
    "history": lambda: HistoryPredictor({GroupId("g0"): [100, 900]}, task_totals={"coding": [50]}),
    "progressive": ProgressivePredictor,
    "posterior": PosteriorPredictor,
    "served": lambda: Served(ProgressivePredictor()),
    "awaited": lambda: Served(ProgressivePredictor(), awaited=True),
}


class World:
    """Tells a predictor what the controller would, for trajectories made up on the way."""

    def __init__(self, predictor):
        self.predictor = predictor
        self.ts = {}

    def t(self, name):
        if name not in self.ts:
            self.ts[name] = trajectory(name, group=GroupId(name.partition("/")[0]))
        return self.ts[name]

    def step(self, name, tokens, *, ends=False):
        t = self.t(name)
        t.output_tokens += tokens
        event = StepFinished(
            time_s=0.0,
            trajectory=t.id,
            step=t.step,
            engine=EngineId("e0"),
            output_tokens=tokens,
            reason="answer" if ends else "tool_call",
        )
        self.predictor.observe_step(t, event)
        if ends:
            self.finish(name)

    def tool(self, name, *, ok=True):
        t = self.t(name)
        event = ToolReturned(
            time_s=0.0,
            trajectory=t.id,
            step=t.step,
            tool="sandbox",
            ok=ok,
            observation_tokens=10,
            context_tokens=10,
        )
        t.step += 1
        self.predictor.observe_tool(t, event)

    def finish(self, name):
        self.predictor.observe_finish(self.t(name))

    def left(self, name):
        return self.predictor.remaining_tokens(self.t(name))


def play(predictor, moves):
    """Apply moves (trajectory, tokens, ok, kind) and return every estimate on the way."""
    world, ended, estimates = World(predictor), [], []
    for who, tokens, ok, what in moves:
        name = f"g{who // 4}/{who % 4}"
        if name in ended:
            continue
        if what == "end":
            world.step(name, tokens, ends=True)
            ended.append(name)
            continue
        if what == "cancel":
            world.finish(name)
            ended.append(name)
            continue
        estimates.append(world.left(name))
        world.step(name, tokens)
        estimates.append(world.left(name))
        world.tool(name, ok=ok)
        estimates.append(world.left(name))
    return estimates


moves = st.lists(
    st.tuples(
        st.integers(0, 11),
        st.one_of(st.integers(0, 5_000), st.integers(0, 10**9)),
        st.sampled_from([True, False, None]),
        st.sampled_from(["go", "go", "go", "end", "cancel"]),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", EVERY)
@given(moves=moves)
@settings(max_examples=60)
def test_estimates_are_finite_never_negative_and_repeat(name, moves):
    estimates = play(EVERY[name](), moves)
    assert all(math.isfinite(e) and e >= 0 for e in estimates)
    assert play(EVERY[name](), moves) == estimates


def test_only_the_served_wrapper_takes_time():
    assert {name: make().served for name, make in EVERY.items()} == {
        "none": False,
        "group": False,
        "history": False,
        "progressive": False,
        "posterior": False,
        "served": True,
        "awaited": True,
    }
    assert [name for name, make in EVERY.items() if predictions_awaited(make())] == ["awaited"]


@given(moves=moves)
@settings(max_examples=30)
def test_serving_changes_the_time_of_an_estimate_and_not_its_value(moves):
    inner = ProgressivePredictor()
    assert play(Served(inner), moves) == play(ProgressivePredictor(), moves)
    assert Served(inner).inner is inner


# -- group ---------------------------------------------------------------------------------------


def test_group_takes_an_unknown_group_for_long_until_a_sibling_ends():
    world = World(GroupPredictor(unknown_tokens=40_960))
    world.step("g/0", 60)
    assert world.left("g/0") == 40_900
    world.step("g/1", 500, ends=True)
    assert world.left("g/0") == 440
    assert world.left("other/0") == 40_960


@given(totals=st.lists(st.integers(1, 10_000), min_size=1, max_size=16), made=st.integers(0, 9_000))
def test_group_goes_by_the_longest_that_ended_and_never_below_the_floor(totals, made):
    world = World(GroupPredictor(floor_tokens=7.0))
    for i, total in enumerate(totals):
        world.step(f"g/{i}", total, ends=True)
    world.step("g/x", made)
    assert world.left("g/x") == max(max(totals) - made, 7)


# -- history -------------------------------------------------------------------------------------


def test_history_is_the_mean_residual_of_the_group():
    world = World(HistoryPredictor({GroupId("g"): [100, 300, 500]}))
    assert world.left("g/0") == 300
    world.step("g/0", 200)
    assert world.left("g/0") == (100 + 300) / 2
    world.step("g/0", 400)
    assert world.left("g/0") == 300  # longer than all: their mean once more


def test_history_falls_back_to_the_task_then_to_all_tasks_then_to_the_given_default():
    known = HistoryPredictor({GroupId("h"): [40, 60]}, task_totals={"coding": [900, 1_100]})
    world = World(known)
    world.step("g/0", 100)
    assert world.left("g/0") == 900
    world.t("g/1").task = "search"
    assert world.left("g/1") == (40 + 60 + 900 + 1_100) / 4
    assert World(HistoryPredictor({}, unknown_tokens=77)).left("g/0") == 77


def test_history_grows_with_what_ends_in_this_run():
    world = World(HistoryPredictor({}))
    world.step("g/0", 400, ends=True)
    world.step("g/1", 600, ends=True)
    assert world.left("g/2") == 500
    assert world.left("other/0") == 500


def test_history_takes_its_totals_in_any_order():
    a = World(HistoryPredictor({GroupId("g"): [500, 100, 300], GroupId("h"): []}))
    b = World(HistoryPredictor({GroupId("g"): [100, 300, 500]}))
    for world in (a, b):
        world.step("g/0", 250)
    assert a.left("g/0") == b.left("g/0") == 150


# -- progressive ---------------------------------------------------------------------------------


@given(
    totals=st.lists(st.integers(100, 20_000), min_size=1, max_size=15, unique=True),
    factor=st.floats(1.5, 10.0),
)
def test_progressive_expects_more_where_siblings_ended_longer(totals, factor):
    world = World(ProgressivePredictor())
    for i, total in enumerate(totals):
        world.step(f"short/{i}", total, ends=True)
        world.step(f"long/{i}", round(total * factor), ends=True)
    assert world.left("long/x") > world.left("short/x")


def test_progressive_lowers_a_group_as_siblings_end_early():
    world = World(ProgressivePredictor())
    estimates = [world.left("g/x")]
    for i in range(6):
        world.step(f"g/{i}", 300, ends=True)
        estimates.append(world.left("g/x"))
    assert all(later < earlier for earlier, later in pairwise(estimates))


def test_progressive_takes_siblings_that_run_on_for_signs_of_length():
    world = World(ProgressivePredictor())
    for i in range(4):
        world.step(f"far/{i}", 4_000)
        world.step(f"near/{i}", 100)
    assert world.left("far/x") > world.left("near/x")


def test_progressive_starts_from_what_is_typical_and_follows_what_ends():
    assert World(ProgressivePredictor(typical_tokens=3_000)).left("g/0") == pytest.approx(3_000)
    world = World(ProgressivePredictor(typical_tokens=3_000, typical_weight=10))
    estimates = []
    for i in range(2_000):
        world.step(f"g{i}/0", 500, ends=True)
        estimates.append(world.left("new/0"))
    assert all(later < earlier for earlier, later in pairwise(estimates))
    assert estimates[-1] == pytest.approx(500, rel=0.1)


def test_progressive_expects_longer_trajectories_of_those_with_longer_steps():
    world = World(ProgressivePredictor())
    for _ in range(4):
        world.step("g/talker", 400)
        world.tool("g/talker")
        world.step("g/terse", 100)
        world.tool("g/terse")
    world.step("g/talker", 100)
    world.step("g/terse", 1_300)  # now both have made the same
    assert world.t("g/talker").output_tokens == world.t("g/terse").output_tokens
    assert world.left("g/talker") > world.left("g/terse")


def test_progressive_leaves_the_first_generation_out_of_the_pace():
    world = World(ProgressivePredictor())
    world.step("g/0", 50)
    world.step("h/0", 50)
    world.tool("g/0")
    world.tool("h/0")
    plain = world.left("h/0")
    world.step("g/1", 2_000)  # a long plan of a sibling is exposure and no pace
    assert world.left("h/0") == pytest.approx(plain, rel=0.05)


def test_progressive_adds_a_step_while_the_latest_call_has_failed():
    world = World(ProgressivePredictor())
    for _ in range(3):
        world.step("g/0", 200)
        world.tool("g/0")
    before = world.left("g/0")
    world.tool("g/0", ok=False)
    assert world.left("g/0") == pytest.approx(before + 200, rel=0.01)
    world.tool("g/0", ok=None)
    assert world.left("g/0") == pytest.approx(before)


def test_progressive_learns_nothing_from_those_that_never_ran():
    world = World(ProgressivePredictor())
    before = world.left("g/0")
    for i in range(1, 9):
        world.finish(f"g/{i}")
    assert world.left("g/0") == before


def test_progressive_keeps_tasks_apart():
    world = World(ProgressivePredictor())
    for i in range(50):
        world.step(f"g{i}/0", 20, ends=True)
    world.t("other/0").task = "math"
    assert world.left("other/0") == pytest.approx(3_000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": 0.0},
        {"shape": math.nan},
        {"group_shape": 0.0},
        {"running_weight": 1.5},
        {"typical_tokens": 0.0},
        {"typical_weight": -1.0},
    ],
)
def test_progressive_refuses_priors_out_of_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ProgressivePredictor(**wrong)


def ranked(predictor, seed):
    """Mean rank correlation of estimates and truth, over a made-up rollout in lock-step."""
    rng = np.random.default_rng(seed)
    group = rng.normal(0, 0.6, 40)
    total = {
        f"g{g}/{i}": max(60, round(1_500 * math.exp(group[g] + rng.normal(0, 0.5))))
        for g in range(40)
        for i in range(8)
    }
    world, found = World(predictor), []
    for round_ in range(30):
        live = [name for name in total if world.t(name).phase != "finished"]
        for name in live:
            left = total[name] - world.t(name).output_tokens
            ends = left <= 200
            world.step(name, min(left, 200), ends=ends)
            if ends:
                world.t(name).phase = "finished"
            else:
                world.tool(name)
        live = [name for name in live if world.t(name).phase != "finished"]
        if round_ in (3, 6, 9):
            true = [total[name] - world.t(name).output_tokens for name in live]
            estimates = [world.left(name) for name in live]
            ranks = [np.argsort(np.argsort(side, kind="stable")) for side in (true, estimates)]
            found.append(np.corrcoef(*ranks)[0, 1])
    return float(np.mean(found))


def test_progressive_ranks_better_than_the_group_rule():
    gains = [ranked(ProgressivePredictor(), s) - ranked(GroupPredictor(), s) for s in range(3)]
    assert min(gains) > 0.05


# -- step lengths --------------------------------------------------------------------------------


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_a_running_mean_is_the_mean_and_its_squares_add_up(values):
    mean = RunningMean()
    squares = sum(mean.add(x) for x in values)
    assert mean.count == len(values)
    assert mean.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert squares == pytest.approx(np.var(values) * len(values), rel=1e-6, abs=1e-4)


def test_step_lengths_shrink_towards_group_and_task_and_sharpen_with_steps():
    lengths = StepLengths()
    groups = [RunningMean() for _ in range(20)]
    rng = np.random.default_rng(1)
    for group in groups:
        shift = rng.normal(0, 0.5)
        for own in [RunningMean() for _ in range(4)]:
            for _ in range(10):
                tokens = round(300 * math.exp(shift + rng.normal(0, 0.3)))
                lengths.add(own, group, tokens)
    own, group = RunningMean(), RunningMean()
    found = []
    for _ in range(30):
        lengths.add(own, group, 900)
        found.append(lengths.deviation(own, group))
    raw = math.log(900) - math.log(300)
    assert 0 < found[0] < found[4] < found[-1] < 1.3 * raw
    assert lengths.typical_tokens(found[-1]) == pytest.approx(900, rel=0.15)


def test_step_lengths_have_no_estimate_before_the_first_step():
    lengths = StepLengths()
    assert lengths.deviation(RunningMean(), RunningMean()) == 0.0
    assert lengths.typical_tokens(0.0) == 0.0


def test_progressive_keeps_a_tasks_latest_groups_and_goes_on_with_trajectories_of_others():
    world = World(ProgressivePredictor())
    world.step("g0/0", 100)
    before = world.predictor.remaining_tokens(world.t("g0/0"))
    for n in range(1, _TASK_GROUPS + 1):
        world.step(f"g{n}/0", 100, ends=True)
    (task,) = world.predictor._tasks.values()
    assert len(task.groups) == _TASK_GROUPS
    assert GroupId("g0") not in task.groups
    assert world.predictor.remaining_tokens(world.t("g0/0")) < before
    world.step("g0/0", 100, ends=True)
    assert task.ended == _TASK_GROUPS + 1
