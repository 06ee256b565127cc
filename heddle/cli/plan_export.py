"""`heddle plan --export`: files that start what was planned."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from heddle.cli.options import Verb

if TYPE_CHECKING:
    from heddle.planning.plan import Planned


def exported(verb: Verb) -> Verb:
    """Add `--export` and `--force`; a verb takes them by `exporter`."""
    verb = click.option("--force", is_flag=True, help="Replace files of --export that exist")(verb)
    return click.option(
        "--export",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="FILE",
        help="Write the plan as a file that starts it: *.yaml for verl, *.sh for vLLM, *.toml for "
        "the gateway; may be repeated",
    )(verb)


def exporter(options: dict[str, Any]) -> "Callable[[Planned], None]":
    """Take the two options out of `options`, check them, and return what writes the files.

    Raises:
        ConfigError: a file's kind is not known, it is named twice, or --force has no effect.
        OutputError: a file cannot be written.
    """
    from heddle.cli.outputs import new_file, write
    from heddle.config_files import ConfigError
    from heddle.planning.exports import export, exported_files

    paths, force = options.pop("export"), options.pop("force")
    if force and not paths:
        raise ConfigError("--force has no effect here: name a file with --export")
    files = [file for path in paths for file in exported_files(path)]
    for file in files:
        new_file(file, force)
        if sum(file.absolute() == other.absolute() for other in files) > 1:
            raise ConfigError(f"--export {file}: is written twice; name different files")

    def write_all(plan: "Planned") -> None:
        contents = [export(plan, path) for path in paths]
        for each in contents:
            for file, text in each.items():
                write(file, text.encode())
                click.echo(f"{file}: written", err=True)

    return write_all
