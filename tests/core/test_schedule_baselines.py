from hypothesis import given
from hypothesis import strategies as st

from heddle_core.parts.scheduler import Fcfs, RoundRobin
from tests.core.policy_fakes import trajectory


@given(step=st.integers(0, 1000), remaining=st.floats(0, 1e6))
def test_fcfs_leaves_the_order_to_arrival_whatever_is_predicted(step, remaining):
    fcfs = Fcfs()
    assert fcfs.priority(trajectory("a", step=step), remaining) == fcfs.priority(
        trajectory("b"), 0.0
    )


@given(steps=st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_round_robin_serves_fewer_steps_first_and_equals_by_arrival(steps):
    waiting = [trajectory(str(i), step=step) for i, step in enumerate(steps)]
    # A queue serves larger priorities first and keeps arrival among equals, as a stable sort does.
    served = sorted(waiting, key=lambda t: -RoundRobin().priority(t, 0.0))
    assert [(t.step, int(t.id)) for t in served] == sorted(
        (step, i) for i, step in enumerate(steps)
    )


def test_baseline_orders_never_evict():
    assert not Fcfs().preemptive
    assert not RoundRobin().preemptive
