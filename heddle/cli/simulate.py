"""`heddle simulate`: one run."""

import json
from pathlib import Path
from typing import Any

import rich_click as click

from heddle.cli.options import replayed, take_config


@click.command()
@click.option("--policy", default=None, help="PRESET[+PART...] or package.module:factory [verl]")
@click.option("--seed", type=int, default=None, help="Seed of all that is drawn [0]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@replayed
def simulate(
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    policy: str | None,
    seed: int | None,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay a trace under one policy on a simulated cluster."""
    from heddle.cli.progress import progress
    from heddle.cli.show import run_summary
    from heddle.setup import prepare
    from heddle.simulation import simulate as simulated
    from heddle.workload import check_tags_used

    config, text = take_config(sources, options, settings, policy__preset=policy, seed=seed)
    label = f"{config.policy.preset} s{config.seed}"
    with progress(label, "trajectories") as bar:
        setup = prepare(config)
        check_tags_used(config.policy.tags, [setup.policy])

        def engines(ready: int) -> None:
            bar.now(f"{label}, {ready:,} engines ready")

        result = simulated(
            setup,
            out=out,
            config_text=text,
            on_progress=bar.at if bar.seen else None,
            on_engines=engines if bar.seen else None,
        )
    if as_json:
        click.echo(json.dumps(result.row(), allow_nan=False))
    else:
        run_summary(result, setup)
