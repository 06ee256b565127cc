"""`heddle report`: tables and figures of finished runs."""

import json
from pathlib import Path

import rich_click as click

FIGURES = "figures"


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder for figures [RUN/figures for one run, figures beside the first for several]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
def report(runs: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Show the figures of runs side by side, and draw them.

    Figures: running steps per engine over time, completion, active trajectories, queueing delay.
    """
    from heddle.cli.show import summaries
    from heddle.figures import draw
    from heddle.run_files import MANIFEST
    from heddle.runs import labels, load_run

    # `heddle report runs/*` names the folder of its own figures, too, when it is given again.
    drawn = [r for r in runs if r.name == FIGURES and not (r / MANIFEST).exists()]
    runs = tuple(dict.fromkeys(r for r in runs if r not in drawn)) or runs
    loaded = [load_run(run) for run in runs]
    beside = runs[0] if len(runs) == 1 else runs[0].parent
    files = draw(loaded, out if out is not None else beside / FIGURES)
    if as_json:
        listed = [{"run": str(run.path), "summary": dict(run.summary)} for run in loaded]
        found = {"schema": "heddle.report/1", "runs": listed, "figures": [str(f) for f in files]}
        click.echo(json.dumps(found))
        return
    summaries(labels(loaded), [run.summary for run in loaded])
    for file in files:
        click.echo(str(file))
