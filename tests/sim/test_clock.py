"""The calendar of a simulation, and the SimPy environment that shares its time."""

from collections.abc import Generator
from heapq import heappop, heappush
from math import inf
from typing import Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from simpy.core import EmptySchedule

from heddle_sim.calendar import BUCKET_S, Calendar
from heddle_sim.clock import SimEnvironment

DELAYS = st.sampled_from(
    [0.0, 1e-9, BUCKET_S / 3, BUCKET_S, 2.5 * BUCKET_S, 1.0, 1.0, 3600.0, 1e16]
)


@given(st.lists(st.tuples(DELAYS, st.lists(DELAYS, max_size=3)), max_size=20))
def test_calls_run_by_time_and_then_by_request(plan: list[tuple[float, list[float]]]) -> None:
    """As one heap of (time, number of the request) would order them."""
    calendar, made = Calendar(), list[tuple[float, int]]()
    requests = iter(range(1000))

    def call(number: int, more: list[float]) -> None:
        made.append((calendar.now_s, number))
        for delay_s in more:
            calendar.call_after(delay_s, call, next(requests), [])

    for delay_s, more in plan:
        calendar.call_after(delay_s, call, next(requests), more)
    calendar.run()

    heap: list[tuple[float, int, list[float]]] = []
    numbers = iter(range(1000))
    for delay_s, more in plan:
        heappush(heap, (delay_s, next(numbers), more))
    expected = []
    while heap:
        time_s, number, more = heappop(heap)
        expected.append((time_s, number))
        for delay_s in more:
            heappush(heap, (time_s + delay_s, next(numbers), []))
    assert made == expected


def test_a_call_for_a_time_that_is_past_runs_now() -> None:
    calendar, made = Calendar(), list[float]()
    calendar.call_at(5.0, lambda: calendar.call_at(1.0, lambda: made.append(calendar.now_s)))
    calendar.run()
    assert made == [5.0]


def test_a_call_at_infinity_never_runs() -> None:
    calendar, made = Calendar(), list[float]()
    for time_s in (inf, 1.0):
        calendar.call_at(time_s, made.append, time_s)
    calendar.run()
    assert (made, calendar.peek()[0]) == ([1.0], inf)


@pytest.mark.parametrize("delay_s", [-1.0, float("nan")])
def test_a_call_cannot_be_delayed_by_less_than_nothing(delay_s: float) -> None:
    with pytest.raises(ValueError, match="cannot be delayed"):
        Calendar().call_after(delay_s, lambda: None)


def test_a_process_of_simpy_runs_between_the_calls() -> None:
    env, made = SimEnvironment(), list[tuple[str, float]]()

    def process() -> Generator[simpy.Event, Any, None]:
        for _ in range(3):
            made.append(("process", env.now))
            yield env.timeout(1.0)

    env.process(process())
    for time_s in (0.5, 1.5, 1.75):
        env.calendar.call_at(time_s, lambda: made.append(("call", env.now)))
    env.run()
    assert made == [
        ("process", 0.0),
        ("call", 0.5),
        ("process", 1.0),
        ("call", 1.5),
        ("call", 1.75),
        ("process", 2.0),
    ]


def test_calls_and_events_at_one_time_run_in_the_order_of_their_requests() -> None:
    env, made = SimEnvironment(), list[str]()

    def event(name: str) -> None:
        callbacks = env.timeout(1.0).callbacks
        assert callbacks is not None
        callbacks.append(lambda _: made.append(name))

    event("event 1")
    env.calendar.call_after(1.0, made.append, "call 1")
    event("event 2")
    env.calendar.call_after(1.0, made.append, "call 2")
    with pytest.raises(EmptySchedule):
        env.run_until(())
    assert made == ["event 1", "call 1", "event 2", "call 2"]


def test_a_call_can_trigger_an_event_that_a_process_waits_for() -> None:
    env, made = SimEnvironment(), list[float]()
    signal = env.event()

    def process() -> Generator[simpy.Event, Any, None]:
        yield signal
        yield env.timeout(1.0)
        made.append(env.now)

    env.process(process())
    env.calendar.call_at(2.0, signal.succeed)
    env.calendar.call_at(9.0, lambda: made.append(env.now))
    with pytest.raises(EmptySchedule):
        env.run_until(())
    assert made == [3.0, 9.0]


def test_run_until_a_time_leaves_later_calls() -> None:
    env, made = SimEnvironment(), list[float]()
    for time_s in (1.0, 2.0, 3.0):
        env.calendar.call_at(time_s, made.append, time_s)
    env.run(until=2.0)
    assert (made, env.now) == ([1.0], 2.0)
    env.run()
    assert made == [1.0, 2.0, 3.0]


def test_it_stops_when_it_is_due_to_stop() -> None:
    env, stop = SimEnvironment(), list[object]()
    env.calendar.call_at(1.0, stop.append, None)
    env.calendar.call_at(2.0, stop.append, None)
    env.run_until(stop)
    assert (stop, env.now) == ([None], 1.0)
