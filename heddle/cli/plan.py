"""`heddle plan`: TP degrees of the engines, and groups of trajectories."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import rich_click as click
from click.core import ParameterSource

from heddle.cli.given_options import given_options
from heddle.cli.options import objective, planned, take_config
from heddle.cli.plan_export import exported, exporter
from heddle.cli.plan_sizes import (
    SEVERAL_CLUSTERS,
    SizeQuestion,
    show_clusters,
    size_question,
    sized,
)
from heddle.cli.sweeps import BEST, read_sweeps, sweep_option

if TYPE_CHECKING:
    from heddle.config import RunConfig
    from heddle.cost.objective import Objective
    from heddle.loop.plan import LoopPlan
    from heddle.planning.plan import Planned
    from heddle_core.estimate.ordered import Cost
    from heddle_core.solve.joint import Solver

PLANNED_REGIMES = ("sync", "one-step-off", "areal:max_head_offpolicyness=1", "heddle-loop")
ONE_CLUSTER = ("planner", "cost", "predictor", "export", "force")
"""Options of a plan for one cluster."""
ROLLOUT_ONLY = (*ONE_CLUSTER, *SEVERAL_CLUSTERS, "estimate_only")
"""Options that do not matter to a loop."""


ROLLOUT_SWEPT: Final = ("cluster.gpus", "cluster.gpu", "cluster.roles")
SEVERAL_SWEPT: Final = ("cluster.gpus", "cluster.gpu")
LOOP_SWEPT: Final = ("cluster.tp", "loop.train_gpus")
SWEPT: Final = (*ROLLOUT_SWEPT, *LOOP_SWEPT)


@click.command()
@sized
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
@click.option(
    "--loop",
    "of_loop",
    is_flag=True,
    help="Plan an RL loop instead: GPUs of rollout and training, TP degree, trainer, by regime",
)
@click.option(
    "--regimes",
    default=",".join(PLANNED_REGIMES),
    show_default=True,
    help="With --loop: regimes to choose from, as for `heddle loop`",
)
@click.option(
    "--simulate",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="With --loop: how many of the best estimates are simulated",
)
@sweep_option(*SWEPT)
@click.option("--seed", type=int, default=None, help="Seed of all that is drawn [0]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@exported
@objective
@planned
@click.pass_context
def plan(
    context: click.Context,
    /,
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    planner: "Solver",
    cost: "Cost",
    predictor: str,
    of_loop: bool,
    regimes: str,
    simulate: int,
    sweeps: tuple[str, ...],
    seed: int | None,
    objective: "Objective",
    as_json: bool,
    **options: Any,
) -> None:
    """Choose engines for a rollout of a trace, and say when it should end.

    With --sweep cluster.gpus=8,16 or cluster.gpu=h100,h200, a --deadline or a --budget: which
    cluster to take. A table has the makespan on each, estimated and simulated, the bound, the best
    uniform TP degree (verl, simulated at every one) and the cost, the recommended row first.
    prices.h100 sets dollars.

    With one cluster: TP degrees, and a group of trajectories for each engine, from what a policy
    knows once all prompts have arrived: their number, the prompts, the predictor's first values,
    and the history (--history); with --predictor oracle from the true lengths. The trace is then
    simulated under heddle with this plan.

    With cluster.roles the plan is of engines that decode, beside engines that prefill, simulated
    with the lengths that it estimates; with --sweep cluster.roles=best, so are some splits of the
    GPUs, and the best is taken.

    With --loop the trace stands for the batches of a training, which [loop] describes. Every split
    of --gpus, TP degree and regime gets an estimated step; the best are simulated. --sweep
    cluster.tp=1,2 and loop.train_gpus=8,16 limit what is tried.
    """
    write_exports = exporter(options)
    swept = read_sweeps(sweeps, SWEPT)
    question = size_question(options, swept)
    if of_loop:
        _one_cluster(question)
        _only_of(context, ROLLOUT_ONLY, "leave out --loop, or the option")
        _only_swept(swept, LOOP_SWEPT, "leave out --loop, or the option")
        config, _ = take_config(sources, options, settings, seed=seed)
        if context.get_parameter_source("regimes") is ParameterSource.DEFAULT:
            regimes = ",".join(_possible(colocated=config.loop.colocated))
        best_loop = _planned_loop(config, swept, regimes, simulate, objective)
        _show_loop(best_loop, given_options(context, but=CHOSEN), as_json=as_json)
        return
    _only_of(context, ("regimes", "simulate"), "give --loop too")
    _only_swept(swept, ROLLOUT_SWEPT, "give --loop too")
    if question.several or question.limited:
        _only_of(context, ONE_CLUSTER, "it is of one cluster, without --deadline and --budget")
        _only_swept(swept, SEVERAL_SWEPT, "it is of one cluster, without --deadline and --budget")
        ranked = context.get_parameter_source("objective") is ParameterSource.COMMANDLINE
        config, _ = take_config(sources, options, settings, seed=seed)
        show_clusters(config, question, objective if ranked else None, as_json=as_json)
        return
    _only_of(context, SEVERAL_CLUSTERS, "sweep cluster.gpus or cluster.gpu to compare clusters")
    best = "cluster.roles" in swept
    config, _ = take_config(sources, options, settings, roles_tried=best, seed=seed)
    how = {"planner": planner, "cost": cost, "predictor": predictor, "objective": objective}
    found = _planned_rollout(config, best=best, simulated=question.simulated, how=how)
    _show_rollout(found, as_json=as_json)
    write_exports(found)


def _show_rollout(found: "Planned", *, as_json: bool) -> None:
    from heddle.cli.show_plan import show_plan

    if as_json:
        click.echo(json.dumps(found.plain(), allow_nan=False))
    else:
        show_plan(found)
        click.echo(f"searched for {found.solver_s:.3f} s", err=True)


def _show_loop(found: "LoopPlan", same_options: list[str], *, as_json: bool) -> None:
    from heddle.cli.show_loop_plan import show_loop_plan

    if as_json:
        click.echo(json.dumps(found.plain(), allow_nan=False))
    else:
        show_loop_plan(found, same_options)


def _one_cluster(question: SizeQuestion) -> None:
    """Refuse several clusters.

    Raises:
        ConfigError: there are several.
    """
    from heddle.config_files import ConfigError

    if question.several:
        raise ConfigError(
            "--loop plans for one number of GPUs of one type: sweep neither cluster.gpus nor "
            "cluster.gpu"
        )


def _planned_rollout(
    config: "RunConfig", *, best: bool, simulated: bool, how: Mapping[str, Any]
) -> "Planned":
    from heddle.cli.progress import progress
    from heddle.planning.roles import plan_by_role
    from heddle.planning.simulation import replayed
    from heddle.setup import Workspace

    shared = Workspace()
    with progress(f"planning ({how['planner']})", "splits") as bar:
        at = bar.at if bar.seen else None
        found = plan_by_role(config, best=best, workspace=shared, on_split=at, **how)
    if not simulated:
        return found
    with progress("simulating the trace"):
        return replayed(found, shared)


def _only_of(context: click.Context, names: tuple[str, ...], remedy: str) -> None:
    """Refuse options that were given and have no effect.

    Raises:
        ConfigError: one was.
    """
    from heddle.config_files import ConfigError

    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has no effect here: {remedy}")


def _possible(*, colocated: bool) -> list[str]:
    """Regimes to choose from that go with these GPUs."""
    from heddle_core.loop.presets import REGIMES

    names = PLANNED_REGIMES
    return [n for n in names if not colocated or REGIMES[n.partition(":")[0]].can_share_gpus]


def _only_swept(swept: Mapping[str, Any], keys: Sequence[str], remedy: str) -> None:
    """Refuse sweeps that have no effect.

    Raises:
        ConfigError: there is one.
    """
    from heddle.config_files import ConfigError

    for key in swept:
        if key not in keys:
            raise ConfigError(f"--sweep {key} has no effect here: {remedy}")


CHOSEN = ("of_loop", "regimes", "simulate", "as_json", "sweeps")
"""Parameters of which the plan's own values are printed, or none."""


def _planned_loop(
    config: "RunConfig",
    swept: Mapping[str, Any],
    regimes: str,
    simulate: int,
    objective: "Objective",
) -> "LoopPlan":
    from heddle.cli.progress import progress
    from heddle.loop.config import loop_of
    from heddle.loop.plan import plan_loop
    from heddle.loop.splits import splits

    made = loop_of(config, [name.strip() for name in regimes.split(",") if name.strip()])
    own = BEST if config.loop.train_gpus is None else [made.train_gpus]
    numbers, degrees = swept.get("loop.train_gpus", own), swept.get("cluster.tp", BEST)
    with progress("estimating", "batches") as bar:
        return plan_loop(
            splits(
                made,
                None if numbers == BEST else numbers,
                None if degrees == BEST else degrees,
            ),
            simulate=simulate,
            objective=objective,
            on_progress=(lambda done, total: bar.at(done, total)) if bar.seen else None,
        )
