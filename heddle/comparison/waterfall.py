"""What each part of `heddle` adds to a baseline: the makespan after one step after the other.

The baseline first runs at the TP degree of the configuration, then at its best, then, where drafts
are tried, with its best speculation, which every step after it has too. Each further step
puts parts of `heddle` in place of the baseline's, and keeps those of the steps before; the last is
`heddle` itself. A part is worth what it adds *in this order*: migration without placement, say, may
be worth more or less. `heddle+never` and its like take one part away instead.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

from heddle.cluster.config import NO_SPECULATION
from heddle.comparison.estimates import Estimate
from heddle.comparison.result import Comparison, PolicyResult
from heddle.comparison.tuning import without_acceptance
from heddle.config_files import ConfigError

PRESET: Final = "heddle"
BASELINE: Final = "verl"
STEPS: Final = (
    ("TP plan", ("equal_progress",)),
    ("placement", ("learned", "presorted")),
    ("order and admission", ("longest_total", "next_round")),
    ("migration", ("balance",)),
    ("widening", ("consolidate",)),
)
"""Parts of the preset, in the order in which they are added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallStep:
    """A row: the baseline, or what one step changes."""

    name: str
    policy: str
    """Name of the comparison's row."""
    makespan_s: Estimate
    saved_s: float
    """Mean makespan of the row before, less this one's; 0 in the first row."""
    share: float | None
    """Of what all steps save; None in the first row, or if they save nothing."""

    def plain(self) -> dict[str, Any]:
        return {
            "step": self.name,
            "policy": self.policy,
            "makespan_s": self.makespan_s.plain(),
            "saved_s": self.saved_s,
            "share": self.share,
        }


def waterfall_policies(baseline: str = BASELINE) -> list[str]:
    """The policies to compare: the baseline, with more parts of `heddle` each, and `heddle`.

    Raises:
        ConfigError: the baseline is `heddle` or made of it.
    """
    if baseline.split("+")[0].startswith(PRESET):
        raise ConfigError(
            f"a waterfall begins with a baseline and ends with {PRESET}: name a baseline, such as "
            f"--policies {BASELINE}, not {baseline}"
        )
    parts = ["+".join(parts) for _, parts in STEPS[:-1]]
    return [*accumulate([baseline, *parts], "{}+{}".format), PRESET]


def waterfall(result: Comparison) -> tuple[WaterfallStep, ...]:
    """The steps of a comparison of `waterfall_policies`, whose baseline ran at several TP degrees.

    The first row is the baseline at the configuration's TP degree, or at the least that it can
    have.
    """
    best, *added = result.best_rows
    degree = result.config.cluster.tp
    first = best.variant.cluster.speculation
    if best.variant.speculation_tried:
        first = NO_SPECULATION
    plain = [
        row
        for row in result.policies
        if row.variant.contest == best.variant.contest and row.variant.cluster.speculation == first
    ]
    untuned = next(row for row in plain if row.variant.cluster.tp == degree)
    tuned = min(plain, key=lambda row: row.value(result.objective))
    rows: list[tuple[str, PolicyResult]] = [
        (f"{untuned.variant.policy}, TP {degree}", untuned),
        (f"best TP degree, {tuned.variant.cluster.tp}", tuned),
        *([(f"speculation, {_drafts(best)}", best)] if best.variant.speculation_tried else []),
        *((name, row) for (name, _), row in zip(STEPS, added, strict=True)),
    ]
    means = [row.makespan_s.mean for _, row in rows]
    saved = [0.0, *(before - after for before, after in pairwise(means))]
    total = means[0] - means[-1]
    return tuple(
        WaterfallStep(
            name=name,
            policy=row.policy,
            makespan_s=row.makespan_s,
            saved_s=saved[at],
            share=saved[at] / total if at and total > 0.0 else None,
        )
        for at, (name, row) in enumerate(rows)
    )


def _drafts(row: PolicyResult) -> str:
    """The drafts of a row, and its TP degree, which is best with them."""
    cluster = row.variant.cluster
    return f"{without_acceptance(cluster.speculation)} at TP {cluster.tp}"
