"""A comparison of regimes as text."""

import rich_click as click

from heddle.cli.show import new_table, show
from heddle.comparison import Estimate
from heddle.loop.comparison import LoopComparison


def show_loop(result: LoopComparison) -> None:
    """Trace, cluster, what was tried, and one row for each regime."""
    first = result.tried[0].setup
    config, work = first.config, first.run.workload
    cluster = config.run.cluster
    click.echo(
        f"trace    {work.trace.name}: {len(work.scripts):,} trajectories of "
        f"{len(first.data.groups):,} prompts"
    )
    shared = ", rollout and training in turn" if config.colocated else ""
    click.echo(
        f"cluster  {first.gpus} x {cluster.gpu}, {cluster.model}{shared}; policy "
        f"{config.run.policy.preset}, TP {cluster.tps}, {cluster.max_running} running per engine"
    )
    click.echo(
        f"batch    {config.groups} prompts x {config.samples} samples, {config.steps} steps; of "
        "times only those once the regime's trajectories are under way (measured)"
    )
    click.echo(
        f"trainer  {config.train_backend}; times of training and weight updates are fitted on "
        "published ones (docs/training-time.md)\n"
    )
    if len(result.splits) > 1:
        _splits(result)
    reference = result.regimes[0].step_s.mean
    table = new_table(
        "regime",
        *([] if config.colocated else ["train GPUs"]),
        "measured",
        "step_s",
        f"vs {result.regimes[0].setup.name}",
        "samples_per_s",
        "$ per 1k samples",
        "rollout busy",
        "train busy",
        "staleness",
        "oldest",
        "wasted",
        "length bias",
        "of bound",
    )
    for row in result.regimes:
        dollars = row.dollars_per_1k_samples
        table.add_row(
            row.setup.name,
            *([] if config.colocated else [str(row.setup.train_gpus)]),
            str(len(row.runs[0].step_s)),
            _estimate(row.step_s),
            f"{reference / row.step_s.mean:.2f} x",
            f"{row.samples_per_s:.2f}",
            "-" if dollars is None else f"{dollars:.2f}",
            f"{row.rollout_busy:.2f}",
            f"{row.train_busy:.2f}",
            f"{row.mean_staleness:.2f}",
            f"{max(row.staleness)}",
            f"{row.wasted_share:.3f}",
            f"{row.length_bias:.3f}",
            f"{row.bound_fraction:.2f}",
        )
    show(table)


def _splits(result: LoopComparison) -> None:
    """Mean step of every regime at every split."""
    click.echo("tried    mean step in seconds by GPUs of the trainer; * the best\n")
    table = new_table("regime", *(f"{n} train" for n in result.splits))
    best = {id(row) for row in result.regimes}
    for name in dict.fromkeys(row.setup.name for row in result.tried):
        mine = [row for row in result.tried if row.setup.name == name]
        cells = [f"{'*' if id(row) in best else ''}{row.step_s.mean:,.1f}" for row in mine]
        table.add_row(name, *cells)
    show(table)
    click.echo("")


def _estimate(value: Estimate) -> str:
    return f"{value.mean:,.1f}" + ("" if value.ci95 is None else f" ± {value.ci95:,.1f}")
