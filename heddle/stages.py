"""What a run needs of its engines, whichever they are: launcher, clock, solver and tokens."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from heddle.config import RunConfig
from heddle.engines import facts_of, open_vllm
from heddle.executor import Worker
from heddle.ray.engines import RayEngines
from heddle.setup import RunSetup
from heddle_core.commands import SolvePlan
from heddle_core.ids import EngineId
from heddle_core.plans import ResourcePlan
from heddle_rollout.engines import Launcher
from heddle_rollout.scripted_agent import TokenSource
from heddle_rollout.services import ChargedSolver, ServiceListener, Solver
from heddle_runtime.clock import RunClock
from heddle_runtime.vllm.checks import read_model
from heddle_sim.engine_client import SimLauncher


@dataclass(frozen=True, slots=True)
class Stage:
    """The requirements of a run on its engines."""

    clock: RunClock
    launcher: Launcher
    solver: Solver
    tokens: TokenSource | None
    tool_scale: float
    report_delay_s: float
    facts: Callable[[EngineId], Mapping[str, Any]] = lambda engine: {}
    """Facts reported by an engine that has just become ready."""


async def stage_of(setup: RunSetup, started: RayEngines | None, path: Path) -> Stage:
    """Make what a run on fake engines or vLLM's needs; logs of those here go below `path`.

    Raises:
        ProbeError: a started engine cannot be used.
    """
    if started is not None:
        return await _url_stage(setup.config, started)
    return fake_stage(setup) if setup.config.runtime.engine == "fake" else vllm_stage(setup, path)


def fake_stage(setup: RunSetup) -> Stage:
    """Make what a run on fake engines needs."""
    simulation = setup.simulation
    clock = RunClock(asyncio.get_running_loop(), speed=1.0 / setup.config.runtime.time_scale)
    launcher = SimLauncher(simulation, clock)
    launcher.schedule_faults()
    return Stage(clock, launcher, ChargedSolver(clock), None, 1.0, simulation.report_delay_s)


class ProcessSolver:
    """Searches for plans in another process, without blocking the event loop; a `Solver`."""

    def __init__(self) -> None:
        # Ctrl-C reaches every process of a terminal: the run ends the search itself.
        self._worker = Worker("ignored")
        self._searches: set[asyncio.Task[ResourcePlan]] = set()

    def solve(self, command: SolvePlan, listener: ServiceListener) -> None:
        """Search for a plan."""
        search = asyncio.get_running_loop().create_task(self._search(command))
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)
        search.add_done_callback(partial(_report, command, listener))

    async def _search(self, command: SolvePlan) -> ResourcePlan:
        # In a thread: the start of the process, with all that it imports, takes a second or more.
        search = await asyncio.to_thread(self._worker.submit, command.problem.solve)
        return await asyncio.wrap_future(search)

    def close(self) -> None:
        """End the other process."""
        for search in self._searches:
            search.cancel()
        self._worker.close()


def _report(
    command: SolvePlan, listener: ServiceListener, search: asyncio.Future[ResourcePlan]
) -> None:
    if search.cancelled():
        return
    error = search.exception()
    if error is not None:
        listener.service_failed(error)
    else:
        listener.plan_solved(command, search.result())


def vllm_stage(setup: RunSetup, path: Path) -> Stage:
    """Make what a run on vLLM's engines needs; their logs go into a folder of `path`."""
    config, clock = setup.config, RunClock(asyncio.get_running_loop())
    launcher = open_vllm(config, path / "engines")
    for time_s, name in config.cluster.faults():
        clock.call_at(time_s, launcher.fail, EngineId(name))
    return _stage(config, clock, launcher, facts=partial(facts_of, launcher))


async def _url_stage(config: RunConfig, started: RayEngines) -> Stage:
    # Imported here: other engines need no HTTP.
    from heddle_runtime.vllm_http.launcher import HttpLauncher
    from heddle_runtime.vllm_http.settings import HttpSettings

    runtime = config.runtime
    launcher = HttpLauncher(
        HttpSettings(
            sampling={"temperature": runtime.temperature}, start_limit_s=runtime.start_limit_s
        )
    )
    try:
        for url, tp in zip(started.urls, started.tps, strict=True):
            await launcher.add(url, api_key=started.key, tp=tp)
    except BaseException:
        await launcher.close()
        raise
    return _stage(config, RunClock(asyncio.get_running_loop()), launcher)


def _stage(config: RunConfig, clock: RunClock, launcher: Launcher, **facts: Any) -> Stage:
    model = read_model(config.runtime.model_dir, weights=False)
    tokens = TokenSource(model.vocabulary, seed=config.seed)
    scale = config.runtime.time_scale
    return Stage(clock, launcher, ProcessSolver(), tokens, scale, 0.0, **facts)
