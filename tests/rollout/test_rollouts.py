"""Several rollouts on one driver: open and closed, overlapping, one after the other."""

import gc
from collections.abc import Sequence

import msgspec
import pytest

from campaigns.faults.scenario import Scenario, policy_of
from heddle_core import Controller
from heddle_core.commands import Cancel, Command, Preempt, StartEngine
from heddle_core.events import (
    EngineReady,
    EngineReported,
    Event,
    RolloutClosed,
    RolloutStarted,
    StepFinished,
    StepPreempted,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineShape, RolloutId, TrajectoryId
from heddle_rollout.driver import RolloutError, StuckError
from heddle_rollout.engines import EngineCapabilities
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_sim.rollout import Simulation
from heddle_trace.schema import TrajectoryScript
from tests.rollout.one_world import E0, A, answer, dispatch, script, start, step, world

R1, R2 = RolloutId("r1"), RolloutId("r2")


class OneEngine:
    """Starts e0 with the first rollout and sends every step there."""

    deadline_s: float | None = None

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ready = False

    def handle(self, event: Event) -> Sequence[Command]:
        self.events.append(event)
        match event:
            case RolloutStarted() if not self.ready:
                return [start()]
            case EngineReady():
                self.ready = True
            case TrajectoryArrived():
                return [dispatch(event.trajectory)]
            case ToolReturned():
                return [dispatch(event.trajectory, event.step + 1)]
        return []

    def of(self, kind: type[Event]) -> list[tuple[float, str]]:
        return [
            (round(e.time_s, 6), getattr(e, "trajectory", None) or e.rollout)
            for e in self.events
            if isinstance(e, kind)
        ]


def simulation() -> tuple[Simulation, OneEngine]:
    core = OneEngine()
    return Simulation(core, world()), core


def admit(simulation: Simulation, script: TrajectoryScript, rollout: RolloutId) -> None:
    simulation.driver.admit(ScriptedAgent(script, simulation.clock), rollout)


def test_two_rollouts_under_two_weights_versions_run_at_once():
    run, core = simulation()
    run.driver.open_rollout(R1, trajectories=1, weights_version=4)
    run.driver.open_rollout(R2, trajectories=2, weights_version=5)
    admit(run, answer("a", 100, 9), R1)
    admit(run, answer("b", 100, 1), R2)
    admit(run, answer("c", 100, 1, arrival_s=20.0), R2)
    run.run()
    started = [e for e in core.events if isinstance(e, RolloutStarted)]
    assert [(e.rollout, e.trajectories, e.weights_version) for e in started] == [
        (R1, 1, 4),
        (R2, 2, 5),
    ]
    arrived = {e.trajectory: e.rollout for e in core.events if isinstance(e, TrajectoryArrived)}
    assert arrived == {"a": R1, "b": R2, "c": R2}
    assert core.of(TrajectoryFinished)[-1] == (22.0, "c")


def test_an_open_rollout_takes_agents_until_it_is_closed():
    run, core = simulation()
    driver, clock = run.driver, run.clock
    driver.open_rollout(R1)
    admit(run, answer("a", 100, 1), R1)
    clock.call_at(50.0, admit, run, answer("b", 100, 1, arrival_s=7.0), R1)
    clock.call_at(60.0, admit, run, answer("c", 100, 1, arrival_s=65.0), R1)
    clock.call_at(70.0, driver.close_rollout, R1)
    run.run()
    assert core.of(TrajectoryArrived) == [(0.0, "a"), (50.0, "b"), (65.0, "c")]
    assert core.of(TrajectoryFinished) == [(2.0, "a"), (52.0, "b"), (67.0, "c")]
    assert core.of(RolloutClosed) == [(70.0, R1)]


def test_an_open_rollout_without_work_is_not_stuck():
    run, core = simulation()
    run.driver.open_rollout(R1)
    run.clock.call_at(1000.0, run.driver.close_rollout, R1)
    run.run()
    assert core.of(RolloutClosed) == [(1000.0, R1)]


def test_a_run_that_could_go_on_is_stuck_as_soon_as_it_cannot():
    run, core = simulation()
    later: list[float] = []

    def handle(event: Event) -> Sequence[Command]:
        return [] if isinstance(event, TrajectoryArrived) else OneEngine.handle(core, event)

    core.handle = handle  # type: ignore[method-assign]
    run.driver.open_rollout(R1)
    run.clock.call_at(10.0, admit, run, answer("a", 100, 1), R1)
    run.clock.call_at(20.0, run.driver.close_rollout, R1)
    run.clock.call_at(100.0, later.append, 100.0)
    with pytest.raises(StuckError, match=r"1 trajectories cannot go on at 20\.0 s"):
        run.run()
    assert later == []


@pytest.mark.parametrize("announced", [None, 5])
@pytest.mark.parametrize("policy", ["verl", "heddle", "heddle-paper"])
def test_agents_admitted_before_the_close_may_arrive_after_it(policy, announced):
    controller = Controller(policy_of(policy, Scenario()))
    run = Simulation(controller, world())
    run.driver.open_rollout(R1, trajectories=announced)
    admit(run, answer("a", 100, 1), R1)
    admit(run, answer("b", 100, 1, arrival_s=20.0), R1)
    run.driver.close_rollout(R1)
    run.run()
    assert R1 in controller.rollouts.closed
    assert not controller.ledger.trajectories


@pytest.mark.parametrize("interval_s", [0.0, 1.0])
def test_a_simulation_in_which_nothing_is_left_to_happen_ends(interval_s):
    run = Simulation(OneEngine(), world(report_interval_s=interval_s))
    run.run()
    run.driver.open_rollout(R1)
    admit(run, answer("a", 100, 1), R1)
    with pytest.raises(StuckError, match="these rollouts are open: r1"):
        run.run()
    run.driver.close_rollout(R1)
    run.run()
    assert run.driver.open_rollouts == ()


def test_samples_go_on_with_the_next_agent_of_an_open_rollout():
    core = OneEngine()
    run = Simulation(core, world(report_interval_s=1.0, report_delay_s=0.0))
    run.driver.open_rollout(R1)
    admit(run, answer("a", 100, 1), R1)
    run.clock.call_at(50.0, admit, run, answer("b", 100, 9), R1)
    run.clock.call_at(60.0, run.driver.close_rollout, R1)
    run.run()
    times = [e.time_s for e in core.events if isinstance(e, EngineReported)]
    assert times[:4] == [1.0, 2.0, 51.0, 52.0]


def test_a_rollout_that_is_over_at_once_does_not_end_the_others():
    run, core = simulation()
    run.driver.open_rollout(R1, trajectories=0)
    run.driver.open_rollout(R2, trajectories=1)
    admit(run, answer("a", 100, 1), R2)
    run.run()
    assert core.of(TrajectoryFinished) == [(2.0, "a")]


def test_a_run_that_was_interrupted_takes_nothing_in():
    run, core = simulation()
    driver = run.driver
    driver.open_rollout(R1)
    admit(run, answer("a", 100, 50), R1)
    run.clock.call_at(3.0, driver.interrupt, 5.0)

    def late() -> None:
        with pytest.raises(RolloutError, match="trajectory b cannot be admitted: the run is"):
            admit(run, answer("b", 100, 1), R1)

    run.clock.call_at(3.0, late)
    run.run()
    assert [e.outcome for e in core.events if isinstance(e, TrajectoryFinished)] == ["cancelled"]
    with pytest.raises(RolloutError, match="rollout r2 cannot be opened: the run has ended"):
        driver.open_rollout(R2)


def test_a_closed_run_cancels_its_tool_calls_and_delivers_nothing_more():
    run, core = simulation()
    run.driver.open_rollout(R1, trajectories=1)
    cancelled_s: list[float] = []

    class Agent(ScriptedAgent):
        def cancel_tool(self) -> None:
            cancelled_s.append(run.clock.now_s)
            super().cancel_tool()

    agent = Agent(script("a", step(100, 1, tool_s=50.0), step(100, 1)), run.clock)
    run.driver.admit(agent, R1)
    run.clock.call_at(10.0, run.driver.close)
    with pytest.raises(StuckError):
        run.run()
    assert core.of(ToolStarted) == [(2.0, "a")]
    assert cancelled_s == [10.0]
    assert max(event.time_s for event in core.events) <= 10.0


def test_what_cannot_be_taken_in_is_named():
    run, _ = simulation()
    driver = run.driver
    driver.open_rollout(R1, trajectories=1)
    with pytest.raises(RolloutError, match="rollout r1 is open already"):
        driver.open_rollout(R1)
    with pytest.raises(RolloutError, match="rollout r2 is not open"):
        admit(run, answer("a", 100, 1), R2)
    with pytest.raises(RolloutError, match="rollout r2 is not open"):
        driver.close_rollout(R2)
    admit(run, answer("a", 100, 1), R1)
    with pytest.raises(RolloutError, match="rollout r1 has all of its 1 trajectories"):
        admit(run, answer("b", 100, 1), R1)
    driver.open_rollout(R2)
    with pytest.raises(RolloutError, match="trajectory a is here already"):
        admit(run, answer("a", 100, 1), R2)
    with pytest.raises(RolloutError, match="rollout r3 cannot have -1 trajectories"):
        driver.open_rollout(RolloutId("r3"), trajectories=-1)
    driver.close_rollout(R2)
    with pytest.raises(RolloutError, match="rollout r2 was open before: give it a name of its own"):
        driver.open_rollout(R2)


def test_memory_is_flat_over_rollouts_one_after_the_other():
    run, core = simulation()

    def alive() -> int:
        gc.collect()
        kept = ("ScriptedAgent", "_Trajectory", "_Rollout", "SimEngineClient")
        return sum(type(o).__name__ in kept for o in gc.get_objects())

    def rollout(number: int) -> None:
        name = RolloutId(f"r{number}")
        run.driver.open_rollout(name, trajectories=20)
        for i in range(20):
            steps = step(100, 2, tool_s=1.0), step(110, 2, shared=102, tool=None)
            admit(run, script(f"{name}/{i}", *steps), name)
        run.run()
        core.events.clear()

    rollout(0)
    after_one = alive()
    for number in range(1, 50):
        rollout(number)
    assert alive() == after_one, "finished agents are kept"


def test_a_pause_holds_dispatches_back_and_running_steps_go_on():
    run, core = simulation()
    run.driver.open_rollout(R1, trajectories=3)
    admit(run, answer("a", 100, 9), R1)  # from 0 to 10.8
    admit(run, answer("b", 100, 1, arrival_s=5.0), R1)
    admit(run, answer("c", 100, 1, arrival_s=6.0), R1)
    run.clock.call_at(4.0, run.driver.pause)
    run.clock.call_at(5.5, run.driver.pause)  # a second one changes nothing
    run.clock.call_at(
        7.0, lambda: run.driver.cancel(Cancel(trajectory=TrajectoryId("c"), reason=""))
    )
    run.clock.call_at(100.0, run.driver.resume)
    run.run()
    assert core.of(StepFinished) == [(10.8, "a"), (102.0, "b")]
    assert core.of(TrajectoryFinished) == [(7.0, "c"), (10.8, "a"), (102.0, "b")]


def test_a_trajectory_that_is_cancelled_before_its_arrival_ends_as_it_arrives():
    run, core = simulation()
    run.driver.open_rollout(R1, trajectories=2)
    admit(run, answer("a", 100, 9, arrival_s=3.0), R1)
    admit(run, answer("b", 100, 1), R1)
    run.driver.cancel(Cancel(trajectory=A, reason=""))
    run.run()
    assert core.of(TrajectoryArrived) == [(0.0, "b"), (3.0, "a")]
    assert core.of(TrajectoryFinished) == [(2.0, "b"), (3.0, "a")]
    assert core.of(StepFinished) == [(2.0, "b")]


def test_a_step_on_an_engine_that_cannot_preempt_runs_to_its_end(monkeypatch):
    monkeypatch.setattr(
        "heddle_sim.engine_client.SimEngineClient.capabilities",
        EngineCapabilities(preempt=False, update_weights=False),
    )

    class Preempting(OneEngine):
        def handle(self, event: Event) -> Sequence[Command]:
            commands = super().handle(event)
            if isinstance(event, TrajectoryArrived) and event.trajectory == "b":
                return [*commands, Preempt(trajectory=A, step=0, engine=E0)]
            return commands

    core = Preempting()
    run = Simulation(core, world())
    run.driver.open_rollout(R1, trajectories=2)
    admit(run, answer("a", 100, 9), R1)
    admit(run, answer("b", 100, 1, arrival_s=4.0), R1)
    run.clock.call_at(5.0, run.driver.update_weights, 1, "")
    run.run()
    made = {e.trajectory: e.output_tokens for e in core.events if isinstance(e, StepFinished)}
    assert made == {"a": 9, "b": 1}


def test_kv_that_waits_for_another_engine_is_forgotten_with_its_trajectory(monkeypatch):
    forgotten: list[tuple[float, str, str]] = []
    prefill = EngineShape("g", 1, role="prefill")

    class Prefilling(OneEngine):
        def handle(self, event: Event) -> Sequence[Command]:
            if isinstance(event, RolloutStarted):
                return [StartEngine(engine=E0, shape=prefill, max_running=8)]
            commands = super().handle(event)
            if isinstance(event, TrajectoryArrived):
                return [msgspec.structs.replace(c, max_tokens=1) for c in commands]
            return commands

    core = Prefilling()
    run = Simulation(core, world())
    monkeypatch.setattr(
        "heddle_sim.engine_client.SimEngineClient.forget",
        lambda engine, name: forgotten.append((run.clock.now_s, engine.spec.engine, name)),
    )
    run.driver.open_rollout(R1)
    admit(run, answer("a", 100, 9), R1)
    run.clock.call_at(50.0, run.driver.cancel, Cancel(trajectory=A, reason=""))
    run.clock.call_at(60.0, run.driver.close_rollout, R1)
    run.run()
    assert core.of(StepPreempted) == [(2.0, "a")]
    assert forgotten == [(50.0, "e0", "a")]
