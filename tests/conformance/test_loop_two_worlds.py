"""The same RL loop through SimPy and through asyncio gives the same journal, digit by digit.

One `LoopDriver` runs in both; `TrainingRun` is that of `experiments/real_training`.
Services and engines are simulated, on the clock of each world.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from campaigns.faults.scenario import Scenario, policy_of, scripts_of, world_of
from experiments.real_training.run import TrainingRun
from heddle_core.commands import Cancel, Command, StartTrajectory, Train, UpdateWeights
from heddle_core.controller import Controller
from heddle_core.events import (
    EngineFailed,
    EngineUpdated,
    Event,
    StartFailed,
    StepPreempted,
    Trained,
)
from heddle_core.ids import EngineId, GroupId
from heddle_core.loop.controller import LoopController
from heddle_core.loop.groups import Prompt
from heddle_core.loop.regime import BatchShape
from heddle_core.loop.regime_text import regime_named
from heddle_rollout.driver import StuckError
from heddle_rollout.services import CoreEstimates
from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import run_virtual
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimLauncher
from heddle_sim.loop import LoopSimulation, LoopWorld, SimulatedServices
from heddle_sim.services import Latency, ServiceConfig
from heddle_trace.schema import TrajectoryScript
from tests.conformance.test_two_worlds import speed

GROUPS, SAMPLES, BATCHES = 3, 4, 4
SCENARIO = Scenario(trajectories=64, faults=(), tool_capacity=6)
FAULTS = ((7.137, EngineId("e1")), (60.071, EngineId("e0")))
REGIMES = (
    "sync",
    "one-step-off",
    "areal:max_head_offpolicyness=1",
    "verl-fully-async:staleness_threshold=0.5:trigger_parameter_sync_step=2",
    "roll:async_generation_ratio=1",
    "pipelinerl",
    "laminar",
    "heddle-loop",
)

Journal = list[tuple[Event, tuple[Command, ...]]]


class Recorded:
    """A loop's core that keeps every entry."""

    def __init__(self, regime: str, policy: str) -> None:
        rules = regime_named(
            regime, BatchShape(groups=GROUPS, samples=SAMPLES, slots=48, colocated=False)
        )
        prompts = (Prompt(group=GroupId(f"p{i}"), samples=8) for i in range(10_000))
        rollouts = Controller(policy_of(policy, SCENARIO))
        self.core = LoopController(rollouts, rules, prompts, batches=BATCHES)
        self.entries: Journal = []

    @property
    def deadline_s(self) -> float | None:
        return self.core.deadline_s

    @property
    def over(self) -> bool:
        return self.core.over

    def handle(self, event: Event) -> Sequence[Command]:
        commands = tuple(self.core.handle(event))
        self.entries.append((event, commands))
        return commands


def script(group: GroupId, sample: int) -> TrajectoryScript:
    scripts = scripts_of(SCENARIO.workload, SCENARIO.trajectories, SCENARIO.seed)
    return replace(scripts[(int(group[1:]) * 8 + sample) % len(scripts)], arrival_s=0.0)


WORLD = LoopWorld(
    script=script,
    train_s=lambda tokens, pool_trains: 3.0 + 1e-4 * sum(tokens),
    accumulate_s=lambda tokens, pool_trains: 1e-4 * sum(tokens),
    update_s=2.3,
    pause_s=0.7,
    environments=ServiceConfig(
        latency=Latency(seconds=1.1, sigma=0.5), capacity=9, failure_rate=0.05
    ),
    rewards=ServiceConfig(latency=Latency(seconds=0.31, sigma=0.1), cold_start_s=0.2),
    seed=4,
)


def cluster() -> SimulationConfig:
    return replace(world_of(SCENARIO), speed=speed, faults=FAULTS)


def simulated(regime: str, policy: str) -> Recorded:
    core = Recorded(regime, policy)
    LoopSimulation(core, cluster(), WORLD).run()
    return core


def on_the_event_loop(regime: str, policy: str) -> Recorded:
    core, config = Recorded(regime, policy), cluster()

    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop())
        launcher = SimLauncher(config, clock)
        launcher.schedule_faults()
        await TrainingRun(
            core,
            launcher,
            clock,
            SimulatedServices(launcher, WORLD, clock).services,
            predictions=CoreEstimates(clock, config.prediction_s),
            tool_capacity=config.tool_capacity,
            report_interval_s=config.report_interval_s,
            report_delay_s=config.report_delay_s,
        ).run()
        await launcher.close()

    run_virtual(main())
    return core


@pytest.mark.parametrize("policy", ["verl", "heddle+progressive+portfolio"])
@pytest.mark.parametrize("regime", REGIMES)
def test_a_loop_has_the_same_journal_under_both_clocks(regime: str, policy: str):
    here, there = simulated(regime, policy).entries, on_the_event_loop(regime, policy).entries
    for index, (a, b) in enumerate(zip(here, there, strict=False)):
        assert a == b, f"entry {index}"
    assert len(here) == len(there)
    fresh = Recorded(regime, policy)
    for event, commands in there:
        assert fresh.handle(event) == commands


@pytest.mark.parametrize("regime", ["areal:max_head_offpolicyness=1", "one-step-off"])
def test_a_loop_whose_engines_have_all_died_for_good_says_so(regime: str, monkeypatch):
    """Each is started again three times; then trajectories of an open rollout wait for nothing."""
    names = [f"e{i}" + (f"+{k}" if k else "") for k in range(4) for i in range(8)]
    faults = tuple((5.0 + 20.0 * (i // 8) + i % 8 / 10, EngineId(n)) for i, n in enumerate(names))
    monkeypatch.setattr(f"{__name__}.FAULTS", faults)
    for world in (simulated, on_the_event_loop):
        with pytest.raises(StuckError):
            world(regime, "verl")


def test_the_loops_have_what_they_are_for():
    entries = on_the_event_loop("areal:max_head_offpolicyness=1", "verl").entries
    events = [type(event) for event, _ in entries]
    commands = [type(command) for _, each in entries for command in each]
    assert events.count(Trained) == commands.count(Train) == BATCHES
    assert events.count(EngineFailed) == 2
    assert events.count(StartFailed) > 0
    assert events.count(StepPreempted) > 0, "no update has interrupted a step"
    assert 0 < events.count(EngineUpdated) <= commands.count(UpdateWeights)
    assert commands.count(Cancel) > 0
    assert commands.count(StartTrajectory) > BATCHES * GROUPS * SAMPLES
