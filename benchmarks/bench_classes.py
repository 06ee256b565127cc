"""Clusters of two GPU classes: seconds to plan and to compare, and makespans at equal cost.

    python benchmarks/bench_classes.py [TRACE...] [--pool h100:96 --pool l40s:32] [--price l40s=0.8]

For each trace: seconds that the exact planner and the portfolio take on the pools; the time of a
comparison of `verl` and `heddle` on the pools over that on as many GPUs of the class that has the
most, in turn, the least of three each; and makespans of policies on the pools and on each class
alone at the same cost, in whole engines. Prices are dollars of a GPU and hour. Seconds are
CPU seconds of this process.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from experiments.harness.planned import plan
from experiments.harness.pools import read_pool
from heddle.comparison.compare import compare
from heddle.comparison.tuning import with_policy
from heddle.config import ClusterConfig, RunConfig
from heddle.cost.prices import shipped_prices
from heddle.setup import Workspace, prepare
from heddle.simulation import simulate

TRACE = "traces/coding-512.jsonl.gz"
SMALL = ("h100:8:tp=2", "l40s:8:tp=4")
ROUNDS = 3
POLICIES = ("rollart-measured", "heddle+fixed+keep_engines", "heddle")


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", nargs="*", metavar="TRACE", default=[TRACE])
    parser.add_argument("--pool", action="append", default=[])
    parser.add_argument("--price", action="append", default=[], metavar="CLASS=DOLLARS")
    parser.add_argument("--model", default="qwen3-14b")
    parser.add_argument("--tp", type=int, default=1)
    return parser.parse_args()


def clusters(given: argparse.Namespace) -> tuple[ClusterConfig, dict[str, ClusterConfig]]:
    """The mixed cluster, and each class alone at the same cost, in whole engines."""
    prices = {gpu: row.dollars_per_hour or 0.0 for gpu, row in shipped_prices().items()}
    for text in given.price:
        gpu, _, dollars = text.partition("=")
        prices[gpu] = float(dollars)
    pools = [read_pool(text) for text in given.pool or SMALL]
    mixed = ClusterConfig(model=given.model, pool=tuple(pools), tp=given.tp)
    cost = sum(prices[pool.gpu] * pool.gpus for pool in pools)
    alone = {}
    for one in mixed.classes:
        engines = max(1, round(cost / prices[one.gpu] / one.engine_gpus))
        alone[one.gpu] = replace(one, gpus=engines * one.engine_gpus)
    return mixed, alone


def planned(config: RunConfig, workspace: Workspace) -> None:
    """Print the seconds of two planners."""
    for planner in ("exact", "portfolio"):
        found = plan(config, planner=planner, predictor="oracle", workspace=workspace)
        began_s = time.process_time()
        found.problem.search()
        seconds = time.process_time() - began_s
        print(
            f"plan      {planner:<10} {seconds:6.3f} s, makespan "
            f"{found.solved.makespan_s:,.1f} s, bound {found.bound_s:,.1f} s"
        )


def compared(config: RunConfig, out: Path) -> None:
    """Print the time of a comparison over that on GPUs of one class."""
    mixed = config.cluster
    most = max(mixed.classes, key=lambda one: one.gpus)
    uniform = replace(most, gpus=mixed.gpus)
    seconds: dict[str, list[float]] = {"mixed": [], "uniform": []}
    for _ in range(ROUNDS):
        for name, cluster in (("uniform", uniform), ("mixed", mixed)):
            began_s = time.process_time()
            compare(replace(config, cluster=cluster), ["verl", "heddle"], out=out, jobs=1)
            seconds[name].append(time.process_time() - began_s)
    least = {name: min(found) for name, found in seconds.items()}
    print(
        f"compare   mixed {least['mixed']:.2f} s, {mixed.gpus} x {most.gpu} "
        f"{least['uniform']:.2f} s: {least['mixed'] / least['uniform']:.2f} x"
    )


def at_equal_cost(
    config: RunConfig, alone: Mapping[str, ClusterConfig], workspace: Workspace, out: Path
) -> None:
    """Print makespans on the pools and on each class alone."""
    found: dict[str, dict[str, float]] = {}
    for name, cluster in {"mixed": config.cluster, **alone}.items():
        row = found[f"{name} {cluster.gpus}"] = {}
        for policy in POLICIES:
            setup = prepare(with_policy(config, policy, cluster), workspace=workspace)
            row[policy] = simulate(setup, out=out).summary["makespan_s"]
        bound = setup.bound()
        row["bound"], row["fluid"] = bound.makespan_s, setup.ideal(bound).fluid_s
    for name, row in found.items():
        said = ", ".join(f"{policy} {seconds:,.1f} s" for policy, seconds in row.items())
        print(f"cost      {name:<12} {said}")
    mixed, *others = found.values()
    for policy in (*POLICIES, "fluid"):
        best = min(row[policy] for row in others)
        print(f"          {policy}: mixed over the better class {mixed[policy] / best:.3f}")


def main() -> None:
    """Print the figures of each trace."""
    given = options()
    mixed, alone = clusters(given)
    for trace in given.traces:
        config = RunConfig(trace=trace, cluster=mixed)
        workspace = Workspace()
        print(f"{trace} on {' + '.join(f'{n} x {gpu}' for gpu, n in mixed.pools.items())}")
        with tempfile.TemporaryDirectory() as folder:
            planned(config, workspace)
            compared(config, Path(folder))
            at_equal_cost(config, alone, workspace, Path(folder))


if __name__ == "__main__":
    main()
