"""Why a step of a large rollout costs more: the same rollouts in turn, and interleaved.

    python benchmarks/bench_working_set.py [--rollouts 10] [--policy verl] [--slice 0.05]

Ten rollouts of the paper's size, each with a simulation of its own, do the same work in both runs.
Interleaved in slices of simulated time, what one step touches has left the processor's caches when
its trajectory's next step comes, as in one rollout of ten times the size. The difference is the
cost of memory, and no smarter algorithm can save it; large pages save some. CPU time on one core,
without a journal.
"""

import argparse
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from bench_paper import PAPER, PER_GPU, apart, build, config, make_trace, pin

from heddle.memory import COLLECT_EVERY, large_pages, seldom_collected
from heddle.setup import Workspace, prepare
from heddle_core.controller import Controller
from heddle_rollout.driver import ROLLOUT
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_sim.rollout import Simulation


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
    """Print both figures."""
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


if __name__ == "__main__":
    main()
