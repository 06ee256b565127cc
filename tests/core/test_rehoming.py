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
from heddle_core.parts.admission.prompt_only import PromptOnly
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
    Known,
    LongestPreempts,
    ToE1,
    Told,
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


def home(told: Told, name: TrajectoryId = A) -> EngineId | None:
    return told.controller.ledger.trajectories[name].home


def in_tool(policy=TWO, **fields) -> Told:
    """A's first step has ended at e0 and its tool runs; the move to e1 was asked for."""
    told = Told(policy, (A, 10), **fields)
    told.finish(A)
    assert told.tool(A) == [Migrate(trajectory=A, source=E0, target=E1)]
    return told


# -- plans of another shape ------------------------------------------------------------------------


def second_rollout() -> Told:
    """A runs at e0, b at e1, c waits at one of them; then e1 must give way."""
    told = Told(replace(PLAIN, planner=Shrinking()), (A, 10), (B, 10), (C, 10), later=2)
    assert told.answers == [[dispatch(A)], [dispatch(B, engine=E1)], []]
    return told


def test_waiting_trajectories_of_a_stopping_engine_wait_at_another():
    told = second_rollout()
    told.finish(A)  # c, which waited at e0, runs there
    told.arrive(TrajectoryId("d"))
    told.arrive(TrajectoryId("e"))
    queued = [t.id for t in told.controller.ledger.engine(E1).waiting()]
    assert queued
    assert told.tell(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=1)) == [
        StopEngine(engine=E1, drain=True),
        Preempt(trajectory=B, step=0, engine=E1),
    ]
    assert [home(told, name) for name in queued] == [E0] * len(queued)


def test_a_step_preempted_on_an_engine_that_drains_goes_elsewhere():
    told = second_rollout()
    told.tell(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=1))
    told.finish(A)  # c takes e0
    aborted = StepPreempted(time_s=0.0, trajectory=B, step=0, engine=E1, output_tokens=4)
    assert told.tell(aborted) == []
    assert home(told, B) == E0
    told.tell(EngineStopped(time_s=0.0, engine=E1))
    assert told.finish(C) == [dispatch(B)]


def test_a_home_that_drained_away_is_left_on_return():
    told = second_rollout()
    told.tell(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=1))
    told.finish(B, engine=E1)
    told.tool(B)
    assert told.tell(EngineStopped(time_s=0.0, engine=E1)) == [
        StartEngine(engine=EngineId("e1+1"), shape=EngineShape("h100", 2), max_running=1)
    ]
    assert home(told, B) is None
    told.back(B)
    assert home(told, B) == E0


def test_an_engine_that_no_plan_needs_any_more_takes_no_work_when_it_is_ready():
    told = Told(replace(PLAIN, planner=Shrinking()), (A, 10), (B, 10))
    assert told.tell(failed(E1, (B, 0))) == [restart("e1+1")]
    told.tell(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=1))
    answer = told.ready(EngineId("e1+1"))
    assert answer == [StopEngine(engine=EngineId("e1+1"), drain=True)]
    assert not told.controller.ledger.engine(EngineId("e1+1")).accepting


# -- moves and engines that come and go ------------------------------------------------------------


def test_no_move_to_an_engine_that_takes_no_work():
    told = Told(TWO, (A, 10))
    told.finish(A)
    told.controller.ledger.close_engine(told.controller.ledger.engine(E1))
    assert told.tool(A) == []


def test_no_move_to_an_engine_that_cannot_hold_the_context():
    told = Told(replace(TWO, planner=Engines((E0,))), (A, 10))
    told.tell(
        EngineReady(
            time_s=0.0,
            engine=E1,
            shape=EngineShape("h100", 1),
            kv_capacity_tokens=15,
            max_running=1,
        )
    )
    told.finish(A)  # 10 + 5 tokens
    assert told.tool(A) == []
    assert told.back(A) == [dispatch(A, step=1)]


def test_a_move_whose_source_died_ends_at_its_target_without_kv():
    told = in_tool()
    told.tell(failed(E0))
    assert home(told) is None
    told.tell(moved(ok=False))
    assert home(told) == E1
    assert told.back(A) == [dispatch(A, step=1, engine=E1)]


def test_a_move_whose_target_died_stays():
    told = in_tool()
    told.tell(failed(E1))
    told.tell(moved(ok=False))
    assert home(told) == E0


def test_a_late_move_between_two_dead_engines_is_placed_anew_or_held():
    told = in_tool()
    told.back(A)
    told.tell(failed(E1))
    told.tell(failed(E0))
    assert told.tell(moved(ok=False)) == []
    assert told.controller.ledger.trajectories[A].phase == "held"
    assert told.ready(EngineId("e0+1")) == [dispatch(A, step=1, engine=EngineId("e0+1"))]


def test_a_trajectory_that_ends_while_it_moves_leaves_nothing_behind():
    told = in_tool()
    told.tell(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="failed"))
    assert told.tell(moved()) == []
    assert [e.sessions for e in told.controller.ledger.engines] == [0, 0]


# -- KV that is kept ------------------------------------------------------------------------------


def parked(told: Told) -> list[int]:
    return [e.parked_kv_tokens for e in told.controller.ledger.engines]


KEEPING = replace(TWO, admission=KeepsKv())


def test_kept_kv_moves_with_its_trajectory():
    told = in_tool(KEEPING)
    assert parked(told) == [15, 0]
    told.tell(moved())
    assert parked(told) == [0, 15]
    told.back(A)
    assert parked(told) == [0, 0]


def test_kv_that_arrives_late_is_not_kept_but_used():
    told = in_tool(KEEPING)
    told.back(A)
    assert parked(told) == [0, 0]
    assert told.tell(moved()) == [dispatch(A, step=1, engine=E1)]
    assert parked(told) == [0, 0]


def test_kv_given_back_by_a_tool_that_returned_before_its_move_lets_others_run():
    two_slots = replace(KEEPING, planner=Engines((E0, E1), slots=2), migration=OnlyA())
    told = Told(two_slots, (A, 50), (B, 900), kv=1_000, later=2)
    told.controller.ledger.engine(E1)
    told.finish(A)
    assert told.tool(A) == [Migrate(trajectory=A, source=E0, target=E1)]
    told.arrive(C, 30)  # e0: the fewest in flight; runs beside the 55 tokens kept
    late = TrajectoryId("late")
    assert told.arrive(late, 920) == []
    assert home(told, late) == E0
    # 30 of c, 55 kept and 920 do not fit into 1,000; without the 55 they do.
    assert told.back(A) == [dispatch(late)]


class OnlyA(ToE1):
    def target(self, t, remaining_tokens, view):
        return E1 if t.id == A else None


# -- estimates ------------------------------------------------------------------------------------


def served(*arrivals: TrajectoryId, slots: int = 2, **tokens: float) -> Told:
    known = Known({TrajectoryId(n): v for n, v in tokens.items()}, served=True)
    policy = replace(PLAIN, planner=Engines(slots=slots), predictor=known)
    return Told(replace(policy, scheduler=LongestPreempts()), *((name, 10) for name in arrivals))


def remaining(told: Told, name: TrajectoryId = A) -> float:
    return told.controller.ledger.trajectories[name].remaining_tokens


def test_an_answer_that_is_late_by_a_step_is_lowered_by_that_step():
    told = served(A, a=100.0)
    told.finish(A)
    assert told.tool(A) == [Predict(trajectory=A, step=0, estimate=100.0)]
    told.back(A)
    told.finish(A, step=1)  # 5 tokens more
    told.tell(Predicted(time_s=0.0, trajectory=A, step=0, remaining_tokens=60.0))
    assert remaining(told) == 55.0


def test_an_answer_in_time_is_taken_as_it_is():
    told = served(A, a=100.0)
    told.finish(A)
    told.tool(A)
    told.tell(Predicted(time_s=0.0, trajectory=A, step=0, remaining_tokens=60.0))
    assert remaining(told) == 60.0


def test_a_preempted_step_has_less_left():
    told = served(A, B, slots=1, a=10.0, b=99.0)
    stopped = StepPreempted(time_s=0.0, trajectory=A, step=0, engine=E0, output_tokens=4)
    assert told.tell(stopped) == [dispatch(B, priority=99.0)]
    assert remaining(told) == 6.0
    assert told.controller.ledger.trajectories[A].priority == 6.0


def test_salvaged_tokens_are_no_longer_ahead():
    told = served(A, a=10.0)
    told.tell(failed(E0, (A, 3)))
    assert remaining(told) == 7.0


def test_an_answer_for_an_ended_trajectory_changes_nothing():
    told = served(A, a=10.0)
    told.finish(A)
    told.tool(A)
    told.tell(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="completed"))
    assert told.tell(Predicted(time_s=0.0, trajectory=A, step=0, remaining_tokens=9.0)) == []


# -- giving up ------------------------------------------------------------------------------------


def test_a_trajectory_is_given_up_once_however_often_it_could_be_placed():
    told = Told(PLAIN, (A, 1_000), (B, 10), kv=1_000)
    assert [isinstance(c, Cancel) for c in told.answers[0]] == [True]
    answers = [*told.tell(failed(E0, (B, 2))), *told.ready(EngineId("e0+1"))]
    assert answers == [restart("e0+1"), dispatch(B, engine=EngineId("e0+1"))]
    assert told.controller.ledger.trajectories[A].phase == "cancelling"
    told.tell(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="cancelled"))


def test_a_home_too_small_for_a_grown_context_gives_way_to_the_largest():
    told = Told(replace(PLAIN, planner=Engines((E0,))), (A, 10), kv=17)
    told.finish(A)
    told.tool(A)
    told.tell(
        EngineReady(
            time_s=0.0,
            engine=E1,
            shape=EngineShape("h100", 1),
            kv_capacity_tokens=99,
            max_running=1,
        )
    )
    assert told.back(A) == [dispatch(A, step=1, engine=E1)]  # 18 tokens


@pytest.mark.parametrize("announced", [None, 2])
def test_a_trajectory_without_a_planned_home_is_placed(announced):
    @dataclass
    class ForA(Engines):
        needs_all: bool = True

        def plan(self, ts: Sequence[TrajectoryView], remaining: Sequence[float]) -> ResourcePlan:
            plan = super().plan(ts, remaining)
            return msgspec.structs.replace(plan, homes=((E1, (A,)), (E0, (TrajectoryId("ghost"),))))

    told = Told(replace(PLAIN, planner=ForA((E0, E1))))
    told.tell(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=announced))
    out = [*told.arrive(A), *told.arrive(B)]
    assert sorted(c.trajectory for c in out if isinstance(c, Dispatch)) == [A, B]
    assert (home(told, A), home(told, B)) == (E1, E0)
