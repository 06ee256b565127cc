"""One run in the simulator: a set-up, the driver, and a run directory."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle.cluster.profiles import ClusterProfiles
from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.cost.prices import Prices, prices_of
from heddle.memory import many_objects
from heddle.policies.errors import policy_errors
from heddle.runs import RunDirectory, open_run
from heddle.runs.conditions import load_figures
from heddle.runs.manifest import SIMULATED
from heddle.setup import RunSetup, prepare
from heddle.signals import StopSignals
from heddle_core.commands import Command
from heddle_core.events import Event, TrajectoryFinished
from heddle_core.journal import Sink
from heddle_core.parts.planner import GivenEngines
from heddle_rollout.core import RecordedCore
from heddle_sim.rollout import simulate_rollout

if TYPE_CHECKING:
    from heddle_runtime.clock import Lateness
    from heddle_runtime.cpu_load import CpuLoad

RUN_KEYS = (
    "makespan_s",
    "throughput_tok_s",
    "queueing_p99_s",
    "tpot_mean_ms",
    "prefix_hit",
    "utilisation",
    "migrations",
    "preemptions",
)
COST_KEYS = ("gpu_hours", "dollars")


@dataclass(frozen=True, slots=True)
class RunResult:
    policy: str
    seed: int
    path: Path
    summary: Mapping[str, Any]
    wall_s: float
    """Seconds of wall time for simulation, journal, metrics and files."""

    def row(self) -> dict[str, Any]:
        """One element of `runs` in the JSON of `heddle compare`."""
        figures = {key: self.summary[key] for key in (*RUN_KEYS, *COST_KEYS)}
        return {
            "policy": self.policy,
            "seed": self.seed,
            **figures,
            "late_share": self.summary.get("late_share", 0.0),
            "wall_s": round(self.wall_s, 4),
            "run": str(self.path),
        }


def check_starts_engines(setup: RunSetup) -> None:
    """Refuse a policy whose engines are those of a framework.

    Raises:
        ConfigError: the message has the remedy.
    """
    if isinstance(setup.policy.planner, GivenEngines):
        raise ConfigError(
            "planner given starts no engines: it is for frameworks that bring their own, such as "
            "verl. Leave +given out"
        )


def simulate(
    run: RunConfig | RunSetup,
    *,
    out: Path = Path("runs"),
    config_text: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RunResult:
    """Replay a trace under a policy on a simulated cluster, into a new run directory in `out`.

    `on_progress` is called a few hundred times, with the numbers of finished and of all
    trajectories.

    Raises:
        ValueError: one of the packages' errors for bad input, before a directory is made.
        OSError: the run directory cannot be written.
        KeyboardInterrupt: a signal ended the run; its directory is marked interrupted. More signals
            change nothing.
    """
    setup = run if isinstance(run, RunSetup) else prepare(run)
    check_starts_engines(setup)
    with opened_run(setup, SIMULATED, out, config_text=config_text) as opened:
        with many_objects(), policy_errors(setup.policy):
            _simulate(setup, opened.directory.record, on_progress)
        del run, setup  # what the policy has learned takes memory
        return opened.finished()


def _simulate(setup: RunSetup, sink: Sink, on_progress: Callable[[int, int], None] | None) -> None:
    """Run the rollout; nothing of it is in memory afterwards."""
    workload = setup.workload
    if on_progress is not None:
        sink = _counting(sink, workload.trajectories, on_progress)
    core = RecordedCore(setup.controller(), sink)
    simulate_rollout(workload.scripts, core, setup.simulation)


def run_prices(setup: RunSetup) -> Prices:
    """Prices of a run.

    Raises:
        ConfigError: a price is of an unknown class.
    """
    return prices_of(setup.config.prices, setup.profiles.pools)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    config: RunConfig
    profiles: ClusterProfiles
    notes: Mapping[str, Any]
    """Of the workload."""
    directory: RunDirectory
    signals: StopSignals
    prices: Prices
    gpus: Mapping[str, int]
    """That cost something, by class."""
    began_s: float
    """Of `time.perf_counter`."""

    def finished(
        self,
        lateness: "Lateness | None" = None,
        load: "CpuLoad | None" = None,
        *,
        gpu_s: Mapping[str, float] | None = None,
    ) -> RunResult:
        """Close the run directory as finished.

        `lateness` is that of a clock in real time, and `load` what other processes took of the
        machine meanwhile. `gpu_s` are seconds of GPUs, where engines came and went.
        """
        config = self.config
        measured = self.directory.finish(
            solo_tpot=self.profiles.solo_tpot(),
            notes={**self.notes, **load_figures(load)},
            cost=lambda makespan_s: (
                self.prices.cost(self.gpus, makespan_s)
                if gpu_s is None
                else self.prices.cost(gpu_s, 1.0)
            ),
            lateness=lateness,
        )
        wall_s = time.perf_counter() - self.began_s
        path = self.directory.path
        return RunResult(config.policy.preset, config.seed, path, measured.summary, wall_s)


@contextmanager
def opened_run(
    setup: RunSetup,
    driver: str,
    out: Path,
    *,
    config_text: str | None,
    engines: Mapping[str, Any] | None = None,
    command_line: Sequence[str] | None = None,
) -> Iterator[OpenedRun]:
    """Open a run directory in `out`; `engines` are facts of real ones.

    Raises:
        ConfigError: a price is of an unknown class.
        OSError: the run directory cannot be written.
        KeyboardInterrupt: a signal ended the run.
    """
    prices, gpus = run_prices(setup), setup.profiles.pools
    facts = setup.facts(driver, engines)
    if driver == SIMULATED:
        facts = replace(facts, bound=setup.kept_bound())
    if command_line is not None:
        facts = replace(facts, command_line=command_line)
    began_s = time.perf_counter()
    with (
        StopSignals() as signals,
        open_run(out, prices.kept(setup.config, gpus), facts, config_text=config_text) as directory,
    ):
        opened = OpenedRun(
            config=setup.config,
            profiles=setup.profiles,
            notes=setup.workload.notes,
            directory=directory,
            signals=signals,
            prices=prices,
            # vLLM on CPU has none.
            gpus={} if (engines or {}).get("platform") == "cpu" else gpus,
            began_s=began_s,
        )
        del setup
        yield opened


def _counting(sink: Sink, total: int, on_progress: Callable[[int, int], None]) -> Sink:
    """Pass on to `sink`, and report at intervals the number of ended trajectories."""
    done, every = 0, max(total // 200, 1)

    def counted(event: Event, commands: Sequence[Command]) -> None:
        nonlocal done
        sink(event, commands)
        if event.__class__ is TrajectoryFinished:
            done += 1
            if done % every == 0 or done == total:
                on_progress(done, total)

    return counted
