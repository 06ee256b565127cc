"""A rollout on an event loop, where no simulator can follow: refusals, interruption, hangs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from campaigns.faults.scenario import Scenario, policy_of, scripts_of, world_of
from heddle_core import Controller, Entry, Policy, collecting
from heddle_core.commands import Dispatch, Predict
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    Event,
    Predicted,
    StepFinished,
    StepPreempted,
    ToolReturned,
    TrajectoryFinished,
    WeightsUpdated,
)
from heddle_core.ids import EngineId
from heddle_rollout.agents import ToolListener
from heddle_rollout.core import RecordedCore
from heddle_rollout.driver import StuckError
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_rollout.services import ServiceListener
from heddle_runtime.clock import RunClock
from heddle_runtime.rollout import DRAIN_S, RolloutRun
from heddle_runtime.virtual_time import run_virtual
from heddle_sim.engine_client import SimEngineClient, SimLauncher
from heddle_trace import TrajectoryScript

CALM = Scenario(trajectories=16, faults=(), tool_capacity=None)
SCRIPTS = scripts_of("coding", 16, 3)


@dataclass
class Rollout:
    """A small rollout on fake engines, and what came of it."""

    policy: str = "verl"
    scripts: Sequence[TrajectoryScript] = SCRIPTS
    agent: type[ScriptedAgent] = ScriptedAgent
    faults: Sequence[tuple[float, EngineId]] = ()
    options: dict[str, Any] = field(default_factory=dict)
    meanwhile: Callable[[RolloutRun, RunClock], Awaitable[None]] | None = None
    entries: list[Entry] = field(default_factory=list)
    controller: Controller | None = None

    def run(self) -> "Rollout":
        run_virtual(self._main())
        return self

    async def _main(self) -> None:
        world = replace(
            world_of(CALM), transfer_fixed_s=0.02, transfer_bytes_per_s=2e10, engine_start_s=15.0
        )
        clock = RunClock(asyncio.get_running_loop())
        self.controller = controller = Controller(self._policy())
        launcher = SimLauncher(replace(world, faults=tuple(self.faults)), clock)
        launcher.schedule_faults()
        run = RolloutRun(
            [self.agent(script, clock) for script in self.scripts],
            RecordedCore(controller, collecting(self.entries)),
            launcher,
            clock,
            **self.options,
        )
        other = None
        if self.meanwhile is not None:
            other = asyncio.get_running_loop().create_task(self.meanwhile(run, clock))
        await run.run()
        if other is not None:
            await other
        controller.ledger.check()

    def _policy(self) -> Policy:
        return policy_of(self.policy, CALM)

    def events(self, kind: type[Event]) -> list[Any]:
        return [e.event for e in self.entries if isinstance(e.event, kind)]

    @property
    def outcomes(self) -> dict[str, str]:
        return {e.trajectory: e.outcome for e in self.events(TrajectoryFinished)}


def test_a_step_that_no_engine_can_take_fails_its_trajectory_and_no_other():
    giant = replace(SCRIPTS[0].steps[0], output_tokens=60_000)
    scripts = [replace(SCRIPTS[0], steps=(giant,)), *SCRIPTS[1:]]
    rollout = Rollout(scripts=scripts).run()
    assert rollout.outcomes.pop(SCRIPTS[0].id) == "failed"
    assert set(rollout.outcomes.values()) <= {"completed", "truncated", "failed"}
    assert [e.trajectory for e in rollout.events(StepFinished) if e.reason == "error"] == [
        SCRIPTS[0].id
    ]
    assert list(rollout.outcomes.values()).count("failed") == 1


class Hanging(ScriptedAgent):
    """Its second tool call never comes back."""

    def call_tool(self, listener: ToolListener) -> None:
        if self._index != 1 or self.id != SCRIPTS[0].id:
            super().call_tool(listener)


def test_a_tool_that_hangs_is_cut_at_its_limit_and_its_trajectory_goes_on():
    limit_s = 40.0
    rollout = Rollout(agent=Hanging, options={"tool_limit_s": limit_s}).run()
    cut = [
        e
        for e in rollout.events(ToolReturned)
        if e.trajectory == SCRIPTS[0].id and e.step == 1 and e.ok is False
    ]
    assert len(cut) == 1
    ended = next(
        e for e in rollout.events(StepFinished) if e.trajectory == SCRIPTS[0].id and e.step == 1
    )
    assert cut[0].time_s - ended.time_s == pytest.approx(limit_s)
    assert rollout.outcomes[SCRIPTS[0].id] in ("completed", "truncated")


class Failing(ScriptedAgent):
    def call_tool(self, listener: ToolListener) -> None:
        raise RuntimeError("the tool has a defect")


class FailingLater(ScriptedAgent):
    def call_tool(self, listener: ToolListener) -> None:
        error = RuntimeError("the tool has a defect")
        self._clock.call_after(1.0, listener.tool_failed, self.id, error)


@pytest.mark.parametrize("agent", [Failing, FailingLater])
def test_a_defect_in_a_tool_ends_the_run_with_that_error(agent):
    with pytest.raises(RuntimeError, match="the tool has a defect"):
        Rollout(agent=agent).run()


def test_a_defect_in_a_policy_ends_the_run_with_that_error():
    rollout = Rollout()
    rollout._policy = lambda: replace(policy_of("verl", CALM), placement=Broken())
    with pytest.raises(ZeroDivisionError):
        rollout.run()


class Broken:
    needs_all = False

    def place(self, *_: Any) -> EngineId:
        return EngineId(str(1 // 0))

    def finished(self, *_: Any) -> None:
        """Forget nothing."""


def test_every_engine_dead_for_good_is_said_not_waited_for():
    lives = ["", "+1", "+2", "+3"]
    faults = [
        (10.0 + 40 * j, EngineId(f"e{i}{life}")) for i in range(8) for j, life in enumerate(lives)
    ]
    rollout = Rollout(faults=faults)
    says = (
        r"0 engines are alive and nothing is running; the last to fail was e\d\+3: injected fault"
    )
    with pytest.raises(StuckError, match=says):
        rollout.run()
    assert len(rollout.events(EngineFailed)) == 32


def test_a_dead_engines_trajectories_go_on_with_the_tokens_they_had():
    rollout = Rollout(faults=[(20.0, EngineId("e0")), (21.0, EngineId("e1"))]).run()
    made = dict.fromkeys(rollout.outcomes, 0)
    for event in (*rollout.events(StepFinished), *rollout.events(StepPreempted)):
        made[event.trajectory] += event.output_tokens
    salvaged = [s for e in rollout.events(EngineFailed) for s in e.salvaged]
    assert sum(tokens for _, tokens in salvaged) > 0
    for trajectory, tokens in salvaged:
        made[trajectory] += tokens
    assert made == {s.id: sum(step.output_tokens for step in s.steps) for s in SCRIPTS}
    assert len(rollout.events(EngineReady)) == 8 + 2


async def interrupt_at(time_s: float, run: RolloutRun, clock: RunClock) -> None:
    await clock.sleep(time_s)
    await run.interrupt()


@pytest.mark.parametrize("time_s", [0.0, 0.5, 13.0, 30.0])
def test_an_interrupted_run_keeps_its_tokens_and_cancels_what_had_come(time_s):
    rollout = Rollout(policy="heddle", meanwhile=partial(interrupt_at, time_s)).run()
    outcomes = rollout.outcomes
    assert len(outcomes) == 16
    assert "cancelled" in outcomes.values()
    open_steps = {
        c.trajectory: entry.event.time_s
        for entry in rollout.entries
        for c in entry.commands
        if isinstance(c, Dispatch)
    }
    assert set(open_steps) <= set(outcomes)
    assert rollout.controller.ledger.unfinished == 0


def test_a_prediction_service_that_fails_leaves_the_last_estimate():
    class Gone:
        def predict(self, command: Predict, listener: ServiceListener) -> None:
            asyncio.get_running_loop().call_soon(listener.predicted, command, None)

    rollout = Rollout(policy="heddle+served", options={"predictions": Gone()}).run()
    answers = rollout.events(Predicted)
    assert answers
    assert all(e.remaining_tokens is None for e in answers)
    assert set(rollout.outcomes.values()) <= {"completed", "truncated"}


async def push_weights(run: RolloutRun, clock: RunClock) -> None:
    await clock.sleep(25.0)
    run.driver.update_weights(7, "")


def test_new_weights_are_told_to_the_core_and_void_the_cache():
    plain, pushed = Rollout().run(), Rollout(meanwhile=push_weights).run()
    assert [e.version for e in pushed.events(WeightsUpdated)] == [7]
    assert pushed.controller.ledger.weights_version == 7

    def cached(rollout: Rollout) -> int:
        return sum(e.cached_tokens for e in rollout.events(StepFinished))

    assert cached(pushed) < cached(plain)


def interrupted(time_s: float) -> tuple[Rollout, dict[str, float]]:
    """A run that is interrupted, and the steps that ran then: when each trajectory's began."""
    rollout = Rollout(meanwhile=partial(interrupt_at, time_s)).run()
    running: dict[str, float] = {}
    for entry in rollout.entries:
        if entry.event.time_s > time_s:
            break
        for command in entry.commands:
            if isinstance(command, Dispatch):
                running[command.trajectory] = entry.event.time_s
        if isinstance(entry.event, StepFinished | StepPreempted):
            running.pop(entry.event.trajectory, None)
    return rollout, running


def test_an_interruption_waits_for_the_tokens_of_every_running_step():
    time_s = 13.0
    rollout, running = interrupted(time_s)
    assert running
    ended = {
        e.trajectory: (e.time_s, e.output_tokens)
        for e in (*rollout.events(StepFinished), *rollout.events(StepPreempted))
        if e.time_s >= time_s
    }
    closed = {e.trajectory: e.time_s for e in rollout.events(TrajectoryFinished)}
    assert ended.keys() >= running.keys()
    assert sum(tokens for _, tokens in ended.values()) > 0
    assert all(ended[trajectory][0] <= closed[trajectory] for trajectory in running)
    # Over as soon as the last of them is there, and not only at the limit.
    assert max(closed.values()) == max(at for at, _ in ended.values()) < time_s + DRAIN_S


def test_an_interruption_waits_no_longer_than_its_limit(monkeypatch):
    """Engines that do not follow an abort go on with their steps."""
    monkeypatch.setattr(SimEngineClient, "abort", lambda engine, trajectory: None)
    rollout, running = interrupted(13.0)
    closed = {e.trajectory: e.time_s for e in rollout.events(TrajectoryFinished)}
    assert running.keys() <= closed.keys()
    assert max(closed.values()) == pytest.approx(13.0 + DRAIN_S)
    assert "cancelled" in rollout.outcomes.values()
