"""Cost of simulated rollouts: tokens per second, time by layer and by decision, growth, memory.

    python benchmarks/bench_paper.py [--runs 5] [--policies verl,slime,heddle] [--growth] [--scale]

100 coding trajectories for each H100, Qwen3-14B at TP 1, made from seed 11, 100 running steps an
engine, replay seed 11. At the paper's size that is 6,400 trajectories on 64 GPUs: about 50,000
steps, 30 million output tokens. A run is what `heddle compare` does once its trace is read and
filled in: policy, simulation, journal, metrics and files. Runs of a policy repeat the very same
work on one core, in a process of its own that also holds the trace; the least CPU time is what the
code costs, and the least wall time is more only where the machine is busy.

--growth adds 640 and 64,000 trajectories at as many for each GPU, --scale 1,000,000 on 8,192 (one
run, minutes; only `verl` and `heddle` have a target there). Targets are those of a compiled build.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from heddle.cli.errors import exit_with_user_errors
from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.executor import Worker
from heddle.memory import many_objects
from heddle.search.makespan import simulated
from heddle.setup import RunSetup, Workspace, prepare
from heddle.simulation import simulate
from heddle_compiled import in_force
from heddle_core.commands import Command
from heddle_core.controller import Controller
from heddle_core.events import Event
from heddle_core.journal import Handle
from heddle_sim.rollout import simulate_rollout
from heddle_trace.files import write_trace
from heddle_trace.synth import synth

POLICIES = ("verl", "slime", "heddle")
PER_GPU, SEED = 100, 11
SIZES, PAPER = (640, 6_400, 64_000), 6_400
SCALE_TRAJECTORIES, SCALE_GPUS = 1_000_000, 8_192

TARGET_MTOK_S = {"verl": 50.0, "heddle": 25.0}
TARGET_BARE_MTOK_S = {"verl": 70.0, "heddle": 35.0}
"""Without journal, metrics and files."""
TARGET_GROWTH = 11.5
"""Times the CPU time for ten times the trajectories."""
TARGET_SCALE_S = {"verl": 200.0, "heddle": 350.0}
TARGET_SCALE_GB = {"verl": 2.5, "heddle": 3.0}
TARGET_MEAN_US, TARGET_P99_US, TARGET_HELP_S = 15.0, 60.0, 0.5

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Cost:
    """What the runs of one policy took; seconds by run."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    read_s: float
    """CPU time to read the trace and to fill it in, once."""
    tokens: int
    steps: int
    peak_mb: float

    @property
    def mtok_s(self) -> float:
        """Million output tokens per CPU second, of the best run."""
        return self.tokens / min(self.cpu_s) / 1e6

    @property
    def step_us(self) -> float:
        """Microseconds of CPU time per step, of the best run."""
        return min(self.cpu_s) / self.steps * 1e6


@dataclass(frozen=True, slots=True)
class Layers:
    """Microseconds of CPU time per step, least of several runs."""

    controller: float
    """Events of a run, handled again by a fresh controller."""
    simulation: float
    """A run without a journal, less its controller."""
    journal: float
    """What a run takes beyond the others."""
    closing: float
    """Metrics and files, after the last event."""


class Timed:
    """A controller whose events go through `handle`."""

    def __init__(self, controller: Controller, handle: Handle) -> None:
        self.handle, self._controller = handle, controller

    @property
    def deadline_s(self) -> float | None:
        """The controller's."""
        return self._controller.deadline_s


def config(trace: str, policy: str, gpus: int) -> RunConfig:
    """Describe a run on `gpus` H100."""
    return RunConfig(
        trace=trace,
        seed=SEED,
        cluster=ClusterConfig(model="qwen3-14b", gpu="h100", gpus=gpus, tp=1, max_running=100),
        policy=PolicyConfig(preset=policy),
    )


def make_trace(path: str, trajectories: int) -> None:
    """Write the coding trace of a size."""
    write_trace(path, synth("coding", trajectories=trajectories, seed=SEED))


def cost(trace: str, policy: str, gpus: int, runs: int) -> Cost:
    """Run `runs` times into a folder that is thrown away."""
    described = config(trace, policy, gpus)
    shared = Workspace()
    began_cpu = time.process_time()
    work = shared.workload(described)
    read_s = time.process_time() - began_cpu
    wall_s, cpu_s = [], []
    with tempfile.TemporaryDirectory() as out:
        for _ in range(runs):
            began_wall, began_cpu = time.perf_counter(), time.process_time()
            simulate(prepare(described, workspace=shared), out=Path(out))
            wall_s.append(time.perf_counter() - began_wall)
            cpu_s.append(time.process_time() - began_cpu)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    steps = sum(len(script.steps) for script in work.scripts)
    return Cost(tuple(wall_s), tuple(cpu_s), read_s, work.output_tokens, steps, peak_mb)


def layers(trace: str, policy: str, gpus: int, runs: int, whole_us: float) -> Layers:
    """Time the parts of a run that takes `whole_us` per step."""
    described, shared = config(trace, policy, gpus), Workspace()
    steps = sum(len(script.steps) for script in shared.workload(described).scripts)
    bare_s, controller_s, closing_s = [], [], []
    ended_s = 0.0

    def ended(done: int, total: int) -> None:
        nonlocal ended_s
        ended_s = time.process_time()

    with tempfile.TemporaryDirectory() as out:
        for _ in range(runs):
            setup = prepare(described, workspace=shared)
            simulate(setup, out=Path(out), on_progress=ended)
            closing_s.append(time.process_time() - ended_s)
            bare_s.append(_bare_s(prepare(described, workspace=shared)))
            controller_s.append(_controller_s(described, shared))
    bare, controller, closing = (
        min(seconds) / steps * 1e6 for seconds in (bare_s, controller_s, closing_s)
    )
    return Layers(controller, bare - controller, whole_us - bare - closing, closing)


def _bare_s(setup: RunSetup) -> float:
    began_s = time.process_time()
    simulated(setup)
    return time.process_time() - began_s


def _controller_s(described: RunConfig, shared: Workspace) -> float:
    events: list[Event] = []

    def kept(event: Event) -> Sequence[Command]:
        events.append(event)
        return controller.handle(event)

    setup = prepare(described, workspace=shared)
    controller = Controller(setup.policy)
    simulate_rollout(setup.workload.scripts, Timed(controller, kept), setup.simulation)
    handle = Controller(prepare(described, workspace=shared).policy).handle
    with many_objects():
        began_s = time.process_time()
        for event in events:
            handle(event)
        return time.process_time() - began_s


def decisions(trace: str, policy: str, gpus: int) -> tuple[list[float], int]:
    """Time every call of `handle`, in microseconds of CPU time.

    Also returns how many of the first calls were over while nine tenths of the trajectories lived.
    """
    setup = prepare(config(trace, policy, gpus))
    work, controller = setup.workload, Controller(setup.policy)
    took_us: list[float] = []
    crowded = 0

    def timed(event: Event) -> Sequence[Command]:
        nonlocal crowded
        began = time.thread_time_ns()
        commands = controller.handle(event)
        took_us.append((time.thread_time_ns() - began) / 1e3)
        rollouts = controller.rollouts.open.values()
        if rollouts and sum(r.ended for r in rollouts) <= len(work.scripts) // 10:
            crowded = len(took_us)
        return commands

    with many_objects():
        simulate_rollout(work.scripts, Timed(controller, timed), setup.simulation)
    return took_us, crowded


def help_s(runs: int) -> list[float]:
    """Seconds that `heddle --help` takes, process start included."""
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        command = [str(Path(sys.executable).with_name("heddle")), "--help"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    return seconds


def pin(core: int | None) -> str:
    """Let this process and those that it starts run on one core, where the system can."""
    if not hasattr(os, "sched_setaffinity"):
        return "any core"
    allowed = os.sched_getaffinity(0)
    chosen = max(allowed) if core is None else core
    if chosen not in allowed:
        sys.exit(f"--core {chosen}: choose one of {', '.join(map(str, sorted(allowed)))}")
    os.sched_setaffinity(0, {chosen})
    return f"core {chosen}"


def build() -> str:
    """Say whether the compiled modules are in force."""
    return "compiled" if in_force() else "interpreted"


def apart(function: Callable[..., R], *args: Any) -> R:
    """Call it in a new process, whose memory is its own."""
    with Worker("direct") as worker:
        return worker.submit(function, *args).result()


# -- tables ----------------------------------------------------------------------------------------

HEAD = f"{'':18}{'tokens':>10}{'CPU s':>9}{'wall s':>9}{'us/step':>9}{'M tok/s':>9}{'MB':>8}"


def row(name: str, c: Cost) -> str:
    """One line of costs, of the best run."""
    return (
        f"{name:18}{c.tokens / 1e6:8.1f} M{min(c.cpu_s):9.2f}{min(c.wall_s):9.2f}"
        f"{c.step_us:9.1f}{c.mtok_s:9.1f}{c.peak_mb:8.0f}"
    )


def at_least(target: float | None, value: float) -> str:
    """Say whether a figure reaches its target."""
    return "" if target is None else f"  {'met' if value >= target else 'MISSED'}: {target:g}"


def at_most(target: float | None, value: float) -> str:
    """Say whether a figure is within its target."""
    return "" if target is None else f"  {'met' if value <= target else 'MISSED'}: {target:g}"


def speed_table(traces: "Traces", policies: Sequence[str], runs: int) -> Iterator[str]:
    """Tokens per second at the paper's size."""
    yield HEAD
    for policy in policies:
        c = traces.cost(policy, PAPER, runs)
        yield row(policy, c) + at_least(TARGET_MTOK_S.get(policy), c.mtok_s)


def layer_table(traces: "Traces", policies: Sequence[str], runs: int) -> Iterator[str]:
    """Where the time goes, at the paper's size; tokens per second of the first two."""
    yield (
        f"{'us/step':18}{'controller':>12}{'simulation':>12}{'journal':>10}{'closing':>10}"
        f"{'M tok/s':>9}"
    )
    for policy in policies:
        c = traces.cost(policy, PAPER, runs)
        found = apart(layers, traces.path(PAPER), policy, PAPER // PER_GPU, runs, c.step_us)
        bare_mtok_s = c.tokens / c.steps / (found.controller + found.simulation)
        yield (
            f"{policy:18}{found.controller:12.1f}{found.simulation:12.1f}"
            f"{found.journal:10.1f}{found.closing:10.1f}{bare_mtok_s:9.1f}"
            f"{at_least(TARGET_BARE_MTOK_S.get(policy), bare_mtok_s)}"
        )


def decision_table(traces: "Traces", policy: str) -> Iterator[str]:
    """Microseconds of a decision, at the paper's size."""
    took_us, crowded = apart(decisions, traces.path(PAPER), policy, PAPER // PER_GPU)
    yield f"{f'{policy} decides, us':28}{'events':>10}{'mean':>8}{'p99':>8}{'longest':>12}"
    for what, sample in (("nine tenths live", took_us[:crowded]), ("whole rollout", took_us)):
        mean, p99 = float(np.mean(sample)), float(np.percentile(sample, 99.0))
        yield (
            f"{what:28}{len(sample):10,}{mean:8.1f}{p99:8.0f}{max(sample):12,.0f}"
            f"{at_most(TARGET_MEAN_US, mean)}{at_most(TARGET_P99_US, p99)}"
        )


def growth_table(traces: "Traces", policies: Sequence[str], runs: int) -> Iterator[str]:
    """CPU time by size."""
    yield HEAD
    for policy in policies:
        before: Cost | None = None
        for size in SIZES:
            c = traces.cost(policy, size, runs if size <= PAPER else 2)
            grown = ""
            if before is not None:
                times = min(c.cpu_s) / min(before.cpu_s)
                grown = f"  {times:.1f}x for {c.steps / before.steps:.1f}x the steps"
                grown += at_most(TARGET_GROWTH, times)
            yield row(f"{policy} {size:,}", c) + grown
            before = c


def scale_table(traces: "Traces", policies: Sequence[str]) -> Iterator[str]:
    """One run of a million trajectories."""
    yield f"{HEAD}{'reading s':>11}"
    path = traces.path(SCALE_TRAJECTORIES)
    for policy in policies:
        c = apart(cost, path, policy, SCALE_GPUS, 1)
        yield (
            f"{row(policy, c)}{c.read_s:11.1f}"
            f"{at_most(TARGET_SCALE_S.get(policy), min(c.cpu_s))}"
            f"{at_most(TARGET_SCALE_GB.get(policy), c.peak_mb / 1024)} GB"
        )


class Traces:
    """Traces by size, each made once, and costs of runs of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._costs: dict[tuple[str, int], Cost] = {}

    def path(self, trajectories: int) -> str:
        path = self._folder / f"coding-{trajectories}.jsonl.gz"
        if not path.exists():
            apart(make_trace, str(path), trajectories)
        return str(path)

    def cost(self, policy: str, trajectories: int, runs: int) -> Cost:
        """Cost of a policy at 100 trajectories for each GPU."""
        key = policy, trajectories
        if key not in self._costs:
            gpus = trajectories // PER_GPU
            self._costs[key] = apart(cost, self.path(trajectories), policy, gpus, runs)
        return self._costs[key]


def main() -> None:
    """Measure one thing after the other, and print each line beside its targets."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--growth", action="store_true", help="also 640 and 64,000 trajectories")
    parser.add_argument("--scale", action="store_true", help="also 1,000,000 on 8,192 GPUs")
    parser.add_argument("--core", type=int, help="core that everything runs on [the last]")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error("--runs must be 1 or more")
    policies = args.policies.split(",")
    print(f"{build()}, {pin(args.core)}, best of {args.runs}")
    with tempfile.TemporaryDirectory() as folder:
        traces = Traces(Path(folder))
        tables = {
            f"{PAPER:,} trajectories on {PAPER // PER_GPU} GPUs": speed_table(
                traces, policies, args.runs
            ),
            "by layer": layer_table(traces, policies, args.runs),
            "decisions": decision_table(traces, policies[-1]),
        }
        if args.growth:
            tables["growth"] = growth_table(traces, policies, args.runs)
        if args.scale:
            title = f"{SCALE_TRAJECTORIES:,} trajectories on {SCALE_GPUS:,} GPUs"
            tables[title] = scale_table(traces, policies)
        for title, lines in tables.items():
            print(f"\n{title}")
            for line in lines:
                print(line, flush=True)
    seconds = help_s(args.runs)
    print(f"\nheddle --help: {min(seconds):.2f} s{at_most(TARGET_HELP_S, min(seconds))}")


if __name__ == "__main__":
    with exit_with_user_errors():
        main()
