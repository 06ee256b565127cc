"""C-MLFQ, rule by rule, and against a plain second implementation."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from heddle_core.estimate.state_tree import RECENT, EndedPath, StateNode, StateTree
from heddle_core.events import ToolReturned
from heddle_core.ids import EngineId, EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_core.parts.placement.buckets import (
    REBUILD_ROLLOUTS,
    RECENT_TRAJECTORIES,
    Bucket,
    Buckets,
)
from heddle_core.trajectory import Trajectory
from tests.core.ledgers import add_trajectory, ledger_of
from tests.core.policy_fakes import FakeEngine, FakeView

TINY = (Bucket(100, (1, 2)), Bucket(1_000, (4, 8)))


def member(name: str, *, group: str = "g", rollout: str = "r") -> Trajectory:
    return Trajectory(
        id=TrajectoryId(name),
        rollout=RolloutId(rollout),
        group=GroupId(group),
        task="any",
        weights_version=0,
        prompt_tokens=10,
        arrived_s=0.0,
        context_tokens=10,
        runnable_s=0.0,
    )


def returned(
    t: Trajectory, tool: str = "sh", tokens: int = 10, *, ok: bool | None = True
) -> ToolReturned:
    return ToolReturned(
        time_s=0.0,
        trajectory=t.id,
        step=t.step,
        tool=tool,
        ok=ok,
        observation_tokens=tokens,
        context_tokens=t.context_tokens,
    )


def engines(*tp_and_load: tuple[int, int]) -> FakeView:
    """Engines e0, e1, ... with these TP degrees and steps in flight."""
    return FakeView(
        known=[
            FakeEngine(id=EngineId(f"e{i}"), shape=EngineShape("h100", tp), in_flight=load)
            for i, (tp, load) in enumerate(tp_and_load)
        ]
    )


def run(buckets: Buckets, name: str, *steps: tuple[str, int], group: str = "g") -> Trajectory:
    """A trajectory that makes so many tokens before each tool's return, and ends after the last."""
    t = member(name, group=group)
    for tool, made in steps[:-1]:
        t.output_tokens += made
        buckets.observe_tool(t, returned(t, tool))
    t.output_tokens += steps[-1][1]
    buckets.finished(t)
    return t


def after(buckets: Buckets, name: str, *steps: tuple[str, int], group: str = "g") -> int:
    """The bucket of a trajectory after these tool results."""
    t = member(name, group=group)
    for tool, made in steps:
        t.output_tokens += made
        buckets.observe_tool(t, returned(t, tool))
    return buckets.bucket(t)


# -- 1: buckets ----------------------------------------------------------------------------------


def test_every_trajectory_starts_in_the_shortest_bucket_at_its_first_tp_degree():
    buckets = Buckets(buckets=TINY)
    assert buckets.place(member("a"), engines((4, 0), (2, 0), (1, 5), (1, 4))) == "e3"
    assert buckets.bucket(member("a")) == 0


def test_libras_defaults_are_two_buckets_with_tp_1_2_and_4_8():
    long = Buckets()
    run(long, "a", ("sh", 10), ("", 5_001))
    assert after(long, "b", ("sh", 10)) == 1
    short = Buckets()
    run(short, "a", ("sh", 10), ("", 5_000))
    assert after(short, "b", ("sh", 10)) == 0
    view = engines((1, 0), (2, 0), (4, 9), (8, 0))
    t = member("c")
    t.home = EngineId("e0")
    t.output_tokens = 10
    long.observe_tool(t, returned(t))
    assert long.place(t, view) == "e2"


# -- 2: the tree ---------------------------------------------------------------------------------


def test_a_state_is_tool_payload_class_and_failure():
    tree = StateTree(medium_tokens=500, large_tokens=5_000)
    t = member("a")
    for tokens, ok in ((500, True), (501, True), (5_000, None), (5_001, False)):
        tree.advance(returned(t, "sh", tokens, ok=ok), 0)
    ended = tree.end(t.id, t.group, 1)
    assert ended is not None
    assert list(ended.states) == [
        ("sh", 0, False),
        ("sh", 1, False),
        ("sh", 1, False),
        ("sh", 2, True),
    ]


def test_a_node_has_mean_visits_and_the_p90_of_the_last_200():
    node = StateNode()
    for remaining in range(1, 301):
        node.add(remaining)
    assert (node.visits, node.mean) == (300, pytest.approx(150.5))
    assert node.recent == list(range(101, 301))
    assert node.p90() == pytest.approx(280.1)  # 101 + 0.9 * 199
    assert RECENT == 200


@pytest.mark.parametrize("values", [[7], [1, 2], [5, 1, 9, 3], list(range(50))])
def test_the_p90_interpolates_as_numpy_does(values):
    node = StateNode()
    for value in values:
        node.add(value)
    assert node.p90() == pytest.approx(np.percentile(values, 90))


def test_remaining_lengths_are_inserted_at_the_start_and_at_every_return():
    tree, t = StateTree(), member("a")
    for tool, made in (("sh", 30), ("web", 20)):
        t.output_tokens += made
        tree.advance(returned(t, tool), t.output_tokens)
    ended = tree.end(t.id, t.group, 100)
    assert ended == EndedPath(GroupId("g"), [("sh", 0, False), ("web", 0, False)], [100, 70, 50])


def test_a_known_prompt_has_a_tree_of_its_own_and_a_new_one_uses_all():
    buckets = Buckets(buckets=TINY)
    run(buckets, "a", ("sh", 10), ("", 500), group="long")
    run(buckets, "b", ("sh", 10), ("", 50), group="short")
    assert after(buckets, "c", ("sh", 10), group="long") == 1
    assert after(buckets, "d", ("sh", 10), group="short") == 0
    # All: mean 275, P90 455. Both name the long bucket.
    assert after(buckets, "e", ("sh", 10), group="new") == 1


def test_the_deepest_known_prefix_counts():
    buckets = Buckets(buckets=TINY)
    run(buckets, "a", ("sh", 10), ("sh", 10), ("", 20))
    run(buckets, "b", ("sh", 10), ("web", 10), ("", 700))
    # After ("sh",) the two have 30 and 710 left: mean 370, P90 642.
    assert after(buckets, "c", ("sh", 10)) == 1
    assert after(buckets, "d", ("sh", 10), ("sh", 10)) == 0
    # ("sh", "other") is not known: ("sh",) counts as it is.
    assert after(buckets, "e", ("sh", 10), ("other", 600)) == 1


def test_the_release_takes_an_unknown_result_for_the_whole_length():
    for totals, bucket in ((False, 0), (True, 1)):
        buckets = Buckets(buckets=TINY, totals_when_unknown=totals)
        run(buckets, "a", ("sh", 10), ("", 290))
        # Unknown: 300 in all; of these 250 are made.
        assert after(buckets, "b", ("other", 250)) == bucket


def test_nothing_moves_before_a_trajectory_has_ended_nor_by_one_without_output():
    buckets = Buckets(buckets=TINY)
    assert after(buckets, "a", ("sh", 2_000)) == 0
    buckets.finished(member("b"))
    assert after(buckets, "c", ("sh", 2_000)) == 0


# -- 3: moves ------------------------------------------------------------------------------------


def test_it_moves_only_if_mean_and_p90_name_the_same_bucket():
    buckets = Buckets(buckets=TINY)
    for i, left in enumerate([10] * 8 + [500, 500]):
        run(buckets, f"a{i}", ("sh", 10), ("", left))
    # Mean 108, P90 500: both beyond 100.
    assert after(buckets, "b", ("sh", 10)) == 1
    for i in range(2):
        run(buckets, f"c{i}", ("sh", 10), ("", 10))
    # Mean 91.7, P90 451: they differ.
    assert after(buckets, "d", ("sh", 10)) == 0


def test_it_is_promoted_and_demoted():
    buckets = Buckets(buckets=TINY)
    run(buckets, "a", ("sh", 10), ("sh", 600), ("", 20))
    t = member("b")
    t.output_tokens = 10
    buckets.observe_tool(t, returned(t))
    assert buckets.bucket(t) == 1
    t.output_tokens = 610
    buckets.observe_tool(t, returned(t))
    assert buckets.bucket(t) == 0


def test_lengths_beyond_all_limits_belong_to_the_last_bucket():
    buckets = Buckets(buckets=TINY)
    run(buckets, "a", ("sh", 10), ("", 99_999))
    assert after(buckets, "b", ("sh", 10)) == 1


def test_it_stays_on_its_engine_until_its_bucket_changes_and_is_placed_once():
    buckets = Buckets(buckets=TINY)
    run(buckets, "a", ("sh", 10), ("", 500))
    view = engines((1, 99), (1, 0), (4, 50), (4, 40))
    t = member("b")
    t.home = EngineId("e0")
    assert buckets.place(t, view) == "e0"
    t.output_tokens = 10
    buckets.observe_tool(t, returned(t))
    assert buckets.place(t, view) == "e3"
    t.home = EngineId("e3")
    view.known[3].in_flight = 90
    assert buckets.place(t, view) == "e3"
    view.known[3].accepting = False
    assert buckets.place(t, view) == "e2"


# -- 4: engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([(4, 0), (2, 0), (1, 9), (1, 8)], "e3"),  # the least loaded of the first degree
        ([(4, 0), (2, 5), (1, 10), (1, 11)], "e1"),  # at the limit: the next degree
        ([(8, 2), (4, 3), (2, 10), (1, 10)], "e1"),  # then the other buckets', by degree
        ([(16, 2), (16, 1), (8, 10), (1, 10)], "e1"),  # then any other, the least loaded
    ],
)
def test_engines_of_a_bucket_by_degree_then_by_load_below_the_limit(loads, chosen):
    assert Buckets(buckets=TINY, queue_limit=10).place(member("a"), engines(*loads)) == chosen


def test_where_all_are_full_a_new_one_waits_and_one_with_a_home_stays():
    buckets, view = Buckets(buckets=TINY, queue_limit=10), engines((1, 11), (4, 10))
    run(buckets, "x", ("sh", 10), ("", 500))
    a, b = member("a"), member("b")
    assert buckets.place(a, view) is None
    b.home, b.output_tokens = EngineId("e0"), 10
    buckets.observe_tool(b, returned(b))
    assert buckets.place(b, view) == "e0"
    assert buckets.release({a.id: a}, view) == []
    view.known[1].in_flight = 9
    assert buckets.release({a.id: a}, view) == [("a", "e1")]
    assert buckets.release({}, view) == []


def test_the_release_exceeds_the_limit_on_the_least_loaded_engine():
    buckets = Buckets(buckets=TINY, queue_limit=10, exceed_limit=True)
    assert buckets.place(member("a"), engines((1, 12), (4, 11))) == "e1"


def test_a_full_long_bucket_falls_back_from_the_short_degrees_on():
    """As `_bucket_rules` and `_try_select` of Libra's cmlfq_scheduler.py: TP 1 before TP 2."""
    buckets = Buckets(buckets=TINY, queue_limit=10)
    run(buckets, "x", ("sh", 10), ("", 500))
    t = member("a")
    t.home, t.output_tokens = EngineId("e0"), 10
    buckets.observe_tool(t, returned(t))
    assert buckets.bucket(t) == 1
    assert buckets.place(t, engines((4, 10), (8, 11), (2, 0), (1, 9))) == "e3"


def test_a_trajectory_without_tool_results_does_not_enter_the_tree():
    """As `finish_request` of Libra's cmlfq_scheduler.py."""
    buckets = Buckets(buckets=TINY)
    run(buckets, "plain", ("", 900))
    assert after(buckets, "first", ("sh", 10)) == 0
    run(buckets, "tools", ("sh", 10), ("", 500))
    run(buckets, "plain again", ("", 1))
    node, _ = buckets._tree.deepest(TrajectoryId("new"), GroupId("g"))
    assert (node.visits, node.mean) == (1, 510.0)


# -- 5: rebuilds ---------------------------------------------------------------------------------


def test_the_tree_is_rebuilt_every_50_rollouts_from_the_last_5000_trajectories():
    assert (REBUILD_ROLLOUTS, RECENT_TRAJECTORIES) == (50, 5_000)
    buckets, view = Buckets(buckets=TINY), engines((1, 0))
    run(buckets, "first", ("sh", 10), ("", 90_000))
    for i in range(RECENT_TRAJECTORIES):
        run(buckets, f"t{i}", ("sh", 10), ("", 50), group=f"g{i}")
    for i in range(REBUILD_ROLLOUTS):
        buckets.place(member("p", rollout=f"r{i}"), view)
    node, _ = buckets._tree.deepest(TrajectoryId("new"), GroupId("new"))
    assert node.visits == RECENT_TRAJECTORIES + 1
    buckets.place(member("p", rollout="r-last"), view)
    node, _ = buckets._tree.deepest(TrajectoryId("new"), GroupId("new"))
    assert (node.visits, node.mean) == (RECENT_TRAJECTORIES, pytest.approx(60.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"buckets": ()},
        {"buckets": (Bucket(10, (1,)), Bucket(10, (2,)))},
        {"queue_limit": 0},
    ],
)
def test_settings_that_give_no_buckets_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must ascend|at least 1"):
        Buckets(**wrong)


# -- a second implementation ---------------------------------------------------------------------


class PlainCmlfq:
    """The same rules over the list of all ended trajectories: no tree, no running figures."""

    def __init__(self, limits: tuple[float, ...], totals: bool) -> None:
        self.limits, self.totals = limits, totals
        self.ended: list[tuple[str, list, list[int], int]] = []
        self.paths: dict[str, tuple[list, list[int]]] = {}
        self.buckets: dict[str, int] = {}

    def returned(self, name: str, group: str, state: tuple, made: int) -> int:
        states, outputs = self.paths.setdefault(name, ([], []))
        states.append(state)
        outputs.append(made)
        known = [e for e in self.ended if e[0] == group] or self.ended
        bucket = self.buckets.setdefault(name, 0)
        for depth in range(len(states), -1, -1):
            same = [e for e in known if e[1][:depth] == states[:depth] and len(e[1]) >= depth]
            if same:
                left = [total - (at[depth - 1] if depth else 0) for _, _, at, total in same]
                done = 0 if depth or self.totals else made
                figures = (np.mean(left), np.percentile(left[-200:], 90))
                names = {self.of(figure - done) for figure in figures}
                if len(names) == 1:
                    bucket = names.pop()
                break
        self.buckets[name] = bucket
        return bucket

    def of(self, remaining: float) -> int:
        fitting = [i for i, limit in enumerate(self.limits) if remaining <= limit]
        return fitting[0] if fitting else len(self.limits) - 1

    def ends(self, name: str, group: str, total: int) -> None:
        states, made = self.paths.pop(name, ([], []))
        if total and states:
            self.ended.append((group, states, made, total))


@pytest.mark.parametrize("totals", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_it_decides_as_a_plain_second_implementation(seed, totals):
    rng = Random(seed)
    three = (Bucket(60, (1,)), Bucket(200, (2,)), Bucket(600, (4,)))
    ours = Buckets(buckets=three, totals_when_unknown=totals, medium_tokens=20, large_tokens=40)
    plain = PlainCmlfq(tuple(b.limit_tokens for b in three), totals)
    living: list[Trajectory] = []
    moved = 0
    for i in range(2_500):
        if len(living) < 12:
            living.append(member(f"t{i}", group=f"g{rng.randrange(5)}"))
        t = rng.choice(living)
        t.output_tokens += rng.choice([3, 10, 30, 100])
        if rng.random() < 0.25:
            ours.finished(t)
            plain.ends(t.id, t.group, t.output_tokens)
            living.remove(t)
            continue
        tool, tokens, ok = rng.choice("ab"), rng.choice([10, 30, 50]), rng.random() < 0.8
        before = ours.bucket(t)
        ours.observe_tool(t, returned(t, tool, tokens, ok=ok))
        state = (tool, (tokens > 20) + (tokens > 40), not ok)
        assert ours.bucket(t) == plain.returned(t.id, t.group, state, t.output_tokens), i
        moved += ours.bucket(t) != before
    assert moved > 50


def test_it_reads_a_ledger():
    ledger = ledger_of(1, 4)
    t = add_trajectory(ledger, "a")
    assert Buckets().place(replace(t, id=TrajectoryId("b")), ledger) == "e0"
