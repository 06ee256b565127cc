"""A hostile world: any legal order of replies, engines dying at any point, replies racing.

After every event the ledger's invariants hold, and so do those that need the world's own books:
commands end once (2), the dead get no letters (9), waiting implies no free slot (7), tokens are
neither lost nor made twice (10), engines never have more GPUs than there are (11). At the end the
events replay on a fresh controller (5).
"""

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
    EngineReady,
    EngineReported,
    EngineStopped,
    Event,
    MigrationFinished,
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
    WeightsUpdated,
)
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from tests.core.contrary import GPUS, contrary

KV_CAPACITY = 400
"""Small against the prompts drawn below, so that KV, too, is refused and some never fit."""


class HostileWorld(RuleBasedStateMachine):
    @initialize(
        needs_all=st.booleans(),
        served=st.booleans(),
        promised=st.integers(0, 6),
        late=st.booleans(),
        failures=st.integers(0, 12),
    )
    def begin(
        self, needs_all: bool, served: bool, promised: int, late: bool, failures: int
    ) -> None:
        """`late`: hostility begins when all have arrived and all engines are ready.

        Failures are limited, as reports are, so that what takes many steps happens too.
        """
        self.failures, self.reports = failures, 4
        self.kind = {"needs_all": needs_all, "served": served}
        self.controller = Controller(contrary(**self.kind))
        self.now_s = 0.0
        self.entries: list[Entry] = []
        self.promised, self.arrived = promised, 0
        self.running: dict[TrajectoryId, Dispatch] = {}
        self.leaving: dict[TrajectoryId, Preempt] = {}
        self.moving: dict[TrajectoryId, Migrate] = {}
        self.asked: list[Predict] = []
        self.solving: list[SolvePlan] = []
        self.starting: dict[EngineId, StartEngine] = {}
        self.alive: dict[EngineId, StartEngine] = {}
        self.stopping: dict[EngineId, StopEngine] = {}
        self.dead: list[EngineId] = []
        self.cancelled: list[TrajectoryId] = []
        self.before_tool: dict[TrajectoryId, int] = {}
        self.in_tool: dict[TrajectoryId, int] = {}
        self.made: dict[TrajectoryId, int] = {}
        self.over: list[TrajectoryId] = []
        self.say(RolloutStarted(time_s=0.0, trajectories=promised))
        if late:
            while self.arrived < self.promised:
                self.arrive(prompt=40 + self.arrived, group=self.arrived % 2, dt=0.1)
            while self.solving:
                self.solved()
            for engine in list(self.starting):
                self.become_ready(engine)

    def say(self, event: Event) -> None:
        commands = self.controller.handle(event)
        self.entries.append(Entry(event, commands))
        for command in commands:
            self.obey(command)

    def obey(self, command: Command) -> None:
        match command:
            case Dispatch():
                assert command.engine in self.alive, "a letter to an engine that is not alive"
                assert command.engine not in self.stopping
                assert command.trajectory not in self.running, "runs twice"
                self.running[command.trajectory] = command
            case Preempt():
                assert self.running[command.trajectory].engine == command.engine
                assert command.trajectory not in self.leaving, "asked twice"
                self.leaving[command.trajectory] = command
            case Migrate():
                assert command.source in self.alive
                assert command.target in self.alive
                assert command.trajectory in self.in_tool, "KV may move only while a tool runs"
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
                used = sum(c.tp for c in (*self.starting.values(), *self.alive.values()))
                assert used <= GPUS, "more GPUs than there are"
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

    @precondition(lambda self: self.arrived < self.promised)
    @rule(prompt=st.integers(1, 450), group=st.integers(0, 2), dt=st.floats(0, 1))
    def arrive(self, prompt: int, group: int, dt: float) -> None:
        name = TrajectoryId(f"t{self.arrived}")
        self.arrived += 1
        self.made[name] = 0
        self.say(
            TrajectoryArrived(
                time_s=self.later(dt),
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
        name = data.draw(st.sampled_from(list(self.leaving)))
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

    def end(self, name: TrajectoryId, outcome: str) -> None:
        self.over.append(name)
        self.say(TrajectoryFinished(time_s=self.now_s, trajectory=name, outcome=outcome))  # type: ignore[arg-type]

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
        self.say(
            Predicted(
                time_s=self.later(dt),
                trajectory=command.trajectory,
                step=command.step,
                remaining_tokens=tokens,
            )
        )

    @precondition(lambda self: self.solving)
    @rule()
    def solved(self) -> None:
        command = self.solving.pop()
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
                tp=command.tp,
                gpu=command.gpu,
                kv_capacity_tokens=KV_CAPACITY * command.tp,
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

    @precondition(lambda self: len(self.over) == self.arrived == self.promised > 0)
    @rule(promised=st.integers(1, 4))
    def next_rollout(self, promised: int) -> None:
        self.promised += promised
        self.say(RolloutStarted(time_s=self.later(1), trajectories=promised))

    # -- what must always hold -------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "controller"):
            return
        ledger = self.controller.ledger
        ledger.check()
        running = {t.id: t.home for t in ledger.trajectories.values() if t.phase == "running"}
        assert running == {name: c.engine for name, c in self.running.items()}
        assert {t.id for t in ledger.trajectories.values() if t.leaving} == set(self.leaving)
        for name, tokens in self.made.items():
            assert ledger.trajectories[name].output_tokens == tokens, "tokens lost or made twice"
        for engine in ledger.engines:
            head = engine.head()
            assert head is None or not engine.fits(head), f"{head.id} waits beside a free slot"
        if ledger.engines and self.controller._planned and self.controller._fleet.settled:
            waiting = [t.id for t in ledger.held.values() if not t.given_up]
            assert not waiting, "held although engines take work"

    def teardown(self) -> None:
        if hasattr(self, "controller"):
            fresh = Controller(contrary(**self.kind))
            assert first_divergence(self.entries, fresh.handle) is None


HostileWorld.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, derandomize=False
)
TestHostileWorld = HostileWorld.TestCase
