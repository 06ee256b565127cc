"""`heddle train`: a real RL loop on vLLM engines, with a small trainer."""

import json
from pathlib import Path

import rich_click as click


@click.command()
@click.option(
    "--regime",
    default="sync",
    show_default=True,
    help="REGIME[:PARAMETER=VALUE...]; `heddle regimes` lists them",
)
@click.option("--policy", default="verl", show_default=True, help="PRESET[+PART...] of rollouts")
@click.option("--steps", type=int, default=20, show_default=True, help="Batches to train")
@click.option("--groups", type=int, default=8, show_default=True, help="Prompts of a batch")
@click.option("--samples", type=int, default=8, show_default=True, help="Samples of a prompt")
@click.option("--engines", type=click.IntRange(1), default=1, show_default=True, help="Engines")
@click.option(
    "--max-running", type=int, default=16, show_default=True, help="Steps that one runs at once"
)
@click.option(
    "--model-dir", type=Path, default=None, help="Model to train [a micro model, made in --out]"
)
@click.option("--learning-rate", type=float, default=3e-3, show_default=True, help="Of AdamW")
@click.option("--clip", type=float, default=0.2, show_default=True, help="Of the policy ratio")
@click.option("--optimizer-steps", type=int, default=2, show_default=True, help="Of a batch")
@click.option("--letters", type=int, default=8, show_default=True, help="Of the task")
@click.option("--task-steps", type=int, default=3, show_default=True, help="Of a trajectory, most")
@click.option("--step-tokens", type=int, default=16, show_default=True, help="Of a step, most")
@click.option("--tool-s", type=float, default=0.2, show_default=True, help="Mean of a tool call")
@click.option("--failures", default="", help="Engines to kill, as e0@12.5,e1@30 [none]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all that is drawn")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder for run directories",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables")
def train(
    regime: str,
    policy: str,
    steps: int,
    groups: int,
    samples: int,
    engines: int,
    max_running: int,
    model_dir: Path | None,
    learning_rate: float,
    clip: float,
    optimizer_steps: int,
    letters: int,
    task_steps: int,
    step_tokens: int,
    tool_s: float,
    failures: str,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Train a small model on a toy task, under a regime, on real vLLM engines.

    Engines, trainer and weight updates are real; the task is to repeat the letter that a tool has
    shown. Its reward rises within minutes on two CPU cores. Afterwards the step times are put
    beside those of a simulation with rates that were fitted on the first half of the steps.
    """
    from heddle.cli.show_train import show_step, show_train
    from heddle.train.config import TrainConfig, echo_task
    from heddle.train.setup import prepare_training, training_run_config
    from heddle.train.training import train as train_on_engines

    task = echo_task(
        letters=letters, steps=task_steps, step_tokens=step_tokens, tool_s=tool_s, seed=seed
    )
    config = TrainConfig(
        run=training_run_config(
            out,
            model_dir,
            task=task,
            policy=policy,
            engines=engines,
            max_running=max_running,
            failures=failures,
            seed=seed,
        ),
        regime=regime,
        steps=steps,
        groups=groups,
        samples=samples,
        learning_rate=learning_rate,
        clip=clip,
        optimizer_steps=optimizer_steps,
        task=task,
    )
    result = train_on_engines(
        prepare_training(config),
        out=out,
        on_step=(lambda step: None) if as_json else show_step,
        on_note=lambda note: click.echo(f"Note: {note}", err=True),
    )
    if as_json:
        click.echo(json.dumps(result.plain(), allow_nan=False))
    else:
        show_train(result)
