"""`heddle run`: one run on real engines, or on fake ones in real time."""

import json
from pathlib import Path
from typing import Any

import rich_click as click

from heddle.cli.options import run_on_engines, take_config

ENGINE = click.Choice(["vllm", "fake"])


@click.command()
@click.option("--policy", default=None, help="PRESET[+PART...] or package.module:factory [verl]")
@click.option("--engine", type=ENGINE, default=None, help="What runs the steps [fake]")
@click.option("--model-dir", default=None, help="Folder of the model that vLLM serves")
@click.option(
    "--engines",
    type=int,
    default=None,
    help="Engines, which have all GPUs [those of 8 GPUs; 2 with --tp]",
)
@click.option("--tp", "tps", default=None, help="TP degree, or one for each engine as 1,2 [1]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@run_on_engines
def run(
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    policy: str | None,
    engines: int | None,
    tps: str | None,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay a trace under one policy on real engines.

    The engines are vLLM's (--engine vllm), or fake ones that only keep time, as the profile says.
    Tool calls take the time that the trace says.
    """
    from heddle.cli.progress import progress
    from heddle.cli.show import run_summary, show_lateness
    from heddle.running import run as run_here
    from heddle.setup import prepare
    from heddle.workload import check_tags_used

    runtime = {f"runtime__{name}": options.pop(name) for name in ("engine", "model_dir")}
    config, text = take_config(
        sources,
        options,
        settings,
        policy__preset=policy,
        engines=(engines, tps),
        **runtime,
    )
    with progress(f"{config.policy.preset} s{config.seed}", "trajectories") as bar:
        setup = prepare(config)
        check_tags_used(config.policy.tags, [setup.policy])
        result = run_here(
            setup,
            out=out,
            config_text=text,
            on_progress=bar.at,
            on_note=lambda note: click.echo(f"Note: {note}", err=True),
        )
    show_lateness(str(result.path), result.summary)
    if as_json:
        click.echo(json.dumps(result.row(), allow_nan=False))
    else:
        run_summary(result, setup)
