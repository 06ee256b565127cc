"""`heddle plan`: TP degrees of the engines, and groups of trajectories."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click
from click.core import ParameterSource

from heddle.cli.given_options import given_options
from heddle.cli.logs import with_rollout
from heddle.cli.options import planned, take_replayed
from heddle.cli.plan_export import check_exports, write_exports
from heddle.cli.plan_sizes import Dollars, Duration, show_clusters
from heddle.cli.sweeps import BEST, best_speculation, read_sweeps, sweep_option
from heddle.config_error import ConfigError, require

if TYPE_CHECKING:
    from heddle.command_config import Config
    from heddle.loop.plan import LoopPlan
    from heddle.planning.plan import Planned

PLANNED_REGIMES = ("sync", "one-step-off", "areal:max_head_offpolicyness=1", "heddle-loop")
ROLLOUT_ONLY = ("export", "deadline_s", "dollars", "jobs")
"""Options that do not matter to a loop."""

ROLLOUT_SWEPT: Final = ("cluster.gpus", "cluster.gpu", "cluster.roles")
SEVERAL_SWEPT: Final = ("cluster.gpus", "cluster.gpu")
LOOP_SWEPT: Final = ("cluster.tp", "loop.train_gpus")
ONE_CLUSTER: Final = (
    "--regimes plans for one number of GPUs of one type: sweep neither cluster.gpus nor cluster.gpu"
)
BEST_OF_ONE: Final = (
    "--speculation best is of one cluster: give METHOD:DRAFTS, or leave out --deadline, --budget "
    "and sweeps of cluster.gpus and cluster.gpu"
)
SWEPT: Final = (*ROLLOUT_SWEPT, *LOOP_SWEPT)


@click.command()
@click.option(
    "--deadline",
    "deadline_s",
    type=Duration(),
    default=None,
    help="Latest end of the rollout, as 90s, 20m or 1h30m: compares clusters, and takes the "
    "cheapest that ends in time",
)
@click.option(
    "--budget",
    "dollars",
    type=Dollars(),
    default=None,
    help="Most dollars of the rollout: compares clusters, and takes the fastest for them",
)
@click.option("--jobs", type=int, default=None, help="Worker processes [as many as pay]")
@click.option(
    "--regimes",
    default=None,
    help="Plan an RL loop of one of these regimes, as for `heddle loop`: GPUs of rollout and "
    f"training, TP degree, trainer; best: {','.join(PLANNED_REGIMES)}",
)
@sweep_option(*SWEPT)
@click.option("--seed", type=int, default=None, help="Seed of all that is drawn [0]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Write the plan as a file that starts it: *.yaml for verl, *.sh for vLLM, *.toml for the "
    "gateway; may be repeated",
)
@planned
@click.pass_context
def plan(
    context: click.Context,
    /,
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    regimes: str | None,
    deadline_s: float | None,
    dollars: float | None,
    jobs: int | None,
    sweeps: tuple[str, ...],
    seed: int | None,
    as_json: bool,
    export: tuple[Path, ...],
    **options: Any,
) -> None:
    """Choose engines for a rollout of a trace, and say when it should end.

    With --sweep cluster.gpus=8,16 or cluster.gpu=h100,h200, a --deadline or a --budget: which
    cluster to take. A table has the makespan on each, estimated and simulated, the bound, the best
    uniform TP degree (verl, simulated at every one) and the cost, the recommended row first.
    prices.h100 sets dollars.

    With one cluster: TP degrees, and a group of trajectories for each engine, from what a policy
    knows once all prompts have arrived: their number, the prompts, the predictor's first values,
    and the history (--history); with policy.predictor = oracle from the true lengths.
    policy.planner and policy.cost say how it is searched. The trace is then simulated under heddle
    with this plan.

    With cluster.roles the plan is of engines that decode, beside engines that prefill, simulated
    with the lengths that it estimates; with --sweep cluster.roles=best, so are some splits of the
    GPUs, and the best is taken.

    With --regimes the trace stands for the batches of a training, which [loop] describes. Every
    split of --gpus, TP degree and regime gets an estimated step; the plan.simulated best are
    simulated. --sweep cluster.tp=1,2 and loop.train_gpus=8,16 limit what is tried.
    """
    from heddle.cli.show_plan import show_plan
    from heddle.cli.tables import answer
    from heddle.planning.cluster_sizes import RolloutLimits

    check_exports(export)
    swept = read_sweeps(sweeps, SWEPT)
    best = "cluster.roles" in swept
    options["speculation"], speculation = best_speculation(options["speculation"])
    config, _ = take_replayed(sources, options, settings, seed=seed, roles_tried=best)
    config, _ = with_rollout(config, sources, Path("runs"))
    several = any(key in swept for key in SEVERAL_SWEPT)
    if regimes is not None:
        from heddle.cli.show_loop import show_loop_plan

        require(not several, ONE_CLUSTER)
        _refuse(context, ROLLOUT_ONLY, swept, LOOP_SWEPT, "leave out --regimes, or the option")
        show = partial(show_loop_plan, words=given_options(context, but=CHOSEN))
        answer(_planned_loop(config, swept, regimes, speculation), show, as_json=as_json)
        return
    _refuse(context, (), swept, ROLLOUT_SWEPT, "give --regimes too")
    if several or deadline_s is not None or dollars is not None:
        remedy = "it is of one cluster, without --deadline and --budget"
        _refuse(context, ("export",), swept, SEVERAL_SWEPT, remedy)
        require(speculation is None, BEST_OF_ONE)
        limits = RolloutLimits(deadline_s=deadline_s, dollars=dollars)
        show_clusters(config, swept, limits, jobs, as_json=as_json)
        return
    _refuse(context, ("jobs",), {}, (), "sweep cluster.gpus or cluster.gpu to compare clusters")
    found = _planned_rollout(config, best=best, speculation=speculation)
    answer(found, show_plan, as_json=as_json)
    if not as_json:
        click.echo(f"searched for {found.solver_s:.3f} s", err=True)
    write_exports(found, export)


def _refuse(
    context: click.Context,
    names: Sequence[str],
    swept: Mapping[str, Any],
    keys: Sequence[str],
    remedy: str,
) -> None:
    """Refuse what was given and has no effect: parameters `names`, and sweeps of other `keys`.

    Raises:
        ConfigError: one was.
    """
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = [n for n in names if context.get_parameter_source(n) is ParameterSource.COMMANDLINE]
    useless = [flags[name] for name in given]
    useless += [f"--sweep {key}" for key in swept if key not in keys]
    if useless:
        raise ConfigError(f"{useless[0]} has no effect here: {remedy}")


def _planned_rollout(config: "Config", *, best: bool, speculation: str | None) -> "Planned":
    from heddle.cli.progress import progress
    from heddle.planning.roles import plan_with_drafts
    from heddle.planning.simulation import replayed
    from heddle.setup import Workspace

    shared, how = Workspace(), config.policy
    with progress(f"planning ({how.planner})", "splits") as bar:
        found = plan_with_drafts(
            config,
            speculation,
            best=best,
            workspace=shared,
            on_split=bar.count,
            planner=how.planner,
            cost=how.cost,
            predictor=how.predictor,
            objective=config.plan.objective or "makespan",
        )
    if config.plan.estimate_only:
        return found
    with progress("simulating the trace"):
        return replayed(found, shared)


CHOSEN = ("regimes", "as_json", "sweeps")
"""Parameters of which the plan's own values are printed, or none."""


def _planned_loop(
    config: "Config", swept: Mapping[str, Any], regimes: str, speculation: str | None
) -> "LoopPlan":
    from heddle.cli.loop import regime_names
    from heddle.cli.progress import progress
    from heddle.loop.config import loop_of
    from heddle.loop.plan import plan_loop
    from heddle.loop.splits import splits

    shared = config.loop.colocated
    possible = [n for n in PLANNED_REGIMES if not shared or _can_share(n)]
    best = regimes == BEST
    made = loop_of(config, possible if best else regime_names(regimes, config.regimes))
    own = BEST if config.loop.train_gpus is None else [made.train_gpus]
    with progress("estimating", "batches") as bar:
        return plan_loop(
            splits(
                made,
                swept.get("loop.train_gpus", own),
                swept.get("cluster.tp", BEST),
                speculation=speculation,
            ),
            simulate=config.plan.simulated,
            objective=config.plan.objective or "makespan",
            on_progress=bar.count,
        )


def _can_share(name: str) -> bool:
    """Whether rollout and training can have the same GPUs under a regime."""
    from heddle_core.loop.presets import REGIMES

    return REGIMES[name.partition(":")[0]].can_share_gpus
