"""`heddle plan` over several clusters: options, checks, and the call."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from heddle.cli.options import Verb, check_file_is_of

if TYPE_CHECKING:
    from heddle.config import RunConfig
    from heddle.cost.objective import Objective

_MOST = 1e12
"""Seconds of a deadline, and dollars of a budget, that are beyond every rollout."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smh])+")
_DOLLARS = re.compile(r"\$?(\d+(?:\.\d+)?)\s*(?:usd|dollars?)?", flags=re.IGNORECASE)


class Duration(click.ParamType[float]):
    """Seconds, from a time with its units."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds."""
        text = str(value).strip().lower()
        parts = re.findall(r"([\d.]+)([smh])", text) if _DURATION.fullmatch(text) else []
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        if not 0.0 < seconds < _MOST:
            self.fail(f"{value!r}: write a time with its unit, as 90s, 20m or 1h30m.", param, ctx)
        return seconds


class Dollars(click.ParamType[float]):
    """An amount of US dollars."""

    name = "dollars"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the amount."""
        found = _DOLLARS.fullmatch(str(value).strip())
        if found is None or not 0.0 < float(found[1]) < _MOST:
            self.fail(
                f"{value!r}: write an amount above 0 in US dollars, as 50 or 12.5. Prices are in "
                "dollars, and no other currency is converted.",
                param,
                ctx,
            )
        return float(found[1])


def sized(verb: Verb) -> Verb:
    """Add the options; a verb takes them by `size_question`."""
    every = (
        click.option(
            "--deadline",
            type=Duration(),
            default=None,
            help="Latest end of the rollout, as 90s, 20m or 1h30m: compares clusters, and takes "
            "the cheapest that ends in time",
        ),
        click.option(
            "--budget",
            type=Dollars(),
            default=None,
            help="Most dollars of the rollout: compares clusters, and takes the fastest for them",
        ),
        click.option(
            "--figure",
            type=click.Path(path_type=Path),
            default=None,
            help="Draw makespan against dollars of the clusters, too: *.png, *.svg or *.pdf",
        ),
        click.option("--estimate-only", is_flag=True, help="Simulate nothing: estimates alone"),
        click.option("--jobs", type=int, default=None, help="Worker processes [as many as pay]"),
    )
    for option in reversed(every):
        verb = option(verb)
    return verb


SEVERAL_CLUSTERS = ("deadline", "budget", "figure", "jobs")
"""Options that have no effect on a plan for one cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeQuestion:
    """What the options name."""

    gpus: tuple[int, ...]
    """Those that are swept."""
    classes: tuple[str, ...]
    """GPU types that are swept."""
    deadline_s: float | None
    dollars: float | None
    figure: Path | None
    simulated: bool
    jobs: int | None

    @property
    def several(self) -> bool:
        """Whether several clusters are named."""
        return bool(self.gpus or self.classes)

    @property
    def limited(self) -> bool:
        """Whether there is a deadline or a budget."""
        return self.deadline_s is not None or self.dollars is not None


def size_question(options: dict[str, Any], swept: Mapping[str, Any]) -> SizeQuestion:
    """Take the options of `sized` out of `options`, with the GPUs that are swept."""
    return SizeQuestion(
        gpus=tuple(dict.fromkeys(swept.get("cluster.gpus", ()))),
        classes=tuple(dict.fromkeys(swept.get("cluster.gpu", ()))),
        deadline_s=options.pop("deadline"),
        dollars=options.pop("budget"),
        figure=options.pop("figure"),
        simulated=not options.pop("estimate_only"),
        jobs=options.pop("jobs"),
    )


def show_clusters(
    config: "RunConfig", question: SizeQuestion, objective: "Objective | None", *, as_json: bool
) -> None:
    """Compare clusters and print them; `objective` None: as the limits say.

    Raises:
        ConfigError: no cluster keeps the limits; the table is printed before.
    """
    from heddle.cli.outputs import new_file
    from heddle.cli.progress import progress
    from heddle.cli.show_sizes import show_sizes
    from heddle.config_files import ConfigError
    from heddle.planning.cluster_sizes import RolloutLimits
    from heddle.planning.sizing import size_clusters
    from heddle.reports.result_figures import draw_sizes
    from heddle.reports.trace_figures import figure_path

    if question.figure is not None:
        new_file(figure_path(question.figure), force=True)
    for gpu in question.classes:
        check_file_is_of(config.cluster.model, gpu)
    classes = question.classes or (config.cluster.gpu,)
    gpus = question.gpus or (config.cluster.gpus,)
    with progress("estimating", "trajectories") as bar:
        sizes = size_clusters(
            config,
            gpus=gpus,
            classes=classes,
            limits=RolloutLimits(deadline_s=question.deadline_s, dollars=question.dollars),
            objective=objective,
            simulated=question.simulated,
            jobs=question.jobs,
            on_progress=_counted(bar.now, bar.at, len(classes) * len(gpus)) if bar.seen else None,
        )
    if as_json:
        click.echo(json.dumps(sizes.plain(), allow_nan=False))
    else:
        show_sizes(sizes)
    if question.figure is not None:
        draw_sizes(sizes, question.figure)
    unreachable = sizes.unreachable()
    if unreachable is not None:
        raise ConfigError(unreachable)


def _counted(
    now: Callable[[str], None], at: Callable[[int, int], None], total: int
) -> Callable[[str, int, int], None]:
    begun: list[str] = []

    def show(name: str, done: int, every: int) -> None:
        if name not in begun:
            begun.append(name)
        now(f"{name} ({len(begun)} of {total} clusters)")
        at(done, every)

    return show
