"""Bars in a terminal: the makespan of each policy, and the bound in it."""

from collections.abc import Sequence

from rich.console import Console, ConsoleDimensions
from rich.text import Text

from heddle.comparison import PolicyResult

PIPED_BARS = 60
"""Columns of the longest bar if there is no terminal."""
LEAST_BARS = 10
FULL, REST = "█▒"
"""Characters that differ without colour too."""
PLAIN_FULL, PLAIN_REST = "#-"


def makespans(policies: Sequence[PolicyResult], bound_s: float) -> None:
    """Draw one bar for each policy: its makespan, and in it the bound.

    A terminal gets blocks and colour (no colour with NO_COLOR); a file, a pipe
    and a terminal with ASCII only get ASCII of a fixed width.
    """
    console = Console(highlight=False)
    blocks = console.is_terminal and not console.options.ascii_only
    full, rest = (FULL, REST) if blocks else (PLAIN_FULL, PLAIN_REST)
    names = [p.policy for p in policies]
    values = [_value(p, "±" if blocks else "+/-") for p in policies]
    beside = max(map(len, names)) + max(map(len, values)) + 4
    width = max(console.width - beside, LEAST_BARS) if console.is_terminal else PIPED_BARS
    width = min(width, PIPED_BARS)
    longest = max(p.makespan_s.mean for p in policies) or 1.0
    best = min(p.makespan_s.mean for p in policies)
    console.size = ConsoleDimensions(max(console.width, beside + width), console.height)
    console.print(Text(f"\nmakespan in seconds; {full * 3} is the bound, which no policy can beat"))
    for p, name, value in zip(policies, names, values, strict=True):
        columns = max(round(width * p.makespan_s.mean / longest), 1)
        held = min(round(width * bound_s / longest), columns)
        colour = "green" if p.makespan_s.mean == best else "cyan"
        line = Text(f"{name:<{max(map(len, names))}}  ")
        line.append(full * held, colour)
        line.append(rest * (columns - held), colour)
        line.append(f"  {value}")
        console.print(line, no_wrap=True)


def _value(p: PolicyResult, give_or_take: str) -> str:
    e = p.makespan_s
    return f"{e.mean:,.1f}" if e.ci95 is None else f"{e.mean:,.1f} {give_or_take} {e.ci95:,.1f}"
