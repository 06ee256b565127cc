"""Draws the phases of a trajectory from `TRANSITIONS`: `python docs/images/phases.py`."""

from collections.abc import Mapping
from html import escape
from math import hypot
from pathlib import Path

from heddle_core.trajectory import TRANSITIONS, Phase

PICTURE = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT, LEGEND = 960, 780, 560
BOX = (112, 38)
PLACE: Mapping[Phase, tuple[int, int]] = {
    "held": (110, 230),
    "cancelling": (110, 400),
    "queued": (360, 230),
    "pulling": (420, 90),
    "running": (610, 140),
    "preempting": (610, 320),
    "tool": (850, 230),
    "predicting": (890, 430),
    "migrating": (400, 420),
    "finished": (850, 60),
}
BEND: Mapping[tuple[Phase, Phase], float] = {
    ("held", "queued"): 20.0,
    ("queued", "held"): 20.0,
    ("queued", "running"): -12.0,
    ("running", "queued"): 34.0,
    ("preempting", "queued"): -12.0,
    ("running", "held"): 62.0,
    ("preempting", "held"): -30.0,
    ("tool", "queued"): 16.0,
    ("pulling", "migrating"): 150.0,
    ("tool", "migrating"): -105.0,
    ("tool", "held"): 190.0,
    ("migrating", "held"): 20.0,
    ("predicting", "queued"): -42.0,
    ("predicting", "migrating"): 8.0,
    ("predicting", "held"): -160.0,
}
"""How far an arrow's middle is from the straight line, to the right of its direction, in pixels."""


def arrow(number: int, start: Phase, end: Phase) -> str:
    """One numbered arrow."""
    (x0, y0), (x1, y1) = PLACE[start], PLACE[end]
    length = hypot(x1 - x0, y1 - y0)
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    bend = BEND.get((start, end), 0.0)
    cx, cy = (x0 + x1) / 2 - uy * 2 * bend, (y0 + y1) / 2 + ux * 2 * bend
    sx, sy = _border(x0, y0, cx, cy)
    ex, ey = _border(x1, y1, cx, cy)
    mx, my = (sx + 2 * cx + ex) / 4, (sy + 2 * cy + ey) / 4
    return (
        f'<path d="M{sx:.0f} {sy:.0f} Q{cx:.0f} {cy:.0f} {ex:.0f} {ey:.0f}" class="arrow"/>'
        f'<circle cx="{mx:.0f}" cy="{my:.0f}" r="11"/>'
        f'<text x="{mx:.0f}" y="{my + 4:.0f}" class="number">{number}</text>'
    )


def _border(x: float, y: float, towards_x: float, towards_y: float) -> tuple[float, float]:
    """Where the line from a box's centre to a point leaves the box."""
    dx, dy = towards_x - x, towards_y - y
    share = min(
        (BOX[0] / 2 + 3) / abs(dx) if dx else float("inf"),
        (BOX[1] / 2 + 3) / abs(dy) if dy else float("inf"),
    )
    return x + dx * share, y + dy * share


def picture() -> str:
    """The whole drawing as SVG; the end of a trajectory is said in words."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="14">',
        "<title>The phases of a trajectory</title>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="#456"/></marker></defs>',
        "<style>.arrow{fill:none;stroke:#456;stroke-width:1.4;marker-end:url(#head)}"
        "rect{fill:#eef3fb;stroke:#456}circle{fill:#fff;stroke:#456}"
        "text{fill:#123;text-anchor:middle}.number{font-size:12px}.legend{text-anchor:start;font-size:12px}"
        "</style>",
        f'<rect x="0" y="0" width="{WIDTH}" height="{HEIGHT}" style="fill:#fff;stroke:none"/>',
    ]
    legend: list[str] = []
    ends: list[Phase] = []
    for start, following in TRANSITIONS.items():
        for end, cause in following.items():
            if end == "finished":
                ends.append(start)
                continue
            legend.append(f"{len(legend) + 1}  {start} to {end}: {cause}")
            lines.append(arrow(len(legend), start, end))
    for phase, (x, y) in PLACE.items():
        lines.append(
            f'<rect x="{x - BOX[0] // 2}" y="{y - BOX[1] // 2}" width="{BOX[0]}" '
            f'height="{BOX[1]}" rx="7"/><text x="{x}" y="{y + 5}">{phase}</text>'
        )
    rows = (len(legend) + 1) // 2
    lines.append(
        f'<text x="30" y="{LEGEND + 10 + 20 * rows}" class="legend">'
        f"TrajectoryFinished ends: {', '.join(ends)}</text>"
    )
    for i, text in enumerate(legend):
        x, y = 30 + WIDTH // 2 * (i // rows), LEGEND + 20 * (i % rows)
        lines.append(f'<text x="{x}" y="{y}" class="legend">{escape(text)}</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
