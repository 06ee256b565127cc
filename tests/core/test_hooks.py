"""What parts may have beside their protocols, and what the controller does with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from heddle_core.commands import Dispatch, Migrate
from heddle_core.events import (
    EngineFailed,
    MigrationFinished,
    StepFinished,
    StepPreempted,
    Tick,
    ToolReturned,
    TrajectoryFinished,
)
from heddle_core.hooks import Hooks
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.parts.admission import PromptOnly
from heddle_core.parts.migration import Never
from heddle_core.parts.placement.load_and_pin import LeastLoaded, Sticky
from heddle_core.policy import EngineView, TrajectoryView, View
from tests.core.test_controller import E0, E1, PLAIN, A, B, C, Engines, Harness, dispatch


class Alternating(LeastLoaded):
    """The first step to e0, the next to e1, and so on."""

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        return (E0, E1)[t.step % 2]


@dataclass
class Carrying(Never):
    carries: bool = True
    seen: list[tuple[str, str]] = field(default_factory=list)

    def carries_kv(self, t: TrajectoryView, target: EngineView, view: View) -> bool:
        self.seen.append((t.id, target.id))
        return self.carries


def moving(migration: Never) -> Harness:
    two = Engines((E0, E1), slots=2)
    harness = Harness(
        replace(PLAIN, planner=two, placement=Alternating(), migration=migration), (A, 10)
    )
    harness.finish(A)
    harness.tool(A)
    return harness


def moved(*, ok: bool) -> MigrationFinished:
    return MigrationFinished(
        time_s=0.0, trajectory=A, source=E0, target=E1, ok=ok, kv_tokens=15 if ok else 0
    )


# -- carried KV ----------------------------------------------------------------------------------


def test_kv_goes_along_when_a_step_is_placed_elsewhere_and_the_step_waits_for_it():
    harness = moving(migration := Carrying())
    assert harness.back(A) == [Migrate(trajectory=A, source=E0, target=E1)]
    assert migration.seen == [("a", "e1")]
    assert harness.controller.ledger.trajectories[A].phase == "migrating"
    assert harness.handle(moved(ok=True)) == [dispatch(A, 1, E1)]


def test_a_lost_move_leaves_the_step_where_it_was():
    harness = moving(Carrying())
    harness.back(A)
    assert harness.handle(moved(ok=False)) == [dispatch(A, 1, E0)]


def test_where_it_is_not_carried_the_step_goes_there_without_its_kv():
    assert moving(Carrying(carries=False)).back(A) == [dispatch(A, 1, E1)]
    assert moving(Never()).back(A) == [dispatch(A, 1, E1)]


def test_a_step_that_stays_or_has_lost_its_engine_carries_nothing():
    stays = replace(PLAIN, placement=Sticky(), migration=(migration := Carrying()))
    harness = Harness(stays, (A, 10))
    harness.finish(A)
    harness.tool(A)
    assert harness.back(A) == [dispatch(A, 1)]
    harness = moving(migration)
    harness.handle(EngineFailed(time_s=0.0, engine=E0, reason="test"))
    assert harness.back(A) == [dispatch(A, 1, E1)]
    assert migration.seen == []


# -- KV in tools ---------------------------------------------------------------------------------


@dataclass
class KeptFor(PromptOnly):
    seconds: float
    keeps_kv: bool = True

    def keep_kv_s(self, t: TrajectoryView, tool: str, view: View) -> float:
        assert tool == "sh"
        return self.seconds


def keeping(seconds: float) -> Harness:
    """Room for one of two contexts: the second waits while the first one's KV is kept."""
    policy = replace(PLAIN, planner=Engines(slots=3), admission=KeptFor(seconds))
    harness = Harness(policy, (A, 300), (B, 300), (C, 300), kv=650)
    assert [len(answer) for answer in harness.answers] == [1, 1, 0]
    assert harness.finish(A) == []
    return harness


def test_kv_is_in_use_until_its_time_is_over():
    harness = keeping(4.0)
    assert harness.tool(A) == []
    assert harness.controller.deadline_s == 4.0
    harness.now_s = 4.0
    assert harness.handle(Tick(time_s=4.0)) == [dispatch(C)]
    assert harness.controller.deadline_s is None
    harness.finish(B)
    harness.back(A)
    assert not harness.controller.ledger.trajectories[A].kv_kept


def test_a_time_of_nothing_frees_it_when_the_tool_starts():
    harness = keeping(0.0)
    assert harness.tool(A) == [dispatch(C)]
    assert harness.controller.deadline_s is None


def test_a_tool_that_returns_in_time_ends_it():
    harness = keeping(4.0)
    harness.tool(A)
    harness.now_s = 3.0
    # Its context is compacted to 18 tokens: both fit now, and the other waits longer.
    assert harness.back(A) == [dispatch(C), dispatch(A, 1)]
    assert harness.controller.ledger.trajectories[A].kv_kept
    assert harness.controller.deadline_s is None


def test_without_a_limit_it_stays_until_the_tool_returns():
    harness = keeping(float("inf"))
    assert harness.tool(A) == []
    assert harness.controller.deadline_s is None


def test_kv_that_came_to_another_engine_too_late_is_not_kept_there():
    class ToE1(Never):
        def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId:
            return E1

    two = Engines((E0, E1), slots=2)
    for seconds, parked in ((1.0, 0), (9.0, 15)):
        policy = replace(PLAIN, planner=two, admission=KeptFor(seconds), migration=ToE1())
        harness = Harness(policy, (A, 10))
        harness.finish(A)
        harness.tool(A)
        for now_s in (1.0, 2.0):
            harness.handle(Tick(time_s=now_s))
        harness.handle(replaced_time(moved(ok=True), 2.0))
        assert harness.controller.ledger.engine(E1).parked_kv_tokens == parked


def replaced_time(event: MigrationFinished, time_s: float) -> MigrationFinished:
    return MigrationFinished(
        time_s=time_s,
        trajectory=event.trajectory,
        source=event.source,
        target=event.target,
        ok=event.ok,
        kv_tokens=event.kv_tokens,
    )


# -- chunks --------------------------------------------------------------------------------------


class Chunked(PromptOnly):
    chunk_tokens = 8


def test_a_dispatch_has_the_limit_of_a_chunk_and_the_rest_is_placed_anew():
    @dataclass
    class Next(LeastLoaded):
        at: int = -1

        def place(self, t: TrajectoryView, view: View) -> EngineId:
            self.at += 1
            return (E0, E1)[self.at % 2]

    policy = replace(PLAIN, planner=Engines((E0, E1)), placement=Next(), admission=Chunked())
    harness = Harness(policy, (A, 10))
    limited = Dispatch(trajectory=A, step=0, engine=E0, priority=0.0, max_tokens=8)
    assert harness.answers == [[limited]]
    ended = StepPreempted(time_s=0.0, trajectory=A, step=0, engine=E0, output_tokens=8)
    assert harness.handle(ended) == [
        Dispatch(trajectory=A, step=0, engine=E1, priority=0.0, max_tokens=8)
    ]
    assert harness.controller.ledger.trajectories[A].context_tokens == 18


# -- the backlog ---------------------------------------------------------------------------------


@dataclass
class OneAtATime(LeastLoaded):
    """Lets steps wait while any other is in flight."""

    review_s: float = 0.0
    reviews: list[int] = field(default_factory=list)

    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        return None if view.engines[0].in_flight else E0

    def release(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> list[tuple[TrajectoryId, EngineId]]:
        self.reviews.append(len(backlog))
        first = next(iter(backlog), None)
        return [(first, E0)] if first is not None and not view.engines[0].in_flight else []


def test_a_step_waits_in_the_pool_until_the_placement_releases_it():
    policy = replace(PLAIN, planner=Engines(slots=9), placement=OneAtATime())
    harness = Harness(policy, (A, 10), (B, 10), (C, 10))
    assert harness.answers == [[dispatch(A)], [], []]
    b = harness.controller.ledger.trajectories[B]
    assert (b.phase, b.home) == ("held", None)
    assert harness.finish(A) == [dispatch(B)]
    harness.tool(A)
    assert harness.back(A) == []
    assert harness.controller.ledger.trajectories[A].home is None
    assert harness.finish(B) == [dispatch(C)]
    assert harness.finish(C) == [dispatch(A, 1)]


def test_the_pool_outlives_its_engines_and_forgets_who_ends():
    policy = replace(PLAIN, planner=Engines(slots=9), placement=OneAtATime())
    harness = Harness(policy, (A, 10), (B, 10), (C, 10))
    harness.handle(TrajectoryFinished(time_s=0.0, trajectory=B, outcome="cancelled"))
    failed = EngineFailed(time_s=0.0, engine=E0, reason="test", salvaged=((A, 0),))
    assert len(harness.handle(failed)) == 1
    assert list(harness.controller._queues.backlog) == [C]


def test_reviews_come_at_their_interval_while_there_are_trajectories():
    policy = replace(PLAIN, planner=Engines(slots=9), placement=OneAtATime(review_s=5.0))
    harness = Harness(policy, (A, 10), (B, 10))
    placement = policy.placement
    assert isinstance(placement, OneAtATime)
    assert harness.controller.deadline_s == 5.0
    placement.reviews.clear()
    harness.now_s = 5.0
    harness.handle(Tick(time_s=5.0))
    assert placement.reviews == [1]
    assert harness.controller.deadline_s == 10.0
    for name in (A, B):
        harness.handle(TrajectoryFinished(time_s=6.0, trajectory=name, outcome="completed"))
    harness.handle(Tick(time_s=10.0))
    assert harness.controller.deadline_s is None


# -- observers -----------------------------------------------------------------------------------


def test_any_part_may_observe_what_the_predictor_observes_once_for_each_event():
    @dataclass
    class Curious(Sticky):
        seen: list[str] = field(default_factory=list)

        def __post_init__(self) -> None:
            super().__init__()

        def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
            self.seen.append(f"step {t.id} {event.output_tokens}")

        def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
            self.seen.append(f"tool {event.tool} {t.output_tokens}")

        def observe_finish(self, t: TrajectoryView) -> None:
            self.seen.append(f"end {t.output_tokens}")

    placement = Curious()
    harness = Harness(replace(PLAIN, placement=placement), (A, 10))
    harness.finish(A)
    harness.tool(A)
    harness.back(A)
    harness.handle(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="completed"))
    assert placement.seen == ["step a 5", "tool sh 5", "end 5"]


def test_parts_of_the_plain_kind_have_no_hooks_but_the_predictors():
    hooks = Hooks.of(PLAIN)
    assert (hooks.carries_kv, hooks.keep_kv_s, hooks.chunk_tokens, hooks.release) == (None,) * 4
    assert hooks.review_s == 0.0
    assert [len(o) for o in (hooks.observe_step, hooks.observe_tool, hooks.observe_finish)] == [
        1,
        1,
        1,
    ]


def test_a_release_to_an_engine_that_takes_no_work_is_refused():
    class Wrong(OneAtATime):
        def release(
            self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
        ) -> list[tuple[TrajectoryId, EngineId]]:
            return [(next(iter(backlog)), E1)] if view.engine(E1).in_flight == 0 else []

    policy = replace(PLAIN, planner=Engines((E0, E1), slots=9), placement=Wrong())
    harness = Harness(policy, (A, 10))
    harness.handle(EngineFailed(time_s=0.0, engine=E1, reason="test"))
    harness.controller._queues.backlog[A] = harness.controller.ledger.trajectories[A]
    with pytest.raises(AssertionError, match="takes no work"):
        harness.finish(A)
