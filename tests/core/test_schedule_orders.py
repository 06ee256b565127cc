import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.policies.plugins import load_policy
from heddle_core.commands import Dispatch, Preempt, StartEngine
from heddle_core.controller import Controller
from heddle_core.events import EngineReady, RolloutStarted, StepPreempted, TrajectoryArrived
from heddle_core.ids import EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_core.parts.predictor import GroupPredictor
from heddle_core.parts.scheduler import Autellix, LongestFirst, ProgressivePriority, ShortestFirst
from tests.core.policy_fakes import policy_context, trajectory

remaining_tokens = st.lists(st.floats(0, 1e6), min_size=1, max_size=20)


def served_order(scheduler, remaining):
    """Indices in the order of service: larger keys first, arrival among equals."""
    keys = [scheduler.priority(trajectory(str(i)), r) for i, r in enumerate(remaining)]
    return sorted(range(len(keys)), key=lambda i: -keys[i])


@given(remaining=remaining_tokens)
def test_longest_first_serves_by_what_is_left_and_equals_by_arrival(remaining):
    order = served_order(LongestFirst(), remaining)
    assert order == sorted(range(len(remaining)), key=lambda i: (-remaining[i], i))


@given(remaining=remaining_tokens)
def test_shortest_first_serves_the_other_end_first(remaining):
    order = served_order(ShortestFirst(), remaining)
    assert order == sorted(range(len(remaining)), key=lambda i: (remaining[i], i))


@given(remaining=remaining_tokens)
def test_progressive_priority_is_longest_first_with_eviction(remaining):
    assert served_order(ProgressivePriority(), remaining) == served_order(LongestFirst(), remaining)
    assert ProgressivePriority().preemptive
    assert not LongestFirst().preemptive
    assert not ShortestFirst().preemptive


class KnownTotals(GroupPredictor):
    """Returns the totals of the test."""

    def __init__(self, totals):
        super().__init__()
        self.totals = totals

    def remaining_tokens(self, t):
        return float(self.totals[t.id] - t.output_tokens)


def one_slot(scheduler, totals):
    """A controller with one engine of one slot, to which all trajectories arrive in turn."""
    policy = load_policy("verl", replace(policy_context(gpus=1), max_running=1))
    controller = Controller(replace(policy, scheduler=scheduler, predictor=KnownTotals(totals)))
    out = list(
        controller.handle(
            RolloutStarted(time_s=0.0, rollout=RolloutId("r"), trajectories=len(totals))
        )
    )
    (start,) = [c for c in out if isinstance(c, StartEngine)]
    ready = EngineReady(
        time_s=0.0,
        engine=start.engine,
        shape=EngineShape("h100", 1),
        kv_capacity_tokens=250_000,
        max_running=1,
    )
    out += controller.handle(ready)
    for name in totals:
        arrived = TrajectoryArrived(
            time_s=1.0,
            rollout=RolloutId("r"),
            trajectory=name,
            group=GroupId("g"),
            task="coding",
            prompt_tokens=100,
        )
        out += controller.handle(arrived)
        controller.ledger.check()
    return controller, start.engine, out


def test_a_longer_arrival_takes_the_slot_of_a_shorter_one_which_keeps_its_tokens():
    a, b = TrajectoryId("a"), TrajectoryId("b")
    controller, engine, out = one_slot(ProgressivePriority(), {a: 500, b: 900})
    assert [c.trajectory for c in out if isinstance(c, Preempt)] == [a]
    evicted = StepPreempted(time_s=2.0, trajectory=a, step=0, engine=engine, output_tokens=40)
    (dispatch,) = controller.handle(evicted)
    controller.ledger.check()
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.trajectory, dispatch.priority) == (b, 900.0)
    assert controller.ledger.trajectory(a).output_tokens == 40
    assert controller.ledger.trajectory(a).priority == 460.0


def test_one_eviction_is_requested_at_a_time():
    totals = {TrajectoryId(name): tokens for name, tokens in (("a", 1), ("b", 2), ("c", 3))}
    _, _, out = one_slot(ProgressivePriority(), totals)
    assert len([c for c in out if isinstance(c, Preempt)]) == 1


@pytest.mark.parametrize("scheduler", [LongestFirst(), ShortestFirst()])
def test_orders_that_do_not_evict_wait_for_the_slot(scheduler):
    totals = {TrajectoryId("a"): 500, TrajectoryId("b"): 900, TrajectoryId("c"): 100}
    _, _, out = one_slot(scheduler, totals)
    assert not [c for c in out if isinstance(c, Preempt)]


def waiting(name, attained, *, waited_s=0.0, token_s=0.02):
    """A trajectory that has had `attained` tokens and has waited so long in all."""
    tool_s = 3.0
    runnable_s = 5.0 + tool_s + attained * token_s + waited_s
    return trajectory(
        name, output_tokens=attained, arrived_s=5.0, tool_s=tool_s, runnable_s=runnable_s
    )


def test_autellix_levels_grow_exponentially():
    order = Autellix(quantum_tokens=100, growth=2.0, levels=4)
    bounds = {0: 0, 99: 0, 100: -1, 299: -1, 300: -2, 699: -2, 700: -3, 10**9: -3}
    assert {made: order.priority(waiting("t", made), 0.0) for made in bounds} == bounds


@given(attained=st.lists(st.integers(0, 60_000), min_size=1, max_size=20))
def test_autellix_serves_by_level_and_within_a_level_by_arrival(attained):
    order = Autellix()
    keys = [order.priority(waiting(str(i), made), 0.0) for i, made in enumerate(attained)]
    assert all(math.isfinite(key) and key <= 0 and key == int(key) for key in keys)
    for key, made in zip(keys, attained, strict=True):
        for other, less in zip(keys, attained, strict=True):
            if less <= made:
                assert other >= key


@given(made=st.integers(512, 40_960), remaining=st.floats(0, 1e6))
def test_autellix_uses_service_not_predictions(made, remaining):
    t = waiting("t", made)
    assert Autellix().priority(t, remaining) == Autellix().priority(t, 0.0) < 0


@given(made=st.integers(512, 40_960))
def test_autellix_promotes_trajectories_that_waited_too_long_for_their_service(made):
    order = Autellix(starvation_ratio=4.0, token_s=0.02)
    service_s = made * 0.02
    assert order.priority(waiting("t", made, waited_s=3.9 * service_s), 0.0) < 0
    assert order.priority(waiting("t", made, waited_s=4.1 * service_s), 0.0) == 0


def test_autellix_evicts_across_levels_only():
    a, b = TrajectoryId("a"), TrajectoryId("b")
    assert Autellix().preemptive
    _, _, out = one_slot(Autellix(), {a: 500, b: 900})
    assert not [c for c in out if isinstance(c, Preempt)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantum_tokens": 0},
        {"growth": 0.5},
        {"levels": 0},
        {"starvation_ratio": 0.0},
        {"token_s": 0.0},
    ],
)
def test_autellix_refuses_levels_that_order_nothing(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Autellix(**wrong)
