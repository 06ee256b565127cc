"""Calibration as text: the errors of a fit, and measured figures beside simulated ones."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import rich_click as click

from heddle.cli.show import new_table, show
from heddle.runs.conditions import BUSY
from heddle_sim.profile_files import Profile

if TYPE_CHECKING:
    from heddle_calibrate.check import Checked, Ranking

PARTS = {
    "decode_fitted": "decode, fitted",
    "decode_unseen": "decode, held out",
    "prefill_fitted": "prompts, fitted",
    "prefill_unseen": "prompts alone, held out",
    "prefill": "prompts alone",
    "mixed_unseen": "prompts beside decoding, held out",
    "mixed": "prompts beside decoding",
    "belief_unseen": "cost estimate, on the fitted",
    "repeats": "repeats, against their median",
}
"""Errors of a table in the order of interest."""


def fitted(profile: Profile) -> None:
    """Errors of each layout, then of the loops, then what was measured beside."""
    click.echo(profile.summary)
    table = new_table("errors in percent", "TP", "median", "worst", "points")
    for layout, entry in profile.tables.items():
        errors = entry.errors
        for name, said in PARTS.items():
            if errors.get(name, {}).get("points"):
                e = errors[name]
                table.add_row(
                    said, layout, f"{e['median_pct']:g}", f"{e['worst_pct']:g}", str(e["points"])
                )
    show(table)
    loops = profile.errors.get("measured", {}).get("loops", [])
    if loops:
        table = new_table("loops, held out", "TP", "makespan", "TPOT", "TTFT")
        for loop in loops:
            table.add_row(
                f"{loop['clients']} clients",
                str(loop["tp"]),
                *(f"{loop[f'{name}_pct']:+.1f}" for name in ("makespan", "tpot", "ttft")),
            )
        show(table)
    for line in _beside(profile):
        click.echo(line)


def _beside(profile: Profile) -> list[str]:
    costs = profile.costs
    if costs is None:
        return []
    lines = [
        f"driver's path {costs.dispatch_s * 1e3:.1f} ms a dispatch; transfer "
        f"{profile.transfer.fixed_s:.3f} s + bytes / {profile.transfer.bytes_per_s:.3g} per s"
    ]
    lines += [
        f"TP {tp}: starts in {life.start_s:.1f} s, stops in {life.stop_s:.1f} s"
        for tp, life in costs.engines.items()
    ]
    if costs.beside is not None:
        lines.append(
            f"beside another engine at work an iteration takes {costs.beside:.2f} times as long"
        )
    drift = profile.errors.get("drift_pct")
    if drift is not None:
        lines.append(f"drift over the sweep {drift:+.1f} %")
    return lines


def checks(checked: "Sequence[Checked]", ranked: "Sequence[Ranking]") -> None:
    """One row for each figure of each run, then the order of policies."""
    table = new_table("run", "figure", "measured", "simulated", "error")
    for each in checked:
        name = f"{each.policy} s{each.seed} {each.trace}"
        for figure, f in each.figures.items():
            unit = " pt" if figure == "prefix_hit" else " %"
            error = "-" if f.error_pct is None else f"{f.error_pct:+.1f}{unit}"
            table.add_row(name, figure, _number(f.measured), _number(f.simulated), error)
            name = ""
        order = "-" if each.finish_order is None else f"{each.finish_order:.3f}"
        table.add_row("", "finish_order", "", order, "")
        if each.other_cpu_share is not None:
            table.add_row("", "others' CPU", f"{each.other_cpu_share:.0%}", "", "")
    show(table)
    busy = sum((each.other_cpu_share or 0.0) > BUSY for each in checked)
    if busy:
        click.echo(
            f"The machine was busy with other processes in {busy} of {len(checked)} runs: their "
            "errors are not those of the profile alone"
        )
    for ranking in ranked:
        spread = ranking.spread_pct
        repeats = "no repeats" if spread is None else f"repeats within {spread:.1f} %"
        click.echo(
            f"{ranking.trace}: measured {' < '.join(ranking.measured)}; simulated "
            f"{' < '.join(ranking.simulated)}; {ranking.alike} of {ranking.pairs} pairs alike "
            f"({repeats})"
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
