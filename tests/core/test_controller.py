"""Scenarios: events, and the commands that must follow. Each name is the sentence it proves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest

from heddle_core import Controller, Policy
from heddle_core.commands import (
    Cancel,
    Command,
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
    Event,
    MigrationFinished,
    Predicted,
    RolloutClosed,
    RolloutStarted,
    StepFinished,
    StepPreempted,
    Tick,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_core.ledger import LedgerError
from heddle_core.parts.admission import PromptOnly
from heddle_core.parts.migration import Never
from heddle_core.parts.placement.load_and_pin import LeastLoaded
from heddle_core.parts.predictor import NoPrediction
from heddle_core.parts.scheduler import Fcfs
from heddle_core.plans import EngineSpec, ResourcePlan
from heddle_core.policy import TrajectoryView, View

E0, E1 = EngineId("e0"), EngineId("e1")
A, B, C = TrajectoryId("a"), TrajectoryId("b"), TrajectoryId("c")


@dataclass
class Engines:
    """A fixed plan of one-slot engines."""

    names: tuple[EngineId, ...] = (E0,)
    slots: int = 1
    needs_all: bool = False

    def plan(self, ts: Sequence[TrajectoryView], remaining: Sequence[float]) -> ResourcePlan:
        specs = [
            EngineSpec(engine=n, shape=EngineShape("h100", 1), max_running=self.slots)
            for n in self.names
        ]
        return ResourcePlan(engines=tuple(specs))


@dataclass
class Known(NoPrediction):
    """Remaining tokens given by the test."""

    tokens: dict[TrajectoryId, float]
    served: bool = False

    def remaining_tokens(self, t: TrajectoryView) -> float:
        return self.tokens[t.id]


class LongestPreempts(Fcfs):
    preemptive = True

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        return remaining_tokens


class ToE1(Never):
    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        return E1


PLAIN = Policy(
    predictor=NoPrediction(),
    scheduler=Fcfs(),
    admission=PromptOnly(),
    placement=LeastLoaded(),
    migration=Never(),
    planner=Engines(),
)


class Harness:
    """A controller and its commands, with the ledger checked after every event."""

    def __init__(
        self, policy: Policy, *arrivals: tuple[TrajectoryId, int], kv: int = 1000, later: int = 0
    ) -> None:
        self.controller = Controller(policy)
        self.now_s = 0.0
        self.events = 0
        started = self.handle(
            RolloutStarted(time_s=0.0, rollout=RolloutId("r"), trajectories=len(arrivals) + later)
        )
        for command in started:
            assert isinstance(command, StartEngine)
            self.ready(command.engine, kv=kv, slots=command.max_running)
        self.answers = [self.arrive(name, prompt) for name, prompt in arrivals]

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, RolloutStarted):
            self.rollout = event.rollout
        answer = self.controller.handle(event)
        self.controller.ledger.check()
        assert all(command.cause == self.events for command in answer)
        self.events += 1
        # Tests say what is decided; the cause of every command is checked here.
        return [msgspec.structs.replace(command, cause=0) for command in answer]

    def ready(self, engine: EngineId, *, kv: int = 1000, slots: int = 1) -> list[Command]:
        return self.handle(
            EngineReady(
                time_s=self.now_s,
                engine=engine,
                shape=EngineShape("h100", 1),
                kv_capacity_tokens=kv,
                max_running=slots,
            )
        )

    def arrive(self, name: TrajectoryId, prompt: int = 10) -> list[Command]:
        return self.handle(
            TrajectoryArrived(
                time_s=self.now_s,
                rollout=self.rollout,
                trajectory=name,
                group=GroupId("g"),
                task="t",
                prompt_tokens=prompt,
            )
        )

    def finish(self, name: TrajectoryId, step: int = 0, engine: EngineId = E0) -> list[Command]:
        return self.handle(
            StepFinished(
                time_s=self.now_s,
                trajectory=name,
                step=step,
                engine=engine,
                output_tokens=5,
                reason="tool_call",
            )
        )

    def tool(self, name: TrajectoryId, step: int = 0) -> list[Command]:
        return self.handle(ToolStarted(time_s=self.now_s, trajectory=name, step=step, tool="sh"))

    def back(self, name: TrajectoryId, step: int = 0) -> list[Command]:
        return self.handle(
            ToolReturned(
                time_s=self.now_s,
                trajectory=name,
                step=step,
                tool="sh",
                ok=True,
                observation_tokens=3,
                context_tokens=18,
            )
        )


def dispatch(
    name: TrajectoryId, step: int = 0, engine: EngineId = E0, priority: float = 0.0
) -> Dispatch:
    return Dispatch(trajectory=name, step=step, engine=engine, priority=priority)


def test_a_free_slot_is_filled_at_once_and_the_next_waits() -> None:
    harness = Harness(PLAIN, (A, 10), (B, 10))
    assert harness.answers == [[dispatch(A)], []]
    assert harness.finish(A) == [dispatch(B)]


def test_a_returning_trajectory_queues_behind_those_that_wait() -> None:
    harness = Harness(PLAIN, (A, 10), (B, 10), (C, 10))
    assert harness.finish(A) == [dispatch(B)]
    harness.tool(A)
    assert harness.back(A) == []
    assert harness.finish(B) == [dispatch(C)]
    assert harness.finish(C) == [dispatch(A, step=1)]


def test_a_prompt_waits_for_kv_even_when_a_slot_is_free() -> None:
    harness = Harness(replace(PLAIN, planner=Engines(slots=2)), (A, 60), (B, 60), kv=100)
    assert harness.answers == [[dispatch(A)], []]
    assert harness.finish(A) == [dispatch(B)]


def test_a_prompt_that_fits_no_engine_is_cancelled_not_waited_for() -> None:
    harness = Harness(PLAIN, (A, 100), (B, 10), kv=100)
    [cancel] = harness.answers[0]
    assert isinstance(cancel, Cancel)
    assert "100 tokens" in cancel.reason
    assert harness.answers[1] == [dispatch(B)]
    harness.handle(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="cancelled"))


def test_the_longest_waiting_trajectory_takes_the_slot_of_a_shorter_one() -> None:
    policy = replace(PLAIN, predictor=Known({A: 1.0, B: 2.0, C: 3.0}), scheduler=LongestPreempts())
    harness = Harness(policy, (A, 10), (B, 10), (C, 10))
    assert harness.answers == [
        [dispatch(A, priority=1.0)],
        [Preempt(trajectory=A, step=0, engine=E0)],
        [],  # one ask at a time
    ]
    stopped = StepPreempted(time_s=0.0, trajectory=A, step=0, engine=E0, output_tokens=4)
    assert harness.handle(stopped) == [dispatch(C, priority=3.0)]
    assert harness.controller.ledger.trajectories[A].output_tokens == 4
    assert harness.controller.ledger.trajectories[A].context_tokens == 14


def test_a_step_that_finishes_before_its_preemption_wins_the_race() -> None:
    policy = replace(PLAIN, predictor=Known({A: 1.0, B: 2.0}), scheduler=LongestPreempts())
    harness = Harness(policy, (A, 10), (B, 10))
    assert harness.finish(A) == [dispatch(B, priority=2.0)]


def test_kv_moves_while_the_tool_runs_and_the_next_step_runs_at_the_target() -> None:
    policy = replace(PLAIN, planner=Engines((E0, E1)), migration=ToE1())
    harness = Harness(policy, (A, 10))
    harness.finish(A)
    assert harness.tool(A) == [Migrate(trajectory=A, source=E0, target=E1)]
    moved = MigrationFinished(time_s=0.0, trajectory=A, source=E0, target=E1, ok=True, kv_tokens=15)
    assert harness.handle(moved) == []
    assert harness.controller.ledger.trajectories[A].home == E1


def test_a_late_migration_holds_the_step_back() -> None:
    policy = replace(PLAIN, planner=Engines((E0, E1)), migration=ToE1())
    harness = Harness(policy, (A, 10))
    harness.finish(A)
    harness.tool(A)
    assert harness.back(A) == []
    moved = MigrationFinished(time_s=0.0, trajectory=A, source=E0, target=E1, ok=True, kv_tokens=15)
    assert harness.handle(moved) == [dispatch(A, step=1, engine=E1)]


def test_a_failed_migration_leaves_the_home_where_it_was() -> None:
    policy = replace(PLAIN, planner=Engines((E0, E1)), migration=ToE1())
    harness = Harness(policy, (A, 10))
    harness.finish(A)
    harness.tool(A)
    harness.handle(
        MigrationFinished(time_s=0.0, trajectory=A, source=E0, target=E1, ok=False, kv_tokens=0)
    )
    assert harness.controller.ledger.trajectories[A].home == E0


def test_a_dead_engines_work_goes_elsewhere_with_the_tokens_it_had() -> None:
    harness = Harness(replace(PLAIN, planner=Engines((E0, E1))), (A, 10), (B, 10), (C, 10))
    died = EngineFailed(time_s=0.0, engine=E0, reason="x", salvaged=((A, 7),))
    answer = harness.handle(died)
    assert answer == [
        StartEngine(engine=EngineId("e0+1"), shape=EngineShape("h100", 1), max_running=1)
    ]
    assert harness.controller.ledger.trajectories[A].context_tokens == 17
    assert harness.finish(B, engine=E1) == [dispatch(A, engine=E1)]


def test_without_any_engine_work_is_held_until_one_is_ready() -> None:
    harness = Harness(PLAIN, (A, 10))
    [restart] = harness.handle(EngineFailed(time_s=0.0, engine=E0, reason="x"))
    assert isinstance(restart, StartEngine)
    assert harness.ready(restart.engine) == [dispatch(A, engine=restart.engine)]


def test_an_engine_that_keeps_dying_is_given_up() -> None:
    harness = Harness(PLAIN, (A, 10))
    engine, starts = E0, 0
    while answer := harness.handle(EngineFailed(time_s=0.0, engine=engine, reason="x")):
        [restart] = [c for c in answer if isinstance(c, StartEngine)]
        engine, starts = restart.engine, starts + 1
    assert starts == 3


def test_a_served_estimate_is_requested_as_the_tool_starts_and_reorders_when_late() -> None:
    known = Known({A: 1.0, B: 2.0, C: 3.0}, served=True)
    harness = Harness(
        replace(PLAIN, predictor=known, scheduler=LongestPreempts()), (C, 10), (A, 10)
    )
    harness.finish(C)
    assert harness.tool(C) == [Predict(trajectory=C, step=0, estimate=3.0)]
    assert harness.back(C) == []  # 3 - 5 made = 0: not ahead of a, which runs
    late = Predicted(time_s=0.0, trajectory=C, step=0, remaining_tokens=9.0)
    assert harness.handle(late) == [Preempt(trajectory=A, step=0, engine=E0)]


def test_a_failed_prediction_leaves_the_last_estimate() -> None:
    known = Known({A: 7.0}, served=True)
    harness = Harness(replace(PLAIN, predictor=known), (A, 10))
    harness.finish(A)
    harness.tool(A)
    harness.handle(Predicted(time_s=0.0, trajectory=A, step=0, remaining_tokens=None))
    assert harness.controller.ledger.trajectories[A].remaining_tokens == 2.0


def test_a_plan_that_needs_all_waits_for_the_last_arrival() -> None:
    harness = Harness(replace(PLAIN, planner=Engines(needs_all=True)), (A, 10), (B, 10))
    assert harness.answers == [
        [],
        [StartEngine(engine=E0, shape=EngineShape("h100", 1), max_running=1)],
    ]


def test_a_plan_does_not_wait_for_ever_for_announced_arrivals() -> None:
    harness = Harness(replace(PLAIN, planner=Engines(needs_all=True)))
    harness.handle(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=2))
    harness.arrive(A)
    deadline_s = harness.controller.deadline_s
    assert deadline_s == 30.0
    harness.now_s = deadline_s
    assert harness.handle(Tick(time_s=deadline_s)) == [dispatch(A)]
    assert harness.controller.deadline_s is None


def test_a_plan_of_another_shape_stops_engines_before_it_starts_new_ones() -> None:
    @dataclass
    class Growing(Engines):
        rollouts: int = 0

        def plan(self, ts: Sequence[TrajectoryView], remaining: Sequence[float]) -> ResourcePlan:
            self.rollouts += 1
            spec = EngineSpec(engine=E0, shape=EngineShape("h100", self.rollouts), max_running=1)
            return ResourcePlan(engines=(spec,))

    harness = Harness(replace(PLAIN, planner=Growing()))
    harness.controller.ledger.check()
    assert harness.handle(RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=1)) == [
        StopEngine(engine=E0, drain=True)
    ]
    assert harness.handle(EngineStopped(time_s=0.0, engine=E0)) == [
        StartEngine(engine=EngineId("e0+1"), shape=EngineShape("h100", 2), max_running=1)
    ]


@pytest.mark.parametrize(
    ("event", "complaint"),
    [
        (Tick(time_s=-1.0), "backwards"),
        (Tick(time_s=float("nan")), "backwards"),
        (ToolStarted(time_s=0.0, trajectory=A, step=0, tool=""), "running"),
        (ToolStarted(time_s=0.0, trajectory=C, step=0, tool=""), "never arrived"),
        (EngineStopped(time_s=0.0, engine=E1), "never ready"),
        (EngineStopped(time_s=0.0, engine=E0), "steps running"),
        (
            StepFinished(
                time_s=0.0, trajectory=A, step=1, engine=E0, output_tokens=1, reason="answer"
            ),
            "in step 0",
        ),
        (
            StepPreempted(time_s=0.0, trajectory=A, step=0, engine=E0, output_tokens=-1),
            "made -1 tokens",
        ),
        (
            EngineFailed(time_s=0.0, engine=E0, reason="", salvaged=((A, -1),)),
            "made -1 tokens",
        ),
        (
            RolloutClosed(time_s=0.0, rollout=RolloutId("r"), trajectories=0),
            "closes with 0 trajectories, but 1 have arrived",
        ),
        (
            RolloutStarted(time_s=0.0, rollout=RolloutId("r2"), trajectories=-1),
            "announces -1",
        ),
        (
            MigrationFinished(time_s=0.0, trajectory=A, source=E0, target=E0, ok=True, kv_tokens=0),
            "does not migrate",
        ),
    ],
)
def test_a_driver_that_breaks_the_protocol_gets_an_error(event: Event, complaint: str) -> None:
    harness = Harness(PLAIN, (A, 10))
    with pytest.raises(LedgerError, match=complaint):
        harness.handle(event)


def test_a_second_arrival_or_end_of_one_trajectory_is_refused() -> None:
    harness = Harness(PLAIN, (A, 10), later=1)
    harness.handle(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="failed"))
    with pytest.raises(LedgerError, match="has finished"):
        harness.handle(TrajectoryFinished(time_s=0.0, trajectory=A, outcome="failed"))


def test_an_arrival_of_a_trajectory_that_is_here_is_refused() -> None:
    harness = Harness(PLAIN, (A, 10), later=1)
    with pytest.raises(LedgerError, match="arrived twice"):
        harness.arrive(A)
    assert harness.controller.rollouts.get(harness.rollout).arrived == 1
