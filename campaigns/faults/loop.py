"""One RL loop under any regime: engines, environments, rewards and the trainer fail."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import msgspec

from campaigns.faults.books import Books
from campaigns.faults.drawing import any_disturbances, smaller_disturbances, with_less
from campaigns.faults.engines import Disturbances, DisturbedLauncher
from campaigns.faults.rollout import LATEST_S, MOST_EVENTS, EndlessError, endless
from campaigns.faults.scenario import GPUS, Scenario, policy_of, scripts_of, world_of
from campaigns.faults.tokens import TokenLedger
from heddle_core.commands import (
    AccumulateGradients,
    Command,
    Discard,
    Preempt,
    Score,
    StartTrajectory,
    Train,
)
from heddle_core.controller import Controller
from heddle_core.events import Event, StartFailed, StepPreempted, TrajectoryFinished
from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_core.loop.controller import LoopController
from heddle_core.loop.groups import Prompt
from heddle_core.loop.hybrid import HYBRID, HybridPool
from heddle_core.loop.presets import REGIMES
from heddle_core.loop.regime import BatchShape, Regime
from heddle_core.loop.regime_text import regime_named
from heddle_core.loop.split_plan import GpuCounts
from heddle_core.plans import EngineSpec
from heddle_core.presets import PRESETS
from heddle_sim.loop import LoopSimulation, LoopWorld
from heddle_sim.services import Latency, ServiceConfig
from heddle_trace import TrajectoryScript

GROUPS, SAMPLES, SAMPLES_OF_A_PROMPT = 2, 2, 8
SMALL = {
    "libra": "libra:pool_gpus=4",
    "libra-release": "libra-release:pool_gpus=4",
    "verl-separate-async": "verl-separate-async:parameter_sync_step=1",
}
"""Regimes whose defaults are too large for these batches."""
ENFORCED = (
    "areal:max_head_offpolicyness=1:enforce=true",
    "areal:max_head_offpolicyness=2:enforce=true",
    "verl-fully-async:staleness.late=drop:trigger_parameter_sync_step=2",
)
"""Whose bound of staleness holds when a batch is trained."""


class LoopCase(msgspec.Struct, frozen=True, kw_only=True, tag="loop"):
    """A regime, a policy, services that fail, and what disturbs the engines."""

    regime: str
    policy: str
    batches: int
    scripts_seed: int
    environment_failures: float
    reward_failures: float
    environments: int | None
    """At once; None: no limit."""
    trainer_deaths: tuple[int, ...]
    """Trainings, by their number, in which the trainer dies: it starts again and repeats them."""
    slots: int
    prediction_s: float
    disturbances: Disturbances


def draw(rng: Random) -> LoopCase:
    """Draw a case."""
    name = rng.choice([*REGIMES, *ENFORCED])
    batches = rng.choice((1, 2, 4))
    return LoopCase(
        regime=SMALL.get(name, name),
        policy=rng.choice(list(PRESETS)),
        batches=batches,
        scripts_seed=rng.randrange(20),
        environment_failures=rng.choice((0.0, 0.1, 0.5)),
        reward_failures=rng.choice((0.0, 0.1, 0.5)),
        environments=rng.choice((None, 3, 12)),
        trainer_deaths=tuple(i for i in range(batches) if rng.random() < 0.3),
        slots=rng.choice((1, 4, 16)),
        prediction_s=rng.choice((0.0, 0.6, 30.0)),
        disturbances=any_disturbances(rng, span_s=rng.choice((30.0, 200.0))),
    )


def smaller(case: LoopCase) -> Iterator[LoopCase]:
    """Cases with less of everything."""
    yield from with_less(case, batches=1)
    yield from smaller_disturbances(case)
    yield from with_less(
        case,
        environment_failures=0.0,
        reward_failures=0.0,
        environments=None,
        trainer_deaths=(),
        prediction_s=0.0,
        policy="verl",
    )


class LoopBooks(Books):
    """Books of rollouts whose steps a loop interrupts and cancels."""

    def took_place(self, event: Event) -> None:
        """See `Books`: an update of weights aborts without a `Preempt`, a cancellation too."""
        match event:
            case StepPreempted(trajectory=name) if name not in self.preempting:
                self.preempting[name] = Preempt(
                    trajectory=name, step=event.step, engine=event.engine
                )
            case TrajectoryFinished(trajectory=name, outcome="cancelled"):
                self.running.pop(name, None)
                self.preempting.pop(name, None)
        super().took_place(event)


class JudgedLoop:
    """A loop's core whose every event and command two ledgers see."""

    def __init__(self, case: LoopCase, scenario: Scenario, regime: Regime) -> None:
        self.rollouts = Controller(policy_of(case.policy, scenario))
        prompts = (
            Prompt(group=GroupId(f"p{i}"), samples=SAMPLES_OF_A_PROMPT) for i in range(100_000)
        )
        pool = _pool(regime, self.rollouts)
        self._regime = regime
        self.core = LoopController(self.rollouts, regime, prompts, batches=case.batches, pool=pool)
        self.books = LoopBooks(GPUS * 3)
        self.events = 0
        self.started: dict[TrajectoryId, StartTrajectory] = {}
        self.version_at: dict[TrajectoryId, int] = {}
        """Of the weights when it started."""
        self.outcome: dict[TrajectoryId, str] = {}
        self.trained: dict[TrajectoryId, int] = {}
        self.discarded: dict[TrajectoryId, None] = {}

    @property
    def deadline_s(self) -> float | None:
        """See `LoopCore`."""
        return self.core.deadline_s

    @property
    def over(self) -> bool:
        """See `LoopCore`."""
        return self.core.over

    def handle(self, event: Event) -> Sequence[Command]:
        """See `LoopCore`."""
        self.events += 1
        if self.events > MOST_EVENTS:
            raise EndlessError(f"{MOST_EVENTS} events, and no end")
        self.books.took_place(event)
        if isinstance(event, TrajectoryFinished):
            self.outcome[event.trajectory] = event.outcome
        elif isinstance(event, StartFailed):
            self.outcome[event.trajectory] = "failed"
        commands = self.core.handle(event)
        for command in commands:
            self.books.opened(command)
            self._opened(command)
        self.core.groups.check()
        self.rollouts.ledger.check()
        self.books.agree(self.rollouts)
        return commands

    def _opened(self, command: Command) -> None:
        match command:
            case StartTrajectory(trajectory=name):
                assert name not in self.started, f"{name} starts twice"
                self.started[name] = command
                self.version_at[name] = self.core.version
            case Score(trajectory=name):
                assert name in self.outcome, f"{name} is scored before its end"
            case Discard(trajectory=name):
                assert name not in self.discarded, f"{name} is discarded twice"
                assert name not in self.trained, f"{name} is discarded and trained"
                self.discarded[name] = None
            case AccumulateGradients() | Train():
                for name in command.trajectories:
                    assert name not in self.trained, f"{name} is trained twice"
                    assert name not in self.discarded, f"{name} is trained and discarded"
                    assert self.outcome.get(name) in ("completed", "truncated"), name
                    self.trained[name] = command.batch
                    age = self.core.version - self.version_at[name]
                    bound = self._regime.staleness
                    assert bound.late == "train" or age <= bound.most, f"{name} is {age} old"


def _pool(regime: Regime, rollouts: Controller) -> HybridPool | None:
    hybrid = regime.split.hybrid
    if hybrid is None:
        return None
    specs = [
        EngineSpec(engine=EngineId(f"{HYBRID}{i}"), shape=EngineShape("h100", 1), max_running=1)
        for i in range(2)
    ]
    gpus = GpuCounts(rollout=2, training=2, hybrid=2)
    rule = hybrid.rule(groups=regime.groups, every=regime.update.every, gpus=gpus)
    return HybridPool(specs, hybrid, rule, rollouts)


def _world(case: LoopCase, script: Any) -> LoopWorld:
    trainings = 0

    def train_s(tokens: Sequence[int], pool_trains: bool) -> float:
        nonlocal trainings
        once_s = 3.0 + 1e-4 * sum(tokens)
        dies = trainings in case.trainer_deaths
        trainings += 1
        return 1.6 * once_s + 40.0 if dies else once_s

    return LoopWorld(
        script=script,
        train_s=train_s,
        accumulate_s=lambda tokens, pool_trains: 1e-4 * sum(tokens),
        update_s=2.3,
        pause_s=0.7,
        to_training_s=1.0,
        to_rollout_s=1.5,
        alive=case.environments,
        environments=ServiceConfig(
            latency=Latency(seconds=1.1, sigma=0.5),
            capacity=9,
            failure_rate=case.environment_failures,
            timeout_s=7.0,
        ),
        rewards=ServiceConfig(
            latency=Latency(seconds=0.31, sigma=0.1),
            cold_start_s=0.2,
            failure_rate=case.reward_failures,
        ),
        seed=case.scripts_seed,
    )


def run(case: LoopCase) -> int:
    """Run a case, and return the number of events.

    Raises:
        AssertionError: a ledger disagrees.
        Exception: whatever the driver, its engines, services or the core raise.
    """
    scenario = Scenario(
        faults=(), slots=case.slots, prediction_s=case.prediction_s, tool_capacity=6
    )
    scripts = [
        replace(s, steps=s.steps[:3], arrival_s=0.0)
        for s in scripts_of("coding", 64, case.scripts_seed)
    ]

    def script(group: GroupId, sample: int) -> TrajectoryScript:
        return scripts[(int(group[1:]) * SAMPLES_OF_A_PROMPT + sample) % len(scripts)]

    shape = BatchShape(groups=GROUPS, samples=SAMPLES, slots=case.slots * GPUS, colocated=False)
    core = JudgedLoop(case, scenario, regime_named(case.regime, shape))
    tokens = TokenLedger(lambda name: script(core.started[name].group, core.started[name].sample))
    make: Any = partial(DisturbedLauncher, disturbances=case.disturbances, tokens=tokens)
    loop = LoopSimulation(core, world_of(scenario), _world(case, script), launcher=make)
    loop.clock.call_at(LATEST_S, endless)
    loop.run()
    _judge(core, case, tokens)
    return core.events


def _judge(core: JudgedLoop, case: LoopCase, tokens: TokenLedger) -> None:
    """Every batch is whole, and every sample that started is accounted for."""
    assert len(core.trained) == case.batches * GROUPS * SAMPLES, "batches are not whole"
    for batch in range(case.batches):
        sizes: dict[GroupId, int] = {}
        for name, of in core.trained.items():
            if of == batch:
                sizes[core.started[name].group] = sizes.get(core.started[name].group, 0) + 1
        assert list(sizes.values()) == [SAMPLES] * GROUPS, "groups are not whole"
    for name in core.trained:
        assert tokens.complete(name), f"{name} was trained without all of its tokens"
        assert core.books.made[name] == tokens.whole(name), f"{name}: tokens lost or twice"
