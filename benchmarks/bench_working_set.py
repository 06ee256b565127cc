"""Why a step of a large rollout costs more: the same rollouts in turn, and interleaved.

    python benchmarks/bench_working_set.py [--rollouts 10] [--policy verl] [--slice 0.05]

Ten rollouts of the paper's size, each with a simulation of its own, do the same work in both runs.
Interleaved in slices of simulated time, what one step touches has left the processor's caches when
its trajectory's next step comes, as in one rollout of ten times the size. The difference is the
cost of memory, and no smarter algorithm can save it; large pages save some. CPU time on one core,
without a journal.

Then the look-ups of a step: a step of a trajectory finds it in `LOOK_UPS` tables, here in random
order, by its name in dictionaries, or by a number in lists. The difference is the most that ids of
integers could save of a step.
"""

import argparse
import random
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench_paper import PAPER, PER_GPU, apart, build, config, make_trace, pin

from heddle.memory import COLLECT_EVERY, large_pages, seldom_collected
from heddle.setup import Workspace, prepare
from heddle_core.controller import Controller
from heddle_rollout.driver import ROLLOUT
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_sim.rollout import Simulation

LOOK_UPS = 13
"""Of a step under `verl`, in the driver, the core and an engine; those of an engine are in smaller
tables than these."""


def lookups_us(trajectories: int, by_name: bool) -> float:
    """Microseconds of the look-ups of a step, less those of an empty loop."""
    names = [f"coding-{number // 16:05d}/{number % 16:02d}" for number in range(trajectories)]
    tables: list[Any] = []
    for _ in range(LOOK_UPS):
        records = [[number] for number in range(trajectories)]
        tables.append(dict(zip(names, records, strict=True)) if by_name else records)
    steps = random.Random(1).choices(range(trajectories), k=400_000)
    keys = [names[number] for number in steps] if by_name else steps
    began_s = time.process_time()
    for _ in keys:
        for _ in tables:
            pass
    empty_s = time.process_time() - began_s
    began_s = time.process_time()
    for key in keys:
        for table in tables:
            table[key]
    return (time.process_time() - began_s - empty_s) / len(keys) * 1e6


def step_us(trace: str, policy: str, rollouts: int, slice_s: float, large: bool) -> float:
    """Microseconds of CPU time per step; a slice of 0 runs one rollout after another."""
    with seldom_collected(COLLECT_EVERY), large_pages() if large else nullcontext():
        return _step_us(trace, policy, rollouts, slice_s)


def _step_us(trace: str, policy: str, rollouts: int, slice_s: float) -> float:
    simulations, steps = [], 0
    for _ in range(rollouts):
        # A workspace each: they share no scripts.
        setup = prepare(config(trace, policy, PAPER // PER_GPU), workspace=Workspace())
        work = setup.workload.scripts
        simulations.append((Simulation(Controller(setup.policy), setup.simulation), work))
        steps += sum(len(script.steps) for script in work)
    began_s = time.process_time()
    for simulation, work in simulations:
        simulation.driver.open_rollout(ROLLOUT, trajectories=len(work))
        for script in work:
            simulation.driver.admit(ScriptedAgent(script, simulation.clock, first_arrival_s=0.0))
        if not slice_s:
            simulation.run()
    until_s, open_ = 0.0, [simulation for simulation, _ in simulations if slice_s]
    while open_:
        until_s += slice_s
        for simulation in open_:
            simulation.clock.limit_s = until_s
            simulation.clock.run()
        open_ = [simulation for simulation in open_ if simulation.driver.open_rollouts]
    return (time.process_time() - began_s) / steps * 1e6


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--policy", default="verl")
    parser.add_argument("--slice", type=float, default=0.05, help="simulated seconds")
    args = parser.parse_args()
    print(f"{build()}, {pin(None)}, {args.rollouts} rollouts of {PAPER:,}, {args.policy}, us/step")
    with tempfile.TemporaryDirectory() as folder:
        trace = str(Path(folder) / "trace.jsonl.gz")
        make_trace(trace, PAPER)
        for what, slice_s, large in (
            ("in turn", 0.0, False),
            ("in turn, large pages", 0.0, True),
            ("interleaved", args.slice, False),
            ("interleaved, large pages", args.slice, True),
        ):
            took_us = apart(step_us, trace, args.policy, args.rollouts, slice_s, large)
            print(f"{what:25}{took_us:8.1f}")
    for size in (PAPER, 10 * PAPER, 80 * PAPER):
        by = {name: apart(lookups_us, size, name) for name in (True, False)}
        print(f"{LOOK_UPS} look-ups of {size:,}: by name {by[True]:.2f}, by number {by[False]:.2f}")


if __name__ == "__main__":
    main()
