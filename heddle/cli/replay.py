"""`heddle replay`: compare the commands of a fresh controller with the recorded ones."""

import json
from pathlib import Path

import rich_click as click

from heddle.cli.errors import FAILED

ALLOW_POLICY = click.option(
    "--allow-policy",
    "allow_policies",
    metavar="MODULE:FACTORY",
    multiple=True,
    help="Code that the configuration of a run may import and call; repeatable. Without it, a run "
    "that names such code is refused.",
)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@ALLOW_POLICY
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a line")
@click.pass_context
def replay(ctx: click.Context, run: Path, allow_policies: tuple[str, ...], as_json: bool) -> None:
    """Feed the events of a run to a fresh controller, and compare its commands with the record.

    Exit status 1 at the first divergence. A run that did not finish is replayed as far as its
    journal goes. The files of a finished run are compared with the hashes in its manifest.
    """
    from heddle.cli.outputs import any_run
    from heddle.cli.progress import progress
    from heddle.runs.replay import replay as replay_run

    loaded = any_run(run, "replaying its journal as far as it goes")
    with progress(f"replaying {loaded.label}", "events") as bar:
        result = replay_run(loaded, bar.count, allow_policies=allow_policies)
    if as_json:
        click.echo(json.dumps(result.plain()))
    elif result.divergence is None:
        click.echo(f"{result.entries:,} events, {result.commands:,} commands: the same")
    else:
        click.echo(f"diverges: {result.divergence}")
    ctx.exit(FAILED if result.divergence is not None else 0)
