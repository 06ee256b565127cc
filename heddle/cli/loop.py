"""`heddle loop`: whole training regimes on one trace and cluster."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from heddle.cli.compare import BEST
from heddle.cli.loop_options import trained, tried_numbers
from heddle.cli.options import NumberRange, executor, looped, objective, take_config

if TYPE_CHECKING:
    from heddle.cost.objective import Objective
    from heddle.executor_choice import ExecutorKind


@click.command()
@click.option(
    "--regimes",
    required=True,
    help="REGIME[:PARAMETER=VALUE...], separated by commas; `heddle regimes` lists them",
)
@click.option("--seeds", type=int, default=1, show_default=True, help="Runs of each regime")
@click.option("--seed", type=int, default=None, help="The first seed [0]")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Processes [as many as pay]")
@executor
@click.option(
    "--env-start-s",
    default=None,
    help="Start of an environment: 2; MEAN,SIGMA as 10,5, normal and cut at 0; or "
    "lognormal:MEDIAN,SIGMA,MISS_RATE,MISS_MEDIAN, the last two optional [the trace's, or 0]",
)
@click.option("--env-capacity", type=int, default=None, help="Starts at once [no limit]")
@click.option(
    "--environments",
    type=int,
    default=None,
    help="Environments at once, each until its trajectory ends [no limit]",
)
@click.option(
    "--env-failure-rate", type=NumberRange(0), default=0.0, help="Share of starts that fail [0]"
)
@click.option(
    "--env-timeout-s",
    type=NumberRange(0),
    default=None,
    help="Until a failed start is noticed [as long as a start]",
)
@click.option("--env-retries", type=int, default=0, help="Further attempts of a start [0]")
@click.option(
    "--reward-s", default=None, help="Time of a reward, written as a start [the trace's, or 0]"
)
@click.option("--reward-gpus", type=int, default=0, help="GPUs of the reward service [0]")
@click.option("--reward-per-gpu", type=int, default=None, help="Rewards at once on each [8]")
@click.option(
    "--reward-capacity", type=int, default=None, help="Rewards at once, without GPUs [no limit]"
)
@click.option(
    "--reward-cold-start-s",
    type=NumberRange(0),
    default=0.0,
    help="Start of an instance of an elastic reward service, if no warm one is idle [0]",
)
@click.option(
    "--reward-keep-alive-s",
    type=NumberRange(0),
    default=None,
    help="An idle instance stays warm for so long [60]",
)
@click.option(
    "--reward-failure-rate", type=NumberRange(0), default=0.0, help="Share of rewards that fail [0]"
)
@click.option(
    "--reward-timeout-s",
    type=NumberRange(0),
    default=None,
    help="Until a failed reward is noticed [as long as a reward]",
)
@click.option("--reward-retries", type=int, default=0, help="Further attempts of a reward [0]")
@click.option(
    "--switch-failure-rate",
    type=NumberRange(0),
    default=0.0,
    help="Share of the moves of a hybrid pool's GPUs between rollout and training that fail [0]",
)
@click.option(
    "--switch-timeout-s",
    type=NumberRange(0),
    default=None,
    help="Until a failed move is noticed [180]",
)
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
@click.option(
    "--max-running",
    default=None,
    help="Steps that an engine runs at once; 64,128 tries each, best several up to the profile's "
    "largest batch [100]",
)
@objective
@looped
@trained
def loop(
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    regimes: str,
    policy: str,
    train_gpus: str | None,
    tp: str | None,
    max_running: str | None,
    colocated: bool,
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
    engines generate the trace's trajectories, in batches of --groups prompts with --samples samples
    each; the trainer takes the time that published steps took
    (docs/training-time.md). Times leave out the first steps, until the regime's trajectories are
    under way.

    --gpus counts all GPUs. With --colocated, rollout and training have them in turn.
    """
    from heddle.cli.progress import progress
    from heddle.cli.show_loop import show_loop
    from heddle.loop.comparison import compare_regimes
    from heddle.loop.config import LoopConfig
    from heddle.loop.splits import splits

    if figure is not None:
        from heddle.reports.trace_figures import figure_path

        figure_path(figure)
    own = {name: options.pop(name) for name in _OWN}
    config, _ = take_config(sources, options, settings, seed=seed, policy__preset=policy)
    left = config.cluster.gpus - own["reward_gpus"]
    numbers = tried_numbers("--train-gpus", train_gpus, max(1, left // 4))
    degrees = tried_numbers("--tp", tp, config.cluster.tp)
    running = tried_numbers("--max-running", max_running, config.cluster.max_running)
    made = LoopConfig(
        run=config,
        regimes=tuple(name.strip() for name in regimes.split(",") if name.strip()),
        colocated=colocated,
        **own,
    )
    with progress("reading", "batches") as bar:
        result = compare_regimes(
            splits(made, numbers, degrees, BEST if running is None else running),
            fitting_only=numbers is None or degrees is None,
            objective=objective,
            jobs=jobs,
            executor=executor,
            out=out,
            on_progress=(lambda done, total: bar.at(done, total)) if bar.seen else None,
        )
    if figure is not None:
        from heddle.reports.loop_figures import draw_regimes

        draw_regimes(result, figure)
    if as_json:
        click.echo(json.dumps(result.plain(), allow_nan=False))
    else:
        show_loop(result)


_OWN = (
    "steps",
    "groups",
    "samples",
    "seeds",
    "repeat",
    "train_backend",
    "train_tp",
    "train_pp",
    "optimizer_steps",
    "logprob_passes",
    "update_method",
    "env_start_s",
    "env_capacity",
    "environments",
    "env_failure_rate",
    "env_timeout_s",
    "env_retries",
    "reward_s",
    "reward_gpus",
    "reward_per_gpu",
    "reward_capacity",
    "reward_cold_start_s",
    "reward_keep_alive_s",
    "reward_failure_rate",
    "reward_timeout_s",
    "reward_retries",
    "switch_failure_rate",
    "switch_timeout_s",
)
