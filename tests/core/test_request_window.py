"""Fireworks' window of requests in flight, rule by rule."""

from itertools import count

import pytest

from heddle_core.engine_state import Engine
from heddle_core.events import StepFinished
from heddle_core.ids import EngineId, EngineShape
from heddle_core.ledger import Ledger
from heddle_core.parts.placement.request_window import RequestWindow
from heddle_core.trajectory import Trajectory
from tests.core.ledgers import add_trajectory


class Rollout:
    """Steps of trajectories that never end, on engines of one GPU each, 4 steps an interval."""

    def __init__(self, engines: int = 1) -> None:
        self.part, self.ledger = RequestWindow(interval=4), Ledger()
        for number in range(engines):
            name = EngineId(f"e{number}")
            self.ledger.add_engine(
                Engine(
                    id=name,
                    shape=EngineShape("h100", 1),
                    max_running=999,
                    kv_capacity_tokens=1_000_000,
                )
            )
        self.numbers = count()
        self.in_flight: list[Trajectory] = []
        self.waiting: list[Trajectory] = []

    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.send(add_trajectory(self.ledger, f"t{next(self.numbers)}", None))

    def send(self, t: Trajectory) -> None:
        engine = self.part.place(t, self.ledger)
        (self.waiting if engine is None else self.in_flight).append(t)
        if engine is not None:
            self.ledger.set_home(t, engine)

    def end(self, steps: int, *, waited_s: float, engine_s: float = 0.0) -> None:
        """End the oldest steps; the first that wait take their places."""
        for _ in range(steps):
            t = self.in_flight.pop(0)
            t.dispatched_s = self.ledger.now_s + waited_s
            event = StepFinished(
                time_s=t.dispatched_s,
                trajectory=t.id,
                step=0,
                engine=EngineId("e0"),
                output_tokens=1,
                reason="tool_call",
                queued_s=engine_s,
            )
            self.part.observe_step(t, event)
            while released := self.part.release({w.id: w for w in self.waiting}, self.ledger):
                ((name, engine),) = released
                first = self.waiting.pop(0)
                assert name == first.id
                self.ledger.set_home(first, engine)
                self.in_flight.append(first)


@pytest.mark.parametrize(("engines", "room"), [(1, 8), (3, 24), (40, 256)])
def test_it_begins_with_eight_requests_a_gpu_and_256_in_all_at_most(
    engines: int, room: int
) -> None:
    rollout = Rollout(engines)
    rollout.arrive(300)
    assert len(rollout.in_flight) == room


def test_far_below_the_target_it_grows_by_four_an_interval() -> None:
    rollout = Rollout()
    rollout.arrive(40)
    rollout.end(3, waited_s=0.0)
    assert len(rollout.in_flight) == 8
    rollout.end(1, waited_s=0.0)
    assert len(rollout.in_flight) == 12
    rollout.end(4, waited_s=0.0)
    assert len(rollout.in_flight) == 16


def test_near_the_target_it_grows_by_less() -> None:
    rollout = Rollout()
    rollout.arrive(40)
    rollout.end(4, waited_s=0.1, engine_s=0.15)  # .5 / .25 s
    assert len(rollout.in_flight) == 10


def test_above_the_target_it_halves_and_those_in_flight_drain() -> None:
    rollout = Rollout()
    rollout.arrive(40)
    rollout.end(4, waited_s=0.6)
    assert len(rollout.in_flight) == 7  # Three had been replaced; at most 4 from now on.
    rollout.end(3, waited_s=0.0)
    assert len(rollout.in_flight) == 4
    rollout.end(1, waited_s=0.0)  # .7 * .6 + .3 * 0 = .42 s: 4 + .5 / .42 = 5.2
    assert len(rollout.in_flight) == 5


def test_one_long_wait_among_short_ones_counts_by_a_third() -> None:
    rollout = Rollout()
    rollout.arrive(60)
    rollout.end(4, waited_s=0.0)
    rollout.end(4, waited_s=1.6)  # .3 * 1.6 = .48 s: grows by .5 / .48
    assert len(rollout.in_flight) == 13
    rollout.end(4, waited_s=1.6)  # .816 s
    rollout.end(8, waited_s=0.0)
    assert len(rollout.in_flight) < 13


def test_one_request_always_has_room_and_trajectories_stay() -> None:
    rollout = Rollout(2)
    homes = {"a": "e0", "b": "e1", "c": "e0"}
    for name, home in homes.items():
        rollout.send(add_trajectory(rollout.ledger, name, home))
    for _ in range(40):
        first = rollout.in_flight[0]
        rollout.end(1, waited_s=9.0)
        rollout.send(first)
    assert len(rollout.in_flight) == 1
    assert {t.id: t.home for t in (*rollout.in_flight, *rollout.waiting)} == homes


def test_a_cancelled_step_frees_its_place_and_one_placed_anew_takes_no_other() -> None:
    rollout = Rollout()
    rollout.arrive(9)
    again = rollout.in_flight[0]
    assert rollout.part.place(again, rollout.ledger) is not None
    assert rollout.part.place(rollout.waiting[0], rollout.ledger) is None
    rollout.part.finished(again)
    assert rollout.part.place(rollout.waiting[0], rollout.ledger) is not None


@pytest.mark.parametrize("wrong", [{"target_s": 0.0}, {"interval": 0}])
def test_values_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="target_s above 0"):
        RequestWindow(**wrong)  # type: ignore[arg-type]
