"""Whole rollouts over engines by URL whose servers die at random and are started again."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed; pip install 'heddle-rl[serve]'")

from campaigns.faults.scenario import Scenario, context_of
from heddle.policies.plugins import load_policy
from heddle_core import Controller, Entry, collecting
from heddle_core.events import EngineFailed, StepFinished, StepPreempted, TrajectoryFinished
from heddle_core.ids import EngineShape
from heddle_rollout.core import RecordedCore
from heddle_rollout.engines import StepResult
from heddle_rollout.scripted_agent import ScriptedAgent, TokenSource
from heddle_runtime.clock import RunClock
from heddle_runtime.rollout import RolloutRun
from heddle_runtime.vllm_http.launcher import HttpLauncher
from heddle_runtime.vllm_http.settings import HttpSettings
from heddle_trace import TrajectoryScript
from tests.patience import PATIENCE_S
from tests.rollout.one_world import script, step
from tests.runtime.counting_process import next_token
from tests.runtime.fake_vllm import MODEL, FakeVllm

ENGINES, SLOTS, TRAJECTORIES, STEPS = 3, 3, 14, 3
DEATHS = 2
"""Of each server: an engine that has failed more often counts as broken."""
SETTINGS = HttpSettings(
    sample_s=0.1, health_s=0.2, retry_s=0.05, answer_limit_s=20.0, stream_interval=4
)


def scripts(seed: int) -> list[TrajectoryScript]:
    draw = random.Random(seed)
    made = []
    for i in range(TRAJECTORIES):
        steps, context = [], 100
        for at in range(STEPS):
            output = draw.randrange(40, 260)
            last = at == STEPS - 1
            shared = context - 30 if at else 0
            tool = None if last else "sh"
            steps.append(step(context, output, shared=shared, tool=tool, tool_s=0.05))
            context += output + 30
        made.append(script(f"t{i}", *steps))
    return made


class Checked(ScriptedAgent):
    """Its tokens must be those of an undisturbed run, at the end of each dispatch."""

    def on_step_end(self, result: StepResult) -> None:
        context = list(self.context_ids)
        for token in result.output_ids:
            assert token == next_token(context, MODEL)
            context.append(token)
        super().on_step_end(result)


class Trial:
    """One rollout, and what its journal says."""

    def __init__(self, policy: str, seed: int) -> None:
        self.entries: list[Entry] = []
        self.generated = 0
        self._policy, self._seed = policy, seed

    async def run(self, disturb: Callable[[list[FakeVllm]], asyncio.Task[None]]) -> None:
        context = replace(
            context_of(Scenario(faults=(), slots=SLOTS)),
            pools={"h100": ENGINES},
            shape_choices=(EngineShape("h100", 1),),
        )
        controller = Controller(load_policy(self._policy, context))
        launcher = HttpLauncher(SETTINGS)
        servers = [await FakeVllm().start() for _ in range(ENGINES)]
        for server in servers:
            await launcher.add(server.url, gpu="h100")
        clock = RunClock(asyncio.get_running_loop())
        tokens = TokenSource(1500, seed=self._seed)
        run = RolloutRun(
            [Checked(each, clock, tokens=tokens) for each in scripts(self._seed)],
            RecordedCore(controller, collecting(self.entries)),
            launcher,
            clock,
        )
        disturbing = disturb(servers)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await run.run()
            controller.ledger.check()
        finally:
            disturbing.cancel()
            await asyncio.wait({disturbing})
            await launcher.close()
            for server in servers:
                self.generated += server.generated
                await server.close()

    def count(self, kind: type) -> int:
        return sum(isinstance(entry.event, kind) for entry in self.entries)


@pytest.mark.parametrize("policy", ["verl", "heddle"])
def test_no_trajectory_is_lost_and_no_token_made_twice_when_servers_die(policy):
    draw = random.Random(policy)

    def kill(servers: list[FakeVllm]) -> asyncio.Task[None]:
        async def main() -> None:
            for victim in draw.sample(servers * DEATHS, ENGINES * DEATHS):
                await asyncio.sleep(draw.uniform(0.1, 0.6))
                victim.die()
                await asyncio.sleep(draw.uniform(0.0, 0.2))
                await victim.start()

        return asyncio.get_running_loop().create_task(main())

    trial = Trial(policy, seed=3)
    asyncio.run(trial.run(kill))
    assert trial.count(EngineFailed) >= ENGINES
    ends = [e.event for e in trial.entries if isinstance(e.event, TrajectoryFinished)]
    assert [each.outcome for each in ends] == ["completed"] * TRAJECTORIES
    wanted = sum(each.output_tokens for s in scripts(3) for each in s.steps)
    kept = sum(
        e.event.output_tokens
        for e in trial.entries
        if isinstance(e.event, StepFinished | StepPreempted)
    ) + sum(
        tokens
        for e in trial.entries
        if isinstance(e.event, EngineFailed)
        for _, tokens in e.event.salvaged
    )
    assert kept == wanted
    # What was made and not kept: the last tokens before each death, and probes.
    lost_at_most = SLOTS * (SETTINGS.stream_interval + 64)
    assert trial.generated - wanted <= trial.count(EngineFailed) * lost_at_most
