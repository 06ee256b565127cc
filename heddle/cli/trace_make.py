"""`heddle trace extract` and `resample`: traces from what is at hand already."""

from __future__ import annotations

import json
from dataclasses import asdict
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

if TYPE_CHECKING:
    from heddle_trace.resample import ResampleReport


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="*.jsonl[.gz]")
@click.option(
    "--with-silent",
    is_flag=True,
    help="Also sessions of heddle serve that fell silent after an answer, and so were cancelled; "
    "their last answered step is taken for their last.",
)
@click.option("--force", is_flag=True, help="Replace OUT where it exists.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def extract(run: Path, out: Path, with_silent: bool, force: bool, as_json: bool) -> None:
    """Turn the journal of a RUN back into a trace.

    Of a RUN that was killed or still runs, the trajectories that have ended so far: long ones are
    missing more often than short ones.
    """
    from heddle.cli.outputs import any_run, new_file
    from heddle.cli.progress import progress
    from heddle_trace import write_trace
    from heddle_trace.extract import extract as extracted

    new_file(out, force)
    with progress(f"extracting {run.name}"):
        loaded = any_run(run, "the trajectories that have ended so far")
        loaded.verify()
        records, report = extracted(
            (entry.event for entry in loaded.entries()),
            source=f"run {loaded.path.resolve().name}",
            model=loaded.config.cluster.model,
            with_silent=with_silent,
        )
        written = write_trace(out, records)
    if as_json:
        answer = {"trace": str(out), "trajectories": len(records), "sha256": written.sha256}
        click.echo(json.dumps({"schema": "heddle.trace.extract/1", **answer, **asdict(report)}))
        return
    steps = sum(len(record.steps) for record in records)
    click.echo(
        f"written   {out}: {len(records):,} trajectories, {steps:,} steps, sha256 "
        f"{written.sha256[:16]}"
    )
    for how, count in report.left_out.items():
        click.echo(f"left out  {count:,} {how} trajectories")
    click.echo(
        "recorded      waits of tools include waiting for a slot; llm_s includes all queueing"
    )
    click.echo("not recorded  outcomes, and what the last tool of a trajectory added")


@click.command()
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path))
@click.argument("groups", type=click.IntRange(1, 100_000))
@click.argument("samples", type=click.IntRange(1, 10_000))
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="*.jsonl[.gz]")
@click.option("--force", is_flag=True, help="Replace OUT where it exists.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def resample(
    path: Path, groups: int, samples: int, seed: int, out: Path, force: bool, as_json: bool
) -> None:
    """Draw a rollout from TRACE: GROUPS of SAMPLES, each used once before any is used twice."""
    from heddle.cli.outputs import new_file
    from heddle.cli.progress import progress
    from heddle_trace import read_trace, write_trace
    from heddle_trace.resample import resample as resampled

    new_file(out, force)
    if realpath(out) == realpath(path):
        raise click.UsageError(f"{out} is the trace to draw from; write to another file")
    if groups * samples > 1_000_000:
        raise click.UsageError(f"{groups:,} x {samples:,} trajectories; draw 1,000,000 at most")
    with progress(f"drawing from {path.name}"):
        records, report = resampled(read_trace(path), groups=groups, samples=samples, seed=seed)
        written = write_trace(out, records)
    if as_json:
        answer = {"trace": str(out), "seed": seed, "sha256": written.sha256, **asdict(report)}
        click.echo(json.dumps({"schema": "heddle.trace.resample/1", **answer}))
    else:
        click.echo("\n".join(drawn_lines(report, out, written.sha256)))


def drawn_lines(report: ResampleReport, out: Path, sha256: str) -> list[str]:
    """What a draw is made of, a line each."""
    total = report.groups * report.samples
    lines = [
        f"written   {out}: {total:,} trajectories in {report.groups:,} groups of "
        f"{report.samples:,}, sha256 {sha256[:16]}",
        f"drawn     {report.distinct_trajectories:,} of {report.from_trajectories:,} trajectories, "
        f"from {report.distinct_groups:,} of {report.from_groups:,} groups",
    ]
    if report.repeated_groups:
        lines.append(f"repeated  {report.repeated_groups:,} groups stand for a task a second time")
    if report.repeated_trajectories:
        lines.append(
            f"repeated  {report.repeated_trajectories:,} trajectories are copies, "
            f"{report.most_copies:,} of the most copied"
        )
    if report.padded_groups:
        lines.append(
            f"repeated  {report.padded_groups:,} groups have fewer samples than requested; copies "
            "within a group make it look more alike than it is"
        )
    if report.left_out_arrivals:
        lines.append(
            f"left out  {report.left_out_arrivals:,} arrival times: a rollout begins at once"
        )
    return lines
