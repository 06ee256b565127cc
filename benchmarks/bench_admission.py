"""Running steps that KV decides, against the best number found in hindsight.

Each policy runs with every number of `SLOTS`, and with ``auto``. Prints a line of JSON for each
trace, and the summary: `python -m benchmarks.bench_admission`.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.bench_plan_search import FILLED, RECORDED, WORKLOADS, makespan_s, parts
from heddle.cluster.config import AUTO_RUNNING, ClusterConfig
from heddle.comparison.tuning import SLOTS, tuning
from heddle.config import RunConfig
from heddle.search.policies import shipped
from heddle.setup import Workspace

NUMBERS: Final = (32, *SLOTS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cells that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--tp", type=int, nargs="*", default=[2])
    parser.add_argument("--trajectories", type=int, nargs="*", default=[800, 1600, 3200])
    parser.add_argument("--only", nargs="*", default=[*WORKLOADS, *RECORDED])
    parser.add_argument("--policies", nargs="*", default=[])
    given = parser.parse_args(arguments)
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for name, tp in product(given.only, given.tp):
            for count in given.trajectories if name in WORKLOADS else (0,):
                for history in ("prior" if name in WORKLOADS else "third", "none"):
                    _, unseen, earlier = parts(name, count, 0, Path(folder))
                    config = RunConfig(
                        trace=str(unseen),
                        cluster=ClusterConfig(
                            model="qwen3-14b",
                            gpu="h100",
                            gpus=given.gpus,
                            tp=tp,
                            over_capacity="drop",
                        ),
                        history=str(earlier) if history == "third" else history,
                        missing=FILLED,
                    )
                    shared = Workspace()
                    base = tuning(config, tps=[tp], workspace=shared).base
                    config = replace(config, cluster=base)
                    made = {
                        policy: _times(config, policy, shared)
                        for policy in given.policies or shipped(config)
                    }
                    cells.append(
                        {"trace": name, "trajectories": count, "tp": tp, "history": history}
                        | {"makespan_s": made}
                    )
                    print(json.dumps(cells[-1]), flush=True)
    print(json.dumps(summary(cells)))


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By policy, the best number's makespan over that of ``auto``, and over that of the most."""
    found = {}
    for policy in cells[0]["makespan_s"]:
        own = [cell["makespan_s"][policy] for cell in cells]
        best = [min(v for k, v in times.items() if k != "auto") for times in own]
        ratios = [least / times["auto"] for least, times in zip(best, own, strict=True)]
        most = [least / times[str(NUMBERS[-1])] for least, times in zip(best, own, strict=True)]
        found[policy] = {
            "auto": {"mean": round(fmean(ratios), 3), "least": round(min(ratios), 3)},
            "most": {"mean": round(fmean(most), 3), "least": round(min(most), 3)},
        }
    return found


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
