"""`heddle plan`: TP degrees of the engines, and groups of trajectories."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from heddle.cli.given_options import kept_words
from heddle.cli.logs import with_rollout
from heddle.cli.options import check_file_is_of, given_keys, planned, take_replayed
from heddle.cli.plan_export import check_exports, write_exports
from heddle.cli.plan_limits import DOLLARS, DURATION
from heddle.cli.sweeps import best_speculation, read_sweeps, sweep_option
from heddle.config_error import ConfigError, require

if TYPE_CHECKING:
    from heddle.command_config import Config
    from heddle.planning.limits import RolloutLimits
    from heddle.search.clusters import SearchedClusters

ROLLOUT_SWEPT: Final = ("cluster.gpus", "cluster.gpu", "cluster.roles")
SEVERAL_SWEPT: Final = ("cluster.gpus", "cluster.gpu")
LOOP_SWEPT: Final = ("cluster.tp", "loop.train_gpus")
SWEPT: Final = (*ROLLOUT_SWEPT, *LOOP_SWEPT)


@click.command()
@click.option(
    "--deadline",
    "deadline_s",
    type=DURATION,
    default=None,
    help="Latest end of the rollout, as 90s, 20m or 1h30m: compares clusters, and takes the "
    "cheapest that ends in time",
)
@click.option(
    "--budget",
    "dollars",
    type=DOLLARS,
    default=None,
    help="Most dollars of the rollout: compares clusters, and takes the fastest for them",
)
@click.option("--jobs", type=int, default=None, help="Worker processes [as many as pay]")
@click.option(
    "--regimes",
    default=None,
    help="Plan an RL loop of one of these regimes, as for `heddle loop`: GPUs of rollout and "
    "training, policy, TP degree; best: those that most frameworks have",
)
@sweep_option(*SWEPT)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@click.option("--wide", is_flag=True, help="All that was tried, too")
@click.option(
    "--budget-s",
    type=float,
    default=None,
    help="Seconds to search and to judge [none]",
)
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
    as_json: bool,
    wide: bool,
    budget_s: float | None,
    export: tuple[Path, ...],
    **options: Any,
) -> None:
    """Say what to run: policy, engines, slots and cluster for rollouts like a trace.

    All shipped policies, each at every TP degree and number of running steps, and with
    --speculation best at each setting of it, are simulated on rollouts that are drawn from half of
    the prompts. The last five are judged on the other half; an interval is that of one rollout.
    --max-running fixes the number of running steps. ctrl-C, and the end of --budget-s, give the
    best so far. With --sweep cluster.roles=best, some engines may only prefill.

    With --sweep cluster.gpus=8,16 or cluster.gpu=h100,h200, a --deadline or a --budget, each
    cluster is searched, and one is taken. prices.h100 sets dollars.

    With --regimes the trace stands for the batches of a training, which [loop] describes, and every
    regime is searched at every split of --gpus. --sweep cluster.tp=1,2 and loop.train_gpus=8,16
    limit what is tried.
    """
    from heddle.cli.outputs import checked_figure
    from heddle.planning.deployment import deployment_of_search
    from heddle.planning.limits import RolloutLimits

    check_exports(export)
    swept = read_sweeps(sweeps, SWEPT)
    best = "cluster.roles" in swept
    options["speculation"], speculation = best_speculation(options["speculation"])
    given = given_keys(options, settings)
    config, _ = take_replayed(sources, options, settings, plan__budget_s=budget_s, roles_tried=best)
    config, _ = with_rollout(config, sources, Path("runs"))
    several = any(key in swept for key in SEVERAL_SWEPT)
    if regimes is None:
        _refuse(swept, ROLLOUT_SWEPT, "give --regimes too")
    else:
        require(not best, "a loop is planned without roles: leave --sweep cluster.roles out")
    limits = RolloutLimits(deadline_s=deadline_s, dollars=dollars)
    several = several or limits != RolloutLimits()
    if several:
        _refuse(swept, (*SEVERAL_SWEPT, *LOOP_SWEPT), "it is of one cluster")
    require(not config.cluster.mix, MIX)
    figure = checked_figure(config.report.figure)
    slots = (config.cluster.max_running,) if "cluster.max_running" in given else None
    found = _searched(config, swept, limits, speculation, jobs, slots, regimes)
    words = kept_words(context, settings)
    _show_searched(found, words, config.plan.framework, several=several, wide=wide, as_json=as_json)
    write_exports(deployment_of_search(found.taken), export)
    if figure is not None:
        from heddle.reports.result_figures import draw_clusters

        draw_clusters(found, figure)


def _refuse(swept: Mapping[str, Any], keys: Sequence[str], remedy: str) -> None:
    """Refuse a sweep of another key than `keys`, which has no effect.

    Raises:
        ConfigError: one was given.
    """
    for key in swept:
        if key not in keys:
            raise ConfigError(f"--sweep {key} has no effect here: {remedy}")


MIX = (
    "cluster.mix names the engines, and a search chooses them: leave it out, or compare policies "
    "on these engines with heddle compare"
)


def _searched(
    config: "Config",
    swept: Mapping[str, Any],
    limits: "RolloutLimits",
    speculation: str | None,
    jobs: int | None,
    slots: tuple[int, ...] | None,
    regimes: str | None,
) -> "SearchedClusters":
    """Search all clusters, with progress on a terminal."""
    from heddle.cli.progress import progress
    from heddle.search.clusters import search_clusters

    loop = {}
    if regimes is not None:
        from heddle.loops.splits import loop_choices

        loop = loop_choices(config, regimes, swept.get("loop.train_gpus"), swept.get("cluster.tp"))
    for gpu in swept.get("cluster.gpu", ()):
        check_file_is_of(config.cluster.model, gpu)
    with progress("searching", "simulations") as bar:

        def on_round(name: str, best: str, done: int, of: int) -> None:
            bar.now(f"searching {name}; best so far {best}" if best else f"searching {name}")
            bar.at(done, of)

        return search_clusters(
            config,
            gpus=swept.get("cluster.gpus", (config.cluster.gpus,)),
            classes=swept.get("cluster.gpu", (config.cluster.gpu,)),
            limits=limits,
            objective=config.plan.objective,
            framework=config.plan.framework,
            speculation=speculation,
            **(loop or {"roles": "cluster.roles" in swept}),
            slots=slots,
            jobs=jobs,
            budget_s=config.plan.budget_s,
            on_round=on_round if bar.seen else None,
        )


def _show_searched(
    found: "SearchedClusters",
    words: list[str],
    framework: str | None,
    *,
    several: bool,
    wide: bool,
    as_json: bool,
) -> None:
    from heddle.cli.show_search import show_search, show_searched_clusters
    from heddle.search.clusters import plain_clusters
    from heddle.search.verdict import plain

    if as_json:
        only = found.taken
        plainly = plain_clusters(found, words) if several else plain(only, words)
        click.echo(json.dumps(plainly, allow_nan=False))
    elif several:
        show_searched_clusters(found, words, wide=wide, framework=framework)
    else:
        show_search(found.taken, words, wide=wide, framework=framework)
