"""`heddle compare`: several policies on one trace and cluster."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from heddle.cli.given_options import kept_words
from heddle.cli.logs import with_rollout
from heddle.cli.options import given_keys, replayed, take_replayed
from heddle.cli.sweeps import BEST, best_speculation, read_sweeps, sweep_option
from heddle.config_error import ConfigError
from heddle_compiled import DISTRIBUTION

if TYPE_CHECKING:
    from heddle.cli.progress import ProgressBar
    from heddle.command_config import Config
    from heddle.comparison.result import Comparison
    from heddle.comparison.tuning import Choice

SWEPT: Final = ("cluster.tp", "cluster.max_running", "cluster.roles", "policy.parts")
FEW: Final = 8
"""Trajectories of an engine below which makespans are those of single trajectories."""


@click.command()
@click.option(
    "--policies",
    default=None,
    help="PRESET[+PART...] and patterns such as verl*, separated by commas "
    "[all, each at its best setting; of a waterfall verl]",
)
@click.option("--seeds", type=int, default=None, help="Runs of each policy [3; of one policy 1]")
@click.option("--seed", type=int, default=None, help="The first seed [0]")
@click.option("--jobs", type=int, default=None, help="Worker processes [as many as pay]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@sweep_option(*SWEPT)
@click.option("--wide", is_flag=True, help="All columns, and what was tried")
@replayed
@click.pass_context
def compare(
    context: click.Context,
    /,
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    policies: str | None,
    seeds: int | None,
    seed: int | None,
    jobs: int | None,
    sweeps: tuple[str, ...],
    out: Path,
    as_json: bool,
    wide: bool,
    **options: Any,
) -> None:
    """Replay a trace under several policies on the same cluster and say which to run.

    Without --policies, and with all or a pattern such as verl* in it, policies are the shipped
    ones, each at the TP degree and number of running steps that are best for it on this trace; --tp
    and --max-running fix them. Named policies run with the cluster's.

    A seed draws values that the trace lacks and permutes the order of its groups, alike for every
    policy; the spread of several is the 95 % confidence interval of the mean. One policy with one
    seed is a run, and all its figures are printed. In place of a trace, LOGS of one format (`heddle
    trace import` lists them) are imported and replayed, or a rollout of them as [logs] says.

    With --sweep cluster.tp or cluster.max_running, named policies that do not plan their engines
    run at every combination, and the table has their best by plan.objective; --tp best is short for
    --sweep cluster.tp=best. --speculation best, or METHOD:best[:ACCEPTANCE], tries no drafts, 1 to
    4, and a schedule. --sweep cluster.roles=best tries engines that prefill and engines that
    decode, a row of its own. --sweep policy.parts=waterfall runs one baseline, then adds the parts
    of heddle one by one; report.figure draws it.

    PRESET+PART puts a part in place of the preset's own, any number of times: heddle+never,
    verl+lpt+progressive; `heddle policies list` has both. A policy or a part of your own is
    package.module:factory. The parts oracle, noisy-oracle:SIGMA and paper_quality know the trace:
    no result, and their runs say so.
    """
    from heddle.runs.comparison_folder import new_comparison_folder
    from heddle.search.policies import is_pattern
    from heddle.search.tuned import choices

    swept = read_sweeps(sweeps, SWEPT, tp=options["tp"])
    parts = "policy.parts" in swept
    listed = [name.strip() for name in (policies or "").split(",") if name.strip()]
    names = listed if policies is not None or parts else None
    races = names is None or any(map(is_pattern, names))
    tps, slots = swept.get("cluster.tp"), swept.get("cluster.max_running")
    best_roles = "cluster.roles" in swept
    options["tp"] = one_tp(options["tp"])
    options["speculation"], speculation = best_speculation(options["speculation"])
    words, given = kept_words(context, settings), given_keys(options, settings)
    config, text = take_replayed(sources, options, settings, seed=seed, roles_tried=best_roles)
    if parts:
        names, tps = _waterfall_policies(names or [], slots, best_roles, config), tps or BEST
        races = False
    config, logs = with_rollout(config, sources, out)
    if races:
        tps, slots = choices(config.cluster, given, tps, slots)
    if seeds is None and not races and len(names or ()) == 1:
        seeds = 1
    how = {"tps": tps, "slots": slots, "speculation": speculation, "roles": best_roles}
    how |= {"seeds": seeds, "jobs": jobs, "config_text": text}
    with new_comparison_folder(out, config.trace) as folder:
        result = _compared(config, names, out=folder, words=words, **how)
    _warn(result)
    figure = config.report.figure if parts else None
    _show(result, logs, figure, words, as_json=as_json, wide=wide)
    _finish(folder, config.report.page, as_json=as_json)


def _compared(
    config: "Config",
    policies: Sequence[str] | None,
    *,
    out: Path,
    words: Sequence[str],
    **given: Any,
) -> "Comparison":
    """Compare with progress on a terminal; write the index of the folder `out`."""
    from heddle.cli.progress import progress
    from heddle.comparison.compare import compare as compared
    from heddle.runs.comparison_folder import write_index

    with progress("reading", "trajectories") as bar:
        on_progress = partial(_show_progress, bar) if bar.seen else None
        on_round = partial(_show_round, bar) if bar.seen else None
        result = compared(
            config,
            policies,
            out=out,
            objective=config.plan.objective or "makespan",
            executor=config.runtime.executor,
            on_progress=on_progress,
            on_round=on_round,
            **given,
        )
    write_index(out, result.plain(words))
    return result


def _warn(result: "Comparison") -> None:
    """Print its warnings, one where engines have too few trajectories each among them."""
    from heddle.cli.tables import warn

    warn(result.warnings)
    rows = [row.variant for row in result.best_rows]
    # A planner may start fewer engines than the cluster's TP degree makes.
    rows = [row for row in rows if not row.planned] or rows
    engines = max(row.cluster.engine_count for row in rows)
    trajectories = len(result.workload.scripts)
    if trajectories < FEW * engines:
        click.echo(
            f"Warning: {_counted(trajectories, 'trajectory', 'trajectories')} for "
            f"{_counted(engines, 'engine', 'engines')}, fewer than {FEW} "
            "each: the longest trajectory decides, and policies hardly differ. Use fewer --gpus, "
            "or a larger trace (heddle trace resample).",
            err=True,
        )


def _counted(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"


def written_page(runs: Sequence[Path], file: Path) -> Path | None:
    """Write the page of runs, in place of an earlier one.

    Returns `file`; None, with a message, where plotly is absent.
    """
    from heddle.cli.report import write_page

    try:
        write_page(tuple(runs), file, force=True, with_size=False)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "plotly":
            raise
        click.echo(
            f"no {file.name}: it needs plotly, which is not installed: "
            f"pip install '{DISTRIBUTION}[pages]'",
            err=True,
        )
        return None
    return file


def _finish(folder: Path, with_page: bool | None, *, as_json: bool) -> None:
    """Write the page if it is wanted, and say what there is."""
    from heddle.runs.comparison_folder import INDEX, PAGE, shown_runs

    wanted = not as_json if with_page is None else with_page
    page = written_page(shown_runs(folder), folder / PAGE) if wanted else None
    if as_json:
        return
    click.echo(f"\nindex in {folder / INDEX}")
    if page is not None:
        click.echo(f"next: open {page} in a browser")
    else:
        click.echo(f"next: heddle report {folder} -o report.html")
    click.echo("next: heddle runs, which lists all comparisons and runs")


def _show_progress(
    bar: "ProgressBar", every: Sequence[str], done: Sequence[int], each: int
) -> None:
    from heddle.cli.progress import running

    over = sum(n >= each for n in done)
    bar.now(f"{running(every, done, each)} ({over} of {len(every)} runs done)")
    bar.at(sum(done), each * len(every))


def _show_round(bar: "ProgressBar", best: str, done: int, of: int) -> None:
    bar.now(f"finding settings; best so far {best}" if best else "finding settings")
    bar.at(done, of)


def _waterfall_policies(
    names: list[str], slots: "Choice", roles: bool, config: "Config"
) -> list[str]:
    """Check the options of a waterfall; returns the policies to compare.

    Raises:
        ConfigError: more than one baseline, or settings beside the TP degree to try.
        OutputError: the file cannot be written.
    """
    from heddle.cli.outputs import checked_figure
    from heddle.comparison.waterfall import BASELINE, waterfall_policies

    if len(names) > 1:
        raise ConfigError(
            f"--sweep policy.parts=waterfall begins with one baseline, not {len(names)}: name one "
            f"in --policies, or none for {BASELINE}"
        )
    if slots is not None or roles:
        raise ConfigError(
            "a waterfall tries TP degrees only: sweep nothing but policy.parts and cluster.tp"
        )
    checked_figure(config.report.figure)
    return waterfall_policies(*names)


def _show(
    result: "Comparison",
    logs: dict[str, Any] | None,
    figure: str | None,
    words: Sequence[str],
    *,
    as_json: bool,
    wide: bool,
) -> None:
    """Print a comparison, or a waterfall where there is a `figure`; empty: it is not drawn."""
    from heddle.cli.show import comparison, show_waterfall
    from heddle.comparison.waterfall import waterfall

    steps = [] if figure is None else waterfall(result)
    if figure:
        from heddle.reports.result_figures import draw_waterfall

        gpus = result.profiles.hardware()
        title = f"{result.workload.trace.name}, {result.profiles.model}, {gpus}"
        draw_waterfall(steps, Path(figure), bound_s=result.bound.makespan_s, title=title)
    if as_json:
        plain = result.plain(words) | ({} if logs is None else {"logs": logs})
        if steps:
            plain["waterfall"] = [step.plain() for step in steps]
        click.echo(json.dumps(plain, allow_nan=False))
    elif steps:
        show_waterfall(result, steps)
        if figure:
            click.echo(figure)
    else:
        comparison(result, words, wide=wide)


def one_tp(tp: str | None) -> str | None:
    """Return `--tp` as a value of the cluster; None where every degree is tried.

    Raises:
        ConfigError: it is a list, which earlier releases tried one by one.
    """
    if tp is not None and "," in tp:
        raise ConfigError(
            f"--tp {tp}: to try each, give --sweep cluster.tp={tp}; engines of several TP degrees "
            "are a list of cluster.engines"
        )
    return None if tp == BEST else tp
