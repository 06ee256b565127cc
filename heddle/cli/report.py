"""`heddle report`: tables and figures of finished runs, a page about any, a file for Perfetto."""

import json
from functools import partial
from pathlib import Path

import rich_click as click

FIGURES = "figures"
PAGE = (".html", ".htm")
PERFETTO = (".json", ".json.gz")
_AS_FAR = "showing its journal as far as it goes"


@click.command()
@click.argument(
    "runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...|LOGS..."
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="FILE.html for a page, FILE.json.gz for Perfetto, else a folder for figures "
    "[RUN/figures for one run, figures beside the first for several]",
)
@click.option("--force", is_flag=True, help="Replace a page or Perfetto file that is there")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
def report(runs: tuple[Path, ...], out: Path | None, force: bool, as_json: bool) -> None:
    """Show the figures of runs side by side, and draw them. A comparison's folder is its runs.

    With -o FILE.html: one page with summary, timeline, plan, differences and every trajectory,
    which needs no network. It also shows a run that is under way or broke off, as far as it goes.
    Of LOGS, which are measured steps, it is the page of `heddle diagnose`, with heddle.toml.
    With -o FILE.json.gz: one run as a timeline for Perfetto or chrome://tracing.
    Otherwise: a table, and running steps per engine, completion, active trajectories and queueing
    delay as PNG files.
    """
    from heddle.cli.outputs import new_file
    from heddle.runs.comparison_folder import in_order_of_table
    from heddle.runs.files import MANIFEST

    # `heddle report runs/*` names the folder of its own figures, too, when it is given again.
    drawn = [r for r in runs if r.name == FIGURES and not (r / MANIFEST).exists()]
    runs = tuple(dict.fromkeys(r for r in runs if r not in drawn)) or runs
    runs = tuple(dict.fromkeys(each for path in runs for each in _runs_of(path)))
    runs = tuple(in_order_of_table(runs))
    name = "" if out is None else out.name.lower()
    if out is not None and name.endswith(PAGE) and all(map(_measured, runs)):
        from heddle.cli.diagnose import show_diagnosis
        from heddle.cli.logs import USUAL
        from heddle.cli.options import take_config

        new_file(out, force)
        config, _ = take_config([str(runs[0])], {"configs": ()}, (), usual=USUAL, logs=True)
        show_diagnosis([*map(str, runs)], config, as_json=as_json, page_file=out)
    elif out is not None and name.endswith(PERFETTO):
        _perfetto(runs, out, force)
        _written(runs, out, "perfetto", as_json)
    elif out is not None and name.endswith(PAGE):
        write_page(runs, out, force)
        _written(runs, out, "page", as_json)
    else:
        _figures(runs, out, as_json)


def _runs_of(path: Path) -> list[Path]:
    """Return the runs of a comparison if `path` is its folder or a file in it; else `path`."""
    from heddle.runs.comparison_folder import INDEX, PAGE, shown_runs
    from heddle.runs.files import MANIFEST

    if path.name in (INDEX, PAGE) and path.is_file():
        return shown_runs(path.parent) or [path]
    if path.is_dir() and not (path / MANIFEST).exists():
        return shown_runs(path) or [path]
    return [path]


def _measured(path: Path) -> bool:
    """Whether it is logs, and no run or folder of runs."""
    from heddle.runs.comparison_folder import INDEX, PAGE
    from heddle.runs.files import MANIFEST
    from heddle_trace.importers.folders import within

    if path.is_dir():
        files = [file.name for file in within(path)]
        return bool(files) and MANIFEST not in files
    return path.is_file() and path.name not in (INDEX, PAGE)


def write_page(paths: tuple[Path, ...], out: Path, force: bool, *, with_size: bool = True) -> None:
    """Write the page of some runs, and its size to standard error.

    Raises:
        OutputError: it may not be written there.
    """
    from heddle.cli.outputs import any_run, new_file, write
    from heddle.cli.progress import progress
    from heddle.cli.show import show_lateness
    from heddle.reports.page.html import page
    from heddle.reports.run_bounds import run_bound
    from heddle.setup import Workspace

    new_file(out, force)
    runs = [any_run(path, _AS_FAR) for path in paths]
    for run in runs:
        run.verify()
        if run.status == "finished":
            show_lateness(str(run.path), run.summary)
    with progress("reading") as bar:
        made = page(runs, partial(run_bound, workspace=Workspace()), on_progress=bar.now)
    write(out, made)
    if with_size:
        click.echo(f"{out}: {len(made) / 1e6:.1f} MB, opens without a network", err=True)


def _perfetto(paths: tuple[Path, ...], out: Path, force: bool) -> None:
    from heddle.cli.outputs import OutputError, any_run, new_file, write
    from heddle.cli.progress import progress
    from heddle.reports.perfetto import trace_events
    from heddle.reports.sample import sample_engines
    from heddle.runs.record import record

    if len(paths) != 1:
        raise OutputError(f"{out}: a file for Perfetto has one run, not {len(paths)}: name one RUN")
    new_file(out, force)
    run = any_run(paths[0], _AS_FAR)
    run.verify()
    with progress(f"reading {run.label}") as bar:
        found = record(run)
        bar.now("writing")
        shown = sample_engines(found)
        made = trace_events(found, shown, packed=out.name.lower().endswith(".gz"))
    write(out, made)
    if shown.note is not None:
        click.echo(f"{out}: {shown.note}", err=True)


def _written(runs: tuple[Path, ...], file: Path, kind: str, as_json: bool) -> None:
    if as_json:
        found = {"schema": "heddle.report/1", "runs": [{"run": str(r)} for r in runs]}
        click.echo(json.dumps({**found, kind: str(file)}))
    else:
        click.echo(str(file))


def _figures(paths: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    from heddle.cli.progress import progress
    from heddle.cli.show import show_lateness, summaries
    from heddle.reports.figures import draw
    from heddle.reports.labels import labels
    from heddle.runs import load_run

    runs = [load_run(path) for path in paths]
    for run in runs:
        run.verify()
    beside = paths[0] if len(paths) == 1 else paths[0].parent
    for run in runs:
        show_lateness(str(run.path), run.summary)
    with progress("drawing"):
        files = draw(runs, out if out is not None else beside / FIGURES)
    if as_json:
        listed = [{"run": str(run.path), "summary": dict(run.summary)} for run in runs]
        found = {"schema": "heddle.report/1", "runs": listed, "figures": [str(f) for f in files]}
        click.echo(json.dumps(found))
        return
    summaries(labels(runs), [run.summary for run in runs])
    for file in files:
        click.echo(str(file))
