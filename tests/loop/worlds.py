"""A hostile world for a loop's controller: everything fails, comes late and in any order."""

import random
from collections.abc import Sequence

from heddle_core.commands import (
    AccumulateGradients,
    AssignGpus,
    Cancel,
    CloseRollout,
    Command,
    CommandList,
    Discard,
    OpenRollout,
    Score,
    StartEngine,
    StartTrajectory,
    StopEngine,
    Train,
    UpdateWeights,
)
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    EngineStopped,
    EngineUpdated,
    Event,
    GpusAssigned,
    GradientsAccumulated,
    LoopStarted,
    Scored,
    StartFailed,
    Trained,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_core.loop.controller import LoopController
from heddle_core.loop.groups import Prompt
from heddle_core.loop.hybrid import HybridPool
from heddle_core.loop.regime import Regime
from heddle_core.loop.split_plan import GpuCounts
from heddle_core.plans import EngineSpec


class NoRollouts:
    """In place of the rollouts' controller: decides nothing."""

    deadline_s = None

    def __init__(self) -> None:
        self.events = 0
        self.borrowed = 0

    def handle(self, event: Event) -> Sequence[Command]:
        self.events += 1
        return ()

    def skip_event(self) -> None:
        self.events += 1

    def borrow_engines(self, engines: Sequence[EngineSpec], out: CommandList) -> list[EngineId]:
        self.borrowed += 1
        ids = [EngineId(spec.engine, self.borrowed) for spec in engines]
        for id_, spec in zip(ids, engines, strict=True):
            out.append(StartEngine(engine=id_, shape=spec.shape, max_running=1, cause=out.cause))
        return ids

    def give_back_engines(self, engines: Sequence[EngineId], out: CommandList) -> None:
        for engine in engines:
            out.append(StopEngine(engine=engine, drain=False, cause=out.cause))


class HostileWorld:
    """Answers commands in a random order, and checks what a loop may never do."""

    def __init__(
        self,
        regime: Regime,
        seed: int,
        *,
        batches: int,
        failures: float = 0.1,
        engines: int = 2,
        latest: float = 0.0,
    ) -> None:
        """With a chance of `latest` the newest event comes next: then the first ones are late."""
        self.random = random.Random(seed)
        self.latest = latest
        self.regime, self.failures = regime, failures
        self.prompts = 0
        shape = EngineShape("h100", 1)
        hybrid = [
            EngineSpec(engine=EngineId(f"hybrid{i}"), shape=shape, max_running=1) for i in range(2)
        ]
        rollouts, pool = NoRollouts(), None
        if regime.split.hybrid is not None:
            rule = regime.split.hybrid.rule(
                groups=regime.groups,
                every=regime.update.every,
                gpus=GpuCounts(rollout=2, training=1, hybrid=2),
            )
            pool = HybridPool(hybrid, regime.split.hybrid, rule, rollouts)
        self.core = LoopController(rollouts, regime, self._prompts(), batches=batches, pool=pool)
        self.gpus = "training"
        """What those of the hybrid pool do."""
        self.loans = 0
        self.entries: list[tuple[Event, tuple[Command, ...]]] = []
        self.due: list[Event] = []
        """Events that may come next, in any order."""
        self.engines = [EngineId(f"e{i}") for i in range(engines)]
        self.group: dict[TrajectoryId, GroupId] = {}
        self.version_at: dict[TrajectoryId, int] = {}
        self.state: dict[TrajectoryId, str] = {}
        self.trained: list[tuple[TrajectoryId, ...]] = []
        self.batch: list[TrajectoryId] = []
        """What the trainer has of the batch in collection."""
        self.staleness: list[int] = []
        self.rewards: dict[tuple[GroupId, TrajectoryId], float] = {}
        self.versions: dict[EngineId, int] = dict.fromkeys(self.engines, 0)
        self.expected: dict[str, int | None] = {}
        self.admitted: dict[str, int] = {}

    def _prompts(self):
        while True:
            self.prompts += 1
            yield Prompt(group=GroupId(f"p{self.prompts}"), samples=self.regime.started_samples)

    def run(self, most: int = 100_000) -> None:
        """Let the loop end."""
        self.deliver(LoopStarted(time_s=0.0))
        for engine in self.engines:
            shape = EngineShape("h100", 1)
            self.deliver(
                EngineReady(
                    time_s=0.0, engine=engine, shape=shape, kv_capacity_tokens=9, max_running=1
                )
            )
        for _ in range(most):
            if self.core.over:
                break
            assert self.due, f"nothing can happen while the loop is {self.core.stage}"
            newest = self.latest > 0.0 and self.random.random() < self.latest
            event = self.due.pop(-1 if newest else self.random.randrange(len(self.due)))
            if self.still_possible(event):
                self.deliver(event)
        assert self.core.over

    def still_possible(self, event: Event) -> bool:
        match event:
            case TrajectoryFinished(trajectory=t, outcome="cancelled"):
                return True
            case TrajectoryFinished(trajectory=t):
                return self.state[t] == "running"
            case EngineUpdated(engine=engine):
                return engine in self.engines
            case _:
                return True

    def deliver(self, event: Event) -> None:
        match event:
            case TrajectoryArrived(trajectory=t):
                self.state[t] = "running"
                rollout = event.rollout
                self.admitted[rollout] += 1
                expected = self.expected[rollout]
                assert expected is None or self.admitted[rollout] <= expected, rollout
                self.finish_later(t)
            case TrajectoryFinished(trajectory=t) | StartFailed(trajectory=t):
                self.state[t] = "ended"
            case EngineUpdated():
                self.versions[event.engine] = event.version
        commands = tuple(self.core.handle(event))
        self.entries.append((event, commands))
        for command in commands:
            self.execute(command)
        self.core.groups.check()

    def finish_later(self, t: TrajectoryId) -> None:
        bad = self.random.random() < self.failures
        self.due.append(
            TrajectoryFinished(time_s=0.0, trajectory=t, outcome="failed" if bad else "completed")
        )

    def execute(self, command: Command) -> None:
        match command:
            case OpenRollout():
                assert command.rollout not in self.expected, "a rollout was opened twice"
                self.expected[command.rollout] = command.trajectories
                self.admitted[command.rollout] = 0
            case CloseRollout():
                self.expected[command.rollout] = self.admitted[command.rollout]
            case StartTrajectory(trajectory=t):
                assert t not in self.state, f"{t} was started twice"
                assert command.rollout in self.expected
                self.state[t], self.group[t] = "starting", command.group
                self.version_at[t] = self.core.version
                if self.random.random() < self.failures:
                    self.due.append(StartFailed(time_s=0.0, trajectory=t, reason="none"))
                else:
                    self.due.append(
                        TrajectoryArrived(
                            time_s=0.0,
                            rollout=command.rollout,
                            trajectory=t,
                            group=command.group,
                            task="",
                            prompt_tokens=1,
                        )
                    )
            case Cancel(trajectory=t):
                assert self.state[t] == "running", f"{t} is {self.state[t]} and was cancelled"
                self.state[t] = "cancelled"
                self.due.append(TrajectoryFinished(time_s=0.0, trajectory=t, outcome="cancelled"))
            case Score(trajectory=t):
                assert self.state[t] == "ended"
                reward = None if self.random.random() < self.failures else 1.0
                if reward and self.regime.batching.equal_rewards == "drop":
                    reward = self.random.choice((0.0, 1.0))
                if reward is not None:
                    self.rewards[self.group[t], t] = reward
                self.due.append(Scored(time_s=0.0, trajectory=t, reward=reward))
            case Discard(trajectory=t):
                assert self.state[t] == "ended", f"{t} is {self.state[t]} and was discarded"
                self.state[t] = "discarded"
            case AccumulateGradients():
                self.take(command)
                self.due.append(GradientsAccumulated(time_s=0.0, batch=command.batch))
            case Train():
                self.take(command)
                self.train(command)
            case _:
                self.execute_on_gpus(command)

    def execute_on_gpus(self, command: Command) -> None:
        match command:
            case UpdateWeights(engine=engine) if engine not in self.engines:
                pass  # its end is on its way
            case UpdateWeights():
                if self.random.random() < self.failures and len(self.engines) > 1:
                    self.engines.remove(command.engine)
                    self.due.append(
                        EngineFailed(time_s=0.0, engine=command.engine, reason="injected")
                    )
                else:
                    self.due.append(
                        EngineUpdated(time_s=0.0, engine=command.engine, version=command.version)
                    )
            case AssignGpus():
                ok = self.regime.split.colocated or self.random.random() >= self.failures
                self.gpus = command.role if ok else "training"
                self.due.append(
                    GpusAssigned(time_s=0.0, role=command.role, pool=command.pool, ok=ok)
                )
                if not ok and command.role == "training":
                    self.gpus = "rollout"
            case StartEngine(engine=engine):
                self.loans += 1
                if self.random.random() < self.failures:
                    self.due.append(EngineFailed(time_s=0.0, engine=engine, reason="injected"))
                else:
                    self.engines.append(engine)
                    self.due.append(
                        EngineReady(
                            time_s=0.0,
                            engine=engine,
                            shape=command.shape,
                            kv_capacity_tokens=9,
                            max_running=1,
                        )
                    )
            case StopEngine(engine=engine):
                if engine in self.engines:
                    self.engines.remove(engine)
                    self.due.append(EngineStopped(time_s=0.0, engine=engine))

    def take(self, command: AccumulateGradients | Train) -> None:
        assert command.batch == len(self.trained)
        hybrid = self.regime.split.hybrid
        if hybrid is not None and not hybrid.own_gpus:
            assert self.gpus == "training", "the trainer's GPUs are lent"
        for t in command.trajectories:
            assert self.state[t] == "ended", f"{t} is {self.state[t]} and was trained"
            self.state[t] = "trained"
            self.staleness.append(self.core.version - self.version_at[t])
        self.batch += command.trajectories

    def train(self, command: Train) -> None:
        by_group: dict[GroupId, int] = {}
        for t in self.batch:
            by_group[self.group[t]] = by_group.get(self.group[t], 0) + 1
        complete = [self.regime.samples] * self.regime.groups
        assert list(by_group.values()) == complete, "incomplete groups"
        if self.regime.batching.equal_rewards == "drop":
            for group in by_group:
                found = {self.rewards[group, t] for t in self.batch if self.group[t] == group}
                assert len(found) == 2, "a group of equal rewards was trained"
        self.trained.append(tuple(self.batch))
        self.batch.clear()
        self.due.append(Trained(time_s=0.0, batch=command.batch))
