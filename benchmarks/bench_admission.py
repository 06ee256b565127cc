"""Running steps that KV decides, against the best number found in hindsight.

Each policy runs with every number of `NUMBERS`, and with ``auto``, in several orders of the
prompts. Prints a line of JSON for each rollout, and the summary:
`python -m benchmarks.bench_admission`.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from benchmarks.bench_plan_search import FILLED, RECORDED, WORKLOADS, makespan_s, parts
from heddle.cluster.config import AUTO_RUNNING, ClusterConfig
from heddle.comparison.estimates import estimate
from heddle.comparison.tuning import SLOTS, tuning
from heddle.config import RunConfig
from heddle.search.policies import shipped
from heddle.setup import Workspace
from heddle_trace import read_trace, write_trace
from heddle_trace.table import Records

NUMBERS: Final = (32, *SLOTS)
WITHIN: Final = 0.98


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cells that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--tp", type=int, nargs="*", default=[2])
    parser.add_argument("--trajectories", type=int, nargs="*", default=[800, 1600, 3200])
    parser.add_argument("--only", nargs="*", default=[*WORKLOADS, *RECORDED])
    parser.add_argument("--policies", nargs="*", default=[])
    parser.add_argument("--orders", type=int, default=5, help="orders of the prompts")
    given = parser.parse_args(arguments)
    orders = range(given.orders)
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for name, tp in product(given.only, given.tp):
            for count in given.trajectories if name in WORKLOADS else (0,):
                _, unseen, earlier = parts(name, count, 0, Path(folder))
                cases = product(("prior" if name in WORKLOADS else str(earlier), "none"), orders)
                for history, order in cases:
                    config = RunConfig(
                        trace=str(_ordered(unseen, order)),
                        cluster=ClusterConfig(
                            model="qwen3-14b",
                            gpu="h100",
                            gpus=given.gpus,
                            tp=tp,
                            over_capacity="drop",
                        ),
                        history=history,
                        missing=FILLED,
                    )
                    shared = Workspace()
                    base = tuning(config, tps=[tp], workspace=shared).base
                    config = replace(config, cluster=base)
                    made = {
                        policy: _times(config, policy, shared)
                        for policy in given.policies or shipped(config)
                    }
                    known = history in ("prior", "none")
                    cells.append(
                        {"trace": name, "trajectories": count, "tp": tp, "order": order}
                        | {"history": history if known else "third", "makespan_s": made}
                    )
                    print(json.dumps(cells[-1]), flush=True)
    print(json.dumps(summary(cells)))


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By policy, of ``auto`` and of the most steps: the best number's makespan over theirs.

    ``rollout`` chooses that number for each order by itself, ``cell`` one for all orders of a cell:
    the least mean makespan.
    """
    found = {}
    for policy in cells[0]["makespan_s"]:
        alike: defaultdict[tuple[Any, ...], list[Mapping[str, float]]] = defaultdict(list)
        for cell in cells:
            key = cell["trace"], cell["trajectories"], cell["tp"], cell["history"]
            alike[key].append(cell["makespan_s"][policy])
        rollouts = [[times] for every in alike.values() for times in every]
        found[policy] = {
            name: {
                "rollout": _of_best(rollouts, setting),
                "cell": _of_best(list(alike.values()), setting),
            }
            for name, setting in (("auto", "auto"), ("most", str(NUMBERS[-1])))
        }
    return found


def _of_best(every: Sequence[Sequence[Mapping[str, float]]], setting: str) -> dict[str, float]:
    """Mean and least, over groups of rollouts, of the best number's mean makespan over this.

    ``behind``: groups below `WITHIN` by more than the 95 % interval over their rollouts.
    """
    ratios, behind = [], 0
    for times in every:
        means = {name: fmean(t[name] for t in times) for name in times[0]}
        best = min((name for name in means if name != "auto"), key=lambda name: means[name])
        ratios.append(means[best] / means[setting])
        own = estimate([t[best] / t[setting] for t in times])
        behind += own.ci95 is not None and own.mean + own.ci95 < WITHIN
    least = round(min(ratios), 3)
    return {"mean": round(fmean(ratios), 3), "least": least, "behind": behind}


def _ordered(path: Path, order: int) -> Path:
    """A file of the same trajectories with their prompts in another order; 0: as they are."""
    if not order:
        return path
    whole = Records.of(read_trace(path).records)
    members = list(whole.trajectory("group_id").occurring().values())
    places = np.random.default_rng(order).permutation(len(members))
    target = path.with_name(f"{order}-{path.name}")
    write_trace(target, whole.take(np.concatenate([members[place] for place in places])))
    return target


def _times(config: RunConfig, policy: str, shared: Workspace) -> dict[str, float]:
    """Makespans in seconds by number, and of ``auto``."""
    settings = {str(number): replace(config.cluster, max_running=number) for number in NUMBERS} | {
        "auto": replace(config.cluster, max_running=AUTO_RUNNING, adaptive=True)
    }
    return {
        name: round(makespan_s(config, policy, cluster, shared), 2)
        for name, cluster in settings.items()
    }


if __name__ == "__main__":
    main()
