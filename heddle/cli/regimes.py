"""`heddle regimes`: the regimes of `heddle loop`, with their parameters."""

import json
from collections.abc import Mapping
from dataclasses import asdict
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

    Its parts are printed, as the batches and GPUs of [loop] and [cluster] make them.
    """
    from heddle.loops.config import loop_of
    from heddle.loops.own_regimes import regime_names
    from heddle.loops.setup import regime_of
    from heddle_core.loop.regime_text import PARTS

    config = take_settings(())
    loop = loop_of(config, [name])
    for text in regime_names(name, config.regimes):
        made = regime_of(loop, text)
        click.echo(f"{click.style(text, bold=True)}: valid")
        for part in PARTS:
            fields = asdict(getattr(made, part))
            _show({f"{part}.{field}": value for field, value in fields.items()}, "  ")
        click.echo(
            f"  starts {made.started_samples:,} samples of each prompt, and trains {loop.samples:,}"
        )
        click.echo(f"  {made.warm_up_batches:,} batches until it is under way")


def _show(parameters: Mapping[str, Any], indent: str) -> None:
    for parameter, value in parameters.items():
        plain = value is None or isinstance(value, bool | str)
        shown = str(value).lower() if plain else f"{value:g}"
        click.echo(f"{indent}  :{parameter}={shown}")
