"""`heddle trace import`: makes a trace of other systems' logs, and reports on standard output."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from heddle.cli.options import Verb
from heddle.cli.trace_make import free

if TYPE_CHECKING:
    from heddle_trace.importers import ImportReport

# Spelt out, because the importers would have to be imported; a test compares them.
FORMATS = (
    "mooncake",
    "dynamo",
    "swe-agent",
    "tau2",
    "inspect",
    "claude-code",
    "verl",
    "openai-chat",
    "openai-responses",
    "otel",
    "langfuse",
    "langsmith",
    "atif",
    "openhands",
)
CHARS_PER_TOKEN = 3.6
_SHOWN = 5
_PROGRESS_EVERY = 100  # trajectories; a terminal needs no more


def log_options(verb: Verb) -> Verb:
    """Add the options that say how logs are read."""
    for option in reversed(_LOG_OPTIONS):
        verb = option(verb)
    return verb


_LOG_OPTIONS = (
    click.option(
        "--format",
        "format_",
        type=click.Choice(["auto", *FORMATS]),
        default="auto",
        show_default=True,
        help="What the files are; auto looks into them.",
    ),
    click.option("--skip-bad", is_flag=True, help="Leave damaged records out, and count them."),
    click.option(
        "--tokenizer",
        metavar="PATH|NAME",
        help="Counts tokens where the log does not: a tokenizer.json, a *.tiktoken, or an "
        "encoding.",
    ),
    click.option(
        "--chars-per-token",
        type=float,
        default=CHARS_PER_TOKEN,
        show_default=True,
        help="Without a tokenizer: characters that are taken for a token.",
    ),
)


@click.command("import")
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@log_options
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="*.jsonl[.gz]")
@click.option("--workload", help="Name of the task, in place of the format's own.")
@click.option("--force", is_flag=True, help="Replace OUT where it exists.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def import_(
    files: tuple[Path, ...],
    format_: str,
    out: Path,
    skip_bad: bool,
    tokenizer: str | None,
    chars_per_token: float,
    workload: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Make a trace of the logs in FILE...: counts and times only.

    A folder stands for the files in it; those of another format are left out, and listed.
    Says what it read, left out and assumed. A damaged record stops it, and nothing is written.
    """
    from heddle.cli.progress import progress
    from heddle_trace.importers import import_trace

    free(out, force)
    with progress("importing") as bar:

        def on_progress(read: int, written: int) -> None:
            if bar.seen and written % _PROGRESS_EVERY == 0:
                bar.now(f"importing: {read:,} records read, {written:,} trajectories written")

        report = import_trace(
            files,
            out,
            format=format_,
            skip_bad=skip_bad,
            tokenizer=tokenizer,
            chars_per_token=chars_per_token,
            workload=workload,
            on_progress=on_progress,
        )
    if as_json:
        answer = {"schema": "heddle.trace.import/1", "trace": str(out), **asdict(report)}
        click.echo(json.dumps(answer))
    else:
        click.echo("\n".join(import_lines(report, out)))


def import_lines(report: ImportReport, out: Path) -> list[str]:
    """What an import read, wrote, left out and assumed, a line each."""
    files = f"{len(report.files):,} file{'s' if len(report.files) > 1 else ''}"
    lines = [
        f"format    {report.format}",
        f"read      {report.read:,} records from {files}",
        f"written   {out}: {report.trajectories:,} trajectories, {report.steps:,} steps, "
        f"{report.output_tokens:,} output tokens, sha256 {report.sha256[:16]}",
    ]
    if report.foreign:
        count = len(report.foreign)
        lines.append(f"left out  {count:,} file{'s' if count > 1 else ''} of another format")
        lines += [f"          {each}" for each in report.foreign[:_SHOWN]]
        if count > _SHOWN:
            lines.append(f"          and {count - _SHOWN:,} more")
    if report.damaged:
        lines.append(f"damaged   {report.damaged:,} left out")
        lines += [f"          {first}" for first in report.first_damaged[:_SHOWN]]
        if report.damaged > _SHOWN:
            lines.append(f"          and {report.damaged - _SHOWN:,} more")
    lines += [f"left out  {count:,} {what}" for what, count in report.dropped.items()]
    lines += [f"assumed   {count:,} {what}" for what, count in report.assumed.items()]
    return [*lines, *(f"assumed   {sentence}" for sentence in report.assumptions)]
