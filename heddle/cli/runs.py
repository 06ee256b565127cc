"""`heddle runs`: the runs of a folder, and the page of one."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

if TYPE_CHECKING:
    from heddle.runs.overview import ListedRun


@click.command()
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option(
    "--in",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of runs, the --out of other commands",
)
@click.option("--last", type=click.IntRange(1), default=None, help="Only the newest so many")
@click.option(
    "--page",
    is_flag=True,
    help="Print the page of the newest, written where absent; on a terminal, open it",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
def runs(
    words: tuple[str, ...],
    folder: Path,
    last: int | None,
    page: bool,
    as_json: bool,
) -> None:
    """List comparisons and runs, the oldest first; only those that every WORD fits.

    A WORD is in the name, as coding, or is a policy of theirs, as heddle or verl@tp4, or a status:
    finished, running, interrupted, failed, unfinished, damaged.
    """
    from heddle.runs.files import RunError
    from heddle.runs.overview import listed_runs

    found = [
        run
        for run in listed_runs(folder)
        if all(
            word in run.path.name
            or word == run.status
            or any(_is(word, policy) for policy in run.policies)
            for word in words
        )
    ]
    found = found[-last:] if last else found
    if not found:
        chosen = " that match" if words else ""
        raise RunError(f"{folder}: has no runs{chosen}; `heddle runs --in {folder}` lists all")
    if page:
        _page(found[-1], as_json)
    elif as_json:
        plain = {"schema": "heddle.runs/1", "runs": [run.plain() for run in found]}
        click.echo(json.dumps(plain, allow_nan=False))
    else:
        _table(found)


def _is(policy: str, row: str) -> bool:
    """Whether a row is of a policy, named with or without its setting."""
    return policy in (row, row.partition("@")[0])


def _table(found: "list[ListedRun]") -> None:
    from heddle.cli.tables import new_table, number_cell, show

    table = new_table("name", "status", "trace", "runs", "makespan_s", "policies, best first")
    for run in found:
        table.add_row(
            run.path.name,
            run.status,
            run.trace or "-",
            str(run.runs),
            number_cell(run.makespan_s),
            ", ".join(run.policies) or "-",
        )
    show(table)
    click.echo(f"next: heddle runs {found[-1].path.name} --page, or heddle replay RUN")


def _page(run: "ListedRun", as_json: bool) -> None:
    from heddle.cli.report import write_page
    from heddle.runs.comparison_folder import PAGE, shown_runs
    from heddle.runs.files import RunError

    file = run.page
    if file is None:
        file = run.path / PAGE
        each = shown_runs(run.path) if run.kind == "comparison" else [run.path]
        if not each:
            raise RunError(f"{run.path}: has no runs to draw; compare again, or name another WORD")
        write_page(tuple(each), file, force=False)
    click.echo(json.dumps({"schema": "heddle.runs/1", "page": str(file)}) if as_json else str(file))
    shown = (
        sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    if as_json or not sys.stdout.isatty() or not shown:
        return
    if click.launch(str(file)):
        click.echo("no browser could be started: open the file yourself", err=True)
