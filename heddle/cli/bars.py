"""Bars in a terminal: a time of each policy or regime, and the bound in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from heddle.cli.tables import estimate_cell
from heddle.comparison.estimates import Estimate

PIPED_BARS = 60
"""Columns of the longest bar if there is no terminal."""
LEAST_BARS = 10
FULL, REST = "█▒"
"""Characters that differ without colour too."""
PLAIN_FULL, PLAIN_REST = "#-"


@dataclass(frozen=True, slots=True)
class Bar:
    """A time in seconds, and the part of it that is its bound."""

    name: str
    time_s: Estimate
    bound_s: float


def draw_bars(title: str, bars: Sequence[Bar]) -> None:
    """Draw a bar for each time under a title, in which `###` stands for the bound's characters.

    A terminal gets blocks and colour (no colour with NO_COLOR); a file, a pipe
    and a terminal with ASCII only get ASCII of a fixed width.
    """
    console = Console(highlight=False)
    blocks = console.is_terminal and not console.options.ascii_only
    full, rest = (FULL, REST) if blocks else (PLAIN_FULL, PLAIN_REST)
    values = [estimate_cell(bar.time_s, "±" if blocks else "+/-") for bar in bars]
    names = max(len(bar.name) for bar in bars)
    beside = names + max(map(len, values)) + 4
    width = max(console.width - beside, LEAST_BARS) if console.is_terminal else PIPED_BARS
    width = min(width, PIPED_BARS)
    longest = max(bar.time_s.mean for bar in bars) or 1.0
    best = min(bar.time_s.mean for bar in bars)
    console.size = ConsoleDimensions(max(console.width, beside + width), console.height)
    console.print(Text("\n" + title.replace("###", full * 3)))
    for bar, value in zip(bars, values, strict=True):
        columns = max(round(width * bar.time_s.mean / longest), 1)
        held = min(round(width * bar.bound_s / longest), columns)
        colour = "green" if bar.time_s.mean == best else "cyan"
        line = Text(f"{bar.name:<{names}}  ")
        line.append(full * held, colour)
        line.append(rest * (columns - held), colour)
        line.append(f"  {value}")
        console.print(line, no_wrap=True)
