"""Cost of RL loops by their number of batches: `python benchmarks/bench_loops.py`.

Loops of `--regime` with 512 samples a batch on 64 H100, half of them the trainer's, Qwen3-14B at
TP 1, each in a process of its own. CPU seconds of one core are those of the loop alone, without its
trace; a loop of ten times the batches should take at most ten times as long, and as much memory.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

from bench_paper import apart, at_most, build, make_trace, pin

from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.loops.comparison import prepare_loop, run_loop
from heddle.loops.config import LoopConfig
from heddle.setup import Workspace

GPUS, TRAJECTORIES = 32, 6_400
TARGET_TIMES = 10.0
"""Times the CPU time, for ten times the batches."""


def cost(trace: str, regime: str, policy: str, batches: int) -> tuple[float, float]:
    """CPU seconds, and megabytes at most."""
    cluster = ClusterConfig(model="qwen3-14b", gpu="h100", gpus=GPUS, tp=1)
    run = RunConfig(trace=trace, cluster=cluster, policy=PolicyConfig(preset=policy))
    config = LoopConfig(run=run, regimes=(regime,), batches=batches, train_gpus=GPUS)
    setup = prepare_loop(config, regime, workspace=Workspace())
    began_s = time.process_time()
    run_loop(setup, lambda batch: None)
    took_s = time.process_time() - began_s
    return took_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print one line for each policy and number of batches."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--regime", default="areal")
    parser.add_argument("--policies", default="verl,heddle")
    parser.add_argument("--batches", default="10,100")
    args = parser.parse_args()
    print(f"{build()}, {pin(None)}, {args.regime}")
    with tempfile.TemporaryDirectory() as folder:
        trace = str(Path(folder) / "trace.jsonl.gz")
        make_trace(trace, TRAJECTORIES)
        for policy in args.policies.split(","):
            before: tuple[int, float] | None = None
            for batches in map(int, args.batches.split(",")):
                took_s, peak_mb = apart(cost, trace, args.regime, policy, batches)
                line = f"{policy:10}{batches:5} batches{took_s:8.2f} CPU s{peak_mb:7.0f} MB"
                if before is not None:
                    more, times = batches / before[0], took_s / before[1]
                    line += f"  {times:.1f}x for {more:g}x"
                    line += at_most(TARGET_TIMES * more / 10, times)
                print(line, flush=True)
                before = batches, took_s


if __name__ == "__main__":
    main()
