"""A small simulation with the simple numbers of `one_engine` and commands given by hand.

A step of `p` prompt tokens and `n` output tokens alone on an engine takes ``1 + p / 100`` seconds
to its first token and 1.1 seconds for each of the others.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from heddle_core.commands import Command, Dispatch, StartEngine
from heddle_core.events import (
    Event,
    RolloutStarted,
    ToolReturned,
    TrajectoryArrived,
)
from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_rollout.core import Core
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_rollout.services import ChargedSolver, CoreEstimates
from heddle_runtime.clock import RunClock
from heddle_runtime.rollout import RolloutRun
from heddle_runtime.virtual_time import run_virtual
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimLauncher
from heddle_sim.rollout import simulate_rollout
from heddle_trace.schema import StepScript, TrajectoryScript
from tests.sim.one_engine import table

E0, E1 = EngineId("e0"), EngineId("e1")
A, B, C = TrajectoryId("a"), TrajectoryId("b"), TrajectoryId("c")


def step(
    prompt: int,
    output: int,
    *,
    shared: int = 0,
    tool_s: float = 0.0,
    tool: str | None = "sh",
    tool_tokens: int = 0,
    ok: bool | None = True,
) -> StepScript:
    return StepScript(
        prompt_tokens=prompt,
        shared_tokens=shared,
        output_tokens=output,
        tool=tool,
        tool_s=tool_s,
        tool_ok=ok,
        tool_tokens=tool_tokens,
    )


def script(
    name: str, *steps: StepScript, arrival_s: float = 0.0, truncated: bool = False
) -> TrajectoryScript:
    """A trajectory alone in its group; its last step ends without a tool unless it names one."""
    return TrajectoryScript(
        id=name, group=name, task="t", arrival_s=arrival_s, steps=steps, truncated=truncated
    )


def answer(name: str, prompt: int, output: int, **fields: Any) -> TrajectoryScript:
    """A trajectory of one step."""
    return script(name, step(prompt, output, tool=None), **fields)


def start(engine: EngineId = E0, *, slots: int = 8) -> StartEngine:
    return StartEngine(engine=engine, shape=EngineShape("g", 1), max_running=slots)


def dispatch(name: TrajectoryId, at: int = 0, engine: EngineId = E0) -> Dispatch:
    return Dispatch(trajectory=name, step=at, engine=engine, priority=0.0)


def world(**changes: Any) -> SimulationConfig:
    fields: dict[str, Any] = {
        "table": lambda shape: table(),
        "transfer_fixed_s": 2.0,
        "transfer_bytes_per_s": 100.0,
        "report_interval_s": 0.0,
    }
    return SimulationConfig(**(fields | changes))


def run_on(
    clock: str, scripts: Sequence[TrajectoryScript], core: Core, config: SimulationConfig
) -> None:
    """Run one rollout in simulated time, or on an event loop in virtual time."""
    if clock == "simpy":
        simulate_rollout(scripts, core, config)
        return

    async def main() -> None:
        run_clock = RunClock(asyncio.get_running_loop())
        launcher = SimLauncher(config, run_clock)
        launcher.schedule_faults()
        first_arrival_s = min((script.arrival_s for script in scripts), default=0.0)
        await RolloutRun(
            [ScriptedAgent(s, run_clock, first_arrival_s=first_arrival_s) for s in scripts],
            core,
            launcher,
            run_clock,
            predictions=CoreEstimates(run_clock, config.prediction_s),
            solver=ChargedSolver(run_clock, config.planning_s),
            tool_capacity=config.tool_capacity,
            report_interval_s=config.report_interval_s,
            report_delay_s=config.report_delay_s,
        ).run()

    async def bounded() -> None:
        async with asyncio.timeout(1e9):  # of virtual time: reached when nothing else is waited for
            await main()

    run_virtual(bounded())


Answer = Callable[[Event], Sequence[Command]]


class Run:
    """A rollout whose commands the test gives, and every event that came of them.

    Unless `extra` says otherwise for an event, engines of `engines` start, and every step goes to
    the first of them. Tests set `clock`.
    """

    clock = "simpy"

    def __init__(
        self,
        *scripts: TrajectoryScript,
        engines: Sequence[EngineId] = (E0,),
        extra: Callable[[Event], Sequence[Command] | None] = lambda _: None,
        deadline: Callable[[], float | None] = lambda: None,
        **changes: Any,
    ) -> None:
        self.engines, self.extra, self.deadline = engines, extra, deadline
        self.events: list[Event] = []
        run_on(self.clock, scripts, self, world(**changes))

    @property
    def deadline_s(self) -> float | None:
        return self.deadline()

    def handle(self, event: Event) -> Sequence[Command]:
        self.events.append(event)
        said = self.extra(event)
        if said is not None:
            return said
        match event:
            case RolloutStarted():
                return [start(e) for e in self.engines]
            case TrajectoryArrived():
                return [dispatch(event.trajectory, engine=self.engines[0])]
            case ToolReturned():
                return [dispatch(event.trajectory, event.step + 1, self.engines[0])]
            case _:
                return []

    def all(self, kind: type[Any]) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    def one(self, kind: type[Any]) -> Any:
        [event] = self.all(kind)
        return event

    def event_times(self) -> list[tuple[str, float]]:
        """Names and times of all events but those of the start."""
        names = ("RolloutStarted", "EngineReady", "TrajectoryArrived")
        return [
            (type(e).__name__, round(e.time_s, 6))
            for e in self.events
            if type(e).__name__ not in names
        ]
