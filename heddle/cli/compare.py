"""`heddle compare`: several policies on one trace and cluster."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich_click as click

from heddle.cli.options import replayed, take_config


@click.command()
@click.option(
    "--policies",
    required=True,
    help="PRESET[+PART...], separated by commas; the first is the reference",
)
@click.option("--seeds", type=int, default=1, show_default=True, help="Runs of each policy")
@click.option("--seed", type=int, default=None, help="The first seed [0]")
@click.option("--jobs", type=int, default=None, help="Worker processes [as many as pay]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@replayed
def compare(
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    policies: str,
    seeds: int,
    seed: int | None,
    jobs: int | None,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay a trace under several policies on the same cluster and put the results side by side.

    A seed draws values that the trace lacks and permutes the order of its groups, alike for every
    policy. With several seeds, the spread is the 95 % confidence interval of the mean.

    A policy is a preset, an installed policy or package.module:factory. PRESET+PART puts a part in
    place of the preset's own, any number of times: heddle+never, verl+lpt+progressive;
    `heddle policies` lists both. A part of your own is +package.module:factory. The parts oracle,
    noisy-oracle:SIGMA and paper_quality know the trace: no result, and their runs say so.
    """
    from heddle.cli.progress import progress, running
    from heddle.cli.show import comparison
    from heddle.comparison import compare as compared

    names = [name.strip() for name in policies.split(",") if name.strip()]
    config, text = take_config(sources, options, settings, seed=seed)
    every = [f"{name} s{config.seed + s}" for s in range(seeds) for name in names]
    with progress("reading", "trajectories") as bar:

        def show(done: Sequence[int], each: int) -> None:
            over = sum(n >= each for n in done)
            bar.now(f"{running(every, done, each)} ({over} of {len(every)} runs done)")
            bar.at(sum(done), each * len(every))

        result = compared(
            config,
            names,
            seeds=seeds,
            out=out,
            jobs=jobs,
            config_text=text,
            on_progress=show if bar.seen else None,
        )
    if as_json:
        click.echo(json.dumps(result.plain(), allow_nan=False))
    else:
        comparison(result)
