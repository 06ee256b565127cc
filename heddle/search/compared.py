"""What a comparison says to run."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from heddle.comparison.estimates import LONG_S
from heddle.comparison.tuning import Variant
from heddle.config_error import ConfigError
from heddle.planning.blocks import blocks, runnable
from heddle.planning.deployment import Deployment, deployment_of
from heddle.policy_inputs import needs_oracle
from heddle.search.draws import LEAST_GROUPS
from heddle.search.interval import PredictionInterval, prediction_interval
from heddle.search.policies import FIRST, is_ours
from heddle.search.result import Judged, engines_of, longest_s, setup_of, simplicity
from heddle.search.ties import ties_of
from heddle.search.verdict import Recommendation, command_of, plain_setting, verdict
from heddle.setup import RunSetup

if TYPE_CHECKING:
    from heddle.comparison.result import Comparison, PolicyResult

DIFFERENCES: Final = (
    ("queueing_p99_s", "P99 queueing", " s", -1),
    ("preemptions", "preemptions", "", -1),
    ("prefix_hit", "prefix hits", "", 1),
    ("utilisation", "utilisation", "", 1),
)
"""Figures of a run that tell why it is faster: key, words, unit, and the sign of better."""
NOTABLE: Final = 1.1
"""Ratio from which a difference is named."""


def answer_of(comparison: "Comparison") -> Recommendation | None:
    """What to run of what was compared: of the best that a named framework runs, and of those as
    near to it as a search calls the same, the simplest. None where every policy sees the future."""
    rows = [row for row in comparison.ranking if not needs_oracle(row.variant.policy)]
    if not rows:
        return None
    framework = comparison.framework
    with suppress(ConfigError):
        runs = runnable((row.variant for row in rows), framework)
        rows = [row for row in rows if row.variant in runs]
    same, _ = ties_of({row.variant: row.times for row in rows})
    chosen = min(same, key=partial(simplicity, comparison.config, comparison.workspace, framework))
    rows.sort(key=lambda row: row.variant is not chosen)
    # Those that a sentence or an export names: engines of others need not be planned.
    named = [
        *rows[:2],
        *[row for row in rows[2:] if is_ours(row.variant.policy)][:1],
        *[row for row in rows if not row.variant.planned][:1],
    ]
    kept = {id(row) for row in named}
    judged = [judged_of(comparison, row) for row in rows if id(row) in kept]
    raced = comparison.raced
    comes = None
    if raced is not None and raced.as_it_comes is not None:
        comes = _judged(comparison, raced.as_it_comes, raced.as_it_comes_s)
    elif comparison.tuning.swept:
        own = comparison.config.cluster.tp
        comes = next(
            (
                judged_of(comparison, row)
                for row in comparison.policies
                if row.variant.policy == FIRST and row.variant.cluster.tp == own
            ),
            None,
        )
    return Recommendation(
        judged=tuple(judged),
        as_it_comes=comes,
        bound_s=comparison.bound.makespan_s,
        bound_of="On this trace nothing",
        difference=_difference(rows[0], rows[1]) if len(rows) > 1 else "",
        remark=_remark(comparison),
    )


def _remark(comparison: "Comparison") -> str:
    """That runs take long, or that more could be tried."""
    if comparison.long_runs:
        return f"It is of one seed: a run takes over {LONG_S:.0f} s."
    return comparison.remark or ("" if comparison.tuning.swept else _untried(comparison))


def _untried(comparison: "Comparison") -> str:
    """That other TP degrees may be better for some of what was compared."""
    rows = comparison.best_rows
    fixed = list(dict.fromkeys(row.variant.policy for row in rows if not row.variant.planned))
    if not fixed or comparison.config.cluster.mix or comparison.config.cluster.roles:
        return ""
    named = ", ".join(fixed[:3]) + (" and others" if len(fixed) > 3 else "")
    remedy = "--tp best --sweep cluster.max_running=best"
    return f"Other TP degrees and slots of {named} were not tried: {remedy} tries them."


def judged_of(comparison: "Comparison", row: "PolicyResult") -> Judged:
    """A row of a comparison, with its engines."""
    return _judged(comparison, row.variant, row.times)


def _judged(comparison: "Comparison", variant: Variant, times: tuple[float, ...]) -> Judged:
    return Judged(
        candidate=variant,
        makespan_s=interval_of(comparison, times),
        times=times,
        engines=engines_of(_setup(comparison, variant)),
    )


def interval_of(comparison: "Comparison", times: Sequence[float]) -> PredictionInterval:
    """Of one rollout of other prompts; of too few prompts by the seeds alone."""
    known = longest_s(comparison.workload, comparison.profiles, comparison.config.cluster)
    return prediction_interval(times, (), [known] if len(known) >= LEAST_GROUPS else [])


def _setup(comparison: "Comparison", variant: Variant) -> RunSetup:
    return setup_of(comparison.config, variant, comparison.workspace)


def _difference(best: "PolicyResult", other: "PolicyResult") -> str:
    """The two figures that differ most in favour of the best."""
    found = []
    for key, words, unit, sign in DIFFERENCES:
        mine, theirs = best.figure(key), other.figure(key)
        if mine is None or theirs is None or not min(mine, theirs) > 0.0:
            continue
        ratio = (mine / theirs) ** sign
        if ratio >= NOTABLE:
            found.append((ratio, f"{words} {mine:.3g}{unit} against {theirs:.3g}{unit}"))
    return ", ".join(text for _, text in sorted(found, reverse=True)[:2])


def plain_answer(comparison: "Comparison", words: Sequence[str] | None) -> dict[str, Any]:
    """`verdict` and `recommended` of a comparison as JSON; `words` as of `command_of`."""
    answer = answer_of(comparison)
    if answer is None:
        return {"verdict": None, "recommended": None}
    best = answer.judged[0]
    (cost,) = (row.cost for row in comparison.policies if row.variant is best.candidate)
    return {
        "verdict": verdict(answer),
        "recommended": {
            **plain_setting(best, comparison.profiles.pools, cost),
            "command": None if words is None else command_of(best, words),
            "export": blocks(deployment_of_comparison(comparison, answer), comparison.framework),
        },
    }


def deployment_of_comparison(comparison: "Comparison", answer: Recommendation) -> Deployment:
    return deployment_of(_setup(comparison, answer.judged[0].candidate), answer.judged)
