"""Compares policies with tuned baselines on nine cells: `python -m experiments.tuned`."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import get_args

import click

from experiments.harness.experiment import EXPERIMENTS
from experiments.harness.running import run_missing
from experiments.harness.store import Store
from experiments.tuned.cells import CELLS, PlannedCell, Row, planned, rows, summaries
from heddle.cli.progress import progress
from heddle.cli.tables import new_table, show
from heddle.cluster.config import HostKvScope
from heddle.executor import WorkerError

CACHE = EXPERIMENTS / ".cache"


@click.command()
@click.option("--gpus", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--per-gpu",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Trajectories for each GPU; half of it with 32B",
)
@click.option("--seeds", default="977", show_default=True, help="Of the rollouts, as 977,978")
@click.option("--policies", default="heddle", show_default=True, help="Beside the baselines")
@click.option("--cells", default="all", show_default=True, help="As coding-8b,math-32b, or all")
@click.option(
    "--host-kv",
    type=click.Choice(get_args(HostKvScope)),
    default="none",
    show_default=True,
    help="KV in host memory, for baselines too",
)
@click.option("--jobs", default=os.cpu_count() or 1, show_default="one per core")
@click.option("--fresh", is_flag=True, help="Repeat the runs of baselines too")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
def main(
    gpus: int,
    per_gpu: int,
    seeds: str,
    policies: str,
    cells: str,
    host_kv: HostKvScope,
    jobs: int,
    fresh: bool,
    as_json: bool,
) -> None:
    """Run five baselines at every TP degree and number of slots, and policies, on nine cells.

    Prints the best setting of each baseline, found on the rollouts that the policies are compared
    on, and what each policy reaches beside it: of the best baseline, the proven bound and the
    ideals. A policy runs as the defaults say, or at the setting that its name ends with, as
    verl+consolidate@tp4/200. heddle@start5 starts engines in 5 seconds; heddle@standby4+8 has
    engines of TP 4 and 8 asleep.

    Finished runs are kept in experiments/.cache. Those of policies that other code made than
    today's are repeated; those of baselines are kept and counted.
    """
    store = Store(CACHE)
    names = _words(policies)
    try:
        found = [
            planned(
                CELLS[name],
                gpus=gpus,
                per_gpu=per_gpu,
                seeds=_seeds(seeds),
                policies=names,
                store=store,
                host_kv=host_kv,
            )
            for name in _cells(cells)
        ]
        kept = _forget(found, store, fresh=fresh)
        wanted = [job for each in found for entry in each.entries for job in entry.jobs]
        wanted_limits = [limit for each in found for limit in each.limits]
        with progress("running", "runs") as bar:
            ran = run_missing(
                [*wanted_limits, *wanted], store, processes=max(jobs, 1), on_progress=bar.at
            )
    except (ValueError, WorkerError) as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        raise click.ClickException(said) from None
    click.echo(f"{ran} results were missing and are there now", err=True)
    if kept:
        click.echo(
            f"{kept} runs of baselines were made by other code than today's; --fresh repeats them",
            err=True,
        )
    results = [row for each in found for row in rows(each, store)]
    if as_json:
        over_cells = [
            {"policy": p, "over_cells": what, **values} for p, what, values in summaries(results)
        ]
        plain = {"rows": [asdict(row) for row in results], "summaries": over_cells}
        click.echo(json.dumps(plain, allow_nan=False))
    else:
        _table(results)


def _forget(found: Sequence[PlannedCell], store: Store, *, fresh: bool) -> int:
    """Drop results of other code than today's; returns how many of baselines are kept."""
    kept = 0
    for each in found:
        for limit in each.limits:
            if limit.key in store and store.outdated(limit.key):
                store.forget(limit.key)
        for entry in each.entries:
            old = [job for job in entry.jobs if job.key in store and store.outdated(job.key)]
            if entry.baseline and not fresh:
                kept += len(old)
                continue
            for job in entry.jobs if fresh else old:
                store.forget(job.key)
    return kept


def _table(results: Sequence[Row]) -> None:
    columns = ("vs best baseline", "over rollouts", "of bound", "of fluid", "of equal progress")
    table = new_table("cell", "policy", "makespan_s", *columns)
    table.columns[1].justify = "left"
    for at, row in enumerate(results):
        first = at == 0 or results[at - 1].cell != row.cell
        ratios = (row.of_bound, row.of_fluid, row.of_equal_progress)
        table.add_row(
            row.cell if first else "",
            row.policy,
            f"{row.makespan_s:,.1f}",
            _ratio(row.over_best),
            f"{row.over_best_least:.2f} to {row.over_best_most:.2f}",
            *map(_ratio, ratios),
        )
    for policy, what, values in summaries(results):
        over, *others = map(_ratio, values.values())
        table.add_row(what, policy, "", over, "", *others)
    show(table)
    click.echo("baselines at their best setting on the same rollouts: the hindsight is theirs")


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _cells(text: str) -> list[str]:
    names = list(CELLS) if text.strip() == "all" else _words(text)
    unknown = [name for name in names if name not in CELLS]
    if unknown or not names:
        wrong = f"--cells: there is no {unknown[0]!r}" if unknown else "--cells names none"
        raise click.UsageError(f"{wrong}; there are: {', '.join(CELLS)}")
    return names


def _seeds(text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdecimal() and int(word) < 2**32 for word in words):
        raise click.UsageError(f"--seeds {text}: write numbers from 0 to 4294967295, as 977,978")
    return list(map(int, words))


if __name__ == "__main__":
    main()
