"""Scenarios of homes that change: drains, late moves, late predictions, and KV that is kept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest

from heddle_core.commands import (
    Cancel,
    Dispatch,
    Migrate,
    Predict,
    Preempt,
    StartEngine,
    StopEngine,
)
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    EngineStopped,
    MigrationFinished,
    Predicted,
    RolloutStarted,
    StepPreempted,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, EngineShape, RolloutId, TrajectoryId
from heddle_core.parts.admission import PromptOnly
from heddle_core.plans import EngineSpec, ResourcePlan
from heddle_core.policy import TrajectoryView
from tests.core.test_controller import (
    E0,
    E1,
    PLAIN,
    A,
    B,
    C,
    Engines,
    Harness,
    Known,
    LongestPreempts,
    ToE1,
    dispatch,
)


class KeepsKv(PromptOnly):
    keeps_kv = True


@dataclass
class Shrinking(Engines):
    """e0 and e1 of TP 1 first; from the second rollout on, e1 gives way to one of TP 2."""

    rollouts: int = 0

    def plan(self, ts: Sequence[TrajectoryView], remaining: Sequence[float]) -> ResourcePlan:
        self.rollouts += 1
        tps = (1, 1) if self.rollouts == 1 else (1, 2)
        specs = [
            EngineSpec(engine=EngineId(f"e{i}"), shape=EngineShape("h100", tp), max_running=1)
            for i, tp in enumerate(tps)
        ]
        return ResourcePlan(engines=tuple(specs))


TWO = replace(PLAIN, planner=Engines((E0, E1)), migration=ToE1())


def moved(ok: bool = True) -> MigrationFinished:
    kv_tokens = 15 if ok else 0
    return MigrationFinished(
        time_s=0.0, trajectory=A, source=E0, target=E1, ok=ok, kv_tokens=kv_tokens
    )


def failed(engine: EngineId, *salvaged: tuple[TrajectoryId, int]) -> EngineFailed:
    return EngineFailed(time_s=0.0, engine=engine, reason="x", salvaged=salvaged)


def restart(engine: str) -> StartEngine:
    return StartEngine(engine=EngineId(engine), shape=EngineShape("h100", 1), max_running=1)


def home(harness: Harness, name: TrajectoryId = A) -> EngineId | None:
    return harness.controller.ledger.trajectories[name].home


def in_tool(policy=TWO, **fields) -> Harness:
    """A's first step has ended at e0 and its tool runs; the move to e1 was requested."""
    harness = Harness(policy, (A, 10), **fields)
    harness.finish(A)
    assert harness.tool(A) == [Migrate(trajectory=A, source=E0, target=E1)]
    return harness


# -- plans of another shape ------------------------------------------------------------------------


def second_rollout() -> Harness:
    """A runs at e0, b at e1, c waits at one of them; then e1 must give way."""
    harness = Harness(replace(PLAIN, planner=Shrinking()), (A, 10), (B, 10), (C, 10), later=2)
    assert harness.answers == [[dispatch(A)], [dispatch(B, engine=E1)], []]
    return harness


def test_waiting_trajectories_of_a_stopping_engine_wait_at_another():
    harness = second_rollout()
    harness.finish(A)  # c, which waited at e0, runs there
    harness.arrive(TrajectoryId("d"))
    harness.arrive(TrajectoryId("e"))
    queued = [t.id for t in harness.controller.ledger.engine(E1).waiting()]
    assert queued
    assert harness.handle(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=1)) == [
        StopEngine(engine=E1, drain=True),
        Preempt(trajectory=B, step=0, engine=E1),
    ]
    assert [home(harness, name) for name in queued] == [E0] * len(queued)


def test_a_step_preempted_on_an_engine_that_drains_goes_elsewhere():
    harness = second_rollout()
    harness.handle(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=1))
    harness.finish(A)  # c takes e0
    aborted = StepPreempted(time_s=0.0, trajectory=B, step=0, engine=E1, output_tokens=4)
    assert harness.handle(aborted) == []
    assert home(harness, B) == E0
    harness.handle(EngineStopped(time_s=0.0, engine=E1))
    assert harness.finish(C) == [dispatch(B)]


def test_a_home_that_drained_away_is_left_on_return():
    harness = second_rollout()
    harness.handle(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=1))
    harness.finish(B, engine=E1)
    harness.tool(B)
    assert harness.handle(EngineStopped(time_s=0.0, engine=E1)) == [
        StartEngine(engine=EngineId("e1+1"), shape=EngineShape("h100", 2), max_running=1)
    ]
    assert home(harness, B) is None
    harness.back(B)
    assert home(harness, B) == E0


def test_an_engine_that_no_plan_needs_any_more_takes_no_work_when_it_is_ready():
    harness = Harness(replace(PLAIN, planner=Shrinking()), (A, 10), (B, 10))
    assert harness.handle(failed(E1, (B, 0))) == [restart("e1+1")]
    harness.handle(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=1))
    answer = harness.ready(EngineId("e1+1"))
    assert answer == [StopEngine(engine=EngineId("e1+1"), drain=True)]
    assert not harness.controller.ledger.engine(EngineId("e1+1")).accepting


# -- moves and engines that come and go ------------------------------------------------------------


def test_no_move_to_an_engine_that_takes_no_work():
    harness = Harness(TWO, (A, 10))
    harness.finish(A)
    harness.controller.ledger.close_engine(harness.controller.ledger.engine(E1))
    assert harness.tool(A) == []


def test_no_move_to_an_engine_that_cannot_hold_the_context():
    harness = Harness(replace(TWO, planner=Engines((E0,))), (A, 10))
    harness.handle(
        EngineReady(
            time_s=0.0,
            engine=E1,
            shape=EngineShape("h100", 1),
            kv_capacity_tokens=15,
            max_running=1,
        )
    )
    harness.finish(A)  # 10 + 5 tokens
    assert harness.tool(A) == []
    assert harness.back(A) == [dispatch(A, step=1)]


def test_a_move_whose_source_died_ends_at_its_target_without_kv():
    harness = in_tool()
    harness.handle(failed(E0))
    assert home(harness) is None
    harness.handle(moved(ok=False))
    assert home(harness) == E1
    assert harness.back(A) == [dispatch(A, step=1, engine=E1)]


def test_a_move_whose_target_died_stays():
    harness = in_tool()
    harness.handle(failed(E1))
    harness.handle(moved(ok=False))
    assert home(harness) == E0


def test_a_late_move_between_two_dead_engines_is_placed_anew_or_held():
    harness = in_tool()
    harness.back(A)
    harness.handle(failed(E1))
    harness.handle(failed(E0))
    assert harness.handle(moved(ok=False)) == []
    assert harness.controller.ledger.trajectories[A].phase == "held"
    assert harness.ready(EngineId("e0+1")) == [dispatch(A, step=1, engine=EngineId("e0+1"))]


def test_a_trajectory_that_ends_while_it_moves_leaves_nothing_behind():
    harness = in_tool()
    harness.handle(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="failed"))
    assert harness.handle(moved()) == []
    assert [e.sessions for e in harness.controller.ledger.engines] == [0, 0]


# -- KV that is kept ------------------------------------------------------------------------------


def parked(harness: Harness) -> list[int]:
    return [e.parked_kv_tokens for e in harness.controller.ledger.engines]


KEEPING = replace(TWO, admission=KeepsKv())


def test_kept_kv_moves_with_its_trajectory():
    harness = in_tool(KEEPING)
    assert parked(harness) == [15, 0]
    harness.handle(moved())
    assert parked(harness) == [0, 15]
    harness.back(A)
    assert parked(harness) == [0, 0]


def test_kv_that_arrives_late_is_not_kept_but_used():
    harness = in_tool(KEEPING)
    harness.back(A)
    assert parked(harness) == [0, 0]
    assert harness.handle(moved()) == [dispatch(A, step=1, engine=E1)]
    assert parked(harness) == [0, 0]


def test_kv_given_back_by_a_tool_that_returned_before_its_move_lets_others_run():
    two_slots = replace(KEEPING, planner=Engines((E0, E1), slots=2), migration=OnlyA())
    harness = Harness(two_slots, (A, 50), (B, 900), kv=1_000, later=2)
    harness.controller.ledger.engine(E1)
    harness.finish(A)
    assert harness.tool(A) == [Migrate(trajectory=A, source=E0, target=E1)]
    harness.arrive(C, 30)  # e0: the fewest in flight; runs beside the 55 tokens kept
    late = TrajectoryId("late")
    assert harness.arrive(late, 920) == []
    assert home(harness, late) == E0
    # 30 of c, 55 kept and 920 do not fit into 1,000; without the 55 they do.
    assert harness.back(A) == [dispatch(late)]


class OnlyA(ToE1):
    def target(self, t, remaining_tokens, view):
        return E1 if t.id == A else None


# -- estimates ------------------------------------------------------------------------------------


def served(*arrivals: TrajectoryId, slots: int = 2, **tokens: float) -> Harness:
    known = Known({TrajectoryId(n): v for n, v in tokens.items()}, served=True)
    policy = replace(PLAIN, planner=Engines(slots=slots), predictor=known)
    return Harness(replace(policy, scheduler=LongestPreempts()), *((name, 10) for name in arrivals))


def remaining(harness: Harness, name: TrajectoryId = A) -> float:
    return harness.controller.ledger.trajectories[name].remaining_tokens


def test_an_answer_that_is_late_by_a_step_is_lowered_by_that_step():
    harness = served(A, a=100.0)
    harness.finish(A)
    assert harness.tool(A) == [Predict(trajectory=A, step=0, estimate=100.0)]
    harness.back(A)
    harness.finish(A, step=1)  # 5 tokens more
    harness.handle(Predicted(time_s=0.0, trajectory=A, step=0, remaining_tokens=60.0))
    assert remaining(harness) == 55.0


def test_an_answer_in_time_is_taken_as_it_is():
    harness = served(A, a=100.0)
    harness.finish(A)
    harness.tool(A)
    harness.handle(Predicted(time_s=0.0, trajectory=A, step=0, remaining_tokens=60.0))
    assert remaining(harness) == 60.0


def test_a_preempted_step_has_less_left():
    harness = served(A, B, slots=1, a=10.0, b=99.0)
    stopped = StepPreempted(time_s=0.0, trajectory=A, step=0, engine=E0, output_tokens=4)
    assert harness.handle(stopped) == [dispatch(B, priority=99.0)]
    assert remaining(harness) == 6.0
    assert harness.controller.ledger.trajectories[A].priority == 6.0


def test_salvaged_tokens_are_no_longer_ahead():
    harness = served(A, a=10.0)
    harness.handle(failed(E0, (A, 3)))
    assert remaining(harness) == 7.0


def test_an_answer_for_an_ended_trajectory_changes_nothing():
    harness = served(A, a=10.0)
    harness.finish(A)
    harness.tool(A)
    harness.handle(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="completed"))
    assert harness.handle(Predicted(time_s=0.0, trajectory=A, step=0, remaining_tokens=9.0)) == []


# -- giving up ------------------------------------------------------------------------------------


def test_a_trajectory_is_given_up_once_however_often_it_could_be_placed():
    harness = Harness(PLAIN, (A, 1_000), (B, 10), kv=1_000)
    assert [isinstance(c, Cancel) for c in harness.answers[0]] == [True]
    answers = [*harness.handle(failed(E0, (B, 2))), *harness.ready(EngineId("e0+1"))]
    assert answers == [restart("e0+1"), dispatch(B, engine=EngineId("e0+1"))]
    assert harness.controller.ledger.trajectories[A].phase == "cancelling"
    harness.handle(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="cancelled"))


def test_a_home_too_small_for_a_grown_context_gives_way_to_the_largest():
    harness = Harness(replace(PLAIN, planner=Engines((E0,))), (A, 10), kv=17)
    harness.finish(A)
    harness.tool(A)
    harness.handle(
        EngineReady(
            time_s=0.0,
            engine=E1,
            shape=EngineShape("h100", 1),
            kv_capacity_tokens=99,
            max_running=1,
        )
    )
    assert harness.back(A) == [dispatch(A, step=1, engine=E1)]  # 18 tokens


@pytest.mark.parametrize("announced", [None, 2])
def test_a_trajectory_without_a_planned_home_is_placed(announced):
    @dataclass
    class ForA(Engines):
        needs_all: bool = True

        def plan(self, ts: Sequence[TrajectoryView], remaining: Sequence[float]) -> ResourcePlan:
            plan = super().plan(ts, remaining)
            return msgspec.structs.replace(plan, homes=((E1, (A,)), (E0, (TrajectoryId("ghost"),))))

    harness = Harness(replace(PLAIN, planner=ForA((E0, E1))))
    harness.handle(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=announced))
    out = [*harness.arrive(A), *harness.arrive(B)]
    assert sorted(c.trajectory for c in out if isinstance(c, Dispatch)) == [A, B]
    assert (home(harness, A), home(harness, B)) == (E1, E0)
