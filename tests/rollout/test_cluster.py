"""The cluster: engines that start, drain, die and report, and KV between them; times by hand."""

import msgspec
import pytest

from heddle_core.commands import Migrate, Predict, StopEngine
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    EngineReported,
    EngineStopped,
    MigrationFinished,
    StepFinished,
    StepPreempted,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId
from heddle_rollout.driver import StuckError
from heddle_rollout.scripted_agent import ScriptedAgent
from tests.rollout.one_world import E0, E1, A, B, Run, answer, dispatch, script, start, step

pytestmark = pytest.mark.usefixtures("clock")

E2 = EngineId("e2")


# -- starts and stops ------------------------------------------------------------------------------


def test_a_start_is_charged_only_once_the_rollout_is_under_way():
    def extra(event):
        match event:
            case TrajectoryArrived(trajectory="b"):
                return [start(E1)]
            case EngineReady(engine="e1"):
                return [dispatch(B, engine=E1)]
        return None

    run = Run(answer("a", 100, 9), answer("b", 100, 1, arrival_s=4.0), extra=extra)
    assert [(e.engine, e.time_s) for e in run.all(EngineReady)] == [("e0", 0.0), ("e1", 64.0)]


def test_engines_that_start_before_the_first_step_stand_ready_however_late_it_is():
    def extra(event):
        match event:
            case TrajectoryArrived(trajectory="a"):
                return []
            case TrajectoryArrived(trajectory="b"):
                return [start(E1), dispatch(A), dispatch(B)]
        return None

    run = Run(answer("a", 100, 1), answer("b", 100, 1, arrival_s=9.0), extra=extra)
    assert [e.time_s for e in run.all(EngineReady)] == [0.0, 9.0]


def test_an_engine_reports_its_shape_and_capacity():
    ready = Run(answer("a", 100, 1)).one(EngineReady)
    assert (ready.shape.tp, ready.shape.gpu, ready.max_running, ready.kv_capacity_tokens) == (
        1,
        "g",
        8,
        16_000,
    )


def stopping(*, drain: bool):
    """Stop e0 at 4 s, with a step of 9 tokens running there; what is left of it runs at e1."""

    def extra(event):
        match event:
            case TrajectoryArrived(trajectory="b"):
                return [StopEngine(engine=E0, drain=drain), dispatch(B, engine=E1)]
            case StepPreempted():
                return [dispatch(A, engine=E1)]
        return None

    return Run(
        answer("a", 100, 9),
        answer("b", 100, 1, arrival_s=4.0),
        engines=(E0, E1),
        extra=extra,
    )


def test_a_drained_engine_stops_with_its_last_step():
    run = stopping(drain=True)
    assert run.one(EngineStopped).time_s == pytest.approx(10.8)
    assert not run.all(StepPreempted)


@pytest.mark.parametrize("drain", [True, False])
def test_an_engine_stops_after_all_steps_that_end_in_its_last_instant(drain):
    def extra(event):
        match event:
            case TrajectoryArrived(trajectory="b"):
                return [dispatch(B), StopEngine(engine=E0, drain=drain)]
            case StepPreempted():
                return [dispatch(event.trajectory, engine=E1)]
        return None

    run = Run(answer("a", 100, 9), answer("b", 100, 9), engines=(E0, E1), extra=extra)
    ends = [e for e in run.events if isinstance(e, StepFinished | StepPreempted | EngineStopped)]
    at_e0 = [type(e) for e in ends if e.engine == E0]
    assert at_e0 == [StepFinished if drain else StepPreempted] * 2 + [EngineStopped]
    assert ends[1].time_s == ends[0].time_s


def test_an_engine_that_need_not_drain_stops_its_steps_first():
    run = stopping(drain=False)
    assert (run.one(StepPreempted).time_s, run.one(StepPreempted).output_tokens) == (
        pytest.approx(4.2),
        3,
    )
    assert run.one(EngineStopped).time_s == pytest.approx(4.2)
    [rest] = [e for e in run.all(StepFinished) if e.trajectory == A]
    assert (rest.engine, rest.output_tokens, rest.cached_tokens) == ("e1", 6, 0)


@pytest.mark.parametrize("drain", [True, False])
def test_an_idle_engine_stops_at_once(drain):
    def extra(event):
        if isinstance(event, TrajectoryArrived):
            return [StopEngine(engine=E1, drain=drain), dispatch(A)]
        return None

    run = Run(answer("a", 100, 1), engines=(E0, E1), extra=extra)
    assert (run.one(EngineStopped).engine, run.one(EngineStopped).time_s) == ("e1", 0.0)


def test_a_slow_engine_is_slow():
    run = Run(answer("a", 100, 1), speed=lambda engine: 0.5)
    assert run.one(StepFinished).time_s == 4.0


# -- failures ------------------------------------------------------------------------------------


def test_a_fault_salvages_what_was_made_and_nothing_is_made_twice():
    def extra(event):
        return [dispatch(A, engine=E1)] if isinstance(event, EngineFailed) else None

    run = Run(answer("a", 100, 9), engines=(E0, E1), extra=extra, faults=((4.3, E0),))
    failed = run.one(EngineFailed)
    assert (failed.time_s, failed.engine, failed.salvaged) == (4.3, "e0", ((A, 3),))
    done = run.one(StepFinished)
    assert (done.engine, done.output_tokens, done.cached_tokens) == ("e1", 6, 0)
    assert done.time_s == pytest.approx(4.3 + 1.0 + 1.03 + 5 * 1.1)


def test_a_fault_before_the_first_token_salvages_none():
    def extra(event):
        return [dispatch(A, engine=E1)] if isinstance(event, EngineFailed) else None

    run = Run(answer("a", 100, 2), engines=(E0, E1), extra=extra, faults=((1.0, E0),))
    assert run.one(EngineFailed).salvaged == ((A, 0),)
    assert run.one(StepFinished).output_tokens == 2


def test_a_fault_names_every_step_that_ran():
    scripts = [answer(n, 100, 50) for n in "abc"]

    def extra(event):
        match event:
            case EngineFailed():
                return [dispatch(t, engine=E1) for t, _ in event.salvaged]
        return None

    run = Run(*scripts, engines=(E0, E1), extra=extra, faults=((20.0, E0),))
    salvaged = dict(run.one(EngineFailed).salvaged)
    assert list(salvaged) == ["a", "b", "c"]
    made = {e.trajectory: e.output_tokens for e in run.all(StepFinished)}
    assert {t: made[t] + salvaged[t] for t in made} == {"a": 50, "b": 50, "c": 50}


def test_when_no_engine_is_left_the_error_names_the_last_that_failed():
    def extra(event):
        match event:
            case EngineFailed(engine="e0"):
                return [dispatch(A, engine=E1)]
        return None

    says = "0 engines are alive and nothing is running; the last to fail was e1: injected fault"
    with pytest.raises(StuckError, match=says):
        Run(answer("a", 100, 50), engines=(E0, E1), extra=extra, faults=((4.3, E0), (9.0, E1)))


def test_a_prediction_that_was_answered_does_not_hide_that_nothing_can_go_on():
    def extra(event):
        match event:
            case TrajectoryArrived():
                return [Predict(trajectory=A, step=0, estimate=9.0), dispatch(A)]
        return None

    with pytest.raises(StuckError, match="the last to fail was e0: injected fault"):
        Run(answer("a", 100, 50), faults=((9.0, E0),), extra=extra, prediction_s=2.0)


def test_a_fault_of_an_engine_that_does_not_run_has_no_effect():
    faults = ((1.0, E2), (9.0, E0), (9.0, E0))
    run = Run(answer("a", 100, 1), answer("b", 100, 1, arrival_s=9.0), faults=faults, extra=last_e1)
    assert [e.engine for e in run.all(EngineFailed)] == ["e0"]


def last_e1(event):
    """Start e1 as well; send the second trajectory there."""
    if isinstance(event, TrajectoryArrived) and event.trajectory == B:
        return [start(E1)]
    if isinstance(event, EngineReady) and event.engine == E1:
        return [dispatch(B, engine=E1)]
    return None


def test_a_fault_during_a_tool_loses_the_prefix():
    a = script("a", step(320, 1, tool_s=10.0), step(330, 1, shared=321, tool=None))

    def extra(event):
        return [dispatch(A, 1, E1)] if isinstance(event, ToolReturned) else None

    run = Run(a, engines=(E0, E1), extra=extra, faults=((6.0, E0),))
    assert run.one(EngineFailed).salvaged == ()
    assert [e.cached_tokens for e in run.all(StepFinished)] == [0, 0]


def test_an_engine_that_dies_while_it_drains_does_not_stop_too():
    def extra(event):
        match event:
            case TrajectoryArrived(trajectory="b"):
                return [StopEngine(engine=E0, drain=True), dispatch(B, engine=E1)]
            case EngineFailed():
                return [dispatch(A, engine=E1)]
        return None

    run = Run(
        answer("a", 100, 9),
        answer("b", 100, 1, arrival_s=4.0),
        engines=(E0, E1),
        extra=extra,
        faults=((5.0, E0),),
    )
    assert len(run.all(EngineFailed)) == 1
    assert not run.all(EngineStopped)
    assert len(run.all(TrajectoryFinished)) == 2


@pytest.fixture
def whole_steps(monkeypatch):
    """Scripted agents whose steps cannot be resumed."""
    request = ScriptedAgent.request
    monkeypatch.setattr(
        ScriptedAgent,
        "request",
        lambda agent: msgspec.structs.replace(request(agent), resumable=False),
    )


@pytest.mark.usefixtures("whole_steps")
def test_a_step_that_is_not_resumable_runs_to_its_end_and_then_the_engine_stops():
    run = stopping(drain=False)
    assert not run.all(StepPreempted)
    [done] = [e for e in run.all(StepFinished) if e.trajectory == A]
    assert (done.engine, done.output_tokens) == ("e0", 9)
    assert run.one(EngineStopped).time_s == done.time_s


@pytest.mark.usefixtures("whole_steps")
def test_of_a_step_that_is_not_resumable_a_fault_salvages_nothing():
    def extra(event):
        return [dispatch(A, engine=E1)] if isinstance(event, EngineFailed) else None

    run = Run(answer("a", 100, 9), engines=(E0, E1), extra=extra, faults=((4.3, E0),))
    assert run.one(EngineFailed).salvaged == ((A, 0),)
    done = run.one(StepFinished)
    assert (done.engine, done.output_tokens) == ("e1", 9)


# -- samples -------------------------------------------------------------------------------------


def test_samples_are_late_and_show_what_was():
    run = Run(answer("a", 100, 9), report_interval_s=5.0, report_delay_s=3.0)
    first, *_ = run.all(EngineReported)
    assert (first.time_s, first.engine) == (8.0, "e0")
    assert (first.running, first.waiting, first.preemptions) == (1, 0, 0)
    # 103 tokens at 4.2 s, and the iteration that runs needs room for its own: 7 blocks of 16.
    assert first.kv_used_tokens == 112


def test_no_samples_come_from_an_engine_that_died_meanwhile():
    def extra(event):
        return [dispatch(A, engine=E1)] if isinstance(event, EngineFailed) else None

    run = Run(
        answer("a", 100, 9),
        engines=(E0, E1),
        extra=extra,
        faults=((6.0, E0),),
        report_interval_s=5.0,
        report_delay_s=2.0,
    )
    reports = [(e.engine, e.time_s) for e in run.all(EngineReported)]
    assert reports[:2] == [("e1", 7.0), ("e1", 12.0)]


def test_no_interval_no_samples():
    assert not Run(answer("a", 100, 99), report_interval_s=0.0).all(EngineReported)


# -- migration: 2 s fixed and 100 tokens per second; 20 blocks of 16 tokens take 5.2 s -------------


MOVE = Migrate(trajectory=A, source=E0, target=E1)


def moving(tool_s: float, **changes):
    """A step of 20 blocks at e0, a move to e1 requested as its tool starts, the next step at e1.

    The next step goes out once both the tool and the move have ended, as the controller does it.
    """
    over = []

    def extra(event):
        match event:
            case ToolStarted(trajectory="a"):
                return [MOVE]
            case MigrationFinished() | ToolReturned(trajectory="a"):
                over.append(event)
                return [dispatch(A, 1, E1)] if len(over) == 2 else []
        return None

    a = script("a", step(320, 1, tool_s=tool_s), step(330, 1, shared=321, tool=None))
    return Run(a, engines=(E0, E1), extra=extra, **changes)


def test_a_move_that_a_tool_hides_costs_nothing():
    run = moving(tool_s=10.0)
    moved = run.one(MigrationFinished)
    assert (moved.ok, moved.kv_tokens) == (True, 320)
    assert moved.time_s == pytest.approx(4.2 + 5.2)
    second = run.all(StepFinished)[1]
    assert (second.engine, second.cached_tokens) == ("e1", 320)
    assert second.time_s == pytest.approx(4.2 + 10.0 + 1.1)


def test_a_late_move_delays_the_next_step():
    run = moving(tool_s=1.0)
    assert run.one(MigrationFinished).time_s == pytest.approx(9.4)
    second = run.all(StepFinished)[1]
    assert (second.engine, second.cached_tokens) == ("e1", 320)
    assert second.time_s == pytest.approx(9.4 + 1.1)


def test_the_source_keeps_nothing_of_what_has_moved():
    def extra(event):
        match event:
            case ToolStarted(step=0):
                return [MOVE]
            case ToolReturned(step=0):
                return [dispatch(A, 1, E1)]
            case ToolReturned(step=1):
                return [dispatch(A, 2, E0)]
            case MigrationFinished():
                return []
        return None

    a = script(
        "a",
        step(320, 1, tool_s=10.0),
        step(330, 1, shared=321, tool_s=10.0),
        step(340, 1, shared=331, tool=None),
    )
    run = Run(a, engines=(E0, E1), extra=extra)
    assert [e.cached_tokens for e in run.all(StepFinished)] == [0, 320, 0]


def test_a_home_without_kv_moves_in_no_time():
    run = moving(tool_s=10.0, prefix_caching=False)
    moved = run.one(MigrationFinished)
    assert (moved.ok, moved.kv_tokens) == (True, 0)
    assert moved.time_s == pytest.approx(4.2)


@pytest.mark.parametrize("engine", [E0, E1], ids=["source", "target"])
def test_a_move_fails_with_either_of_its_engines(engine):
    def extra(event):
        match event:
            case ToolStarted():
                return [MOVE]
            case ToolReturned():
                return [dispatch(A, 1, E2)]
        return None

    a = script("a", step(320, 1, tool_s=10.0), step(330, 1, shared=321, tool=None))
    run = Run(a, engines=(E0, E1, E2), extra=extra, faults=((6.0, engine),))
    moved = run.one(MigrationFinished)
    assert (moved.time_s, moved.ok, moved.kv_tokens) == (6.0, False, 0)
    assert run.events.index(run.one(EngineFailed)) < run.events.index(moved)
    assert run.all(StepFinished)[1].cached_tokens == 0


@pytest.mark.parametrize("engine", [E0, E1], ids=["source", "target"])
def test_a_move_whose_engine_died_before_the_request_fails(engine):
    def extra(event):
        match event:
            case TrajectoryArrived(trajectory="b"):
                return [MOVE]
            case ToolReturned():
                return [dispatch(A, 1, E2)]
            case MigrationFinished():
                return [dispatch(B, 0, E2)]
        return None

    a = script("a", step(320, 1, tool_s=30.0), step(330, 1, shared=321, tool=None))
    run = Run(
        a,
        answer("b", 100, 1, arrival_s=6.0),
        engines=(E0, E1, E2),
        extra=extra,
        faults=((5.0, engine),),
    )
    moved = run.one(MigrationFinished)
    assert moved.kv_tokens == 0
    assert moved.ok == (engine == E0), "without a source there is no KV to wait for"


def test_a_move_that_still_waits_when_its_tool_returns_is_given_up():
    def extra(event):
        match event:
            case ToolStarted():
                return [Migrate(trajectory=event.trajectory, source=E0, target=E1)]
            case ToolReturned():
                return [dispatch(event.trajectory, 1, E0)]
        return None

    def two_steps(name, prompt, tool_s):
        after = step(prompt + 10, 1, shared=prompt + 1, tool=None)
        return script(name, step(prompt, 1, tool_s=tool_s), after)

    # The longer one takes e0 and e1 for 8 s or so; the other's tool is over before.
    run = Run(two_steps("a", 640, 30.0), two_steps("b", 320, 2.0), engines=(E0, E1), extra=extra)
    given_up, arrived = run.all(MigrationFinished)
    assert (given_up.trajectory, given_up.ok, given_up.kv_tokens) == (B, False, 0)
    [returned] = [e for e in run.all(ToolReturned) if e.trajectory == B]
    assert given_up.time_s == returned.time_s
    assert run.events.index(given_up) < run.events.index(returned)
    assert (arrived.trajectory, arrived.ok, arrived.kv_tokens) == (A, True, 640)
    assert [e.cached_tokens for e in run.all(StepFinished) if e.trajectory == B] == [0, 320]


def test_an_idle_engine_is_reported_once_until_it_has_run_again():
    long_tool = script("a", step(16, 1, tool_s=1000.0), step(32, 1, shared=17, tool=None))
    reports = Run(long_tool, engines=(E0,), report_interval_s=5.0).all(EngineReported)
    assert 1 <= len(reports) <= 4, "an idle engine repeats itself"
    assert reports[-1].running == 0
