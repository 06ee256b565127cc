"""One run on engines that are there: where trace, policy, driver, launcher and run directory meet.

The counterpart of `heddle.simulation`, from which it takes all that is not the world.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import simpy

from heddle.config import RunConfig
from heddle.engines import model_facts, open_vllm
from heddle.knowledge import sees_the_future
from heddle.runs import RunDirectory, RunFacts, open_run
from heddle.simulation import (
    RunResult,
    policy_of,
    profile_of,
    setting_for,
    solo_tpot_of,
    told_of,
    workload_of,
    world_of,
)
from heddle_core.controller import Controller
from heddle_core.events import TrajectoryFinished
from heddle_core.journal import Entry, recorded
from heddle_runtime.clock import RunClock
from heddle_runtime.driver import AsyncDriver
from heddle_runtime.engine import EngineSpec, Launcher
from heddle_runtime.fake_engine import EngineModel, FakeLauncher, ModelEnd
from heddle_runtime.replay import ReplayAgent, TokenSource
from heddle_runtime.services import Solver, WorkerSolver, charged_solver
from heddle_sim.cluster import World
from heddle_sim.engine import SimEngine

OnProgress = Callable[[int, int], None]
"""Told how many trajectories have finished, and of how many."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a run needs of its engines."""

    clock: RunClock
    launcher: Launcher
    solver: Solver
    tokens: TokenSource | None
    tool_scale: float
    report_delay_s: float


def run(
    config: RunConfig,
    *,
    out: Path = Path("runs"),
    config_text: str | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> RunResult:
    """Replay a trace under a policy on the engines that `config.runtime` names.

    Ctrl-C winds the run up: the tokens of running steps are handed over, all trajectories are
    cancelled, engines end, and the run directory is closed as interrupted.

    Raises:
        ValueError: one of the packages' errors for bad input, before anything is started.
        OSError: the run directory cannot be written.
    """
    work = workload_of(config)
    profile = profile_of(config.cluster)
    history = told_of(config)
    setting = setting_for(config)
    policy = policy_of(config, setting)
    config = replace(config, history=history.name)
    facts = RunFacts(
        driver="heddle_runtime",
        trace_name=work.trace.name,
        trace_sha256=work.trace.sha256,
        oracle=sees_the_future(policy),
        history=history.plain(),
        setting=setting,
        world=model_facts(config, work.largest_tokens),
    )
    began_s = time.perf_counter()
    with open_run(out, config, facts, config_text=config_text) as directory:
        controller = Controller(policy)
        sink = _Sink(directory, len(work.scripts), on_progress)
        asyncio.run(_roll_out(config, controller, sink, directory.path))
        notes = {**work.filled, "dropped_over_capacity": len(work.dropped)}
        measured = directory.finish(solo_tpot=solo_tpot_of(profile, config.cluster), notes=notes)
    return RunResult(
        config.policy.preset,
        config.seed,
        directory.path,
        {**measured.summary, **notes},
        time.perf_counter() - began_s,
    )


class _Sink:
    """Appends to the journal, at once for what cannot be had again, and counts the finished."""

    def __init__(self, directory: RunDirectory, total: int, on_progress: OnProgress) -> None:
        self._directory, self._total, self._on_progress = directory, total, on_progress
        self._done = 0
        self._flushed_s = time.monotonic()

    def __call__(self, entry: Entry) -> None:
        """Take one entry of the journal."""
        self._directory.append(entry)
        if isinstance(entry.event, TrajectoryFinished):
            self._done += 1
            self._on_progress(self._done, self._total)
        if time.monotonic() - self._flushed_s > FLUSH_S:
            self._directory.flush()
            self._flushed_s = time.monotonic()


FLUSH_S = 5.0
"""A run on engines cannot be had again for nothing: its journal is on disk this often."""


async def _roll_out(
    config: RunConfig, controller: Controller, sink: Callable[[Entry], None], path: Path
) -> None:
    cluster, runtime = config.cluster, config.runtime
    scripts = workload_of(config).scripts
    world = world_of(cluster, profile_of(cluster))
    stage = _fake(config, world) if runtime.engine == "fake" else _vllm(config, path)
    first_arrival_s = min(script.arrival_s for script in scripts)
    agents = [
        ReplayAgent(
            script,
            stage.clock,
            first_arrival_s=first_arrival_s,
            tokens=stage.tokens,
            tool_scale=stage.tool_scale,
        )
        for script in scripts
    ]
    driver = AsyncDriver(
        agents,
        recorded(controller.handle, sink),
        stage.launcher,
        stage.clock,
        deadline=lambda: controller.deadline_s,
        tool_capacity=cluster.tool_capacity,
        tool_limit_s=runtime.tool_limit_s,
        prediction_s=cluster.prediction_s,
        solver=stage.solver,
        report_interval_s=cluster.report_interval_s,
        report_delay_s=stage.report_delay_s,
    )
    try:
        await _interruptible(driver)
    finally:
        if isinstance(stage.solver, WorkerSolver):
            stage.solver.close()
        await asyncio.shield(stage.launcher.close())


async def _interruptible(driver: AsyncDriver) -> None:
    """Run to the end; the first signal winds the run up, a second one ends it as it is."""
    loop = asyncio.get_running_loop()
    running = loop.create_task(driver.run())
    came: list[int] = []

    def on_signal(number: int) -> None:
        came.append(number)
        if len(came) == 1:
            winding_up.append(loop.create_task(driver.interrupt()))
        else:
            running.cancel()

    winding_up: list[asyncio.Task[None]] = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _heeded(n)]
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        with suppress(asyncio.CancelledError):
            await running
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    if came:
        raise KeyboardInterrupt(f"ended by {signal.Signals(came[0]).name}")


def _heeded(number: int) -> bool:
    """A signal that is ignored, as under nohup, stays ignored."""
    return signal.getsignal(number) is not signal.SIG_IGN


# -- engines that keep time only --------------------------------------------------------------------


def _fake(config: RunConfig, world: World) -> _Stage:
    clock = RunClock(asyncio.get_running_loop(), speed=1.0 / config.runtime.time_scale)
    launcher = FakeLauncher(
        clock,
        partial(simulated_engine, world),
        transfer=lambda size: world.transfer_fixed_s + size / world.transfer_bytes_per_s,
        start_s=world.engine_start_s,
        faults=world.faults,
    )
    return _Stage(clock, launcher, charged_solver(clock), None, 1.0, world.report_delay_s)


def simulated_engine(
    world: World, env: simpy.Environment, spec: EngineSpec, on_end: Callable[[ModelEnd], None]
) -> EngineModel:
    """Make the simulator's engine, as a fake one keeps time by."""
    return SimEngine(
        env,
        spec.engine,
        world.table(spec.gpu, spec.tp),
        max_running=spec.max_running,
        max_batched_tokens=world.max_batched_tokens,
        block_size=world.block_size,
        prefix_caching=world.prefix_caching,
        on_end=on_end,
        speed=world.speed(spec.engine),
    )


# -- vLLM -------------------------------------------------------------------------------------------


def _vllm(config: RunConfig, path: Path) -> _Stage:
    launcher, vocabulary = open_vllm(config, path / "engines")
    return _Stage(
        RunClock(asyncio.get_running_loop()),
        launcher,
        WorkerSolver(),
        TokenSource(vocabulary, seed=config.seed),
        config.runtime.time_scale,
        0.0,
    )
