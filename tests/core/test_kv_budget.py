"""prime-rl's adaptive concurrency, rule by rule; figures of prime-rl's source."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.parts.placement.kv_budget import KvBudget
from tests.core.policy_fakes import FakeEngine, FakeTrajectory, FakeView, policy_context

KV = 100_000


class Pool:
    """Trajectories that start as the part allows, on one engine; `least` start at first."""

    def __init__(self, least: int = 100, max_context: int | None = None) -> None:
        longest = max_context or KV // least
        self.part = KvBudget(replace(policy_context(), max_context=longest))
        self.engine = FakeEngine(id=EngineId("e0"), kv_capacity_tokens=KV)
        self.view = FakeView(known=[self.engine])
        self.names: Iterator[int] = count()
        self.under_way: list[FakeTrajectory] = []
        self.fill()

    def fill(self) -> int:
        """Start all that may; the number under way."""
        while True:
            t = FakeTrajectory(id=TrajectoryId(f"t{next(self.names)}"))
            if self.part.place(t, self.view) is None:
                return len(self.under_way)
            self.under_way.append(t)

    def end(self, number: int) -> None:
        for t in self.under_way[:number]:
            self.part.finished(t)
        del self.under_way[:number]

    def turn_over(self) -> int:
        """As many end as are under way, and others start in their place; the number then."""
        for _ in range(len(self.under_way)):
            self.end(1)
            self.fill()
        return len(self.under_way)

    def limit(self) -> int:
        """Of those under way, by those that start once all have ended without growth."""
        self.part._growth = 1.0
        self.end(len(self.under_way))
        return self.fill()

    def review(
        self, used: float = 0.0, *, waiting: int = 0, preempted: int = 0, report_s: float = 0.0
    ) -> None:
        """A review of ten steps that run; `report_s` is the age of the report."""
        self.view.now_s += 5.0
        self.engine.reported_s = self.view.now_s - report_s
        self.engine.reported_kv_used_tokens = round(used * KV)
        self.engine.running_steps, self.engine.in_flight = 10, 10 + waiting
        self.engine.reported_preemptions += preempted
        assert self.part.release({}, self.view) == []


def test_the_first_limit_is_all_kv_over_the_longest_context() -> None:
    assert Pool(8).fill() == 8
    assert Pool(max_context=2 * KV).fill() == 1
    assert Pool(5_000).fill() == 1_024


def test_a_longest_context_that_is_not_known_is_32768_tokens() -> None:
    engine = FakeEngine(id=EngineId("e0"), kv_capacity_tokens=3 * 32_768)
    part, view = KvBudget(policy_context()), FakeView(known=[engine])
    names = [TrajectoryId(f"t{n}") for n in range(4)]
    placed = [part.place(FakeTrajectory(id=name), view) for name in names]
    assert placed == ["e0", "e0", "e0", None]


def test_one_that_ends_makes_room_for_the_first_that_waits() -> None:
    pool = Pool(4)
    waiting = [FakeTrajectory(id=TrajectoryId(name)) for name in ("x", "y")]
    backlog = {t.id: t for t in waiting}
    assert pool.part.release(backlog, pool.view) == []
    pool.end(1)
    assert pool.part.release(backlog, pool.view) == [("x", "e0")]


@pytest.mark.parametrize(("used", "grown"), [(0.0, 120), (0.4, 110), (0.8, 100)])
def test_a_turnover_grows_the_limit_the_less_the_more_kv_is_in_use(used: float, grown: int) -> None:
    pool = Pool(100)
    assert pool.turn_over() == 100  # Nothing grows before the first review.
    pool.review(used)
    assert pool.turn_over() == pytest.approx(grown, abs=2)


@pytest.mark.parametrize(
    "state",
    [{"waiting": 1}, {"preempted": 1}, {"report_s": 15.0}],
    ids=lambda state: next(iter(state)),
)
def test_nothing_grows_where_steps_wait_engines_preempt_or_reports_are_old(
    state: dict[str, float],
) -> None:
    pool = Pool(100)
    pool.review()
    pool.review(**state)
    assert pool.turn_over() <= 100


def test_a_limit_that_does_not_bind_does_not_grow() -> None:
    pool = Pool(100)
    pool.review()
    pool.end(11)
    grown = pool.part._limit
    pool.end(78)
    assert pool.part._limit == grown


def test_above_the_soft_share_the_limit_is_trimmed_once_in_six_reviews() -> None:
    pool = Pool(100)
    pool.review(0.8)
    assert pool.part._limit == 100
    pool.review(0.9)
    assert pool.part._limit == 77  # 100 * .7 / .9
    pool.end(50)
    for _ in range(5):
        pool.review(0.9)
        assert pool.part._limit == 77
    pool.review(0.9)
    assert pool.part._limit == 38  # 50 * .7 / .9
    assert pool.limit() == 38


def test_a_queue_that_stays_cuts_to_nine_tenths() -> None:
    pool = Pool(100)
    for _ in range(5):
        pool.review(waiting=6)
    pool.review(waiting=5)  # Not above half of those running: counted anew.
    for _ in range(5):
        pool.review(waiting=6)
    assert pool.part._limit == 100
    pool.review(waiting=6)
    assert pool.part._limit == 90


def test_preemptions_cut_to_eight_tenths_and_not_again_before_the_excess_has_drained() -> None:
    pool = Pool(100)
    pool.review()
    pool.review(preempted=3)
    assert pool.part._limit == 80
    pool.review(preempted=3)
    pool.end(20)
    pool.review(preempted=3)  # Drained, but the engines are not quiet.
    assert pool.part._limit == 80
    assert pool.fill() == 80


@pytest.mark.parametrize(("quiet", "limit"), [(1, 40), (4, 40), (5, 64)])
def test_overload_soon_after_a_cut_halves(quiet: int, limit: int) -> None:
    pool = Pool(100)
    pool.review()
    pool.review(preempted=1)
    pool.end(20)
    for _ in range(quiet):
        pool.review(0.8)
    pool.review(0.8, preempted=1)
    assert pool.part._limit == limit  # 80 * .5, or 80 * .8 once it counts as recovered.


def test_one_always_may_run() -> None:
    pool = Pool(1)
    pool.review()
    pool.review(1.0, preempted=1)
    assert pool.limit() == 1
