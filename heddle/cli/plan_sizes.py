"""`heddle plan` over several clusters: its limits, and the call."""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import rich_click as click

from heddle.cli.options import check_file_is_of
from heddle.config_error import ConfigError

if TYPE_CHECKING:
    from heddle.cli.progress import ProgressBar
    from heddle.command_config import Config
    from heddle.planning.limits import RolloutLimits

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


def show_clusters(
    config: "Config",
    swept: Mapping[str, Any],
    limits: "RolloutLimits",
    jobs: int | None,
    *,
    as_json: bool,
) -> None:
    """Compare clusters, of all GPU types and numbers of GPUs that are swept, and print them.

    Raises:
        ConfigError: no cluster keeps the limits; the table is printed before.
    """
    from heddle.cli.outputs import checked_figure
    from heddle.cli.progress import progress
    from heddle.cli.show_plan import show_sizes
    from heddle.cli.tables import answer
    from heddle.planning.sizing import size_clusters

    figure = checked_figure(config.report.figure)
    for gpu in swept.get("cluster.gpu", ()):
        check_file_is_of(config.cluster.model, gpu)
    classes = tuple(dict.fromkeys(swept.get("cluster.gpu", (config.cluster.gpu,))))
    gpus = tuple(dict.fromkeys(swept.get("cluster.gpus", (config.cluster.gpus,))))
    with progress("estimating", "trajectories") as bar:
        sizes = size_clusters(
            config,
            gpus=gpus,
            classes=classes,
            limits=limits,
            objective=config.plan.objective,
            simulated=not config.plan.estimate_only,
            jobs=jobs,
            on_progress=_counted(bar, len(classes) * len(gpus)) if bar.seen else None,
        )
    answer(sizes, show_sizes, as_json=as_json)
    if figure is not None:
        from heddle.reports.result_figures import draw_sizes

        draw_sizes(sizes, figure)
    unreachable = sizes.unreachable()
    if unreachable is not None:
        raise ConfigError(unreachable)


def _counted(bar: "ProgressBar", total: int) -> Callable[[str, int, int], None]:
    begun: dict[str, None] = {}

    def show(name: str, done: int, every: int) -> None:
        begun[name] = None
        bar.now(f"{name} ({len(begun)} of {total} clusters)")
        bar.at(done, every)

    return show
