"""The sentence that says what to run, and the same as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from heddle.comparison.estimates import Estimate, estimate
from heddle.comparison.tuning import without_acceptance
from heddle.cost.prices import RunCost
from heddle.planning.blocks import blocks
from heddle.planning.deployment import LoopSplit, deployment_of_search
from heddle.search.policies import FIRST, OURS
from heddle.search.race import kind_of
from heddle.search.result import Judged, SearchResult
from heddle.search.ties import SAME

SCHEMA = "heddle.plan/2"


def faster(best: Judged, other: Judged) -> Estimate:
    """How many times longer the other takes than the best, over the same drawn rollouts."""
    return estimate([b / a for a, b in zip(best.times, other.times, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What to run, and what else there is."""

    judged: tuple[Judged, ...]
    """The recommended first, then by makespan."""
    as_it_comes: Judged | None
    """`FIRST` with the cluster's own engines."""
    bound_s: float
    bound_of: str = "Nothing"
    """How the sentence on the bound begins."""
    difference: str = ""
    """Figures in which the best and the next best differ."""
    remark: str = ""
    """A last sentence."""


def verdict_of_search(result: SearchResult) -> str:
    return verdict(answer_of_search(result))


def answer_of_search(result: SearchResult) -> Recommendation:
    return Recommendation(
        judged=result.judged,
        as_it_comes=result.as_it_comes,
        bound_s=result.bound_s,
        bound_of="In the mean of these rollouts nothing"
        if result.best.loop is None
        else "On this trace itself nothing",
    )


def verdict(answer: Recommendation) -> str:
    """What to run, in a sentence or more."""
    best = answer.judged[0]
    spread = best.makespan_s
    of = " a batch" if best.loop is not None else ""
    text = f"Run {_named(best)}: {_seconds(spread.mean)} s{of}"
    if spread.low is None or spread.high is None:
        text += " (one run has no interval)"
    elif (low := _seconds(spread.low)) != (high := _seconds(spread.high)):
        text += f" ({low} to {high})"
    mine = best.candidate
    others = [each for each in answer.judged[1:] if kind_of(each.candidate) != kind_of(mine)]
    if others:
        text += f", {_against(best, others[0])} the next best, {_named(others[0])}"
    comes = answer.as_it_comes
    if comes is not None and comes.candidate != mine:
        ratio, regime = faster(best, comes).mean, comes.candidate.regime
        first = f"{regime} under {FIRST}" if regime else FIRST
        text += f", and {ratio:.2f}x as fast as {first} as it comes ({comes.setting})"
    text += "."
    if best.loop is not None:
        text += f" {_staleness(best.loop)}"
    ours = [each for each in others[1:] if each.candidate.policy.partition("+")[0] == OURS[0]]
    if ours and mine.policy.partition("+")[0] != OURS[0]:
        text += f" It is {_against(best, ours[0])} {ours[0].candidate.full_policy}."
    if answer.difference:
        text += f" The difference: {answer.difference}."
    text += f" {answer.bound_of} can be faster than {_seconds(answer.bound_s)} s."
    return f"{text} {answer.remark}".rstrip()


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def _against(best: Judged, other: Judged) -> str:
    """By how much, in percent, with the confidence interval of the mean."""
    ratio = faster(best, other)
    more, spread = ratio.mean - 1.0, ratio.ci95 or 0.0
    if abs(more) <= spread or abs(more) < 0.005:
        return "not significantly different from"
    if -SAME <= more < 0.0:
        return "within 1 % of"
    give_or_take = "" if ratio.ci95 is None else f" (±{spread * 100.0:.0f})"
    return f"{abs(more) * 100.0:.0f} %{give_or_take} {'faster' if more > 0.0 else 'slower'} than"


def _named(each: Judged) -> str:
    drafts = each.candidate.cluster.speculation
    with_drafts = "" if drafts == "off" else f" and {without_acceptance(drafts)} drafts"
    name = f"{each.candidate.full_policy} with {each.setting}{with_drafts}"
    if each.loop is None:
        return name
    trained = "trained in turn" if each.loop.colocated else f"{each.loop.train_gpus} GPUs training"
    packed = f", epochs {each.loop.epoch_plan} by length" if each.loop.epoch_plan else ""
    return f"{each.loop.regime} under {name}, {trained}{packed}"


def _staleness(loop: LoopSplit) -> str:
    """How old trained trajectories are, and what is thrown away."""
    most = f"at most {loop.most_staleness}" if loop.bound_holds else f"up to {loop.oldest} here"
    text = f"Trained trajectories are {loop.mean_staleness:.2g} versions old in the mean, {most}"
    if not (loop.bound_holds or loop.bounded):
        text += ", without a bound"
    if loop.wasted_share >= 0.005:
        text += f"; {loop.wasted_share:.0%} of tokens are thrown away".replace("%", " %")
    return f"{text}."


def command_of(each: Judged, words: Sequence[str], *, seeds: int = 1) -> list[str]:
    """The `heddle compare` that replays a candidate, or the `heddle loop` under so many seeds;
    `words` are trace and options of the search that do not change it."""
    cluster = each.candidate.cluster
    tp = [] if each.candidate.planned or cluster.pool else ["--tp", str(cluster.tp)]
    if cluster.pool and not each.candidate.planned:
        words = _without(words, "cluster.engines", "cluster.pool")
        pools = [f'gpu="{p.gpu}",gpus={p.gpus},tp={p.tp}' for p in cluster.pool]
        files = [f',profile="{p.profile}"' if p.profile else "" for p in cluster.pool]
        listed = ",".join(f"{{{a}{b}}}" for a, b in zip(pools, files, strict=True))
        words += ["--set", f"cluster.engines=[{listed}]"]
    if cluster.roles and not any("cluster.roles" in word for word in words):
        words = [*words, "--set", f"cluster.roles={cluster.roles}"]
    drafts = [] if cluster.speculation == "off" else ["--speculation", cluster.speculation]
    if each.loop is not None:
        if each.loop.epoch_plan and not any("loop.epoch_plan" in word for word in words):
            # Its times are of whole epochs, and not of so many batches.
            words = _without(words, "loop.batches")
        split = [] if each.loop.colocated else ["--set", f"loop.train_gpus={each.loop.train_gpus}"]
        return [
            *("heddle", "loop", *words, "--regimes", each.loop.regime),
            *("--policy", each.candidate.policy),
            *([] if each.candidate.planned else ["--tp", str(cluster.tp)]),
            *("--max-running", cluster.running),
            *(*split, *drafts, "--seeds", str(seeds)),
            *(["--set", f"loop.epoch_plan={plan}"] if (plan := each.loop.epoch_plan) else []),
        ]
    return [
        *("heddle", "compare", *words),
        *("--policies", each.candidate.policy),
        *tp,
        *("--max-running", cluster.running),
        *drafts,
    ]


def _without(words: Sequence[str], *keys: str) -> list[str]:
    """Words without `--set` of these keys."""
    kept: list[str] = []
    for word in words:
        if kept and kept[-1] == "--set" and word.partition("=")[0].strip() in keys:
            kept.pop()
        else:
            kept.append(word)
    return kept


def plain(result: SearchResult, words: Sequence[str]) -> dict[str, Any]:
    """As JSON; equal inputs give equal values but for `searched.seconds`."""
    setup = result.setup
    return {
        "schema": SCHEMA,
        "verdict": verdict_of_search(result),
        "recommended": {
            **_plain(result, result.best),
            "command": command_of(result.best, words),
            "export": blocks(deployment_of_search(result)),
        },
        "candidates": [_plain(result, each) for each in result.judged],
        "as_it_comes": None if result.as_it_comes is None else _plain(result, result.as_it_comes),
        "ties": list(result.ties),
        "bound_s": result.bound_s,
        **({"notes": list(result.notes)} if result.notes else {}),
        "searched": {
            "simulations": result.simulations,
            "seconds": round(result.seconds, 3),
            "draws": result.draws,
            "complete": result.complete,
            **({"interrupted": True} if result.interrupted else {}),
        },
        "trace": setup.workload.plain(),
        "cluster": {
            "gpus": sum(result.gpus.values()),
            "gpu": ", ".join(result.gpus),
            "model": setup.profiles.model,
            "profile": setup.profiles.name,
            **setup.profiles.marks,
        },
        "history": setup.history.plain(),
        "prices": result.prices.plain(result.gpus),
    }


def _plain(result: SearchResult, each: Judged) -> dict[str, Any]:
    return plain_setting(each, result.gpus, result.cost_of(each))


def plain_setting(each: Judged, pools: Mapping[str, int], cost: RunCost) -> dict[str, Any]:
    """A candidate on GPUs by type, as JSON."""
    cluster, gpus = each.candidate.cluster, list(pools)
    return {
        "policy": each.candidate.full_policy,
        "max_running": cluster.max_running,
        "speculation": cluster.speculation,
        "engines": [
            {"gpu": shape.gpu, "count": count, "tp": shape.tp, "role": shape.role}
            for shape, count in each.engines
        ],
        "tp": each.engines[0][0].tp if len(each.engines) == 1 else None,
        "gpus": sum(pools.values()),
        "gpu": gpus[0] if len(gpus) == 1 else None,
        "makespan_s": each.makespan_s.plain(),
        **cost.plain(),
        "loop": None
        if each.loop is None
        else {**asdict(each.loop), "batch_s": each.makespan_s.plain()},
    }
