"""`heddle plan`: TP degrees of the engines, and groups of trajectories."""

import json
from typing import TYPE_CHECKING, Any

import rich_click as click

from heddle.cli.options import planned, take_config

if TYPE_CHECKING:
    from heddle_core.estimate.ordered import Cost
    from heddle_core.solve.joint import Solver


@click.command()
@click.option(
    "--planner",
    type=click.Choice(["exact", "anneal", "portfolio", "libra-dp"]),
    default="portfolio",
    show_default=True,
    help="How to search",
)
@click.option(
    "--cost",
    type=click.Choice(["context", "paper", "paper-simulated"]),
    default="context",
    show_default=True,
    help="Cost estimate of a group: with contexts, KV and tools, or as published, F by the group's "
    "size or simulated",
)
@click.option(
    "--predictor",
    default="learned",
    show_default=True,
    help="What predicts lengths; oracle takes the true ones",
)
@click.option("--seed", type=int, default=None, help="Seed of all that is drawn [0]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@planned
def plan(
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    planner: "Solver",
    cost: "Cost",
    predictor: str,
    seed: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Choose TP degrees and groups for a rollout of a trace, and say when it should end.

    Nothing is replayed. The plan knows what a policy knows once all prompts have arrived: how many
    there are, their prompts, the predictor's values before anything has run, and the
    history (--history). With --predictor oracle it knows the true lengths.
    """
    from heddle.cli.progress import progress
    from heddle.cli.show import planned as show_plan
    from heddle.planning import plan as made

    config, _ = take_config(sources, options, settings, seed=seed)
    with progress(f"planning ({planner})"):
        found = made(config, planner=planner, cost=cost, predictor=predictor)
    if as_json:
        click.echo(json.dumps(found.plain(), allow_nan=False))
        return
    show_plan(found)
    click.echo(f"searched for {found.solver_s:.3f} s", err=True)
