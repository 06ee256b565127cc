"""A step waits for a prediction that its tool did not hide, and for nothing else."""

from dataclasses import dataclass, replace

from heddle_core.commands import Migrate
from heddle_core.events import MigrationFinished, Predicted, TrajectoryFinished
from heddle_core.ids import TrajectoryId
from heddle_core.parts.migration import Never
from heddle_core.policy import Migration
from tests.core.test_controller import (
    E0,
    E1,
    PLAIN,
    A,
    Engines,
    Harness,
    Known,
    LongestPreempts,
    ToE1,
    dispatch,
)
from tests.core.test_rehoming import failed


@dataclass
class Awaited(Known):
    awaited: bool = True


def awaiting(
    *arrivals: TrajectoryId, slots: int = 1, migration: Migration | None = None
) -> Harness:
    known = Awaited({A: 10.0}, served=True)
    policy = replace(PLAIN, predictor=known, scheduler=LongestPreempts())
    policy = replace(policy, planner=Engines((E0, E1), slots=slots), migration=migration or Never())
    return Harness(policy, *((name, 10) for name in arrivals))


def answer(tokens: float | None, step: int = 0) -> Predicted:
    return Predicted(time_s=0.0, trajectory=A, step=step, remaining_tokens=tokens)


def phase(harness: Harness) -> str:
    return harness.controller.ledger.trajectories[A].phase


def test_a_step_waits_for_its_prediction_and_runs_by_it() -> None:
    harness = awaiting(A)
    harness.finish(A)
    harness.tool(A)
    assert harness.back(A) == []
    assert phase(harness) == "predicting"
    assert harness.handle(answer(70.0)) == [dispatch(A, step=1, priority=70.0)]


def test_a_prediction_in_time_delays_no_step() -> None:
    harness = awaiting(A)
    harness.finish(A)
    harness.tool(A)
    assert harness.handle(answer(70.0)) == []
    assert harness.back(A) == [dispatch(A, step=1, priority=70.0)]


def test_a_prediction_that_failed_ends_the_wait() -> None:
    harness = awaiting(A, migration=ToE1())
    harness.finish(A)
    harness.tool(A)
    harness.back(A)
    assert harness.handle(answer(None)) == [dispatch(A, step=1, priority=5.0)]


def test_an_awaited_prediction_can_move_the_home_and_the_step_waits_for_its_kv() -> None:
    harness = awaiting(A, migration=ToE1())
    harness.finish(A)
    harness.tool(A)
    harness.back(A)
    assert harness.handle(answer(70.0)) == [Migrate(trajectory=A, source=E0, target=E1)]
    assert phase(harness) == "migrating"
    moved = MigrationFinished(time_s=0.0, trajectory=A, source=E0, target=E1, ok=True, kv_tokens=15)
    assert harness.handle(moved) == [dispatch(A, step=1, engine=E1, priority=70.0)]


def test_an_engine_that_fails_meanwhile_costs_the_home_only() -> None:
    harness = awaiting(A)
    harness.finish(A)
    harness.tool(A)
    harness.back(A)
    harness.handle(failed(E0))
    assert phase(harness) == "predicting"
    assert harness.controller.ledger.trajectories[A].home is None
    assert harness.handle(answer(70.0)) == [dispatch(A, step=1, engine=E1, priority=70.0)]


def test_one_that_ends_while_it_waits_leaves_with_its_answer() -> None:
    harness = awaiting(A)
    harness.finish(A)
    harness.tool(A)
    harness.back(A)
    harness.handle(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="cancelled"))
    assert list(harness.controller.ledger.ended) == [A]
    assert harness.handle(answer(70.0)) == []
    assert not harness.controller.ledger.ended


def test_without_engines_it_is_held_after_its_prediction() -> None:
    harness = awaiting(A)
    harness.finish(A)
    harness.tool(A)
    harness.back(A)
    harness.handle(failed(E0))
    harness.handle(failed(E1))
    assert harness.handle(answer(70.0)) == []
    assert phase(harness) == "held"
