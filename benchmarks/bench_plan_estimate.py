"""Estimate of `heddle plan` for a cluster against simulation, on synthetic rollouts of nine cells.

Coding, search and math on Qwen3-8B, 14B and 32B on H100, with 100 trajectories for each GPU (32B:
50), as in docs/results.md, which has the errors of `--gpus 64 --seeds 977,978,979`.
"""

import argparse
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.planning.sizing import size_clusters
from heddle.simulation import simulate
from heddle_trace.files import write_trace
from heddle_trace.synth import synth

WORKLOADS = ("coding", "search", "math")
PER_GPU = {"qwen3-8b": 100, "qwen3-14b": 100, "qwen3-32b": 50}


def cell(workload: str, model: str, gpus: int, seed: int) -> tuple[str, float, float]:
    """Return the engines that `heddle` starts with, estimated seconds, and simulated ones."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl.gz"
        write_trace(path, synth(workload, gpus * PER_GPU[model], seed=seed))
        config = RunConfig(
            trace=str(path),
            cluster=ClusterConfig(model=model, gpus=gpus),
            policy=PolicyConfig(preset="heddle"),
        )
        row = size_clusters(config, gpus=[gpus], classes=["h100"], simulated=False).rows[0]
        widest = max(shape.tp for shape in row.mix)
        fitting = replace(config, cluster=replace(config.cluster, tp=widest))
        run = simulate(fitting, out=Path(folder) / "runs")
    mix = ", ".join(f"{count} x TP {shape.tp}" for shape, count in row.mix.items())
    return mix, row.estimated_s, run.summary["makespan_s"]


def main() -> None:
    """Print a row for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seeds", default="977", help="of the rollouts, as 977,978")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    given = parser.parse_args()
    seeds = [int(word) for word in given.seeds.split(",")]
    errors = []
    for workload, model in product(given.workloads.split(","), PER_GPU):
        found = [cell(workload, model, given.gpus, seed) for seed in seeds]
        ratios = [estimated / simulated for _, estimated, simulated in found]
        errors.append(fmean(ratios) - 1.0)
        each = ", ".join(f"{e:,.0f} / {s:,.0f}" for _, e, s in found)
        spread = f"{min(ratios) - 1.0:+.1%} to {max(ratios) - 1.0:+.1%}"
        print(
            f"{workload}-{model}: {found[0][0]}: {each}: {errors[-1]:+.1%} ({spread})", flush=True
        )
    print(f"mean of sizes {fmean(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
