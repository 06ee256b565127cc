"""Simulations a minute of a search, by processes and as tasks of a local Ray cluster.

`python benchmarks/bench_search.py` races all shipped policies at every TP degree (512 coding
trajectories on 8 H100) over drawn rollouts, none stopped early, until `--simulations` are made: by
two processes, by Ray on two nodes of one core, and there with a node killed on the way. Prints a
line of JSON for each. The results are equal; a task costs what Ray takes longer a simulation,
and the process that hands out tasks, one for all cores, `driver_ms_each` of CPU time.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from heddle.cluster.config import ClusterConfig
from heddle.comparison.tuning import Variant, tuning
from heddle.config import RunConfig, RuntimeConfig
from heddle.search.jobs import race_of
from heddle.search.policies import shipped
from heddle.setup import Workspace

TRACE = Path(__file__).resolve().parent.parent / "traces" / "coding-512.jsonl.gz"
CORES = 2


@contextmanager
def cluster_of_nodes(killed_after_s: float | None) -> Iterator[None]:
    """A head without cores and nodes of one core; one more where one of these is killed."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(CORES + (killed_after_s is not None)):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    cluster.wait_for_nodes()

    def kill_a_node() -> None:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    timer = threading.Timer(killed_after_s or 0.0, kill_a_node)
    if killed_after_s is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    """Measure each executor in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=2_000)
    parser.add_argument("--killed-after-s", type=float, default=20.0)
    given = parser.parse_args()
    config = RunConfig(
        trace=str(TRACE),
        cluster=ClusterConfig(model="qwen3-14b", gpu="h100", gpus=8, max_running=100),
    )
    shared = Workspace()
    candidates = tuning(config, tps="best", workspace=shared).variants(
        config, shipped(config), shared
    )
    draws = range(-(-given.simulations // len(candidates)))
    first: dict[Variant, dict[int, float]] = {}
    for name, world in (
        ("processes", nullcontext()),
        ("ray", cluster_of_nodes(None)),
        ("ray, a node killed", cluster_of_nodes(given.killed_after_s)),
    ):
        where: Any = name.partition(",")[0]
        mine = replace(config, runtime=RuntimeConfig(executor=where))
        with world:
            race = race_of(mine, shared, jobs=CORES)
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            race.run(candidates, draws)
            took_s, driver_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        found = race.made["search"]
        first = first or found
        if found != first:
            sys.exit(f"{name}: other times than by processes")
        print(
            json.dumps(
                {
                    "executor": name,
                    "simulations": race.simulations,
                    "seconds": round(took_s, 1),
                    "a_minute": round(60 * race.simulations / took_s),
                    "core_ms_each": round(1e3 * CORES * took_s / race.simulations, 1),
                    "driver_ms_each": round(1e3 * driver_s / race.simulations, 2),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
