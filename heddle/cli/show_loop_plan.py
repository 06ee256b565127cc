"""A plan of an RL loop as text."""

import shlex
from collections.abc import Sequence

import rich_click as click

from heddle.cli.show import cost_cells, new_table, show
from heddle.loop.plan import LoopPlan, StepEstimate

SHOWN = 8
"""Rows at most, and those that were simulated."""


def show_loop_plan(plan: LoopPlan, words: Sequence[str]) -> None:
    """The best settings, what they were estimated and simulated to take, and the command to run.

    `words` are the sources and options that this command shares.
    """
    best, result = plan.best
    config = best.setup.config
    cluster = config.run.cluster
    click.echo(
        f"cluster  {best.setup.gpus} x {best.setup.run.profile.gpu_label}, {cluster.model}; policy "
        f"{config.run.policy.preset}; batches of {config.groups} x {config.samples}"
    )
    click.echo(
        f"tried    {len(plan.estimates)} settings, estimated from lengths of the trace; "
        f"{len(plan.simulated)} simulated, {config.batches} batches each; best by {plan.objective}"
    )
    click.echo(f"prices   {best.setup.prices.text(best.setup.gpus_by_class)}\n")
    table = new_table(
        "regime",
        "rollout GPUs",
        "train GPUs",
        "TP",
        "trainer",
        "estimated_s",
        "simulated_s",
        "over best",
        "est. GPU-hours/1k",
        "est. $/1k",
        "waits for",
    )
    least = result.value(plan.objective)
    rows = max(SHOWN, len(plan.simulated))
    for number, estimate in enumerate(plan.estimates[:rows]):
        simulated = plan.simulated[number] if number < len(plan.simulated) else None
        table.add_row(
            ("* " if estimate is best else "") + estimate.setup.name,
            str(estimate.setup.config.run.cluster.gpus),
            str(estimate.setup.train_gpus),
            str(estimate.setup.config.run.cluster.tp),
            f"TP {estimate.setup.layout.tp} PP {estimate.setup.layout.pp}",
            f"{estimate.step_s:,.1f}",
            "-" if simulated is None else f"{simulated.step_s.mean:,.1f}",
            "-" if simulated is None else f"{simulated.value(plan.objective) / least:.2f} x",
            *cost_cells(estimate.cost_per_1k_samples),
            estimate.limit,
        )
    show(table)
    click.echo(
        "\ncost     1,000 trained samples of the best, as simulated: "
        + " GPU-hours, $ ".join(cost_cells(result.cost_per_1k_samples))
    )
    click.echo(f"next     heddle loop {shlex.join(words)} {_chosen(best)}")


def _chosen(estimate: StepEstimate) -> str:
    config = estimate.setup.requested
    shared = config.colocated
    where = "" if shared else f"--set loop.train_gpus={estimate.setup.train_gpus} "
    return f"--regimes {estimate.setup.name} {where}--tp {config.run.cluster.tp}"
