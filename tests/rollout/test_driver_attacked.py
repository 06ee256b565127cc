"""The driver among hostile engines, tools and policies: all ends, nothing is lost."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaigns.faults.books import Books
from campaigns.faults.scenario import GPUS, HandledCore, Scenario, policy_of, scripts_of, world_of
from heddle_core import Controller, Entry, collecting, recorded
from heddle_core.commands import (
    Cancel,
    Command,
    Dispatch,
    Migrate,
    Preempt,
    StartEngine,
    StopEngine,
)
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    Event,
    StepPreempted,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_rollout.agents import NextAction, ToolListener
from heddle_rollout.core import Core, RecordedCore
from heddle_rollout.driver import StuckError
from heddle_rollout.engines import StepRequest, StepResult
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_rollout.services import CoreEstimates
from heddle_runtime.clock import RunClock
from heddle_runtime.rollout import RolloutRun
from heddle_runtime.virtual_time import run_virtual
from heddle_sim.engine_client import SimLauncher
from heddle_trace import TrajectoryScript
from tests.rollout.hostile import HostileLauncher

CALM = Scenario(trajectories=16, faults=(), tool_capacity=None)
SCRIPTS = [replace(s, steps=s.steps[:4]) for s in scripts_of("coding", 16, 3)]
FOREVER_S = 5e3
"""Virtual: far beyond the end of any of these rollouts."""
seeds = st.integers(0, 2**32)


class HostileBooks(Books):
    """Engines may die before they are ready; agents may fail."""

    def opened(self, command: Command) -> None:
        super().opened(command)
        if isinstance(command, StopEngine) and not command.drain:
            for trajectory, step in self.running.items():
                if step.engine == command.engine:
                    ask = Preempt(trajectory=trajectory, step=step.step, engine=step.engine)
                    self.preempting.setdefault(trajectory, ask)

    def leave(self, engine: EngineId) -> None:
        self.starting.pop(engine, None)
        self.alive.pop(engine, None)
        self.gone[engine] = None


class HostileAgent(ScriptedAgent):
    """Its tools return at once, late, or never."""

    rng = Random(0)

    def call_tool(self, listener: ToolListener) -> None:
        chance = self.rng.random()
        if chance < 0.05:
            return
        if chance < 0.5:
            self.answer_soon(listener)
        else:
            super().call_tool(listener)

    def answer_soon(self, listener: ToolListener) -> None:
        self._clock.call_after(0.0, lambda: listener.tool_returned(self.id, self._next_step(None)))


async def ends(run: RolloutRun) -> None:
    async with asyncio.timeout(FOREVER_S):
        await run.run()


@settings(max_examples=150)
@given(
    seeds,
    st.sampled_from(["verl", "slime", "heddle", "heddle-paper", "heddle+exact+served"]),
    st.sampled_from([0.0, 0.003, 0.02]),
    st.sampled_from([0.0, 0.02]),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([1.0, 0.1, 7.0]),
)
def test_whatever_engines_do_every_trajectory_ends_and_no_token_is_made_twice(
    seed, policy, deadly, refuses, tool_capacity, speed
):
    rng = Random(seed)
    entries: list[Entry] = []
    books = HostileBooks(GPUS)

    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop(), speed=speed)
        controller = Controller(policy_of(policy, CALM))
        agents = [HostileAgent(script, clock) for script in SCRIPTS]
        for agent in agents:
            agent.rng = rng
        run = RolloutRun(
            agents,
            HandledCore(recorded(books.watched(controller), collecting(entries)), controller),
            HostileLauncher(rng, deadly=deadly, refuses=refuses),
            clock,
            tool_limit_s=50.0,
            tool_capacity=tool_capacity,
            predictions=CoreEstimates(clock, 0.6),
        )
        await ends(run)

    try:
        run_virtual(main())
    except StuckError:
        assert not books.alive
        assert not books.running
        return
    books.closed()
    allowed = {"completed", "truncated"} | ({"failed"} if refuses else set())
    assert set(books.finished.values()) <= allowed
    wanted = {s.id: sum(step.output_tokens for step in s.steps) for s in SCRIPTS}
    for trajectory, outcome in books.finished.items():
        if outcome != "failed":
            assert books.made[trajectory] == wanted[trajectory]


class Commander:
    """Commands whatever the protocol allows, without any sense. Keeps going by its deadline."""

    def __init__(self, rng: Random, books: HostileBooks, *, migrates: bool = True) -> None:
        self._rng, self._books, self._migrates = rng, books, migrates
        self._runnable: dict[TrajectoryId, int] = {}
        self._home: dict[TrajectoryId, EngineId] = {}
        self._started = 0
        self.deadline_s: float | None = None

    def handle(self, event: Event) -> Sequence[Command]:
        books = self._books
        books.took_place(event)
        self._note(event)
        out: list[Command] = []
        for command in self._wishes(event):
            books.opened(command)
            out.append(command)
        self.deadline_s = event.time_s + 1.0
        return out

    def _note(self, event: Event) -> None:
        match event:
            case TrajectoryArrived():
                self._runnable[event.trajectory] = 0
            case StepPreempted():
                self._runnable[event.trajectory] = event.step
            case ToolReturned():
                self._runnable[event.trajectory] = event.step + 1
            case EngineFailed():
                for trajectory, _ in event.salvaged:
                    self._runnable[trajectory] = self._books.steps[trajectory]
            case TrajectoryFinished():
                self._runnable.pop(event.trajectory, None)

    def _wishes(self, event: Event) -> Sequence[Command]:
        rng, books = self._rng, self._books
        accepting = [e for e in books.alive if e not in books.stopping]
        wishes: list[Command] = []
        present = len(books.alive) + len(books.starting)
        if len(accepting) + len(books.starting) < 3 and present < books.gpus:
            name = EngineId(f"x{self._started}")
            self._started += 1
            wishes.append(StartEngine(engine=name, shape=EngineShape("h100", 1), max_running=4))
        for trajectory, step in list(self._runnable.items()):
            if accepting and trajectory not in books.moving and rng.random() < 0.7:
                engine = rng.choice(accepting)
                self._home[trajectory] = engine
                del self._runnable[trajectory]
                wishes.append(
                    Dispatch(trajectory=trajectory, step=step, engine=engine, priority=0.0)
                )
        asked = [c.engine for c in books.preempting.values()]
        for trajectory, command in books.running.items():
            if rng.random() < 0.1 and command.engine not in asked:
                asked.append(command.engine)
                wishes.append(
                    Preempt(trajectory=trajectory, step=command.step, engine=command.engine)
                )
        if self._migrates:
            for trajectory in books.in_tool:
                home = self._home[trajectory]
                others = [e for e in accepting if e != home]
                can = home in books.alive and others and trajectory not in books.moving
                if can and rng.random() < 0.3:
                    target = rng.choice(others)
                    self._home[trajectory] = target
                    wishes.append(Migrate(trajectory=trajectory, source=home, target=target))
        if rng.random() < 0.05 and accepting:
            used = [c.engine for c in wishes if isinstance(c, Dispatch)]
            used += [c.target for c in wishes if isinstance(c, Migrate)]
            free = [e for e in accepting if e not in used]
            if free:
                wishes.append(StopEngine(engine=rng.choice(free), drain=rng.random() < 0.5))
        for trajectory in list(self._runnable):
            if rng.random() < 0.01 and trajectory not in books.moving:
                del self._runnable[trajectory]
                wishes.append(Cancel(trajectory=trajectory, reason="a whim"))
        return wishes


def set_out(
    core: Core,
    launcher: HostileLauncher,
    clock: RunClock,
    rng: Random,
    **options: Any,
) -> RolloutRun:
    agents = [HostileAgent(script, clock) for script in SCRIPTS]
    for agent in agents:
        agent.rng = rng
    return RolloutRun(agents, core, launcher, clock, tool_limit_s=50.0, **options)


@settings(max_examples=100)
@given(seeds, st.sampled_from([0.0, 0.003, 0.02]), st.sampled_from([None, 3]))
def test_whatever_is_commanded_each_command_ends_once(seed, deadly, tool_capacity):
    rng = Random(seed)
    books = HostileBooks(GPUS)

    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop())
        commander = Commander(rng, books)
        launcher = HostileLauncher(rng, deadly=deadly)
        run = set_out(
            commander,
            launcher,
            clock,
            rng,
            tool_capacity=tool_capacity,
        )
        await ends(run)

    run_virtual(main())
    books.closed()
    wanted = {s.id: sum(step.output_tokens for step in s.steps) for s in SCRIPTS}
    for trajectory, outcome in books.finished.items():
        if outcome != "cancelled":
            assert books.made[trajectory] == wanted[trajectory]


@settings(max_examples=100)
@given(
    seeds,
    st.sampled_from(["verl", "heddle", "heddle+exact+served"]),
    st.sampled_from([0.0, 0.02]),
    st.sampled_from([0.0, 0.001, 0.5, 3.0, 20.0, 60.0]),
    st.sampled_from(["interrupt", "cancel", "both"]),
)
def test_an_aborted_run_ends_and_leaves_no_task(seed, policy, deadly, after_s, how):
    rng = Random(seed)
    entries: list[Entry] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        clock = RunClock(loop)
        controller = Controller(policy_of(policy, CALM))
        core = RecordedCore(controller, collecting(entries))
        run = set_out(core, HostileLauncher(rng, deadly=deadly), clock, rng)
        running = loop.create_task(run.run())
        await asyncio.sleep(after_s)
        began_s = loop.time()
        if how != "cancel":
            winding_up = loop.create_task(run.interrupt())
            await asyncio.sleep(rng.choice([0.0, 0.03, 1.0]) if how == "both" else FOREVER_S)
        if how != "interrupt":
            running.cancel()
        await asyncio.wait([running])
        if how == "interrupt":
            await winding_up
            assert running.exception() is None or isinstance(running.exception(), StuckError)
            controller.ledger.check()
            delivered = [e.event for e in entries]
            arrived = [e.trajectory for e in delivered if isinstance(e, TrajectoryArrived)]
            ended = [e.trajectory for e in delivered if isinstance(e, TrajectoryFinished)]
            if running.exception() is None:
                assert sorted(arrived) == sorted(ended)
        elif how == "both":
            await winding_up
        assert loop.time() - began_s <= FOREVER_S + 10.0
        heard = len(entries)
        await asyncio.sleep(100.0)  # engines go on reporting, without a listener
        assert len(entries) == heard
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


@settings(max_examples=40)
@given(
    st.sampled_from(["verl", "slime", "heddle", "heddle-paper", "heddle+exact+served"]),
    st.lists(
        st.tuples(
            st.floats(0.0, 60.0) | st.integers(0, 60).map(float),
            st.integers(0, 7),
            st.sampled_from(["", "+1", "+2"]),
        ),
        max_size=12,
    ),
    st.sampled_from([0.001, 0.5]),
    st.floats(0.0, 60.0),
)
def test_simulated_engines_may_die_at_any_moment(policy, deaths, transfer_s, push_s):
    books = HostileBooks(GPUS)

    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop())
        controller = Controller(policy_of(policy, CALM))
        config = replace(
            world_of(CALM),
            transfer_fixed_s=transfer_s,
            transfer_bytes_per_s=1e18,
            engine_start_s=7.0,
            faults=tuple((time_s, EngineId(f"e{i}{life}")) for time_s, i, life in deaths),
        )
        launcher = SimLauncher(config, clock)
        launcher.schedule_faults()
        run = RolloutRun(
            [ScriptedAgent(script, clock) for script in SCRIPTS],
            HandledCore(books.watched(controller), controller),
            launcher,
            clock,
            predictions=CoreEstimates(clock, 0.6),
        )
        clock.call_at(push_s, lambda: run.driver.update_weights(1, ""))
        await ends(run)

    run_virtual(main())
    books.closed()
    assert set(books.finished.values()) <= {"completed", "truncated"}
    made = {s.id: sum(step.output_tokens for step in s.steps) for s in SCRIPTS}
    assert dict(books.made) == made


# -- single defects, each once found --------------------------------------------------------------


class Faulty(HostileAgent):
    """Fails in the call named by `place`, in its second step."""

    place = ""

    def _fault(self, place: str) -> None:
        if self.place == place and self._index == 1:
            raise ZeroDivisionError(place)

    def request(self) -> StepRequest:
        self._fault("request")
        return super().request()

    def on_step_end(self, result: StepResult) -> None:
        self._fault("on_step_end")
        super().on_step_end(result)

    def next_action(self) -> NextAction:
        self._fault("next_action")
        return super().next_action()

    def call_tool(self, listener: ToolListener) -> None:
        self._fault("call_tool")
        self.answer_soon(listener)


def rollout(
    agent: Callable[[TrajectoryScript, RunClock], ScriptedAgent] = HostileAgent,
    *,
    meanwhile: Callable[[RolloutRun, RunClock, HostileLauncher], Awaitable[None]] | None = None,
    speed: float = 1.0,
    policy: str = "verl",
    **options: Any,
) -> list[Entry]:
    """Run one under a policy, on engines that never die."""
    entries: list[Entry] = []

    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop(), speed=speed)
        controller = Controller(policy_of(policy, CALM))
        launcher = HostileLauncher(Random(1), deadly=0.0)
        run = RolloutRun(
            [agent(script, clock) for script in SCRIPTS],
            RecordedCore(controller, collecting(entries)),
            launcher,
            clock,
            **options,
        )
        other = asyncio.create_task(meanwhile(run, clock, launcher)) if meanwhile else None
        await ends(run)
        if other is not None:
            await other

    run_virtual(main())
    return entries


@pytest.mark.parametrize("place", ["request", "on_step_end", "next_action", "call_tool"])
def test_a_defect_anywhere_in_an_agent_ends_the_run_with_that_error(place):
    def agent(script: TrajectoryScript, clock: RunClock) -> Faulty:
        made = Faulty(script, clock)
        made.place = place
        return made

    with pytest.raises(ZeroDivisionError, match=place):
        rollout(agent)


class TimedOut(HostileAgent):
    def call_tool(self, listener: ToolListener) -> None:
        error = TimeoutError("the tool's own: its connection timed out")
        self._clock.call_after(0.0, listener.tool_failed, self.id, error)


def test_a_tools_own_timeout_is_not_taken_for_the_limit():
    with pytest.raises(TimeoutError, match="the tool's own"):
        rollout(TimedOut, tool_limit_s=1000.0)


class Hanging(HostileAgent):
    def call_tool(self, listener: ToolListener) -> None:
        pass


def test_the_limit_of_tools_is_counted_on_the_runs_clock():
    entries = rollout(Hanging, tool_limit_s=50.0, speed=10.0)
    began = {}
    for event in [e.event for e in entries]:
        if isinstance(event, ToolStarted):
            began[event.trajectory, event.step] = event.time_s
        elif isinstance(event, ToolReturned):
            took_s = event.time_s - began[event.trajectory, event.step]
            assert took_s == pytest.approx(50.0)
            assert event.ok is False
    assert began


def test_engines_that_get_ready_after_a_push_load_the_pushed_weights():
    pushed: list[str] = []
    updates: list[list[tuple[EngineId, int]]] = []

    async def push(run: RolloutRun, clock: RunClock, launcher: HostileLauncher) -> None:
        await clock.sleep(1.0)
        run.driver.update_weights(7, "")
        pushed.extend(e.spec.engine for e in launcher.engines)
        victim = launcher.engines[0]
        victim._die()
        updates.append(launcher.updates)

    entries = rollout(meanwhile=push, tool_limit_s=50.0)
    ready = [e.event.engine for e in entries if isinstance(e.event, EngineReady)]
    assert len(ready) == len(pushed) + 1
    assert dict(updates[0]) == dict.fromkeys(ready, 7)


def test_an_interruption_that_meets_an_error_still_ends_the_run():
    async def interrupt(run: RolloutRun, clock: RunClock, launcher: HostileLauncher) -> None:
        await clock.sleep(1.0)
        for engine in launcher.engines:
            engine.abort = Exploding()  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await run.interrupt()

    entries = rollout(Hanging, meanwhile=interrupt)
    ended = [e.event for e in entries if isinstance(e.event, TrajectoryFinished)]
    assert len(ended) == len(SCRIPTS)
    assert {e.outcome for e in ended} == {"cancelled"}


class Exploding:
    def __call__(self, trajectory: TrajectoryId) -> None:
        raise ConnectionError("the pipe is broken")


def test_an_error_in_a_callback_of_the_loop_ends_the_run():
    async def fail(run: RolloutRun, clock: RunClock, launcher: HostileLauncher) -> None:
        await clock.sleep(1.0)
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        rollout(Hanging, meanwhile=fail)
