"""`heddle loop`: whole training regimes on one trace and cluster."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from heddle.cli.compare import one_tp
from heddle.cli.options import executor, looped, objective, take_config
from heddle.cli.sweeps import BEST, read_sweeps, sweep_option

if TYPE_CHECKING:
    from heddle.cost.objective import Objective
    from heddle.executor_choice import ExecutorKind

SWEPT: Final = ("cluster.tp", "cluster.max_running", "loop.train_gpus")


@click.command()
@click.option(
    "--regimes",
    required=True,
    help="REGIME[:PARAMETER=VALUE...], separated by commas; `heddle regimes` lists them",
)
@click.option("--policy", default=None, help="PRESET[+PART...] of rollouts [verl]")
@click.option("--seeds", type=int, default=1, show_default=True, help="Runs of each regime")
@click.option("--seed", type=int, default=None, help="The first seed [0]")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Processes [as many as pay]")
@executor
@click.option(
    "--figure",
    type=click.Path(path_type=Path),
    default=None,
    help="Draw samples a second over staleness and length bias into this PNG, SVG or PDF file",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder for a run directory of each run, for `heddle replay` and `heddle report` [none]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@sweep_option(*SWEPT)
@objective
@looped
def loop(
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    regimes: str,
    policy: str | None,
    sweeps: tuple[str, ...],
    seeds: int,
    seed: int | None,
    objective: "Objective",
    figure: Path | None,
    jobs: int | None,
    executor: "ExecutorKind",
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train on a trace under several regimes, simulated, and put the results side by side.

    A regime says when trajectories start, which of them make a batch, and when weights change. The
    engines generate the trace's trajectories, in batches of loop.groups prompts with loop.samples
    samples each; the trainer takes the time that published steps took (docs/training-time.md).
    Times leave out the first batches, until the regime's trajectories are under way.

    --gpus counts all GPUs; the trainer has loop.train_gpus of them, a quarter if nothing is said.
    With loop.colocated, rollout and training have all in turn. Environments, rewards and the
    trainer are keys of [loop]. With --sweep, a regime's best setting by --objective is shown.
    """
    from heddle.cli.progress import progress
    from heddle.cli.show_loop import show_loop
    from heddle.loop.comparison import compare_regimes
    from heddle.loop.config import loop_of
    from heddle.loop.splits import splits

    if figure is not None:
        from heddle.reports.trace_figures import figure_path

        figure_path(figure)
    swept = read_sweeps(sweeps, SWEPT, tp=options["tp"])
    options["tp"] = one_tp(options["tp"])
    config, _ = take_config(sources, options, settings, seed=seed, policy__preset=policy)
    made = loop_of(config, _names(regimes), seeds=seeds)
    numbers = swept.get("loop.train_gpus", [made.train_gpus])
    degrees = swept.get("cluster.tp", [config.cluster.tp])
    with progress("reading", "batches") as bar:
        result = compare_regimes(
            splits(
                made,
                None if numbers == BEST else numbers,
                None if degrees == BEST else degrees,
                swept.get("cluster.max_running"),
            ),
            fitting_only=BEST in (numbers, degrees),
            objective=objective,
            jobs=jobs,
            executor=executor,
            out=out,
            on_progress=(lambda done, total: bar.at(done, total)) if bar.seen else None,
        )
    if figure is not None:
        from heddle.reports.result_figures import draw_regimes

        draw_regimes(result, figure)
    if as_json:
        click.echo(json.dumps(result.plain(), allow_nan=False))
    else:
        show_loop(result)


def _names(regimes: str) -> list[str]:
    return [name.strip() for name in regimes.split(",") if name.strip()]
