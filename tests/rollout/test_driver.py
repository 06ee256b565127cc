"""The driver: events of a trajectory's environment, at times solved by hand."""

from dataclasses import dataclass, replace

import msgspec
import pytest

from campaigns.faults.scenario import HandledCore
from heddle_core import Controller, Policy
from heddle_core.commands import Cancel, Predict, Preempt, SolvePlan
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    PlanSolved,
    Predicted,
    RolloutStarted,
    StepFinished,
    StepPreempted,
    Tick,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, EngineShape
from heddle_core.parts.admission import PromptOnly
from heddle_core.parts.migration import Never
from heddle_core.parts.placement.load_and_pin import LeastLoaded
from heddle_core.parts.placement.pause_restore import PauseRestore
from heddle_core.parts.predictor import NoPrediction, Served
from heddle_core.parts.scheduler import Fcfs
from heddle_core.plans import EngineSpec, ResourcePlan
from heddle_rollout.driver import StuckError
from tests.rollout.one_world import (
    E0,
    E1,
    A,
    B,
    Run,
    answer,
    dispatch,
    run_on,
    script,
    start,
    step,
    world,
)

pytestmark = pytest.mark.usefixtures("clock")


@dataclass
class OneEngine:
    needs_all: bool = False

    def plan(self, ts, remaining):
        return ResourcePlan(
            engines=(EngineSpec(engine=E0, shape=EngineShape("g", 1), max_running=8),)
        )


PLAIN = Policy(
    predictor=NoPrediction(),
    scheduler=Fcfs(),
    admission=PromptOnly(),
    placement=LeastLoaded(),
    migration=Never(),
    planner=OneEngine(),
)


def under(policy, *scripts, **changes):
    """Run under a real controller; returns the events."""
    controller, events = Controller(policy), []

    def handle(event):
        events.append(event)
        commands = controller.handle(event)
        controller.ledger.check()
        return commands

    run_on(Run.clock, scripts, HandledCore(handle, controller), world(**changes))
    return events


def times(events, kind):
    return [round(e.time_s, 6) for e in events if isinstance(e, kind)]


def test_step_tool_step_answer():
    run = Run(
        script(
            "a",
            step(100, 3, tool_s=5.0, tool_tokens=7, ok=False),
            step(110, 2, shared=103, tool=None),
        )
    )
    assert run.event_times() == [
        ("StepFinished", 4.2),  # 2.0 + 2 * 1.1
        ("ToolStarted", 4.2),
        ("ToolReturned", 9.2),
        ("StepFinished", 11.44),  # 6 blocks of 16 are cached: 1.14 + 1.1
        ("TrajectoryFinished", 11.44),
    ]
    first, second = run.all(StepFinished)
    assert (first.output_tokens, first.reason, first.cached_tokens) == (3, "tool_call", 0)
    assert (second.output_tokens, second.reason, second.cached_tokens) == (2, "answer", 96)
    assert (first.queued_s, first.prefill_s) == (0.0, 2.0)
    assert first.decode_s == pytest.approx(2.2)
    returned = run.one(ToolReturned)
    assert (returned.step, returned.ok, returned.tool) == (0, False, "sh")
    assert (returned.observation_tokens, returned.context_tokens) == (7, 110)
    assert run.one(TrajectoryFinished).outcome == "completed"


def test_arrivals_keep_their_distances_from_the_first():
    run = Run(answer("b", 100, 1, arrival_s=107.5), answer("a", 100, 1, arrival_s=100.0))
    assert [(e.trajectory, e.time_s) for e in run.all(TrajectoryArrived)] == [
        (A, 0.0),
        (B, 7.5),
    ]
    assert run.one(RolloutStarted).trajectories == 2


def test_a_rollout_of_nothing_is_over_at_once():
    run = Run()
    assert [type(e) for e in run.events][:1] == [RolloutStarted]
    assert not run.all(TrajectoryFinished)


def test_a_last_step_with_a_tool_ends_when_the_tool_has():
    run = Run(script("a", step(100, 1, tool_s=4.0)))
    assert run.event_times() == [
        ("StepFinished", 2.0),
        ("ToolStarted", 2.0),
        ("TrajectoryFinished", 6.0),
    ]


def test_a_truncated_source_ends_at_its_length_limit():
    run = Run(answer("a", 100, 1, truncated=True), script("b", step(100, 1), truncated=True))
    assert [e.reason for e in run.all(StepFinished)] == ["length_limit"] * 2
    assert [e.outcome for e in run.all(TrajectoryFinished)] == ["truncated"] * 2


def test_a_tool_without_a_name_is_still_a_call():
    run = Run(script("a", step(100, 1, tool=None, tool_s=1.0), step(120, 1, tool=None)))
    assert run.one(ToolStarted).tool == ""
    assert run.one(ToolReturned).time_s == 3.0


def test_a_tool_that_finds_no_place_waits_for_one():
    scripts = [script(n, step(100, 1, tool_s=10.0), step(120, 1, tool=None)) for n in "ab"]
    run = Run(*scripts, tool_capacity=1)
    first, second = (e.time_s for e in run.all(ToolReturned))
    assert second - first == pytest.approx(10.0)


# -- preemption ----------------------------------------------------------------------------------


def test_a_preempted_step_keeps_its_tokens_and_makes_only_the_rest():
    def extra(event):
        match event:
            case TrajectoryArrived(trajectory="b"):
                return [Preempt(trajectory=A, step=0, engine=E0)]
            case StepPreempted():
                return [dispatch(A), dispatch(B)]
        return None

    run = Run(answer("a", 100, 9), answer("b", 100, 1, arrival_s=4.0), extra=extra)
    stopped = run.one(StepPreempted)
    assert (stopped.time_s, stopped.output_tokens) == (pytest.approx(4.2), 3)
    [rest] = [e for e in run.all(StepFinished) if e.trajectory == A]
    assert rest.output_tokens == 6
    assert rest.cached_tokens == 96, "of 103 tokens of its own, whole blocks"


def test_a_step_that_ends_with_the_iteration_it_is_stopped_in_has_finished():
    def extra(event):
        match event:
            case TrajectoryArrived(trajectory="b"):
                return [Preempt(trajectory=A, step=0, engine=E0)]
            case StepFinished(trajectory="a"):
                return [dispatch(B)]
        return None

    run = Run(answer("a", 100, 3), answer("b", 100, 1, arrival_s=4.0), extra=extra)
    assert not run.all(StepPreempted)
    assert [e.output_tokens for e in run.all(StepFinished)] == [3, 1]


def limited(tokens):
    """Dispatch the one step of A, and what is left of it, for so many tokens each time."""

    def extra(event):
        if isinstance(event, TrajectoryArrived | StepPreempted):
            return [msgspec.structs.replace(dispatch(A), max_tokens=tokens)]
        return None

    return extra


def test_a_limited_dispatch_ends_after_its_tokens_and_the_rest_follows():
    run = Run(answer("a", 100, 9), extra=limited(4))
    assert [e.output_tokens for e in run.all(StepPreempted)] == [4, 4]
    assert run.one(StepFinished).output_tokens == 1
    assert run.one(StepFinished).cached_tokens == 96


def test_a_limit_that_the_step_does_not_reach_changes_nothing():
    for limit in (9, 10):
        run = Run(answer("a", 100, 9), extra=limited(limit))
        assert run.one(StepFinished).output_tokens == 9
        assert not run.all(StepPreempted)


# -- giving up -----------------------------------------------------------------------------------


def test_a_prompt_that_no_engine_holds_is_cancelled_and_the_rest_goes_on():
    events = under(PLAIN, answer("a", 16_000, 1), answer("b", 100, 1))
    ends = {e.trajectory: e.outcome for e in events if isinstance(e, TrajectoryFinished)}
    assert ends == {"a": "cancelled", "b": "completed"}
    assert [e.trajectory for e in events if isinstance(e, StepFinished)] == ["b"]


def test_a_context_that_outgrows_every_engine_is_cancelled_on_return():
    long = script("a", step(100, 1, tool_s=1.0), step(16_000, 1, shared=101, tool=None))
    events = under(PLAIN, long, answer("b", 100, 4))
    ends = {e.trajectory: e.outcome for e in events if isinstance(e, TrajectoryFinished)}
    assert ends == {"a": "cancelled", "b": "completed"}


def test_a_cancelled_trajectorys_tool_is_not_waited_for():
    def extra(event):
        return [Cancel(trajectory=A, reason="x")] if isinstance(event, ToolStarted) else None

    a = script("a", step(100, 1, tool_s=1.0), step(120, 1, tool=None))
    run = Run(a, answer("b", 100, 9), extra=extra)
    assert not run.all(ToolReturned)
    assert [e.outcome for e in run.all(TrajectoryFinished)] == ["cancelled", "completed"]


def test_a_policy_that_forgets_a_trajectory_ends_in_a_stuck_error():
    def extra(event):
        return [] if isinstance(event, TrajectoryArrived) and event.trajectory == B else None

    with pytest.raises(StuckError, match=r"1 trajectories cannot go on .* 1 engines are alive"):
        Run(answer("a", 100, 1), answer("b", 100, 1), extra=extra)


def test_samples_of_idle_engines_do_not_hide_that_nothing_happens():
    with pytest.raises(StuckError):
        Run(
            answer("a", 100, 1),
            extra=lambda e: [] if isinstance(e, TrajectoryArrived) else None,
            report_interval_s=1.0,
        )


@pytest.mark.parametrize("placement", [LeastLoaded(), PauseRestore()])
def test_engines_that_all_die_for_good_leave_a_rollout_stuck(placement):
    faults = tuple((5.0 + 70.0 * i, EngineId(f"e0+{i}" if i else "e0")) for i in range(4))
    seen = []
    controller = Controller(replace(PLAIN, placement=placement))

    def handle(event):
        seen.append(event)
        return controller.handle(event)

    core = HandledCore(handle, controller)
    with pytest.raises(StuckError, match=r"1 trajectories .* 0 engines are alive"):
        run_on(Run.clock, [answer("a", 100, 500)], core, world(faults=faults))
    assert len([e for e in seen if isinstance(e, EngineFailed)]) == 4
    assert controller.ledger.trajectories[A].phase == "held"


# -- services ------------------------------------------------------------------------------------


def predicting(tool_s: float, prediction_s: float):
    policy = replace(PLAIN, predictor=Served(NoPrediction()))
    a = script("a", step(100, 1, tool_s=tool_s), step(120, 1, tool=None))
    events = under(policy, a, prediction_s=prediction_s)
    answers = [
        (type(e).__name__, e.time_s) for e in events if isinstance(e, Predicted | ToolReturned)
    ]
    return [(name, round(time_s, 6)) for name, time_s in answers]


def test_a_prediction_overlaps_a_longer_tool():
    assert predicting(1.0, 0.27) == [("Predicted", 2.27), ("ToolReturned", 3.0)]


def test_a_prediction_is_late_for_a_faster_tool():
    assert predicting(0.05, 0.27) == [("ToolReturned", 2.05), ("Predicted", 2.27)]


def test_an_estimate_of_the_core_comes_back_as_it_was():
    def extra(event):
        ask = Predict(trajectory=A, step=0, estimate=12.5)
        return [ask] if isinstance(event, ToolStarted) else None

    a = script("a", step(100, 1, tool_s=9.0), step(120, 1, tool=None))
    answered = Run(a, extra=extra, prediction_s=0.5).one(Predicted)
    assert (answered.time_s, answered.remaining_tokens) == (2.5, 12.5)
    assert (answered.trajectory, answered.step) == (A, 0)


@dataclass(frozen=True)
class Search:
    found: ResourcePlan
    charged_s: float = 3.0

    def solve(self):
        return self.found


def test_a_search_takes_the_time_it_is_charged():
    found = ResourcePlan(engines=())

    def extra(event):
        match event:
            case RolloutStarted():
                return [SolvePlan(plan=1, problem=Search(found))]
            case PlanSolved():
                return [start()]
            case EngineReady():
                return [dispatch(A)]
            case TrajectoryArrived():
                return []
        return None

    run = Run(answer("a", 100, 1), extra=extra)
    solved = run.one(PlanSolved)
    assert (solved.time_s, solved.plan, solved.resource_plan) == (3.0, 1, found)
    assert run.one(StepFinished).time_s == 5.0


def test_a_tick_comes_at_the_deadline_and_a_newer_deadline_counts():
    deadlines = [10.0]

    def extra(event):
        match event:
            case TrajectoryArrived(trajectory="a"):
                deadlines[0] = 4.0
                return []
            case Tick():
                deadlines[0] = None
                return [dispatch(A)]
        return None

    run = Run(answer("a", 100, 1), extra=extra, deadline=lambda: deadlines[0])
    assert [e.time_s for e in run.all(Tick)] == [4.0]
    assert run.one(StepFinished).time_s == 6.0


def test_a_planner_that_waits_for_all_plans_without_a_late_arrival():
    policy = replace(PLAIN, planner=OneEngine(needs_all=True))
    events = under(policy, answer("a", 100, 1), answer("b", 100, 1, arrival_s=50.0))
    assert times(events, Tick) == [30.0]
    assert times(events, StepFinished) == [32.0, 52.0]


def test_a_planner_that_waits_for_all_waits_no_longer():
    policy = replace(PLAIN, planner=OneEngine(needs_all=True))
    events = under(policy, answer("a", 100, 1), answer("b", 100, 1, arrival_s=9.0))
    assert times(events, StepFinished) == pytest.approx([12.0, 12.0])


# -- a rewritten history ---------------------------------------------------------------------------


def test_a_compacted_history_is_forgotten_wherever_its_kv_lies():
    """Steps at e0, e1, e0: what e0 kept of the first is void once the agent rewrote it."""
    hops = (E0, E1, E0)

    def extra(event):
        if isinstance(event, ToolReturned):
            return [dispatch(A, event.step + 1, hops[event.step + 1])]
        return None

    def cached(shared_in_second, shared_in_third):
        a = script(
            "a",
            step(320, 1),
            step(330, 1, shared=shared_in_second),
            step(340, 1, shared=shared_in_third, tool=None),
        )
        run = Run(a, engines=(E0, E1), extra=extra)
        return [e.cached_tokens for e in run.all(StepFinished)]

    assert cached(321, 331) == [0, 0, 320], "unbroken: e0 still has the first step's blocks"
    assert cached(100, 331) == [0, 0, 0], "rewritten while at e1: e0's KV is of another history"
    assert cached(321, 160) == [0, 0, 160], "rewritten on the way back: e0 trims its own"
