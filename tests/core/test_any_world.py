"""Hostile drivers: any legal order of replies, engines dying at any point, replies racing.

Up to three rollouts are open at once, announced or open for any number, under different weights
versions. After every event the ledger's invariants hold, and so do those that need the world's own
record: commands end once (2), dead engines get no command (9), waiting implies no free slot (7),
tokens are neither lost nor made twice (10), engines never have more GPUs than there are (11), and a
closed rollout leaves its summary and nothing else (12). At the end the events replay on a fresh
controller (5).
"""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from heddle_core import Controller, Entry, first_divergence
from heddle_core.commands import (
    Cancel,
    Command,
    Dispatch,
    Migrate,
    Predict,
    Preempt,
    SolvePlan,
    StartEngine,
    StopEngine,
)
from heddle_core.events import (
    EngineFailed,
    EngineJoined,
    EngineReady,
    EngineRecalled,
    EngineReported,
    EngineStopped,
    Event,
    MigrationFinished,
    PlanSolved,
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
    WeightsUpdated,
)
from heddle_core.ids import EngineId, EngineShape, GroupId, RolloutId, TrajectoryId
from tests.core.contrary import GPUS, beside, contrary

KV_CAPACITY = 400
"""Small against the prompts drawn below, so that KV, too, is refused and some never fit."""


@dataclass
class Open:
    """A rollout in the driver's books."""

    id: RolloutId
    announced: int | None
    version: int
    arrived: int = 0
    ended: int = 0

    @property
    def accepts(self) -> bool:
        return self.announced is None or self.arrived < self.announced

    @property
    def over(self) -> bool:
        return not self.accepts and self.ended == self.arrived


class HostileWorld(RuleBasedStateMachine):
    @initialize(
        needs_all=st.booleans(),
        served=st.booleans(),
        awaited=st.booleans(),
        announced=st.none() | st.integers(0, 6),
        late=st.booleans(),
        backlog=st.booleans(),
        chunks=st.booleans(),
        failures=st.integers(0, 12),
        threshold=st.none() | st.sampled_from([0, 30, 100]),
    )
    def begin(
        self,
        needs_all: bool,
        served: bool,
        awaited: bool,
        announced: int | None,
        late: bool,
        backlog: bool,
        chunks: bool,
        failures: int,
        threshold: int | None,
    ) -> None:
        """`late`: hostility begins when all have arrived and all engines are ready. With a
        `threshold`, two engines prefill for the others.

        Failures are limited, as reports are, so that what takes many steps happens too.
        """
        self.failures, self.reports = failures, 4
        self.kind = {
            "needs_all": needs_all,
            "served": served,
            "awaited": awaited,
            "backlog": backlog,
            "chunks": chunks,
            "role": "both" if threshold is None else "decode",
        }
        self.beside = None if threshold is None else beside(threshold)
        self.gpus = GPUS if threshold is None else GPUS + 2
        self.controller = Controller(contrary(**self.kind), self.beside)
        self.now_s = 0.0
        self.entries: list[Entry] = []
        self.arrived = 0
        self.rollouts: dict[RolloutId, Open] = {}
        self.closed: dict[RolloutId, Open] = {}
        self.rollout_of: dict[TrajectoryId, Open] = {}
        self.running: dict[TrajectoryId, Dispatch] = {}
        self.leaving: dict[TrajectoryId, Preempt] = {}
        self.moving: dict[TrajectoryId, Migrate] = {}
        self.asked: list[Predict] = []
        self.answered: TrajectoryId | None = None
        """Whose prediction is being delivered."""
        self.returned: TrajectoryId | None = None
        """Whose tool's return is being delivered."""
        self.solving: list[SolvePlan] = []
        self.starting: dict[EngineId, StartEngine] = {}
        self.alive: dict[EngineId, StartEngine] = {}
        self.stopping: dict[EngineId, StopEngine] = {}
        self.dead: list[EngineId] = []
        self.joined: list[str] = []
        """Names of engines that their owners have brought, recalled or not."""
        self.cancelled: list[TrajectoryId] = []
        self.before_tool: dict[TrajectoryId, int] = {}
        self.in_tool: dict[TrajectoryId, int] = {}
        self.made: dict[TrajectoryId, int] = {}
        self.over: list[TrajectoryId] = []
        self.start_rollout(announced, version=0)
        if late:
            while self.arrived < (announced or 0):
                self.admit(RolloutId("r0"), prompt=40 + self.arrived, group=self.arrived % 2)
            for command in self.solving:
                plan = command.problem.solve()
                self.say(PlanSolved(time_s=self.later(1), plan=command.plan, resource_plan=plan))
            self.solving.clear()
            for engine in list(self.starting):
                self.become_ready(engine)

    def say(self, event: Event) -> None:
        commands = self.controller.handle(event)
        cause = len(self.entries)
        self.entries.append(Entry(event, commands))
        for command in commands:
            assert command.cause == cause
            self.obey(command)

    def obey(self, command: Command) -> None:
        match command:
            case Dispatch():
                assert command.engine in self.alive, "a command to an engine that is not alive"
                assert command.engine not in self.stopping
                assert command.trajectory not in self.running, "runs twice"
                assert command.trajectory not in self.moving, "runs while its KV moves"
                if command.engine.startswith("p"):
                    assert command.max_tokens == 1
                waits = [c.trajectory for c in self.asked if self.kind["awaited"]]
                assert command.trajectory not in waits, "runs before its prediction"
                self.running[command.trajectory] = command
            case Preempt():
                assert self.running[command.trajectory].engine == command.engine
                brought = command.engine.name in self.joined
                assert not (brought and command.engine in self.stopping), "it drains, or is stopped"
                assert command.trajectory not in self.leaving, "asked twice"
                self.leaving[command.trajectory] = command
            case Migrate():
                assert command.source in self.alive
                assert command.target in self.alive
                moves = command.trajectory in (*self.in_tool, self.returned) or (
                    self.kind["awaited"] and command.trajectory == self.answered
                )
                if command.copy:
                    assert "p" in (command.source[0], command.target[0])
                    assert command.trajectory not in self.running
                    moves = self.beside is not None
                assert moves, "KV may move only in a tool, as it returns, or as a prediction ends"
                assert command.trajectory not in self.moving
                self.moving[command.trajectory] = command
            case Predict():
                self.asked.append(command)
            case SolvePlan():
                self.solving.append(command)
            case StartEngine():
                assert command.engine not in self.alive
                assert command.engine not in self.dead, "the dead do not come back"
                self.starting[command.engine] = command
                engines = (*self.starting.values(), *self.alive.values())
                used = sum(c.shape.tp for c in engines if c.engine.name not in self.joined)
                assert used <= self.gpus, "more GPUs than there are"
            case StopEngine():
                assert command.engine in self.alive
                self.stopping[command.engine] = command
            case Cancel():
                assert command.trajectory not in self.cancelled, "cancelled twice"
                self.cancelled.append(command.trajectory)

    def later(self, seconds: float) -> float:
        self.now_s += seconds
        return self.now_s

    # -- arrivals ------------------------------------------------------------------------------

    def start_rollout(self, announced: int | None, version: int) -> None:
        rollout = Open(RolloutId(f"r{len(self.rollouts) + len(self.closed)}"), announced, version)
        self.rollouts[rollout.id] = rollout
        self.say(
            RolloutStarted(
                time_s=self.now_s,
                rollout=rollout.id,
                trajectories=announced,
                weights_version=version,
            )
        )
        self.close_if_over(rollout)

    def close_if_over(self, rollout: Open) -> None:
        if rollout.over:
            self.closed[rollout.id] = self.rollouts.pop(rollout.id)

    @precondition(lambda self: len(self.rollouts) < 3)
    @rule(announced=st.none() | st.integers(0, 4), version=st.integers(0, 3), dt=st.floats(0, 1))
    def another_rollout(self, announced: int | None, version: int, dt: float) -> None:
        self.later(dt)
        self.start_rollout(announced, version)

    @precondition(lambda self: self.rollouts)
    @rule(data=st.data(), late=st.integers(0, 2))
    def close_rollout(self, data: st.DataObject, late: int) -> None:
        rollout = self.rollouts[data.draw(st.sampled_from(list(self.rollouts)))]
        rollout.announced = rollout.arrived + late
        self.say(
            RolloutClosed(time_s=self.now_s, rollout=rollout.id, trajectories=rollout.announced)
        )
        self.close_if_over(rollout)

    @precondition(lambda self: any(r.accepts for r in self.rollouts.values()))
    @rule(data=st.data(), prompt=st.integers(1, 450), group=st.integers(0, 2), dt=st.floats(0, 1))
    def arrive(self, data: st.DataObject, prompt: int, group: int, dt: float) -> None:
        self.later(dt)
        accepting = [r.id for r in self.rollouts.values() if r.accepts]
        self.admit(data.draw(st.sampled_from(accepting)), prompt, group)

    def admit(self, rollout: RolloutId, prompt: int, group: int) -> None:
        name = TrajectoryId(f"t{self.arrived}")
        self.arrived += 1
        self.made[name] = 0
        self.rollout_of[name] = self.rollouts[rollout]
        self.rollouts[rollout].arrived += 1
        self.say(
            TrajectoryArrived(
                time_s=self.now_s,
                rollout=rollout,
                trajectory=name,
                group=GroupId(f"g{group}"),
                task="any",
                prompt_tokens=prompt,
            )
        )

    @precondition(lambda self: self.controller.deadline_s is not None)
    @rule()
    def tick(self) -> None:
        self.now_s = max(self.now_s, self.controller.deadline_s or 0.0)
        self.say(Tick(time_s=self.now_s))
        assert self.controller.deadline_s is None or self.controller.deadline_s > self.now_s

    # -- steps and tools -------------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 60), last=st.booleans(), dt=st.floats(0, 1))
    def finish_step(self, data: st.DataObject, tokens: int, last: bool, dt: float) -> None:
        name = data.draw(st.sampled_from(list(self.running)))
        command = self.running.pop(name)
        self.leaving.pop(name, None)
        self.made[name] += tokens
        self.before_tool[name] = command.step
        self.say(
            StepFinished(
                time_s=self.later(dt),
                trajectory=name,
                step=command.step,
                engine=command.engine,
                output_tokens=tokens,
                reason="answer" if last else "tool_call",
            )
        )
        if last:
            del self.before_tool[name]
            self.end(name, "completed")

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def preempted(self, data: st.DataObject, tokens: int) -> None:
        self.preempt_now(data.draw(st.sampled_from(list(self.leaving))), tokens)

    def preempt_now(self, name: TrajectoryId, tokens: int) -> None:
        del self.leaving[name]
        command = self.running.pop(name)
        self.made[name] += tokens
        self.say(
            StepPreempted(
                time_s=self.later(0.01),
                trajectory=name,
                step=command.step,
                engine=command.engine,
                output_tokens=tokens,
            )
        )

    @precondition(lambda self: any(c.max_tokens for c in self.running.values()))
    @rule(data=st.data())
    def end_chunk(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.running)))
        command = self.running.pop(name)
        self.leaving.pop(name, None)
        self.made[name] += command.max_tokens or 0
        self.say(
            StepPreempted(
                time_s=self.later(0.01),
                trajectory=name,
                step=command.step,
                engine=command.engine,
                output_tokens=command.max_tokens or 0,
            )
        )

    @precondition(lambda self: self.beside and self.running)
    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        """End a step early without a Preempt, as a weight update does."""
        name = data.draw(st.sampled_from(list(self.running)))
        command = self.running.pop(name)
        self.leaving.pop(name, None)
        self.say(
            StepPreempted(
                time_s=self.later(0.01),
                trajectory=name,
                step=command.step,
                engine=command.engine,
                output_tokens=0,
            )
        )

    @precondition(lambda self: self.before_tool)
    @rule(data=st.data())
    def start_tool(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.before_tool)))
        self.in_tool[name] = self.before_tool.pop(name)
        self.say(
            ToolStarted(time_s=self.now_s, trajectory=name, step=self.in_tool[name], tool="sh")
        )

    @precondition(lambda self: self.in_tool)
    @rule(data=st.data(), tokens=st.integers(0, 80), dt=st.floats(0, 2), close=st.booleans())
    def return_tool(self, data: st.DataObject, tokens: int, dt: float, close: bool) -> None:
        name = data.draw(st.sampled_from(list(self.in_tool)))
        step = self.in_tool.pop(name)
        self.later(dt)
        if close:
            self.end(name, "failed")
            return
        context = self.controller.ledger.trajectories[name].context_tokens
        self.returned = name
        self.say(
            ToolReturned(
                time_s=self.now_s,
                trajectory=name,
                step=step,
                tool="sh",
                ok=True,
                observation_tokens=tokens,
                context_tokens=context + tokens,
            )
        )
        self.returned = None

    def end(self, name: TrajectoryId, outcome: str) -> None:
        self.over.append(name)
        rollout = self.rollout_of[name]
        rollout.ended += 1
        del self.made[name]
        self.say(TrajectoryFinished(time_s=self.now_s, trajectory=name, outcome=outcome))  # type: ignore[arg-type]
        self.close_if_over(rollout)

    @precondition(lambda self: self.cancelled)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.cancelled))
        if name not in self.over:
            self.end(name, "cancelled")

    # -- services ------------------------------------------------------------------------------

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), tokens=st.none() | st.floats(0, 1e5), dt=st.floats(0, 1))
    def predicted(self, data: st.DataObject, tokens: float | None, dt: float) -> None:
        command = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        self.answered = command.trajectory
        self.say(
            Predicted(
                time_s=self.later(dt),
                trajectory=command.trajectory,
                step=command.step,
                remaining_tokens=tokens,
            )
        )
        self.answered = None

    @precondition(lambda self: self.solving)
    @rule(data=st.data())
    def solved(self, data: st.DataObject) -> None:
        command = self.solving.pop(data.draw(st.integers(0, len(self.solving) - 1)))
        plan = command.problem.solve()
        self.say(PlanSolved(time_s=self.later(1), plan=command.plan, resource_plan=plan))

    @precondition(lambda self: self.moving)
    @rule(data=st.data(), ok=st.booleans(), dt=st.floats(0, 1))
    def migrated(self, data: st.DataObject, ok: bool, dt: float) -> None:
        name = data.draw(st.sampled_from(list(self.moving)))
        command = self.moving.pop(name)
        ok = ok and command.target in self.alive
        self.say(
            MigrationFinished(
                time_s=self.later(dt),
                trajectory=name,
                source=command.source,
                target=command.target,
                ok=ok,
                kv_tokens=16 if ok else 0,
            )
        )

    @rule(version=st.integers(1, 3))
    def new_weights(self, version: int) -> None:
        self.say(WeightsUpdated(time_s=self.now_s, version=version))

    # -- engines -------------------------------------------------------------------------------

    @precondition(lambda self: self.starting)
    @rule(data=st.data(), dt=st.floats(0, 1))
    def ready(self, data: st.DataObject, dt: float) -> None:
        self.later(dt)
        self.become_ready(data.draw(st.sampled_from(list(self.starting))))

    def become_ready(self, name: EngineId) -> None:
        command = self.alive[name] = self.starting.pop(name)
        self.say(
            EngineReady(
                time_s=self.now_s,
                engine=name,
                shape=command.shape,
                kv_capacity_tokens=KV_CAPACITY * command.shape.tp,
                max_running=command.max_running,
            )
        )

    @precondition(lambda self: self.failures > 0 and (self.starting or self.alive))
    @rule(data=st.data(), salvage=st.integers(0, 20))
    def fail(self, data: st.DataObject, salvage: int) -> None:
        self.failures -= 1
        name = data.draw(st.sampled_from([*self.starting, *self.alive]))
        self.starting.pop(name, None)
        self.alive.pop(name, None)
        self.stopping.pop(name, None)
        self.dead.append(name)
        lost = [t for t, c in self.running.items() if c.engine == name]
        for t in lost:
            del self.running[t]
            self.leaving.pop(t, None)
            self.made[t] += salvage
        self.say(
            EngineFailed(
                time_s=self.now_s,
                engine=name,
                reason="hostile",
                salvaged=tuple((t, salvage) for t in lost),
            )
        )

    @precondition(lambda self: len(self.joined) < 4)
    @rule(tp=st.sampled_from([1, 2]), slots=st.integers(1, 3))
    def join(self, tp: int, slots: int) -> None:
        name = EngineId(f"j{len(self.joined)}")
        self.joined.append(name)
        shape = EngineShape("h100", tp, self.kind["role"])
        self.say(EngineJoined(time_s=self.now_s, engine=name, shape=shape, max_running=slots))

    @precondition(lambda self: self.joined)
    @rule(data=st.data(), drain=st.booleans())
    def recall(self, data: st.DataObject, drain: bool) -> None:
        name = EngineId(data.draw(st.sampled_from(self.joined)))
        self.say(EngineRecalled(time_s=self.now_s, engine=name, drain=drain))

    @precondition(lambda self: any(not stop.drain for stop in self.stopping.values()))
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def abort(self, data: st.DataObject, tokens: int) -> None:
        """End a step of an engine that stops at once."""
        at_once = [name for name, stop in self.stopping.items() if not stop.drain]
        names = [t for t, c in self.running.items() if c.engine in at_once]
        if names:
            name = data.draw(st.sampled_from(names))
            self.leaving.setdefault(name, None)  # type: ignore[arg-type]
            self.preempt_now(name, tokens)

    @precondition(lambda self: self.reports > 0 and self.alive)
    @rule(data=st.data(), kv=st.integers(0, 1000))
    def report(self, data: st.DataObject, kv: int) -> None:
        self.reports -= 1
        name = data.draw(st.sampled_from(list(self.alive)))
        self.say(
            EngineReported(
                time_s=self.now_s,
                engine=name,
                running=0,
                waiting=0,
                kv_used_tokens=kv,
                preemptions=0,
            )
        )

    @precondition(lambda self: self.stopping)
    @rule()
    def stopped(self) -> None:
        for name in list(self.stopping):
            if not any(c.engine == name for c in self.running.values()):
                del self.stopping[name], self.alive[name]
                self.dead.append(name)
                self.say(EngineStopped(time_s=self.later(0.1), engine=name))
                return

    # -- what must always hold -------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "controller"):
            return
        ledger = self.controller.ledger
        ledger.check()
        here = ledger.trajectories.values()
        running = {t.id: t.engine for t in here if t.phase in ("running", "preempting")}
        assert running == {name: c.engine for name, c in self.running.items()}
        assert {t.id for t in here if t.phase == "preempting"} == set(self.leaving)
        assert set(ledger.trajectories) == set(self.made), "a finished trajectory is still here"
        for name, tokens in self.made.items():
            t = ledger.trajectories[name]
            assert t.output_tokens == tokens, "tokens lost or made twice"
            assert t.weights_version == self.rollout_of[name].version
        for engine in (*ledger.engines, *ledger.prefill_engines):
            head = engine.head()
            assert head is None or not engine.fits(head), f"{head.id} waits beside a free slot"
        stages = {r.id: r.stage for r in self.controller.rollouts.open.values()}
        assert set(stages) == set(self.rollouts)
        if ledger.engines and self.controller._fleet.settled:
            backlog = self.controller._queues.backlog
            waiting = [
                t.id
                for t in ledger.held.values()
                if stages[t.rollout] == "running" and t.id not in backlog
            ]
            assert not waiting, "held although engines take work"
            assert all(name in ledger.held for name in backlog), "in the backlog, but not held"
        assert self.controller.rollouts.closed >= self.closed.keys()

    def teardown(self) -> None:
        if hasattr(self, "controller"):
            fresh = Controller(contrary(**self.kind), self.beside)
            assert first_divergence(self.entries, fresh.handle) is None


HostileWorld.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, derandomize=False
)
TestHostileWorld = HostileWorld.TestCase
