"""`heddle trace`: show, check and make traces; importing and drawing have their own files.

Tables, findings and JSON go to stdout, notes about them to stderr. Heavy imports stay inside the
verbs, so that `heddle --help` is fast. `heddle.cli.errors` prints errors.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from heddle.cli.options import settings_option, take_settings
from heddle.cli.trace_import import import_
from heddle.cli.trace_make import extract, resample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from heddle_trace import TraceStats
    from heddle_trace.stats import ToolStats

# Spelt out, because the generator's own table would have to be imported; a test compares them.
WORKLOADS = ("coding", "search", "math")
_TOOLS_SHOWN = 12
_TOOL_NAME_SHOWN = 32


@click.group()
def trace() -> None:
    """Describe, check and make traces: what trajectories would do."""


for _verb in (import_, extract, resample):
    trace.add_command(_verb)


@trace.command()
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option(
    "--figure", type=click.Path(path_type=Path), help="Draw it, too: *.png, *.svg or *.pdf."
)
def describe(path: Path, as_json: bool, figure: Path | None) -> None:
    """Show lengths, tails, tool latencies, the spread inside groups, and gaps of TRACE."""
    from heddle.cli.progress import progress
    from heddle_trace import describe as described
    from heddle_trace import read_trace

    if figure is not None:
        from heddle.reports.trace_figures import draw_trace, figure_path

        figure_path(figure)
    with progress(f"describing {path.name}"):
        records = read_trace(path)
        stats = described(records)
        if figure is not None:
            draw_trace(records, stats, figure)
    if figure is not None:
        click.echo(f"{figure}: drawn", err=True)
    if as_json:
        click.echo(json.dumps({"schema": "heddle.trace.describe/1", **asdict(stats)}))
        return
    show_description(stats)


def show_description(stats: TraceStats) -> None:
    from heddle.cli.tables import show_rows

    click.echo("\n".join(_summary(stats)))
    show_rows(_lengths(stats))
    if stats.tools:
        click.echo()
        show_rows([_tool(tool) for tool in stats.tools[:_TOOLS_SHOWN]])
    if len(stats.tools) > _TOOLS_SHOWN:
        click.echo(f"{len(stats.tools) - _TOOLS_SHOWN:,} rarer tools: see --json")


@trace.command()
@click.argument("path", metavar="TRACE", type=click.Path(path_type=Path))
@click.argument("limit", metavar="[LIMIT]", type=click.IntRange(1, 1_000_000), default=100)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
@click.pass_context
def check(ctx: click.Context, path: Path, as_json: bool, limit: int) -> None:
    """List what is wrong with TRACE, LIMIT problems at most [100].

    Exit status 0: nothing; 1: something; 2: wrong usage.
    """
    from heddle.cli.progress import progress
    from heddle_trace import problems

    with progress(f"checking {path.name}"):
        found = problems(path, limit + 1)
    shown, more = found[:limit], len(found) > limit
    if as_json:
        listed = [asdict(problem) for problem in shown]
        answer = {"trace": str(path), "valid": not found, "problems": listed, "more": more}
        click.echo(json.dumps({"schema": "heddle.trace.validate/1", **answer}))
    else:
        for problem in shown:
            click.echo(f"{path}: {problem}")
    count = f"more than {limit:,}" if more else f"{len(shown):,}"
    verdict = f"{count} problem{'s' if len(found) > 1 else ''}" if found else "valid"
    click.echo(f"{path}: {verdict}", err=True)
    ctx.exit(1 if found else 0)


@trace.command()
@click.argument("workload", type=click.Choice(WORKLOADS))
@click.option("--trajectories", type=click.IntRange(1, 1_000_000), default=6_400, show_default=True)
@click.option("--samples", type=click.IntRange(1, 1_000_000), default=16, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@settings_option
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="*.jsonl[.gz]")
@click.option("--force", is_flag=True, help="Replace OUT where it exists.")
def synth(
    workload: str,
    trajectories: int,
    samples: int,
    seed: int,
    settings: tuple[str, ...],
    out: Path,
    force: bool,
) -> None:
    """Make a synthetic trace of a WORKLOAD, in groups of SAMPLES, and write it to OUT.

    [synth] says what else it has: lengths that drift, batches of training, starts of environments
    and rewards.
    """
    from heddle.cli.outputs import new_file
    from heddle.cli.progress import progress
    from heddle_trace import synth as synthesised
    from heddle_trace import write_trace
    from heddle_trace.loop_fields import with_loop_fields
    from heddle_trace.shrink import shrunk
    from heddle_trace.table import Records

    own = take_settings(settings).synth
    new_file(out, force)
    with progress(f"making {trajectories:,} trajectories"):
        records = with_loop_fields(
            synthesised(workload, trajectories, seed, samples, drift=own.drift),
            seed=seed,
            steps=own.batches,
            env_start_s=own.env_start_s,
            reward_s=own.reward_s,
        )
        if own.shrink != 1.0:
            records = Records.of(shrunk(record, own.shrink) for record in records)
        written = write_trace(out, records)
    tokens = int(records.step("output_tokens").recorded().sum())
    message = f"{out}: {trajectories:,} trajectories, {tokens:,} output tokens"
    click.echo(f"{message}, sha256 {written.sha256[:16]}", err=True)


def _summary(stats: TraceStats) -> list[str]:
    from heddle.cli.tables import number_cell

    groups = stats.groups
    lines = [
        f"{stats.name}  ({', '.join(stats.workloads)})  sha256 {stats.sha256[:16]}",
        f"{stats.trajectories:,} trajectories in {groups.groups:,} groups of "
        f"{groups.size_min} / {groups.size_p50:g} / {groups.size_max} (min / p50 / max), "
        f"{stats.total_steps:,} steps, {stats.total_output_tokens:,} output tokens, "
        f"{stats.truncated:,} truncated",
        f"max / median: output tokens {number_cell(stats.output_max_over_median)}, steps "
        f"{number_cell(stats.steps_max_over_median)}; share of variance within groups "
        f"{number_cell(groups.within_share)}",
        f"largest context {stats.max_context_tokens:,} tokens; tool calls that succeed "
        f"{number_cell(stats.tool_ok_share)}",
    ]
    if stats.rl_steps is not None:
        first, last = stats.rl_steps
        lines.append(f"recorded in the steps {first:,} to {last:,} of training")
    gaps = {name: count for name, count in stats.gaps.items() if count}
    for name, count in gaps.items():
        rule = f"--set missing.{name}=RULE"
        lines.append(f"not recorded: {name} in {count:,} places; to replay, choose {rule}")
    return lines


def _lengths(stats: TraceStats) -> list[dict[str, str]]:
    spreads = {
        "steps": stats.steps,
        "output tokens": stats.output_tokens,
        "output tokens a step": stats.output_tokens_per_step,
        "prompt tokens": stats.prompt_tokens,
        "tokens added by a tool": stats.tool_tokens,
        "tool seconds": stats.tool_s,
        "user seconds": stats.user_s,
        "waiting seconds a trajectory": stats.tool_s_per_trajectory,
        "environment start seconds": stats.env_start_s,
        "reward seconds": stats.reward_s,
        "reward": stats.reward,
    }
    return [{"": label, **_cells(asdict(each))} for label, each in spreads.items() if each.n]


def _tool(tool: ToolStats) -> dict[str, str]:
    name, seconds = tool.tool, asdict(tool.tool_s)
    del seconds["n"]
    return {
        # Its end is more specific: "mcp__shop__get_order".
        "tool": name if len(name) <= _TOOL_NAME_SHOWN else "…" + name[1 - _TOOL_NAME_SHOWN :],
        **_cells({"calls": tool.calls, "no time": tool.missing, "ok": tool.ok_share}),
        **_cells({f"{figure} s": value for figure, value in seconds.items()}),
        **_cells({"tokens": tool.tool_tokens.mean}),
    }


def _cells(figures: Mapping[str, float | None]) -> dict[str, str]:
    from heddle.cli.tables import number_cell

    return {name: number_cell(value) for name, value in figures.items()}
