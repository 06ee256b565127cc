"""Cost of a simulated rollout of the paper's size: wall time, memory, time per decision.

    python benchmarks/bench_paper.py [--runs 5] [--policies verl,slime,verl-star,heddle] [--no-10x]

64 H100, Qwen3-14B at TP 1, 6,400 coding trajectories made from seed 11 (about 50,000 steps, 30
million output tokens), 100 running steps an engine, replay seed 11. A run is what `heddle simulate`
does once its trace is read and filled in: policy, simulation, journal, metrics and files. Runs of
a policy repeat the very same work in one process of its own, so that their spread is the machine's
and memory the policy's (it holds the trace too); the quickest is what the code costs. Then two
`verl` runs of ten times as many trajectories on ten times as many GPUs, every call of the `heddle`
controller timed, and the start of the command line.

Anchors, measured elsewhere on a machine of this kind: NVIDIA AISimulate (Rust) 2.45 million
simulated output tokens per second, 1.35 million with tool waits and prefix cache; Vidur 0.23.
"""

import argparse
import gc
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from heddle.config import ClusterConfig, PolicyConfig, RunConfig
from heddle.setup import Workspace, prepare
from heddle.simulation import simulate
from heddle_compiled import in_force
from heddle_core.commands import Command
from heddle_core.controller import Controller
from heddle_core.events import Event
from heddle_core.journal import Handle
from heddle_sim.rollout import simulate_rollout
from heddle_trace.files import write_trace
from heddle_trace.synth import synth

POLICIES = ("verl", "slime", "verl-star", "heddle")
GPUS, TRAJECTORIES, SEED = 64, 6_400, 11
ANCHORS_TOK_S = {"AISimulate": 2.45e6, "AISimulate with tools": 1.35e6, "Vidur": 0.23e6}
TARGET_WALL_S, TARGET_MB, TARGET_GROWTH = 2.0, 500, 13.0
TARGET_MEAN_US, TARGET_P99_US, TARGET_HELP_S = 60.0, 500.0, 0.5


@dataclass(frozen=True, slots=True)
class Cost:
    """What the runs of one policy took; seconds by run."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    tokens: int
    steps: int
    peak_mb: float


def config(trace: str, policy: str, gpus: int) -> RunConfig:
    """Describe a run on `gpus` H100."""
    return RunConfig(
        trace=trace,
        seed=SEED,
        cluster=ClusterConfig(model="qwen3-14b", gpu="h100", gpus=gpus, tp=1, max_running=100),
        policy=PolicyConfig(preset=policy),
    )


def cost(trace: str, policy: str, gpus: int, runs: int) -> Cost:
    """Run `runs` times into a folder that is thrown away."""
    described = config(trace, policy, gpus)
    shared = Workspace()
    work = shared.workload(described)
    wall_s, cpu_s = [], []
    with tempfile.TemporaryDirectory() as out:
        for _ in range(runs):
            began_wall, began_cpu = time.perf_counter(), time.process_time()
            simulate(prepare(described, workspace=shared), out=Path(out))
            wall_s.append(time.perf_counter() - began_wall)
            cpu_s.append(time.process_time() - began_cpu)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    steps = sum(len(script.steps) for script in work.scripts)
    return Cost(tuple(wall_s), tuple(cpu_s), work.output_tokens, steps, peak_mb)


def decisions(trace: str, policy: str, gpus: int) -> tuple[list[float], int]:
    """Time every call of `handle`, in microseconds.

    Also returns how many of the first calls were over while nine tenths of the trajectories lived.
    """
    described = config(trace, policy, gpus)
    setup = prepare(described)
    work, controller = setup.workload, Controller(setup.policy)
    took_us: list[float] = []
    crowded = 0

    def timed(event: Event) -> Sequence[Command]:
        nonlocal crowded
        began = time.perf_counter_ns()
        commands = controller.handle(event)
        took_us.append((time.perf_counter_ns() - began) / 1e3)
        rollouts = controller.rollouts.open.values()
        if rollouts and sum(r.ended for r in rollouts) <= len(work.scripts) // 10:
            crowded = len(took_us)
        return commands

    gc.set_threshold(100_000)  # as `simulate` does
    simulate_rollout(work.scripts, Timed(controller, timed), setup.simulation)
    return took_us, crowded


class Timed:
    """A controller whose events go through `handle`."""

    def __init__(self, controller: Controller, handle: Handle) -> None:
        self.handle, self._controller = handle, controller

    @property
    def deadline_s(self) -> float | None:
        """The controller's."""
        return self._controller.deadline_s


def build() -> str:
    """Say whether the compiled modules are in force."""
    return "compiled" if in_force() else "interpreted"


def help_s(runs: int) -> list[float]:
    """Seconds that `heddle --help` takes, process start included."""
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        command = [str(Path(sys.executable).with_name("heddle")), "--help"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    return seconds


def row(name: str, c: Cost) -> str:
    """One line of the table of costs."""
    best, speed = min(c.wall_s), c.tokens / min(c.wall_s)
    spread = f"{best:.2f} ({sorted(c.wall_s)[len(c.wall_s) // 2]:.2f}, {max(c.wall_s):.2f})"
    ratios = " ".join(f"{speed / anchor:7.1f}x" for anchor in ANCHORS_TOK_S.values())
    return (
        f"{name:14s}{spread:>20s}{min(c.cpu_s):8.2f}{c.peak_mb:8.0f}{speed / 1e6:10.1f}  {ratios}"
    )


def against(target: float, value: float, unit: str) -> str:
    """Say whether a figure is within its target."""
    return f"target at most {target:g} {unit}: {'met' if value <= target else 'MISSED'}"


def main() -> None:
    """Measure everything, one process at a time, and print it beside its target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--no-10x", action="store_true", help="leave out the runs ten times larger")
    options = parser.parse_args()
    fresh = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as folder, fresh:
        trace, large = str(Path(folder, "coding.jsonl.gz")), str(Path(folder, "coding10.jsonl.gz"))
        write_trace(trace, synth("coding", trajectories=TRAJECTORIES, seed=SEED))
        costs = {
            name: fresh.submit(cost, trace, name, GPUS, options.runs).result()
            for name in options.policies.split(",")
        }
        first = next(iter(costs.values()))
        print(
            f"{GPUS} H100, {TRAJECTORIES:,} coding trajectories, {first.steps:,} steps, "
            f"{first.tokens / 1e6:.1f} M output tokens, seed {SEED}, {options.runs} runs each"
        )
        print(
            f"{'':14s}{'wall s (med., max)':>20s}{'cpu s':>8s}{'MB':>8s}{'M tok/s':>10s}  "
            f"times {', '.join(ANCHORS_TOK_S)}"
        )
        for name, c in costs.items():
            print(row(name, c))
            print(f"{'':14s}{against(TARGET_WALL_S, min(c.wall_s), 's')}; ", end="")
            print(against(TARGET_MB, c.peak_mb, "MB"))
        if not options.no_10x and "verl" in costs:
            write_trace(large, synth("coding", trajectories=10 * TRAJECTORIES, seed=SEED))
            ten = fresh.submit(cost, large, "verl", 10 * GPUS, 2).result()
            steps = ten.steps / costs["verl"].steps
            growth = min(ten.cpu_s) / min(costs["verl"].cpu_s)
            print(row("verl, 10x", ten))
            print(
                f"{'':14s}{growth:.1f}x the processor time for {steps:.1f}x the steps, "
                f"{against(TARGET_GROWTH, growth, 'x')}"
            )
        took_us, crowded = fresh.submit(decisions, trace, "heddle", GPUS).result()
    for what, sample in (("nine tenths live", took_us[:crowded]), ("whole rollout", took_us)):
        mean, p99 = float(np.mean(sample)), float(np.percentile(sample, 99.0))
        print(
            f"heddle decides, {what} ({len(sample):,} events): mean {mean:.1f} us "
            f"({against(TARGET_MEAN_US, mean, 'us')}), p99 {p99:.0f} us "
            f"({against(TARGET_P99_US, p99, 'us')}), longest {max(sample) / 1e3:.0f} ms"
        )
    seconds = help_s(options.runs)
    print(
        f"heddle --help: {min(seconds):.2f} s, slowest of {options.runs} {max(seconds):.2f} s "
        f"({against(TARGET_HELP_S, min(seconds), 's')})"
    )


if __name__ == "__main__":
    main()
