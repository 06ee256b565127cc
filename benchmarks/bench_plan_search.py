"""What `heddle plan` recommends, on prompts that it has not seen.

Each trace is divided by prompts in three. The search has one part, and another as history; on the
third, every shipped policy at every TP degree, and at two numbers of slots, tells what was best in
hindsight. Prints a line of JSON for each cell, and the summary, without cells whose settings differ
too little to tell: `python -m benchmarks.bench_plan_search`.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from heddle.cluster.config import ClusterConfig
from heddle.comparison.tuning import Variant, tuning, with_policy
from heddle.config import MissingConfig, RunConfig
from heddle.cost.prices import prices_of
from heddle.search.makespan import simulated
from heddle.search.policies import shipped
from heddle.search.race import with_slots
from heddle.search.result import search
from heddle.setup import Workspace, prepare
from heddle_trace import read_trace, synth, write_trace
from heddle_trace.table import Records

SLOTS = (100, 256)
SHARED = Path(__file__).parents[2] / "shared" / "traces"
RECORDED = ("hotpotqa_react", "tau2_retail", "tau_airline", "tbench_mini")
WORKLOADS = ("coding", "search", "math")
FLAT = 0.03
"""A cell whose median setting is within this share of the best one tells nothing."""
FILLED = MissingConfig(
    tool_s="typical", output_tokens="sample", prompt_tokens="sample", tool_tokens="sample"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cells that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="*", default=[8])
    parser.add_argument("--trajectories", type=int, default=1600, help="of synthetic workloads")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[*RECORDED, *WORKLOADS])
    given = parser.parse_args(arguments)
    cells = []
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    with tempfile.TemporaryDirectory() as folder:
        for name, gpus, seed in product(given.only, given.gpus, seeds):
            for history in ("prior", "none") if name in WORKLOADS else ("none", "third"):
                files = parts(name, given.trajectories, seed, Path(folder))
                cells.append(_cell(name, gpus, seed, history, *files))
                print(json.dumps(cells[-1]), flush=True)
    print(json.dumps(summary(cells)))


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all cells: the recommendation against hindsight and against tuned verl, and coverage.

    Cells that are flat are listed; only coverage counts them.
    """
    every, cells = cells, [cell for cell in cells if not flat(cell["settings"])]
    covered = {
        "covered": fmean(cell["low"] <= cell["makespan_s"] <= cell["high"] for cell in every),
        "flat": [
            {key: cell[key] for key in ("trace", "gpus", "seed", "history")}
            for cell in every
            if flat(cell["settings"])
        ],
    }
    if not cells:
        return {"cells": 0, **covered}
    ratios = [cell["of_hindsight"] for cell in cells]
    alike: defaultdict[tuple[Any, ...], list[Mapping[str, float]]] = defaultdict(list)
    for cell in cells:
        alike[cell["trace"], cell["gpus"], cell["history"]].append(cell["settings"])
    fixed = [ratio for each in alike.values() for ratio in best_fixed(each)]
    return {
        "cells": len(cells),
        "of_hindsight": {"mean": fmean(ratios), "least": min(ratios)},
        "within_2_percent": fmean(ratio >= 0.98 for ratio in ratios),
        "over_tuned_verl": {
            "mean": fmean(cell["over_tuned_verl"] for cell in cells),
            "least": min(cell["over_tuned_verl"] for cell in cells),
        },
        # No setting that is chosen beforehand, for all seeds of a cell, does better than this.
        "best_fixed": {
            "mean": fmean(fixed),
            "least": min(fixed),
            "within_2_percent": fmean(ratio >= 0.98 for ratio in fixed),
        },
        **covered,
        "search_s": {"mean": fmean(cell["search_s"] for cell in cells)},
    }


def flat(settings: Mapping[str, float]) -> bool:
    """Whether the median setting, by ratio to the best, is less than `FLAT` behind it."""
    return median(settings.values()) > 1.0 - FLAT


def best_fixed(alike: Sequence[Mapping[str, float]]) -> list[float]:
    """Ratios to hindsight, by seed, of the setting that is best over all seeds."""
    tried = {name: [of.get(name, 0.0) for of in alike] for name in alike[0]}
    return max(tried.values(), key=fmean)


def parts(name: str, trajectories: int, seed: int, folder: Path) -> tuple[Path, Path, Path]:
    """What to search on, what to judge on, and a history: other prompts each."""
    if name in WORKLOADS:
        records = [synth(name, trajectories, 7 + 100 * seed + k, 16) for k in range(3)]
        parts = [Records.of(each) for each in records]
    else:
        whole = Records.of(read_trace(SHARED / f"{name}.jsonl.gz").records)
        members = list(whole.trajectory("group_id").occurring().values())
        order = np.random.default_rng(seed).permutation(len(members))
        parts = [
            whole.take(np.concatenate([members[k] for k in own]))
            for own in np.array_split(order, 3)
        ]
    paths = [folder / f"{part}.jsonl.gz" for part in ("searched", "unseen", "history")]
    for path, part in zip(paths, parts, strict=True):
        write_trace(path, part)
    return paths[0], paths[1], paths[2]


def _cell(
    name: str, gpus: int, seed: int, history: str, searched: Path, unseen: Path, earlier: Path
) -> dict[str, Any]:
    cluster = ClusterConfig(model="qwen3-14b", gpu="h100", gpus=gpus, over_capacity="drop")
    known = str(earlier) if history == "third" else history
    config = RunConfig(trace=str(searched), cluster=cluster, history=known, missing=FILLED)
    found = search(config, prices=prices_of({}, ["h100"]))
    later = replace(config, trace=str(unseen))
    shared = Workspace()
    settings = tuning(later, tps="best", workspace=shared)
    later = replace(later, cluster=settings.base)
    every = settings.variants(later, shipped(later), shared)
    times: dict[Variant, float] = {}
    for each in (with_slots(each, slots) for each in every for slots in SLOTS):
        most_s = 1.2 * min(times.values(), default=1e9)
        times[each] = makespan_s(later, each.policy, each.cluster, shared, most_s)
    best = found.best.candidate
    began_s = time.perf_counter()
    mine_s = makespan_s(later, best.policy, best.cluster, shared)
    one_s = time.perf_counter() - began_s
    tuned = [each for each in (*found.judged, found.as_it_comes) if each is not None]
    verl = next(each.candidate for each in tuned if each.candidate.policy == "verl")
    hindsight = min(times, key=lambda each: times[each])
    return {
        "trace": name,
        "gpus": gpus,
        "seed": seed,
        "history": history,
        "trajectories": shared.workload(later).trajectories,
        "recommended": f"{best.name}/{best.cluster.max_running}",
        "hindsight": f"{hindsight.name}/{hindsight.cluster.max_running}",
        "makespan_s": mine_s,
        "hindsight_s": times[hindsight],
        "settings": {
            f"{each.name}/{each.cluster.max_running}": round(times[hindsight] / seconds, 4)
            for each, seconds in times.items()
        },
        "of_hindsight": min(1.0, times[hindsight] / mine_s),
        "over_tuned_verl": makespan_s(later, verl.policy, verl.cluster, shared) / mine_s,
        "low": found.best.makespan_s.low,
        "high": found.best.makespan_s.high,
        "simulations": found.simulations,
        "search_s": round(found.seconds, 1),
        "one_simulation_s": round(one_s, 3),
    }


def makespan_s(
    config: RunConfig,
    policy: str,
    cluster: ClusterConfig,
    workspace: Workspace,
    stop_s: float = float("inf"),
) -> float:
    """Simulated makespan of a policy; infinite where it passes `stop_s`."""
    mine = with_policy(config, policy, cluster)
    workload = workspace.workload(config)
    return simulated(prepare(mine, workspace=workspace, workload=workload), stop_s)[0]


if __name__ == "__main__":
    main()
