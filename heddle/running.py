"""One run on engines that are there: where work, policy, driver, launcher and run directory meet.

The counterpart of `heddle.simulation`, from which it takes all that is not the world.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.engines import facts_of, open_vllm, vocabulary_of, world_of_engines
from heddle.knowledge import asks_for_oracle, model_of, sees_the_future, taught, told
from heddle.live import Fence, agents_at_work, fence_of, work_of_live
from heddle.runs import RunDirectory, RunFacts, open_run
from heddle.signals import Asked
from heddle.simulation import (
    RunResult,
    policy_of,
    profile_of,
    setting_of,
    solo_tpot_of,
    workload_of,
    world_of,
)
from heddle_core.controller import Controller
from heddle_core.events import EngineReady, TrajectoryFinished
from heddle_core.ids import EngineId
from heddle_core.journal import Entry
from heddle_rollout.agents import Agent
from heddle_rollout.core import RecordedCore
from heddle_rollout.engines import Launcher
from heddle_rollout.scripted_agent import ScriptedAgent, TokenSource
from heddle_rollout.services import ChargedSolver, CoreEstimates, Solver
from heddle_runtime.clock import RunClock
from heddle_runtime.rollout import RolloutRun
from heddle_runtime.services import WorkerSolver
from heddle_runtime.vllm_launcher import VllmLauncher
from heddle_sim.engine_client import SimLauncher
from heddle_trace.schema import Trace

FLUSH_S = 5.0
"""A run on engines cannot be had again for nothing: its journal is on disk this often."""

OnProgress = Callable[[int, int], None]
"""Told how many trajectories have finished, and of how many."""
OnNote = Callable[[str], None]
"""Told, before anything is started, what the user should know; a line each."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What is rolled out, a trace or live agents' tasks."""

    trace: Trace
    """Of tasks, their name and hash only."""
    trajectories: int
    largest_tokens: int
    """The largest context that an engine must hold."""
    notes: Mapping[str, Any]
    fence: Fence | None = None
    """Of live agents."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a run needs of its engines."""

    clock: RunClock
    launcher: Launcher
    solver: Solver
    tokens: TokenSource | None
    tool_scale: float
    report_delay_s: float
    facts: Callable[[EngineId], Mapping[str, Any]] = lambda engine: {}
    """What an engine that has just become ready said of itself."""


def run(
    config: RunConfig,
    *,
    out: Path = Path("runs"),
    config_text: str | None = None,
    on_progress: OnProgress = lambda done, total: None,
    on_note: OnNote = lambda note: None,
) -> RunResult:
    """Roll a trace, or live agents, out under a policy on the engines that `config.runtime` names.

    Ctrl-C, SIGTERM or SIGHUP winds the run up: the tokens of running steps are handed over, all
    trajectories are cancelled, engines end, and the run directory is closed as interrupted. A
    second one ends it without the tokens; more change nothing.

    Raises:
        ValueError: one of the packages' errors for bad input, before anything is started.
        SandboxUnavailableError: live agents' programs cannot be kept in; before that, too.
        OSError: the run directory cannot be written.
        KeyboardInterrupt: a signal asked to end; `Terminated` unless it was Ctrl-C.
    """
    job = _live_job(config) if config.live.agents else _replay_job(config)
    profile = profile_of(config.cluster)
    history = told(config.history, job.trace, config.missing)
    setting = setting_of(
        config.cluster,
        profile,
        config.seed,
        largest_tokens=job.largest_tokens,
        history=history.history,
        learned=taught(config.predictor_model).model,
    )
    policy = policy_of(config, setting)
    config = replace(config, history=history.name)
    world = _world_of(config, job)
    for note in world["notes"]:
        on_note(note)
    facts = RunFacts(
        driver="heddle_runtime",
        trace_name=job.trace.name,
        trace_sha256=job.trace.sha256,
        oracle=sees_the_future(policy),
        history=history.plain(),
        predictor_model=model_of(config, policy.predictor, job.trace),
        setting=setting,
        world=world,
    )
    began_s = time.perf_counter()
    # Asked to end inside and out: between the two nothing is open that would have to be closed.
    with Asked() as asked, open_run(out, config, facts, config_text=config_text) as directory:
        sink = _Sink(directory, job.trajectories, on_progress)
        with asked.put_off():
            asyncio.run(_roll_out(config, Controller(policy), sink, job.fence, asked))
        measured = directory.finish(
            solo_tpot=solo_tpot_of(profile, config.cluster), notes=job.notes
        )
    return RunResult(
        config.policy.preset,
        config.seed,
        directory.path,
        {**measured.summary, **job.notes},
        time.perf_counter() - began_s,
    )


def _replay_job(config: RunConfig) -> _Job:
    work = workload_of(config)
    notes = {**work.filled, "dropped_over_capacity": len(work.dropped)}
    return _Job(work.trace, len(work.scripts), work.largest_tokens, notes)


def _live_job(config: RunConfig) -> _Job:
    if asks_for_oracle(config.policy.preset):
        raise ConfigError(
            f"policy {config.policy.preset}: nobody knows the future of live agents; "
            "take a policy without an oracle"
        )
    if config.runtime.engine == "fake":
        raise ConfigError("live agents need a model that writes: --engine vllm --model-dir DIR")
    work = work_of_live(config)
    trace = Trace(work.file.name, (), work.file.sha256)
    return _Job(trace, work.trajectories, work.limits.context_tokens, {}, fence_of(work))


def _world_of(config: RunConfig, job: _Job) -> dict[str, Any]:
    """What the manifest says of engines, machine and sandbox, these being checked."""
    world = world_of_engines(config, job.largest_tokens)
    if job.fence is None:
        return world
    notes = [*world["notes"], *([job.fence.note] if job.fence.note else [])]
    return {**world, "sandbox": job.fence.way, "notes": notes}


class _Sink:
    """Appends to the journal, at once for what cannot be had again, and counts the finished."""

    def __init__(self, directory: RunDirectory, total: int, on_progress: OnProgress) -> None:
        self.path = directory.path
        self.facts: Callable[[EngineId], Mapping[str, Any]] = lambda engine: {}
        """What an engine that has just become ready said of itself."""
        self._directory, self._total, self._on_progress = directory, total, on_progress
        self._engines: dict[EngineId, Mapping[str, Any]] = {}
        self._done = 0
        self._flushed_s = time.monotonic()

    def __call__(self, entry: Entry) -> None:
        """Take one entry of the journal."""
        self._directory.append(entry)
        match entry.event:
            case TrajectoryFinished():
                self._done += 1
                self._on_progress(self._done, self._total)
            case EngineReady(engine=engine) as ready:
                self._engines[engine] = {
                    "tp": ready.shape.tp,
                    "max_running": ready.max_running,
                    "kv_capacity_tokens": ready.kv_capacity_tokens,
                    **self.facts(engine),
                }
                self._directory.learn(engines=self._engines)
        if time.monotonic() - self._flushed_s > FLUSH_S:
            self._directory.flush()
            self._flushed_s = time.monotonic()


async def _roll_out(
    config: RunConfig, controller: Controller, sink: _Sink, fence: Fence | None, asked: Asked
) -> None:
    cluster = config.cluster
    stage = _fake(config) if config.runtime.engine == "fake" else _vllm(config, sink.path)
    sink.facts = stage.facts
    try:
        async with _agents(config, stage, sink.path, fence) as agents:
            rollout = RolloutRun(
                agents,
                RecordedCore(controller, sink),
                stage.launcher,
                stage.clock,
                tool_capacity=cluster.tool_capacity,
                tool_limit_s=config.runtime.tool_limit_s,
                predictions=CoreEstimates(stage.clock, cluster.prediction_s),
                solver=stage.solver,
                report_interval_s=cluster.report_interval_s,
                report_delay_s=stage.report_delay_s,
            )
            await _interruptible(rollout, asked)
    finally:
        if isinstance(stage.solver, WorkerSolver):
            stage.solver.close()
        await stage.launcher.close()


@asynccontextmanager
async def _agents(
    config: RunConfig, stage: _Stage, path: Path, fence: Fence | None
) -> AsyncIterator[Sequence[Agent]]:
    if fence is not None:
        async with agents_at_work(config, path, fence) as agents:
            yield agents
        return
    scripts = workload_of(config).scripts
    first_arrival_s = min(script.arrival_s for script in scripts)
    yield [
        ScriptedAgent(
            script,
            stage.clock,
            first_arrival_s=first_arrival_s,
            tokens=stage.tokens,
            tool_scale=stage.tool_scale,
        )
        for script in scripts
    ]


async def _interruptible(rollout: RolloutRun, asked: Asked) -> None:
    """Run to the end; the first signal winds the run up, a second one ends it as it is."""
    loop = asyncio.get_running_loop()
    running = loop.create_task(rollout.run())
    winding_up: list[asyncio.Task[None]] = []

    def end(count: int) -> None:
        if count == 1:
            winding_up.append(loop.create_task(rollout.interrupt()))
        else:
            running.cancel()

    # Out of a signal handler: the loop may be asleep, and wakes up for such a call only.
    with (
        asked.told_to(lambda count: loop.call_soon_threadsafe(end, count)),
        suppress(asyncio.CancelledError),
    ):
        await running


# -- engines that keep time only --------------------------------------------------------------


def _fake(config: RunConfig) -> _Stage:
    world = world_of(config.cluster, profile_of(config.cluster))
    clock = RunClock(asyncio.get_running_loop(), speed=1.0 / config.runtime.time_scale)
    launcher = SimLauncher(world, clock)
    launcher.schedule_faults()
    return _Stage(clock, launcher, ChargedSolver(clock), None, 1.0, world.report_delay_s)


# -- vLLM -------------------------------------------------------------------------------------


def _vllm(config: RunConfig, path: Path) -> _Stage:
    clock = RunClock(asyncio.get_running_loop())
    launcher = open_vllm(config, path / "engines")
    for time_s, name in config.cluster.faults():
        clock.call_at(time_s, partial(_kill, launcher, EngineId(name)))
    tokens = TokenSource(vocabulary_of(config.runtime.model_dir), seed=config.seed)
    scale = config.runtime.time_scale
    facts = partial(facts_of, launcher)
    return _Stage(clock, launcher, WorkerSolver(), tokens, scale, 0.0, facts)


def _kill(launcher: VllmLauncher, name: EngineId) -> None:
    """Do to a real engine what `--failures` asks for: its processes are gone, unasked."""
    pid = launcher.pid(name)
    if pid is not None:
        os.killpg(pid, signal.SIGKILL)
