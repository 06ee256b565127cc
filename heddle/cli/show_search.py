"""What a search recommends, as text."""

import shlex
import textwrap
from collections.abc import Sequence

import rich_click as click

from heddle.cli.profile_line import measured_runs, profile_lines
from heddle.cli.tables import VERDICT_WIDTH, costs, explain, fact, show_rows, show_verdict
from heddle.comparison.tuning import without_acceptance
from heddle.config_error import ConfigError
from heddle.planning.blocks import block, framework_of
from heddle.planning.deployment import Deployment, deployment_of_search
from heddle.search.clusters import (
    SearchedClusters,
    verdict_of_clusters,
    words_of,
)
from heddle.search.result import Judged, SearchResult, Tried
from heddle.search.verdict import command_of, faster, verdict_of_search


def show_search(
    result: SearchResult,
    words: Sequence[str],
    *,
    wide: bool = False,
    framework: str | None = None,
) -> None:
    """The verdict, the candidates that were judged, and how to run the best.

    `words` are trace and options of the command that it names; with `wide`, all that was tried.
    """
    settings = settings_text(deployment_of_search(result), result.best.candidate.policy, framework)
    work, profiles = result.setup.workload, result.setup.profiles
    show_verdict(verdict_of_search(result))
    click.echo()
    rows = [*result.judged]
    comes = result.as_it_comes
    if comes is not None and comes not in rows:
        rows.append(comes)
    show_rows([_row(result, each) for each in rows], VERDICT_WIDTH)
    of, drawn = ("one rollout", "rollout") if result.best.loop is None else ("a batch", "loop")
    drawn += "" if result.draws == 1 else "s"
    means = "means" if result.best.loop is None else "means on the trace itself,"
    spread = f" and 95 % prediction intervals of {of}, over {result.draws} {drawn} of prompts that "
    explain(means + (spread + "the search has not seen" if result.draws else " not judged"))
    click.echo()
    if wide:
        show_rows([_tried_row(each) for each in result.tried])
        click.echo(
            "means of the search, over the draws of each; - where all were stopped, or, with 0 "
            "draws, on a part of the cluster only"
        )
        click.echo()
    facts = [f"{work.trajectories:,} trajectories", *(work.fill.assumptions if work.fill else ())]
    if work.dropped:
        facts.append(f"{len(work.dropped):,} trajectories over KV capacity left out")
    fact("trace", f"{work.trace.name}: {'; '.join(facts)}")
    trainer = "" if result.best.loop is None else f" for rollouts, of {sum(result.gpus.values())}"
    fact("cluster", f"{profiles.hardware()}{trainer}, {profiles.model}{profiles.layout_label}")
    _show_notes(result)
    _show_profiles([result])
    fact("history", result.setup.history.name)
    fact("prices", result.prices.text(result.gpus))
    if result.ties:
        fact(
            "ties",
            "within 1 % of the best or not significantly different, and not simpler: "
            f"{'; '.join(result.ties)}",
        )
    _show_searched([result])
    fact("next", shlex.join(command_of(result.best, words)))
    fact("", "--export verl.yaml, vllm.sh or gateway.toml writes files that start it")
    click.echo(settings)


def settings_text(plan: Deployment, policy: str, framework: str | None) -> str:
    """Settings to paste into a framework, or into that of the policy; else why there are none.

    Raises:
        ConfigError: the framework is named, and cannot have them.
    """
    name = framework or framework_of(policy)
    try:
        text = textwrap.indent(block(plan, name), "  ")
    except ConfigError as error:
        if framework is not None:
            raise
        return f"\nno settings of {name} to paste: {error}"
    return f"\nsettings of {name} (plan.framework names another):\n{text}"


def show_searched_clusters(
    result: SearchedClusters, words: Sequence[str], *, wide: bool, framework: str | None
) -> None:
    """Which cluster to take, one row for each, and how to run the best."""
    taken = result.taken
    show_verdict(verdict_of_clusters(result))
    click.echo()
    show_rows([_cluster_row(result, row) for row in result.clusters], VERDICT_WIDTH)
    for name, why in result.left_out.items():
        click.echo(f"left out {name}: {why}")
    click.echo()
    if wide:
        show_search(taken, words_of(taken, words), wide=True, framework=framework)
        return
    dropped = len(taken.setup.workload.dropped)
    if dropped and not taken.notes:
        fact("trace", f"{dropped:,} trajectories over KV capacity left out")
    _show_notes(taken)
    _show_profiles(result.clusters)
    fact("history", taken.setup.history.name)
    gpus = [gpu for row in result.clusters for gpu in row.gpus]
    fact("prices", taken.prices.text(dict.fromkeys(gpus)))
    _show_searched(result.clusters)
    fact("next", shlex.join(command_of(taken.best, words_of(taken, words))))
    policy = taken.best.candidate.policy
    click.echo(settings_text(deployment_of_search(taken), policy, framework))


def _show_notes(result: SearchResult) -> None:
    if result.notes:
        fact("chosen", "; ".join(result.notes))


def _show_profiles(results: Sequence[SearchResult]) -> None:
    """Where the times of each GPU class come from, and their error."""
    profiles = [each.profile for of in results for each in of.setup.profiles.classes]
    for (model, gpu), profile in {(p.model, p.gpu_label): p for p in profiles}.items():
        known = (profile_lines(profile, profile.tps[0])[0], measured_runs(profile))
        fact("profile", f"{model} on {gpu}: {'; '.join(filter(None, known))}")


def _show_searched(results: Sequence[SearchResult]) -> None:
    simulations = sum(each.simulations for each in results)
    seconds = sum(each.seconds for each in results)
    early = "" if all(each.complete for each in results) else "; stopped early: the best so far"
    fact("searched", f"{simulations:,} simulations in {seconds:,.1f} s{early}")


def _cluster_row(result: SearchedClusters, row: SearchResult) -> dict[str, str]:
    best, limits = row.best, result.limits
    broken = ["late"] if limits.late(row) else []
    broken += ["over budget"] if limits.over_budget(row) else []
    limited = limits.deadline_s is not None or limits.dollars is not None
    loop = best.loop
    split = {} if loop is None else {"regime": loop.regime, "train GPUs": str(loop.train_gpus)}
    what, of = _columns(best)
    return {
        "GPUs": row.name,
        **split,
        "policy": best.candidate.full_policy,
        **({"setting": best.setting} if loop is None else {"engines": best.engines_text}),
        what: f"{best.makespan_s.mean:,.1f}",
        of: best.makespan_s.text,
        **costs(row.cost),
        **({"limits": ", ".join(broken) or "kept"} if limited else {}),
    }


def _columns(each: Judged) -> tuple[str, str]:
    """Heads of its time and of the interval."""
    return ("makespan_s", "of one rollout") if each.loop is None else ("batch_s", "of a batch")


def _tried_row(tried: Tried) -> dict[str, str]:
    cluster, mean_s = tried.candidate.cluster, tried.mean_s
    drafts, regime = cluster.speculation, tried.candidate.regime
    loop = {"regime": regime, "train GPUs": str(tried.candidate.train_gpus)} if regime else {}
    if tried.candidate.epoch_plan:
        loop["epochs"] = tried.candidate.epoch_plan
    return {
        "tried": tried.candidate.full_policy,
        **loop,
        "TP": "own" if tried.candidate.planned else cluster.tps,
        "slots": str(cluster.max_running),
        **({} if drafts == "off" else {"drafts": without_acceptance(drafts)}),
        "draws": str(tried.draws),
        "makespan_s": "-" if mean_s is None else f"{mean_s:,.1f}",
    }


def _row(result: SearchResult, each: Judged) -> dict[str, str]:
    candidate, spread = each.candidate, each.makespan_s
    drafts = candidate.cluster.speculation
    ratio = faster(result.best, each)
    loop = each.loop
    rest = {
        "slots": str(candidate.cluster.max_running),
        **({} if drafts == "off" else {"drafts": without_acceptance(drafts)}),
    }
    what, of = _columns(each)
    return {
        **({} if loop is None else {"regime": loop.regime}),
        "policy": candidate.full_policy,
        "engines": each.engines_text,
        **(rest if loop is None else {"train GPUs": str(loop.train_gpus)}),
        **({"epochs": candidate.epoch_plan} if candidate.epoch_plan else {}),
        what: f"{spread.mean:,.1f}",
        of: spread.text,
        "over best": f"{ratio.mean:.3f}" + ("" if ratio.ci95 is None else f" ±{ratio.ci95:.3f}"),
        **costs(result.cost_of(each)),
    }
