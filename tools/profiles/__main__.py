"""`python -m tools.profiles NAME ...`: one command for each file that is shipped."""

import click

from tools.profiles import (
    efficiencies,
    from_aiconfigurator,
    from_tables,
    from_training_rows,
    kv_sizes,
    lookup,
    scorecard,
    serving,
    shipped,
)


@click.group()
def profiles() -> None:
    """Make the profiles, efficiencies and training times that Heddle ships."""


for module in (
    from_tables,
    shipped,
    from_aiconfigurator,
    serving,
    efficiencies,
    from_training_rows,
    kv_sizes,
    lookup,
    scorecard,
):
    profiles.add_command(module.command)

if __name__ == "__main__":
    profiles(prog_name="python -m tools.profiles")
