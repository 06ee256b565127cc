"""What prediction is worth: `python experiments/predictor/value.py`, makespans on 64 H100.

Half of a recorded trace's groups is the past: every policy gets its history, and trees are
fitted on it. Of the other half a rollout is drawn (`heddle_trace.resample`: groups again under new
names, no trajectory twice in a group) and replayed under the preset `heddle` with one predictor
after another. Synthetic workloads need no drawing: past and future have seeds of their own.

Then the same rollouts with an oracle whose log-normal error grows. Figures go into `value.json`
beside this file as they are found, then into `VALUE.md`.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from heddle.cluster_config import ClusterConfig
from heddle.config import MissingConfig, PolicyConfig, RunConfig
from heddle.setup import Workspace, prepare
from heddle.simulation import simulate
from heddle_predict.artefact import write_artefact
from heddle_predict.corpus import source_of
from heddle_predict.fit import fit
from heddle_trace.files import read_trace, write_trace
from heddle_trace.resample import resample
from heddle_trace.schema import Trace, TrajectoryRecord
from heddle_trace.synth import synth
from heddle_trace.workloads import WORKLOADS

HERE = Path(__file__).parent
SHARED = Path("../shared/traces")
RECORDED = ("tbench_mini", "tau2_retail", "tau_airline", "mint", "hotpotqa_react")
PREDICTORS = ("none", "group", "progressive", "learned", "oracle")
SIGMAS = (0.5, 1.0, 2.0)
TRAJECTORIES = 1_600
FIRST_SEED = 501
SEEDS = 3
# Seconds that a trace lacks are 0 here, as they were for the fit: tools at no cost.
MISSING = MissingConfig(
    tool_s="zero", tool_tokens="zero", prompt_tokens="sample", output_tokens="sample"
)


def halves(trace: Trace, seed: int) -> tuple[list[TrajectoryRecord], list[TrajectoryRecord]]:
    """Records of the past and of what is to come: no group is in both."""
    groups = list(dict.fromkeys(record.group_id for record in trace.records))
    order = np.random.default_rng(seed).permutation(len(groups))
    past = dict.fromkeys(groups[i] for i in order[: len(groups) // 2])
    before = [record for record in trace.records if record.group_id in past]
    return before, [record for record in trace.records if record.group_id not in past]


def rollout(name: str, seed: int, folder: Path) -> tuple[Path, Path] | None:
    """Write the past and the rollout to come; None where the trace is absent."""
    past, coming = folder / "past.jsonl.gz", folder / f"{name}.jsonl.gz"
    if name in WORKLOADS:
        write_trace(past, synth(name, TRAJECTORIES, seed + 10_000))
        write_trace(coming, synth(name, TRAJECTORIES, seed))
        return past, coming
    path = SHARED / f"{name}.jsonl.gz"
    if not path.is_file():
        return None
    before, after = halves(read_trace(path), seed)
    sizes = Counter(record.group_id for record in after)
    samples = max(1, min(16, round(median(sizes.values()))))
    whole = [record for record in after if sizes[record.group_id] >= samples]
    drawn, _ = resample(
        Trace(name, tuple(whole), ""),
        groups=TRAJECTORIES // samples,
        samples=samples,
        seed=seed,
    )
    write_trace(past, before)
    write_trace(coming, drawn)
    return past, coming


def measure(name: str, seed: int, policies: list[str]) -> dict[str, Any] | None:
    """Makespans of one rollout."""
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        paths = rollout(name, seed, folder)
        if paths is None:
            return None
        past, coming = paths
        model = folder / "m.heddle"
        source = source_of(read_trace(past), name)
        write_artefact(model, fit([source], kind="trees", seed=seed, command="value.py"))
        config = RunConfig(
            trace=str(coming),
            seed=seed,
            missing=MISSING,
            history=str(past),
            predictor_model=str(model),
            cluster=ClusterConfig(model="qwen3-14b", gpu="h100", gpus=64),
        )
        shared = Workspace()
        found: dict[str, Any] = {"bound_s": prepare(config, workspace=shared).bound().makespan_s}
        for policy in policies:
            run = replace(config, policy=PolicyConfig(preset=policy))
            found[policy] = simulate(prepare(run, workspace=shared), out=folder / "runs").summary[
                "makespan_s"
            ]
    return found


def tables(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Write everything as Markdown."""
    lines = [
        "# What prediction is worth\n",
        "Written by `python experiments/predictor/value.py`; seconds of makespan under `heddle` "
        f"on 64 H100, Qwen3-14B, about {TRAJECTORIES:,} trajectories, mean over seeds (spread: "
        "half the distance between the least and the most).\n",
        "| trace | seeds | bound | " + " | ".join(PREDICTORS) + " |",
        "|---" * (len(PREDICTORS) + 3) + "|",
    ]
    noise = [
        "\n## With an oracle that errs\n",
        "Its estimates are the truth times `exp(sigma * z)`, `z` normal and new at every step.\n",
        "| trace | 0 | " + " | ".join(f"{s:g}" for s in SIGMAS) + " | none |",
        "|---" * (len(SIGMAS) + 3) + "|",
    ]
    for name in (*RECORDED, *WORKLOADS):
        runs = [run for key, run in results.items() if key.split("/")[0] == name]
        if not runs:
            continue

        def cell(policy: str, runs: list[Mapping[str, Any]] = runs) -> str:
            values = [run[policy] for run in runs if policy in run]
            if not values:
                return "-"
            return f"{np.mean(values):,.1f} ±{(max(values) - min(values)) / 2:,.1f}"

        bound = np.mean([run["bound_s"] for run in runs])
        cells = " | ".join(cell(f"heddle+{p}") for p in PREDICTORS)
        lines.append(f"| {name} | {len(runs)} | {bound:,.1f} | {cells} |")
        cells = " | ".join(cell(f"heddle+noisy-oracle:{s:g}") for s in SIGMAS)
        noise.append(f"| {name} | {cell('heddle+oracle')} | {cells} | {cell('heddle+none')} |")
    return "\n".join([*lines, *noise]) + "\n"


def main() -> None:
    """Measure, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=[*RECORDED, *WORKLOADS])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--results", type=Path, default=HERE / "value.json")
    args = parser.parse_args()
    path: Path = args.results
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    policies = [f"heddle+{predictor}" for predictor in PREDICTORS]
    policies += [f"heddle+noisy-oracle:{sigma:g}" for sigma in SIGMAS]
    for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
        for name in args.names:
            key = f"{name}/{seed}"
            missing = [policy for policy in policies if policy not in results.get(key, {})]
            if not missing:
                continue
            found = measure(name, seed, missing)
            if found is None:
                print(f"{name}: skipped, {SHARED / f'{name}.jsonl.gz'} is not there")
                continue
            results[key] = {**results.get(key, {}), **found}
            path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(f"{key}: done", flush=True)
    (HERE / "VALUE.md").write_text(tables(results))


if __name__ == "__main__":
    main()
