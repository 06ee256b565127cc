"""A comparison of regimes as text."""

import rich_click as click

from heddle.cli.bars import Bar, draw_bars
from heddle.cli.show import cost_cells, estimate_cell, new_table, objective_cell, show, show_ranking
from heddle.loop.result import LoopComparison, RegimeResult, plans


def show_loop(result: LoopComparison) -> None:
    """Trace, cluster, what was tried, and one row for each regime."""
    _head(result)
    if len(result.tried) > len(result.regimes):
        _tried(result)
    _regimes(result)
    show_ranking(result.objective, [row.setup.name for row in result.ranking])
    _splits(result)
    draw_bars(
        "step in seconds; ### is its bound",
        [Bar(row.setup.name, row.step_s, row.bound_step_s) for row in result.regimes],
    )


def _head(result: LoopComparison) -> None:
    first = result.tried[0].setup
    config, work = first.config, first.run.workload
    cluster, profile = config.run.cluster, first.run.profile
    click.echo(
        f"trace    {work.trace.name}: {len(work.scripts):,} trajectories of "
        f"{len(first.data.groups):,} prompts"
    )
    shared = ", rollout and training in turn" if config.colocated else ""
    if config.reward_gpus:
        shared += f", {config.reward_gpus} of them for rewards"
    click.echo(
        f"cluster  {first.gpus} x {profile.gpu_label}, {cluster.model}{profile.layout_label}"
        f"{shared}; policy {config.run.policy.preset}, "
        f"{', '.join(map(str, result.running))} running per engine"
    )
    click.echo(
        f"batch    {config.groups} prompts x {config.samples} samples, {config.batches} steps; of "
        "times only those once the regime's trajectories are under way (measured)"
    )
    click.echo(
        f"trainer  {config.train_backend}; times of training and weight updates are fitted on "
        "published ones (docs/training-time.md)"
    )
    click.echo(f"prices   {first.prices.text(first.gpus_by_class)}\n")


def _regimes(result: LoopComparison) -> None:
    config = result.tried[0].setup.config
    limited = result.regimes[0].reward_busy is not None
    few = result.regimes[0].environment_busy is not None
    reference = result.regimes[0].step_s.mean
    table = new_table(
        "regime",
        *([] if config.colocated else ["train GPUs"]),
        "TP",
        *(["running"] if len(result.running) > 1 else []),
        "measured",
        "step_s",
        f"vs {result.regimes[0].setup.name}",
        "samples_per_s",
        "GPU-hours/1k",
        "$/1k",
        "rollout busy",
        "train busy",
        *(["reward busy"] if limited else []),
        *(["env. busy"] if few else []),
        "staleness",
        "oldest",
        "wasted",
        "length bias",
        "KS",
        "of bound",
    )
    for row in result.regimes:
        table.add_row(
            row.setup.name,
            *([] if config.colocated else [str(row.setup.train_gpus)]),
            _tp(row),
            *([_running(row)] if len(result.running) > 1 else []),
            str(len(row.runs[0].step_s)),
            estimate_cell(row.step_s),
            f"{reference / row.step_s.mean:.2f} x",
            f"{row.samples_per_s:.2f}",
            *cost_cells(row.cost_per_1k_samples),
            f"{row.rollout_busy:.2f}",
            f"{row.train_busy:.2f}",
            *([f"{row.reward_busy or 0.0:.2f}"] if limited else []),
            *([f"{row.environment_busy or 0.0:.2f}"] if few else []),
            f"{row.mean_staleness:.2f}",
            f"{max(row.staleness)}",
            f"{row.wasted_share:.3f}",
            f"{row.length_bias:.3f}",
            f"{row.length_distance:.3f}",
            f"{row.bound_fraction:.2f}",
        )
    show(table)


def _splits(result: LoopComparison) -> None:
    """Seconds of a step by what the trainer did or waited for."""
    click.echo(
        "\nseconds of a step: the trainer waits for trajectories, or only for rewards of its batch;"
    )
    click.echo("it trains; it waits for a weight update, or for GPUs that change between the two\n")
    table = new_table("regime", "rollout", "reward", "training", "update")
    for row in result.regimes:
        table.add_row(row.setup.name, *(f"{seconds:,.1f}" for seconds in row.split_s.values()))
    show(table)


def _tried(result: LoopComparison) -> None:
    """The objective of every regime at every setting."""
    what = "step in seconds" if result.objective == "makespan" else "dollars of 1,000 samples"
    click.echo(f"tried    mean {what} by GPUs of the trainer; * the best\n")
    several = len(result.running) > 1
    columns = ["regime", "TP", *(["running"] if several else [])]
    table = new_table(*columns, *(f"{n} train" for n in result.splits))
    best = {id(row) for row in result.regimes}
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in result.tried:
        mine = cells.setdefault((row.setup.name, _tp(row), _running(row)), {})
        mark = "*" if id(row) in best else ""
        mine[row.setup.train_gpus] = (
            f"{mark}{objective_cell(result.objective, row.value(result.objective))}"
        )
    rows = sorted(cells.items(), key=lambda item: _order(result, item[0][0]))
    for (name, tp, running), steps in rows:
        table.add_row(
            name, tp, *([running] if several else []), *(steps.get(n, "-") for n in result.splits)
        )
    show(table)
    click.echo("")


def _order(result: LoopComparison, name: str) -> int:
    return [row.setup.name for row in result.regimes].index(name)


def _tp(row: RegimeResult) -> str:
    """TP degree of its engines; a dash where a policy plans them."""
    return "-" if plans(row.setup) else str(row.setup.config.run.cluster.tp)


def _running(row: RegimeResult) -> str:
    return str(row.setup.config.run.cluster.max_running)
