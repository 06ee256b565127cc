"""What packing the prompts of an epoch by their earlier lengths gains, by policy.

Each trace has 100 prompts for 8 GPUs, and more for more; eight samples of each are trained, in
batches of a quarter of them for three epochs under `sync`, and eight others are the history. The
last two epochs are measured: an order of prompts is compared on all of them. Every policy has its
best TP degree of those given, found by rollout seconds of a step, for either order of prompts.
Prints a line of JSON for each workload and seed, and the summary:
`python -m benchmarks.bench_epochs`.

With `--drift 2` outputs grow while the model learns: each epoch has other samples, and those of a
prompt are in the third 1 to 3 times as long as in the history, in the first by the third root of
that, in the second by its square.

`limits` are of the batches that history makes, each alone: the best baseline over all trajectories
at one pace with free re-shaping of engines, which needs no lengths, and over a clairvoyant fluid
schedule (`heddle.runs.ideal`).

With `--results FILE` cells are added to that file, and those that it has are not run again;
`benchmarks/epochs.jsonl` has those of `docs/results.md`.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
from msgspec.structs import replace

from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.search.makespan import simulated
from heddle.setup import prepare
from heddle_trace import read_trace, synth, write_trace
from heddle_trace.schema import TrajectoryRecord
from heddle_trace.table import Records

MINE = "heddle"
RULES = ("random", "sorted", "tail:.25")
EPOCHS = 3
"""Of a loop; the first is its warm-up."""
BATCHES = 4
"""Of an epoch."""
SAMPLES = 8
"""Of a prompt in an epoch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all workloads that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="*", default=["coding", "search", "math"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tps", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--model", default="qwen3-14b")
    parser.add_argument("--drift", type=float, default=1.0)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--baselines", nargs="*", default=["verl", "slime-2026", "continuum"])
    parser.add_argument("--results", type=Path)
    given = parser.parse_args(arguments)
    known: list[Mapping[str, Any]] = []
    if given.results and given.results.exists():
        known = [json.loads(line) for line in given.results.read_text().splitlines()]
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for workload, seed in product(given.workloads, range(977, 977 + given.seeds)):
            case = {
                "workload": workload,
                "seed": seed,
                "model": given.model,
                "gpus": given.gpus,
                "drift": given.drift,
                "tps": given.tps,
                "baselines": given.baselines,
            }
            cell = next((row for row in known if case.items() <= row.items()), None)
            if cell is None:
                paths = _traces(case, Path(folder))
                cell = {**case, **_cell(paths, case)}
                if given.results:
                    with given.results.open("a") as stream:
                        stream.write(json.dumps(cell) + "\n")
            cells.append(cell)
            print(json.dumps(cell), flush=True)
    gains = ("over_practice", "over_packed_baseline")
    means = {
        gain: {
            "mean": geometric_mean(cell[gain] for cell in cells),
            "least": min(cell[gain] for cell in cells),
        }
        for gain in gains
    }
    limits = {name: fmean(cell["limits"][name] for cell in cells) for name in cells[0]["limits"]}
    print(json.dumps({**means, "limits": limits}))


def _traces(case: Mapping[str, Any], folder: Path) -> Sequence[Path]:
    """Of an epoch that repeats, or of each if lengths drift; and of the history."""
    drift, seed = case["drift"], case["seed"]
    epochs = 1 if drift == 1.0 else EPOCHS
    own = SAMPLES * epochs
    count = 100 * case["gpus"] * (epochs + 1)
    records = Records.of(synth(case["workload"], count, seed, own + SAMPLES))
    members = list(records.trajectory("group_id").occurring().values())
    paths = [folder / f"{name}.jsonl.gz" for name in ("now", "earlier")]
    for path, part in zip(paths, (slice(own), slice(own, None)), strict=True):
        write_trace(path, records.take(np.concatenate([group[part] for group in members])))
    if epochs > 1:
        grows = np.random.default_rng(seed).uniform(1.0, 2.0 * drift - 1.0, len(members))
        rows = read_trace(paths[0]).records
        grown = [
            _longer(row, float(grows[place // own] ** ((1 + place % own // SAMPLES) / epochs)))
            for place, row in enumerate(rows)
        ]
        write_trace(paths[0], grown)
    return paths


def _longer(record: TrajectoryRecord, factor: float) -> TrajectoryRecord:
    steps = (
        replace(step, output_tokens=max(1, round(factor * (step.output_tokens or 0))))
        for step in record.steps
    )
    return replace(record, steps=tuple(steps))


def _cell(paths: Sequence[Path], case: Mapping[str, Any]) -> Mapping[str, Any]:
    baselines, tps = case["baselines"], case["tps"]
    rollout_s = {
        f"{policy}, {rule}": min(_rollout_s(paths, policy, rule, tp, case) for tp in tps)
        for policy, rule in product((*baselines, MINE), RULES)
    }
    best = {rule: min(rollout_s[f"{policy}, {rule}"] for policy in baselines) for rule in RULES}
    mine = min(rollout_s[f"{MINE}, {rule}"] for rule in RULES[1:])
    return {
        "limits": _limits(paths, case),
        "rollout_s": rollout_s,
        # A baseline in random order, and the best baseline with the same packing.
        "over_practice": best["random"] / mine,
        "over_packed_baseline": min(best["sorted"], best["tail:.25"]) / mine,
    }


def _limits(paths: Sequence[Path], case: Mapping[str, Any]) -> Mapping[str, float]:
    earlier, now = defaultdict(list), defaultdict(list)
    for row in read_trace(paths[1]).records:
        earlier[row.group_id].append(sum(step.output_tokens or 0 for step in row.steps))
    for row in read_trace(paths[0]).records:
        now[row.group_id].append(row)
    longest = sorted(now, key=lambda name: -fmean(earlier[name]))
    size = -(-len(longest) // BATCHES)
    seconds = dict.fromkeys(("baseline", "equal_progress", "fluid"), 0.0)
    for first in range(0, len(longest), size):
        batch = paths[0].with_name("batch.jsonl.gz")
        write_trace(
            batch, [row for name in longest[first : first + size] for row in now[name][:SAMPLES]]
        )
        setups = [
            prepare(_run(batch, paths[1], policy, tp, case))
            for policy, tp in product(case["baselines"], case["tps"])
        ]
        seconds["baseline"] += min(simulated(setup)[0] for setup in setups)
        ideal = setups[0].ideal(setups[0].bound())
        seconds["equal_progress"] += ideal.equal_progress_s
        seconds["fluid"] += ideal.fluid_s
    return {name: seconds["baseline"] / seconds[name] for name in ("equal_progress", "fluid")}


def _run(trace: Path, history: Path, policy: str, tp: int, case: Mapping[str, Any]) -> RunConfig:
    return RunConfig(
        trace=str(trace),
        history=str(history),
        cluster=ClusterConfig(gpus=case["gpus"], tp=tp, max_running=100, model=case["model"]),
        policy=PolicyConfig(preset=policy),
    )


def _rollout_s(
    paths: Sequence[Path], policy: str, rule: str, tp: int, case: Mapping[str, Any]
) -> float:
    gpus = case["gpus"]
    loop = LoopConfig(
        run=_run(paths[0], paths[1], policy, tp, case),
        regimes=("sync",),
        train_gpus=4 * gpus,
        groups=25 * gpus // 8,
        samples=SAMPLES,
        batches=BATCHES * EPOCHS,
        repeat=True,
        epoch_plan=rule,
    )
    return compare_regimes([loop]).tried[0].split_s["rollout"]


if __name__ == "__main__":
    main()
