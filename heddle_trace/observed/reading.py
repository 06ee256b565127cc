"""Measured steps of logs: the format is recognised, and all of it is read into columns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from heddle_trace.errors import TraceError
from heddle_trace.files import read_trace
from heddle_trace.importers.folders import within
from heddle_trace.importers.formats import AUTO
from heddle_trace.importers.heads import Head, head_of
from heddle_trace.importers.notes import Notes
from heddle_trace.importers.run import import_trace
from heddle_trace.importers.sources import SourceFile, sources
from heddle_trace.observed.agent_perf_bench import AgentPerfBench
from heddle_trace.observed.columns import ObservedSteps, observed
from heddle_trace.observed.core import ObservedFormat, ParsedObservation
from heddle_trace.observed.files import ObservedFile
from heddle_trace.observed.nemo_rl import NemoRl
from heddle_trace.observed.prime_rl import PrimeRl
from heddle_trace.observed.prometheus import Prometheus
from heddle_trace.observed.records import requests_of
from heddle_trace.observed.rl_insight import RlInsight
from heddle_trace.observed.schema import SCHEMA, ObservedHeader
from heddle_trace.observed.skyrl import SkyRl
from heddle_trace.observed.slime import Slime
from heddle_trace.observed.slime_trace import SlimeTrace
from heddle_trace.observed.tracelab import TraceLab
from heddle_trace.observed.vllm_spans import VllmSpans
from heddle_trace.schema import Trace

OBSERVED_FORMATS: Final[Mapping[str, ObservedFormat]] = {
    "observed": ObservedFile(),
    "tracelab": TraceLab(),
    "nemo-rl": NemoRl(),
    "rl-insight": RlInsight(),
    "skyrl": SkyRl(),
    "prime-rl": PrimeRl(),
    "slime": Slime(),
    "slime-trace": SlimeTrace(),
    "agent-perf-bench": AgentPerfBench(),
    "vllm-spans": VllmSpans(),
    "prometheus": Prometheus(),
}
"""Formats of measured steps; logs of a format of traces are read as a trace."""
METRICS: Final = "prometheus"
UNIX: Final = frozenset(("rl-insight", "vllm-spans", "prime-rl", "slime-trace"))
"""Formats in Unix time, beside which metrics may be."""


@dataclass(frozen=True, slots=True)
class ReadSteps:
    """Measured steps, the format that they were in, and what was left out or assumed."""

    steps: ObservedSteps
    format: str
    notes: Notes
    foreign: tuple[str, ...] = ()
    """Files of a folder that are of another format, or of none."""


def read_observed(
    paths: Sequence[str | Path],
    *,
    format: str = AUTO,
    skip_bad: bool = False,
    growing: bool = False,
) -> ReadSteps:
    """Read the measured steps of files and folders, or of a trace; `format` is that of logs.

    Files that are `growing` may end in the middle of a record.

    Raises TraceError, naming file and line, for what is damaged, holds several runs, or has no
    times; with `skip_bad` damaged records are left out and counted.
    """
    notes = Notes(skip_bad=skip_bad)
    listed = [within(path) if path.is_dir() else [path] for path in map(Path, paths)]
    files = sources([*chain.from_iterable(listed)], growing=growing)
    if not files:
        raise TraceError(f"{paths[0]}: the folder holds no file; name one with logs or runs")
    shown = {source: head_of(source) for source in files}
    named = {source: _format(head) for source, head in shown.items()}
    found = dict.fromkeys(name for name in named.values() if name)
    metrics = [source for source in files if named[source] == METRICS]
    if len(found) == 2 and metrics and UNIX.intersection(found):
        del found[METRICS]
    if len(found) > 1:
        one, other = (next(s for s, n in named.items() if n == name) for name in list(found)[:2])
        raise TraceError(
            f"{one.path} is {named[one]}, {other.path} is {named[other]}: they are measured steps "
            "of two sources; name the files of one"
        )
    if not found:
        return _of_trace(paths, format, shown, notes)
    name = next(iter(found))
    kind = OBSERVED_FORMATS[name]
    own = [source for source in files if named[source] == name]
    if kind.one_file and len(own) > 1:
        raise TraceError(
            f"{own[0].path} and {own[1].path} are two runs, each with a clock of its own: name one"
        )
    header = ObservedHeader(schema=SCHEMA, source=name, clock=kind.clock)
    seen = kind.observations(own, notes)
    if name != METRICS and metrics:
        seen = chain(seen, OBSERVED_FORMATS[METRICS].observations(metrics, notes))
    steps = observed(header, seen, notes)
    _check(steps, own[0], notes)
    foreign = tuple(str(source.path) for source in files if not named[source])
    return ReadSteps(steps, name, notes, foreign)


def _format(head: Head) -> str:
    return next((n for n, each in OBSERVED_FORMATS.items() if each.recognises(head)), "")


def _of_trace(
    paths: Sequence[str | Path], format: str, shown: Mapping[SourceFile, Head], notes: Notes
) -> ReadSteps:
    """Of a trace, or of logs that are imported as one."""
    first = next(iter(shown))
    if len(shown) == 1 and shown[first].any_row("trajectory_id", "steps"):
        return _timed(read_trace(first.path), "trace", first, notes)
    with TemporaryDirectory() as folder:
        made = Path(folder) / "trace.jsonl"
        report = import_trace(paths, made, format=format, skip_bad=notes.skip_bad)
        notes.read, notes.damaged = report.read, report.damaged
        notes.dropped |= report.dropped
        notes.first_damaged += report.first_damaged
        return _timed(read_trace(made), report.format, first, notes)


def _timed(trace: Trace, name: str, first: SourceFile, notes: Notes) -> ReadSteps:
    arrives = any(record.arrival_s is not None for record in trace.records)
    header = ObservedHeader(schema=SCHEMA, source=name, clock="shared" if arrives else "trajectory")
    steps = observed(header, _placed(trace, first), notes)
    _check(steps, first, notes)
    return ReadSteps(steps, name, notes)


def _placed(trace: Trace, first: SourceFile) -> Iterator[ParsedObservation]:
    for record in trace.records:
        where = f"{first.path}: trajectory {record.trajectory_id!r}"
        for request in requests_of(record):
            yield ParsedObservation(where, request)


def _check(steps: ObservedSteps, first: SourceFile, notes: Notes) -> None:
    if not steps.count and not steps.phases and not steps.engines:
        why = "; ".join(f"{count:,} {what}" for what, count in notes.dropped.items())
        raise TraceError(
            f"{first.path}: holds no measured step" + (f" (left out: {why})" if why else "")
        )
    if steps.count and not steps.recorded and not steps.phases:
        known = [n for n in ("input_tokens", "output_tokens", "tool") if n in steps.requests]
        raise TraceError(
            f"{first.path}: has no times, so no part of a step is measured (recorded: "
            f"{', '.join(known) or 'nothing'}): give logs with times, as RL-Insight's spans beside "
            "verl's dump, or `heddle compare` them, which simulates the times"
        )
