"""`python -m experiments real_training`: a real RL loop on vLLM engines, with a small trainer."""

from pathlib import Path

import click

from experiments.real_training.config import TrainConfig
from experiments.real_training.echo import EchoTask
from experiments.real_training.setup import prepare_training, training_run_config
from experiments.real_training.show import show_batch, show_train
from experiments.real_training.trainer import TrainerFailedError
from experiments.real_training.training import train
from heddle.cli.errors import exit_with_user_errors
from heddle.signals import terminate_on_signals


@click.command()
@click.option("--regime", default="sync", show_default=True, help="As of `heddle loop`")
@click.option("--policy", default="verl", show_default=True, help="PRESET[+PART...] of rollouts")
@click.option("--steps", type=int, default=20, show_default=True, help="Batches to train")
@click.option("--groups", type=int, default=8, show_default=True, help="Prompts of a batch")
@click.option("--samples", type=int, default=8, show_default=True, help="Samples of a prompt")
@click.option("--optimizer-steps", type=int, default=2, show_default=True, help="Of a batch")
@click.option("--engines", type=click.IntRange(1), default=1, show_default=True)
@click.option("--failures", default="", help="Engines to kill, as e0@12.5,e1@30 [none]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all that is drawn")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def main(
    regime: str,
    policy: str,
    steps: int,
    groups: int,
    samples: int,
    optimizer_steps: int,
    engines: int,
    failures: str,
    seed: int,
    out: Path,
) -> None:
    """Train a micro model on a toy task, under a regime, on real vLLM engines.

    Afterwards the step times are put beside those of a simulation with rates that were fitted on
    the first half of the steps.
    """
    task = EchoTask(seed=seed)
    with exit_with_user_errors(), terminate_on_signals():
        run = training_run_config(
            out, task=task, policy=policy, engines=engines, failures=failures, seed=seed
        )
        config = TrainConfig(
            run=run,
            regime=regime,
            steps=steps,
            groups=groups,
            samples=samples,
            optimizer_steps=optimizer_steps,
            task=task,
        )
        try:
            result = train(
                prepare_training(config),
                out=out,
                on_batch=show_batch,
                on_note=lambda note: click.echo(f"Note: {note}", err=True),
            )
        except TrainerFailedError as error:
            raise click.ClickException(str(error)) from None
        show_train(result)
