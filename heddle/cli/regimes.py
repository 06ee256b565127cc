"""`heddle regimes`: the regimes of `heddle loop`, with their parameters."""

import json
from collections.abc import Mapping
from typing import Any

import rich_click as click

from heddle.cli.options import take_settings

JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines")


@click.group()
def regimes() -> None:
    """List training regimes, or check one of yours."""


@regimes.command("list")
@JSON
def list_(as_json: bool) -> None:
    """List the training regimes, with their parameters and defaults."""
    from heddle_core.loop.presets import REGIMES

    found: dict[str, dict[str, Any]] = {
        name: {
            "what": preset.about,
            "colocated": preset.can_share_gpus,
            "parameters": preset.parameters,
        }
        for name, preset in REGIMES.items()
    }
    if as_json:
        click.echo(json.dumps(found))
        return
    width = max(map(len, found))
    for name, about in found.items():
        click.echo(f"{click.style(f'{name:<{width}}', bold=True)}  {about['what']}")
        _show(about["parameters"], " " * (width + 2))


@regimes.command()
@click.argument("name", metavar="REGIME")
def check(name: str) -> None:
    """Check a REGIME: REGIME[:PARAMETER=VALUE...], or one of [regimes.NAME] in heddle.toml.

    Its parameters are printed, with the batches that [loop] describes.
    """
    from heddle.cli.loop import regime_names
    from heddle.loops.config import loop_of
    from heddle_core.loop.presets import regime_named
    from heddle_core.loop.regime import BatchShape

    config = take_settings(())
    cluster, loop = config.cluster, loop_of(config, [name])
    shape = BatchShape(
        groups=loop.groups,
        samples=loop.samples,
        slots=cluster.engine_count * cluster.max_running,
        colocated=loop.colocated,
    )
    for text in regime_names(name, config.regimes):
        made = regime_named(text, shape)
        click.echo(f"{click.style(text, bold=True)}: valid")
        click.echo(
            f"  starts {made.started_samples:,} samples of each prompt, and trains {loop.samples:,}"
        )
        click.echo(f"  {made.warm_up_batches:,} batches until it is under way")


def _show(parameters: Mapping[str, Any], indent: str) -> None:
    for parameter, value in parameters.items():
        shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
        click.echo(f"{indent}  :{parameter}={shown}")
