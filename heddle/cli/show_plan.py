"""Plans of a rollout as text: of one cluster, and clusters side by side."""

from collections.abc import Collection, Mapping
from statistics import fmean
from typing import Final

import rich_click as click

from heddle.cli.tables import cost_cells, costs, number_cell, percent, show_rows
from heddle.comparison.tuning import without_acceptance
from heddle.planning.cluster_sizes import ClusterSize, Sizes
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
    if plan.roles is not None:
        prefill = plan.config.cluster.prefill_tps
        click.echo(f"roles    {len(prefill)} x TP {prefill[0]} prefill; the plan is of the others")
    _show_drafts(plan)
    click.echo(f"plan     {mix}; planner {problem.solver}, cost {problem.cost}")
    click.echo(f"makespan {_makespan(plan)}")
    _show_replayed(plan)
    paid, prices = plan.run_cost, plan.prices.text(plan.profiles.pools)
    click.echo(f"cost     {' GPU-hours, $ '.join(cost_cells(paid))}; {prices}\n")
    if len(plan.splits) > 1:
        _splits(plan)
    whole = [
        {k: round(v) if k.endswith("_tokens") and v else v for k, v in row.items()}
        for row in plan.groups()
    ]
    show_rows([{key: number_cell(value) for key, value in row.items()} for row in whole])


def _show_drafts(plan: Planned) -> None:
    """Speculative decoding of each shape of engine, and what else was tried."""
    if plan.speculations:
        tried = ", ".join(
            f"{without_acceptance(each)} {seconds:,.1f} s"
            for each, seconds in plan.speculations.items()
        )
        click.echo(f"tried    estimated makespan by speculation: {tried}")
    for shape, speculation in plan.drafts().items():
        click.echo(f"drafts   TP {shape.tp}: {speculation}")


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
    if plan.simulated_s is not None:
        return f"{plan.simulated_s:,.1f} s simulated with the estimated lengths"
    if plan.bound_s == 0.0:
        return f"{plan.makespan_s:,.1f} s estimated; nothing is proven of other plans"
    return (
        f"{plan.makespan_s:,.1f} s estimated; by the closed-form cost no plan of contiguous groups "
        f"ends before {plan.bound_s:,.1f} s"
    )


def _splits(plan: Planned) -> None:
    """The splits of the GPUs that were simulated, the best first."""
    show_rows(
        [
            {
                "GPUs by role": str(each.roles or "every engine does both"),
                "simulated_s": f"{each.simulated_s:,.1f}",
                "over best": f"{each.simulated_s / plan.splits[0].simulated_s:.2f} x",
            }
            for each in plan.splits
        ]
    )
    click.echo()


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
    kept = [] if limits.deadline_s is None else [f"{limits.deadline_s:,.0f} s"]
    kept += [] if limits.dollars is None else [f"${limits.dollars:,.2f}"]
    least = "the least time" if sizes.objective == "makespan" else "the lowest cost"
    within = f" within {' and '.join(kept)}" if kept else ""
    return f"{row.name}, {_mix(row.mix)}: {least}{within}"


def _table(sizes: Sizes) -> None:
    limits = sizes.limits
    limited = limits.deadline_s is not None or limits.dollars is not None
    rows = []
    for row in sizes.rows:
        cells = {
            "GPUs": f"{row.name}{' *' if sizes.on_front(row) else ''}",
            "mix": _mix(row.mix),
            "estimated_s": f"{row.estimated_s:,.1f}",
        }
        if row.simulated_s is not None and row.error is not None:
            cells["simulated_s"] = f"{row.simulated_s:,.1f}"
            cells["error"] = percent(row.error, "+.1%")
        cells |= {
            "bound_s": f"{row.bound_s:,.1f}",
            "limit": row.limit,
            "best uniform TP": f"TP {row.uniform.tp}: {row.uniform.makespan_s:,.1f}",
            **costs(row.cost),
        }
        if limited:
            broken = ["late"] if limits.late(row) else []
            broken += ["over budget"] if limits.over_budget(row) else []
            cells["within limits"] = ", ".join(broken) or "yes"
        rows.append(cells)
    show_rows(rows)


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
        f"against simulation {percent(mean)} off in the mean, from {percent(min(errors), '+.1%')} "
        f"to {percent(max(errors), '+.1%')}; best uniform TP is verl's best, simulated at every "
        "degree"
    )
