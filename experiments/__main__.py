"""Runs experiments and writes their page of results: `python -m experiments [NAME...] [--full]`.

Only --full writes results that are part of the source; other sizes have a folder of their own.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from experiments.harness.experiment import (
    COMMITTED,
    EXPERIMENTS,
    LOCAL,
    Experiment,
    Outcome,
    Place,
    experiments,
    finish_all,
)
from experiments.harness.jobs import FULL, REDUCED, Computation, Job, Size
from experiments.harness.report import page, write
from experiments.harness.running import Skipped, run_missing
from experiments.harness.store import Store
from heddle.cli.progress import progress
from heddle.executor import WorkerError

CACHE = EXPERIMENTS / ".cache"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--full", is_flag=True, help="The paper's size: 64 GPUs, 3 rollouts for each cell")
@click.option("--gpus", type=click.IntRange(8), help="Another size")
@click.option("--seeds", type=click.IntRange(1), help="Another number of rollouts for each cell")
@click.option("--jobs", "processes", default=os.cpu_count() or 1, show_default="one per core")
@click.option("--only-runs", is_flag=True, help="Run what is missing; measure and draw nothing")
@click.option(
    "--draw",
    is_flag=True,
    help="Draw figures of --full again from measured.json; run nothing",
)
@click.option("--refresh", metavar="PRESET", help="First forget results of PRESET and PRESET+...")
@click.option("--fresh", is_flag=True, help="First forget all results that are needed")
def main(
    names: Sequence[str],
    full: bool,
    gpus: int | None,
    seeds: int | None,
    processes: int,
    only_runs: bool,
    draw: bool,
    refresh: str | None,
    fresh: bool,
) -> None:
    """Run experiments (all, or those whose name begins with a NAME) and write the page of results.

    Numbers and pictures of --full replace the committed ones, in experiments/ and docs/images;
    `python docs/readme_figures.py` then puts verdicts into the README and docs/results.md. Those of
    any other size go to experiments/reduced. Git ignores that folder and the page, results.md.

    Finished runs are kept in experiments/.cache: what was interrupted goes on where it was.
    """
    size = FULL if full else REDUCED
    if gpus or seeds:
        size = Size(name="own", gpus=gpus or size.gpus, seeds=seeds or size.seeds)
    place = COMMITTED if draw or (full and size is FULL) else LOCAL
    chosen = _chosen(names, place)
    if draw:
        for experiment in chosen:
            if experiment.measured:
                experiment.draw()
        _write_results(place)
        return
    store = Store(CACHE)
    jobs = _jobs(chosen, size)
    for job in jobs:
        if fresh or (refresh and isinstance(job, Job) and job.policy.split("+")[0] == refresh):
            store.forget(job.key)
    try:
        with progress("running", "runs") as bar:
            ran = run_missing(jobs, store, processes=processes, on_progress=bar.at)
    except (ValueError, WorkerError) as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        raise click.ClickException(said) from None
    keys = {job.key for job in jobs}
    old = sum(map(store.outdated, keys))
    _say(f"{ran} of {len(keys)} runs were missing and are there now")
    if old:
        _say(f"{old} were made by other code than today's; --refresh or --fresh makes them again")
    if only_runs:
        return
    with progress("measuring", "experiments") as bar:
        finished = finish_all(chosen, size, store, processes=processes, on_progress=bar.at)
    for experiment, took_s in finished:
        _say(f"{experiment.name}: {_verdict_line(experiment.outcome())} ({took_s:.0f} s)")
    _write_results(place)


def _write_results(place: Place) -> None:
    path, text = page(place)
    write(text, path)
    _say(f"wrote {path.relative_to(EXPERIMENTS.parent)}")


def _chosen(names: Sequence[str], place: Place) -> list[Experiment]:
    found = experiments(place)
    for name in names:
        if not any(e.name.startswith(name) for e in found):
            known = ", ".join(e.name for e in found)
            raise click.UsageError(f"no experiment begins with {name!r}; there are: {known}")
    return [e for e in found if not names or any(e.name.startswith(n) for n in names)]


def _jobs(chosen: Sequence[Experiment], size: Size) -> list[Job | Computation]:
    jobs: list[Job | Computation] = []
    for experiment in chosen:
        try:
            jobs += [run.job for run in experiment.planned_runs(size)]
            jobs += experiment.computations(size)
        except Skipped as reason:
            _say(f"{experiment.name} is skipped: {reason}")
    return jobs


def _verdict_line(outcome: Outcome) -> str:
    return ", ".join(j.verdict for j in outcome.judged) or "drawn"


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    if sys.argv[1:2] == ["real_training"]:
        from experiments.real_training.command import main as train

        train(sys.argv[2:], prog_name="python -m experiments real_training")
    main()
