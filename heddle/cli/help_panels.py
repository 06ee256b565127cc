"""Which options and commands stand together in help texts."""

from collections.abc import Mapping, Sequence
from typing import Final

import rich_click as click

COMMANDS: Final[Mapping[str, Sequence[str]]] = {
    "Simulate": ("demo", "compare", "plan", "loop"),
    "Run on engines": ("run", "serve"),
    "Look at runs": ("diagnose", "verify", "report", "replay", "runs"),
    "Configuration": ("config", "policies", "regimes", "prices"),
    "Inputs": ("trace", "profile", "predict"),
}
"""Panels of `heddle --help`; every command is in one."""

OPTIONS: Final[Mapping[str, Sequence[str]]] = {
    "Policies": ("--policy", "--policies", "--history"),
    "Cluster": (
        "--model",
        "--gpu",
        "--gpus",
        "--tp",
        "--max-running",
        "--speculation",
        "--sweep",
        "--over-capacity",
    ),
    "Configuration": ("--config", "--set", "--missing-tool-s"),
    "Runs": ("--seed", "--seeds", "--jobs"),
    "Output": ("--out", "--json", "--wide"),
}
"""Panels of the help of a command that takes a cluster; other options come last."""


def with_panels(command: click.Command) -> click.Command:
    """Put the options of a command with options of a cluster into panels."""
    flags = {flag for parameter in command.params for flag in parameter.opts}
    if (
        isinstance(command, click.RichCommand)
        and not isinstance(command, click.RichGroup)
        and "--missing-tool-s" in flags
        and not command.panels
    ):
        for name, listed in OPTIONS.items():
            here = [flag for flag in listed if flag in flags]
            if here:
                command.add_panel(click.RichOptionPanel(name, options=here))
    return command
