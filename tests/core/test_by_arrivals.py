"""Parts that follow how trajectories arrive: at once, or one by one while others end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_core.estimate.arrival_waves import ArrivalWaves
from heddle_core.ids import TrajectoryId
from heddle_core.ledger import Ledger
from heddle_core.parts.migration import Balance, BalanceBatches
from heddle_core.parts.scheduler import TOKEN_S, ByArrivals, LongestTotal, ShortestAged
from heddle_core.trajectory import Trajectory
from tests.core.ledgers import add_trajectory, ledger_of, policy_context

steps = st.lists(st.integers(-60, 3), max_size=80)
"""A positive number: so many arrive; another: one of the unfinished ends."""


def scanned(history: list[tuple[str, int]]) -> bool:
    """The rule again, from the whole history: most unfinished ones are of one wave."""
    waves: list[list[int]] = [[]]
    came = ends = 0
    ended: list[int] = []
    for what, number in history:
        if what == "ended":
            ended.append(number)
            ends += 1
            continue
        if 8 * ends > came:
            waves.append([])
            came = ends = 0
        waves[-1].append(number)
        came += 1
    left = [[number for number in wave if number not in ended] for wave in waves]
    return max(map(len, left)) * 2 > sum(map(len, left))


@given(steps=steps)
def test_waves_are_counted_as_the_whole_history_has_them(steps: list[int]):
    waves, history = ArrivalWaves(), []
    arrivals, unfinished = 0, []
    for step in steps:
        for _ in range(step):
            history.append(("arrived", arrivals))
            unfinished.append(arrivals)
            arrivals += 1
            # Several are seen at once: the number shows how many there were.
        if step > 0:
            waves.arrived(arrivals)
        elif unfinished:
            number = unfinished.pop(-step % len(unfinished))
            history.append(("ended", number))
            waves.ended(number)
        assert waves.batch == scanned(history)


def test_those_that_come_at_once_are_a_batch_until_others_come_between_their_ends():
    waves = ArrivalWaves()
    assert not waves.batch
    waves.arrived(100)
    for number in range(20):
        waves.ended(number)
    assert waves.batch
    for number in range(100, 180):
        waves.arrived(number + 1)
        waves.ended(number - 80)
    # 80 of the last wave would be all; they came one by one.
    assert not waves.batch


def test_one_that_ends_early_does_not_divide_a_batch():
    waves = ArrivalWaves()
    waves.arrived(50)
    waves.ended(3)
    waves.arrived(100)
    for number in range(4, 50):
        waves.ended(number)
    assert waves.batch


def arrive(ledger: Ledger, name: str, at_s: float = 0.0, **fields: object) -> Trajectory:
    t = add_trajectory(ledger, name, **fields)
    t.arrived_s = at_s
    return t


def test_the_order_is_longest_total_in_a_batch_and_short_ones_first_otherwise():
    ledger, scheduler = ledger_of(1), ByArrivals()
    batch = [arrive(ledger, f"b{i}", 5.0) for i in range(10)]
    for t in batch:
        assert scheduler.priority(t, 700.0) == LongestTotal().priority(t, 700.0) == 700.0
    keys = []
    for i, t in enumerate(batch):
        scheduler.observe_finish(t)
        later = arrive(ledger, f"l{i}", 10.0 + i)
        keys.append(scheduler.priority(later, 700.0) == ShortestAged().priority(later, 700.0))
    assert keys == sorted(keys)
    assert keys[-1]
    assert not keys[0]
    assert not scheduler.preemptive


@given(
    ages_s=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
    remaining=st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)),
)
def test_no_trajectory_is_passed_by_one_that_arrives_much_later(
    ages_s: tuple[float, float], remaining: tuple[float, float]
):
    ledger, scheduler = ledger_of(1), ShortestAged()
    one, other = (arrive(ledger, str(i), at_s) for i, at_s in enumerate(ages_s))
    passes = scheduler.priority(other, remaining[1]) > scheduler.priority(one, remaining[0])
    if passes:
        assert ages_s[1] - ages_s[0] <= TOKEN_S * (remaining[0] - remaining[1]) + 1e-6


def test_equal_arrivals_go_shortest_first_and_progress_raises_a_step():
    ledger, scheduler = ledger_of(1), ShortestAged(token_s=0.1)
    t, other = arrive(ledger, "t", 3.0), arrive(ledger, "other", 3.0)
    assert scheduler.priority(t, 10.0) > scheduler.priority(other, 11.0)
    assert scheduler.priority(t, 10.0) == -4.0
    with pytest.raises(ValueError, match=r"token_s is -0\.1"):
        ShortestAged(token_s=-0.1)


def crowded(ledger: Ledger, count: int) -> list[Trajectory]:
    """Long trajectories, all on the first of two engines."""
    ts = [arrive(ledger, f"t{i}", home="e0") for i in range(count)]
    for t in ts:
        ledger.estimate(t, 4_000.0)
    return ts


def test_homes_move_in_a_batch_as_balance_moves_them():
    context = policy_context(gpus=2, tps=(1,))
    targets = []
    for part in (Balance(context), BalanceBatches(context)):
        ledger = ledger_of(1, 1)
        ts = crowded(ledger, 30)
        targets.append([part.target(t, 4_000.0, ledger) for t in ts])
    assert targets[0] == targets[1]
    assert "e1" in targets[0]


def test_homes_stay_where_trajectories_come_one_by_one():
    context = policy_context(gpus=2, tps=(1,))
    ledger, part, balance = ledger_of(1, 1), BalanceBatches(context), Balance(context)
    ts = crowded(ledger, 30)
    part.target(ts[0], 4_000.0, ledger)
    for i, t in enumerate(ts[:20]):
        ledger.finish(t)
        part.finished(t)
        later = arrive(ledger, f"later{i}", home="e0")
        ledger.estimate(later, 4_000.0)
        part.target(later, 4_000.0, ledger)
    there = list(ledger.trajectories.values())
    assert any(balance.target(t, 4_000.0, ledger) == "e1" for t in there)
    assert [part.target(t, 4_000.0, ledger) for t in there] == [None] * 30


def test_the_two_parts_see_the_same_waves():
    context = policy_context(gpus=1, tps=(1,))
    ledger, scheduler, migration = ledger_of(1), ByArrivals(), BalanceBatches(context)
    seen = []
    for i in range(120):
        t = arrive(ledger, f"t{i}", home="e0")
        scheduler.priority(t, 500.0)
        migration.target(t, 500.0, ledger)
        if i >= 40:
            first = ledger.trajectories[TrajectoryId(f"t{i - 40}")]
            ledger.finish(first)
            scheduler.observe_finish(first)
            migration.finished(first)
        assert scheduler._waves.batch == migration._waves.batch
        seen.append(scheduler._waves.batch)
    assert seen[0]
    assert not seen[-1]
