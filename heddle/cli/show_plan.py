"""A closed-form plan of a rollout as text."""

from collections.abc import Collection, Mapping
from typing import Final

import rich_click as click

from heddle.cli.tables import cost_cells, number_cell, percent, show_rows
from heddle.planning.plan import Planned
from heddle.policy_inputs import needs_oracle
from heddle_core.ids import EngineShape

FAR: Final = 0.5
"""Error of an estimate that says more of its lengths than of its costs."""


def show_plan(plan: Planned) -> None:
    """Trace, cluster, the plan's inputs and result, and one row for each engine."""
    problem = plan.problem
    facts = [f"{len(problem.trajectories):,} trajectories", *plan.fill.assumptions]
    click.echo(f"trace    {plan.trace.name}: {'; '.join(facts)}")
    click.echo(
        f"cluster  {plan.profiles.hardware()}, {plan.profiles.model}, "
        f"TP {_degrees(problem.by_shape, problem.pools)}{plan.profiles.layout_label}, "
        f"{problem.max_running} running per engine"
    )
    if plan.left_out:
        click.echo(
            f"left out TP {_degrees(plan.left_out, problem.pools)}: one engine does not hold the "
            f"largest context, {plan.largest_tokens:,} tokens"
        )
    click.echo(f"history  {plan.history.name}")
    click.echo(f"knows    {_knowledge(plan)}")
    several = len(problem.pools) > 1
    mix = ", ".join(
        f"{count} x {f'{shape.gpu} ' if several else ''}TP {shape.tp}"
        for shape, count in plan.mix.items()
    )
    for shape, speculation in plan.drafts().items():
        click.echo(f"drafts   TP {shape.tp}: {speculation}")
    click.echo(f"plan     {mix}; planner {problem.solver}, cost {problem.cost}")
    click.echo(f"makespan {_makespan(plan)}")
    _show_replayed(plan)
    paid, prices = plan.run_cost, plan.prices.text(plan.profiles.pools)
    click.echo(f"cost     {' GPU-hours, $ '.join(cost_cells(paid))}; {prices}\n")
    whole = [
        {k: round(v) if k.endswith("_tokens") and v else v for k, v in row.items()}
        for row in plan.groups()
    ]
    show_rows([{key: number_cell(value) for key, value in row.items()} for row in whole])


def _show_replayed(plan: Planned) -> None:
    if plan.replayed_s is None or plan.estimate_error is None:
        return
    early = percent(abs(plan.estimate_error), ".0%")
    side = "early" if plan.estimate_error < 0.0 else "late"
    click.echo(
        f"replayed {plan.replayed_s:,.1f} s: this trace simulated under heddle with this "
        f"planner; the estimate is {early} {side}"
    )
    name = plan.history.name
    guessed = name == "none" or name.startswith("prior:")
    if guessed and abs(plan.estimate_error) > FAR and not needs_oracle(f"+{plan.predictor}"):
        lengths = "a guess" if name == "none" else f"those of {name}"
        click.echo(
            f"lengths  of the estimate are {lengths}: take the replayed time, and name earlier "
            "rollouts of these tasks with --history for a nearer estimate"
        )


def _makespan(plan: Planned) -> str:
    if plan.bound_s == 0.0:
        return f"{plan.makespan_s:,.1f} s estimated; nothing is proven of other plans"
    return (
        f"{plan.makespan_s:,.1f} s estimated; by the closed-form cost no plan of contiguous groups "
        f"ends before {plan.bound_s:,.1f} s"
    )


def _degrees(shapes: Collection[EngineShape], pools: Mapping[str, int]) -> str:
    """TP degrees of shapes; of several classes, each with its own."""
    found = {gpu: sorted(shape.tp for shape in shapes if shape.gpu == gpu) for gpu in pools}
    if len(found) == 1:
        return ", ".join(map(str, *found.values()))
    return "; ".join(f"{', '.join(map(str, tps))} ({gpu})" for gpu, tps in found.items() if tps)


def _knowledge(plan: Planned) -> str:
    """The inputs of the plan, in a line."""
    if needs_oracle(f"+{plan.predictor}"):
        return f"true lengths ({plan.predictor}): no plan that could have been made"
    text = f"what {plan.predictor} predicts before anything has run"
    if plan.spread:
        return f"{text}: its order, with lengths spread as in history"
    if len(dict.fromkeys(plan.problem.output_tokens)) == 1:
        return f"{text}: alike for all, so that groups differ in number only"
    return text
