"""Clusters for a rollout as text."""

from collections.abc import Mapping
from statistics import fmean

import rich_click as click

from heddle.cli.show import COST_COLUMNS, cost_cells, new_table, show
from heddle.planning.cluster_sizes import ClusterSize, Sizes
from heddle_core.ids import EngineShape


def show_sizes(sizes: Sizes) -> None:
    """Trace, prices, the recommendation, one row for each cluster, and what limits them."""
    click.echo(f"trace    {sizes.trace}: {sizes.trajectories:,} trajectories")
    click.echo(
        f"clusters {len(sizes.rows)} of {sizes.model}, {sizes.max_running} running per engine"
    )
    click.echo(f"history  {sizes.history}")
    click.echo(f"prices   {sizes.prices.text(dict.fromkeys(row.gpu for row in sizes.rows))}")
    for name, why in sizes.left_out.items():
        click.echo(f"left out {name}: {why}")
    if sizes.recommended is not None:
        click.echo(f"take     {_recommendation(sizes, sizes.recommended)}")
    click.echo()
    _table(sizes)
    click.echo("* no other row is both faster and cheaper")
    click.echo(f"limit    {_limit(sizes)}")
    if sizes.simulated:
        click.echo(f"estimate {_errors(sizes)}")


def _recommendation(sizes: Sizes, row: ClusterSize) -> str:
    limits = sizes.limits
    kept = [
        *([f"{limits.deadline_s:,.0f} s"] if limits.deadline_s is not None else []),
        *([f"${limits.dollars:,.2f}"] if limits.dollars is not None else []),
    ]
    least = "the least time" if sizes.objective == "makespan" else "the lowest cost"
    within = f" within {' and '.join(kept)}" if kept else ""
    return f"{row.name}, {_mix(row.mix)}: {least}{within}"


def _table(sizes: Sizes) -> None:
    columns = ["mix", "estimated_s", "bound_s", "limit", "best uniform TP", *COST_COLUMNS]
    if sizes.simulated:
        columns[2:2] = ["simulated_s", "error"]
    limits = sizes.limits
    limited = limits.deadline_s is not None or limits.dollars is not None
    table = new_table("GPUs", *columns, *(["within limits"] if limited else []))
    for row in sizes.rows:
        cells = [_mix(row.mix), f"{row.estimated_s:,.1f}"]
        if row.simulated_s is not None and row.error is not None:
            cells += [f"{row.simulated_s:,.1f}", f"{row.error:+.1%}".replace("%", " %")]
        cells += [f"{row.bound_s:,.1f}", row.limit]
        cells += [f"TP {row.uniform.tp}: {row.uniform.makespan_s:,.1f}", *cost_cells(row.cost)]
        if limited:
            broken = [
                *(["late"] if limits.late(row) else []),
                *(["over budget"] if limits.over_budget(row) else []),
            ]
            cells.append(", ".join(broken) or "yes")
        table.add_row(f"{row.name}{' *' if sizes.on_front(row) else ''}", *cells)
    show(table)


def _mix(mix: Mapping[EngineShape, int]) -> str:
    return ", ".join(f"{count} x TP {shape.tp}" for shape, count in mix.items())


def _limit(sizes: Sizes) -> str:
    """Where more GPUs can bring nothing."""
    alone: dict[str, ClusterSize] = {}
    for row in sizes.rows:
        known = alone.get(row.gpu)
        if row.limit == "longest trajectory" and (known is None or row.gpus < known.gpus):
            alone[row.gpu] = row
    if not alone:
        return "capacity sets the bound of every row: more GPUs shorten the rollout"
    said = [f"{row.name} ({row.solo_s:,.1f} s alone)" for row in alone.values()]
    return (
        f"from {' and '.join(said)} on, the longest trajectory sets the bound: more GPUs of the "
        "class do not lower it"
    )


def _errors(sizes: Sizes) -> str:
    errors = [row.error for row in sizes.rows if row.error is not None]
    mean = fmean(map(abs, errors))
    return (
        f"against simulation {mean:.1%} off in the mean, from {min(errors):+.1%} to "
        f"{max(errors):+.1%}; best uniform TP is verl's best, simulated at every degree"
    ).replace("%", " %")
