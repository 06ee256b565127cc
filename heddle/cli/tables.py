"""Tables, and what stands in and above them, as text on standard output."""

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import rich_click as click
from rich.console import Console, ConsoleDimensions
from rich.table import Table

from heddle.comparison.estimates import Estimate
from heddle.cost.objective import Objective
from heddle.cost.prices import RunCost

WIDEST = 100_000
HEAD_WIDTH, LABEL_WIDTH = 80, 9
"""Columns of the lines above a table, and of their labels."""
VERDICT_WIDTH = 100
"""Columns of a verdict's table, and of what is said below it."""
PIPED_WIDTH = 160
"""Columns if there is no terminal, so that a table in a file is not folded."""


class _Answer(Protocol):
    """What a command found."""

    def plain(self) -> dict[str, Any]: ...


A = TypeVar("A", bound=_Answer)


def answer(found: A, show: Callable[[A], None], *, as_json: bool) -> None:
    """Print what a command found: as JSON, or as `show` does."""
    if as_json:
        click.echo(json.dumps(found.plain(), allow_nan=False))
    else:
        show(found)


def warn(warnings: Iterable[str]) -> None:
    """Print warnings on standard error, a line each."""
    for text in warnings:
        click.echo(f"Warning: {text}", err=True)


def show_rows(rows: Sequence[Mapping[str, str]], within: int = WIDEST) -> None:
    """Print a table of rows that are cells by column; a column is there if a row has it.

    A table that is wider than `within` has narrower gaps, then heads of several lines, then its
    longest cells on several lines, word by word, but for those of the first column.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    # Names of logs may hold what moves a terminal's cursor.
    cells = [
        ["".join(c if c.isprintable() else "?" for c in row.get(column, "-")) for column in columns]
        for row in rows
    ]
    table = _filled(columns, cells)
    if _width(table) > within:
        table = _filled(columns, cells, gap=1)
    if _width(table) > within:
        columns = [column.replace(" ", "\n") for column in columns]
        table = _filled(columns, cells, gap=1)
    if (over := _width(table) - within) > 0:
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        at = widths.index(max(widths[1:]), 1)
        for row in cells:
            width = max(widths[at] - over, 1)
            row[at] = textwrap.fill(row[at], width, break_long_words=False, break_on_hyphens=False)
        table = _filled(columns, cells, gap=1)
    show(table)


def _filled(columns: Sequence[str], rows: Iterable[Sequence[str]], gap: int = 2) -> Table:
    table = new_table(*columns)
    table.padding = (0, gap, 0, 0)
    for row in rows:
        table.add_row(*row)
    return table


def explain(text: str) -> None:
    """Print a line below a verdict's table, or several."""
    click.echo(textwrap.fill(text, VERDICT_WIDTH, break_on_hyphens=False))


def show_tried(
    objective: Objective,
    tried: Iterable[tuple[Mapping[str, str], str, bool, float]],
    columns: Sequence[str],
) -> None:
    """Print values at settings: the row's first cells, the column, whether it is best, a value."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for head, column, best, value in tried:
        row = rows.setdefault(tuple(head.values()), {**head, **dict.fromkeys(columns, "-")})
        row[column] = ("*" if best else "") + objective_cell(objective, value)
    show_rows([*rows.values()])


def show(table: Table) -> None:
    """Print a table: columns for rows where a terminal is too narrow, and never with cut values."""
    console = Console(highlight=False, markup=False)
    width = console.width if console.is_terminal else PIPED_WIDTH
    tables = [table]
    if console.is_terminal and _width(table) > width:
        tables = _turned(table, width)
    # Width and height: a console of one alone is 80 columns wide where TERM is dumb.
    console.size = ConsoleDimensions(max(width, *map(_width, tables)), console.height)
    for each in tables:
        console.print(each)


def _width(table: Table) -> int:
    """Columns that a table takes when nothing is cut."""
    return Console(width=WIDEST, height=1, markup=False).measure(table).maximum  # see `show`


def _turned(table: Table, width: int) -> list[Table]:
    """The same cells with rows for columns, in as many tables as `width` makes necessary."""
    first, *others = ([column.header, *column.cells] for column in table.columns)

    def part(begin: int, end: int) -> Table:
        turned = new_table(*map(str, (first[0], *first[begin:end])))
        for row in others:
            turned.add_row(*map(str, (row[0], *row[begin:end])))
        return turned

    made, begin = [], 1
    for end in range(2, len(first) + 1):
        if end == len(first) or _width(part(begin, end + 1)) > width:
            made.append(part(begin, end))
            begin = end
    return made


def new_table(first: str, *columns: str) -> Table:
    """A table of text in the first column and numbers in the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def lines(title: str, names: Mapping[str, str]) -> None:
    """A title and one line for each name."""
    click.echo(click.style(title, bold=True))
    width = max(map(len, names), default=0)
    for name, text in names.items():
        click.echo(f"  {name:<{width}}  {text}".rstrip())


def fact(label: str, text: str) -> None:
    """One line of the head, or several of `HEAD_WIDTH` columns, below a label at the left."""
    indent = " " * LABEL_WIDTH
    words = textwrap.fill(
        text,
        HEAD_WIDTH,
        initial_indent=f"{label:<{LABEL_WIDTH}}",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.echo(words)


def show_verdict(text: str) -> None:
    """Print a sentence, such as what to run, in lines that a terminal has room for."""
    console = Console(highlight=False, markup=False)
    width = console.width if console.is_terminal else WIDEST
    click.echo(textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False))


def show_ranking(objective: Objective, names: Sequence[str], of: str = "") -> None:
    """Print the order of two names or more."""
    if len(names) > 1:
        show_verdict(f"ranking by {objective}{of}: {', '.join(names)}")


def estimate_cell(e: Estimate, give_or_take: str = "±") -> str:
    """A mean, with its interval where there are several seeds."""
    return f"{e.mean:,.1f}" if e.ci95 is None else f"{e.mean:,.1f} {give_or_take} {e.ci95:,.1f}"


def short_estimate(e: Estimate) -> str:
    """The same in fewer digits, where there are enough before the point."""
    if e.mean < 100.0:
        return estimate_cell(e)
    return f"{e.mean:,.0f}" if e.ci95 is None else f"{e.mean:,.0f} ± {e.ci95:,.0f}"


def costs(cost: RunCost, per: str = "") -> dict[str, str]:
    """Cells of GPU-hours and dollars by column."""
    return {f"GPU-hours{per}": number_cell(cost.gpu_hours), f"${per}": number_cell(cost.dollars)}


def objective_cell(objective: Objective, value: float) -> str:
    """Seconds or dollars by which a row is better or worse than others."""
    return f"{value:,.1f}" if objective == "makespan" else number_cell(value)


def percent(share: float, form: str = ".1%") -> str:
    """A share in percent, with a space before the sign."""
    return f"{share:{form}}".replace("%", " %")


def number_cell(value: Any) -> str:
    """A figure for people; of None a dash."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
        case int():
            return f"{value:,}"
        case _:
            return str(value)
