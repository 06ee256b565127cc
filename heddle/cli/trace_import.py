"""`heddle trace import`: makes a trace of other systems' logs, and reports on standard output."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from heddle.cli.options import settings_option, take_settings

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
_SHOWN = 5


@click.command("import")
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["auto", *FORMATS]),
    default=None,
    help="What the files are; auto looks into them. [auto]",
)
@settings_option
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="*.jsonl[.gz]")
@click.option("--force", is_flag=True, help="Replace OUT where it exists.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def import_(
    files: tuple[Path, ...],
    format_: str | None,
    settings: tuple[str, ...],
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Make a trace of the logs in FILE...: counts and times only.

    A folder stands for the files in it; those of another format are left out, and listed.
    Says what it read, left out and assumed. A damaged record stops it, and nothing is written.
    [logs] says how tokens are counted, what task it is, and whether damaged records are left out.
    """
    from heddle.cli.logs import imported
    from heddle.cli.outputs import new_file

    own = take_settings(settings, logs__format=format_).logs
    new_file(out, force)
    report = imported(files, own, out)
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
