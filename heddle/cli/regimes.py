"""`heddle regimes`: the regimes of `heddle loop`, with their parameters."""

import json
from typing import Any

import rich_click as click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object")
def regimes(as_json: bool) -> None:
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
        for parameter, value in about["parameters"].items():
            shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
            click.echo(f"{'':<{width}}    :{parameter}={shown}")
