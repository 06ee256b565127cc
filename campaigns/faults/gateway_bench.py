"""A gateway on simulated engines, in virtual time or for HTTP, and the journal of what it did."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from heddle.cluster.config import ClusterConfig
from heddle.cluster.gpu_pools import PoolConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.setup import RunSetup, prepare
from heddle.workload import ReplayedTrace, Workload
from heddle_core.commands import Command
from heddle_core.events import Event
from heddle_core.journal import Entry, first_divergence
from heddle_gateway.client_step import ClientStep
from heddle_gateway.fake_engines import WordRenderer, fake_agents
from heddle_gateway.gateway import Gateway
from heddle_gateway.identity import identify
from heddle_gateway.sessions import SessionLimits
from heddle_rollout.core import RecordedCore
from heddle_rollout.engines import Launcher
from heddle_rollout.services import ChargedSolver, CoreEstimates
from heddle_runtime.clock import RunClock
from heddle_runtime.generation import GenerationEnd, Rendered
from heddle_runtime.virtual_time import run_virtual
from heddle_sim.engine_client import SimLauncher

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"


def set_up(
    policy: str = "heddle",
    *,
    engines: int = 2,
    slots: int = 4,
    tps: tuple[int, ...] = (1,),
    gpus: tuple[str, ...] = (),
) -> RunSetup:
    """Set up engines of one GPU each, without a trace; of each of `gpus`, if there are any."""
    pool = tuple(PoolConfig(gpu=gpu, gpus=engines) for gpu in gpus)
    config = RunConfig(
        trace="gateway",
        policy=PolicyConfig(preset=policy),
        cluster=ClusterConfig(gpus=engines, tp_choices=tps, max_running=slots, pool=pool),
    )
    tasks = Workload(
        trace=ReplayedTrace("gateway", "0" * 64), trajectories=0, largest_tokens=32_768
    )
    return prepare(config, workload=tasks)


class Bench:
    """A gateway, its engines, and every event with its commands."""

    def __init__(
        self,
        setup: RunSetup | None = None,
        *,
        speed: float = 1.0,
        mean_tokens: int = 32,
        limits: SessionLimits | None = None,
        launcher: Launcher | None = None,
        renderer: WordRenderer | None = None,
        **options: Any,
    ) -> None:
        """Without `launcher`, engines are simulated, and tokens made up."""
        self.setup = setup or set_up()
        self.entries: list[Entry] = []
        self.clock = RunClock(asyncio.get_running_loop(), speed=speed)
        self.launcher = SimLauncher(self.setup.simulation, self.clock)
        self.renderer = renderer or WordRenderer("fake")
        if launcher is None:
            options.setdefault("make_agent", fake_agents(mean_tokens))
        self.gateway = Gateway(
            RecordedCore(self.setup.controller(), self._record),
            launcher or self.launcher,
            self.clock,
            predictions=CoreEstimates(self.clock, 0.1),
            solver=ChargedSolver(self.clock),
            sessions=limits,
            report_interval_s=1.0,
            **options,
        )

    def _record(self, event: Event, commands: Sequence[Command]) -> None:
        self.entries.append(Entry(event, tuple(commands)))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Bench]:
        """Serve; close it at the end."""
        serving = asyncio.get_running_loop().create_task(self.gateway.run())
        try:
            while not (self.gateway.ready or serving.done()):
                await asyncio.sleep(0.01)
            yield self
        finally:
            await self.gateway.close(1.0)
            await serving

    def events(self, kind: type[Any]) -> list[Any]:
        """Return the events of a kind so far."""
        return [e.event for e in self.entries if isinstance(e.event, kind)]

    def replays(self) -> bool:
        """Whether a fresh controller gives the same commands for the same events."""
        controller = set_up_again(self.setup).controller()
        return first_divergence(iter(self.entries), controller.handle) is None

    # -- a client in this process ------------------------------------------------------------------

    def submit(self, session: str, ids: Sequence[int], tokens: int = 8, **who: Any) -> ClientStep:
        """Send a request; its answer is awaited with `ClientStep.answer`."""
        sampling = who.pop("sampling", {})
        has_reply = who.pop("has_reply", None)
        rendered = Rendered(prompt_ids=array("I", ids), sampling=sampling)
        step = ClientStep(GENERATE, rendered, max_tokens=tokens)
        identity = msgspec.structs.replace(identify({}, {}, path_session=session), **who)
        return self.gateway.submit(identity, step, has_reply=has_reply)

    async def step(
        self, session: str, ids: Sequence[int], tokens: int = 8, **who: Any
    ) -> list[int]:
        """One request and its answer: prompt and output together."""
        step = self.submit(session, ids, tokens, **who)
        await step.answer()
        self.gateway.sessions.release(step, delivered=True)
        return [*ids, *step.output_ids]

    async def end(self, session: str, ids: Sequence[int], tokens: int = 8) -> GenerationEnd:
        """Send a request, and return how its generation ended."""
        step = self.submit(session, ids, tokens)
        end = await step.answer()
        self.gateway.sessions.release(step, delivered=True)
        return end


def set_up_again(setup: RunSetup) -> RunSetup:
    """Set up the same with parts of its own."""
    return prepare(setup.config, workload=setup.workload)


def in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    """Run a scene to its end."""
    run_virtual(main)


def prompt(seed: int, tokens: int = 100) -> list[int]:
    """Token ids that differ between seeds from the first on."""
    return [16 + (seed * 7919 + n * 31) % 40_000 for n in range(tokens)]
