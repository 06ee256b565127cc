"""RL loops as text: a comparison of regimes, and a plan."""

import rich_click as click

from heddle.cli.bars import Bar, draw_bars
from heddle.cli.show_search import settings_text
from heddle.cli.tables import (
    costs,
    estimate_cell,
    show_ranking,
    show_rows,
    show_tried,
    show_verdict,
)
from heddle.comparison.tuning import without_acceptance
from heddle.loops.result import LoopComparison, RegimeResult, plans
from heddle.loops.setup import LoopSetup
from heddle.loops.shared import SharedLoops
from heddle.search.looped import deployment_of_loop

EQUAL = " at equal data"
"""What regimes are ranked by: step or dollars over the length bias."""


def show_loop(result: LoopComparison, framework: str | None) -> None:
    """The verdict, trace, cluster, what was tried, a row for each regime, and settings to paste."""
    plan = deployment_of_loop(result)
    settings = settings_text(plan, plan.policy, framework)
    show_verdict(result.verdict)
    click.echo()
    _head(result)
    if len(result.tried) > len(result.regimes):
        _tried(result)
    _regimes(result)
    _busy(result)
    _trained(result)
    _splits(result)
    draw_bars(
        "step in seconds; ### is its bound",
        [Bar(row.setup.label, row.step_s, row.bound_step_s) for row in result.regimes],
    )
    click.echo(settings)


def show_shared(result: SharedLoops) -> None:
    """What the same GPUs save, and a row for each loop."""
    show_verdict(result.verdict)
    click.echo()
    for name, alone in result.alone.items():
        for text in (*alone.notes, *(f"left out {r}: {why}" for r, why in alone.left_out.items())):
            click.echo(f"{name}: {text}")
    rows = []
    for row, shared in zip(result.rows(), result.shared_s, strict=True):
        found = result.alone[row["config"]].best
        cells = {
            "loop": row["config"],
            "regime": row["regime"],
            "model": row["model"],
            "step_s alone": estimate_cell(found.step_s),
            "step_s shared": estimate_cell(shared),
            "slower": f"{shared.mean / found.step_s.mean:.2f} x",
        }
        for of in ("alone", "shared"):
            cells[f"GPU-hours/1k {of}"] = f"{row[f'{of}_gpu_hours_per_1k_samples']:.3g}"
        rows.append(cells)
    show_rows(rows)
    click.echo(
        f"GPUs in use: {result.busy['rollout']:.0%} of the time for rollout and updates, "
        f"{result.busy['train']:.0%} to train; GPUs that change loops take loop.lend_s and "
        "loop.return_s"
    )


def _head(result: LoopComparison) -> None:
    first = result.tried[0].setup
    config, work = first.config, first.run.workload
    cluster, profiles = config.run.cluster, first.run.profiles
    click.echo(
        f"trace    {work.trace.name}: {len(work.scripts):,} trajectories of "
        f"{len(first.data.groups):,} prompts"
    )
    shared = ", rollout and training in turn" if config.colocated else ""
    hardware = f"{first.gpus} x {profiles.classes[0].profile.gpu_label}"
    if config.train_gpu:
        hardware = f"{profiles.hardware()}, {config.trainer_gpu} beside them to train"
    if config.reward_gpus:
        beside = config.reward_gpu or config.train_gpu
        shared += f", {config.reward_gpus} {beside or 'of them'} for rewards"
    click.echo(
        f"cluster  {hardware}, {cluster.model}{profiles.layout_label}"
        f"{shared}; policy {config.run.policy.preset}, "
        f"{', '.join(map(str, _running(result)))} running per engine"
    )
    again = config.groups * config.batches > len(first.data.groups)
    click.echo(
        f"batch    {config.groups} prompts x {config.samples} samples, {config.batches} steps"
        + ("; the trace begins again after its last prompt" if again else "")
    )
    if result.notes:
        click.echo(f"chosen   {'; '.join(result.notes)}")
    for name, why in result.left_out.items():
        click.echo(f"left out {name}: {why}")
    if config.epoch_plan:
        _epochs(first)
    click.echo(
        f"trainer  {config.train_backend}; training and weight updates take fitted times "
        "(docs/training-time.md)"
    )
    click.echo(f"prices   {first.prices.text(first.gpus_by_class)}\n")


def _epochs(setup: LoopSetup) -> None:
    """What is known of the prompts before the first epoch, and after it."""
    known, prompts = len(setup.lengths), len(setup.data.groups)
    first = "" if known else ", so the first epoch is in random order"
    later = "" if setup.data.cycle == 1 else "; later epochs also by those before in the loop"
    click.echo(
        f"epochs   history {setup.run.history.name} has {known:,} of {prompts:,} prompts"
        f"{first}{later}"
    )


def _regimes(result: LoopComparison) -> None:
    """What regimes are chosen by, and their ranking."""
    config, reference = result.tried[0].setup.config, result.regimes[0]
    rows = []
    for row in result.regimes:
        gpus = {} if config.colocated else {"train GPUs": str(row.setup.train_gpus)}
        gain = result.packing_gain(row)
        packed = {"vs random": "-" if gain is None else f"{gain:.2f} x"}
        rows.append(
            {
                **_setting(result, row, **gpus),
                "step_s": estimate_cell(row.step_s),
                f"vs {reference.setup.label}": f"{reference.step_s.mean / row.step_s.mean:.2f} x",
                **(packed if row.setup.config.epoch_plan else {}),
                "at equal data": f"{row.equal_samples_per_s:.2f}",
                **costs(row.cost_per_1k_samples, "/1k"),
                "of bound": f"{row.bound_fraction:.2f}",
            }
        )
    show_rows(rows)
    show_ranking(result.objective, [row.setup.label for row in result.ranking], EQUAL)


def _busy(result: LoopComparison) -> None:
    """Throughput, and the shares of time and of tokens that were of use."""
    click.echo("\nof the steps that are measured, once a regime's trajectories are under way:")
    click.echo("samples a second, shares of time that are busy, shares of tokens\n")
    rows = []
    for row in result.regimes:
        busy = {"reward busy": row.reward_busy, "env. busy": row.environment_busy}
        rows.append(
            {
                "regime": row.setup.label,
                "measured": str(len(row.runs[0].step_s)),
                "samples_per_s": f"{row.samples_per_s:.2f}",
                "rollout busy": f"{row.rollout_busy:.2f}",
                "train busy": f"{row.train_busy:.2f}",
                **{name: f"{share:.2f}" for name, share in busy.items() if share is not None},
                "wasted": f"{row.wasted_share:.3f}",
                **({} if row.masked_share is None else {"masked": f"{row.masked_share:.3f}"}),
            }
        )
    show_rows(rows)


def _trained(result: LoopComparison) -> None:
    """Age and lengths of what is trained, and why a staleness is not that of the closed form."""
    click.echo("\nwhat is trained: staleness in versions; lengths against those that start\n")
    rows = []
    for row in result.regimes:
        packed, spread = row.setup.config.epoch_plan, row.reward_spread
        rows.append(
            {
                "regime": row.setup.label,
                "staleness": f"{row.mean_staleness:.2f}",
                "closed form": f"{row.closed_staleness:.2f}",
                "oldest": f"{max(row.staleness)}",
                "length bias": f"{row.length_bias:.3f}",
                "KS": f"{row.length_distance:.3f}",
                **({"longest/mean": f"{row.longest_over_mean:.2f}"} if packed else {}),
                **({"reward ±": f"{spread:.3f}"} if packed and spread is not None else {}),
            }
        )
    show_rows(rows)
    for row in result.regimes:
        if row.staleness_reasons:
            closed = f"{row.setup.label}: staleness {row.closed_staleness:.2f} in closed form, "
            closed += f"{row.mean_staleness:.2f} simulated"
            click.echo(f"{closed}: {'; '.join(row.staleness_reasons)}")


def _splits(result: LoopComparison) -> None:
    """Seconds of a step by what the trainer did or waited for."""
    click.echo(
        "\nseconds of a step: the trainer waits for trajectories, or only for rewards of its batch;"
    )
    click.echo("it trains; it waits for a weight update, or for GPUs that change between the two\n")
    rows = [(row.setup.label, row.split_s) for row in result.regimes]
    show_rows(
        [{"regime": name, **{k: f"{s:,.1f}" for k, s in parts.items()}} for name, parts in rows]
    )


def _tried(result: LoopComparison) -> None:
    """The objective of every regime at every setting."""
    what = "step in seconds" if result.objective == "makespan" else "dollars of 1,000 samples"
    often = max(len(row.runs) for row in result.tried)
    alike = all(len(row.runs) == often for row in result.tried)
    seeds = "" if alike else f", first seed; the two best of each ran under {often}"
    click.echo(f"tried    mean {what} by GPUs of the trainer{seeds}; * the best{EQUAL}\n")
    best = {id(row) for row in result.regimes}
    names = [row.setup.label for row in result.regimes]
    splits = dict.fromkeys(row.setup.train_gpus for row in result.tried)
    cells = (
        (
            _setting(result, row),
            f"{row.setup.train_gpus} train",
            id(row) in best,
            (row if alike else row.first_run).value_of_any_length(result.objective),
        )
        for row in sorted(result.tried, key=lambda row: names.index(row.setup.label))
    )
    show_tried(result.objective, cells, [f"{n} train" for n in splits])
    click.echo("")


def _setting(result: LoopComparison, row: RegimeResult, **more: str) -> dict[str, str]:
    """Regime, `more`, TP degree of its engines (a dash where a policy plans them), and steps."""
    cluster = row.setup.config.run.cluster
    drafted = any(each.setup.config.run.cluster.drafts() is not None for each in result.tried)
    return {
        "regime": row.setup.label,
        **more,
        "TP": "-" if plans(row.setup) else cluster.tps,
        **({"running": str(cluster.max_running)} if len(_running(result)) > 1 else {}),
        **({"speculation": without_acceptance(cluster.speculation)} if drafted else {}),
    }


def _running(result: LoopComparison) -> list[int]:
    """Numbers of running steps of an engine that were tried."""
    return list(dict.fromkeys(row.setup.config.run.cluster.max_running for row in result.tried))
