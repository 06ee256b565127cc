"""`heddle` on recorded traces, against the best of the shipped policies.

Each trace is divided by prompts in two: one half is the history, the other is judged. Every policy
runs at every TP degree; a baseline's setting is chosen on the judged half itself, which is
hindsight, and on the history half. Prints a line of JSON for each cell, and the summary, with 95 %
intervals over seeds: `python -m benchmarks.bench_recorded`. With `--speculation METHOD:best` every
policy also has the best number of drafts for it.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.bench_plan_search import FILLED, SHARED, best_fixed, makespan_s
from heddle.cluster.config import NO_SPECULATION, ClusterConfig
from heddle.comparison.estimates import estimate
from heddle.comparison.tuning import speculations, tuning
from heddle.config import RunConfig
from heddle.setup import Workspace
from heddle_trace import read_trace, write_trace
from heddle_trace.table import Records

TRACES = ("hotpotqa_react", "tau2_retail", "tau_airline", "tbench_mini", "mint")
BASELINES = (
    *("verl", "verl-affinity", "slime-2026", "continuum"),
    *("thunderagent", "seer", "program-scheduling"),
    # Of 2026, under the names that users meet; verl-margin is a proposal.
    *("verl-2026", "verl-margin", "uniboost", "progress-ttl", "llm-d", "dynamo"),
    *("prime-rl", "fireworks-aimd", "libra-cmlfq"),
)
MOST = 600
"""Trajectories of a half."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cells that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", nargs="*", default=TRACES)
    parser.add_argument("--slots", type=int, nargs="*", default=[32, 100, 256])
    parser.add_argument("--seeds", type=int, default=5, help="orders of the prompts")
    parser.add_argument("--policies", nargs="*", default=["heddle"])
    parser.add_argument("--baselines", nargs="*", default=BASELINES)
    parser.add_argument("--speculation", help="METHOD:best[:ACCEPTANCE], as of heddle compare")
    given = parser.parse_args(arguments)
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for name, seed in product(given.traces, range(given.seeds)):
            halves = _halves(name, seed, Path(folder))
            for slots in given.slots:
                found = _cell(halves, slots, given)
                cells.append({"trace": name, "seed": seed, **found})
                print(json.dumps(cells[-1]), flush=True)
    for policy, history in product(given.policies, ("history", "none")):
        print(json.dumps(_summary(cells, policy, history)))


def _summary(cells: Sequence[Mapping[str, Any]], policy: str, history: str) -> dict[str, Any]:
    """Over the best in hindsight, and over the baselines tuned on the history; by trace and slots
    the mean over seeds.

    ``bar``: of each baseline, how much higher the mean is without it, and in which cell most.
    """
    ratios = [cell[history][policy] for cell in cells]
    by_cell: dict[str, list[float]] = {}
    by_seed: dict[int, list[float]] = {}
    for cell, ratio in zip(cells, ratios, strict=True):
        by_cell.setdefault(_place(cell), []).append(ratio)
        by_seed.setdefault(cell["seed"], []).append(ratio)
    means = {place: estimate(own) for place, own in by_cell.items()}
    least = min(means, key=lambda place: means[place].mean)
    settings: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    for cell in cells:
        settings.setdefault((cell["trace"], cell["slots"]), []).append(cell["settings"])
    # One baseline's setting for all orders of a cell, chosen in hindsight.
    fixed = [fmean(best_fixed(alike)) for alike in settings.values()]
    return {
        "policy": policy,
        "history": history,
        "of_hindsight": {
            **estimate([fmean(own) for own in by_seed.values()]).plain(),
            "least": min(ratios),
        },
        "least_cell": {"cell": least, **means[least].plain()},
        "cells": {place: own.plain() for place, own in means.items()},
        "bar": _bar(cells, policy, history),
        "best_fixed": {"mean": fmean(fixed), "least": min(fixed)},
        "over_tuned": fmean(cell[history][policy] / cell["tuned"] for cell in cells),
    }


def _place(cell: Mapping[str, Any]) -> str:
    return f"{cell['trace']}@{cell['slots']}"


def _bar(cells: Sequence[Mapping[str, Any]], policy: str, history: str) -> dict[str, Any]:
    found = {}
    baselines = list(dict.fromkeys(name.partition("@")[0] for name in cells[0]["settings"]))
    for baseline in baselines if len(baselines) > 1 else ():
        gains: dict[str, list[float]] = {}
        for cell in cells:
            others = [r for n, r in cell["settings"].items() if n.partition("@")[0] != baseline]
            gain = cell[history][policy] * (1.0 / max(others) - 1.0)
            gains.setdefault(_place(cell), []).append(gain)
        most = max(gains, key=lambda place: fmean(gains[place]))
        if mean := fmean(fmean(own) for own in gains.values()):
            found[baseline] = {"mean": mean, "most": {most: fmean(gains[most])}}
    return found


def _halves(name: str, seed: int, folder: Path) -> tuple[Path, Path]:
    """Files of the history and of what is judged: other prompts each."""
    whole = Records.of(read_trace(SHARED / f"{name}.jsonl.gz").records)
    members = list(whole.trajectory("group_id").occurring().values())
    order = np.random.default_rng(seed).permutation(len(members))
    paths = []
    for half, own in enumerate(np.array_split(order, 2)):
        kept = np.concatenate([members[place] for place in own])
        paths.append(folder / f"{name}-{seed}-{half}.jsonl.gz")
        write_trace(paths[-1], whole.take(np.sort(kept[:MOST])))
    return paths[0], paths[1]


def _cell(halves: tuple[Path, Path], slots: int, given: argparse.Namespace) -> dict[str, Any]:
    earlier, judged = (_Half(path, slots, given.speculation) for path in halves)
    settings = list(product(given.baselines, judged.tps))
    times = {each: judged.makespan_s(*each) for each in settings}
    known = {each: earlier.makespan_s(*each) for each in settings if each[1] in earlier.tps}
    best = min(times, key=lambda each: times[each])
    tuned = min(known, key=lambda each: known[each])
    return {
        "slots": slots,
        "trajectories": judged.trajectories,
        "hindsight": f"{best[0]}@tp{best[1]}",
        "settings": {f"{each[0]}@tp{each[1]}": times[best] / times[each] for each in settings},
        # Of the baseline whose setting is best on the history.
        "tuned": times[best] / times[tuned],
        "history": {
            each: times[best] / judged.makespan_s(each, history=str(halves[0]))
            for each in given.policies
        },
        "none": {each: times[best] / judged.makespan_s(each) for each in given.policies},
    }


class _Half:
    """Simulations of one half."""

    def __init__(self, path: Path, slots: int, speculation: str | None = None) -> None:
        cluster = ClusterConfig(
            model="qwen3-14b", gpu="h100", gpus=8, over_capacity="drop", max_running=slots
        )
        config = RunConfig(trace=str(path), cluster=cluster, history="none", missing=FILLED)
        self._shared = Workspace()
        found = tuning(config, tps="best", workspace=self._shared)
        self._config = replace(config, cluster=found.base)
        self._drafts = speculations(found.base, speculation) if speculation else (NO_SPECULATION,)
        self.tps = [each.tp for each in found.settings]
        self.trajectories = self._shared.workload(self._config).trajectories

    def makespan_s(self, policy: str, tp: int | None = None, history: str = "none") -> float:
        """With the number of drafts that is best for it, if there are any."""
        config = replace(self._config, history=history)
        cluster = config.cluster if tp is None else replace(config.cluster, tp=tp)
        return min(
            makespan_s(config, policy, replace(cluster, speculation=drafts), self._shared)
            for drafts in self._drafts
        )


if __name__ == "__main__":
    main()
