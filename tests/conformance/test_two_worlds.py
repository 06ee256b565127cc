"""L2: the same scenario through SimPy and through asyncio gives the same journal, digit by digit.

One driver runs in both, on simulated engines; what is compared are two clocks, and engines whose
simulated time is the clock's or follows it. At equal times each kernel has an order of its own, so
that the scenarios have no ties: engines differ in speed by about a millionth.
"""

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from campaigns.faults.scenario import Scenario, controller_of, scripts_of, world_of
from heddle_core import Entry, collecting, first_divergence
from heddle_core.commands import Preempt
from heddle_core.events import EngineFailed, MigrationFinished
from heddle_core.ids import EngineId
from heddle_core.presets import PRESETS
from heddle_rollout.core import RecordedCore
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_rollout.services import CoreEstimates
from heddle_runtime.clock import RunClock
from heddle_runtime.rollout import RolloutRun
from heddle_runtime.virtual_time import run_virtual
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimLauncher
from heddle_sim.rollout import simulate_rollout
from heddle_sim.services import Latency, ServiceConfig, ToolServices
from heddle_trace import TrajectoryScript
from tests.in_turn import in_turn

ROOT = Path(__file__).resolve().parents[2]
MIXED = (
    "verl+lpt+history+balance+headroom",
    "heddle+exact+served",
    "heddle+exact+awaited",
    "heddle+progressive+portfolio",
    "slime-2026+autellix+headroom",
)
FAULTS = (
    (3.137, EngineId("e7")),
    (9.071, EngineId("e1")),
    (11.173, EngineId("e0")),
    (41.377, EngineId("e0+1")),
    (55.713, EngineId("e2")),
)
SCENARIOS = {
    "calm": Scenario(faults=(), tool_capacity=None),
    "storm": Scenario(faults=FAULTS, tool_capacity=12),
    "pools": Scenario(
        faults=FAULTS[1:2],
        tools=ToolServices(
            pools={"sandbox": ServiceConfig(capacity=6, failure_rate=0.1, timeout_s=9.0)},
            others=ServiceConfig(),
            latency=Latency(seconds=3.0, sigma=2.0),
        ),
    ),
    "search": Scenario(workload="search", faults=FAULTS[1:2], tool_capacity=4, with_history=True),
    "math": Scenario(workload="math", faults=FAULTS[2:4], with_history=True),
    "host": Scenario(faults=FAULTS, with_history=True, host_kv="engine"),
    "store": Scenario(workload="search", faults=FAULTS, host_kv="cluster"),
    "roles": Scenario(
        faults=((4.31, EngineId("p1")), *FAULTS[1:3]), prefill_gpus=2, threshold_tokens=200
    ),
}


def speed(engine: EngineId) -> float:
    """Another speed for each engine, so that no two of them ever do anything at once."""
    digest = hashlib.sha256(engine.encode()).digest()
    return 1.0 + int.from_bytes(digest[:4], "little") / 2**32 * 1e-6


def untied(scripts: Sequence[TrajectoryScript]) -> list[TrajectoryScript]:
    """Arrivals a moment apart, as real ones are; tools differ in the last digits anyway."""
    return [replace(s, arrival_s=i * 1e-3) for i, s in enumerate(scripts)]


def scripts_for(scenario: Scenario) -> list[TrajectoryScript]:
    return untied(scripts_of(scenario.workload, scenario.trajectories, scenario.seed))


def world_for(scenario: Scenario) -> SimulationConfig:
    return replace(world_of(scenario), speed=speed)


def simulated(name: str, scenario: Scenario) -> list[Entry]:
    entries: list[Entry] = []
    controller = controller_of(name, scenario)
    core = RecordedCore(controller, collecting(entries))
    simulate_rollout(scripts_for(scenario), core, world_for(scenario))
    return entries


def on_the_event_loop(name: str, scenario: Scenario) -> list[Entry]:

    entries: list[Entry] = []
    world = world_for(scenario)

    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop())
        controller = controller_of(name, scenario)
        launcher = SimLauncher(world, clock)
        launcher.schedule_faults()
        await RolloutRun(
            [ScriptedAgent(script, clock) for script in scripts_for(scenario)],
            RecordedCore(controller, collecting(entries)),
            launcher,
            clock,
            tool_capacity=world.tool_capacity,
            tool_pools=world.tool_pools(clock),
            predictions=CoreEstimates(clock, world.prediction_s),
            report_interval_s=world.report_interval_s,
            report_delay_s=world.report_delay_s,
        ).run()
        await launcher.close()

    run_virtual(main())
    return entries


def agree(one: Sequence[Entry], other: Sequence[Entry]) -> None:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        assert a.event == b.event, f"entry {index}"
        assert tuple(a.commands) == tuple(b.commands), f"entry {index}, {a.event}"
    assert len(one) == len(other)


@pytest.mark.parametrize(
    ("name", "scenario"), in_turn([*PRESETS, *MIXED], [*SCENARIOS], always=["storm"])
)
def test_simulated_and_real_clock_give_the_same_journal(name: str, scenario: str) -> None:
    here, there = simulated(name, SCENARIOS[scenario]), on_the_event_loop(name, SCENARIOS[scenario])
    agree(here, there)
    fresh = controller_of(name, SCENARIOS[scenario])
    assert first_divergence(there, fresh.handle) is None


def test_the_scenarios_have_what_they_are_for() -> None:
    paper = on_the_event_loop("heddle-paper", SCENARIOS["storm"])
    ours = on_the_event_loop("heddle+progressive+portfolio", SCENARIOS["storm"])
    assert sum(isinstance(e.event, EngineFailed) for e in paper) >= 3
    assert any(isinstance(c, Preempt) for e in paper for c in e.commands)
    for entries in (paper, ours):
        moves = [e.event for e in entries if isinstance(e.event, MigrationFinished)]
        assert any(m.ok and m.way == "kv" and m.kv_tokens for m in moves)
    assert any(not m.ok for m in moves), "no move was ever given up or lost"


@cache
def digests() -> list[str]:
    """One line for each policy: its name and a digest of its asyncio journal."""
    return [
        hashlib.sha256(repr(on_the_event_loop(name, SCENARIOS["storm"])).encode()).hexdigest()
        for name in (*PRESETS, *MIXED)
    ]


@pytest.mark.xdist_group("two worlds")
@pytest.mark.parametrize("hash_seed", ["0", "77"])
def test_in_another_process_with_another_hash_seed(hash_seed: str) -> None:
    code = "from tests.conformance.test_two_worlds import digests; print(*digests(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == digests()
