"""Engines that change while a rollout runs: calls of the part, stops, moves and failures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest

from heddle_core.commands import Dispatch, Migrate, Preempt, SolvePlan, StartEngine, StopEngine
from heddle_core.events import (
    EngineFailed,
    EngineJoined,
    EngineRecalled,
    EngineStopped,
    PlanSolved,
    RolloutStarted,
    StepFinished,
    StepPreempted,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, EngineShape, RolloutId, TrajectoryId
from heddle_core.plans import EngineSpec, ResourcePlan, RestartLimit
from heddle_core.policy import View
from tests.core.contrary import Problem
from tests.core.test_controller import E0, E1, PLAIN, A, B, C, Engines, Harness, dispatch

E2, E3, WIDE = EngineId("e2"), EngineId("e3"), EngineId("e2+1")
J = EngineId("j0")
D = TrajectoryId("d")


@dataclass
class Merge:
    """Engines e2 and e3 become one of TP 2; `homes` move. Asked until it has answered once."""

    homes: tuple[tuple[EngineId, tuple[TrajectoryId, ...]], ...] = ()
    asked: int = 0

    def consolidate(self, view: View) -> Problem | None:
        self.asked += 1
        return Problem(found=merged(self.homes)) if self.asked == 1 else None


def spec(engine: EngineId, tp: int = 1) -> EngineSpec:
    return EngineSpec(engine=engine, shape=EngineShape("h100", tp), max_running=1)


def merged(homes: Sequence[tuple[EngineId, tuple[TrajectoryId, ...]]] = ()) -> ResourcePlan:
    return ResourcePlan(engines=(spec(E0), spec(E1), spec(E2, 2)), homes=tuple(homes))


def at_work(part: Merge, *names: TrajectoryId) -> Harness:
    """One trajectory runs on each engine; the last of them ends."""
    policy = replace(PLAIN, planner=Engines((E0, E1, E2, E3)), consolidation=part)
    return Harness(policy, *((name, 10) for name in names))


def end(harness: Harness, name: TrajectoryId, engine: EngineId) -> list:
    harness.finish(name, engine=engine)
    return harness.handle(TrajectoryFinished(time_s=0.0, trajectory=name, outcome="completed"))


def solved(
    harness: Harness, homes: Sequence[tuple[EngineId, tuple[TrajectoryId, ...]]] = ()
) -> list:
    return harness.handle(PlanSolved(time_s=0.0, plan=1, resource_plan=merged(homes)))


def stopped(harness: Harness, engine: EngineId) -> list:
    return harness.handle(EngineStopped(time_s=0.0, engine=engine))


def preempted(harness: Harness, name: TrajectoryId, engine: EngineId, tokens: int = 4) -> list:
    return harness.handle(
        StepPreempted(time_s=0.0, trajectory=name, step=0, engine=engine, output_tokens=tokens)
    )


def start_wide() -> StartEngine:
    return StartEngine(engine=WIDE, shape=EngineShape("h100", 2), max_running=1)


def test_the_part_is_called_when_a_trajectory_has_ended_and_not_during_its_search():
    part = Merge()
    harness = at_work(part, A, B, C)
    assert part.asked == 0
    assert [type(c) for c in end(harness, C, E2)] == [SolvePlan]
    end(harness, B, E1)
    assert part.asked == 1


def test_it_is_not_called_before_all_have_arrived():
    part = Merge()
    policy = replace(PLAIN, planner=Engines((E0, E1, E2, E3)), consolidation=part)
    harness = Harness(policy)
    for command in harness.handle(
        RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=3)
    ):
        harness.ready(command.engine)
    harness.arrive(A)
    harness.arrive(B)
    end(harness, A, E0)
    assert part.asked == 0
    harness.arrive(C)
    end(harness, B, E1)
    assert part.asked == 1


def join(harness: Harness, name: EngineId) -> None:
    harness.handle(
        EngineJoined(time_s=0.0, engine=name, shape=EngineShape("h100", 1), max_running=1)
    )
    harness.ready(name)


def test_it_is_not_called_while_an_engine_of_others_is_there():
    part = Merge()
    harness = at_work(part, A, B, C, D)
    join(harness, J)
    end(harness, C, E2)
    assert part.asked == 0, "its plan would have J, on a GPU that is not there"
    harness.handle(EngineRecalled(time_s=0.0, engine=J, drain=True))
    end(harness, B, E1)
    assert part.asked == 0, "J has not stopped"
    stopped(harness, J)
    assert [type(c) for c in end(harness, D, E3)] == [SolvePlan]


def test_its_plan_is_dropped_where_an_engine_of_others_has_joined_since():
    harness = at_work(Merge(), A, B, C)
    end(harness, C, E2)
    join(harness, J)
    assert solved(harness) == []


def test_idle_engines_stop_and_their_gpus_become_a_wide_one():
    harness = at_work(Merge(), A, B, C)
    end(harness, C, E2)
    assert solved(harness) == [StopEngine(engine=E2, drain=True), StopEngine(engine=E3, drain=True)]
    assert stopped(harness, E3) == [], "e2 still has its GPU"
    assert stopped(harness, E2) == [start_wide()]


def test_steps_on_a_stopping_engine_are_preempted_and_keep_their_tokens():
    harness = at_work(Merge(), A, B, C, D)
    end(harness, B, E1)
    assert solved(harness) == [
        StopEngine(engine=E2, drain=True),
        StopEngine(engine=E3, drain=True),
        Preempt(trajectory=C, step=0, engine=E2),
        Preempt(trajectory=D, step=0, engine=E3),
    ]
    assert preempted(harness, C, E2) == [dispatch(C, engine=E1)]
    assert harness.controller.ledger.trajectories[C].output_tokens == 4


def test_a_straggler_moves_to_the_wide_engine_once_it_is_ready():
    homes = ((E2, (A,)),)
    harness = at_work(Merge(homes), A, B, C)
    end(harness, C, E2)
    assert [type(c) for c in solved(harness, homes)] == [StopEngine, StopEngine]
    stopped(harness, E2)
    stopped(harness, E3)
    assert harness.ready(WIDE) == [Preempt(trajectory=A, step=0, engine=E0)]
    assert preempted(harness, A, E0) == [dispatch(A, engine=WIDE)]


def test_a_straggler_in_a_tool_moves_on_return_and_one_that_begins_a_tool_migrates():
    homes = ((E2, (A, B)),)
    harness = at_work(Merge(homes), A, B, C)
    end(harness, C, E2)
    harness.finish(A)
    harness.tool(A)
    solved(harness, homes)
    stopped(harness, E2)
    stopped(harness, E3)
    assert harness.ready(WIDE, slots=2) == [Preempt(trajectory=B, step=0, engine=E1)]
    assert harness.back(A) == [dispatch(A, step=1, engine=WIDE)]
    assert harness.finish(B, engine=E1) == [], "its step won the race"
    assert harness.tool(B) == [Migrate(trajectory=B, source=E1, target=WIDE)]


def test_a_planned_home_holds_against_migration():
    homes = ((E1, (A,)),)
    harness = at_work(Merge(homes), A, C, B)  # e1 will be free
    end(harness, C, E1)
    harness.finish(A)
    solved(harness, homes)
    assert harness.tool(A) == [Migrate(trajectory=A, source=E0, target=E1)]


def test_waiting_trajectories_move_at_once():
    homes = ((E1, (C,)),)
    policy = replace(PLAIN, planner=Engines((E0, E1)), consolidation=Merge(homes))
    harness = Harness(policy, (A, 10), (B, 10), (C, 10))
    assert harness.controller.ledger.trajectories[C].home == E0
    end(harness, B, E1)
    plan = ResourcePlan(engines=(spec(E0), spec(E1)), homes=homes)
    assert harness.handle(PlanSolved(time_s=0.0, plan=1, resource_plan=plan)) == [
        dispatch(C, engine=E1)
    ]


def test_where_all_engines_stop_steps_are_preempted_and_wait_for_the_new_one():
    harness = at_work(Merge(), A, B, C, D)
    end(harness, D, E3)
    everything = ResourcePlan(engines=(spec(EngineId("w"), 4),))
    commands = harness.handle(PlanSolved(time_s=0.0, plan=1, resource_plan=everything))
    assert [c.trajectory for c in commands if isinstance(c, Preempt)] == [A, B, C]
    for name, engine in ((A, E0), (B, E1), (C, E2)):
        assert not [c for c in preempted(harness, name, engine) if isinstance(c, Dispatch)]
    started = [c for e in (E0, E1, E2, E3) for c in stopped(harness, e)]
    [start] = [c for c in started if isinstance(c, StartEngine)]
    assert start.shape == EngineShape("h100", 4)
    commands = harness.ready(start.engine)
    assert [c.trajectory for c in commands if isinstance(c, Dispatch)] == [A]


def test_several_leave_one_engine_one_after_the_other():
    homes = ((E1, (A, B)),)
    policy = replace(PLAIN, planner=Engines((E0, E1), slots=2), consolidation=Merge(homes))
    harness = Harness(policy, (A, 10), (C, 10), (B, 10), (D, 10))
    ledger = harness.controller.ledger
    assert [ledger.trajectories[t].home for t in (A, C, B, D)] == [E0, E1, E0, E1]
    end(harness, C, E1)
    plan = ResourcePlan(
        engines=tuple(msgspec.structs.replace(spec(e), max_running=2) for e in (E0, E1)),
        homes=homes,
    )
    assert harness.handle(PlanSolved(time_s=0.0, plan=1, resource_plan=plan)) == [
        Preempt(trajectory=A, step=0, engine=E0)
    ]
    assert preempted(harness, A, E0) == [
        dispatch(A, engine=E1),
        Preempt(trajectory=B, step=0, engine=E0),
    ]
    assert preempted(harness, B, E0) == []
    assert ledger.trajectories[B].home == E1


@pytest.mark.parametrize("which", [E0, E2])
def test_a_solution_for_engines_that_are_no_longer_there_is_dropped(which):
    harness = at_work(Merge(), A, B, C)
    end(harness, C, E2)
    harness.handle(EngineFailed(time_s=0.0, engine=which, reason="x"))
    assert solved(harness) == []


def test_a_solution_of_the_last_rollout_is_dropped():
    harness = at_work(Merge(), A, B, C)
    end(harness, C, E2)
    harness.handle(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=0))
    assert solved(harness) == []


def test_a_new_engine_that_fails_is_started_again_and_all_trajectories_go_on_meanwhile():
    homes = ((E2, (A,)),)
    harness = at_work(Merge(homes), A, B, C)
    end(harness, C, E2)
    solved(harness, homes)
    stopped(harness, E2)
    stopped(harness, E3)
    again = EngineId("e2+2")
    assert harness.handle(EngineFailed(time_s=0.0, engine=WIDE, reason="x")) == [
        msgspec.structs.replace(start_wide(), engine=again)
    ]
    assert harness.controller.ledger.trajectories[A].phase == "running"
    harness.ready(again)
    harness.finish(A)
    harness.tool(A)
    assert isinstance(harness.back(A)[0], Dispatch)


def test_where_no_wide_engine_starts_the_narrow_ones_come_back_and_stay():
    part = Merge()
    harness = at_work(part, A, B, C, D)
    end(harness, B, E1)
    solved(harness)
    for name, engine in ((C, E2), (D, E3)):
        preempted(harness, name, engine)
        stopped(harness, engine)
    commands: list = []
    for life in range(1, RestartLimit().restarts + 2):
        wide = EngineId("e2", life)
        commands = harness.handle(EngineFailed(time_s=0.0, engine=wide, reason="x"))
    assert [(c.engine, c.shape.tp) for c in commands] == [("e2+5", 1), ("e3+1", 1)]
    for command in commands:
        harness.ready(command.engine)
    part.asked = 0
    end(harness, A, E0)
    assert part.asked == 0, "it would fail again"


def test_an_engine_that_dies_while_it_should_stop_frees_its_gpus():
    harness = at_work(Merge(), A, B, C, D)
    end(harness, B, E1)
    solved(harness)
    assert stopped_after_death(harness) == [start_wide()]


def stopped_after_death(harness: Harness) -> list:
    harness.handle(EngineFailed(time_s=0.0, engine=E3, reason="x", salvaged=((D, 2),)))
    preempted(harness, C, E2)
    return stopped(harness, E2)


def test_the_last_step_of_an_engine_that_stops_may_end_by_itself():
    harness = at_work(Merge(), A, B, C, D)
    end(harness, B, E1)
    solved(harness)
    finished = StepFinished(
        time_s=0.0, trajectory=C, step=0, engine=E2, output_tokens=5, reason="tool_call"
    )
    assert harness.handle(finished) == []
    harness.tool(C)
    stopped(harness, E2)
    assert harness.controller.ledger.trajectories[C].home is None
