"""How often the prediction interval of `heddle compare` holds the makespan of other prompts.

Traces of a workload differ in their seed. The interval that a comparison of two seeds makes of each
is held against the makespans of the same policy on all others:
`python -m benchmarks.check_intervals`.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from statistics import fmean

from heddle.cluster.config import ClusterConfig
from heddle.comparison.compare import compare
from heddle.config import RunConfig
from heddle.search.compared import interval_of
from heddle_trace import synth, write_trace

SIZES = ((128, 24, 8), (512, 12, 16))
"""Trajectories of a trace, traces, and samples of a prompt."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line of JSON for each workload and size, and the mean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="*", default=["coding", "search", "math"])
    parser.add_argument("--policy", default="verl")
    given = parser.parse_args(arguments)
    held = []
    for workload in given.workloads:
        for trajectories, traces, samples in SIZES:
            found = [*intervals(workload, trajectories, traces, samples, given.policy)]
            pairs = [*permutations(found, 2)]
            below = fmean(other < low for (_, low, _), (other, _, _) in pairs)
            above = fmean(other > high for (_, _, high), (other, _, _) in pairs)
            held.append(1.0 - below - above)
            cell = {"workload": workload, "trajectories": trajectories, "pairs": len(pairs)}
            print(json.dumps(cell | {"held": held[-1], "below": below, "above": above}), flush=True)
    print(json.dumps({"held": fmean(held), "least": min(held)}))


def intervals(
    workload: str, trajectories: int, traces: int, samples: int, policy: str
) -> Iterator[tuple[float, float, float]]:
    """The makespan under the first seed, and the ends of the interval, by trace."""
    cluster = ClusterConfig(model="qwen3-14b", gpu="h100", gpus=8, tp=4, max_running=100)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        for seed in range(2_000, 2_000 + traces):
            write_trace(path, synth(workload, trajectories, seed=seed, samples_per_group=samples))
            config = RunConfig(trace=str(path), cluster=cluster, history="none")
            found = compare(config, policies=[policy], seeds=2, jobs=1, out=Path(folder) / "runs")
            (row,) = found.policies
            interval = interval_of(found, row.times)
            assert interval.low is not None, "of many prompts"
            assert interval.high is not None, "of many prompts"
            yield row.times[0], interval.low, interval.high


if __name__ == "__main__":
    main()
