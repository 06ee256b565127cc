"""Logs in place of a trace: they are imported, and replayed whole, or as a rollout of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

if TYPE_CHECKING:
    from heddle.command_config import Config, LogSettings
    from heddle.config import MissingConfig
    from heddle_trace import Trace
    from heddle_trace.importers import ImportReport

ROLLOUT: Final = 256
"""Trajectories of a rollout of which only the samples are named."""
MOST_SAMPLES: Final = 16
USUAL: Final = {
    "missing.tool_s": "typical",
    "missing.cap_tool_s": 300.0,
    "cluster.over_capacity": "drop",
}
"""Rules for what logs of people and services have and a rollout has not."""
_PROGRESS_EVERY = 100
"""Trajectories; a terminal needs no more."""


def are_logs(sources: Sequence[str]) -> bool:
    """Whether all sources are folders, or files in a known format that are no traces."""
    from heddle.raw_logs import log_format

    return bool(sources) and all(log_format(Path(source)) for source in sources)


def with_rollout(
    config: Config, sources: Sequence[str], out: Path
) -> tuple[Config, dict[str, Any] | None]:
    """Return a configuration that replays logs, and what was done as JSON.

    All their trajectories are replayed; where [logs] names groups or samples, a rollout of that
    size is drawn from them. A configuration of a trace is returned as it is. Files lie in `out`,
    each under the name of the first log and the hash of its content. Notes go to standard error.

    Raises:
        TraceError: a log is damaged, or in no known format.
        OSError: a file cannot be written.
    """
    if not are_logs(sources):
        return config, None
    from heddle.cli.trace_import import import_lines
    from heddle_trace import read_trace

    with _made(out):
        part = out / f".{_stem(sources)}-trace.jsonl.gz"
        report = imported(sources, config.logs, part)
        trace = _named(part, report.sha256)
        click.echo("\n".join(import_lines(report, trace)), err=True)
        made = read_trace(trace)
        done = {"import": {"trace": str(trace), **asdict(report)}}
        if config.logs.groups or config.logs.samples:
            trace, done["rollout"] = _drawn(made, config, out / _stem(sources))
    return replace(config, trace=str(trace), missing=rules_of(made, config.missing)), done


def _drawn(made: Trace, config: Config, stem: Path) -> tuple[Path, dict[str, Any]]:
    """Draw the rollout that [logs] names, and say so."""
    from heddle.cli.trace_make import drawn_lines
    from heddle_trace import write_trace
    from heddle_trace.resample import resample

    groups, samples = _size(made, config.logs)
    records, drawn = resample(made, groups=groups, samples=samples, seed=config.seed)
    part = stem.with_name(f".{stem.name}-rollout.jsonl.gz")
    sha256 = write_trace(part, records).sha256
    rollout = _named(part, sha256)
    click.echo("\n".join(drawn_lines(drawn, rollout, sha256)), err=True)
    return rollout, {
        "trace": str(rollout),
        "seed": config.seed,
        "sha256": sha256,
        **asdict(drawn),
    }


def imported(files: Sequence[str | Path], settings: LogSettings, out: Path) -> ImportReport:
    """Import logs into a trace, with progress on a terminal."""
    from heddle.cli.progress import progress
    from heddle_trace.importers import import_trace

    with progress("importing") as bar:

        def on_progress(read: int, written: int) -> None:
            if bar.seen and written % _PROGRESS_EVERY == 0:
                bar.now(f"importing: {read:,} records read, {written:,} trajectories written")

        return import_trace(
            files,
            out,
            format=settings.format,
            skip_bad=settings.skip_bad,
            tokenizer=settings.tokenizer,
            chars_per_token=settings.chars_per_token,
            workload=settings.workload,
            on_progress=on_progress,
        )


def _named(part: Path, sha256: str) -> Path:
    """Name a file by its content, so that no run loses the trace that it replayed."""
    name = part.name.removeprefix(".").replace(".jsonl.gz", f"-{sha256[:8]}.jsonl.gz")
    return part.replace(part.with_name(name))


def _stem(sources: Sequence[str]) -> str:
    return (Path(sources[0]).resolve().name or "logs").split(".")[0] or "logs"


def _size(trace: Trace, settings: LogSettings) -> tuple[int, int]:
    """Groups of a rollout, and trajectories of each."""
    from heddle_trace.table import Records

    sizes = [len(v) for v in Records.of(trace.records).trajectory("group_id").occurring().values()]
    each = settings.samples or min(MOST_SAMPLES, median_low(sizes))
    count = settings.groups or -(-ROLLOUT // each)
    if count * each > 1_000_000:
        raise click.UsageError(f"{count:,} x {each:,} trajectories; draw 1,000,000 at most")
    return count, each


def rules_of(trace: Trace, given: MissingConfig) -> MissingConfig:
    """Rules for missing sizes: as given, else drawn from recorded ones, else 0."""
    from heddle_trace.table import Records

    records = Records.of(trace.records)
    prompts = records.trajectory("prompt_tokens").known.any()
    sizes = records.step("tool_tokens").known.any()
    found = replace(given, output_tokens="sample")
    if given.prompt_tokens == "error":
        found = replace(found, prompt_tokens="sample" if prompts else "zero")
    if given.tool_tokens == "error":
        found = replace(found, tool_tokens="sample" if sizes else "zero")
    return found


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder; without it again if nothing came of the files in it."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):
                folder.rmdir()
        raise
