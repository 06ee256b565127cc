"""Rollouts as text: a comparison, a run, and what each part of `heddle` adds to a baseline."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

import rich_click as click

from heddle.cli.bars import Bar, draw_bars
from heddle.cli.profile_line import profile_lines
from heddle.cli.show_search import settings_text
from heddle.cli.tables import (
    VERDICT_WIDTH,
    costs,
    estimate_cell,
    explain,
    fact,
    lines,
    new_table,
    number_cell,
    percent,
    short_estimate,
    show,
    show_ranking,
    show_rows,
    show_tried,
    show_verdict,
)
from heddle.cluster.config import ClusterConfig
from heddle.cluster.drafters import acceptance_of
from heddle.comparison.result import Comparison, PolicyResult
from heddle.comparison.tuning import without_acceptance
from heddle.comparison.waterfall import PRESET, WaterfallStep
from heddle.cost.prices import Prices
from heddle.runs.bound import Bound
from heddle.runs.conditions import lateness_note, load_note
from heddle.runs.ideal import Ideal
from heddle.search.compared import answer_of, deployment_of_comparison
from heddle.search.policies import FIRST
from heddle.search.result import Judged
from heddle.search.verdict import command_of, verdict
from heddle.setup import RunSetup
from heddle.simulation import RUN_KEYS, RunResult, run_prices

WHY = tuple(key for key in RUN_KEYS if key not in ("makespan_s", "throughput_tok_s"))
"""Figures of a run that say why it is fast or slow."""
SHORT: Final = {"queueing_p99_s": "p99 queue", "prefix_hit": "prefix hits"}
"""The same in the table that is not wide, with their heads."""
PLANNED = "planned"
"""Column of policies that choose the TP degrees of their engines."""


def comparison(
    result: Comparison,
    words: Sequence[str],
    *,
    wide: bool = False,
) -> None:
    """What to run, one row for each policy, how to run the best, and what was compared.

    With `wide` all columns, what was tried, and a chart. Of one run, all its figures. `words` are
    trace and options of the command that replays the best.
    """
    tried = bool(result.tuning.swept or result.tuning.roles)
    if len(result.runs) == 1 and not tried:
        comparison_head(result)
        (row,), (run,) = result.policies, result.runs
        _run_figures(run, row.bound_fraction, row.fluid_fraction, row.equal_progress_fraction)
        return
    answer = answer_of(result)
    if answer is not None:
        plan = deployment_of_comparison(result, answer)
        policy = answer.judged[0].candidate.policy
        settings = settings_text(plan, policy, result.framework)
        show_verdict(verdict(answer))
        click.echo()
    if wide and tried and result.raced is None:
        _settings(result)
    if wide:
        show_rows([_row(result, p) for p in result.best_rows])
    else:
        comes = None if answer is None or answer.as_it_comes is None else answer.as_it_comes
        show_rows([_short_row(result, p, comes) for p in result.ranking], VERDICT_WIDTH)
        for line in _legend(result, comes).splitlines():
            explain(line)
    click.echo()
    if answer is not None:
        best = answer.judged[0]
        fact("next", shlex.join(command_of(best, words)))
        click.echo(f"{settings}\n")
    comparison_head(result)
    if result.best_baseline:
        click.echo(f"best baseline: {result.best_baseline.policy}")
    if wide:
        show_ranking(result.objective, [p.policy for p in result.ranking])
    _runs(result, every=wide)
    if wide:
        bars = [Bar(p.policy, p.makespan_s, result.bound.makespan_s) for p in result.best_rows]
        draw_bars("makespan in seconds; ### is the bound, which no policy can beat", bars)


def _short_row(result: Comparison, p: PolicyResult, comes: Judged | None) -> dict[str, str]:
    """At most eight cells of a policy, by column."""
    best = result.ranking[0]
    versus = None if comes is None else comes.makespan_s.mean / p.makespan_s.mean
    return {
        "policy": p.policy,
        "makespan_s": short_estimate(p.makespan_s),
        "vs best": f"{p.makespan_s.mean / best.makespan_s.mean:.2f}",
        **({} if versus is None else {f"vs {FIRST}": f"{versus:.2f} x"}),
        **costs(p.cost),
        **{name: number_cell(p.figure(key)) for key, name in SHORT.items()},
    }


def _legend(result: Comparison, comes: Judged | None) -> str:
    """What the columns of `_short_row` mean."""
    text = "vs best: makespan over the least"
    if comes is not None:
        text += f"; vs {FIRST}: speed over that of {FIRST} as it comes ({comes.setting})"
    if result.raced is not None:
        text += (
            "\neach policy at the setting that is best on this trace: "
            f"{result.raced.simulations:,} simulations in {result.raced.seconds:,.1f} s"
        )
    return text + "\n--wide has all columns"


def _row(result: Comparison, p: PolicyResult) -> dict[str, str]:
    """The cells of a policy by column."""
    over = result.over_best_baseline(p)
    return {
        "policy": p.policy,
        "makespan_s": estimate_cell(p.makespan_s),
        "throughput_tok_s": estimate_cell(p.throughput_tok_s),
        f"vs {result.best_rows[0].policy}": f"{p.speedup:.2f} x",
        **({} if over is None else {"vs best baseline": f"{over:.2f} x"}),
        **costs(p.cost),
        "of bound": f"{p.bound_fraction:.2f}",
        "of fluid": f"{p.fluid_fraction:.2f}",
        "of equal progress": f"{p.equal_progress_fraction:.2f}",
        **{key: number_cell(p.figure(key)) for key in WHY},
    }


def comparison_head(result: Comparison) -> None:
    """Trace, cluster, profile, history, prices, bound and ideals."""
    engines = _tried(result) if result.tuning.swept else _engines(result.config.cluster)
    _head(result, result.bound, result.ideal, result.prices, engines)
    fill, row = result.workload.fill, result.ranking[0]
    if fill is None or not any(each.drawn for each in fill.fields.values()):
        return
    times = [run.summary["makespan_s"] for run in row.runs]
    known = f"{row.policy} takes {min(times):.3g} to {max(times):.3g} s with those of these seeds"
    fact("missing", known if len(times) > 1 else "--seeds 3 shows what other drawn values change")


def _runs(result: Comparison, *, every: bool) -> None:
    """Where the runs are that the table has means of; with `every`, their names."""
    shown = [run for p in result.best_rows for run in p.runs]
    _seeds(len(shown) // len(result.best_rows))
    click.echo("runs in " + ", ".join(dict.fromkeys(str(run.path.parent) for run in shown)))
    for run in shown if every else ():
        click.echo(f"  {run.path.name}")
    if every and len(result.runs) > len(shown):
        click.echo(f"  and {len(result.runs) - len(shown):,} at other settings")


def _engines(cluster: ClusterConfig) -> str:
    """Engines that no policy plans, in words."""
    roles = f", GPUs by role {cluster.roles}" if cluster.roles else ""
    return f"TP {cluster.tps}, {cluster.running} running per engine{roles}"


def _tried(result: Comparison) -> str:
    """The same of a comparison that tries several settings."""
    base = result.config.cluster.max_running
    tried = result.tuning
    tps, numbers = (" or ".join(map(str, each)) for each in (tried.tps, sorted(tried.numbers)))
    same = tried.numbers == (base,) or result.raced is not None
    planned = "" if same else f" ({base} with a planner)"
    return f"TP {tps}, {numbers} running per engine{planned}"


def _settings(result: Comparison) -> None:
    """The objective at all settings that were tried.

    A row by policy, slots and GPUs by role; a column by TP degree, and one of planned engines.
    """
    by_role = result.tuning.roles
    tried = [p for p in result.policies if p.variant.swept or by_role]
    if not tried:
        fact("tried", "nothing: every policy here plans its engines itself")
        click.echo()
        return
    everyone = by_role or result.tuning.speculations
    what = "makespan in seconds" if result.objective == "makespan" else "dollars of a rollout"
    fact(
        "tried",
        f"mean {what}{'' if everyone else ' of policies without a planner'}; * the best, "
        "found on the same trace: the hindsight is theirs",
    )
    click.echo()
    used = {_column(p) for p in tried}
    columns = [*(f"TP {tp}" for tp in result.tuning.tps), PLANNED]
    cells = ((_setting(p, by_role), _column(p), p.best, p.value(result.objective)) for p in tried)
    show_tried(result.objective, cells, [column for column in columns if column in used])
    click.echo()


def _setting(p: PolicyResult, by_role: bool) -> dict[str, str]:
    cluster = p.variant.cluster
    head = {"policy": p.variant.policy, "running": str(cluster.max_running)}
    if p.variant.speculation_tried:
        head["speculation"] = without_acceptance(cluster.speculation)
    roles = cluster.role_gpus.label if cluster.role_gpus else "-"
    return head | ({"GPUs by role": roles} if by_role else {})


def _column(p: PolicyResult) -> str:
    """The column of a setting: its TP degree, or that it is planned."""
    return PLANNED if p.variant.planned else f"TP {p.variant.cluster.tps}"


def run_summary(result: RunResult, setup: RunSetup | None) -> None:
    """Trace, cluster, bound, and the figures of one run. Without a set-up: the figures only."""
    if setup is None:
        _run_figures(result)
        return
    bound = setup.bound()
    ideal = setup.ideal(bound)
    _head(setup, bound, ideal, run_prices(setup), _engines(setup.config.cluster))
    least = (bound.makespan_s, ideal.fluid_s, ideal.equal_progress_s)
    _run_figures(result, *(seconds / result.summary["makespan_s"] for seconds in least))


def _run_figures(result: RunResult, *fractions: float) -> None:
    """Figures of one run; `fractions` are those of the bound and of the ideals."""
    names = ("bound_fraction", "fluid_fraction", "equal_progress_fraction")
    figures = {**result.summary, **dict(zip(names, fractions, strict=False))}
    shown = {key: number_cell(value) for key, value in figures.items()}
    lines(f"{result.policy}, seed {result.seed}", shown)
    click.echo(f"run in {result.path}")


def show_lateness(run: str, summary: Mapping[str, Any]) -> None:
    """Say on standard error that the clock of a run was late, or its machine busy, if it was."""
    for note in (lateness_note(summary), load_note(summary)):
        if note is not None:
            click.echo(f"Note: {run}: {note}", err=True)


def summaries(labels: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """One column for each run, one row for each figure."""
    table = new_table("", *labels)
    for key in dict.fromkeys(key for row in rows for key in row):
        table.add_row(key, *(number_cell(row.get(key)) for row in rows))
    show(table)


def _drafts(of: Comparison | RunSetup) -> list[str]:
    """Speculative decoding of each class, with where its acceptance is from."""
    found = []
    for each in of.profiles.classes:
        drafts = each.drafts(each.cluster.tp)
        if drafts is None:
            continue
        stated = each.cluster.drafts()
        if stated is not None and stated.accepted is not None:
            source = "as given"
        else:
            known = acceptance_of(each.profile.model, drafts.speculation.method)
            source = f"assumed from {known.source}" if known.assumed else known.source
        found.append(f"{drafts.speculation}; acceptance {source}")
    return found


def _head(
    of: Comparison | RunSetup, bound: Bound, ideal: Ideal, prices: Prices, engines: str
) -> None:
    cluster, work, profiles = of.config.cluster, of.workload, of.profiles
    groups = len({script.group for script in work.scripts})
    facts = [
        f"{len(work.scripts):,} trajectories, {groups:,} groups, "
        f"{work.output_tokens:,} output tokens",
        *(work.fill.assumptions if work.fill is not None else ()),
    ]
    if work.dropped:
        facts.append(f"{len(work.dropped):,} trajectories over KV capacity left out")
    fact("trace", f"{work.trace.name}: {'; '.join(facts)}")
    fact(
        "cluster",
        f"{profiles.hardware()}, {profiles.model}, {engines}{profiles.layout_label}"
        f"{_resources(cluster)}",
    )
    for each in profiles.classes:
        of_class = f"{each.profile.gpu}: " if cluster.pool else ""
        own = each.cluster
        source, *remarks = profile_lines(each.profile, own.tp, own.max_running)
        fact("profile", f"{of_class}{source}")
        for remark in remarks:
            fact("", remark)
    for line in _drafts(of):
        fact("drafts", line)
    fact("history", of.history.name)
    fact("prices", prices.text(profiles.pools))
    tools = f", tools {bound.tools_s:,.1f} s" if cluster.tool_capacity else ""
    fact(
        "bound",
        f"makespan at least {bound.makespan_s:,.1f} s (longest alone {bound.solo_s:,.1f} s, "
        f"capacity {bound.capacity_s:,.1f} s{tools})",
    )
    fact(
        "ideal",
        f"fluid {ideal.fluid_s:,.1f} s, equal progress {ideal.equal_progress_s:,.1f} s; "
        "neither is a proven bound",
    )
    click.echo()


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


def show_waterfall(result: Comparison, steps: Sequence[WaterfallStep]) -> None:
    """Trace, cluster, bound, and one row for each step."""
    comparison_head(result)
    show_rows(
        [
            {
                "step": step.name,
                "makespan_s": estimate_cell(step.makespan_s),
                "saved_s": "" if step is steps[0] else f"{step.saved_s:+,.1f}",
                "share of gain": "" if step.share is None else percent(step.share, ".0%"),
                "of bound": f"{result.bound.makespan_s / step.makespan_s.mean:.2f}",
            }
            for step in steps
        ]
    )
    untuned, tuned, last = steps[0], steps[1], steps[-1]
    said = [
        f"{percent(1.0 - last.makespan_s.mean / each.makespan_s.mean)} against {each.policy}"
        for each in (tuned, untuned)
    ]
    click.echo(f"{PRESET} saves {said[0]}, its best TP degree, and {said[1]}")
    click.echo("each step keeps those before it; the best TP degree is found on the same trace")
    _seeds(len(result.policies[0].runs))


def _seeds(number: int) -> None:
    if number > 1:
        click.echo(f"means over {number} seeds, ± 95 % confidence interval of the mean")
