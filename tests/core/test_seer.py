"""Seer's parts: probes first, steps in chunks, any engine where KV is shared."""

from dataclasses import replace

import pytest

from heddle_core.ids import GroupId, RolloutId
from heddle_core.parts.admission import InChunks
from heddle_core.parts.placement.load_and_pin import SharedKv
from heddle_core.parts.predictor import GroupPredictor
from heddle_core.parts.scheduler import ProbesFirst
from heddle_core.trajectory import Trajectory
from tests.core.ledgers import add_trajectory, ledger_of, policy_context
from tests.core.policy_fakes import trajectory, view_of


def sample(name: str, group: str, *, made: int = 0, rollout: str = "r") -> Trajectory:
    t = add_trajectory(ledger_of(1), name, output_tokens=made)
    t.group, t.rollout = GroupId(group), RolloutId(rollout)
    return t


def test_the_first_of_each_group_is_its_probe_and_the_shortest_probe_goes_first():
    order = ProbesFirst()
    a, b = sample("a0", "a", made=900), sample("b0", "b", made=20)
    others = sample("a1", "a"), sample("b1", "b")
    keys = [order.priority(t, 40_000.0) for t in (a, b, *others)]
    assert keys[1] > keys[0] > keys[2] == keys[3] == 40_000.0
    assert not order.preemptive


def test_the_others_go_by_estimated_total_the_longest_first_unknown_groups_before_all():
    order, lengths = ProbesFirst(), GroupPredictor()
    for group, total in (("a", 3_000), ("b", 500)):
        probe = sample(f"{group}0", group, made=total)
        order.priority(probe, 0.0)
        lengths.observe_finish(probe)
    order.priority(sample("c0", "c"), 0.0)
    a, b, c = sample("a1", "a", made=1_000), sample("b1", "b"), sample("c1", "c", made=9)
    keys = [order.priority(t, lengths.remaining_tokens(t)) for t in (a, b, c)]
    assert keys == [3_000.0, 500.0, 40_960.0]


def test_each_rollout_has_probes_of_its_own_and_old_ones_are_forgotten():
    order = ProbesFirst()
    for i in range(9):
        assert order.priority(sample("first", "a", rollout=f"r{i}"), 5.0) > 1e8
        assert order.priority(sample("second", "a", rollout=f"r{i}"), 5.0) == 5.0
    assert order.priority(sample("second", "a", rollout="r8"), 5.0) == 5.0
    assert order.priority(sample("second", "a", rollout="r0"), 5.0) > 1e8


def test_kv_is_reserved_for_a_chunk_or_for_what_is_left():
    part = InChunks(chunk_tokens=100)
    assert part.chunk_tokens == 100
    assert not part.keeps_kv
    t = trajectory("a")
    assert [part.reserve_tokens(t, left) for left in (40_000.0, 100.0, 30.5, 0.0)] == [
        100,
        100,
        30,
        1,
    ]
    with pytest.raises(ValueError, match="at least 1"):
        InChunks(chunk_tokens=0)


def test_any_engine_where_kv_is_shared_else_the_home():
    context = policy_context()
    loads = {s: replace(c, load_s=1e-6) for s, c in context.cost.by_shape.items()}
    shared = replace(context, cost=replace(context.cost, by_shape=loads))
    t = trajectory("a", home="e0")
    assert SharedKv(shared).place(t, view_of(5, 1)) == "e1"
    assert SharedKv(context).place(t, view_of(5, 1)) == "e0"
    assert SharedKv(context).place(trajectory("b"), view_of(5, 1)) == "e1"
