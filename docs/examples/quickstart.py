"""Compare two policies on a shipped trace, verl at its best TP degree.

Run from the root of the checkout.
"""

import tempfile
from pathlib import Path

import heddle

config = heddle.RunConfig(
    trace="traces/coding-512.jsonl.gz",
    cluster=heddle.ClusterConfig(model="qwen3-14b", gpu="h100", gpus=8),
)
with tempfile.TemporaryDirectory() as runs:
    result = heddle.compare(config, ["verl", "heddle"], tps="best", seeds=1, out=Path(runs))
    for row in result.best_rows:
        print(f"{row.policy:8} {row.makespan_s.mean:6.1f} s")
    print(f"bound    {result.bound.makespan_s:6.1f} s")
