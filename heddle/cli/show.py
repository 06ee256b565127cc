"""Results as text on standard output."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import rich_click as click
from rich.console import Console, ConsoleDimensions
from rich.table import Table

from heddle.cli.bars import Bar, draw_bars
from heddle.cli.profile_line import profile_lines
from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import ClusterProfiles
from heddle.comparison.compare import Comparison
from heddle.comparison.estimates import Estimate
from heddle.cost.objective import Objective
from heddle.cost.prices import RunCost
from heddle.policy_inputs import HistorySource
from heddle.runs.bound import Bound
from heddle.runs.conditions import lateness_note, load_note
from heddle.runs.ideal import Ideal
from heddle.setup import RunSetup
from heddle.simulation import RUN_KEYS, RunResult, run_prices
from heddle.workload import Workload

WIDEST = 100_000
WHY = tuple(key for key in RUN_KEYS if key not in ("makespan_s", "throughput_tok_s"))
"""Figures of a run that say why it is fast or slow."""
COST_COLUMNS = ("GPU-hours", "$")
PLANNED = "planned"
"""Column of policies that choose the TP degrees of their engines."""
HEAD_WIDTH, LABEL_WIDTH = 80, 9
"""Columns of the lines above a table, and of their labels."""
PIPED_WIDTH = 160
"""Columns if there is no terminal, so that a table in a file is not folded."""


def lines(title: str, names: Mapping[str, str]) -> None:
    """A title and one line for each name."""
    click.echo(click.style(title, bold=True))
    width = max(map(len, names), default=0)
    for name, text in names.items():
        click.echo(f"  {name:<{width}}  {text}".rstrip())


def comparison(result: Comparison) -> None:
    """Trace, cluster, bound, one row for each policy, and where the runs are.

    Where settings were tried, first all of them, then each policy at its best.
    """
    comparison_head(result)
    baseline = result.best_baseline
    if result.tuning.swept or result.tuning.roles:
        _settings(result)
    table = new_table(
        "policy",
        "makespan_s",
        "throughput_tok_s",
        f"vs {result.best[0].policy}",
        *(["vs best baseline"] if baseline else []),
        *COST_COLUMNS,
        "of bound",
        "of fluid",
        "of equal progress",
        *WHY,
    )
    for p in result.best:
        mine = [run.summary for run in p.runs]
        over = result.over_best_baseline(p)
        table.add_row(
            p.policy,
            estimate_cell(p.makespan_s),
            estimate_cell(p.throughput_tok_s),
            f"{p.speedup:.2f} x",
            *([] if over is None else [f"{over:.2f} x"]),
            *cost_cells(p.cost),
            f"{p.bound_fraction:.2f}",
            f"{p.fluid_fraction:.2f}",
            f"{p.equal_progress_fraction:.2f}",
            *(number_cell(_over_seeds(mine, key)) for key in WHY),
        )
    show(table)
    if baseline:
        click.echo(f"best baseline: {baseline.policy}")
    show_ranking(result.objective, [p.policy for p in result.ranking])
    _runs(result)
    bars = [Bar(p.policy, p.makespan_s, result.bound.makespan_s) for p in result.best]
    draw_bars("makespan in seconds; ### is the bound, which no policy can beat", bars)


def comparison_head(result: Comparison) -> None:
    """Trace, cluster, profile, history, prices, bound and ideals."""
    cluster = result.config.cluster
    _head(
        cluster,
        result.workload,
        result.profiles,
        result.history,
        result.bound,
        result.ideal,
        prices=result.prices.text(result.profiles.pools),
        engines=_tried(result) if result.tuning.swept else _engines(cluster),
    )


def _runs(result: Comparison) -> None:
    """Where the runs are that the table has means of."""
    shown = [run for p in result.best for run in p.runs]
    if len(shown) > len(result.best):
        click.echo(
            f"means over {len(shown) // len(result.best)} seeds, "
            "± 95 % confidence interval of the mean"
        )
    click.echo("runs in " + ", ".join(dict.fromkeys(str(run.path.parent) for run in shown)))
    for run in shown:
        click.echo(f"  {run.path.name}")
    if len(result.runs) > len(shown):
        click.echo(f"  and {len(result.runs) - len(shown):,} at other settings")


def _engines(cluster: ClusterConfig) -> str:
    """Engines that no policy plans, in words."""
    roles = f", GPUs by role {cluster.roles}" if cluster.roles else ""
    return f"TP {cluster.tps}, {cluster.max_running} running per engine{roles}"


def _tried(result: Comparison) -> str:
    """The same of a comparison that tries several settings."""
    base = result.config.cluster.max_running
    tried = result.tuning
    tps, numbers = (" or ".join(map(str, each)) for each in (tried.tps, tried.numbers))
    planned = "" if tried.numbers == (base,) else f" ({base} with a planner)"
    return f"TP {tps}, {numbers} running per engine{planned}"


def _settings(result: Comparison) -> None:
    """The objective at all settings that were tried.

    A row by policy, slots and GPUs by role; a column by TP degree, and one of planned engines.
    """
    by_role = result.tuning.roles
    tried = [p for p in result.policies if p.variant.swept or by_role]
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    """Cells by column."""
    for p in tried:
        variant, cluster = p.variant, p.variant.cluster
        column = PLANNED if variant.planned else f"TP {cluster.tps}"
        roles = cluster.role_gpus.label if cluster.role_gpus else "-"
        row = rows.setdefault((variant.policy, str(cluster.max_running), roles), {})
        row[column] = ("*" if p.best else "") + objective_cell(
            result.objective, p.value(result.objective)
        )
    if not rows:
        _fact("tried", "nothing: every policy here plans its engines itself")
        click.echo()
        return
    what = "makespan in seconds" if result.objective == "makespan" else "dollars of a rollout"
    _fact(
        "tried",
        f"mean {what}{'' if by_role else ' of policies without a planner'}; * the best, "
        "found on the same trace: the hindsight is theirs",
    )
    click.echo()
    used = {column for row in rows.values() for column in row}
    columns = [c for c in (*(f"TP {tp}" for tp in result.tuning.tps), PLANNED) if c in used]
    table = new_table("policy", "running", *(["GPUs by role"] if by_role else []), *columns)
    for (name, number, roles), row in rows.items():
        cells = [row.get(column, "-") for column in columns]
        table.add_row(name, number, *([roles] if by_role else []), *cells)
    show(table)
    click.echo()


def run_summary(result: RunResult, setup: RunSetup | None) -> None:
    """Trace, cluster, bound, and the figures of one run. Without a set-up: the figures only."""
    figures = {key: number_cell(value) for key, value in result.summary.items()}
    if setup is not None:
        bound = setup.bound()
        ideal = setup.ideal(bound)
        cluster = setup.config.cluster
        _head(
            cluster,
            setup.workload,
            setup.profiles,
            setup.history,
            bound,
            ideal,
            prices=run_prices(setup).text(setup.profiles.pools),
            engines=_engines(cluster),
        )
        makespan_s = result.summary["makespan_s"]
        figures["bound_fraction"] = number_cell(bound.makespan_s / makespan_s)
        figures["fluid_fraction"] = number_cell(ideal.fluid_s / makespan_s)
        figures["equal_progress_fraction"] = number_cell(ideal.equal_progress_s / makespan_s)
    lines(f"{result.policy}, seed {result.seed}", figures)
    click.echo(f"run in {result.path}")


def show_lateness(run: str, summary: Mapping[str, Any]) -> None:
    """Say on standard error that the clock of a run was late, or its machine busy, if it was."""
    for note in (lateness_note(summary), load_note(summary)):
        if note is not None:
            click.echo(f"Note: {run}: {note}", err=True)


def show_ranking(objective: Objective, names: Sequence[str]) -> None:
    """Print the order of two names or more, in lines that a terminal has room for."""
    if len(names) > 1:
        console = Console(highlight=False)
        width = console.width if console.is_terminal else WIDEST
        text = f"ranking by {objective}: {', '.join(names)}"
        click.echo(textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False))


def show(table: Table) -> None:
    """Print a table: columns for rows where a terminal is too narrow, and never with cut values."""
    console = Console(highlight=False)
    width = console.width if console.is_terminal else PIPED_WIDTH
    tables = [table]
    if console.is_terminal and _width(table) > width:
        tables = _turned(table, width)
    # Width and height: a console of one alone is 80 columns wide where TERM is dumb.
    console.size = ConsoleDimensions(max(width, *map(_width, tables)), console.height)
    for each in tables:
        console.print(each)


def _width(table: Table) -> int:
    """Columns that a table takes when nothing is cut."""
    return Console(width=WIDEST, height=1).measure(table).maximum  # see `show`


def _turned(table: Table, width: int) -> list[Table]:
    """The same cells with rows for columns, in as many tables as `width` makes necessary."""
    first, *others = ([column.header, *column.cells] for column in table.columns)

    def part(begin: int, end: int) -> Table:
        turned = new_table(*map(str, (first[0], *first[begin:end])))
        for row in others:
            turned.add_row(*map(str, (row[0], *row[begin:end])))
        return turned

    made, begin = [], 1
    for end in range(2, len(first) + 1):
        if end == len(first) or _width(part(begin, end + 1)) > width:
            made.append(part(begin, end))
            begin = end
    return made


def summaries(labels: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """One column for each run, one row for each figure."""
    table = new_table("", *labels)
    for key in dict.fromkeys(key for row in rows for key in row):
        table.add_row(key, *(number_cell(row.get(key)) for row in rows))
    show(table)


def _head(
    cluster: ClusterConfig,
    work: Workload,
    profiles: ClusterProfiles,
    history: HistorySource,
    bound: Bound,
    ideal: Ideal,
    *,
    prices: str,
    engines: str,
) -> None:
    groups = len({script.group for script in work.scripts})
    facts = [
        f"{len(work.scripts):,} trajectories, {groups:,} groups, "
        f"{work.output_tokens:,} output tokens",
        *(work.fill.assumptions if work.fill is not None else ()),
    ]
    if work.dropped:
        facts.append(f"{len(work.dropped):,} trajectories over KV capacity left out")
    _fact("trace", f"{work.trace.name}: {'; '.join(facts)}")
    _fact(
        "cluster",
        f"{profiles.hardware()}, {profiles.model}, {engines}{profiles.layout_label}"
        f"{_resources(cluster)}",
    )
    for each in profiles.classes:
        of_class = f"{each.profile.gpu}: " if cluster.pool else ""
        source, *remarks = profile_lines(each.profile, each.cluster.tp)
        _fact("profile", f"{of_class}{source}")
        for remark in remarks:
            _fact("", remark)
    _fact("history", history.name)
    _fact("prices", prices)
    tools = f", tools {bound.tools_s:,.1f} s" if cluster.tool_capacity else ""
    _fact(
        "bound",
        f"makespan at least {bound.makespan_s:,.1f} s (longest alone {bound.solo_s:,.1f} s, "
        f"capacity {bound.capacity_s:,.1f} s{tools})",
    )
    _fact(
        "ideal",
        f"fluid {ideal.fluid_s:,.1f} s, equal progress {ideal.equal_progress_s:,.1f} s; "
        "neither is a proven bound",
    )
    click.echo()


def _fact(label: str, text: str) -> None:
    """One line of the head, or several of `HEAD_WIDTH` columns, below a label at the left."""
    indent = " " * LABEL_WIDTH
    words = textwrap.fill(
        text,
        HEAD_WIDTH,
        initial_indent=f"{label:<{LABEL_WIDTH}}",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.echo(words)


def _resources(cluster: ClusterConfig) -> str:
    """What the cluster has besides its engines."""
    text = ""
    if cluster.engine_start_s is not None:
        text += f", engines start in {cluster.engine_start_s:g} s"
    if cluster.standby_tp:
        tps = " and ".join(map(str, cluster.standby_tp))
        text += f", engines of TP {tps} asleep for policies that start engines"
    if cluster.host_kv != "none":
        text += f", KV in host memory for each {cluster.host_kv}"
    return text


def new_table(first: str, *columns: str) -> Table:
    """A table of text in the first column and numbers in the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def estimate_cell(e: Estimate) -> str:
    """A mean, with its interval where there are several seeds."""
    return f"{e.mean:,.1f}" if e.ci95 is None else f"{e.mean:,.1f} ± {e.ci95:,.1f}"


def cost_cells(cost: RunCost) -> list[str]:
    """Cells below `COST_COLUMNS`."""
    return [number_cell(cost.gpu_hours), number_cell(cost.dollars)]


def objective_cell(objective: Objective, value: float) -> str:
    """Seconds or dollars by which a row is better or worse than others."""
    return f"{value:,.1f}" if objective == "makespan" else number_cell(value)


def _over_seeds(summaries: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [s[key] for s in summaries if s[key] is not None]
    return sum(values) / len(values) if values else None


def number_cell(value: Any) -> str:
    """A figure for people; of None a dash."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
        case int():
            return f"{value:,}"
        case _:
            return str(value)
