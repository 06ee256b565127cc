"""Placement and plan solvers side by side: makespan found and seconds taken.

    python benchmarks/bench_planners.py [small] [paper] [large]

`small` is 400 trajectories on 16 GPUs, `paper` 6,400 on 64, `large` 1,000,000 on 8,192. Lengths are
log-normal with a cap of 40,000 tokens, seeded. The cost estimate has round figures for a 14B model
on 80 GB GPUs. Makespans under one heading share a cost model and may be compared. Seconds are those
of this machine; memory is the peak of the process so far.
"""

import argparse
import resource
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import (
    IntArray,
    SegmentCost,
    Work,
    context_costs,
    longest_first,
    work_of,
)
from heddle_core.estimate.paper_cost import paper_costs
from heddle_core.ids import EngineShape
from heddle_core.solve.anneal import anneal_plan
from heddle_core.solve.exact import exact_plan, level_plan
from heddle_core.solve.group_plan import GroupPlan
from heddle_core.solve.libra_dp import libra_dp
from heddle_core.solve.portfolio import portfolio
from heddle_core.solve.presorted import Partition, aggregate_short, presorted_dp, search_partition

BY_SHAPE = {
    EngineShape("h100", tp): StepCost(
        t0_s=t0_s, t1_s=5e-5, t2_s=4.7e-8 / tp, prefill_s=4e-5 / tp, kv_capacity_tokens=kv_tokens
    )
    for tp, t0_s, kv_tokens in (
        (1, 0.011, 259_000),
        (2, 0.0066, 690_000),
        (4, 0.0043, 1_550_000),
        (8, 0.0032, 3_270_000),
    )
}
MAX_RUNNING = 100
SIZES = {"small": (400, 16), "paper": (6_400, 64), "large": (1_000_000, 8_192)}
UNIT = {"small": 4, "paper": 16, "large": 512}
"""Short trajectories that move together where a table would be too large without."""


def drawn(count: int) -> Work:
    """Long-tailed rollout of `count` trajectories with tools, longest first."""
    rng = np.random.default_rng(20260330)
    output = np.minimum(rng.lognormal(7.8, 1.1, count), 40_000)
    work = work_of(
        output,
        context_tokens=500,
        appended_tokens=0.3 * output,
        tool_s=rng.gamma(2.0, 4.0, count),
    )
    return work.take(longest_first(work, BY_SHAPE[EngineShape("h100", 1)]))


def cuts_of(size: str, work: Work) -> IntArray:
    """Cuts for the tables: units below 10,000 tokens; at the large size everything in units."""
    lengths = np.sort(work.output_tokens)[::-1]
    if size == "large":
        return aggregate_short(lengths, below=np.inf, unit=UNIT[size])
    return aggregate_short(lengths, below=10_000, unit=UNIT[size])


def row(name: str, solve: Callable[[], Partition | GroupPlan | float], repeats: int) -> None:
    """Run a solver and print its line: best of `repeats` times."""
    taken, found = [], 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        result = solve()
        taken.append(time.perf_counter() - began)
        found = result if isinstance(result, float) else result.makespan_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"| {name:<44} | {found:12.3f} | {min(taken) * 1e3:12.1f} | {peak_mib:8.0f} |", flush=True
    )


def head(title: str) -> None:
    """Print a heading and the head of its table."""
    print(f"\n{title}\n\n| {'solver':<44} | {'makespan_s':>12} | {'ms':>12} | peak_MiB |")
    print(f"|{'-' * 46}|{'-' * 13}:|{'-' * 13}:|{'-' * 9}:|")


def bench_placement(work: Work, cuts: IntArray, gpus: int, repeats: int) -> None:
    """Placement on given engines under the published cost."""
    costs = paper_costs(work, BY_SHAPE, max_running=MAX_RUNNING)
    for tp in (1, 4):
        engines = [costs[EngineShape("h100", tp)]] * (gpus // tp)
        head(f"placement, {len(engines)} engines of TP {tp}, {len(cuts) - 1} units, published cost")
        row("presorted DP", partial(presorted_dp, engines, cuts), repeats)
        row(
            "search and fill, nothing aggregated",
            partial(search_partition, engines, len(work)),
            repeats,
        )


def bench_plans(
    size: str, name: str, costs: Mapping[EngineShape, SegmentCost], cuts: IntArray, repeats: int
) -> None:
    """Mix and groups under one cost."""
    count, gpus = SIZES[size]
    pools = {"h100": gpus}
    degrees = [shape.tp for shape in sorted(costs)]
    head(f"plan, {count:,} trajectories on {gpus:,} GPUs, TP {degrees}, {name} cost")
    row("exact joint plan", partial(exact_plan, costs, count, pools), repeats)
    row("exact joint plan, levelled", partial(level_plan, costs, count, pools), repeats)
    row(
        f"Libra's DP, {len(cuts) - 1} units",
        partial(libra_dp, costs, cuts, pools),
        1 if size == "large" else repeats,
    )
    for seed in range(1 if size == "large" else 3):
        row(
            f"annealing, search and fill, seed {seed}",
            partial(anneal_plan, costs, count, pools, seed=seed),
            1,
        )
    if size != "large":
        row(
            "annealing, presorted DP, seed 0",
            partial(
                anneal_plan, costs, count, pools, seed=0, place=lambda on: presorted_dp(on, cuts)
            ),
            1,
        )


def main(sizes: list[str]) -> None:
    """Print every table of `sizes`."""
    for size in sizes:
        count, gpus = SIZES[size]
        repeats = 1 if size == "large" else 5
        began = time.perf_counter()
        work = drawn(count)
        cuts = cuts_of(size, work)
        by_output = work.take(np.argsort(-work.output_tokens, kind="stable"))
        context = context_costs(work, BY_SHAPE, max_running=MAX_RUNNING)
        published = paper_costs(by_output, BY_SHAPE, max_running=MAX_RUNNING)
        print(f"\n## {size}: {count:,} trajectories, {gpus:,} GPUs")
        print(f"\ncost tables built in {(time.perf_counter() - began) * 1e3:.0f} ms")
        bench_placement(by_output, cuts, gpus, repeats)
        bench_plans(size, "published", published, cuts, repeats)
        bench_plans(size, "context-aware", context, cuts, repeats)
        if size != "large":
            head("portfolio, makespan simulated by the cost estimate")

            def best(work: Work = work, gpus: int = gpus) -> float:
                return portfolio(work, BY_SHAPE, {"h100": gpus}, max_running=MAX_RUNNING)[
                    0
                ].simulated_s

            row("portfolio", best, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", nargs="*", default=list(SIZES), help=", ".join(SIZES))
    sizes = parser.parse_args().sizes
    if unknown := set(sizes) - set(SIZES):
        parser.error(f"no such size: {', '.join(sorted(unknown))}")
    main(sizes)
