"""Compares this checkout's speed with another's: `python benchmarks/bench_against.py CHECKOUT`.

Both simulate the rollout of `bench_paper.py` (64 H100, 6,400 coding trajectories), turn by turn and
each in a fresh process, so that a change of the machine's speed meets both. A process runs once to
warm up and then `--runs` times; the least CPU time counts, which a busy machine disturbs least.
The ratio of a policy is the median over the pairs: above 1, this checkout is slower.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ("verl", "slime", "heddle")
GPUS, TRAJECTORIES, SEED = 64, 6_400, 11

RUNS = """
import sys, tempfile, time
from pathlib import Path
from heddle import ClusterConfig, PolicyConfig, RunConfig, simulate

trace, policy, gpus, seed, runs = sys.argv[1:]
cluster = ClusterConfig(model="qwen3-14b", gpu="h100", gpus=int(gpus), tp=1, max_running=100)
config = RunConfig(
    trace=trace, seed=int(seed), cluster=cluster, policy=PolicyConfig(preset=policy)
)
try:
    from heddle import Workspace, prepare
    shared = Workspace()
    setup = lambda: prepare(config, workspace=shared)
except ImportError:  # versions that cache their inputs themselves
    setup = lambda: config
took = []
with tempfile.TemporaryDirectory() as out:
    for _ in range(int(runs) + 1):
        began_s = time.process_time()
        simulate(setup(), out=Path(out))
        took.append(time.process_time() - began_s)
print(min(took[1:]))
"""


def cpu_s(checkout: Path, trace: Path, policy: str, runs: int) -> float:
    """Least CPU seconds of a simulated rollout, from the code of `checkout`."""
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(trace), policy, str(GPUS), str(SEED), str(runs)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{checkout}: the benchmark failed:\n{done.stderr}")
    return float(done.stdout)


def main() -> None:
    """Print one line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of the other version's source")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    args = parser.parse_args()
    if not (args.checkout / "heddle" / "__init__.py").is_file():
        parser.error(f"{args.checkout} is no checkout of Heddle: it has no heddle/__init__.py")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "coding.jsonl.gz"
        subprocess.run(
            [
                *(sys.executable, "-m", "heddle.cli", "trace", "synth", "coding"),
                *("--trajectories", str(TRAJECTORIES), "--seed", "1", "-o", str(trace)),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        for policy in args.policies:
            other, mine = [], []
            for _ in range(args.pairs):
                other.append(cpu_s(args.checkout.resolve(), trace, policy, args.runs))
                mine.append(cpu_s(ROOT, trace, policy, args.runs))
            ratios = sorted(m / o for m, o in zip(mine, other, strict=True))
            print(
                f"{policy:8} other {min(other):6.2f} s  this {min(mine):6.2f} s CPU  "
                f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
