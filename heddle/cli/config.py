"""`heddle config`: the keys of heddle.toml."""

import json
from pathlib import Path
from typing import Any

import rich_click as click

from heddle.cli.options import CONFIG_FILE, config_files, settings_option, take_settings


@click.group()
def config() -> None:
    """Write a heddle.toml, show the keys in force, or explain one."""


@config.command()
@click.argument("path", metavar="[FILE]", type=click.Path(path_type=Path), default=CONFIG_FILE)
def init(path: Path) -> None:
    """Write FILE [heddle.toml] with every key and its default, commented out."""
    from heddle.cli.outputs import new_file, write
    from heddle.config_reference import template

    new_file(path)
    write(path, template().encode())
    click.echo(f"keys in {path}: heddle config explain KEY says what one means")


@config.command()
@config_files
@settings_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines")
def show(configs: tuple[Path, ...], settings: tuple[str, ...], as_json: bool) -> None:
    """Show every key in force, as files and --set say."""
    import msgspec

    values: dict[str, Any] = msgspec.to_builtins(take_settings(settings, configs))
    if values["trace"] == "(none)":
        del values["trace"]
    if as_json:
        click.echo(json.dumps(values, allow_nan=False))
        return
    for key, value in _leaves(values, ""):
        click.echo(f"{key} = {json.dumps(value)}")


def _leaves(values: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found


@config.command()
@click.argument("key")
def explain(key: str) -> None:
    """Say what KEY means, its type and its default; of a section, of each key in it."""
    from difflib import get_close_matches

    from heddle.config_error import ConfigError
    from heddle.config_reference import reference

    known = reference()
    found = [each for each in known if each.name == key or each.name.startswith(f"{key}.")]
    if not found:
        near = get_close_matches(key, [each.name for each in known], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " `heddle config show` lists all."
        raise ConfigError(f"{key} is no key.{hint}")
    for each in found:
        click.echo(f"{click.style(each.name, bold=True)} ({each.kind}) [{each.default}]")
        click.echo(f"  {each.text}")
