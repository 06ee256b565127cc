"""A training loop as text on standard output: a line for each step, then the prediction."""

from statistics import fmean

import click

from experiments.real_training.training import TrainedBatch, TrainResult
from heddle.cli.tables import new_table, show

_HEAD = "step  seconds  reward staleness     loss  train_s     gap"


def show_batch(batch: TrainedBatch) -> None:
    """One line, and above the first the names of the columns."""
    figures, metrics = batch.figures, batch.metrics
    if figures.batch == 0:
        click.echo(_HEAD)
    click.echo(
        f"{figures.batch + 1:>4} {figures.step_s:>8.2f} {metrics.reward:>7.3f} "
        f"{figures.mean_staleness:>9.2f} {metrics.loss:>8.4f} {figures.training_s:>8.2f} "
        f"{metrics.logprob_gap:>7.4f}"
    )


def show_train(result: TrainResult) -> None:
    """What was measured beside what was predicted, and where the run is."""
    config = result.setup.config
    updates = f"{fmean(result.update_s):.2f} s" if result.update_s else "none"
    click.echo(
        f"\nregime {config.regime}, policy {config.run.policy.preset}; reward "
        f"{result.batches[0].metrics.reward:.3f} to {result.batches[-1].metrics.reward:.3f}; "
        "weight update of an "
        f"engine {updates}; trainer started again {result.restarts} times"
    )
    prediction = result.prediction
    if prediction is None:
        click.echo("Too few steps, or too short ones, to predict the later from the earlier.")
    else:
        first = prediction.fitted_steps
        click.echo(
            f"\nStep times in seconds, measured beside predicted: rates of engines and trainer are "
            f"fitted on steps 1 to {first}, lengths are those of the run.\n"
        )
        table = new_table("step", "measured_s", "predicted_s", "error")
        pairs = zip(prediction.measured_s, prediction.predicted_s, strict=True)
        for number, (measured, predicted) in enumerate(pairs, start=1):
            mark = " (fitted)" if number <= first else ""
            error = f"{predicted / measured - 1.0:+.1%}"
            table.add_row(f"{number}{mark}", f"{measured:.2f}", f"{predicted:.2f}", error)
        table.add_row(
            f"mean of {first + 1} to {len(prediction.measured_s)}",
            f"{fmean(prediction.measured_s[first:]):.2f}",
            f"{fmean(prediction.predicted_s[first:]):.2f}",
            f"{prediction.error_pct / 100.0:+.1%}",
        )
        show(table)
        click.echo(f"median error of a later step {prediction.step_error_pct:.1f} %")
    click.echo(f"\n  {result.path}")
