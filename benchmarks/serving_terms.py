"""How far other terms of the fit to published serving runs would get: `tools.profiles serving`.

    python -m benchmarks.serving_terms --perf ../shared/perf --sets 300 --seed 1

Each set draws the prior spread of every level of every constant: as it is, times 0.3 to 3, or no
such level. Printed are errors of vLLM layouts left out of the fit: as shipped, the least of all
sets for each figure, and of sets chosen on one half of the layouts on the other half, ten halvings.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import click
import numpy as np

from heddle.cli.errors import exit_with_user_errors
from heddle_calibrate.serving.errors import ServingReport, shipped_profiles
from heddle_calibrate.serving.rows import read_serving_rows
from heddle_calibrate.serving.samples import ServingSample, samples
from tools.profiles.scorecard import SERVING
from tools.profiles.serving_fit import LEVELS, Levels, left_out_runs

Errors = Mapping[str, tuple[float, float]]
"""TPOT and TTFT in percent, by layout."""
GOALS = (4.0, 10.0, 10.0)
SHARE_AS_IS, SHARE_WITHOUT = 0.5, 0.15
HALVINGS = 10


def drawn(rng: random.Random, levels: Levels) -> Levels:
    """Draw a set of terms."""
    made: dict[str, dict[str, float]] = {}
    for quantity, spreads in levels.items():
        made[quantity] = {}
        for level, spread in spreads.items():
            kind = rng.random()
            if kind < SHARE_AS_IS:
                made[quantity][level] = spread
            elif kind < 1.0 - SHARE_WITHOUT:
                made[quantity][level] = spread * 10 ** rng.uniform(-0.5, 0.5)
    return made


def layout_errors(found: Sequence[ServingSample], levels: Levels) -> Errors:
    """Return errors of each layout by a fit with these terms that has not seen it."""
    runs = left_out_runs(found, levels=levels)
    parts = ServingReport(runs=runs, left_out=()).groups("vllm")
    return {part.part: (part.tpot, part.ttft) for part in parts}


def figures(errors: Errors, layouts: Sequence[str]) -> tuple[float, float, float]:
    """TPOT in the median and nine of ten, and TTFT in the median, over layouts."""
    tpot, ttft = zip(*(errors[name] for name in layouts), strict=True)
    return median(tpot), float(np.quantile(tpot, 0.9)), median(ttft)


def over_goals(found: tuple[float, float, float]) -> float:
    """Mean over the figures of how many times its goal each is."""
    return fmean(one / goal for one, goal in zip(found, GOALS, strict=True))


@click.command(help=__doc__)
@click.option("--perf", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--sets", default=300, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=1, show_default=True)
def main(perf: Path, sets: int, seed: int) -> None:
    """Print what other sets of terms would reach."""
    rng = random.Random(seed)
    rows, _ = read_serving_rows(perf / name for name in SERVING)
    found = [s for s in samples(rows, shipped_profiles())[0] if s.row.engine == "vllm"]
    tried = [layout_errors(found, LEVELS)]
    tried += [layout_errors(found, drawn(rng, LEVELS)) for _ in range(sets)]
    names = sorted(tried[0])
    of_all = [figures(errors, names) for errors in tried]
    click.echo(f"{len(names)} layouts, {len(found)} runs: TPOT median, nine of ten, TTFT median")
    _say("as shipped", of_all[0])
    for which, title in enumerate(("TPOT median", "TPOT nine of ten", "TTFT median")):
        _say(f"the set of least {title}", min(of_all, key=lambda each: each[which]))
    _say("the set of least mean over goals", min(of_all, key=over_goals))
    chosen, shipped = [], []
    for _ in range(HALVINGS):
        half = set(rng.sample(names, len(names) // 2))
        here, other = sorted(half), sorted(set(names) - half)
        best = min(tried, key=lambda errors: over_goals(figures(errors, here)))
        chosen.append(figures(best, other))
        shipped.append(figures(tried[0], other))
    for title, of in (("chosen on the other half", chosen), ("as shipped, there", shipped)):
        tpot, tenth, ttft = map(fmean, zip(*of, strict=True))
        _say(title, (tpot, tenth, ttft))


def _say(title: str, found: tuple[float, float, float]) -> None:
    click.echo(f"{title}: {', '.join(f'{one:.1f}' for one in found)} %")


if __name__ == "__main__":
    with exit_with_user_errors():
        main()
