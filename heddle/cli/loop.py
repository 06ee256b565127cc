"""`heddle loop`: whole training regimes on one trace and cluster."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from heddle.cli.compare import one_tp
from heddle.cli.given_options import kept_words, words_but
from heddle.cli.logs import with_rollout
from heddle.cli.options import looped, take_replayed
from heddle.cli.sweeps import best_speculation, read_sweeps, sweep_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from heddle.command_config import Config
    from heddle.loops.shared import SharedLoops

RUNS: Final = Path("runs")
"""Where the trace that is made of logs goes."""
SWEPT: Final = ("cluster.tp", "cluster.max_running", "loop.train_gpus")


@click.command()
@click.option(
    "--regimes",
    default="sync,one-step-off,areal",
    show_default=True,
    help="REGIME[:PARAMETER=VALUE...] or patterns, separated by commas (heddle regimes list)",
)
@click.option("--policy", default=None, help="PRESET[+PART...] of rollouts [verl]")
@click.option("--seeds", type=int, default=None, help="Runs of each regime [3]")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Processes [as many as pay]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder for a run directory of each run, for `heddle replay` and `heddle report` [none]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@sweep_option(*SWEPT)
@looped
@click.pass_context
def loop(
    context: click.Context,
    /,
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    regimes: str,
    policy: str | None,
    sweeps: tuple[str, ...],
    seeds: int | None,
    jobs: int | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train on a trace under several regimes, simulated, and put the results side by side.

    A regime says when trajectories start, which of them make a batch, and when weights change. The
    engines generate the trace's trajectories, in batches of loop.groups prompts with loop.samples
    samples each; what [loop] leaves open is what trace and regimes allow, and a regime that cannot
    take part is left out with its reason. The trainer takes the time that published steps took
    (docs/training-time.md). Times leave out the first batches, until the regime's trajectories are
    under way.

    --gpus counts all GPUs; the trainer has loop.train_gpus of them, a quarter if nothing is said.
    With loop.colocated, rollout and training have all in turn. Environments, rewards and the
    trainer are keys of [loop]. With --sweep, a regime's best setting by plan.objective is shown.
    report.figure draws samples a second over staleness and length bias. With loop.shared_gpus, each
    -c file is a loop, and all have the same GPUs: what that saves.
    """
    from heddle.cli.outputs import checked_figure
    from heddle.cli.progress import progress
    from heddle.cli.show_loop import show_loop, show_shared
    from heddle.cli.tables import answer, warn
    from heddle.config_error import require
    from heddle.loops.compared import compare_settings
    from heddle.loops.config import loop_of
    from heddle.loops.own_regimes import regime_names

    swept = read_sweeps(sweeps, SWEPT, tp=options["tp"])
    options["tp"] = one_tp(options["tp"])
    options["speculation"], speculation = best_speculation(options["speculation"])
    read = partial(take_replayed, sources, settings=settings, policy__preset=policy)
    config, _ = read(options={**options})
    if config.loop.shared_gpus:
        alone = not (sweeps or out or config.report.figure)
        require(alone, "loop.shared_gpus: leave --sweep, --out and report.figure out")
        files = {str(path): {**options, "configs": (path,)} for path in options["configs"]}
        own = {name: with_rollout(read(options=o)[0], sources, RUNS) for name, o in files.items()}
        saved = _shared({name: each for name, (each, _) in own.items()}, regimes, seeds, jobs)
        warn(saved.warnings)
        answer(saved, show_shared, as_json=as_json)
        return
    figure = checked_figure(config.report.figure)
    config, _ = with_rollout(config, sources, out or RUNS)
    made = loop_of(config, regime_names(regimes, config.regimes), seeds=seeds)
    with progress("reading", "batches") as bar:
        how: dict[str, Any] = {"given": partial(words_but, context, settings), "jobs": jobs}
        how |= {"objective": config.plan.objective or "makespan", "on_progress": bar.count}
        result = compare_settings(made, swept, speculation, out=out, **how)
    if figure:
        from heddle.reports.result_figures import draw_regimes

        draw_regimes(result, figure)
    warn(result.warnings)
    if as_json:
        click.echo(json.dumps(result.plain(kept_words(context, settings)), allow_nan=False))
    else:
        show_loop(result, config.plan.framework)


def _shared(
    configs: "Mapping[str, Config]", regimes: str, seeds: int | None, jobs: int | None
) -> "SharedLoops":
    """Loops on the same GPUs, by their files."""
    from dataclasses import replace

    from heddle.loops.config import loop_of
    from heddle.loops.own_regimes import regime_names
    from heddle.loops.shared import share_gpus

    loops = {}
    for name, config in configs.items():
        alone = replace(config, loop=replace(config.loop, shared_gpus=False))
        loops[name] = loop_of(alone, regime_names(regimes, config.regimes), seeds=seeds)
    return share_gpus(loops, jobs=jobs)
