"""`heddle diagnose`: where the time of measured steps went, and what would have saved some."""

import json
import textwrap
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import rich_click as click

from heddle.cli.logs import USUAL, rules_of
from heddle.cli.options import config_files, settings_option, take_config
from heddle.config_error import require

if TYPE_CHECKING:
    from heddle.command_config import Config, LogSettings
    from heddle.diagnosis.remedies import Remedy
    from heddle.diagnosis.verdict import Diagnosis
    from heddle_trace.observed.columns import ObservedSteps

SHOWN: Final = 8
"""Engines of the table; --json has all."""
LEAST: Final = 0.0005
"""Share of a part of the table."""


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="LOGS...|RUN")
@config_files
@settings_option
@click.option(
    "--follow",
    is_flag=True,
    help="LOGS are a folder that a training writes to: a line for each step when it is complete",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables")
def diagnose(
    sources: tuple[str, ...],
    configs: tuple[Path, ...],
    settings: tuple[str, ...],
    follow: bool,
    as_json: bool,
) -> None:
    """Say where the time of your steps went: one sentence, parts that sum to it, and remedies.

    A RUN is a run directory of Heddle's. LOGS are files or folders of measured steps: NeMo-RL's
    Perfetto traces, spans of vLLM or of RL-Insight, traces of prime-rl or slime, TraceLab's
    rounds, AgentPerfBench's results, metrics of vLLM or SGLang over time, console metrics of SkyRL
    or slime, heddle.observed/1; or logs with times that `heddle trace import` reads.

    Remedies are settings that the trajectories are simulated under, on the cluster that [cluster]
    describes (of a RUN, its own), compared with its policy and engines. diagnose.budget_s limits
    their search; diagnose.observed writes the measured steps to a file, of which, as of LOGS,
    `heddle report` writes a page.

    --follow ends with ctrl-C. It says when the recommended setting changes, because lengths or
    tools do; remedies are searched again when these, or the parts, move by diagnose.follow_moved.
    """
    config, _ = take_config(sources, {"configs": configs}, settings, usual=USUAL, logs=True)
    if follow:
        from heddle.cli.follow import follow as followed

        require(len(sources) == 1, "--follow takes one folder")
        followed(Path(sources[0]), config, as_json=as_json)
    show_diagnosis(sources, config, as_json=as_json)


def show_diagnosis(
    sources: Sequence[str], config: "Config", *, as_json: bool, page_file: Path | None = None
) -> None:
    """Print where the time went, and write a page of it."""
    from heddle.cli.outputs import new_file
    from heddle.cli.tables import show_verdict
    from heddle.diagnosis.verdict import diagnosed
    from heddle_trace.observed.files import write_observed

    kept = Path(config.diagnose.observed).resolve()
    if config.diagnose.observed:
        new_file(kept, force=True)
        own = {kept, *kept.parents}.intersection(Path(source).resolve() for source in sources)
        require(not own, f"diagnose.observed: {kept} is of the logs; name a file elsewhere")
    steps, config, name = _read(sources, config)
    if config.diagnose.observed:
        write_observed(config.diagnose.observed, steps.header, steps.observations())
    found = diagnosed(steps, name)
    if not as_json:
        show_verdict(found.sentence)
        _show(found)
    remedies, why_none = found_remedies(steps, config)
    if as_json:
        click.echo(json.dumps(found.plain(remedies, why_none), allow_nan=False))
    else:
        show_remedies(remedies, why_none)
    if page_file is not None:
        from heddle.cli.outputs import write
        from heddle.diagnosis.page import page

        made = page(found, steps, remedies, why_none)
        write(page_file, made)
        click.echo(f"{page_file}: {len(made) / 1e6:.1f} MB", err=True)


def _read(sources: Sequence[str], config: "Config") -> "tuple[ObservedSteps, Config, str]":
    """The measured steps, the configuration of what ran, and its name."""
    from heddle.cli.outputs import say_unfinished
    from heddle.cli.progress import progress
    from heddle.diagnosis.own_runs import observed_run, own_run

    run = own_run(sources, "diagnosed")
    with progress(f"reading {sources[0]}"):
        if run is not None:
            say_unfinished(run, "its journal as far as it goes")
            own = run.config
            steps = observed_run(run)
            config = replace(config, cluster=own.cluster, policy=own.policy, seed=own.seed)
            return steps, config, steps.header.source
        steps, name = read_steps(sources, config.logs)
    return steps, config, name


def read_steps(
    sources: Sequence[str], logs: "LogSettings", *, growing: bool = False
) -> "tuple[ObservedSteps, str]":
    """Read logs, and say what was left out unless they are growing; return their format, too."""
    from heddle_trace.observed.reading import read_observed

    read = read_observed(sources, format=logs.format, skip_bad=logs.skip_bad, growing=growing)
    if growing:
        return read.steps, read.format
    for what, count in {**read.notes.dropped, **read.notes.assumed}.items():
        click.echo(f"{count:,} {what}", err=True)
    for path in read.foreign:
        click.echo(f"left out {path}: no measured steps", err=True)
    if read.notes.damaged:
        click.echo(f"left out {read.notes.damaged:,} damaged records", err=True)
    return read.steps, read.format


def _show(found: "Diagnosis") -> None:
    from heddle.cli.tables import fact, percent, show_rows

    total_s, steps = found.total_s or 1.0, len(found.steps)
    click.echo()
    each = " a step" if steps > 1 else ""
    rows = [
        {"part": n, f"seconds{each}": f"{s / steps:,.1f}", "share": percent(s / total_s)}
        for n, s in [*found.parts.items(), ("measured", found.total_s)]
        if s >= LEAST * total_s or n == "unaccounted"
    ]
    show_rows(rows)
    click.echo()
    if found.paths:
        named = dict.fromkeys(part for path in found.paths for part in path.parts)
        kept = sorted(named, key=lambda n: -sum(p.parts.get(n, 0.0) for p in found.paths))[:5]
        show_rows(
            [
                {
                    "the longest": path.trajectory[-28:],
                    "seconds": f"{path.lasts_s:,.1f}",
                    **{n: f"{path.parts.get(n, 0.0):,.1f}" for n in kept},
                }
                for path in found.paths
            ]
        )
        click.echo()
    if found.engines:
        show_rows(
            [
                {
                    "engine": engine.engine[-28:],
                    "busy": percent(engine.busy_s / total_s),
                    "idle while some wait": percent(engine.idle_waiting_s / total_s),
                    "mean batch": f"{engine.mean_batch:,.1f}",
                }
                for engine in found.engines[:SHOWN]
            ]
        )
        click.echo()
    fact("source", found.source)
    over = sum(step.running_over for step in found.steps)
    if over:
        fact("overlap", f"{over:,} trajectories ran over the end of a step, and count in both")
    if found.absent:
        fact("absent", f"not recorded, so part of others or unaccounted: {', '.join(found.absent)}")


def found_remedies(
    steps: "ObservedSteps", config: "Config", of: Container[str] | None = None
) -> "tuple[list[Remedy], str]":
    """Remedies, or why there are none.

    `of` are the trajectories to simulate if not all; a signal is then raised.
    """
    from heddle.cli.progress import progress
    from heddle.diagnosis.remedies import remedies
    from heddle_trace import Trace
    from heddle_trace.observed.records import records_of

    budget_s = config.diagnose.budget_s
    if not budget_s:
        return [], "diagnose.budget_s is 0"
    records = records_of(steps, config.logs.workload or "agent")
    records = [each for each in records if of is None or each.trajectory_id in of]
    if not records:
        return [], "no output tokens are recorded, without which nothing can be simulated"
    config = replace(config, missing=rules_of(Trace("measured", records, ""), config.missing))
    with progress("searching remedies"):
        try:
            framework = config.plan.framework
            found = remedies(config, records, budget_s, framework, keeps_best=of is None)
        except ValueError as error:
            return [], str(error)
    return found, "" if found else "no other setting is significantly faster in simulation"


def show_remedies(remedies: "Sequence[Remedy]", why_none: str) -> None:
    """Print each with its block."""
    if why_none:
        click.echo(f"no remedies: {why_none}")
    for number, each in enumerate(remedies, start=1):
        ends = [round(end * 100.0) for end in (each.low, each.high) if end is not None]
        spread = "{} to {} %".format(*ends) if ends else "one simulation: no interval"
        click.echo(
            f"{number}. {each.setting}: {each.saving * 100.0:.0f} % less time ({spread}), "
            f"simulated, over {each.over}"
        )
        click.echo(textwrap.indent(each.block, "   "))
