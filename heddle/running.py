"""One run on real engines, or on fake ones in real time: a set-up, the driver, a run directory."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.engine_stack import EngineStack, open_engines
from heddle.engines import engine_facts
from heddle.policies.errors import policy_errors
from heddle.ray.engines import RayEngines, ray_engines
from heddle.runs import RunDirectory
from heddle.setup import RunSetup, prepare
from heddle.signals import StopSignals
from heddle.simulation import RunResult, check_starts_engines, opened_run
from heddle_core.commands import Command
from heddle_core.events import EngineReady, Event, TrajectoryFinished
from heddle_core.ids import EngineId
from heddle_core.journal import Sink
from heddle_core.parts.planner import FixedPlan
from heddle_core.policy import NoConsolidation
from heddle_rollout.agents import Agent
from heddle_rollout.core import RecordedCore
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_rollout.services import CoreEstimates
from heddle_runtime.clock import Lateness
from heddle_runtime.cpu_load import CpuLoad, CpuMeter
from heddle_runtime.rollout import RolloutRun

FLUSH_S = 1.0
"""Seconds between writes of the journal, a millisecond and 7 kB each: a run on engines is expensive
to repeat, and what a gateway answered is not repeated at all."""

OnProgress = Callable[[int, int], None]
"""Called with the numbers of finished and of all trajectories."""
OnNote = Callable[[str], None]
"""Called before anything is started, with notes for the user, a line each."""


def run(
    run: RunConfig | RunSetup,
    *,
    out: Path = Path("runs"),
    config_text: str | None = None,
    on_progress: OnProgress = lambda done, total: None,
    on_note: OnNote = lambda note: None,
) -> RunResult:
    """Replay a trace under a policy on the engines that `config.runtime` names.

    Ctrl-C, SIGTERM or SIGHUP ends the run in order: engines hand over the tokens of running steps,
    all trajectories are cancelled, engines end, and the run directory is closed as interrupted. A
    second signal ends it without the tokens; more change nothing.

    Raises:
        ValueError: one of the packages' errors for bad input, before anything is started.
        OSError: the run directory cannot be written.
        KeyboardInterrupt: a signal ended the run; `Terminated` unless it was Ctrl-C.
    """
    _check(run.config if isinstance(run, RunSetup) else run)
    setup = run if isinstance(run, RunSetup) else prepare(run)
    check_starts_engines(setup)
    with ray_engines(setup.config, setup.workload.largest_tokens, planned_tps(setup)) as engines:
        return _run_on(engines, setup, out, config_text, on_progress, on_note)


def _run_on(
    started: RayEngines | None,
    setup: RunSetup,
    out: Path,
    config_text: str | None,
    on_progress: OnProgress,
    on_note: OnNote,
) -> RunResult:
    engines = _facts_of_engines(setup, started)
    for note in engines["notes"]:
        on_note(note)
    # Signals are deferred: between the rollout and the end, nothing is open that must be closed.
    with opened_run(
        setup, "heddle_runtime", out, config_text=config_text, engines=engines
    ) as opened:
        # Fake engines only keep time, and Ray's are on other nodes, or no children of this process.
        here = setup.config.runtime.engine == "vllm" and started is None
        sink = RunSink(
            opened.directory, setup.workload.trajectories, on_progress, measures_load=here
        )
        with opened.signals.deferred(), policy_errors(setup.policy):
            lateness, load = asyncio.run(_roll_out(setup, started, sink, opened.signals))
        if sink.drafted:
            opened.directory.learn(acceptance=acceptance(sink.drafted))
        return opened.finished(lateness, load)


def _check(config: RunConfig) -> None:
    """Refuse engines that a run cannot use, and prefill engines that cannot hand a step over.

    Raises:
        ConfigError: the message has the remedy.
    """
    if config.runtime.engine == "http":
        raise ConfigError(
            "heddle run starts its engines itself: take --engine vllm or fake; heddle serve uses "
            "engines that run already"
        )
    if not config.cluster.roles:
        return
    if config.runtime.engine == "vllm" and config.runtime.kv_transfer == "none":
        raise ConfigError(
            "cluster.roles needs engines that move KV: give --set runtime.kv_transfer=nixl, or "
            "leave cluster.roles out"
        )


def _facts_of_engines(setup: RunSetup, started: RayEngines | None) -> dict[str, Any]:
    """The manifest's facts of engines and machine, after their checks."""
    facts = engine_facts(setup.config, setup.workload.largest_tokens, planned_tps(setup))
    return facts if started is None else {**facts, **started.facts}


def planned_tps(setup: RunSetup) -> list[int]:
    """TP degrees that the policy may choose before or during the rollout."""
    policy = setup.policy
    if isinstance(policy.planner, FixedPlan) and isinstance(policy.consolidation, NoConsolidation):
        return []
    return [shape.tp for shape in setup.context.shape_choices]


class FlushTimer:
    """Writes entries a second after they came, whether more events follow or not."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._timer: asyncio.TimerHandle | None = None
        self._error: OSError | None = None

    def start(self) -> None:
        """Start it after an entry, unless it runs; inside of the event loop.

        Raises:
            OSError: entries before it could not be written.
        """
        if self._error is not None:
            raise self._error
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        try:
            self._directory.flush()
        except OSError as error:
            self._error = error


class RunSink:
    """Appends to the journal and counts finished trajectories."""

    def __init__(
        self,
        directory: RunDirectory,
        total: int = 0,
        on_progress: OnProgress = lambda done, total: None,
        *,
        measures_load: bool = False,
    ) -> None:
        self.path = directory.path
        self.facts: Callable[[EngineId], Mapping[str, Any]] = lambda engine: {}
        """Facts reported by an engine that has just become ready."""
        self._directory, self._total, self._on_progress = directory, total, on_progress
        self._measures_load = measures_load
        self.drafted: tuple[int, ...] = ()
        """What the engines drafted, as in `heddle_runtime.process.wire.Sampled`."""
        self.meter: CpuMeter | None = None
        """Measures other processes' load, if it is to, since the first engine was ready."""
        self._engines: dict[EngineId, Mapping[str, Any]] = {}
        self._done = 0
        self._timer = FlushTimer(directory)

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        self._directory.record(event, commands)
        match event:
            case TrajectoryFinished():
                self._done += 1
                self._on_progress(self._done, self._total)
            case EngineReady(engine=engine):
                if self._measures_load and self.meter is None:
                    self.meter = CpuMeter()
                self._engines[engine] = {
                    "tp": event.shape.tp,
                    "max_running": event.max_running,
                    "kv_capacity_tokens": event.kv_capacity_tokens,
                    **self.facts(engine),
                }
                self._directory.learn(engines=self._engines)
        self._timer.start()


def acceptance(drafted: Sequence[int]) -> dict[str, Any]:
    """Return what engines accepted by position, of the iterations of sequences that decoded."""
    iterations, *accepted = drafted
    chances = [round(each / max(iterations, 1), 4) for each in accepted]
    return {"iterations": iterations, "accepted": chances}


async def _roll_out(
    setup: RunSetup, started: RayEngines | None, sink: RunSink, signals: StopSignals
) -> tuple[Lateness, CpuLoad | None]:
    """Run to the end, or until a signal; return how late the clock was, and others' load."""
    async with open_engines(setup, sink.path, started) as stack:
        sink.facts = stack.facts
        await _interruptible(_rollout(setup, stack, sink), signals)
        sink.drafted = stack.drafted()
        return stack.clock.lateness, None if sink.meter is None else sink.meter.read()


def _rollout(setup: RunSetup, stack: EngineStack, sink: Sink) -> RolloutRun:
    """Connect the policy, the agents and the engines; `sink` takes the journal."""
    cluster = setup.config.cluster
    return RolloutRun(
        _agents(setup, stack),
        RecordedCore(setup.controller(), sink),
        stack.launcher,
        stack.clock,
        tool_capacity=cluster.tool_capacity,
        tool_limit_s=setup.config.runtime.tool_limit_s,
        tool_pools=replace(setup.simulation, tool_scale=stack.tool_scale).tool_pools(stack.clock),
        predictions=CoreEstimates(stack.clock, cluster.prediction_s),
        solver=stack.solver,
        report_interval_s=cluster.report_interval_s,
        report_delay_s=stack.report_delay_s,
    )


def _agents(setup: RunSetup, stack: EngineStack) -> Sequence[Agent]:
    scripts = setup.workload.scripts
    first_arrival_s = min(script.arrival_s for script in scripts)
    return [
        ScriptedAgent(
            script,
            stack.clock,
            first_arrival_s=first_arrival_s,
            tokens=stack.tokens,
            tool_scale=stack.tool_scale,
        )
        for script in scripts
    ]


async def _interruptible(rollout: RolloutRun, signals: StopSignals) -> None:
    """Run to the end; the first signal ends the run in order, a second one at once."""
    loop = asyncio.get_running_loop()
    running = loop.create_task(rollout.run())
    ending: list[asyncio.Task[None]] = []

    def end(count: int) -> None:
        if count == 1:
            ending.append(loop.create_task(rollout.interrupt()))
        elif count == 2:
            running.cancel()

    # From a signal handler: only such a call wakes a waiting loop.
    with (
        signals.on_signal(lambda count: loop.call_soon_threadsafe(end, count)),
        suppress(asyncio.CancelledError),
    ):
        await running
