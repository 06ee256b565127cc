"""RL loops as text: a comparison of regimes, and a plan."""

import rich_click as click

from heddle.cli.bars import Bar, draw_bars
from heddle.cli.tables import (
    costs,
    estimate_cell,
    show_ranking,
    show_rows,
    show_tried,
)
from heddle.comparison.tuning import without_acceptance
from heddle.loops.result import LoopComparison, RegimeResult, plans

SHOWN = 8
"""Rows of a plan at most, and those that were simulated."""


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
    again = config.groups * config.batches > len(first.data.groups)
    click.echo(
        f"batch    {config.groups} prompts x {config.samples} samples, {config.batches} steps; of "
        "times only those once the regime's trajectories are under way (measured)"
        + ("; the trace begins again after its last prompt" if again else "")
    )
    click.echo(
        f"trainer  {config.train_backend}; times of training and weight updates are fitted on "
        "published ones (docs/training-time.md)"
    )
    click.echo(f"prices   {first.prices.text(first.gpus_by_class)}\n")


def _regimes(result: LoopComparison) -> None:
    config, reference = result.tried[0].setup.config, result.regimes[0]
    rows = []
    for row in result.regimes:
        gpus = {} if config.colocated else {"train GPUs": str(row.setup.train_gpus)}
        busy = {"reward busy": row.reward_busy, "env. busy": row.environment_busy}
        rows.append(
            {
                **_setting(result, row, **gpus),
                "measured": str(len(row.runs[0].step_s)),
                "step_s": estimate_cell(row.step_s),
                f"vs {reference.setup.name}": f"{reference.step_s.mean / row.step_s.mean:.2f} x",
                "samples_per_s": f"{row.samples_per_s:.2f}",
                **costs(row.cost_per_1k_samples, "/1k"),
                "rollout busy": f"{row.rollout_busy:.2f}",
                "train busy": f"{row.train_busy:.2f}",
                **{name: f"{share:.2f}" for name, share in busy.items() if share is not None},
                "staleness": f"{row.mean_staleness:.2f}",
                "oldest": f"{max(row.staleness)}",
                "wasted": f"{row.wasted_share:.3f}",
                "length bias": f"{row.length_bias:.3f}",
                "KS": f"{row.length_distance:.3f}",
                "of bound": f"{row.bound_fraction:.2f}",
            }
        )
    show_rows(rows)


def _splits(result: LoopComparison) -> None:
    """Seconds of a step by what the trainer did or waited for."""
    click.echo(
        "\nseconds of a step: the trainer waits for trajectories, or only for rewards of its batch;"
    )
    click.echo("it trains; it waits for a weight update, or for GPUs that change between the two\n")
    rows = [(row.setup.name, row.split_s) for row in result.regimes]
    show_rows(
        [{"regime": name, **{k: f"{s:,.1f}" for k, s in parts.items()}} for name, parts in rows]
    )


def _tried(result: LoopComparison) -> None:
    """The objective of every regime at every setting."""
    what = "step in seconds" if result.objective == "makespan" else "dollars of 1,000 samples"
    click.echo(f"tried    mean {what} by GPUs of the trainer; * the best\n")
    best = {id(row) for row in result.regimes}
    names = [row.setup.name for row in result.regimes]
    cells = (
        (
            _setting(result, row),
            f"{row.setup.train_gpus} train",
            id(row) in best,
            row.value(result.objective),
        )
        for row in sorted(result.tried, key=lambda row: names.index(row.setup.name))
    )
    show_tried(result.objective, cells, [f"{n} train" for n in result.splits])
    click.echo("")


def _setting(result: LoopComparison, row: RegimeResult, **more: str) -> dict[str, str]:
    """Regime, `more`, TP degree of its engines (a dash where a policy plans them), and steps."""
    cluster = row.setup.config.run.cluster
    return {
        "regime": row.setup.name,
        **more,
        "TP": "-" if plans(row.setup) else str(cluster.tp),
        **({"running": str(cluster.max_running)} if len(result.running) > 1 else {}),
        **({"speculation": without_acceptance(cluster.speculation)} if result.drafted else {}),
    }
