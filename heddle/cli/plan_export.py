"""`heddle plan --export`: files that start what was planned."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from heddle.config_error import ConfigError

if TYPE_CHECKING:
    from heddle.planning.deployment import Deployment


def check_exports(paths: Sequence[Path]) -> None:
    """Check the files of an export before the work.

    Raises:
        ConfigError: a file's kind is not known, or it is named twice.
        OutputError: a file cannot be written.
    """
    from heddle.cli.outputs import new_file
    from heddle.planning.exports import exported_files

    files = [file for path in paths for file in exported_files(path)]
    for file in files:
        new_file(file)
        if sum(file.absolute() == other.absolute() for other in files) > 1:
            raise ConfigError(f"--export {file}: is written twice; name different files")


def write_exports(plan: "Deployment", paths: Sequence[Path]) -> None:
    """Write the plan to all files, or to none that it cannot be said in.

    Raises:
        ConfigError: the plan's engines cannot run there.
    """
    from heddle.cli.outputs import write
    from heddle.planning.exports import export

    for contents in [export(plan, path) for path in paths]:
        for file, text in contents.items():
            write(file, text.encode())
            click.echo(f"{file}: written", err=True)
